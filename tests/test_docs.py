"""What the guides say is run: their Python page by page, their commands by the flags that exist, their links."""

import ast
import re
import shlex
from functools import cache
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
PAGES = {path.relative_to(ROOT).as_posix(): path.read_text() for path in sorted(ROOT.glob("docs/*.md"))}
PAGES |= {name: (ROOT / name).read_text() for name in ("README.md", "CONTRIBUTING.md")}
SLOW = {"docs/environments.md"}  # which trains
PROMISE = re.compile(r"^( *)print\(.*\)  # (.+)$", re.MULTILINE)


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGES[page], re.DOTALL | re.MULTILINE)


WITH_PYTHON = [
    pytest.param(page, marks=pytest.mark.slow if page in SLOW else ()) for page in PAGES if blocks(page, "python")
]


@pytest.mark.parametrize("page", WITH_PYTHON)
def test_python_examples_run_one_after_another(page, capsys, tmp_path, monkeypatch):
    """Each example may use what the ones before it made; what a comment behind a print promises is printed."""
    monkeypatch.chdir(tmp_path)  # what they write
    namespace: dict = {"__name__": "page"}
    for source in blocks(page, "python"):
        runs = source.replace("launch.configure()", "")  # the backend of the tests has started
        exec(compile(runs, page, "exec"), namespace)
        printed = capsys.readouterr().out
        for promised in PROMISE.findall(source):
            assert promised[1] in printed


def commands() -> list[tuple[str, list[str]]]:
    """(page, words) of every command of a module of this repository."""
    found = []
    for page in PAGES:
        for line in "\n".join(blocks(page, "sh")).replace("\\\n", " ").splitlines():
            for part in line.split("&&"):
                words = shlex.split(part, comments=True)
                if words[:2] == ["python", "-m"] and words[2].startswith("experiments"):
                    found.append((page, words[2:]))
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
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("experiments"):
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            for name in names:
                if name and (ROOT / f"{name.replace('.', '/')}.py").exists():
                    found |= flags_of(name)
    return frozenset(found)


@pytest.mark.parametrize(("page", "words"), commands(), ids=lambda x: " ".join(x) if isinstance(x, list) else x)
def test_commands_name_modules_and_flags_that_exist(page, words):
    known = flags_of(words[0])
    for word in words[1:]:
        if word.startswith("--"):
            name = word.removeprefix("--").split("=")[0]
            assert name in known or name.removeprefix("no") in known, f"{page}: {words[0]} has no flag --{name}"


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as they are made of them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", PAGES[page], flags=re.DOTALL)):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        path = (ROOT / page).parent / name if name else ROOT / page
        assert path.exists(), f"{page}: {target}"
        if anchor:
            assert anchor in anchors(path.read_text()), f"{page}: {target}"


def sentences() -> list[str]:
    """What the page of troubles says that commands say: the parts that no name or number interrupts."""
    page = PAGES["docs/troubleshooting.md"].split("## It does not learn")[0]
    said = " … ".join(re.findall(r"^\| `([^`]+)`", page, re.MULTILINE))
    parts = re.split(r"…|NAME|RUN|'x'|\b\d\b|FINISHED|None|\bnan\b|\bpass do\b|ppo|\[", said)
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

    homes = {getattr(value, "__module__", None) for name, value in vars(fg).items() if not name.startswith("_")}
    assert {home for home in homes if home and home.startswith("flowgrpo.")} <= documented() | {"flowgrpo.spread"}


@pytest.mark.parametrize("module", sorted(documented()))
def test_every_public_name_of_the_reference_has_a_docstring(module):
    """Functions and classes, and what classes offer beside their fields."""
    tree = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text())
    kinds = (ast.FunctionDef, ast.ClassDef)
    top = [node for node in tree.body if isinstance(node, kinds)]
    members = [node for one in top if isinstance(one, ast.ClassDef) for node in one.body if isinstance(node, kinds)]
    bare = [node.name for node in (*top, *members) if not node.name.startswith("_") and not ast.get_docstring(node)]
    assert ast.get_docstring(tree)
    assert not bare
