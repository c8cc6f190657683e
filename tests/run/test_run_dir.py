"""The folder of a run: the same run goes on, another one is refused with what differs, one process at a time."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from flowgrpo.run import run_dir as run_folders
from flowgrpo.run.run_dir import begin_anew, check_own, check_run, differing, machine, run_folder
from flowgrpo.types import BadInput

ROOT = Path(__file__).parent.parent.parent
SETTINGS = {"seed": 0, "learning_rate": 3e-4, "tools": ("add", "sub"), "updates": 30}


def test_the_same_run_goes_on(tmp_path):
    for _ in range(2):
        with run_folder(tmp_path / "deep" / "run", "tiny", SETTINGS) as folder:
            written = json.loads((folder / "run.json").read_text())
    assert written["settings"] == {**SETTINGS, "tools": ["add", "sub"]}
    assert written["machine"]["devices"] == 8
    assert {"flowgrpo", "jax", "jaxlib", "device_kind", "threads"} <= set(written["machine"])


def test_another_run_is_refused_with_what_differs(tmp_path):
    with run_folder(tmp_path, "tiny", SETTINGS):
        pass
    before = (tmp_path / "run.json").read_text()
    with (
        pytest.raises(BadInput) as caught,
        run_folder(tmp_path, "tiny", {**SETTINGS, "seed": 1, "updates": 60, "beta": 0.1}),
    ):
        pass
    assert str(caught.value) == (
        f"{tmp_path} holds another run: seed: there 0, here 1; updates: there 30, here 60; "
        "beta: there nothing, here 0.1. Choose another folder, or the settings that it was started with"
    )
    assert (tmp_path / "run.json").read_text() == before


def test_s1_another_machine_is_refused(tmp_path, monkeypatch):
    with run_folder(tmp_path, "tiny", SETTINGS):
        pass
    monkeypatch.setattr(run_folders, "machine", lambda: machine() | {"threads": 99, "jaxlib": "0.99"})
    sentence = r"jaxlib: there .*, here \"0.99\"; threads: there \d+, here 99"
    with pytest.raises(BadInput, match=sentence), run_folder(tmp_path, "tiny", SETTINGS):
        pass
    with run_folder(tmp_path, "tiny", SETTINGS, may_differ=("jaxlib", "threads")):
        pass


def test_what_may_differ_may_and_is_noted(tmp_path):
    with run_folder(tmp_path, "tiny", SETTINGS):
        pass
    with run_folder(tmp_path, "tiny", SETTINGS | {"updates": 60}, may_differ=("updates",)):
        pass
    with run_folder(tmp_path, "tiny", SETTINGS | {"updates": 60}):
        pass


def test_many_differences_are_counted():
    assert differing({"a": 1, "b": [1]}, {"a": 1, "b": [1]}) == []
    assert differing({"a": 1}, {"b": 2}) == ["a: there 1, here nothing", "b: there nothing, here 2"]


def test_a_folder_has_one_process(tmp_path):
    program = f"""
from flowgrpo.run.run_dir import run_folder
with run_folder({str(tmp_path)!r}, "tiny", {{}}):
    pass"""
    with run_folder(tmp_path, "tiny", {}, may_differ=list(machine())):
        environment = os.environ | {"PYTHONPATH": "."}
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, env=environment, check=False
        )
        assert f"another process works in {tmp_path}: wait for its end" in done.stderr
    with run_folder(tmp_path, "tiny", {}):
        pass


def test_a_folder_that_can_not_be_written_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="choose another folder"), run_folder(tmp_path / "file", "tiny", {}):
        pass
    (tmp_path / "run" / ".lock").mkdir(parents=True)
    with (
        pytest.raises(BadInput, match=r"can't be written \(Is a directory\)"),
        run_folder(tmp_path / "run", "tiny", {}),
    ):
        pass


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("", r"can't be read \(.*\)"),
        ("[]", "is no record of a run, since it has no 'settings'"),
        ('{"recipe": "tiny", "settings": 3, "machine": {}}', "is no record of a run, since it has no 'settings'"),
        ('{"recipe": "tiny", "settings": {}}', "is no record of a run, since it has no 'machine'"),
    ],
)
def test_a_spoiled_run_json_is_said(tmp_path, text, wrong):
    (tmp_path / "run.json").write_text(text)
    sentence = f"run.json {wrong}: restore it, or choose another folder"
    with pytest.raises(BadInput, match=sentence), run_folder(tmp_path, "tiny", {}):
        pass


def test_whoever_has_patience_waits_until_another_has_left(tmp_path):
    leave = threading.Event()

    def stay():
        with run_folder(tmp_path, "tiny", {"seed": 0}):
            there.set()
            leave.wait(20)

    there = threading.Event()
    other = threading.Thread(target=stay)
    other.start()
    assert there.wait(20)
    with (
        pytest.raises(BadInput, match="another process works in"),
        run_folder(tmp_path, "tiny", {"seed": 0}, patience=0.2),
    ):
        pass
    threading.Timer(0.3, leave.set).start()
    with run_folder(tmp_path, "tiny", {"seed": 0}, patience=20):
        assert leave.is_set()
    other.join()


def test_a_run_is_begun_anew_where_one_is_and_nobody_works_in_it(tmp_path):
    begin_anew(tmp_path / "nothing")  # there is nothing to remove
    with run_folder(tmp_path / "run", "tiny", {"seed": 0}) as folder:
        (folder / "checkpoints").mkdir()
        (folder / "checkpoints" / "one").write_text("1")
        with pytest.raises(BadInput, match="another process works in"):
            begin_anew(folder)
        assert (folder / "checkpoints" / "one").exists()
    begin_anew(folder)
    assert [path.name for path in folder.iterdir()] == [".lock"]
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "one.txt").write_text("mine")
    with pytest.raises(BadInput, match="holds no run that could be begun again"):
        begin_anew(tmp_path / "letters")
    assert (tmp_path / "letters" / "one.txt").exists()


def test_a_run_of_another_recipe_is_one_short_sentence_and_nothing_is_written(tmp_path):
    ours = {f"setting_{i}": i for i in range(12)}
    check_own(tmp_path, "tiny", ours)
    assert list(tmp_path.iterdir()) == []
    check_run(tmp_path, "tiny", ours)
    check_own(tmp_path, "tiny", ours)
    with pytest.raises(BadInput, match="holds another run: setting_3: there 3, here 4"):
        check_own(tmp_path, "tiny", ours | {"setting_3": 4})
    check_own(tmp_path, "tiny", ours | {"setting_3": 4}, may_differ=["setting_3"])
    with pytest.raises(BadInput, match=f"^{tmp_path} holds a run of tiny, not of large: choose another folder$"):
        check_own(tmp_path, "large", ours)
