"""Arrays that are filled piece by piece: the same numbers as at once, each piece read once, and none too large."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from model_cases import random_model

from flowgrpo.models import hf

WHOLE = np.arange(4 * 4 * 8, dtype=np.float32).reshape(4, 4, 8)
SPECS = [(), ("a",), (None, None, ("a", "b")), (None, "b", "a")]


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))


@pytest.mark.parametrize("chunk_bytes", [1, 300, 10**9])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_read_array_joins_chunks_on_any_sharding(monkeypatch, mesh, chunk_bytes, axis):
    def read(start, stop):
        chunks.append((start, stop))
        return np.take(WHOLE, range(start, stop), axis)

    monkeypatch.setattr(hf, "CHUNK_BYTES", chunk_bytes)
    for place in [None, *(NamedSharding(mesh, PartitionSpec(*spec)) for spec in SPECS)]:
        chunks = []
        actual = hf.read_array(WHOLE.shape, WHOLE.dtype, place, axis=axis, read=read)
        np.testing.assert_array_equal(actual, WHOLE)
        assert place is None or actual.sharding == place
        assert actual.committed == (place is not None)
        # Each piece once, in order, of at most that many bytes or of one entry.
        assert [start for start, _ in chunks] == [0, *(stop for _, stop in chunks)][:-1]
        assert chunks[-1][1] == WHOLE.shape[axis]
        entry = WHOLE.nbytes // WHOLE.shape[axis]
        assert all((stop - start) * entry <= max(chunk_bytes, entry) for start, stop in chunks)


def test_M3_a_model_read_in_chunks_has_the_same_bytes(monkeypatch, tmp_path, mesh):
    """Although each file is opened for one tensor only, and may go as soon as the model is there."""

    def place(_, axes):
        return NamedSharding(mesh, PartitionSpec(*({"d": "a", "f": "b"}.get(axis) for axis in axes)))

    model, actual = random_model("gemma2"), []
    hf.save_model(tmp_path, model, max_shard_bytes=20_000)
    monkeypatch.setattr(hf, "CHUNK_BYTES", 3000)
    for sharding in (None, place):
        actual.append(hf.load_model(tmp_path, tokenizer=False, sharding=sharding).params)
    for path in tmp_path.iterdir():
        path.write_bytes(b"")
    for params in actual:
        jax.tree.map(np.testing.assert_array_equal, params, dict(model.params))
