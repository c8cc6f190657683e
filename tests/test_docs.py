"""Tests of the guides: Python is run page by page, commands name flags that exist, links lead somewhere."""

import ast
import dataclasses
import re
import shlex
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest
import yaml
from commands import imported_modules

from experiments.cli import listing
from experiments.studies.studies import STUDIES
from flowgrpo.api.choice import Choice, Subject
from flowgrpo.api.settings import choose_run
from flowgrpo.recipes.recipe import find_config, recipe_names
from flowgrpo.recipes.registry import ALGORITHMS
from flowgrpo.training.config import RunConfig, setting_infos

ROOT = Path(__file__).parent.parent
PAGES = {path.relative_to(ROOT).as_posix(): path.read_text() for path in sorted(ROOT.glob("docs/*.md"))}
PAGES |= {name: (ROOT / name).read_text() for name in ("README.md", "CONTRIBUTING.md")}
SLOW = {"docs/environments.md", "docs/scripts.md"}  # which train
PROMISE = re.compile(r"^( *)print\(.*\)  # (.+)$", re.MULTILINE)


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGES[page], re.DOTALL | re.MULTILINE)


ELSEWHERE = {"docs/scripts.md": 3}  # how many blocks, the first of the page, test_wheel runs
SMALL = {  # the others of that page, in small sizes
    "updates=120": "updates=2, queries=4, warm_steps=10, test_tasks=16, model_dim=32, layers=1",
    "queries=32": "queries=4, warm_steps=10, model_dim=32, layers=1",
    "reshape(32, 8)": "reshape(4, 8)",
    "updates < 60": "updates < 2",
    "updates % 10": "updates % 2",
}
WITH_PYTHON = [
    pytest.param(page, marks=pytest.mark.slow if page in SLOW else ()) for page in PAGES if blocks(page, "python")
]


def choose_only(env=None, *, folder=None, updates=1, **arguments) -> Choice:  # noqa: ARG001
    """What stands for `fg.train` on all pages but that of scripts: its checks of the arguments, and no run."""
    names = {field.name for field in dataclasses.fields(Subject)}
    subject = Subject(env=env, **{name: value for name, value in arguments.items() if name in names})
    settings = {name: value for name, value in arguments.items() if name not in names}
    return choose_run(subject, settings | {"updates": updates})


@pytest.mark.parametrize("page", WITH_PYTHON)
def test_python_examples_run_one_after_another(page, capsys, tmp_path, monkeypatch):
    """Each example may use what the ones before it made; what a comment behind a print promises is printed."""
    monkeypatch.chdir(tmp_path)  # what they write
    if page not in ELSEWHERE:
        monkeypatch.setattr("flowgrpo.train", choose_only)
    namespace: dict = {"__name__": "page"}
    for source in blocks(page, "python")[ELSEWHERE.get(page, 0) :]:
        for written, small in SMALL.items() if page in ELSEWHERE else ():
            source = source.replace(written, small)
        exec(compile(source, page, "exec"), namespace)
        printed = capsys.readouterr().out
        for promised in PROMISE.findall(source):
            assert promised[1] in printed


def commands() -> dict[str, list[list[str]]]:
    """The words of every command of a module of this repository, by page and by the docstring of the command."""
    texts = {page: "\n".join(blocks(page, "sh")) for page in PAGES}
    for folder in ("experiments", "experiments/benchmarks"):
        for name, doc in listing.commands(ROOT / folder).items():
            texts[f"{folder}/{name}.py"] = "\n".join(re.findall(r"^    .*python -m .*$", doc, re.MULTILINE))
    found = {}
    for page, text in texts.items():
        parts = re.split(r"&&|\||\n", text.replace("\\\n", " "))
        words = [shlex.split(part, comments=True) for part in parts]
        # `flowgrpo view` and `python -m flowgrpo view` are `python -m experiments.view`.
        words = [["python", "-m", *own] if own[:1] == ["flowgrpo"] else own for own in words]
        words = [[*own[:2], f"experiments.{own[3]}", *own[4:]] if own[2:3] == ["flowgrpo"] else own for own in words]
        found[page] = [own[2:] for own in words if own[:2] == ["python", "-m"] and own[2].startswith("experiments")]
    return found


@cache
def flags_of(module: str) -> frozenset[str]:
    """The flags that a module of experiments defines, or one that it imports; several can't be imported at once."""
    tree = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text())
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "").startswith("DEFINE_"):
            words = (word.value for word in ast.walk(node) if isinstance(word, ast.Constant))
            found |= {word for word in words if isinstance(word, str) and word.isidentifier()}
        if isinstance(node, ast.ImportFrom):
            for name in imported_modules(module, node):
                if name.startswith("experiments.") and (ROOT / f"{name.replace('.', '/')}.py").exists():
                    found |= flags_of(name)
        if isinstance(node, ast.ImportFrom) and "Config" in [alias.name for alias in node.names]:
            found |= flags_of_config(import_module(node.module or "").Config)
    if module == "experiments.train":  # which has the flags of the recipe that it is given
        found = found.union(*(flags_of_config(find_config(name)) for name in recipe_names()))
    return frozenset(found)


def flags_of_config(config: type[RunConfig]) -> set[str]:
    return {name for name, info in setting_infos(config).items() if info.heading is not None}


def test_commands_name_modules_and_flags_that_exist():
    for page, found in commands().items():
        for module, *words in found:
            for word in words:
                if word.startswith("--"):
                    name = word.removeprefix("--").split("=")[0]
                    known = flags_of(module) | {"help"}
                    assert name in known or name.removeprefix("no") in known, f"{page}: {module} has no flag --{name}"


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as they are made of them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere():
    for page, text in PAGES.items():
        for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
            name, _, anchor = target.partition("#")
            path = (ROOT / page).parent / name if name else ROOT / page
            assert "://" in target or path.exists(), f"{page}: {target}"
            assert "://" in target or not anchor or anchor in anchors(path.read_text()), f"{page}: {target}"


WRITTEN = {  # by runs and studies, and by the reader
    *("batches/", "checkpoints/", "journal/", "model/", "runs/", "trajectories/", "warm_start/"),
    *("curves.svg", "table.md"),
}


def test_paths_in_backquotes_exist():
    """From the root, the package or the page's own folder; those of docstrings, too, where they name a folder."""
    texts = {path: path.read_text() for path in [*ROOT.glob("docs/**/*.md"), *ROOT.glob("*/README.md")]}
    texts |= {ROOT / page: text for page, text in PAGES.items()}
    texts |= {path: path.read_text() for path in ROOT.glob("notebooks/*.ipynb")}
    named = [
        (page, name)
        for page, text in texts.items()
        for code in re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))
        for name in (
            *re.findall(r"(?<![\w./<*-])\w[\w./-]*\.(?:py|pyi|md|toml|lock|ipynb|svg)\b(?![/\w*])", code),
            *re.findall(r"^\w+(?:/\w+)*/$", code),
        )
    ]
    sources = [path for folder in ("flowgrpo", "experiments", "tests") for path in (ROOT / folder).rglob("*.py")]
    named += [(path, name) for path in sources for name in re.findall(r"`((?:\w+/)+\w+\.py)`", path.read_text())]
    assert len(named) > 100
    gone = [
        f"{page.relative_to(ROOT)}: {name}"
        for page, name in named
        if name not in WRITTEN and not any((base / name).exists() for base in (ROOT, ROOT / "flowgrpo", page.parent))
    ]
    assert not gone


ONES = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
NUMBERS = (*ONES, "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty")
COUNTED = {  # what a number stands before -> how many there are
    r"algorithms\s+of\s+one\s+family|of\s+\[the\s+family\]": lambda: len(ALGORITHMS) + 1,  # and sdpo, without a flag
    r"to\s+begin\s+with|studies\s+that\s+ship": lambda: len(STUDIES),
    r"more\s+studies": lambda: len(STUDIES) - 1,
    r"notebooks\b": lambda: len([*ROOT.glob("notebooks/*.ipynb")]),
}


def test_numbers_of_members_are_those_of_the_registries():
    texts = {path: path.read_text() for path in [*ROOT.glob("docs/**/*.md"), *ROOT.glob("*/README.md")]}
    texts |= {ROOT / page: text for page, text in PAGES.items()}
    for what, count in COUNTED.items():
        pattern = rf"\b(\d+|{'|'.join(NUMBERS)})\s+(?:\w+\s+)?(?:{what})"
        found = {
            (path, number.lower())
            for path, text in texts.items()
            for number in re.findall(pattern, text, re.IGNORECASE)
        }
        assert found, what
        for path, number in found:
            assert (int(number) if number.isdigit() else NUMBERS.index(number) + 1) == count(), (
                f"{path}: {number} {what}"
            )


def sentences() -> list[str]:
    """List the messages of commands that the page of troubles quotes, in parts that no name or number interrupts."""
    page = PAGES["docs/troubleshooting.md"].split("## It does not learn")[0]
    said = " … ".join(re.findall(r"^\| `([^`]+)`", page, re.MULTILINE))
    parts = re.split(r"…|NAME|RUN|'x'|\b\d\b|FINISHED|None|\bnan\b|\bpass call_tool\b|ppo|\[", said)
    return [part.strip(" ':.;=") for part in parts if len(part) > 20]


def test_troubles_are_told_in_the_words_of_the_code():
    paths = [*ROOT.glob("flowgrpo/**/*.py"), *ROOT.glob("experiments/**/*.py")]
    sources = re.sub(r"\"\s*\n\s*f?\"", "", "".join(path.read_text() for path in paths))
    assert len(sentences()) > 20
    assert not [sentence for sentence in sentences() if sentence not in sources]


def test_the_citation_is_of_this_version():
    import flowgrpo as fg

    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert (citation["version"], citation["license"]) == (fg.__version__, "Apache-2.0")
    for paper in citation["references"]:
        assert {"type", "title", "authors", "year", "url"} <= set(paper)


# The API reference -------------------------------------------------------------------------------------


def documented() -> set[str]:
    """The modules that the reference shows."""
    pages = "".join(path.read_text() for path in ROOT.glob("docs/api/*.md"))
    return set(re.findall(r"^\.\. automodule:: (\S+)$", pages, re.MULTILINE))


def test_the_reference_shows_the_module_of_every_export():
    import flowgrpo as fg

    homes = {getattr(getattr(fg, name), "__module__", None) for name in fg.__all__}
    assert {home for home in homes if home and home.startswith("flowgrpo.")} <= documented()


def test_every_public_name_of_the_reference_has_a_docstring():
    """Functions and classes, and what classes offer beside their fields."""
    kinds, bare = (ast.FunctionDef, ast.ClassDef), []
    for module in documented():
        tree = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text())
        top = [node for node in tree.body if isinstance(node, kinds)]
        members = [node for one in top if isinstance(one, ast.ClassDef) for node in one.body if isinstance(node, kinds)]
        named = {module: tree} | {f"{module}.{node.name}": node for node in (*top, *members) if node.name[0] != "_"}
        bare += [name for name, node in named.items() if not ast.get_docstring(node)]
    assert not bare
