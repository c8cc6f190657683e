"""Files are whole or as they were; folders that can't be made are said."""

import os

import pytest

from flowgrpo.files import make_folder, write_whole
from flowgrpo.types import BadInput


def test_a_file_is_replaced_by_a_text_or_by_what_a_function_writes(tmp_path):
    path = tmp_path / "notes.txt"
    write_whole(path, "one ü")
    assert path.read_text(encoding="utf-8") == "one ü"
    write_whole(path, lambda beside: beside.write_bytes(b"two"))
    assert path.read_bytes() == b"two"
    assert list(tmp_path.iterdir()) == [path]


def test_what_can_not_be_written_whole_leaves_the_file_as_it_was(tmp_path):
    path = tmp_path / "notes.txt"
    write_whole(path, "one")

    def full(beside):
        beside.write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(BadInput, match=r"notes.txt could not be written \(No space left on device\): make room, or"):
        write_whole(path, full)
    assert path.read_text() == "one"
    assert list(tmp_path.iterdir()) == [path]


def test_what_interrupts_the_writer_leaves_nothing_beside(tmp_path):
    def interrupted(beside):
        beside.write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_whole(tmp_path / "notes.txt", interrupted)
    assert not list(tmp_path.iterdir())


def test_a_place_below_a_file_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match=r"notes.txt could not be written \(Not a directory\)"):
        write_whole(tmp_path / "file" / "notes.txt", "one")


def test_a_folder_that_can_not_be_made_is_one_sentence(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match=r"file/cache can't be made \(Not a directory\): choose another folder"):
        make_folder(tmp_path / "file" / "cache")
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(BadInput, match="can't be written: change its permissions"):
        make_folder(tmp_path)
