"""The output of `python -m experiments`: every command once, in a group, fast, and a hint for an unknown name."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from experiments import __main__ as all_commands
from experiments.benchmarks import __main__ as all_benchmarks
from experiments.cli.listing import OTHERS, commands, group_commands, listing_page

ROOT = Path(__file__).parent.parent.parent
FOLDERS = [(all_commands, ROOT / "experiments"), (all_benchmarks, ROOT / "experiments" / "benchmarks")]


def listed(*arguments: str) -> subprocess.CompletedProcess:
    program = [sys.executable, "-X", "importtime", "-m", *arguments]
    return subprocess.run(program, capture_output=True, text=True, check=False, cwd=ROOT, timeout=60)


@pytest.mark.parametrize(("module", "folder"), FOLDERS, ids=["experiments", "benchmarks"])
def test_each_command_has_one_group_and_one_sentence(module, folder):
    found = commands(folder)
    assert sorted(name for members in module.GROUPS.values() for name in members) == sorted(found)
    for name, doc in found.items():
        first, empty, *_ = doc.splitlines()
        assert (first[-1], empty) == (".", ""), name
        package = ".".join(folder.relative_to(ROOT).parts)
        assert f"python -m {package}.{name}" in doc, name


def test_a_module_without_a_main_is_no_command():
    found = commands(ROOT / "experiments")
    assert {"quickstart", "agentflow", "score"} <= set(found)
    assert not {"common", "session", "__main__", "headings"} & set(found)


def test_a_command_that_is_in_no_group_is_shown_among_the_others():
    assert group_commands(["a", "b"], {"Group": ("b", "gone")}) == {"Group": ["b"], OTHERS: ["a"]}
    text = listing_page("pack", {"a": "What a does.\n\nMore.", "b": "What b does."}, {"Group": ("b",)}, width=80)
    assert text.endswith("Group:\n  b             What b does.\n\nOthers:\n  a             What a does.")


def test_the_page_names_every_command_and_imports_no_jax():
    done = listed("experiments")
    assert done.returncode == 0
    assert all(f"\n  {name} " in done.stdout for name in commands(ROOT / "experiments"))
    assert max(map(len, done.stdout.splitlines())) <= 100
    assert "| jax" not in done.stderr.replace("|  ", "|")
    assert " numpy" not in done.stderr


@pytest.mark.parametrize(
    ("package", "words", "said"),
    [
        ("experiments", "quikstart", ("'quikstart'", "python -m experiments.quickstart")),
        ("experiments", "zzz", ("'zzz'",)),
        ("experiments", "--updates=4", ("python -m experiments.NAME --updates=4",)),
        ("experiments", "quickstart --updats=4", ("--updats", "--updates")),
        ("flowgrpo", "benchmarks decode --rws=4", ("--rws", "--rows")),
    ],
)
def test_an_unknown_command_or_flag_gets_the_nearest(package, words, said):
    done = listed(package, *words.split())
    assert done.returncode == 2
    assert all(part in done.stderr.splitlines()[-1] for part in said)


def test_a_name_runs_the_command():
    page = listed("flowgrpo", "benchmarks", "packing", "-h").stdout
    assert page.startswith("Seconds and fill rate of `pack`, by the number of trajectories.\n\n")
    assert "--sizes" in page
    assert listed("flowgrpo", "--version").stdout.startswith("flowgrpo ")


@pytest.mark.skipif(not hasattr(signal, "SIGPIPE"), reason="pipes have no signal here")
def test_a_reader_that_has_seen_enough_ends_it_without_a_word():
    with subprocess.Popen(
        [sys.executable, "-m", "experiments"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT
    ) as process:
        assert process.stdout
        assert process.stderr
        process.stdout.close()
        said = process.stderr.read()
    assert (said, process.returncode) == (b"", -signal.SIGPIPE)
