"""HostOffloader: values and shardings survive every move, memory is freed, frozen models are written once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import file_size_limit

import flowgrpo as fg
from flowgrpo.parallel.offload import (
    DEVICE,
    DISK,
    HOST,
    STAGES,
    HostOffloader,
    MemoryMeter,
    live_bytes,
    place_of,
    placement_table,
)

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
    with HostOffloader(table(dict(zip(STAGES, row, strict=True))), folder=tmp_path) as offloader:
        offloader.put("model", tree)
        for stage, place in [*zip(STAGES, row, strict=True)] * 2:
            offloader.enter(stage)
            offloader.wait()
            actual = offloader["model"]
            assert (place_of(actual), bits(actual)) == (place, expected)
            if place == DEVICE:
                assert {name: x.sharding for name, x in actual.items()} == shardings
            elif place == HOST:
                assert actual["wide"].sharding == shardings["wide"].with_memory_kind("pinned_host")
        assert list(tmp_path.iterdir()) == []


def test_memory_is_freed_when_a_model_leaves_the_device(tmp_path):
    for place in (HOST, DISK):
        before = live_bytes()
        with HostOffloader(
            table({"rollout": place, "inference": place, "train": DEVICE}), folder=tmp_path
        ) as offloader:
            offloader.put("model", make_tree())
            assert live_bytes()["device"] >= before["device"] + 4 * SIZE
            offloader.enter("rollout")
            offloader.wait()
            assert live_bytes()["device"] == before["device"]
            assert (live_bytes()["pinned"] >= before["pinned"] + 4 * SIZE) == (place == HOST)
            offloader.enter("train")
            offloader.wait()
            assert live_bytes()["device"] >= before["device"] + 4 * SIZE


def test_a_frozen_model_is_written_once_and_only_dropped_afterwards(tmp_path):
    with HostOffloader(table({"rollout": DISK, "inference": DEVICE, "train": DISK}), folder=tmp_path) as offloader:
        tree = make_tree()
        for _ in range(3):
            offloader.put("model", tree)
            for stage in STAGES:
                offloader.enter(stage)
            offloader.wait()
            tree = offloader["model"]
        moves = [(move.source, move.target) for move in offloader.pop_moves()]
        assert moves.count((HOST, DISK)) == 1
        assert moves.count((HOST, DEVICE)) == 3
        assert moves.count((DISK, HOST)) == 2  # the first time it is still on the host
        offloader.put("model", make_tree())  # another version
        offloader.enter("train")
        offloader.wait()
        moves = sorted(
            (move.source, move.target) for move in offloader.pop_moves()
        )  # each noted by the thread that made it
        assert moves == sorted([(DEVICE, HOST), (HOST, DISK)])


def test_moves_record_bytes_and_places(tmp_path):
    with HostOffloader(table({"rollout": HOST, "inference": HOST, "train": DEVICE}), folder=tmp_path) as offloader:
        tree = make_tree()
        size = sum(x.nbytes for x in tree.values())
        offloader.put("model", tree)
        offloader.enter("rollout")
        offloader.enter("train")
        offloader.wait()
        moves = offloader.pop_moves()
        assert [(move.model, move.source, move.target, move.bytes) for move in moves] == [
            ("model", DEVICE, HOST, size),
            ("model", HOST, DEVICE, size),
        ]
        assert all(move.seconds > 0 for move in moves)
        assert offloader.pop_moves() == []


def test_prefetch_takes_no_device_memory(tmp_path):
    with HostOffloader(table({"rollout": DISK, "inference": DISK, "train": DEVICE}), folder=tmp_path) as offloader:
        tree = make_tree()
        expected = bits(tree)
        offloader.put("model", tree)
        del tree
        offloader.enter("rollout")
        offloader.wait()
        before = live_bytes()["device"]
        offloader.prefetch("train")
        offloader.prefetch("train")
        assert live_bytes()["device"] == before
        offloader.enter("train")
        offloader.wait()
        assert bits(offloader["model"]) == expected
        assert sum(move.source == DISK for move in offloader.pop_moves()) == 1


def test_a_shared_array_stays_while_one_model_needs_it():
    shared = jnp.arange(5.0)
    with HostOffloader(table({"rollout": HOST, "inference": HOST, "train": HOST})) as offloader:
        offloader.put("model", {"shared": shared, "own": (unshared := jnp.ones(3))})
        offloader.put("other", {"shared": shared})
        offloader.enter("rollout")
        assert (shared.is_deleted(), unshared.is_deleted()) == (False, True)


def test_a_model_in_use_lasts_while_the_next_version_is_made():
    with HostOffloader(table({"rollout": HOST, "inference": HOST, "train": DEVICE})) as offloader:
        tree = make_tree()
        expected = bits(tree)
        offloader.put("model", tree)
        offloader.enter("rollout")
        handed = offloader["model"]
        offloader.enter("train")
        offloader.wait()
        jax.jit(lambda x: x + 1, donate_argnums=0)(offloader["model"]["wide"])
        offloader.put("model", make_tree())
        offloader.enter("rollout")
        assert bits(handed) == expected


def test_placement_table_keeps_models_on_device_in_stages_that_use_them():
    for place in (DEVICE, HOST, DISK):
        actual = placement_table(place)
        assert actual["optimizer"] == {"rollout": place, "inference": place, "train": DEVICE}
        assert actual["reference"] == {"rollout": place, "inference": DEVICE, "train": place}
        assert set(actual["policy"].values()) == {DEVICE}


def test_a_full_disk_raises_one_sentence_and_keeps_the_model(tmp_path):
    with HostOffloader(table({"rollout": DISK, "inference": DEVICE, "train": DEVICE}), folder=tmp_path) as offloader:
        tree = make_tree()
        expected = bits(tree)
        offloader.put("model", tree)
        with file_size_limit(SIZE):
            offloader.enter("rollout")
            with pytest.raises(fg.BadInput, match=r"can't take the .* GB of the model .*: free some space"):
                offloader.wait()
        offloader.enter("train")
        assert bits(offloader["model"]) == expected


def test_bad_tables_and_models_are_refused(tmp_path):
    with pytest.raises(fg.BadInput, match="the places of 'model' are"):
        HostOffloader({"model": {"rollout": DEVICE}})
    with pytest.raises(fg.BadInput, match="pass the folder="):
        HostOffloader(table(dict.fromkeys(STAGES, DISK)))
    with HostOffloader(placement_table(DISK), folder=tmp_path) as offloader:
        with pytest.raises(fg.BadInput, match="has no model 'else': add its row"):
            offloader.put("else", jnp.ones(2))
        with pytest.raises(fg.BadInput, match="which is no array of JAX"):
            offloader.put("policy", np.ones(2))


def test_the_memory_meter_records_the_peak_of_a_stage():
    memory_meter = MemoryMeter()
    with memory_meter.stage("first"):
        array = jnp.ones(SIZE)
    with memory_meter.stage("second"):
        array.delete()
    peaks = memory_meter.pop_peaks()
    assert min(peaks["first"], peaks["second"]) >= SIZE * 4
    with memory_meter.stage("third"):
        pass
    assert memory_meter.pop_peaks()["third"] <= peaks["first"] - SIZE * 4
