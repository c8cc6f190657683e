"""How every experiment begins and ends: its flags, bad input, Ctrl-C."""

import signal

import pytest
from commands import ROOT, run_module

EXPERIMENT = '''"""An experiment of a few lines."""

import signal
from absl import flags, logging
from experiments.cli import app
from experiments.cli.flags import define_stop_after, stop_after
from experiments.cli.help import flag_heading
from flowgrpo.types import BadInput

flag_heading("Run")
_WORD = flags.DEFINE_string("word", "hello", "What is said.")
_TIMES = flags.DEFINE_integer("times", 1, "How often.", lower_bound=1)
_RATE = flags.DEFINE_float("rate", None, "How fast.", lower_bound=0.0)
flag_heading("Files and resuming")
define_stop_after()

def main():
    import jax.numpy as jnp

    logging.info("said by a library")
    print(_WORD.value, int(jnp.ones(3).sum()), flush=True)
    if _WORD.value == "bad":
        raise BadInput("--word=bad is no word: say another one")
    if _WORD.value.startswith("SIG"):
        signal.raise_signal(signal.Signals[_WORD.value])
    while _WORD.value == "on":
        stop_after().check()

if __name__ == "__main__":
    app.run(main)
'''


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Return the function that runs the experiment with the arguments that it is given."""
    (tmp_path / "tiny.py").write_text(EXPERIMENT)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return lambda *arguments: run_module("tiny", *arguments, cwd=tmp_path)


@pytest.mark.slow
def test_a_run_says_what_it_prints_and_nothing_else(run, tmp_path):
    done = run(f"--compilation_cache={tmp_path}/cache", f"--profile_dir={tmp_path}/trace", "--deterministic")
    assert (done.returncode, done.stdout, done.stderr) == (0, "hello 3\n", "")
    assert list((tmp_path / "cache").iterdir())
    assert list((tmp_path / "trace").rglob("*.xplane.pb"))
    assert "said by a library" in run("--verbosity=0").stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("status", "argument", "words"),
    [
        (1, "--word=bad", "tiny: --word=bad is no word: say another one"),
        (1, "--compilation_cache=/dev/null/cache", "/dev/null/cache can't be made"),
        (2, "--times=0", "tiny: --times=0 must be a whole number of at least 1"),
        (2, "--rate=nan", "tiny: --rate=nan must be a finite number"),
        (2, "--rate=inf", "tiny: --rate=inf must be a finite number"),
        (2, "--tims=2", "--tims is no flag; did you mean --times? (--help lists them)"),
        (2, "--nodeterminstic", "--nodeterminstic is no flag; did you mean --nodeterministic?"),
        (2, "--qqq", "--qqq is no flag (--help lists them)"),
        (2, "word", "'word' is not a flag: settings are given as --name=value"),
        (128 + signal.SIGINT, "--word=SIGINT", "tiny: interrupted"),
        (128 + signal.SIGTERM, "--word=SIGTERM", "tiny: terminated"),
    ],
)
def test_what_goes_wrong_is_one_sentence_and_a_status_of_its_own(run, status, argument, words):
    done = run(argument)
    assert done.returncode == status
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.slow
def test_a_command_whose_time_is_over_ends_well(run):
    done = run("--word=on", "--stop_after=1s")
    assert (done.returncode, done.stdout, done.stderr) == (0, "on 3\n", "")


@pytest.mark.slow
def test_help_that_was_asked_for_ends_well_and_has_headings(run):
    done, short = run("--help"), run("-?")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == short.stdout
    assert done.stdout.startswith("An experiment of a few lines.\n\nRun:\n  --word=TEXT ")
    assert "\n  --times=N             How often. (positive integer; default 1)\n" in done.stdout
    assert "\n\nEvery command:\n  --compilation_cache=TEXT\n" in done.stdout
    assert "--verbosity" not in done.stdout
    full = run("--helpfull")
    assert full.returncode == 0
    assert "--verbosity" in full.stdout
