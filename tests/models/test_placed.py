"""Arrays that are filled piece by piece: the same numbers as at once, each piece read once, and none too large."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from model_cases import random_model

from flowgrpo.models import hf, placed

WHOLE = np.arange(6 * 16 * 24, dtype=np.float32).reshape(6, 16, 24)
SPECS = [(), ("a",), (None, "b"), (None, None, ("a", "b")), ("a", "b"), (None, "b", "a")]


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))


def filled(place, axis, dtype=np.float32):
    """`WHOLE` brought there, and the pieces that were read."""
    asked = []

    def read(start, stop):
        asked.append((start, stop))
        return np.take(WHOLE, range(start, stop), axis).astype(dtype)

    return placed.fill(WHOLE.shape, dtype, place, axis=axis, read=read), asked


@pytest.mark.slow
@pytest.mark.parametrize("staged", [1, 5000, 10**9])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_pieces_make_up_the_array_wherever_it_goes(monkeypatch, mesh, staged, axis):
    monkeypatch.setattr(placed, "STAGED", staged)
    for place in [None, *(NamedSharding(mesh, PartitionSpec(*spec)) for spec in SPECS)]:
        found, asked = filled(place, axis)
        np.testing.assert_array_equal(found, WHOLE)
        assert place is None or found.sharding == place
        assert found.committed == (place is not None)
        # Each piece once, in order, of at most that many bytes or of one entry.
        assert [start for start, _ in asked] == [0, *(stop for _, stop in asked)][:-1]
        assert asked[-1][1] == WHOLE.shape[axis]
        entry = WHOLE.nbytes // WHOLE.shape[axis]
        assert all((stop - start) * entry <= max(staged, entry) for start, stop in asked)


@pytest.mark.slow
@pytest.mark.parametrize("staged", [1, 3000])
@pytest.mark.parametrize("name", ["gemma2", "llama"])
def test_M3_a_model_that_is_read_in_pieces_has_the_same_bytes(monkeypatch, tmp_path, mesh, name, staged):
    model = random_model(name)
    hf.save_model(tmp_path, model, max_shard_bytes=20_000)
    monkeypatch.setattr(placed, "STAGED", staged)

    def place(_, axes):
        return NamedSharding(mesh, PartitionSpec(*({"d": "a", "f": "b"}.get(axis) for axis in axes)))

    for sharding in (None, place):
        params = hf.load_model(tmp_path, text=False, sharding=sharding).params
        for key, value in model.params.items():
            np.testing.assert_array_equal(params[key], value, err_msg=key)


def test_no_file_stays_open(tmp_path):
    """A model is read although each file is opened for one tensor only, and may go as soon as it is there."""
    model = random_model("llama")
    hf.save_model(tmp_path, model, max_shard_bytes=20_000)
    loaded = hf.load_model(tmp_path, text=False)
    for path in tmp_path.iterdir():
        path.write_bytes(b"")
    np.testing.assert_array_equal(loaded.params["gate"], model.params["gate"])
