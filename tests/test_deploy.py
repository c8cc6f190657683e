"""The files for real clusters: Ray's own schema for one, what KubeRay requires of the other, and flags that exist."""

import json
import re
from importlib.util import find_spec
from pathlib import Path

import jsonschema
import yaml
from commands import run_module

DEPLOY = Path(__file__).parent.parent / "deploy"


def test_the_cluster_file_fits_rays_schema():
    found = find_spec("ray")
    assert found is not None
    assert found.origin is not None
    schema = json.loads((Path(found.origin).parent / "autoscaler" / "ray-schema.json").read_text())
    config = yaml.safe_load((DEPLOY / "ray-cluster.yaml").read_text())
    jsonschema.validate(config, schema)
    assert config["head_node_type"] in config["available_node_types"]


def test_the_job_has_what_kuberay_requires():
    job = yaml.safe_load((DEPLOY / "rayjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"], "name" in job["metadata"]) == ("ray.io/v1", "RayJob", True)
    assert job["spec"].keys() == {"entrypoint", "shutdownAfterJobFinishes", "backoffLimit", "rayClusterSpec"}
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster.keys() == {"headGroupSpec", "workerGroupSpecs", "rayVersion"}
    head, *workers = groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    assert head.keys() == {"rayStartParams", "template"}
    for group in workers:
        assert group.keys() == head.keys() | {"groupName", "replicas", "minReplicas", "maxReplicas"}
        assert 0 <= group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    for group in groups:
        assert {type(value) for value in group["rayStartParams"].values()} <= {str}  # as `ray start` wants them
        spec = group["template"]["spec"]
        assert all(box.keys() >= {"name", "image", "resources"} for box in spec["containers"])
        mounted = {mount["name"] for box in spec["containers"] for mount in box["volumeMounts"]}
        assert mounted == {volume["name"] for volume in spec["volumes"]}
    lock = (DEPLOY.parent / "requirements.lock").read_text()
    assert f"ray=={cluster['rayVersion']}\n" in lock


def test_the_commands_have_flags_that_there_are():
    job = yaml.safe_load((DEPLOY / "rayjob.yaml").read_text())
    text = job["spec"]["entrypoint"] + (DEPLOY / "ray-cluster.yaml").read_text()
    named = set(re.findall(r"--(\w+)", text)) - {"c"}
    known = set(re.findall(r"--(?:\[no\])?(\w+)", run_module("experiments.cluster", "--help").stdout))
    assert {"address", "workdir"} <= named
    assert named <= known, named - known
