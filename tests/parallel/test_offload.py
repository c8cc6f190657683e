"""Residency: values to the bit and shardings wherever a model goes, memory that falls, frozen models written once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import small_files

import flowgrpo as fg
from flowgrpo.parallel.offload import DEVICE, DISK, HOST, STAGES, MemoryMeter, Residency, live_bytes, place_of, places

SIZE = 1 << 18


def make_tree(mesh=None, odd=(0x80000000, 0x00000001)):
    """Several dtypes, a negative zero and a denormal number, an array of no elements, one over several devices."""
    odd = jax.device_put(np.array(odd, np.uint32).view(np.float32))
    wide = jnp.arange(SIZE, dtype=jnp.float32)
    if mesh is not None:
        wide = jax.device_put(wide, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data")))
    return {"odd": odd, "wide": wide, "half": jnp.arange(7, dtype=jnp.bfloat16), "none": jnp.zeros((0, 3))}


def bits(tree) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def table(row: dict) -> dict:
    return {"model": row, "other": dict.fromkeys(STAGES, DEVICE)}


@pytest.fixture
def mesh():
    return jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])


@pytest.mark.parametrize(
    "row", [(HOST, DEVICE, DISK), (DISK, DEVICE, HOST), (DEVICE, DISK, HOST), (HOST, DISK, DEVICE)]
)
@pytest.mark.usefixtures("nan_allowed")
def test_every_move_keeps_values_to_the_bit_and_shardings(row, mesh, tmp_path):
    """NaNs with payloads, too."""
    tree = make_tree(mesh, odd=(0x7FC12345, 0xFFC00001, 0x80000000, 0x00000001))
    expected, shardings = bits(tree), {name: x.sharding for name, x in tree.items()}
    with Residency(table(dict(zip(STAGES, row, strict=True))), folder=tmp_path) as residency:
        residency.hold("model", tree)
        for stage, place in [*zip(STAGES, row, strict=True)] * 2:
            residency.enter(stage)
            residency.wait()
            found = residency["model"]
            assert (place_of(found), bits(found)) == (place, expected)
            if place == DEVICE:
                assert {name: x.sharding for name, x in found.items()} == shardings
            elif place == HOST:
                assert found["wide"].sharding == shardings["wide"].with_memory_kind("pinned_host")
        assert list(tmp_path.iterdir()) == []


def test_memory_falls_where_a_model_leaves_the_device(tmp_path):
    for place in (HOST, DISK):
        before = live_bytes()
        with Residency(table({"rollout": place, "inference": place, "train": DEVICE}), folder=tmp_path) as residency:
            residency.hold("model", make_tree())
            assert live_bytes()["device"] >= before["device"] + 4 * SIZE
            residency.enter("rollout")
            residency.wait()
            assert live_bytes()["device"] == before["device"]
            assert (live_bytes()["pinned"] >= before["pinned"] + 4 * SIZE) == (place == HOST)
            residency.enter("train")
            residency.wait()
            assert live_bytes()["device"] >= before["device"] + 4 * SIZE


def test_a_frozen_model_is_written_once_and_only_dropped_afterwards(tmp_path):
    with Residency(table({"rollout": DISK, "inference": DEVICE, "train": DISK}), folder=tmp_path) as residency:
        tree = make_tree()
        for _ in range(3):
            residency.hold("model", tree)
            for stage in STAGES:
                residency.enter(stage)
            residency.wait()
            tree = residency["model"]
        made = [(move.source, move.target) for move in residency.moves()]
        assert made.count((HOST, DISK)) == 1
        assert made.count((HOST, DEVICE)) == 3
        assert made.count((DISK, HOST)) == 2  # the first time it is still on the host, where it is written from
        residency.hold("model", make_tree())  # another version
        residency.enter("train")
        residency.wait()
        made = sorted((move.source, move.target) for move in residency.moves())  # each noted by the thread that made it
        assert made == sorted([(DEVICE, HOST), (HOST, DISK)])


def test_moves_say_how_many_bytes_went_where(tmp_path):
    with Residency(table({"rollout": HOST, "inference": HOST, "train": DEVICE}), folder=tmp_path) as residency:
        tree = make_tree()
        size = sum(x.nbytes for x in tree.values())
        residency.hold("model", tree)
        residency.enter("rollout")
        residency.enter("train")
        residency.wait()
        moves = residency.moves()
        assert [(move.model, move.source, move.target, move.bytes) for move in moves] == [
            ("model", DEVICE, HOST, size),
            ("model", HOST, DEVICE, size),
        ]
        assert all(move.seconds > 0 for move in moves)
        assert residency.moves() == []


def test_what_is_read_ahead_takes_no_device_memory(tmp_path):
    with Residency(table({"rollout": DISK, "inference": DISK, "train": DEVICE}), folder=tmp_path) as residency:
        tree = make_tree()
        expected = bits(tree)
        residency.hold("model", tree)
        del tree
        residency.enter("rollout")
        residency.wait()
        before = live_bytes()["device"]
        residency.ahead("train")
        residency.ahead("train")
        assert live_bytes()["device"] == before
        residency.enter("train")
        residency.wait()
        assert bits(residency["model"]) == expected
        assert sum(move.source == DISK for move in residency.moves()) == 1


def test_an_array_of_two_models_stays_while_one_of_them_is_there():
    shared = jnp.arange(5.0)
    with Residency(table({"rollout": HOST, "inference": HOST, "train": HOST})) as residency:
        residency.hold("model", {"shared": shared, "own": (own := jnp.ones(3))})
        residency.hold("other", {"shared": shared})
        residency.enter("rollout")
        assert (shared.is_deleted(), own.is_deleted()) == (False, True)


def test_a_version_that_was_handed_out_lasts_while_the_next_one_is_made():
    with Residency(table({"rollout": HOST, "inference": HOST, "train": DEVICE})) as residency:
        tree = make_tree()
        expected = bits(tree)
        residency.hold("model", tree)
        residency.enter("rollout")
        handed = residency["model"]
        residency.enter("train")
        residency.wait()
        jax.jit(lambda x: x + 1, donate_argnums=0)(residency["model"]["wide"])
        residency.hold("model", make_tree())
        residency.enter("rollout")
        assert bits(handed) == expected


def test_the_table_of_a_run_has_models_on_the_device_where_they_are_used():
    for place in (DEVICE, HOST, DISK):
        found = places(place)
        assert found["optimizer"] == {"rollout": place, "inference": place, "train": DEVICE}
        assert found["reference"] == {"rollout": place, "inference": DEVICE, "train": place}
        assert set(found["policy"].values()) == {DEVICE}


def test_a_full_disk_is_said_in_one_sentence_and_the_model_is_kept(tmp_path):
    with Residency(table({"rollout": DISK, "inference": DEVICE, "train": DEVICE}), folder=tmp_path) as residency:
        tree = make_tree()
        expected = bits(tree)
        residency.hold("model", tree)
        with small_files(SIZE):
            residency.enter("rollout")
            with pytest.raises(fg.BadInput, match=r"can't take the .* GB of the model .*: free some space"):
                residency.wait()
        residency.enter("train")
        assert bits(residency["model"]) == expected


def test_bad_tables_and_models_are_refused(tmp_path):
    with pytest.raises(fg.BadInput, match="the places of 'model' are"):
        Residency({"model": {"rollout": DEVICE}})
    with pytest.raises(fg.BadInput, match="pass the folder="):
        Residency(table(dict.fromkeys(STAGES, DISK)))
    with Residency(places(DISK), folder=tmp_path) as residency:
        with pytest.raises(fg.BadInput, match="has no model 'else': add its row"):
            residency.hold("else", jnp.ones(2))
        with pytest.raises(fg.BadInput, match="which is no array of JAX"):
            residency.hold("policy", np.ones(2))


def test_the_memory_meter_keeps_the_most_that_a_stage_held():
    memory_meter = MemoryMeter()
    with memory_meter.stage("first"):
        held = jnp.ones(SIZE)
    with memory_meter.stage("second"):
        held.delete()
    peaks = memory_meter.take()
    assert min(peaks["first"], peaks["second"]) >= SIZE * 4
    with memory_meter.stage("third"):
        pass
    assert memory_meter.take()["third"] <= peaks["first"] - SIZE * 4
