"""Scripts of the guide, run from an installed wheel in an empty folder, without a checkout."""

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

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
RECIPE, OWN = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs/scripts.md").read_text(), re.DOTALL | re.MULTILINE)
SMALL = {  # the same scripts in a minute
    "updates=120": "updates=12, warm_steps=50, test_tasks=32, model_dim=32, layers=1",
    "tasks=500": "tasks=32",
    "d=96, layers=3": "d=32, layers=1",
    "steps=400": "steps=20",
    "queries=32": "queries=4",
    "tasks=256": "tasks=32",
    "updates=60": "updates=20",
}


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> dict[str, str]:
    """Install the package as a wheel, and nothing else of the checkout."""
    installed = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(installed), str(ROOT)]
    subprocess.run(pip, check=True)
    assert not (installed / "experiments").exists()
    return os.environ | {"PYTHONPATH": str(installed), "MPLBACKEND": "agg"}


def begin(script: str, folder: Path, environment: dict[str, str]) -> subprocess.Popen:
    """Start a script in this folder, in small sizes."""
    for written, small in SMALL.items():
        script = script.replace(written, small)
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


def test_a_recipe_trains_resumes_after_a_kill_and_evaluates(environment, tmp_path):
    assert len(RECIPE.splitlines()) <= 10
    kill_after(begin(RECIPE, tmp_path, environment), tmp_path / "runs/mine/checkpoints/00000010")
    printed = end(begin(RECIPE, tmp_path, environment))
    lines = [json.loads(line) for line in (tmp_path / "runs/mine/metrics.jsonl").read_text().splitlines()]
    assert [line["update"] for line in lines if line["phase"] == "train"] == list(range(1, 13))
    assert re.search(r"[\d.]+ -> [\d.]+\nupdate (10|12)\n", printed)
    steps = re.findall(r"^    python (-m flowgrpo .*?) +#", printed, re.MULTILINE)  # what it says comes next
    assert [step.split()[2] for step in steps] == ["evaluate", "view", "export"]
    for step in steps:
        small = ["--num_tasks=8"] if "evaluate" in step else []
        subprocess.run([sys.executable, *shlex.split(step), *small], cwd=tmp_path, env=environment, check=True)
    assert {path.name for path in (tmp_path / "runs/mine").iterdir()} >= {"trajectories.html", "model"}


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


def test_a_custom_loop_resumes_after_a_kill_and_plots(environment, tmp_path):
    assert len([line for line in OWN.splitlines() if line.strip()]) < 40
    kill_after(begin(OWN, tmp_path, environment), tmp_path / "runs/own/checkpoints/00000010")
    printed = end(begin(OWN, tmp_path, environment))
    assert [line.split()[0] for line in printed.splitlines()] == ["20"]  # what came before was not done again
    assert (tmp_path / "runs/own/curve.png").read_bytes().startswith(b"\x89PNG")
