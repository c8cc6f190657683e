"""How every experiment begins and ends: its flags, bad input, Ctrl-C."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent

EXPERIMENT = '''"""An experiment of a few lines."""

import time
from absl import flags, logging
from experiments import common
from experiments.headings import heading
from flowgrpo.types import BadInput

heading("What is run")
_WORD = flags.DEFINE_string("word", "hello", "What is said.")
_TIMES = flags.DEFINE_integer("times", 1, "How often.", lower_bound=1)

def main():
    import jax.numpy as jnp

    logging.info("said by a library")
    print(_WORD.value, int(jnp.ones(3).sum()), flush=True)
    if _WORD.value == "bad":
        raise BadInput("--word=bad is no word: say another one")
    if _WORD.value == "wait":
        time.sleep(60)

if __name__ == "__main__":
    common.run(main)
'''


@pytest.fixture
def command(tmp_path):
    (tmp_path / "tiny.py").write_text(EXPERIMENT)
    call = "runpy.run_module('tiny', run_name='__main__', alter_sys=True)"
    program = f"import sys, runpy; sys.path[:0] = [{str(tmp_path)!r}]; {call}"
    return [sys.executable, "-c", program]


def run(command: list[str], *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([*command, *arguments], capture_output=True, text=True, cwd=ROOT, check=False, timeout=300)


@pytest.mark.slow
def test_a_run_says_what_it_prints_and_nothing_else(command, tmp_path):
    done = run(command, f"--compilation_cache={tmp_path}/cache", f"--profile_dir={tmp_path}/trace", "--deterministic")
    assert (done.returncode, done.stdout, done.stderr) == (0, "hello 3\n", "")
    assert list((tmp_path / "cache").iterdir())
    assert list((tmp_path / "trace").rglob("*.xplane.pb"))
    assert "said by a library" in run(command, "--verbosity=0").stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("status", "argument", "words"),
    [
        (1, "--word=bad", "--word=bad is no word: say another one"),
        (2, "--times=0", "flag --times=0: 0 is not a positive integer"),
        (2, "--tims=2", "--tims is no flag; did you mean --times? (--help lists them)"),
        (2, "--nodeterminstic", "--nodeterminstic is no flag; did you mean --nodeterministic?"),
        (2, "--qqq", "--qqq is no flag (--help lists them)"),
        (2, "word", "'word' is not a flag: settings are given as --name=value"),
        (1, "--compilation_cache=/dev/null/cache", "/dev/null/cache can't be made"),
    ],
)
def test_bad_input_is_one_sentence_and_status_1_and_a_bad_command_line_status_2(command, status, argument, words):
    done = run(command, argument)
    assert done.returncode == status
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["--help", "--helpshort", "-?"])
def test_help_that_was_asked_for_ends_well_and_has_headings(command, flag):
    done = run(command, flag)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("An experiment of a few lines.\n\nWhat is run:\n  --word=TEXT ")
    assert "\n  --times=N             How often. (positive integer; default 1)\n" in done.stdout
    assert "\n\nEvery command:\n  --compilation_cache=TEXT\n" in done.stdout
    assert "--verbosity" not in done.stdout
    assert "\n  --[no]resume" not in done.stdout


def test_full_help_has_the_flags_of_libraries_too(command):
    done = run(command, "--helpfull")
    assert done.returncode == 0
    assert "--verbosity" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "status", "said"), [(signal.SIGINT, 130, ": interrupted"), (signal.SIGTERM, 143, ": terminated")]
)
def test_ctrl_c_and_sigterm_are_one_line_and_a_status_of_their_own(command, number, status, said):
    with subprocess.Popen([*command, "--word=wait"], stdout=-1, stderr=-1, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(0.2)
        process.send_signal(number)
        _, errors = process.communicate(timeout=120)
    assert process.returncode == status
    assert errors.strip().endswith(said)
    assert len(errors.strip().splitlines()) == 1


def test_the_sentence_names_the_experiment():
    done = run([sys.executable, "-m", "experiments.family"], "--turns=x")
    assert done.stderr == "experiments.family: --turns=x must be a comma-separated list of ints\n"
