"""--help: flags under headings, in words of our own; every flag of every command has a heading."""

import ast
import subprocess
import sys
from typing import Any

import pytest
from absl import flags
from commands import ROOT

from experiments.cli import help as module
from experiments.cli.help import (
    HEADINGS,
    describe_flag,
    flag_heading,
    flag_syntax,
    format_flag_error,
    group_by_heading,
    help_page,
    is_required,
    reflow,
)
from tests.experiments.conftest import EXPERIMENTS

DEFINING = [path for path in sorted(EXPERIMENTS.rglob("*.py")) if " = flags.DEFINE_" in path.read_text()]
DEFINING.remove(EXPERIMENTS / "cli" / "help.py")  # which shows one in its docstring


@pytest.fixture
def own(monkeypatch):
    """A world of flags of its own, with some under two headings, and one before any."""
    values = flags.FlagValues()
    monkeypatch.setattr(flags, "FLAGS", values)
    monkeypatch.setattr(module, "_headings", [])
    monkeypatch.setattr(module, "_presets", [])
    into: dict[str, Any] = {"flag_values": values}
    flags.DEFINE_string("library", "x", "Of somebody else.", **into)
    flag_heading("Sizes")
    flags.DEFINE_integer("queries", 32, "Queries of an update.", lower_bound=1, **into)
    flags.DEFINE_float("share", None, "Of something.", lower_bound=0.5, **into)
    flag_heading("Run")
    flags.DEFINE_enum("env", "lookup", ["lookup", "maze"], "Environment.", **into)
    flags.DEFINE_enum("long", None, [f"algorithm_{i}" for i in range(9)], "Which.", **into)
    flags.DEFINE_bool("resume", True, "Go on.", **into)
    flags.DEFINE_bool("remat", None, "Compute again.", **into)
    flags.DEFINE_list("parts", ["a", "b"], "Any of them.", **into)
    flags.DEFINE_multi_string("mcp", [], "A server.", **into)
    flags.DEFINE_string("data", None, "The examples.", required=True, **into)
    return values


def test_flags_stand_under_their_headings_in_one_order_everywhere(own):
    chosen = [own[name] for name in ("data", "queries", "env", "share")]
    found = group_by_heading(chosen)
    assert [(words, [flag.name for flag in group]) for words, group in found.items()] == [
        ("Run", ["env", "data"]),
        ("Sizes", ["queries", "share"]),
    ]
    assert list(found) == [words for words in HEADINGS if words in found]


def test_a_heading_that_there_is_not_is_an_error():
    with pytest.raises(ValueError, match="'Szies' is none of the headings: Run, "):
        flag_heading("Szies")


@pytest.mark.parametrize(
    ("name", "left", "right"),
    [
        ("queries", "--queries=N", "Queries of an update. (positive integer; default 32)"),
        ("share", "--share=X", "Of something. (>= 0.5)"),
        ("env", "--env=lookup|maze", "Environment. (default lookup)"),
        ("resume", "--[no]resume", "Go on. (default on)"),
        ("remat", "--[no]remat", "Compute again."),
        ("parts", "--parts=A,B", "Any of them. (default a,b)"),
        ("mcp", "--mcp=TEXT", "A server. (may be given again)"),
        ("data", "--data=TEXT", "The examples. (required)"),
    ],
)
def test_a_flag_is_shown_with_its_kind_sentence_bounds_and_default(own, name, left, right):
    assert flag_syntax(own[name]) == left
    assert describe_flag(own[name], 100) == f"  {left}".ljust(24) + right


def test_many_choices_follow_the_sentence_within_the_pages_width(own):
    text = describe_flag(own["long"], 60)
    assert text.startswith("  --long=NAME           Which. (one of algorithm_0,")
    assert max(map(len, text.splitlines())) <= 60


def test_a_page_flows_and_leaves_what_is_indented(own):
    doc = "One line that is rather long, and another one.\n\n    python -m a.command --with=flags\n\nThe end."
    text = help_page(doc, [own["queries"]], width=40)
    assert text.startswith(
        "One line that is rather long, and\nanother one.\n\n    python -m a.command --with=flags\n\nThe"
    )
    assert max(len(line) for line in text.splitlines()) <= 60
    assert reflow("a\nb", 40) == "a b"


def test_a_default_is_that_of_the_run_which_the_line_describes(own, command):
    page = help_page(
        "", [own["queries"], own["share"], own["remat"]], width=100, defaults={"queries": 7, "remat": True}
    )
    assert "(positive integer; default 7)" in page
    assert "Compute again. (default on)" in page
    for words, updates, beta in ((["--help"], 120, "0.0"), (["-h", "--env=maze", "--algorithm=dpo"], 150, "0.1")):
        page = " ".join(command("quickstart", *words).stdout.split())
        assert f"non-negative integer; default {updates})" in page.partition("--updates=N")[2][:200]
        assert f"default {beta})" in page.partition("--beta=X")[2][:200]
    assert "default 1e-06)" in " ".join(command("finetune", "--help", "--method=dpo").stdout.split())


def test_no_command_imports_jax_before_it_has_read_its_flags():
    program = "import sys\n"
    for path in sorted(EXPERIMENTS.rglob("*.py")):
        runs = "    app.run(main" in path.read_text() or "    run_command(" in path.read_text()
        if runs and path.parent.name != "cli":
            body = ast.parse(path.read_text()).body
            first = next(i for i, node in enumerate(body) if ast.unparse(node) == "app.read_flags(__name__)")
            imports = [ast.unparse(node) for node in body[:first] if isinstance(node, ast.Import | ast.ImportFrom)]
            package = ".".join(path.relative_to(ROOT).parent.parts)
            program += f"exec({chr(10).join(imports)!r}, {{'__package__': {package!r}, '__name__': 'command'}})\n"
            program += f"assert 'jax' not in sys.modules, {path.name!r}\n"
    assert program.count("exec") > 40
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


def test_a_flag_that_is_missing_is_named_with_what_it_is(own, monkeypatch):
    monkeypatch.setattr("sys.argv", ["prog"])
    own.register_key_flag_for_module("prog", own["data"])
    assert (is_required(own["data"]), is_required(own["share"])) == (True, False)
    with pytest.raises(flags.IllegalFlagValueError) as raised:
        own(["prog"])
    assert format_flag_error(raised.value) == "--data must be given (The examples)"
    with pytest.raises(flags.IllegalFlagValueError) as raised:
        own(["prog", "--env=chess"])
    assert format_flag_error(raised.value) == "--env=chess must be one of lookup, maze"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("--queries=-3", "--queries=-3 must be a whole number of at least 1"),
        ("--queries=two", "--queries=two must be a whole number of at least 1"),
        ("--share=0.2", "--share=0.2 must be a number of at least 0.5"),
        ("--env=lokup", "--env=lokup must be one of lookup, maze; did you mean lookup?"),
        ("--resume=perhaps", "--resume=perhaps must be true or false: --resume, or --noresume"),
        ("--querys=3", "--querys is no flag; did you mean --queries? (--help lists them)"),
    ],
)
def test_a_value_that_a_flag_refuses_is_answered_with_what_it_takes(own, given, said):
    with pytest.raises(flags.Error) as raised:
        own(["prog", "--data=x", given])
    assert format_flag_error(raised.value) == said


def test_every_module_has_a_heading_before_its_first_flag():
    for path in DEFINING:
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        named = [(ast.unparse(call.func), call.lineno) for call in calls]
        first = min(line for name, line in named if name.startswith("flags.DEFINE_"))
        assert min((line for name, line in named if name == "flag_heading"), default=first) < first, path


def test_flags_of_two_modules_share_their_headings(command):
    page = command("self_verify", "--help").stdout
    learning = page[page.index("\nLearning:") : page.index("\nSampling:")]
    assert ("--learning_rate=X" in learning, "--lora_rank=N" in learning) == (True, True)
    assert page.count("\nLearning:\n") == 1
