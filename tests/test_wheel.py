"""The three scripts of the guide, run from an installed wheel in an empty folder, without a checkout."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from gateway_cases import tiny_folder

from flowgrpo.training.checkpoints import Checkpoints, params_sha256

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs/scripts.md").read_text(), re.DOTALL | re.MULTILINE)
TEXT_ENV, ALGORITHM, LOOP = BLOCKS[:3]
TINY = "queries=2, samples=2, context_tokens=250, validation_tasks=2, test_tasks=2, slots=4, prefill_chunk=16"
RESUMES = (  # what a loop of one's own adds in order to resume
    ("for step, tasks in enumerate(", 'trainer.restore("saved")\nfor step, tasks in enumerate('),
    ("fg.batches(train, 16", "fg.batches(train, 16, first=trainer.updates"),
)


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> dict[str, str]:
    """Install the package as a wheel, and nothing else of the checkout."""
    installed = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(installed), str(ROOT)]
    subprocess.run(pip, check=True)
    assert not (installed / "experiments").exists()
    return os.environ | {"PYTHONPATH": str(installed), "MPLBACKEND": "agg"}


def smaller(script: str, *changes: tuple[str, str]) -> str:
    """The script with each change made, which it must have a place for."""
    for pattern, small in changes:
        script, count = re.subn(pattern, small, script)
        assert count, pattern
    return script


def begin(script: str, folder: Path, environment: dict[str, str]) -> subprocess.Popen:
    """Start a script in this folder."""
    folder.mkdir(exist_ok=True)
    (folder / "script.py").write_text(script)
    command = [sys.executable, "script.py"]
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)


def end(process: subprocess.Popen) -> str:
    printed, _ = process.communicate(timeout=600)
    assert process.returncode == 0
    return printed


def kill_after(process: subprocess.Popen, checkpoint: Path) -> None:
    """Kill a script as soon as it has saved this checkpoint."""
    until = time.monotonic() + 600
    while not checkpoint.exists():
        assert process.poll() is None, "the script ended before it could be killed"
        assert time.monotonic() < until
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()


def lines_of(script: str) -> int:
    """Lines of code of a script."""
    return len([line for line in script.splitlines() if line.strip() and not line.lstrip().startswith("#")])


def write_tasks(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    rows = [{"person": f"Ann {n}", "address": f"{n} Elm", "query": f"say {n}", "answers": [str(n)]} for n in range(60)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_own_environment_trains_a_model_and_resumes_after_a_kill_to_the_same_bits(environment, tmp_path):
    assert lines_of(TEXT_ENV) <= 24
    script = smaller(
        TEXT_ENV,
        (r'model="[^"]*"', f"model={str(tiny_folder())!r}"),
        (r"updates=\d+", f"updates=4, every=2, {TINY}"),
        (r"lora=16", "lora=2"),
    )
    for name in ("killed", "whole"):
        write_tasks(tmp_path / name)
    saved = tmp_path / "killed/runs/parcel/checkpoints/00000002"
    kill_after(begin(script, tmp_path / "killed", environment), saved)
    end(begin(script, tmp_path / "killed", environment))
    end(begin(script, tmp_path / "whole", environment))
    killed, whole = (
        json.loads((tmp_path / name / "runs/parcel/result.json").read_text()) for name in ("killed", "whole")
    )
    assert killed["params_sha256"] == whole["params_sha256"]
    assert killed["updates"] == 4
    assert killed["resumed_at"] == [2]


def test_own_algorithm_trains_and_resumes_after_a_kill_to_the_same_bits(environment, tmp_path):
    assert lines_of(ALGORITHM) <= 10
    small = "updates=4, every=2, warm_steps=50, test_tasks=32, model_dim=32, layers=1, queries=4, folder='run'"
    script = smaller(ALGORITHM, (r"algorithm=hopeful", f"algorithm=hopeful, {small}"))
    kill_after(begin(script, tmp_path / "killed", environment), tmp_path / "killed/run/checkpoints/00000002")
    printed = end(begin(script, tmp_path / "killed", environment))
    end(begin(script, tmp_path / "whole", environment))
    killed, whole = (json.loads((tmp_path / name / "run/result.json").read_text()) for name in ("killed", "whole"))
    assert killed["params_sha256"] == whole["params_sha256"]
    assert killed["algorithm"] == "hopeful"
    assert "test tasks" in printed


def test_a_loop_of_ones_own_resumes_after_a_kill_to_the_same_bits(environment, tmp_path):
    assert lines_of(LOOP) <= 16
    script = smaller(
        LOOP,
        (r'load_model\("[^"]*", lora=16\)', f"load_model({str(tiny_folder())!r}, lora=2)"),
        (r"optimizer=fg.adamw\(1e-5\)", f"optimizer=fg.adamw(1e-2), max_tokens=8, {TINY}"),
        *((re.escape(old), new) for old, new in RESUMES),
        (r"range\(100\)", "range(8)"),
        (r"samples=8", "samples=2"),
        (r"(\n +)(print\(step, [^\n]*\))", r'\1\2\1trainer.save("saved")'),
    )
    for name in ("killed", "whole"):
        write_tasks(tmp_path / name)
    kill_after(begin(script, tmp_path / "killed", environment), tmp_path / "killed/saved/checkpoints/00000002")
    end(begin(script, tmp_path / "killed", environment))
    end(begin(script, tmp_path / "whole", environment))
    killed, whole = (Checkpoints(tmp_path / name / "saved") for name in ("killed", "whole"))
    assert killed.latest() == whole.latest()
    first, second = (params_sha256(x.restore_part(x.latest() or 0, "run/learner/params")) for x in (killed, whole))
    assert first == second
    assert (tmp_path / "killed/out/model.safetensors").exists()


def test_commands_run_without_a_checkout(environment, tmp_path):
    def run(*words: str) -> subprocess.CompletedProcess:
        return subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)

    script = Path(environment["PYTHONPATH"]) / "bin" / "flowgrpo"
    listed, page = run(sys.executable, str(script)), run(sys.executable, "-m", "flowgrpo", "gateway", "--help")
    assert all(f"\n  {name} " in listed.stdout for name in ("quickstart", "gateway", "chat", "plots", "train_agent"))
    assert "\n    python -m flowgrpo gateway --model=PATH\n" in page.stdout
    assert "python -m experiments" not in listed.stdout + page.stdout
    wrong = run(sys.executable, str(script), "view", "--workdr=x")
    assert (wrong.returncode, wrong.stderr.startswith("flowgrpo view: --workdr is no flag")) == (2, True)
    assert run(sys.executable, "-c", "import flowgrpo.recipes.example_agent").returncode == 0
    small = "--updates=1 --warm_steps=50 --test_tasks=32 --model_dim=32 --layers=1 --queries=4 --cpu_devices=1"
    trained = run(sys.executable, "-m", "flowgrpo", "train", "--env=lookup", "--workdir=run", *small.split())
    assert trained.returncode == 0, trained.stderr
    steps = re.findall(r"^    python (-m flowgrpo .*?) +#", trained.stdout, re.MULTILINE)  # what it says comes next
    assert [step.split()[2] for step in steps] == ["evaluate", "view", "export"]
    for step in steps:
        fewer = ["--num_tasks=8"] if "evaluate" in step else []
        assert run(sys.executable, *shlex.split(step), *fewer).returncode == 0
    assert {path.name for path in (tmp_path / "run").iterdir()} >= {"trajectories.html", "model"}
