"""The files for real clusters: Ray's own schema for one, what KubeRay requires of the other, and flags that exist."""

import json
import re
from importlib.util import find_spec
from pathlib import Path

import jsonschema
import yaml
from commands import run_module

DEPLOY = Path(__file__).parent.parent / "deploy"


def thing(required: str, /, **properties) -> dict:
    """The schema of an object that must have some of its properties."""
    return {"type": "object", "required": required.split(), "properties": properties}


def many(items: dict) -> dict:
    return {"type": "array", "minItems": 1, "items": items}


POD = thing("spec", spec=thing("containers", containers=many(thing("name image resources"))))
START = {"type": "object", "additionalProperties": {"type": "string"}}  # of `ray start`: strings all
COUNTS = {name: {"type": "integer", "minimum": 0} for name in ("replicas", "minReplicas", "maxReplicas")}
GROUP = thing("rayStartParams template", rayStartParams=START, template=POD)
WORKERS = thing(
    "groupName replicas rayStartParams template", groupName={"type": "string"}, **COUNTS, **GROUP["properties"]
)
CLUSTER = thing(
    "headGroupSpec workerGroupSpecs rayVersion",
    headGroupSpec=GROUP,
    workerGroupSpecs=many(WORKERS | {"additionalProperties": False}),
    rayVersion={"type": "string"},
)
JOB = thing(
    "entrypoint rayClusterSpec",
    entrypoint={"type": "string"},
    shutdownAfterJobFinishes={"type": "boolean"},
    backoffLimit={"type": "integer"},
    rayClusterSpec=CLUSTER,
)
RAYJOB = thing(
    "apiVersion kind metadata spec",
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayJob"},
    spec=JOB | {"additionalProperties": False},
)


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
    jsonschema.validate(job, RAYJOB)
    cluster = job["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        spec = group["template"]["spec"]
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
