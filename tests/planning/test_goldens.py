"""Programs without waste, by the compilers of a TPU and of a GPU; waste that is planted is found.

The shapes are small in width and large where waste shows, since nothing is allocated. Where a compiler is not installed
(`pip install '.[aot]'`) its part is skipped; planted waste that the compiler of CPUs shows as well is always
found. The compilers take some 5 seconds of a core for decoding and 20 for an update.
"""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import pytest

import flowgrpo as fg
from flowgrpo.learner.state import adamw
from flowgrpo.models.attention_kernels import flash
from flowgrpo.models.config import DecoderConfig, Rope
from flowgrpo.models.decoder import make_policy
from flowgrpo.parallel.sharding import make_mesh, shard_policy
from flowgrpo.planning.compiled_program import arrays_with, count_collectives, count_copies, moved_bytes, program_steps
from flowgrpo.planning.cost_model import Workload
from flowgrpo.planning.dry_run import abstract_state, dry_run, local_bytes, make_case
from flowgrpo.planning.targets import missing_compiler, parse_target, target_devices

DEVICES, SLOTS, LENGTH, STEPS, LAYERS = 4, 64, 16_384, 4, 2
ROW = 896  # tokens of an update: seven blocks of keys, and no width of the model, also of products side by side
CONFIG = DecoderConfig(
    v=384, d=256, h=4, k=2, e=64, f=640, windows=(None,) * LAYERS, ropes=(Rope(),) * LAYERS, tied=True, qkv_bias=False
)
JOB = Workload(rows=8, length=LENGTH, slots=SLOTS, steps=STEPS, chunk=128, dtype="float32", compute_dtype="bfloat16")
JOBS = {"decode": JOB, "update": replace(JOB, length=ROW, prompt=128)}
CACHES = ((LAYERS, SLOTS // DEVICES, CONFIG.k, LENGTH, CONFIG.e), (SLOTS // DEVICES, CONFIG.k, LENGTH, CONFIG.e))
TPU, GPU = f"v5e-{DEVICES}", f"h100-{DEVICES}"


def compiler_of(name: str):
    """Mark what needs the compiler of a target."""
    return pytest.mark.skipif(
        missing_compiler(parse_target(name).chip.platform) is not None,
        reason=f"the compiler for {name} is in an extra, which takes 2.3 GB: pip install '.[aot]'",
    )


TARGETS = [pytest.param(name, marks=compiler_of(name)) for name in (TPU, GPU)]

pytestmark = pytest.mark.usefixtures("nan_allowed")  # where JAX looks for NaN it donates nothing


@cache
def case(name: str, kind: str):
    """The small model on a mesh of fsdp, for a target."""
    target = parse_target(name)
    mesh = make_mesh({"fsdp": DEVICES}, target_devices(target))
    learning = fg.flow_grpo(beta=0.0), adamw(1e-3)
    return make_case(CONFIG, JOBS[kind], *learning, mesh=mesh, target=target)


@cache
def program(name: str, kind: str):
    """A program of the case, compiled once."""
    (cost,) = dry_run(case(name, kind), [kind])
    return cost


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_decoding_copies_no_cache(name):
    assert count_copies(program(name, "decode").instructions, *CACHES) < STEPS  # once before the loop at most


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_decoding_writes_its_cache_in_place(name):
    cost = program(name, "decode")
    assert cost.reused >= cost.floor["cache"]


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_update_has_no_quadratic_array_and_donates_its_state(name):
    cost = program(name, "update")
    assert not arrays_with(cost.instructions, ROW, ROW)
    assert cost.reused >= local_bytes(abstract_state(case(name, "update")))


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_update_gathers_layers_twice_and_reduces_gradients_once(name):
    """Of the seven products and the embedding, in the passes forward and backward of each micro-batch."""
    counts = count_collectives(program(name, "update").instructions)
    micro_batches = JOB.rows // DEVICES
    assert counts["all-gather"] <= micro_batches * 2 * (7 * LAYERS + 2)
    assert counts.get("reduce-scatter", 0) <= micro_batches * (7 * LAYERS + 2)


@pytest.mark.slow
@compiler_of(GPU)
def test_cache_kernel_reads_the_cache_without_copies():
    """Of the cache nothing is read beside what is filled of it, and the parts that are put together."""
    plain = case(GPU, "decode")
    job = replace(JOB, dtype="bfloat16", compute_dtype=None)
    policy = shard_policy(make_policy(CONFIG, dtype=jnp.bfloat16, attend=flash), plain.mesh, plain.axes)
    (cost,) = dry_run(plain._replace(job=job, policy=policy), ["decode"])
    kernels = [step for step in cost.instructions if "/decode_" in step.origin]
    assert sum(step.times for step in kernels) == 2 * STEPS * LAYERS
    assert moved_bytes(kernels) <= 1.3 * STEPS * cost.floor["cache"] / 2
    of_blocks = [step for step in cost.instructions if step not in kernels and arrays_with([step], 1024)]
    assert count_copies(cost.instructions, *CACHES) < STEPS
    assert not [step for step in of_blocks if step.times >= STEPS]


# Planted waste ----------------------------------------------------------------------------------------


def steps_of(work, *shapes, donate: tuple[int, ...] = ()):
    """The steps of a program of CPUs, and the bytes that lie where arguments lay."""
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    compiled = jax.jit(work, donate_argnums=donate).lower(*arguments).compile()
    return program_steps(compiled.as_text()), compiled.memory_analysis().alias_size_in_bytes


def test_planted_cache_copy_is_found():
    """A token that is written in every step, into the cache itself and into a copy of it in another layout."""
    cache, token = (8, 256, 16), (8, 1, 16)

    def write(cache, token, wrong: bool):
        def step(index, cache):
            cache = jax.lax.dynamic_update_slice(cache, token, (0, index, 0))
            return jnp.flip(cache, 0) if wrong else cache

        return jax.lax.fori_loop(0, STEPS, step, cache)

    right, _ = steps_of(lambda cache, token: write(cache, token, False), cache, token, donate=(0,))
    wrong, _ = steps_of(lambda cache, token: write(cache, token, True), cache, token, donate=(0,))
    assert count_copies(right, cache) < STEPS
    assert count_copies(wrong, cache) >= STEPS


def test_planted_quadratic_array_is_found():
    row = (320, 16)
    wrong, _ = steps_of(lambda q, k: jax.nn.softmax(q @ k.T) @ k, row, row)
    right, _ = steps_of(lambda q, k: jax.nn.softmax(q @ k[:128].T) @ k[:128], row, row)
    assert arrays_with(wrong, 320, 320)
    assert not arrays_with(right, 320, 320)


def test_missing_donation_is_found():
    state = (64, 16)
    assert steps_of(lambda x: x + 1, state)[1] == 0
    assert steps_of(lambda x: x + 1, state, donate=(0,))[1] == 64 * 16 * 4


def test_planted_collective_is_found():
    """A sum over the devices in every layer is told from one after all of them."""
    mesh = make_mesh({"fsdp": 2}, jax.devices()[:2])

    def count(each: bool):
        def work(x):
            def layer(total, _):
                part = jnp.sin(x + total[None]).sum(0)
                return (jax.lax.psum(part, "fsdp") if each else part), None

            start = jnp.zeros(16) if each else jax.lax.pcast(jnp.zeros(16), "fsdp", to="varying")
            total, _ = jax.lax.scan(layer, start, None, length=3)
            return total if each else jax.lax.psum(total, "fsdp")

        spread = jax.shard_map(work, mesh=mesh, in_specs=jax.P("fsdp"), out_specs=jax.P())
        x = jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=jax.NamedSharding(mesh, jax.P("fsdp")))
        return count_collectives(program_steps(jax.jit(spread).lower(x).compile().as_text()))

    assert count(each=False) == {"all-reduce": 1}
    assert count(each=True) == {"all-reduce": 3}
