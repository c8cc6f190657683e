"""The plan: shapes are those that were published, what fits is told from what does not, and the best are compiled."""

import json
from dataclasses import replace

import pytest

import flowgrpo as fg
from flowgrpo.models.lora import LoraConfig
from flowgrpo.parallel.sharding import MESH_AXES, parse_mesh
from flowgrpo.planning.cost_model import Workload, count_parameters
from flowgrpo.planning.mesh_search import (
    GIB,
    PUBLISHED,
    Machine,
    MemorySettings,
    estimate,
    list_meshes,
    rank_candidates,
    shape_of_model,
    suggest_remedies,
)
from flowgrpo.planning.targets import parse_target
from tests.experiments.conftest import check_refused, last_line

COUNTS = {
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-8b": 8_190_735_360,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.1-8b": 8_030_261_248,
}
MACHINE = Machine(80 * GIB, 3e14, 2e12, 1e11)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_shapes_have_the_published_number_of_parameters(name):
    assert count_parameters(shape_of_model(name)) == COUNTS[name]


def test_a_folder_is_a_shape_too(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["qwen2.5-0.5b"]))
    assert shape_of_model(str(tmp_path)) == shape_of_model("qwen2.5-0.5b")
    with pytest.raises(fg.BadInput, match=r"neither a folder with a config\.json nor one of the shapes qwen2"):
        shape_of_model(str(tmp_path / "nothing"))


def test_what_fits_comes_first_and_the_fastest_of_it_before_all():
    config, job = shape_of_model("qwen2.5-7b"), Workload(rows=64, slots=64, dtype="float32", compute_dtype="bfloat16")
    found = rank_candidates(config, job, MemorySettings(moved=True), MACHINE, list(list_meshes(config, 8)))
    fits = [x.peak_bytes <= MACHINE.memory for x in found]
    assert 0 < sum(fits) < len(fits)  # of both kinds, or else any order would pass
    assert fits == sorted(fits, reverse=True)
    seconds = [x.seconds for x, fit in zip(found, fits, strict=True) if fit]
    assert seconds == sorted(seconds)
    # 7.6e9 parameters with two moments in float32 are 85 GiB: no single device of 80 holds them.
    assert not any(fit for x, fit in zip(found, fits, strict=True) if x.mesh["data"] == 8)


def test_more_devices_and_fewer_rows_at_a_time_need_less_memory():
    config, job = shape_of_model("qwen2.5-7b"), Workload(rows=64, slots=64)
    small, large = ({"data": 1, "fsdp": size, "tensor": 1} for size in (8, 64))
    assert (
        estimate(config, job, MemorySettings(), MACHINE, large).peak_bytes
        < estimate(config, job, MemorySettings(), MACHINE, small).peak_bytes
    )
    more = estimate(config, replace(job, micro_rows=2), MemorySettings(), MACHINE, small)
    assert (
        more.update["activations"] == 2 * estimate(config, job, MemorySettings(), MACHINE, small).update["activations"]
    )
    assert estimate(config, job, MemorySettings(reference=True), MACHINE, small).update["reference"] > 0
    assert estimate(config, job, MemorySettings(decodes=False), MACHINE, small).rollout_seconds == 0


# GiB of one device by the compilers: `plan --rows=64 --slots=64 --remat` with the target, mesh and micro_rows.
COMPILED = [
    ("qwen2.5-0.5b", "v5e-8", "fsdp=8", 2, "update", 3.11),
    ("qwen2.5-1.5b", "v5e-16", "fsdp=16", 2, "update", 4.39),
    ("qwen2.5-1.5b", "v6e-8", "fsdp=8", 2, "update", 5.77),
    ("qwen2.5-7b", "v5e-16", "fsdp=16", 2, "update", 13.6),
    ("qwen2.5-0.5b", "h100-1", "", 2, "update", 12.9),
    ("qwen2.5-1.5b", "h100-1", "", 2, "update", 40.3),
    ("qwen2.5-1.5b", "h100-8", "fsdp=8", 2, "update", 6.72),
    ("qwen2.5-7b", "h100-8", "fsdp=8", 2, "update", 24.8),
    ("qwen2.5-0.5b", "v5e-8", "data=8", 1, "decode", 1.52),
    ("qwen2.5-7b", "v5e-8", "data=2,tensor=4", 1, "decode", 5.70),
    ("qwen2.5-1.5b", "h100-8", "data=8", 1, "decode", 6.63),
    ("qwen2.5-7b", "h100-8", "data=2,tensor=4", 1, "decode", 8.36),
]


@pytest.mark.parametrize(("model", "target", "mesh", "micro_rows", "stage", "gib"), COMPILED)
def test_memory_by_formula_is_that_of_compilers(model, target, mesh, micro_rows, stage, gib):
    machine, sizes = parse_target(target), parse_mesh(mesh) if mesh else dict.fromkeys(MESH_AXES, 1)
    job = Workload(rows=64, slots=64, micro_rows=micro_rows, dtype="float32", compute_dtype="bfloat16")
    chip = replace(MACHINE, platform=machine.chip.platform)
    expected = estimate(shape_of_model(model), job, MemorySettings(reference=True, moved=True), chip, sizes)
    assert sum(getattr(expected, stage).values()) / GIB == pytest.approx(gib, rel=0.05)


def test_an_adapter_over_quantised_weights_needs_a_fraction():
    config, mesh = shape_of_model("qwen2.5-7b"), dict.fromkeys(MESH_AXES, 1)
    job = Workload(rows=16, slots=8, dtype="bfloat16")
    whole, int8, nf4 = (
        estimate(config, job, MemorySettings(moved=True, lora=LoraConfig(16), base=base), MACHINE, mesh).peak_bytes
        / GIB
        for base in (None, "int8", "nf4")
    )
    assert nf4 < 9 < int8 < 12 < 16 < whole < 18


@pytest.mark.slow
def test_the_best_plan_is_compiled_and_missing_memory_reported(command, tmp_path):
    shape = PUBLISHED["qwen2.5-0.5b"] | {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
    shape |= {"num_hidden_layers": 2, "vocab_size": 512}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    flags = ["--devices=4", "--length=64", "--prompt=16", "--steps=4", "--slots=8", "--queries=4", "--samples=4"]
    result = last_line(command("plan", f"--model={tmp_path}", "--memory=3MiB", *flags))
    assert result["fitting"]
    assert all("lacks" in row["why_not"] for row in result["not_fitting"])
    (compiled,) = result["compiled"]
    assert compiled["mesh"] == result["fitting"][0]["mesh"]
    assert [row["program"] for row in compiled["programs"]] == ["update", "reference", "prefill", "decode"]
    assert all(row["peak"] >= 0 and row["tflop"] >= 0 for row in compiled["programs"])


def test_a_model_that_fits_nowhere_gets_what_would_fit():
    config, job = shape_of_model("qwen2.5-7b"), Workload(rows=64, slots=64, dtype="float32", compute_dtype="bfloat16")
    small = Machine(16 * GIB, 2e14, 8e11, 2e11)
    (more,) = suggest_remedies(config, job, MemorySettings(moved=True), small, 4)[:1]
    assert more.endswith(" devices")
    assert int(more.split()[0]) > 4
    assert (
        "an adapter (LoRA) over an int8 base" in suggest_remedies(config, job, MemorySettings(moved=True), small, 4)[-1]
    )
    fewer = replace(job, micro_rows=16, remat=False)
    large = Machine(80 * GIB, 2e14, 8e11, 2e11)
    assert suggest_remedies(config, fewer, MemorySettings(moved=True), large, 8)[0].endswith("fewer slots")
    nothing = Machine(1e6, 2e14, 8e11, 2e11)
    assert suggest_remedies(config, job, MemorySettings(), nothing, 8) == [
        "a smaller model: nothing else tried would fit"
    ]


@pytest.mark.slow
def test_targets_are_refused_in_one_sentence(command):
    for flags, said in {
        ("--target=v9-8",): "there are no figures of the chip 'v9'",
        ("--target=t4",): "t4 has no products of bfloat16: compute in float16",
        ("--target=cpu-2", "--devices=4"): "--devices=4 beside --target: a target says how many devices it has",
    }.items():
        check_refused(command("plan", "--model=qwen2.5-0.5b", *flags, check=False), said)


@pytest.mark.slow
def test_virtual_devices_are_a_target_too(command, tmp_path):
    shape = PUBLISHED["qwen2.5-0.5b"] | {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
    (tmp_path / "config.json").write_text(json.dumps(shape | {"num_hidden_layers": 2, "vocab_size": 512}))
    flags = ["--target=cpu-2", "--length=64", "--prompt=16", "--steps=4", "--slots=8", "--programs=prefill"]
    result = last_line(command("plan", f"--model={tmp_path}", "--memory=0.25MiB", "--mesh=data=2", *flags))
    assert (result["target"], result["devices"], result["memory"]) == ("cpu-2", 2, 2**18)
    assert not result["compiled"][0]["fits"]
    assert result["would_fit"]
