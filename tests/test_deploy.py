"""The files for real clusters: Ray's own schema for one, what KubeRay requires of the other, and flags that exist."""

import json
import re
from importlib.util import find_spec
from pathlib import Path

import jsonschema
import pytest
import yaml
from commands import run_module

DEPLOY = Path(__file__).parent.parent / "deploy"
POD = {
    "type": "object",
    "required": ["spec"],
    "properties": {
        "spec": {
            "type": "object",
            "required": ["containers"],
            "properties": {
                "containers": {
                    "type": "array",
                    "minItems": 1,
                    "items": {"type": "object", "required": ["name", "image", "resources"]},
                }
            },
        }
    },
}
START = {"type": "object", "additionalProperties": {"type": "string"}}  # of `ray start`: strings all
RAYJOB = {
    "type": "object",
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "ray.io/v1"},
        "kind": {"const": "RayJob"},
        "spec": {
            "type": "object",
            "required": ["entrypoint", "rayClusterSpec"],
            "additionalProperties": False,
            "properties": {
                "entrypoint": {"type": "string"},
                "shutdownAfterJobFinishes": {"type": "boolean"},
                "backoffLimit": {"type": "integer"},
                "rayClusterSpec": {
                    "type": "object",
                    "required": ["headGroupSpec", "workerGroupSpecs", "rayVersion"],
                    "properties": {
                        "rayVersion": {"type": "string"},
                        "headGroupSpec": {
                            "type": "object",
                            "required": ["rayStartParams", "template"],
                            "properties": {"rayStartParams": START, "template": POD},
                        },
                        "workerGroupSpecs": {
                            "type": "array",
                            "items": {
                                "type": "object",
                                "required": ["groupName", "replicas", "rayStartParams", "template"],
                                "properties": {
                                    "groupName": {"type": "string"},
                                    "replicas": {"type": "integer", "minimum": 0},
                                    "minReplicas": {"type": "integer", "minimum": 0},
                                    "maxReplicas": {"type": "integer", "minimum": 1},
                                    "rayStartParams": START,
                                    "template": POD,
                                },
                                "additionalProperties": False,
                            },
                        },
                    },
                },
            },
        },
    },
}


def test_the_cluster_file_fits_rays_schema():
    found = find_spec("ray")
    assert found is not None
    assert found.origin is not None
    schema = json.loads((Path(found.origin).parent / "autoscaler" / "ray-schema.json").read_text())
    config = yaml.safe_load((DEPLOY / "ray-cluster.yaml").read_text())
    jsonschema.validate(config, schema)
    assert config["head_node_type"] in config["available_node_types"]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(config | {"max_worker": 1}, schema)


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
    ran = run_module("experiments.cluster", "--help")
    known = set(re.findall(r"--(?:\[no\])?(\w+)", ran.stdout))
    assert {"address", "workdir"} <= named
    assert named <= known, named - known
