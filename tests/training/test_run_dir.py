"""The folder of a run: the same run goes on, another one is refused with what differs, one process at a time."""

import json
import os
import threading
from functools import partial
from pathlib import Path

import pytest

from flowgrpo import renamed
from flowgrpo.recipes import own_env_config
from flowgrpo.training import run_dir as run_folders
from flowgrpo.training.config import flat_settings
from flowgrpo.training.run_dir import (
    check_run,
    check_same_run,
    delete_run,
    list_differences,
    machine,
    read_run,
    run_folder,
)
from flowgrpo.types import BadInput

SETTINGS = {"seed": 0, "learning_rate": 3e-4, "tools": ("add", "sub"), "updates": 30}


def test_same_run_may_resume(tmp_path):
    for _ in range(2):
        with run_folder(tmp_path / "deep" / "run", "tiny", SETTINGS) as folder:
            written = json.loads((folder / "run.json").read_text())
    assert written["settings"] == {**SETTINGS, "tools": ["add", "sub"]}
    assert written["machine"]["devices"] == 8
    assert {"flowgrpo", "jax", "jaxlib", "device_kind", "threads"} <= set(written["machine"])


def test_settings_by_section_and_by_name_are_the_same_run(tmp_path):
    """Earlier versions stored them by name."""
    by_section = {"run": {"seed": 0, "updates": 30}, "learner": {"learning_rate": 3e-4}}
    with run_folder(tmp_path, "tiny", flat_settings(by_section)):
        pass
    check_same_run(tmp_path, "tiny", by_section)
    longer = by_section | {"run": {"seed": 0, "updates": 60}}
    with run_folder(tmp_path, "tiny", longer, may_change=("updates",)):
        assert json.loads((tmp_path / "run.json").read_text())["settings"] == longer
    assert read_run(tmp_path)["settings"] == flat_settings(longer)
    with pytest.raises(BadInput, match=r"learning_rate: there 0\.0003, here 0\.1"):
        check_same_run(tmp_path, "tiny", longer | {"learner": {"learning_rate": 0.1}})


def test_settings_that_a_recipe_no_longer_has_are_not_compared(tmp_path):
    current = own_env_config.preset("a/model", env="gymnasium:Taxi-v3")
    earlier = dict.fromkeys(renamed.REMOVED["own_env"], 0)
    with run_folder(tmp_path, "own_env", flat_settings(current.to_json()) | earlier):
        pass
    check_same_run(tmp_path, "own_env", current.to_json())
    assert own_env_config.Config.from_json(read_run(tmp_path)["settings"]) == current


def test_another_run_is_refused_with_the_differences(tmp_path):
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


def test_S1_another_machine_is_refused(tmp_path, monkeypatch):
    with run_folder(tmp_path, "tiny", SETTINGS):
        pass
    monkeypatch.setattr(run_folders, "machine", lambda: machine() | {"threads": 99, "jaxlib": "0.99"})
    sentence = r"jaxlib: there .*, here \"0.99\"; threads: there \d+, here 99"
    with pytest.raises(BadInput, match=sentence), run_folder(tmp_path, "tiny", SETTINGS):
        pass
    with run_folder(tmp_path, "tiny", SETTINGS, may_change=("jaxlib", "threads")):
        pass


def test_settings_that_may_change_are_updated(tmp_path):
    with run_folder(tmp_path, "tiny", SETTINGS):
        pass
    with run_folder(tmp_path, "tiny", SETTINGS | {"updates": 60}, may_change=("updates",)):
        pass
    with run_folder(tmp_path, "tiny", SETTINGS | {"updates": 60}):
        pass


def test_old_names_of_settings_are_read(tmp_path, monkeypatch):
    monkeypatch.setitem(renamed.SETTINGS, "old_rate", "rate")
    with run_folder(tmp_path, "tiny", {"old_rate": 0.1}):
        pass
    assert read_run(tmp_path)["settings"] == {"rate": 0.1}
    with run_folder(tmp_path, "tiny", {"rate": 0.1}):
        pass
    with pytest.raises(BadInput, match=r"rate: there 0\.1, here 0\.2"), run_folder(tmp_path, "tiny", {"rate": 0.2}):
        pass


def test_many_differences_are_counted():
    assert list_differences({"a": 1, "b": [1]}, {"a": 1, "b": [1]}) == []
    assert list_differences({"a": 1}, {"b": 2}) == ["a: there 1, here nothing", "b: there nothing, here 2"]


def test_folder_that_cannot_be_written_is_one_sentence(tmp_path):
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
        pytest.param("[" * 100_000 + "]" * 100_000, r"can't be read \(it is nested too deep\)", id="deep"),
        ("[]", r"can't be read \(it holds a list, not a JSON object\)"),
        ('{"recipe": "tiny", "settings": 3, "machine": {}}', "is no record of a run, since it has no 'settings'"),
        ('{"recipe": "tiny", "settings": {}}', "is no record of a run, since it has no 'machine'"),
    ],
)
def test_damaged_run_json_is_refused(tmp_path, text, wrong):
    (tmp_path / "run.json").write_text(text)
    sentence = f"run.json {wrong}: restore it, or choose another folder"
    with pytest.raises(BadInput, match=sentence), run_folder(tmp_path, "tiny", {}):
        pass


def test_lock_timeout_waits_for_another_process(tmp_path):
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
        run_folder(tmp_path, "tiny", {"seed": 0}, lock_timeout=0.2),
    ):
        pass
    threading.Timer(0.3, leave.set).start()
    with run_folder(tmp_path, "tiny", {"seed": 0}, lock_timeout=20):
        assert leave.is_set()
    other.join()


MADE = [
    *("metrics.jsonl", "timings.jsonl", "warnings.jsonl", "result.json", "loggers.json", "curves.png"),
    *("checkpoints/00000014/checkpoint.json", "checkpoints/00000014/arrays/d/1", "events.jsonl", ".run.json-0a1b2c3d"),
    *("checkpoints/.unfinished-00000016/arrays/d/1", "warm_start/checkpoints/00000050/checkpoint.json"),
    *("trajectories/000001.jsonl", "trajectories/000001.advantages.jsonl", "trajectories/test-after.jsonl"),
    *("journal/000014-train.jsonl", "batches/000001.jsonl", "start/made_with.json", "start/model.safetensors"),
    "tensorboard/train/events.out.tfevents.0000000000.flowgrpo",
]
FOREIGN = [
    *("thesis.tex", "src/deep/a.py", "notes.md", "metrics.jsonl.bak", "index.html", "start/notes.txt"),
    *("checkpoints/notes.txt", "checkpoints/00000014.bak/checkpoint.json", "checkpoints/20260101/weights.bin"),
    *("checkpoints/00000014/why.txt", "trajectories/mine.jsonl", "journal/diary.txt", "tensorboard/mine/events.txt"),
    *("model/model.safetensors", "wandb/run-1/log", "batches/000001.jsonl.d/a"),
]


def fill(folder: Path, names: list[str]) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)


def files_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() or path.is_symlink()}


def test_delete_run_needs_a_run_that_is_not_in_use(tmp_path):
    delete_run(tmp_path / "nothing")  # there is nothing to remove
    with run_folder(tmp_path / "run", "tiny", {"seed": 0}) as folder:
        fill(folder, MADE)
        with pytest.raises(BadInput, match="another process works in"):
            delete_run(folder)
        assert files_in(folder) == {*MADE, ".lock", "run.json"}
    delete_run(folder)
    assert [path.name for path in folder.iterdir()] == [".lock"]
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "one.txt").write_text("mine")
    with pytest.raises(BadInput, match="holds no run that could be started again"):
        delete_run(tmp_path / "letters")
    assert (tmp_path / "letters" / "one.txt").exists()


@pytest.mark.parametrize("inside", [False, True])
def test_foreign_files_survive_a_run_in_their_folder(tmp_path, monkeypatch, inside):
    """Also with `--workdir=.`, in folders with names of a run's, and behind links."""
    folder = tmp_path / "project"
    fill(folder, FOREIGN)
    fill(tmp_path / "far", ["00000014/checkpoint.json", "000001.jsonl", "a.txt"])
    (folder / "data").symlink_to(tmp_path / "far")
    (folder / "result.json").symlink_to(tmp_path / "far" / "a.txt")
    (folder / "warm_start").mkdir()
    (folder / "warm_start" / "checkpoints").symlink_to(tmp_path / "far")
    monkeypatch.chdir(folder)
    place = Path() if inside else folder
    far = files_in(tmp_path / "far")
    with pytest.raises(BadInput, match=r"holds result.json and no run.json, .* would overwrite it"):
        check_same_run(place, "tiny", {})
    (folder / "result.json").unlink()
    with run_folder(place, "tiny", {}):
        fill(folder, [name for name in MADE if name != "warm_start/checkpoints/00000050/checkpoint.json"])
        (folder / "result.json").unlink()
        (folder / "result.json").symlink_to(tmp_path / "far" / "a.txt")
    delete_run(place)
    assert files_in(folder) == {*FOREIGN, ".lock", "data"}
    assert files_in(tmp_path / "far") == far
    with run_folder(place, "tiny", {"seed": 1}):
        begin = (folder / "run.json").read_text()
    assert '"seed": 1' in begin


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "curves.png", "trajectories/000001.jsonl", "trajectories/test-a.jsonl"]
)
def test_first_run_overwrites_no_foreign_file(tmp_path, name):
    fill(tmp_path, [name])
    for begin in (partial(check_same_run, tmp_path, "tiny", {}), run_folder(tmp_path, "tiny", {}).__enter__):
        with pytest.raises(BadInput, match=f"holds {name} and no run.json, .* choose another folder, or move it away"):
            begin()
    assert files_in(tmp_path) == {name}
    fill(tmp_path, [".lock"])  # as a run that was killed before it began leaves one
    delete_run(tmp_path)
    assert files_in(tmp_path) == {name, ".lock"}


def test_interrupted_deletion_can_be_repeated(tmp_path, monkeypatch):
    with run_folder(tmp_path, "tiny", {}):
        fill(tmp_path, MADE)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rmdir", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            delete_run(tmp_path)
        patch.undo()
        patch.setattr(Path, "unlink", lambda *_, **__: os.stat("/nowhere"))
        fill(tmp_path, ["metrics.jsonl"])
        with pytest.raises(BadInput, match=r"metrics.jsonl can't be removed"):
            delete_run(tmp_path)
    delete_run(tmp_path)
    assert files_in(tmp_path) == {".lock"}


def test_run_of_another_recipe_is_refused_and_nothing_written(tmp_path):
    ours = {f"setting_{i}": i for i in range(12)}
    check_same_run(tmp_path, "tiny", ours)
    assert list(tmp_path.iterdir()) == []
    check_run(tmp_path, "tiny", ours)
    check_same_run(tmp_path, "tiny", ours)
    with pytest.raises(BadInput, match="holds another run: setting_3: there 3, here 4"):
        check_same_run(tmp_path, "tiny", ours | {"setting_3": 4})
    check_same_run(tmp_path, "tiny", ours | {"setting_3": 4}, may_change=["setting_3"])
    with pytest.raises(BadInput, match=f"^{tmp_path} holds a run of tiny, not of large: choose another folder$"):
        check_same_run(tmp_path, "large", ours)
