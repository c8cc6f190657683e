"""Host memory of reading a sharded checkpoint, in addition to the parameters.

    python -m experiments.benchmarks.loading
    python -m experiments.benchmarks.loading --stored=bfloat16 --dtypes=bfloat16 --devices=8 --layers=24

Writes a random model in shards to a temporary folder, and reads it in a new process for each case: files and parameters
of either dtype, onto one device and sharded over eight (of the CPU, whose memory is the host's). `beyond` is the peak
resident memory while loading, mapped pages of files included, minus the resident memory before, minus the bytes of the
parameters. `allowed` is the largest shard plus one layer, both as in the files. Another model is loaded first, so that
compiler code doesn't count; and glibc is set to return freed memory. Needs Linux.

Expected anywhere: `over_allowed` below 1 in every case; 0.28 to 0.45 was measured. Three minutes on two cores, and 1 GB
of disk.
"""

import os
import tempfile
from itertools import product
from pathlib import Path

from absl import flags

from ..cli import app
from ..cli.help import flag_heading

flag_heading("Run")
_STORED = flags.DEFINE_multi_enum("stored", ["float32", "bfloat16"], ["float32", "bfloat16"], "Dtypes of the files.")
_DTYPES = flags.DEFINE_multi_enum("dtypes", ["float32", "bfloat16"], ["float32", "bfloat16"], "Dtypes to load into.")
flag_heading("Sizes")
_LAYERS = flags.DEFINE_integer("layers", 8, "Layers of the model.", lower_bound=1)
_WIDTH = flags.DEFINE_integer("width", 1024, "Width of the model, a multiple of 256.", lower_bound=256)
_VOCABULARY = flags.DEFINE_integer("vocabulary", 32_000, "Vocabulary of the model.", lower_bound=8)
_SHARD = flags.DEFINE_float("shard_mib", 96.0, "Most MiB of a shard; a larger tensor has one of its own.")
flag_heading("Devices and memory")
_DEVICES = flags.DEFINE_multi_integer("devices", [1, 8], "Devices that share the parameters.", lower_bound=1)

app.read_flags(__name__)

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from flowgrpo.models.families import ConfigJSON
from flowgrpo.models.hf import CHUNK_BYTES, Model, find_tensors, init_model, load_model, save_model
from flowgrpo.report.progress import with_progress
from flowgrpo.report.tables import show_lines, timed
from flowgrpo.types import BadInput

from . import measuring

KEPT = "MALLOC_MMAP_THRESHOLD_"  # glibc returns larger blocks to the system as soon as they are freed


def _write(folder: Path, source: ConfigJSON, dtype: str, max_bytes: float) -> None:
    """Write a random model in shards of at most `max_bytes`."""
    save_model(folder, init_model(source, jax.random.key(0), dtype=dtype), max_shard_bytes=max_bytes)


def _measure(folder: Path, warm_up: Path, dtype: str, devices: int) -> tuple[int, int, float]:
    """Load a model after a warm-up model -> peak bytes beyond the parameters, bytes of the parameters, seconds."""
    jax.config.update("jax_num_cpu_devices", devices)
    load(warm_up, dtype, devices)
    measuring.reset_peak_memory()
    before = measuring.resident_bytes("VmRSS")
    seconds, model = timed(lambda: load(folder, dtype, devices))
    params_bytes = sum(shard.data.nbytes for value in model.params.values() for shard in value.addressable_shards)
    return measuring.resident_bytes("VmHWM") - before - params_bytes, params_bytes, seconds


def load(folder: Path, dtype: str, devices: int) -> Model:
    """The model on one device, or with the last large axis of every parameter split over all."""
    mesh = Mesh(np.array(jax.devices("cpu")), ("all",))

    def place(_, axes: str) -> Sharding:
        split = max(axes.rfind(axis) for axis in "vdf")
        return NamedSharding(mesh, PartitionSpec(*("all" if i == split else None for i in range(len(axes)))))

    return load_model(folder, dtype=dtype, sharding=place if devices > 1 else None, tokenizer=False)


def _shape(layers: int, width: int, vocabulary: int) -> ConfigJSON:
    """config.json of a model; its embeddings are at least as large as a layer, as in small published models."""
    heads = {"num_attention_heads": width // 64, "num_key_value_heads": width // 256}
    sizes = {"hidden_size": width, "intermediate_size": 11 * width // 4, "num_hidden_layers": layers}
    return {"model_type": "qwen2", "vocab_size": vocabulary, "tie_word_embeddings": True, **heads, **sizes}


def measure_cases(scratch: Path, stored: str) -> list[dict]:
    """Rows of all cases whose files have this dtype."""
    large, small = scratch / stored, scratch / f"{stored}-small"
    measuring.in_new_process(
        _write, large, _shape(_LAYERS.value, _WIDTH.value, _VOCABULARY.value), stored, _SHARD.value * 2**20
    )
    # a vocabulary so large that its embeddings are read in several chunks, like those of the other model
    measuring.in_new_process(_write, small, _shape(1, 256, CHUNK_BYTES // 256), stored, 2**40)
    shards = [path.stat().st_size for path in large.glob("*.safetensors")]
    first = [tensor for name, tensor in find_tensors(large).items() if name.startswith("model.layers.0.")]
    layer = sum(int(np.prod(tensor.shape)) for tensor in first) * jnp.dtype(stored).itemsize
    allowed, rows = max(shards) + layer, []
    for dtype, devices in with_progress(f"files of {stored}", list(product(_DTYPES.value, _DEVICES.value))):
        beyond, held, seconds = measuring.in_new_process(_measure, large, small, dtype, devices)
        sizes = {"params": held, "largest_shard": max(shards), "layer": layer, "beyond": beyond}
        row = {"stored": stored, "dtype": dtype, "devices": devices, "shards": len(shards)}
        row |= {f"{name}_mib": round(size / 2**20, 1) for name, size in sizes.items()}
        rows.append(row | {"over_allowed": round(beyond / allowed, 3), "seconds": round(seconds, 2)})
    return rows


def main() -> None:
    """Measure every case, print the table and one JSON line."""
    measuring.check_memory_readable()
    if _WIDTH.value % 256:
        raise BadInput(f"--width={_WIDTH.value} must be a multiple of 256")
    os.environ.setdefault(KEPT, str(2**20))
    with tempfile.TemporaryDirectory() as scratch:
        rows = [row for stored in _STORED.value for row in measure_cases(Path(scratch), stored)]
    show_lines(rows)
    measuring.print_result("loading", rows=rows)


if __name__ == "__main__":
    app.run(main)
