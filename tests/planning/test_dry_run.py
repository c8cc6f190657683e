"""A dry run sees the programs that would run: their memory, their work, and how meshes divide both."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flowgrpo as fg
from flowgrpo.learner.state import adamw
from flowgrpo.models.config import DecoderConfig, Rope
from flowgrpo.models.decoder import make_policy, matrices
from flowgrpo.models.lora import LoraConfig
from flowgrpo.parallel.sharding import make_mesh, parse_mesh
from flowgrpo.planning.cost_model import (
    Workload,
    count_parameters,
    count_products,
    forward_flops,
    sharded_parameters,
    update_floor,
)
from flowgrpo.planning.dry_run import (
    DryRunCase,
    abstract_batch,
    abstract_state,
    dry_run,
    local_bytes,
    make_case,
    micro_batches,
    slots_at_once,
)
from flowgrpo.planning.targets import parse_target

LAYERS = 2
CONFIG = DecoderConfig(
    v=64, d=16, h=4, k=2, e=8, f=32, windows=(None,) * LAYERS, ropes=(Rope(),) * LAYERS, tied=True, qkv_bias=True
)
JOB = Workload(rows=8, length=32, micro_rows=2, slots=8, prompt=8, steps=4, remat=False, dtype="float32", chunk=64)
OPTIMIZER = adamw(1e-3)
PLAIN = fg.flow_grpo(beta=0.0)


def case(mesh: str | None = None, job: Workload = JOB, **settings) -> DryRunCase:
    """The tiny model on a mesh."""
    layout = None if mesh is None else make_mesh(parse_mesh(mesh, jax.device_count()))
    return make_case(CONFIG, job, PLAIN, OPTIMIZER, mesh=layout, **settings)


# Counting ---------------------------------------------------------------------------------------------


def test_products_in_loops_count_every_iteration():
    a = jax.ShapeDtypeStruct((8, 8), jnp.float32)

    def work(x):
        def twice(x, _):
            return x @ x, None

        x = jax.lax.scan(twice, x, None, length=5)[0]
        x = jax.lax.while_loop(lambda x: x.sum() < 1, lambda x: x @ x, x)
        return jax.lax.cond(x.sum() > 0, lambda x: x @ x @ x, lambda x: x, x)

    jaxpr = jax.make_jaxpr(jax.jit(work))(a).jaxpr
    product = 2 * 8**3
    assert count_products(jaxpr).flops == (5 + 1 + 2) * product
    assert count_products(jaxpr, trips=(7,)).flops == (5 + 7 + 2) * product
    assert count_products(jaxpr, trips=(7,)).bytes == (5 + 7 + 2) * 3 * 8 * 8 * 4


def test_branch_of_the_platform_counts():
    def work(x):
        return jax.lax.platform_dependent(x, cpu=lambda x: x @ x, default=lambda x: x @ x @ x)

    jaxpr = jax.make_jaxpr(work)(jax.ShapeDtypeStruct((8, 8), jnp.float32)).jaxpr
    assert [count_products(jaxpr, (), name).flops for name in ("cpu", "tpu")] == [2 * 8**3, 4 * 8**3]


def test_decoding_counts_blocks_of_its_platform():
    there = case(job=replace(JOB, length=3000), target=parse_target("v5e-1"))
    assert slots_at_once(there) == 1024  # of 3,072 slots
    assert slots_at_once(there._replace(target=None)) == 128
    assert slots_at_once(case(target=parse_target("v5e-1"))) == JOB.length


def test_forward_pass_counts_as_in_the_formula():
    policy, tokens = make_policy(CONFIG), jax.ShapeDtypeStruct((3, 32), jnp.int32)
    params = jax.eval_shape(policy.init, jax.eval_shape(lambda: jax.random.key(0)))
    traced = jax.make_jaxpr(lambda params, tokens: policy.apply(params, tokens)[0])(params, tokens)
    # 96 rows are whole tiles of exact mode, and need no padding. Products of attention are made of all keys, seen or
    # not; and its shares are summed by a narrow one.
    sums = 2 * 3 * 32 * LAYERS * CONFIG.h * 32 * 8
    norms = 3 * 32 * 2 * (LAYERS * (2 * CONFIG.d + CONFIG.h * CONFIG.e + 2 * CONFIG.k * CONFIG.e) + CONFIG.d)
    assert count_products(traced.jaxpr).flops == forward_flops(CONFIG, 3 * 32, 32) + sums - norms


# Programs ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("nan_allowed")  # where JAX looks for NaN it donates nothing
def test_update_is_compiled_from_shapes_alone():
    before = jax.live_arrays()  # held here, so that none of other tests goes meanwhile
    (program,) = dry_run(case(), ["update"])
    assert len(jax.live_arrays()) == len(before)
    state = local_bytes(abstract_state(case()))
    batch = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(abstract_batch(case())))
    # Fields that the program does not read are no arguments.
    assert state + batch / 2 < program.arguments <= state + batch
    assert state <= program.reused + 64  # the donated state lies where it lay
    assert program.peak > sum(program.floor.values()) > state
    # XLA meets four micro-batches once; what is traced has them all, and the logits a second time backward.
    assert program.flops > program.useful_flops > program.flops_once
    assert micro_batches(JOB, None) == 4


@pytest.mark.slow
def test_remat_takes_more_flops_and_fewer_activations():
    plain, again = (Workload(**{**vars(JOB), "remat": remat}) for remat in (False, True))
    floors = [update_floor(CONFIG, job, {}, moved=1.0)["activations"] for job in (plain, again)]
    assert floors[1] < floors[0]
    counts = []
    for job in (plain, again):
        (program,) = dry_run(case(job=job), ["update"])
        counts.append(program.flops)
    assert 1.1 < counts[1] / counts[0] < 4 / 3


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["data=2,fsdp=2,tensor=2"])
def test_mesh_divides_work_and_state(mesh):
    # Whole tiles of exact mode on each device, so that nothing is padded.
    job = Workload(**{**vars(JOB), "rows": 16, "length": 48, "slots": 192, "chunk": 48})
    alone, spread = (dry_run(case(at, job=job)) for at in (None, mesh))
    assert [program.name for program in spread] == ["update", "prefill", "decode"]
    sizes = parse_mesh(mesh)
    held = sharded_parameters(CONFIG, sizes)
    assert spread[0].floor["parameters"] == pytest.approx(4 * held)
    assert spread[0].floor["optimizer"] == pytest.approx(8 * held, abs=64)
    for one, many in zip(alone, spread, strict=True):
        assert many.useful_flops == pytest.approx(one.useful_flops / 8)
        assert many.flops == pytest.approx(one.flops / 8, rel=0.02)


@pytest.mark.slow
def test_only_the_adapter_has_gradients_and_moments():
    (whole,), (adapter,) = dry_run(case(), ["update"]), dry_run(case(lora=LoraConfig(rank=2)), ["update"])
    assert adapter.floor["optimizer"] < whole.floor["optimizer"]
    assert adapter.floor["gradients"] < whole.floor["gradients"]
    assert adapter.peak < whole.peak


@pytest.mark.parametrize(("kind", "bits"), [("int8", 8), ("nf4", 4)])
def test_quantised_base_takes_its_bits_on_every_device(kind, bits):
    """Matrices are divided over all devices, and what is not quantised is as it was."""
    sizes = {}
    for mesh in (None, "fsdp=4,tensor=2"):
        whole, coded = (
            abstract_state(case(mesh, lora=LoraConfig(rank=2), quantised=q)).params.base for q in (None, kind)
        )
        factors = matrices(CONFIG)
        values = {name: coded[name].values for name in factors}
        sizes[mesh] = local_bytes(values)
        assert sizes[mesh] * 32 == local_bytes({name: whole[name] for name in factors}) * bits
        assert all(coded[name] == whole[name] for name in whole if name not in factors)
    assert sizes[None] == sizes["fsdp=4,tensor=2"] * 8


@pytest.mark.slow
def test_programs_compile_over_a_quantised_base_with_less_memory():
    lora = LoraConfig(rank=2)
    whole, coded = (dry_run(case(lora=lora, quantised=kind), ["update", "decode"]) for kind in (None, "int8"))
    assert all(one.arguments > other.arguments for one, other in zip(whole, coded, strict=True))
    assert all(one.flops == other.flops for one, other in zip(whole, coded, strict=True))


def test_quantised_weights_are_not_trained():
    with pytest.raises(fg.BadInput, match="weights that are int8 can't be trained: give lora="):
        case(quantised="int8")


def test_unknown_program_is_refused():
    with pytest.raises(fg.BadInput, match="no program 'reference' to compile here; choose from update, prefill"):
        dry_run(case(), ["reference"])


def test_slots_that_cannot_be_sharded_are_refused():
    with pytest.raises(fg.BadInput, match="12 slots can't be sharded evenly"):
        dry_run(case("fsdp=8", job=Workload(**{**vars(JOB), "slots": 12})), ["decode"])


def test_sizes_below_one_are_refused():
    with pytest.raises(fg.BadInput, match="micro_rows is 0"):
        Workload(micro_rows=0)
    with pytest.raises(fg.BadInput, match="leave room for an answer"):
        Workload(prompt=64, length=64)


def test_undivided_parameters_count_fully():
    everything = count_parameters(CONFIG)
    assert sharded_parameters(CONFIG, {"data": 8, "fsdp": 1, "tensor": 1}) == everything
    biases = LAYERS * (CONFIG.h + 2 * CONFIG.k) * CONFIG.e
    assert sharded_parameters(CONFIG, {"fsdp": 16}) == pytest.approx((everything - biases) / 16 + biases)
    assert sharded_parameters(CONFIG, {"fsdp": 32}) == everything  # 16 is not divided by 32
    assert np.isclose(forward_flops(CONFIG, 1, 0), 2 * everything)
