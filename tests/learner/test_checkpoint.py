"""Checkpoints: bit for bit, whole or not there, the newest and the best, and what is said of damage (S1)."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import struct
from jax.sharding import NamedSharding, PartitionSpec

from flowgrpo.learner import checkpoint, disk
from flowgrpo.learner.checkpoint import Checkpoints, params_sha256
from flowgrpo.types import BadInput

ROOT = Path(__file__).parent.parent.parent


class State(struct.PyTreeNode):
    params: dict
    opt_state: tuple
    key: jax.Array
    step: int
    name: str = struct.field(pytree_node=False, default="static")


def make_state(scale: float = 1.0) -> State:
    params = {"embed": scale * jnp.arange(6.0).reshape(2, 3), "out": {"b": jnp.full(3, scale, jnp.bfloat16)}}
    return State(params, optax.adamw(1e-3).init(params), jax.random.key(7), 3)


def assert_same(there, here) -> None:
    """Equal in structure, types and bits."""
    assert jax.tree.structure(there) == jax.tree.structure(here)
    for one, other in zip(jax.tree.leaves(there), jax.tree.leaves(here), strict=True):
        assert type(one) is type(other)
        if isinstance(one, jax.Array) and jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
            assert one.dtype == other.dtype
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        if isinstance(one, jax.Array):
            assert one.weak_type == other.weak_type
        if isinstance(one, jax.Array | np.ndarray | np.generic):
            assert (one.dtype, one.shape) == (other.dtype, other.shape)
            assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
        else:
            assert repr(one) == repr(other)


@pytest.mark.usefixtures("nan_allowed")
@pytest.mark.parametrize("background", [False, True])
def test_s1_a_whole_run_comes_back_bit_for_bit(tmp_path, background):
    payload = np.array([0x7FC00123, 0xFFC00001], np.uint32).view(np.float32)
    tree = {
        "state": make_state(),
        "keys": jax.random.split(jax.random.key(1, impl="rbg"), 3),
        "numbers": [True, 3, 2**80, 0.1, float("inf"), float("nan"), -0.0, "word", b"\x00\xff", None],
        "scalars": [np.float64(0.1), np.int8(3), np.bool_(True)],
        "numpy": {"zeros": np.full(4, -0.0, np.float32), "nan": payload, "empty": np.zeros((0, 3), np.int8)},
        "small": [np.array([1, -3], ml_dtypes.int4), np.array([0.5, -1], ml_dtypes.float8_e4m3fn)],
        "large": np.array([2**63], np.uint64),
        "column": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "weak": [jnp.asarray(1.5), jnp.broadcast_to(jnp.asarray(2), (3,))],
        "nothing": [[], {}, ()],
    }
    with Checkpoints(tmp_path, background=background) as checkpoints:
        checkpoints.save(5, tree, {"update": 5, "loss": 0.25})
    template = jax.tree.map(lambda x: x, tree)  # the values in a template don't matter
    template["state"] = make_state(scale=0.0)
    again = Checkpoints(tmp_path)
    assert_same(again.restore(5, template), tree)
    assert again.note(5) == {"update": 5, "loss": 0.25}


def test_a_template_of_shapes_is_enough(tmp_path):
    state = make_state()
    Checkpoints(tmp_path).save(1, state)
    shapes = jax.eval_shape(make_state).replace(step=0)
    assert_same(Checkpoints(tmp_path).restore(1, shapes), state)


def test_shardings_are_those_of_the_template_and_so_is_being_uncommitted(tmp_path):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    tree = {"rows": jax.device_put(jnp.arange(16.0), sharding), "free": jnp.ones(2)}
    Checkpoints(tmp_path).save(1, tree)
    restored = Checkpoints(tmp_path).restore(1, tree)
    assert restored["rows"].sharding == sharding
    assert restored["rows"].committed
    assert not restored["free"].committed
    assert_same(restored, tree)


def test_what_is_saved_in_the_background_may_be_changed_and_donated_at_once(tmp_path):
    held = np.arange(4)
    tree = {"held": held, "donated": jnp.arange(8.0)}
    expected = {"held": held.copy(), "donated": np.arange(8.0, dtype=np.float32)}
    double = jax.jit(lambda x: x * 2, donate_argnums=0)
    with Checkpoints(tmp_path, background=True) as checkpoints:
        checkpoints.save(1, tree)
        held += 1
        double(tree["donated"]).block_until_ready()
    assert_same(Checkpoints(tmp_path).restore(1, expected), expected)


def test_restored_arrays_can_be_donated_and_run_the_compiled_program(tmp_path):
    traces = []

    def update(x):
        traces.append(1)
        return x + 1

    compiled = jax.jit(update, donate_argnums=0)
    tree = compiled(jnp.arange(8.0))
    Checkpoints(tmp_path).save(1, tree)
    restored = Checkpoints(tmp_path).restore(1, jnp.zeros(8))
    assert np.asarray(compiled(restored)).tolist() == list(range(2, 10))
    assert len(traces) == 1


def test_ragged_parts_come_back_whatever_their_structure(tmp_path):
    buffer = [{"tokens": np.arange(n), "text": "x" * n, "outcome": None, "turns": [(1, 2)] * n} for n in range(3)]
    Checkpoints(tmp_path).save(1, {"buffer": buffer, "step": 4, "empty": []})
    restored = Checkpoints(tmp_path).restore(1, {"buffer": ..., "step": 0, "empty": ...})
    assert (restored["step"], restored["empty"]) == (4, [])
    assert [record["turns"] for record in restored["buffer"]] == [[[1, 2]] * n for n in range(3)]
    assert [record["tokens"].tolist() for record in restored["buffer"]] == [[], [0], [0, 1]]
    assert [record["text"] for record in restored["buffer"]] == ["", "x", "xx"]
    assert all(record["outcome"] is None for record in restored["buffer"])


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
def test_a_tree_that_does_not_fit_is_refused_by_name(tmp_path, template, words):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"a": np.ones(2), "c": [3]})
    with pytest.raises(BadInput) as caught:
        checkpoints.restore(1, template)
    assert str(caught.value) == f"{tmp_path}/checkpoints/00000001 does not fit: {words}"


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"f": print}, "f: a builtin_function_or_method can't be saved"),
        ({"s": np.array(["a"])}, "s: an array of <U1 can't be saved"),
        ({(1, 2): 3}, "keys of what is saved must be strings or whole numbers"),
    ],
)
def test_what_can_not_be_saved_is_said_before_anything_is_written(tmp_path, tree, words):
    with pytest.raises(BadInput, match="saved") as caught:
        Checkpoints(tmp_path).save(1, tree)
    assert words in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_the_newest_and_the_best_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2, best="success")
    assert checkpoints.latest() is checkpoints.best() is None
    for step, success in enumerate([0.1, 0.9, 0.9, float("nan"), 0.3, None, 0.2]):
        checkpoints.save(step, {"step": step}, {"success": success})
    assert (checkpoints.steps(), checkpoints.latest(), checkpoints.best()) == ([2, 5, 6], 6, 2)
    assert checkpoints.restore(2, {"step": 0}) == {"step": 2}
    checkpoints.save(6, {"step": 60})
    assert (checkpoints.steps(), checkpoints.restore(6, {"step": 0})) == ([2, 5, 6], {"step": 60})


def spoil(folder: Path, step: int, what: str) -> None:
    """Damage one file of a checkpoint."""
    path = folder / "checkpoints" / f"{step:08d}"
    if what in ("value", "cut", "gone"):
        file = path / "checkpoint.json"
        text = file.read_text()
        file.write_text({"value": text.replace('"value": 8', '"value": 9'), "cut": text[:-5], "gone": "{}"}[what])
        return
    file = max((file for file in path.glob("arrays/**/*") if file.is_file()), key=lambda file: file.stat().st_size)
    if what == "missing":
        file.unlink()
    else:
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)


@pytest.mark.parametrize("what", ["value", "cut", "gone", "missing", "bit"])
def test_damage_is_found_and_the_earlier_checkpoint_is_named(tmp_path, what):
    checkpoints = Checkpoints(tmp_path, keep=3)
    for step in (4, 8):
        checkpoints.save(step, {"a": np.random.default_rng(step).normal(size=500), "step": step})
    template = {"a": np.zeros(500), "step": 0}
    spoil(tmp_path, 8, what)
    with pytest.raises(BadInput) as caught:
        checkpoints.restore(8, template)
    sentence = str(caught.value)
    assert sentence.startswith(f"{tmp_path}/checkpoints/00000008 is damaged (")
    assert sentence.endswith("remove that folder to go on from step 4")
    assert "\n" not in sentence
    assert checkpoints.restore(4, template)["step"] == 4
    spoil(tmp_path, 4, what if what != "value" else "cut")
    with pytest.raises(BadInput, match="there is no earlier one"):
        checkpoints.restore(4, template)


def test_a_step_that_is_not_there_and_a_folder_that_can_not_be_written(tmp_path):
    with pytest.raises(BadInput, match="has no checkpoint of step 3: there is none"):
        Checkpoints(tmp_path).restore(3, {})
    Checkpoints(tmp_path).save(2, {})
    with pytest.raises(BadInput, match="has no checkpoint of step 3: there are 2"):
        Checkpoints(tmp_path).note(3)
    with pytest.raises(BadInput, match="keep=0 must be at least 1"):
        Checkpoints(tmp_path, keep=0)
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match=r"can't be made \(Not a directory\): choose another folder"):
        Checkpoints(tmp_path / "file").save(1, {})


@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk_is_one_sentence_and_loses_nothing(tmp_path, monkeypatch, background):
    checkpoints = Checkpoints(tmp_path, background=background)
    checkpoints.save(1, {"a": 1})
    checkpoints.wait()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint.Path, "write_text", full)
    sentence = r"00000002 could not be written \(No space left on device\): the one of step 1 is whole"
    with pytest.raises(BadInput, match=sentence), checkpoints:  # the end of the block waits
        checkpoints.save(2, {"a": 2})
    monkeypatch.undo()
    assert checkpoints.steps() == [1]
    assert [path.name for path in checkpoints.folder.iterdir()] == ["00000001"]  # nothing fills the disk further
    checkpoints.save(3, {"a": 3})
    checkpoints.wait()
    assert checkpoints.steps() == [1, 3]


def test_what_failed_in_the_background_is_said_by_the_next_save_and_by_nothing_before(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path, background=True, best="score")
    checkpoints.save(1, {"a": 1}, {"score": 0.5})
    checkpoints.wait()
    monkeypatch.setattr(checkpoint, "check_room", lambda *_: 1 / 0)
    checkpoints.save(2, {"a": 2}, {"score": 0.7})
    assert (checkpoints.latest(), checkpoints.best(), checkpoints.note(1)) == (1, 1, {"score": 0.5})
    monkeypatch.undo()
    with pytest.raises(ZeroDivisionError):
        checkpoints.save(3, {"a": 3}, {"score": 0.6})
    assert checkpoints.steps() == [1]
    checkpoints.save(3, {"a": 3}, {"score": 0.6})
    assert (checkpoints.latest(), checkpoints.best()) == (3, 3)  # reading waits until it is written


FILLING = """
import resource, sys
import numpy as np
from flowgrpo.learner import checkpoint, disk
from flowgrpo.learner.checkpoint import Checkpoints

with Checkpoints(sys.argv[1], background=sys.argv[2] == "background") as checkpoints:
    checkpoints.save(1, {"a": np.arange(50_000), "step": 1})
    checkpoints.wait()
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))  # a write beyond it fails in the middle of a file
    try:
        checkpoints.save(2, {"a": np.random.default_rng(0).integers(0, 1 << 40, 50_000), "step": 2})
        checkpoints.wait()
    except checkpoint.BadInput as error:
        print(error)
    print(checkpoints.steps(), (checkpoints.restore(1, {"a": np.zeros(50_000, int), "step": 0})["a"]).sum())
"""


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["foreground", "background"])
def test_a_write_that_the_system_cuts_in_the_middle_is_one_sentence_and_loses_nothing(tmp_path, mode):
    command = [sys.executable, "-c", FILLING, str(tmp_path), mode]
    environment = os.environ | {"PYTHONPATH": "."}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False, timeout=120)
    said, rest = done.stdout.splitlines()
    assert said == f"{tmp_path}/checkpoints/00000002 could not be written (File too large): the one of step 1 is whole"
    assert rest == f"[1] {sum(range(50_000))}"
    assert "Traceback" not in done.stderr
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["00000001"]


def test_what_does_not_fit_on_the_disk_is_refused_before_it_is_written(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"a": np.zeros(10)})
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda _: SimpleNamespace(free=1_000_000))
    with pytest.raises(BadInput, match=r"No space left on device: it takes 4\.0 MB, and 1\.0 MB are left"):
        checkpoints.save(2, {"a": np.zeros(500_000)})
    checkpoints.save(3, {"a": np.zeros(1000)})
    assert checkpoints.steps() == [1, 3]


def test_s1_a_checkpoint_that_replaces_another_is_there_before_that_is_removed(tmp_path, monkeypatch):
    checkpoints, remove, seen = Checkpoints(tmp_path), checkpoint.shutil.rmtree, []
    checkpoints.save(4, make_state(1.0))

    def slowly(path, **how):
        if path.exists() and path.name.endswith("removed"):
            seen.append(Checkpoints(tmp_path).restore(4, make_state()).params["embed"])
        remove(path, **how)

    monkeypatch.setattr(checkpoint.shutil, "rmtree", slowly)
    checkpoints.save(4, make_state(2.0))
    (found,) = seen
    np.testing.assert_array_equal(found, make_state(2.0).params["embed"])
    assert sorted(path.name for path in checkpoints.folder.iterdir()) == ["00000004"]


def test_a_part_is_read_without_the_rest(tmp_path, monkeypatch):
    tree = {"params": {"w": np.ones(3), "deep": {"b": np.zeros((0, 2))}}, "params_of_another": np.ones(500), "n": [4]}
    checkpoints = Checkpoints(tmp_path, keep=9)
    checkpoints.save(1, tree)
    restore, read = checkpoint._restore_arrays, []
    monkeypatch.setattr(checkpoint, "_restore_arrays", lambda path, names: read.append(names) or restore(path, names))
    assert checkpoints.part(1, "params", tree["params"])["w"].tolist() == [1, 1, 1]
    assert sorted(checkpoints.part(1, "params")) == ["deep", "w"]
    assert checkpoints.part(1, "params/w").tolist() == [1, 1, 1]
    assert checkpoints.part(1, "n") == [4]
    with pytest.raises(BadInput, match=r"00000001 holds nothing at param: it was saved by a run of another kind"):
        checkpoints.part(1, "param")
    with pytest.raises(BadInput, match="it lacks v, which this run has"):
        checkpoints.part(1, "params", {"v": np.ones(3)})
    assert {name for names in read for name in names} == {"00002.params.w"}


SAVING = """
import sys
import numpy as np
from flowgrpo.learner.checkpoint import Checkpoints

checkpoints = Checkpoints(sys.argv[1], keep=2, background=sys.argv[2] == "background")
first = (checkpoints.latest() or 0) + 1
for step in range(first, first + 100_000):
    checkpoints.save(step, {"a": np.full((50, 1000), step), "step": step}, {"step": step})
    print(step, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["foreground", "background"])
def test_s1_a_process_killed_while_it_saves_leaves_whole_checkpoints_only(tmp_path, mode):
    """SIGKILL at moments spread over several saves: what is there is whole, and the next process clears the rest."""
    template, rests = {"a": np.zeros((50, 1000), np.int64), "step": 0}, 0
    for trial in range(6):
        command = [sys.executable, "-c", SAVING, str(tmp_path), mode]
        with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, env=os.environ | {"PYTHONPATH": "."}) as run:
            assert run.stdout is not None
            run.stdout.readline()
            run.stdout.readline()
            time.sleep(0.02 * trial)
            run.send_signal(signal.SIGKILL)
        rests += len(list(tmp_path.glob("checkpoints/.unfinished-*")))
        checkpoints = Checkpoints(tmp_path)
        steps = checkpoints.steps()
        assert 1 <= len(steps) <= 3
        for step in steps:
            restored = checkpoints.restore(step, template)
            assert restored["step"] == checkpoints.note(step)["step"] == step
            assert (restored["a"] == step).all()
    assert rests > 0  # some were killed in the middle
    checkpoints.save(checkpoints.steps()[-1] + 1, template)
    assert not list(tmp_path.glob("checkpoints/.unfinished-*"))


def test_the_hash_of_parameters_sees_places_types_shapes_and_bits_and_no_order():
    params = {"b": jnp.ones(3), "a": {"c": np.zeros(2, np.int32)}}
    same = {"a": {"c": jnp.zeros(2, jnp.int32)}, "b": np.ones(3, np.float32)}
    assert params_sha256(params) == params_sha256(same)
    others = [
        {"b": jnp.ones(3)},
        params | {"b": jnp.ones((3, 1))},
        params | {"b": jnp.ones(3, jnp.float16)},
        params | {"b": jnp.ones(3).at[0].set(1 + 2**-23)},
        {"b": params["b"], "a": {"d": params["a"]["c"]}},
    ]
    assert len({params_sha256(other) for other in [params, *others]}) == 6


def test_the_content_is_plain_json(tmp_path):
    Checkpoints(tmp_path).save(1, {"params": {"embed": np.zeros((2, 3), np.float32)}, "step": 1}, {"update": 1})
    content = json.loads((tmp_path / "checkpoints" / "00000001" / "checkpoint.json").read_text())
    assert content["note"] == {"update": 1}
    assert [leaf["name"] for leaf in content["leaves"]] == ["params/embed", "step"]
    assert content["leaves"][0]["shape"] == [2, 3]
