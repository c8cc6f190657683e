"""Files and folders are whole or as they were; those that can't be made are said."""

import itertools
import os
import re
import shlex
import shutil
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from flowgrpo import files
from flowgrpo.files import make_folder, pip_install, read_json, replace_folder, write_atomic
from flowgrpo.types import BadInput


def half(beside, error):
    beside.write_text("half")
    raise error


def test_files_are_replaced_atomically(tmp_path):
    path = tmp_path / "notes.txt"
    write_atomic(path, "one ü")
    assert path.read_text(encoding="utf-8") == "one ü"
    write_atomic(path, lambda beside: beside.write_bytes(b"two"))
    full = OSError(28, "No space left on device")
    with pytest.raises(BadInput, match=r"notes.txt could not be written \(No space left on device\): make room, or"):
        write_atomic(path, lambda beside: half(beside, full))
    with pytest.raises(KeyboardInterrupt):
        write_atomic(path, lambda beside: half(beside, KeyboardInterrupt()))
    assert path.read_bytes() == b"two"
    assert list(tmp_path.iterdir()) == [path]


def test_unwritable_places_are_named(tmp_path, monkeypatch):
    assert make_folder(tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match=r"notes.txt could not be written \(Not a directory\)"):
        write_atomic(tmp_path / "file" / "notes.txt", "one")
    with pytest.raises(BadInput, match=r"file/cache can't be made \(Not a directory\): choose another folder"):
        make_folder(tmp_path / "file" / "cache")
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(BadInput, match="can't be written: change its permissions"):
        make_folder(tmp_path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "No such file or directory"),
        (b"{", "Expecting property name"),
        (b"\xff\xfe{", "codec can't decode"),
        pytest.param(b"[" * 100_000, "it is nested too deep", id="deep list"),
        pytest.param(b'{"a":' * 100_000, "it is nested too deep", id="deep object"),
        pytest.param(b"9" * 5000, "Exceeds the limit", id="digits"),
        (b"[1]", "it holds a list, not a JSON object"),
        ("folder", "it is no file"),
        ("pipe", "it is no file"),
    ],
)
def test_json_files_that_are_no_object_are_named(tmp_path, content, reason):
    path = tmp_path / "note.json"
    if content == "pipe":
        os.mkfifo(path)
    elif content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(BadInput) as caught:
        read_json(path, "remove it")
    sentence = str(caught.value)
    assert (reason in sentence, "\n" in sentence, len(sentence) < 300) == (True, False, True)
    assert sentence.startswith(f"{path} can't be read (")
    assert sentence.endswith("): remove it")
    with pytest.raises(BadInput, match="File name too long"):
        read_json(tmp_path / ("a" * 5000), "remove it")


class Killed(BaseException):
    pass


def until_killed(change, moments):
    """Wrap a change of the disk so that from the moment when `moments` gives 0 nothing is changed any more."""

    def run(*args, **settings):
        if next(moments) >= 0:
            raise Killed
        return change(*args, **settings)

    return run


def fill_with(*names: str):
    return lambda folder: [(folder / name).write_text(name) for name in names]


def replace(folder: Path, *names: str) -> None:
    replace_folder(folder, fill_with(*names), names=["weights*", "config"], kind="a model")


def names_in(folder: Path) -> list[str]:
    return sorted(item.name for item in folder.iterdir())


@pytest.mark.parametrize("at_once", [True, False])
def test_folders_are_replaced_atomically_even_if_killed(tmp_path, monkeypatch, at_once):
    """Never a mix of both; without a system call that exchanges two folders, the old one may be set aside."""
    if not at_once:
        monkeypatch.setattr(files.ctypes, "CDLL", lambda _: None)
    for moment in itertools.count():
        place = tmp_path / str(moment) / "model"
        replace(place, "config", "weights-1", "weights-2")
        with monkeypatch.context() as patch:
            moments = itertools.count(-moment)
            changes = [(Path, "mkdir"), (Path, "write_text"), (shutil, "rmtree")]
            for owner, name in [*changes, (files, "_exchange") if at_once else (Path, "rename")]:
                patch.setattr(owner, name, until_killed(getattr(owner, name), moments))
            try:
                replace(place, "config", "weights")
                break
            except Killed:
                pass
        there = names_in(place) if place.exists() else names_in(next(place.parent.glob("*-old")))
        assert there in (["config", "weights"], ["config", "weights-1", "weights-2"])
        assert place.exists() or not at_once
        replace(place, "config", "weights")
        assert names_in(place) == ["config", "weights"]
    assert names_in(place.parent) == ["model"]
    assert moment > 5


def test_folders_with_other_files_are_not_replaced(tmp_path):
    for name in ("notes.txt", "weights/1"):
        place = tmp_path / name[:5]
        make_folder((place / name).parent)
        fill_with("config", name)(place)
        with pytest.raises(BadInput, match=f"holds {name.partition('/')[0]}, which is no part of a model: name a new"):
            replace(place, "config")
        assert (place / name).read_text() == name
    make_folder(tmp_path / "empty")
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    replace(tmp_path / "link", "config")
    assert names_in(tmp_path / "empty") == ["config"]
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match=r"can't write a model to .*file: it is a file; name a folder"):
        replace(tmp_path / "file", "config")
    full = OSError(28, "No space left on device")
    with pytest.raises(BadInput, match=r"link could not be written \(No space left on device\): make room"):
        replace_folder(tmp_path / "link", lambda beside: half(beside / "half", full), names=["config"], kind="a model")
    assert names_in(tmp_path) == ["empty", "file", "link", "notes", "weigh"]


ROOT = Path(__file__).parent.parent
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
ASKED = {
    name for path in ROOT.glob("flowgrpo/**/*.py") for name in re.findall(r"pip_install\('(\w+)'\)", path.read_text())
}


@pytest.mark.parametrize("extra", sorted(ASKED | {"aot", "math", "trackio"}))
def test_pip_install_names_the_packages_of_an_extra(extra, monkeypatch):
    """With a wheel as in a checkout; this package is on no index."""
    assert shlex.split(pip_install(extra)) == ["pip", "install", *EXTRAS[extra]]
    for wanted in (None, [], ["math-verify>=0.9; extra == 'maths'"]):  # nothing installed, or another version
        error = metadata.PackageNotFoundError if wanted is None else None
        monkeypatch.setattr(files.metadata, "requires", lambda _, wanted=wanted, error=error: _raise(error) or wanted)
        assert pip_install(extra) == f"pip install '.[{extra}]' where the sources are"


def _raise(error):
    if error is not None:
        raise error


def test_no_message_advises_installing_from_an_index_that_lacks_it():
    paths = [
        path for folder in ("flowgrpo", "experiments", "docs", "notebooks") for path in ROOT.glob(f"{folder}/**/*")
    ]
    texts = {path: path.read_text() for path in paths if path.suffix in (".py", ".md", ".ipynb")}
    texts |= {path: path.read_text() for path in ROOT.glob("*.md")}
    assert len(ASKED) > 5
    assert not [path for path, text in texts.items() if re.search(r"install\s+['\"]?flowgrpo\b", text)]
