"""Files are whole or as they were; folders that can't be made are said."""

import os

import pytest

from flowgrpo.files import make_folder, write_whole
from flowgrpo.types import BadInput


def half(beside, error):
    beside.write_text("half")
    raise error


def test_a_file_is_replaced_whole_or_stays_as_it_was(tmp_path):
    path = tmp_path / "notes.txt"
    write_whole(path, "one ü")
    assert path.read_text(encoding="utf-8") == "one ü"
    write_whole(path, lambda beside: beside.write_bytes(b"two"))
    full = OSError(28, "No space left on device")
    with pytest.raises(BadInput, match=r"notes.txt could not be written \(No space left on device\): make room, or"):
        write_whole(path, lambda beside: half(beside, full))
    with pytest.raises(KeyboardInterrupt):
        write_whole(path, lambda beside: half(beside, KeyboardInterrupt()))
    assert path.read_bytes() == b"two"
    assert list(tmp_path.iterdir()) == [path]


def test_a_place_or_folder_that_can_not_be_made_is_one_sentence(tmp_path, monkeypatch):
    assert make_folder(tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match=r"notes.txt could not be written \(Not a directory\)"):
        write_whole(tmp_path / "file" / "notes.txt", "one")
    with pytest.raises(BadInput, match=r"file/cache can't be made \(Not a directory\): choose another folder"):
        make_folder(tmp_path / "file" / "cache")
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(BadInput, match="can't be written: change its permissions"):
        make_folder(tmp_path)
