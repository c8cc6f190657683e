"""Targets: names, figures, what a compiler is told of a chip, and the sentence where it isn't installed."""

import os
from importlib.machinery import ModuleSpec
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from flowgrpo.planning import targets
from flowgrpo.planning.targets import (
    CHIPS,
    TOPOLOGIES,
    check_dtype,
    compile_options,
    gpu_description,
    lowering_platforms,
    missing_compiler,
    parse_target,
    target_devices,
)
from flowgrpo.types import BadInput


def test_target_is_a_chip_and_a_count():
    assert parse_target("v5e-8")[::2] == ("v5e-8", 8)
    assert parse_target("a100")[::2] == ("a100-1", 1)
    assert parse_target("h100-16").kind == "h100"
    assert parse_target("v5p-8").chip is CHIPS["v5p"]
    assert lowering_platforms(parse_target("l4-1")) == ("cuda",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("v7-8", "there are no figures of the chip 'v7'; choose from v4, v5e"),
        ("v5e:2x4", "must be a chip and how many, as v5e-8"),
        ("", "must be a chip and how many"),
        ("v5e-3", "v5e comes in 1, 4, 8, 16"),
        ("h100-12", "take 1 to 8 devices, or a multiple of 8 up to 512"),
        ("l4-0", "take 1 to 8 devices"),
        ("cpu-1024", "up to 512"),
    ],
)
def test_invalid_targets_are_refused(text, message):
    with pytest.raises(BadInput, match=message):
        parse_target(text)


def test_topologies_have_their_number_of_devices():
    for kind, known in TOPOLOGIES.items():
        for count, name in known.items():
            chips, cores = 1, 2 if kind == "v4" else 1
            for length in name.split("x"):
                chips *= int(length)
            assert chips * cores == count or (count == 1 and chips == 4), (kind, count)


def test_specifications_have_plausible_units():
    for name, chip in CHIPS.items():
        if chip.platform == "cpu":
            continue
        assert 10e9 < chip.memory < 200e9, name
        assert 5e13 < chip.flops < 2e15, name
        assert chip.link < chip.bandwidth < 1e13, name
        assert (chip.clock > 0) == (chip.platform == "tpu"), name


def test_gpu_description_has_the_specifications():
    description = gpu_description(CHIPS["t4"])
    assert "major: 7 minor: 5 feature_extension: NONE" in description
    assert "core_count: 40" in description
    assert "memory_bandwidth: 320000000000" in description
    assert "ACCELERATED_FEATURES" in gpu_description(CHIPS["h100"])
    assert description.count("{") == description.count("}")
    assert compile_options("cuda")["xla_gpu_autotune_level"] == 0
    assert "xla_gpu_autotune_level" not in compile_options("tpu")


def test_unsupported_16_bit_type_is_refused():
    with pytest.raises(BadInput, match="t4 has no products of bfloat16: compute in float16"):
        check_dtype(parse_target("t4"), jnp.bfloat16)
    with pytest.raises(BadInput, match="v5e has no products of float16: compute in bfloat16"):
        check_dtype(parse_target("v5e"), "float16")
    check_dtype(parse_target("t4"), "float16")
    check_dtype(parse_target("t4"), "float32")


@pytest.mark.parametrize(
    ("name", "package"), [("v5e-8", "libtpu"), ("h100-1", "jax-cuda13-plugin and jax-cuda13-pjrt")]
)
def test_missing_compiler_is_named_with_its_extra(monkeypatch, name, package):
    def absent(module):
        if "." in module:
            raise ModuleNotFoundError(module)

    monkeypatch.setattr(targets, "find_spec", absent)
    with pytest.raises(BadInput, match=rf"--target={name} needs {package}: pip install .*libtpu"):
        target_devices(parse_target(name))
    monkeypatch.setattr(targets, "find_spec", lambda module: ModuleSpec(module, None))
    assert missing_compiler("cuda") is None
    assert missing_compiler("cpu") is None


def test_refused_topology_is_reported(monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("no such machine")

    monkeypatch.setattr(targets, "missing_compiler", lambda _: None)
    monkeypatch.setattr(targets.topologies, "get_topology_desc", refuse)
    for name in targets.TPU_ENVIRONMENT:  # put back what is set here
        monkeypatch.setenv(name, os.environ.get(name, "as it was"))
    for name in ("v5e-8", "h100-16"):
        with pytest.raises(BadInput, match=rf"{name}: its compiler refuses the topology \(no such machine\)"):
            target_devices(parse_target(name))
    assert os.environ["TPU_SKIP_MDS_QUERY"] in ("as it was", "1")


def test_target_devices_have_the_count_of_the_target(monkeypatch):
    described = SimpleNamespace(devices=list(range(16)))
    asked = []
    monkeypatch.setattr(targets, "missing_compiler", lambda _: None)
    monkeypatch.setattr(targets, "set_environment", lambda: None)
    monkeypatch.setattr(
        targets.topologies, "get_topology_desc", lambda *name, **how: asked.append((name, how)) or described
    )
    assert target_devices(parse_target("v5e-1")) == [0]
    assert target_devices(parse_target("v5e-16")) == list(range(16))
    assert [how["topology_name"] for _, how in asked] == ["v5e:2x2", "v5e:4x4"]
    assert target_devices(parse_target("h100-16")) == list(range(16))
    assert asked[-1][1]["topology"] == "1x2x8"
    assert target_devices(parse_target("h100-4")) == list(range(4))
    assert asked[-1][1]["topology"] == "1x1x4"


def test_virtual_devices_are_those_of_this_process():
    assert len(target_devices(parse_target("cpu-8"))) == 8
    with pytest.raises(BadInput, match="cpu-16 has more devices than the 8 here: give --cpu_devices"):
        target_devices(parse_target("cpu-16"))
