"""Checkpoints: bit for bit, whole or not there, the newest and the best, and what is said of damage (S1)."""

import gc
import itertools
import json
import os
import shutil
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from commands import file_size_limit
from flax import struct
from jax.sharding import NamedSharding, PartitionSpec

from flowgrpo.training import checkpoints as module
from flowgrpo.training.checkpoints import Checkpoints, params_sha256
from flowgrpo.training.tree_io import to_leaves
from flowgrpo.types import BadInput


class State(struct.PyTreeNode):
    params: dict
    opt_state: tuple
    key: jax.Array
    step: int
    name: str = struct.field(pytree_node=False, default="static")


def make_state(scale: float = 1.0) -> State:
    params = {"embed": scale * jnp.arange(6.0).reshape(2, 3), "out": {"b": jnp.full(3, scale, jnp.bfloat16)}}
    return State(params, optax.adamw(1e-3).init(params), jax.random.key(7), 3)


def face(leaf) -> tuple:
    """All that there is to a leaf: its type, dtype, shape and bits."""
    if not hasattr(leaf, "dtype"):
        return type(leaf), repr(leaf)
    is_key = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    array = np.asarray(jax.random.key_data(leaf) if is_key else leaf)
    return type(leaf), leaf.dtype, leaf.shape, getattr(leaf, "weak_type", None), array.tobytes()


def assert_same(there, here) -> None:
    assert jax.tree.structure(there) == jax.tree.structure(here)
    assert [face(leaf) for leaf in jax.tree.leaves(there)] == [face(leaf) for leaf in jax.tree.leaves(here)]


def names_in(checkpoints: Checkpoints) -> list[str]:
    return sorted(path.name for path in checkpoints.folder.iterdir())


# There and back ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("nan_allowed")  # while NaN is looked for, JAX donates nothing
def test_S1_arrays_being_saved_outlive_their_donation():
    """Arrays are not copied for a checkpoint: a program that is given one of them takes other memory meanwhile."""
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    other, state, before = jnp.zeros(1 << 16), jnp.zeros(1 << 16), np.zeros(1 << 16)
    add(other)
    assert other.is_deleted()  # or this test would say nothing
    (leaf,) = to_leaves({"x": state}, copy=True)
    for _ in range(3):
        state = add(state)
    np.testing.assert_array_equal(leaf.value, before)
    assert float(state[0]) == 3


def test_arrays_are_written_and_read_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "PART", 64)
    checkpoints, state = Checkpoints(tmp_path), make_state()
    checkpoints.save(1, state)
    parts = sorted(checkpoints.folder.glob("*/arrays/*"))
    assert len(parts) > 1
    assert_same(checkpoints.restore(1, make_state(2.0)), state)
    shutil.rmtree(parts[-1])
    assert_same(checkpoints.restore_part(1, "params", state.params), state.params)
    with pytest.raises(BadInput, match="is damaged"):
        checkpoints.restore(1, state)


@pytest.mark.usefixtures("nan_allowed")
@pytest.mark.parametrize("background", [False, True])
def test_S1_a_run_is_restored_bit_for_bit(tmp_path, background):
    payload = np.array([0x7FC00123, 0xFFC00001], np.uint32).view(np.float32)
    tree = {
        "state": make_state(),
        "keys": jax.random.split(jax.random.key(1, impl="rbg"), 3),
        "numbers": [True, 3, 2**80, 0.1, float("inf"), float("nan"), -0.0, "word", b"\x00\xff", None],
        "scalars": [np.float64(0.1), np.int8(3), np.bool_(True)],
        "numpy": {"zeros": np.full(4, -0.0, np.float32), "nan": payload, "empty": np.zeros((0, 3), np.int8)},
        "small": [np.array([1, -3], ml_dtypes.int4), np.array([[0.5, -1]], ml_dtypes.float8_e4m3fn)],
        "large": np.array([2**63], np.uint64),
        "column": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "weak": [jnp.asarray(1.5), jnp.broadcast_to(jnp.asarray(2), (3,))],
        "nothing": [[], {}, ()],
    }
    with Checkpoints(tmp_path, background=background) as checkpoints:
        checkpoints.save(5, tree, {"update": 5, "loss": 0.25})
    again = Checkpoints(tmp_path)
    for state in (make_state(scale=0.0), jax.eval_shape(make_state).replace(step=0)):  # values don't matter
        assert_same(again.restore(5, tree | {"state": state}), tree)
    assert again.metadata(5) == {"update": 5, "loss": 0.25}


def test_restored_arrays_are_sharded_like_the_template(tmp_path):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    compiled = jax.jit(lambda x: x + 1, donate_argnums=0)
    tree = {"rows": jax.device_put(jnp.arange(16.0), NamedSharding(mesh, PartitionSpec("data")))}
    tree["free"] = compiled(jnp.ones(2))
    Checkpoints(tmp_path).save(1, tree)
    restored = Checkpoints(tmp_path).restore(1, tree)
    assert_same(restored, tree)
    assert restored["rows"].sharding == tree["rows"].sharding
    assert (restored["rows"].committed, restored["free"].committed) == (True, False)
    assert compiled(restored["free"]).tolist() == [3, 3]
    assert compiled._cache_size() == 1


def test_background_saves_may_be_changed_and_read_at_once(tmp_path, monkeypatch):
    held, changed = np.arange(4), threading.Event()
    monkeypatch.setattr(module, "check_disk_space", lambda *_: changed.wait(60))
    with Checkpoints(tmp_path, background=True, best="success") as checkpoints, ThreadPoolExecutor(3) as readers:
        checkpoints.save(1, {"held": held}, {"success": 0.5})
        held += 1
        calls = (checkpoints.restore, 1, {"held": held}), (checkpoints.latest,), (checkpoints.best,)
        reads = [readers.submit(*call) for call in calls]  # wait until it is written
        wait(reads, timeout=0.1)
        changed.set()
        restored, latest, best = (read.result() for read in reads)
        assert (restored["held"].tolist(), latest, best) == ([0, 1, 2, 3], 1, 1)


def test_ragged_parts_are_restored_with_any_structure(tmp_path):
    buffer = [{"tokens": [[i] * n for i in range(n)], "text": "x" * n, "outcome": None} for n in range(3)]
    Checkpoints(tmp_path).save(1, {"buffer": buffer, "step": 4, "empty": [], "array": [np.arange(3)]})
    restored = Checkpoints(tmp_path).restore(1, {"buffer": ..., "step": 0, "empty": ..., "array": ...})
    assert restored.pop("array")[0].tolist() == [0, 1, 2]
    assert restored == {"buffer": buffer, "step": 4, "empty": []}


def test_restore_part_reads_nothing_else(tmp_path, monkeypatch):
    tree = {"params": {"w": np.ones(3), "deep": {"b": np.zeros((0, 2))}}, "params_of_another": np.ones(500), "n": [4]}
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, tree)
    restore, read = module._restore_arrays, set()
    monkeypatch.setattr(module, "_restore_arrays", lambda at, names: read.update(names) or restore(at, names))
    assert checkpoints.restore_part(1, "params", tree["params"])["w"].tolist() == [1, 1, 1]
    assert sorted(checkpoints.restore_part(1, "params")) == ["deep", "w"]
    assert checkpoints.restore_part(1, "params/w").tolist() == [1, 1, 1]
    assert checkpoints.restore_part(1, "n") == [4]
    assert len(read) == 1


def test_params_hash_depends_on_paths_types_shapes_and_bits():
    params = {"b": jnp.ones(3), "a": {"c": np.zeros(2, np.int32)}}
    assert params_sha256(params) == params_sha256({"a": {"c": jnp.zeros(2, jnp.int32)}, "b": np.ones(3, np.float32)})
    others = [
        {"b": jnp.ones(3)},
        params | {"b": jnp.ones((3, 1))},
        params | {"b": jnp.ones(3, jnp.float16)},
        params | {"b": jnp.ones(3).at[0].set(1 + 2**-23)},
        {"b": params["b"], "a": {"d": params["a"]["c"]}},
    ]
    assert len({params_sha256(other) for other in [params, *others]}) == 6


# Which are kept ---------------------------------------------------------------------------------------


def test_newest_and_best_checkpoints_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path, best="success")
    assert checkpoints.latest() is checkpoints.best() is None
    for step, success in enumerate([0.1, 0.9, 0.9, float("nan"), 0.3, None, 0.2]):
        checkpoints.save(step, {"step": step}, {"success": success})
    assert (checkpoints.steps(), checkpoints.latest(), checkpoints.best()) == ([2, 5, 6], 6, 2)
    assert checkpoints.restore(2, {"step": 0}) == {"step": 2}
    checkpoints.save(6, {"step": 60})
    assert (names_in(checkpoints), checkpoints.restore(6, ...)) == (["00000002", "00000005", "00000006"], {"step": 60})
    Checkpoints(tmp_path, keep=1).save(7, {})
    assert names_in(checkpoints) == ["00000007"]


class Killed(BaseException):
    pass


def dying(change, moments):
    """Wrap a change of the disk so that the process dies, by `Killed`, just before it when `moments` gives 0."""

    def run(*args, **settings):
        if not next(moments):
            raise Killed
        return change(*args, **settings)

    return run


@pytest.mark.parametrize("keep", [1, 2])
def test_S1_kills_leave_complete_checkpoints_and_leftovers_are_deleted(tmp_path, monkeypatch, keep):
    """Also while one is replaced by another of the same step: there is the one or the other at every moment."""
    for moment in itertools.count():
        checkpoints, done = Checkpoints(tmp_path / f"{moment}", keep=keep), 0
        with monkeypatch.context() as patch:
            moments = itertools.count(-moment)
            for place, name in ((Path, "mkdir"), (Path, "write_text"), (Path, "rename"), (shutil, "rmtree")):
                patch.setattr(place, name, dying(getattr(place, name), moments))
            try:
                for done, step in enumerate((1, 2, 3, 3, 3)):  # the last two replace one
                    checkpoints.save(step, {"at": step * 10 + done}, {"at": step * 10 + done})
                break
            except Killed:
                following = Checkpoints(tmp_path / f"{moment}", keep=keep)
        latest = following.latest()
        assert latest in ({None, 1}, {1, 2}, {2, 3}, {3}, {3})[done]
        assert all(following.restore(step, {"at": 0}) == following.metadata(step) for step in following.steps())
        if done > 2:
            assert following.metadata(3)["at"] in (30 + done - 1, 30 + done)
        before = {step: following.metadata(step) for step in following.steps()}
        following.save(9, {})
        assert all(name.isdigit() for name in names_in(following))
        assert following.steps() == [*list(before)[len(before) - keep + 1 :], 9]
        assert all(following.metadata(step) == before[step] for step in following.steps()[:-1])
    assert moment > 15


# What is refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ({"a": np.zeros(3), "c": [0]}, "a is float64[2] there, and float64[3] in this run"),
        ({"a": np.zeros(2, np.float32), "c": [0]}, "a is float64[2] there, and float32[2] in this run"),
        ({"a": 1, "c": [0]}, "a is float64[2] there, and int in this run"),
        ({"a": np.zeros(2), "b": 1, "c": [0]}, "it lacks b, which this run has"),
        ([np.zeros(2)], "it lacks 0, which this run has"),
        ({"a": np.zeros(2)}, "it holds c/0, for which there is no place in this run"),
    ],
)
def test_tree_that_does_not_fit_is_refused_by_name(tmp_path, template, words):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"a": np.ones(2), "c": [3]})
    with pytest.raises(BadInput) as caught:
        checkpoints.restore(1, template)
    assert str(caught.value) == f"{tmp_path}/checkpoints/00000001 does not fit: {words}"


def largest_array(folder: Path) -> Path:
    """The file with most of the numbers of a checkpoint."""
    return max(filter(Path.is_file, folder.glob("arrays/**/*")), key=lambda file: file.stat().st_size)


def flip_a_bit(folder: Path) -> None:
    large = largest_array(folder)
    data = bytearray(large.read_bytes())
    data[len(data) // 2] ^= 1
    large.write_bytes(data)


def rewrite(content: Path, change) -> None:
    """Change `checkpoint.json` and put the right checksum on it."""
    description = json.loads(content.read_text())
    del description["crc32"]
    change(description)
    content.write_text(json.dumps(description | {"crc32": zlib.crc32(json.dumps(description).encode())}))


FORGED = {
    "note": lambda description: description.update(note=[]),
    "step": lambda description: description.update(step=4),
    "leaves": lambda description: description.update(leaves=[3]),
    "name": lambda description: description["leaves"][0].update(name=[]),
    "path": lambda description: description["leaves"][0].update(path=[["dict", []]]),
    "kind": lambda description: description["leaves"][0].update(kind="key:none"),
    "shape": lambda description: description["leaves"][0].update(shape=[0, -1]),
}
DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    "what", ["value", "cut", "gone", "list", "deep", "missing", "short", "bit", "tree", "deep tree", *FORGED]
)
def test_damage_is_found_and_the_earlier_checkpoint_named(tmp_path, what):
    checkpoints = Checkpoints(tmp_path)
    for step in (4, 8):
        checkpoints.save(step, {"a": np.random.default_rng(step).normal(size=500), "step": step})
    template = {"a": np.zeros(500), "step": 0}
    path, earlier = checkpoints.folder / "00000008", checkpoints.folder / "00000004"
    content = path / "checkpoint.json"
    text = content.read_text()
    match what:
        case "missing":
            largest_array(path).unlink()
        case "short":
            os.truncate(largest_array(path), 1000)
        case "bit":
            flip_a_bit(path)
        case "tree" | "deep tree":
            (path / "arrays" / "_METADATA").write_text("[]" if what == "tree" else DEEP)
        case _ if what in FORGED:
            rewrite(content, FORGED[what])
        case _:
            spoiled = {"value": text.replace('"value": 8', '"value": 9'), "cut": text[:-5], "gone": "{}"}
            content.write_text((spoiled | {"list": "[]", "deep": DEEP})[what])
    with pytest.raises(
        BadInput, match=r"^[^\n]*00000008 is damaged \([^\n]*\): remove that folder to resume from step 4$"
    ):
        checkpoints.restore(8, template)
    assert checkpoints.restore(4, template)["step"] == 4
    shutil.rmtree(earlier)
    with pytest.raises(BadInput, match="no other is whole: restore it from a copy, or begin a new run"):
        checkpoints.restore(8, template)


def test_several_failing_arrays_print_no_tracebacks(tmp_path, capfd):
    """TensorStore hands the later ones to an event loop that Orbax has closed: one traceback an array."""
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"many": [np.full(9, i) for i in range(60)]})
    shutil.rmtree(checkpoints.folder / "00000001" / "arrays" / "d")
    for _ in range(3):
        with pytest.raises(BadInput, match="00000001 is damaged"):
            checkpoints.restore(1, ...)
    gc.collect()
    time.sleep(0.1)
    assert capfd.readouterr().err == ""


def test_swapped_checkpoints_are_noticed(tmp_path):
    checkpoints = Checkpoints(tmp_path, best="score")
    for step in (1, 2):
        checkpoints.save(step, {"step": step}, {"score": step})
    first, second, aside = (checkpoints.folder / name for name in ("00000001", "00000002", "aside"))
    for place, other in ((first, aside), (second, first), (aside, second)):
        place.rename(other)
    for read in (partial(checkpoints.restore, 2, ...), checkpoints.best):
        with pytest.raises(BadInput, match=r"it is of step [12]: name its folder 0000000[12]"):
            read()


COPIES = ["00000002.bak", "2", "000000002", "0000000²", "0x000002", ".replaced-00000002 (copy)", ".unfinished-2"]


@pytest.mark.parametrize("name", COPIES)
def test_copies_of_a_checkpoint_are_ignored(tmp_path, name):
    checkpoints = Checkpoints(tmp_path, best="score", keep=1)
    checkpoints.save(2, {"step": 2}, {"score": 0.9})
    shutil.copytree(checkpoints.folder / "00000002", checkpoints.folder / name)
    assert (checkpoints.latest(), checkpoints.best()) == (2, 2)
    checkpoints.save(3, {"step": 3}, {"score": 0.5})
    assert (checkpoints.steps(), checkpoints.best()) == ([2, 3], 2)
    assert {name, "00000002", "00000003"} == set(names_in(checkpoints))


@pytest.mark.parametrize("what", ["folder", "checkpoint"])
def test_unreadable_differs_from_missing(tmp_path, monkeypatch, what):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(2, {"step": 2})
    closed = checkpoints.folder if what == "folder" else checkpoints.folder / "00000002"

    def refuse(call):
        def run(path, *args, **settings):
            if Path(path) == closed or closed in Path(path).parents:
                raise PermissionError(13, "Permission denied", str(path))
            return call(path, *args, **settings)

        return run

    monkeypatch.setattr(module.os, "listdir", refuse(os.listdir))  # root may read everything
    for name in ("lstat", "read_bytes"):
        monkeypatch.setattr(Path, name, refuse(getattr(Path, name)))
    with pytest.raises(BadInput, match=r"(can't be read|is damaged) \(.*Permission denied.*\): "):
        checkpoints.metadata(checkpoints.latest())


def test_error_names_an_intact_checkpoint_and_newer_damaged_ones(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=3)
    for step in (2, 4, 8):
        checkpoints.save(step, {"a": np.random.default_rng(step).normal(size=500)})
    flip_a_bit(checkpoints.folder / "00000004")
    flip_a_bit(checkpoints.folder / "00000008")
    with pytest.raises(BadInput, match=r"8 is damaged \(.*\): remove that folder and 00000004 to resume from step 2$"):
        checkpoints.restore(8, ...)


def test_damaged_best_checkpoint_is_reported_and_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1, best="success")
    for step, success in ((1, 0.9), (2, 0.5)):
        checkpoints.save(step, {"step": step}, {"success": success})
    content = checkpoints.folder / "00000001" / module.CONTENT
    content.write_text(content.read_text().replace("0.9", "0.1"))
    checkpoints.save(3, {"step": 3}, {"success": 0.6})
    checkpoints.save(4, {"step": 4}, {"success": 0.4})
    assert checkpoints.steps() == [1, 3, 4]
    message = r"the best checkpoint is unknown: .*00000001 is damaged \(.* saved\): remove that folder to resume from"
    with pytest.raises(BadInput, match=f"{message} step 4$"):
        checkpoints.best()
    shutil.rmtree(content.parent)
    assert checkpoints.best() == 3


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda there: there.save(3, {"f": print}), "f: a builtin_function_or_method can't be saved"),
        (lambda there: there.save(3, {"s": np.array(["a"])}), "s: an array of <U1 can't be saved"),
        (lambda there: there.save(3, {(1, 2): 3}), "keys of what is saved must be strings or whole numbers"),
        (lambda there: there.metadata(3), "has no checkpoint of step 3: there are 1, 2"),
        (lambda there: Checkpoints(there.folder).metadata(3), "has no checkpoint of step 3: there is none"),
        (
            lambda there: there.restore_part(2, "param"),
            "00000002 holds nothing at param: it was saved by a run of another",
        ),
        (lambda there: there.restore_part(2, "params", {"v": 1}), "it lacks v, which this run has"),
        (lambda there: Checkpoints(there.folder, keep=0), "keep=0 must be at least 1"),
        (lambda there: Checkpoints(there.folder / "00000001/checkpoint.json").save(1, {}), "(Not a directory): choose"),
    ],
)
def test_bad_input_is_one_sentence_and_changes_nothing(tmp_path, call, words):
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        checkpoints.save(step, {"params": {"w": 1}})
    with pytest.raises(BadInput) as caught:
        call(checkpoints)
    assert words in str(caught.value)
    assert names_in(checkpoints) == ["00000001", "00000002"]


@pytest.mark.parametrize("background", [False, True])
def test_interrupted_write_is_one_sentence_and_loses_nothing(tmp_path, background):
    checkpoints = Checkpoints(tmp_path, background=background)
    many = np.random.default_rng(0).integers(0, 1 << 40, 50_000)

    def save(step: int) -> None:
        checkpoints.save(step, {"a": many})
        checkpoints.wait()

    for earlier in ("there is no earlier one", "the one of step 1 is whole"):
        with file_size_limit(100_000), pytest.raises(BadInput, match=rf"2 could not .* \(File too large\): {earlier}$"):
            save(2)
        assert names_in(checkpoints) == ["00000001"] * len(checkpoints.steps())  # nothing fills the disk further
        save(1)


def test_full_disk_is_detected_before_writing(tmp_path, monkeypatch):
    checkpoints, asked = Checkpoints(tmp_path), []
    tree = {"a": np.random.default_rng(0).normal(size=500_000), "b": np.zeros(1)}
    monkeypatch.setattr(module, "check_disk_space", lambda _, size, files: asked.append((size, files)))
    checkpoints.save(1, tree, {"text": "x" * 50_000})
    text = (checkpoints.folder / "00000001" / module.CONTENT).stat().st_size
    ((size, few),) = asked
    assert size == 500_001 * 8 + (2 + 8) * 4096 + text  # the numbers; a block for each array and for eight files more
    assert size >= sum(file.stat().st_size for file in checkpoints.folder.glob("**/*"))
    monkeypatch.undo()
    for blocks, words in (
        (1000, "it takes 4.0 MB, and 1.0 MB are left"),
        (10**6, f"it takes {few} files, and the disk"),
    ):
        disk = SimpleNamespace(f_bavail=blocks, f_frsize=1000, f_files=40, f_favail=few - 1)
        monkeypatch.setattr(module.os, "statvfs", lambda _, disk=disk: disk)
        with pytest.raises(BadInput, match=f"No space left on device: {words}"):
            checkpoints.save(2, tree)
    assert names_in(checkpoints) == ["00000001"]


def test_background_errors_are_raised_by_the_next_save(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path, background=True, best="score")
    checkpoints.save(1, {"a": 1}, {"score": 0.5})
    checkpoints.wait()
    with monkeypatch.context() as patch:
        patch.setattr(module, "check_disk_space", lambda *_: 1 / 0)
        checkpoints.save(2, {"a": 2}, {"score": 0.7})
        assert (checkpoints.latest(), checkpoints.best(), checkpoints.metadata(1)) == (1, 1, {"score": 0.5})
    with pytest.raises(ZeroDivisionError):
        checkpoints.save(3, {"a": 3}, {"score": 0.6})
    assert checkpoints.steps() == [1]
    checkpoints.save(3, {"a": 3}, {"score": 0.6})
    assert (checkpoints.latest(), checkpoints.best()) == (3, 3)  # reading waits until it is written
