"""The flags of how a planner learns, on a model that is given: each changes what it says, and nothing else."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from experiments import self_verify_tasks
from experiments.agent_setups import settings_of
from experiments.dry_runs import hosted_job
from experiments.self_verify_setup import OFFLINE

SIZES = ("--queries=2", "--samples=4", "--updates=2", "--test_tasks=8", "--max_tokens=4", "--learning_rate=1e-2")


@pytest.fixture(scope="module")
def given(tmp_path_factory) -> tuple[Path, Path]:
    """A model that has seen a few demonstrations, and tasks for it."""
    base = tmp_path_factory.mktemp("given")
    few = {"warm_tasks": 300, "warm_steps": 100, "warm_rows": 16}
    self_verify_tasks.make_start(base / "model", OFFLINE | few, lambda *_: None)
    tasks = self_verify_tasks.make_tasks(0, "train", 0, 60)
    lines = [{"id": task.id, "query": task.query, "answers": task.answers, "domain": task.domain} for task in tasks]
    (base / "tasks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return base / "model", base / "tasks.jsonl"


@pytest.fixture
def trained(command, given, tmp_path) -> Callable[..., Path]:
    """`trained(name, *flags)`: the folder of a run with these flags."""

    def run(name: str, *flags: str) -> Path:
        model, tasks = given
        command("self_verify", f"--model={model}", f"--tasks={tasks}", f"--workdir={tmp_path / name}", *SIZES, *flags)
        return tmp_path / name

    return run


def sha(folder: Path) -> str:
    return json.loads((folder / "result.json").read_text())["params_sha256"]


def updates(folder: Path) -> list[dict]:
    """The lines of two updates, the first of which moved what was trained."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    one, two = (line for line in lines if line["phase"] == "train")
    assert one["grad_norm"] > 1e-3
    assert (one["kl"], two["kl"] > 1e-5) == (pytest.approx(0.0, abs=1e-3), True)
    return [one, two]


@pytest.mark.slow
def test_offloading_changes_no_bit_and_a_mesh_no_more_than_rounding(trained):
    plain, away, divided = (
        trained("plain", "--dtype=float32"),
        trained("away", "--dtype=float32", "--offload=disk", "--watch_seconds=500"),
        trained("divided", "--dtype=float32", "--mesh=fsdp=2", "--cpu_devices=2"),
    )
    assert sha(away) == sha(plain)
    assert (away / "metrics.jsonl").read_bytes() == (plain / "metrics.jsonl").read_bytes()
    for one, two in zip(updates(plain), updates(divided), strict=True):
        assert one["grad_norm"] == pytest.approx(two["grad_norm"], rel=1e-3)
        assert one["live_tokens"] == two["live_tokens"]


@pytest.mark.slow
def test_an_adapter_learns_with_moments_of_eight_bits_and_leaves_as_an_adapter(trained, command):
    folder = trained("adapter", "--lora_rank=2", "--optimizer=adamw8bit", "--dtype=bfloat16")
    updates(folder)
    out = folder.parent / "out"
    said = command("export", f"--workdir={folder}", f"--out={out}", "--adapter", "--which=last")
    assert json.loads(said.stdout.splitlines()[-1])["update"] == 2
    assert (out / "adapter_model.safetensors").exists()


@pytest.mark.slow
def test_masters_of_float32_learn_what_bfloat16_computes(trained):
    lines = updates(trained("masters", "--dtype=bfloat16", "--optimizer=adafactor", "--remat"))
    assert [line["skipped"] for line in lines] == [0, 0]


@pytest.mark.slow
def test_a_dry_run_compiles_the_programs_of_the_run_and_leaves_nothing(command, given, tmp_path):
    asked = ("--dry_run=compile", "--mesh=data=2", "--cpu_devices=2", "--device_memory=9MB", "--dtype=float32")
    sizes = ("--queries=2", "--samples=2", "--context_tokens=64", "--max_tokens=8", "--slots=4")
    said = command("agentflow", f"--model={given[0]}", f"--workdir={tmp_path / 'dry'}", *asked, *sizes)
    found = json.loads(said.stdout.splitlines()[-1])
    assert [row["program"] for row in found["programs"]] == ["update", "reference", "prefill", "decode"]
    assert [row["fits"] for row in found["programs"]] == [False, False, True, True]
    assert all(row["peak"] > 0 and row["tflop"] > 0 for row in found["programs"])
    assert not (tmp_path / "dry").exists()


def test_what_is_compiled_is_what_the_settings_ask_for():
    settings = settings_of("nowhere", queries=4, samples=2)
    job = hosted_job(settings)  # contexts afresh: each of the three turns is a row
    assert (job.rows, job.length, job.prompt) == (24, 8192, 8192 - 2048)
    assert (job.dtype, job.compute_dtype, job.remat) == ("float32", "bfloat16", True)
    adapted = hosted_job(settings | {"lora_rank": 4, "rendering": "append"})
    assert (adapted.rows, adapted.dtype, adapted.compute_dtype) == (8, "bfloat16", None)
