"""Compile a run's programs without its weights, and report what each takes of a device.

    launch.configure(cpu_devices=512)                             # as many as the mesh has, before JAX starts
    case = make_case(config, Workload(rows=512), algorithm, optimizer, mesh=make_mesh(parse_mesh("data=8,fsdp=64")))
    for cost in dry_run(case):
        print(cost.name, cost.peak)

The very update, scoring of the reference, prefill and decoding that would run are lowered and compiled from abstract
shapes and shardings; nothing is allocated. Memory is the compiler's own account of one device. Operations are those of
the traced program (`count_products`), because XLA's analysis meets each loop once; both are given.

With a `target` (`targets.parse_target`) the programs are compiled by that machine's own compiler, which says what fits
and, beside that, how many bytes are moved and sent. What is compiled for virtual CPU devices is divided as for others,
but not fused or scheduled alike, and products of bfloat16 are made in float32 there: temporary memory tends to be above
that of an accelerator.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flowgrpo.contracts import Algorithm, Policy
from flowgrpo.generate.sampler import LEAST_CHUNK, LOGITS, decode, prefill, sampling, start_rows
from flowgrpo.learner.state import LearnerState, init_learner
from flowgrpo.learner.update import make_score, make_update, score_reference
from flowgrpo.models.attention import BLOCK
from flowgrpo.models.attention_kernels import best
from flowgrpo.models.config import DecoderConfig
from flowgrpo.models.decoder import make_policy, matrices
from flowgrpo.models.kv_cache import WIDE_BLOCKS
from flowgrpo.models.lora import Adapted, LoraConfig, adapter_axes, lora_policy
from flowgrpo.models.quantised import check_kind, quantise_layers
from flowgrpo.models.trainable import ADAPTER, WHOLE, Trained, cast
from flowgrpo.parallel.row_sharding import ROWS, SHARED, TENSOR, divides
from flowgrpo.parallel.sharding import decoder_axes, jit_update, settle, state_shardings
from flowgrpo.planning.cost_model import (
    Workload,
    decode_floor,
    forward_flops,
    update_floor,
    update_flops,
    ways,
)
from flowgrpo.planning.program_cost import ProgramCost, measure_program
from flowgrpo.planning.targets import Target, check_dtype
from flowgrpo.types import BadInput, Batch

STOPS = 4  # ids that end a turn


class DryRunCase(NamedTuple):
    """A run to compile without its weights: model, job, algorithm and optimizer, and the mesh to run on."""

    config: DecoderConfig
    job: Workload
    algorithm: Algorithm
    optimizer: optax.GradientTransformation
    mesh: Mesh | None
    policy: Policy
    axes: Any  # a tree like the parameters, of their axis letters
    trained: Trained
    gathers: bool = False  # whole parameters decode on one device of the mesh
    target: Target | None = None  # None: virtual CPU devices
    decode_mesh: Mesh | None = None  # on which the same devices decode, where it is another


def make_case(
    config: DecoderConfig,
    job: Workload,
    algorithm: Algorithm,
    optimizer: optax.GradientTransformation,
    *,
    mesh: Mesh | None = None,
    lora: LoraConfig | None = None,
    quantised: str | None = None,
    gathers: bool = False,
    target: Target | None = None,
    decode_mesh: Mesh | None = None,
) -> DryRunCase:
    """The parts of a run for a mesh; with `lora` an adapter is trained; with `gathers` one device decodes.

    With a `decode_mesh` the devices decode on that, to which the parameters move after each update. The base of an
    adapter is `quantised` as "int8" or "nf4", or whole. The devices of the mesh are those of
    `target_devices(target)` where there is a target.
    """
    if target is not None:
        check_dtype(target, job.compute_dtype or job.dtype)
    axes: Any = decoder_axes(config)
    dtype, kernel = jnp.dtype(job.dtype), best("cpu" if target is None else target.chip.platform)
    if lora is None:
        if quantised is not None:
            raise BadInput(f"weights that are {quantised} can't be trained: give lora=, an adapter beside them")
        policy = make_policy(config, dtype=dtype, remat=job.remat, attend=kernel)
        policy = settle(policy, mesh, axes)
        return DryRunCase(config, job, algorithm, optimizer, mesh, policy, axes, WHOLE, gathers, target, decode_mesh)
    policy: Policy = lora_policy(config, lora, dtype=dtype, remat=job.remat, attend=kernel)
    if quantised is not None:
        policy = policy._replace(init=partial(_quantised_init, policy.init, config=config, kind=check_kind(quantised)))
    own: Any = adapter_axes(lora)
    letters = Adapted(axes, own)
    policy = settle(policy, mesh, letters)
    return DryRunCase(config, job, algorithm, optimizer, mesh, policy, letters, ADAPTER, gathers, target, decode_mesh)


def _quantised_init(init: Callable, key: jax.Array, *, config: DecoderConfig, kind: str) -> Adapted:
    params = init(key)
    return params._replace(base=quantise_layers(params.base, matrices(config), kind=kind))


def dry_run(case: DryRunCase, programs: Sequence[str] | None = None) -> list[ProgramCost]:
    """Compile these programs: by default update, reference where there is a KL term, prefill and decode.

    If decoding has a mesh of its own, `reshard` brings the parameters there.
    """
    known: dict[str, Callable[[DryRunCase], ProgramCost]] = {"update": dry_update}
    known |= {"reference": dry_reference} if "logp_ref" in case.algorithm.needs else {}
    known |= {"reshard": dry_reshard} if case.decode_mesh is not None else {}
    known |= {"prefill": dry_prefill, "decode": dry_decode}
    unknown = sorted(set(programs or ()) - set(known))
    if unknown:
        raise BadInput(f"there is no program {unknown[0]!r} to compile here; choose from {', '.join(known)}")
    return [known[name](case) for name in programs or known]


# The programs -----------------------------------------------------------------------------------------


def dry_update(case: DryRunCase) -> ProgramCost:
    """The update that a run would make, with its state donated."""
    job, mesh = case.job, case.mesh
    update = make_update(
        case.policy,
        case.algorithm,
        case.optimizer,
        micro_rows=job.micro_rows,
        mini_batches=job.mini_batches,
        epochs=job.epochs,
        chunk=job.chunk,
        trained=case.trained,
        compute_dtype=job.compute_dtype,
    )
    state = abstract_state(case)
    where = jax.tree.map(lambda x: x.sharding, state)
    work = jax.jit(update, donate_argnums=0) if mesh is None else jit_update(update, where, donate=True)
    part = case.trained.take(state.params)
    trips = (micro_batches(job, mesh), scored_chunks(case))
    kept = {"parameters": local_bytes(state.params), "optimizer": local_bytes(state.optimizer)}
    return measure_program(
        "update",
        work,
        (state, abstract_batch(case)),
        mesh,
        target=case.target,
        trips=trips if job.rows > job.micro_rows * ways(_sizes_of(mesh), *ROWS) else trips[1:],  # one is no loop
        useful=update_flops(case.config, job),
        floor=kept | update_floor(case.config, job, _sizes_of(mesh), moved=local_count(part)),
        beside=local_bytes(part) if "logp_ref" in case.algorithm.needs else 0,
    )


def dry_reference(case: DryRunCase) -> ProgramCost:
    """Scoring a batch by the reference, whose parameters lie as the policy's do."""
    job, state = case.job, abstract_state(case)
    score = make_score(case.policy, chunk=job.chunk, compute_dtype=job.compute_dtype)
    return measure_program(
        "reference",
        jax.jit(partial(score_reference, score, micro_rows=job.micro_rows, mesh=case.mesh)),
        (state.params, abstract_batch(case).replace(logp_ref=None)),
        case.mesh,
        target=case.target,
        trips=(micro_batches(job, case.mesh) * job.mini_batches, scored_chunks(case)),
        useful=forward_flops(case.config, job.rows * job.length, job.length / 2),
        floor={"parameters": local_bytes(state.params)},
        beside=local_bytes(state.optimizer) + local_bytes(case.trained.take(state.params)),
    )


def dry_reshard(case: DryRunCase) -> ProgramCost:
    """Bring the parameters from the mesh that trains to the one that decodes, in the type that is computed in."""
    params = abstract_state(case).params
    there = _cast(abstract_state(_where_it_decodes(case)).params, case.job)
    convert = partial(cast, dtype=jnp.dtype(case.job.compute_dtype or case.job.dtype))
    return measure_program(
        "reshard",
        jax.jit(convert, out_shardings=_where(there, case.decode_mesh)),
        (params,),
        case.mesh,
        target=case.target,
        trips=(),
        useful=0.0,
        floor={"parameters": local_bytes(there)},
        beside=local_bytes(abstract_state(case).optimizer),
    )


def _where_it_decodes(case: DryRunCase) -> DryRunCase:
    """The case on the mesh that decodes."""
    if case.decode_mesh is None:
        return case
    alone = case.policy if case.policy.settled is None else case.policy.settled.alone
    return case._replace(mesh=case.decode_mesh, policy=settle(alone, case.decode_mesh, case.axes), decode_mesh=None)


def dry_prefill(case: DryRunCase) -> ProgramCost:
    """Prompts of all slots, in an empty cache."""
    case = _where_it_decodes(case)
    params, rows, mesh = _decoding(case)
    size = (len(rows.token), case.job.prompt)
    tokens, real = (_laid(jax.ShapeDtypeStruct(size, x), _over_rows(mesh), mesh) for x in (jnp.int32, jnp.bool_))
    work = jax.jit(partial(prefill, case.policy), donate_argnums=1, out_shardings=_where(rows.cache, mesh))
    useful = forward_flops(case.config, math.prod(size), case.job.prompt / 2)
    unembedded = 2.0 * math.prod(size) * case.config.v * case.config.d  # which a prefill does not do
    trips = (-(-case.job.prompt // slots_at_once(case)),)
    return _measure_decoding("prefill", work, (params, rows.cache, tokens, real), case, trips, useful - unembedded)


def dry_decode(case: DryRunCase) -> ProgramCost:
    """A stretch of decoding in all slots, with full support."""
    case = _where_it_decodes(case)
    params, rows, mesh = _decoding(case)
    count = len(rows.token)
    settings = jax.tree.map(lambda x: _laid(x, _over_rows(mesh), mesh), jax.eval_shape(lambda: sampling(count)))
    stops = _laid(jax.ShapeDtypeStruct((count, STOPS), jnp.int32), _over_rows(mesh), mesh)
    after = None if mesh is None else (_where(rows, mesh), None)
    work = jax.jit(partial(decode, case.policy, steps=case.job.steps), donate_argnums=1, out_shardings=after)
    middle = case.job.length / 2
    trips = (case.job.steps, math.ceil(middle / slots_at_once(case)))
    useful = forward_flops(case.config, count * case.job.steps, middle)
    return _measure_decoding("decode", work, (params, rows, settings, stops), case, trips, useful)


def _measure_decoding(
    name: str, work, arguments: tuple, case: DryRunCase, trips: tuple[int, ...], useful: float
) -> ProgramCost:
    state, copied = abstract_state(case), bool(case.job.compute_dtype) or (case.gathers and case.mesh is not None)
    sizes = {} if case.gathers else _sizes_of(case.mesh)
    floor = {"parameters": local_bytes(arguments[0])} | decode_floor(case.config, case.job, sizes)
    beside = local_bytes(state.optimizer) + (local_bytes(state.params) if copied else 0)
    beside += local_bytes(case.trained.take(state.params)) if "logp_ref" in case.algorithm.needs else 0
    mesh = case.mesh if divides(case.mesh) and not case.gathers else None
    steps = case.job.steps if name == "decode" else 1
    sizes = {"trips": trips, "useful": useful, "floor": floor, "beside": beside, "steps": steps}
    return measure_program(name, work, arguments, mesh, target=case.target, **sizes)


# Abstract arguments -----------------------------------------------------------------------------------


def abstract_state(case: DryRunCase) -> LearnerState:
    """The learner's state as shapes, laid out on the mesh."""
    params = case.policy.init
    state = jax.eval_shape(lambda: init_learner(params(jax.random.key(0)), case.optimizer, case.trained))
    if case.mesh is None:
        return state
    where = state_shardings(state, case.mesh, case.axes, trained=case.trained)
    return jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), state, where)


def abstract_batch(case: DryRunCase) -> Batch:
    """A batch as it comes from the host, with what the algorithm reads: plain rows, as if no contexts began alike."""
    shape, read = (case.job.rows, case.job.length), case.algorithm.needs
    whole = {np_type: _laid(jax.ShapeDtypeStruct(shape, np_type), SHARED, case.mesh) for np_type in _TYPES}
    integer, real, flag = whole.values()
    names = ("tokens", "positions", "segments", "trajectory", "turn", "slot", "group")
    fields: dict[str, Any] = dict.fromkeys(names, integer)
    fields |= dict.fromkeys(("logp_sampled", "logp_old", "advantage", "weight"), real)
    return Batch(**fields, chosen=flag, logp_ref=real if "logp_ref" in read else None)


_TYPES = (jnp.int32, jnp.float32, jnp.bool_)


def _decoding(case: DryRunCase) -> tuple:
    """Parameters and slots as shapes, and the mesh over which XLA divides decoding.

    Over a mesh of data alone each device decodes its own slots by a program of its own.
    """
    mesh = case.mesh if divides(case.mesh) and not case.gathers else None
    count = -(-case.job.slots // (1 if mesh or case.gathers else ways(_sizes_of(case.mesh), *ROWS)))
    if mesh is not None and count % ways(_sizes_of(mesh), *ROWS):
        raise BadInput(
            f"{count} slots can't be dealt evenly over mesh {dict(mesh.shape)}: take a multiple of data x fsdp"
        )

    def start():
        keys, nothing = jax.random.split(jax.random.key(0), count), jnp.zeros(count, jnp.int32)
        return start_rows(_make_cache(case.policy)(count, case.job.length), nothing, keys, nothing)

    rows, params = jax.eval_shape(start), _cast(abstract_state(case).params, case.job)
    rows = rows.replace(cache=_cast(rows.cache, case.job))
    if mesh is None:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params), rows, None
    heads = TENSOR if case.config.k % mesh.shape[TENSOR] == 0 else None
    wide = PartitionSpec(None, ROWS, heads)
    laid = jax.tree.map(lambda x: _laid(x, wide if x.ndim == 5 else _over_rows(mesh), mesh), rows)
    return params, laid, mesh


def _cast(tree: Any, job: Workload) -> Any:
    """Shapes in the type of number that is computed in."""
    computed = jnp.dtype(job.compute_dtype or job.dtype)
    return jax.tree.map(lambda x: x.update(dtype=computed) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


def _make_cache(policy: Policy) -> Callable[[int, int], Any]:
    if policy.make_cache is None:
        raise BadInput("this policy has no cache to decode with: leave out the programs prefill and decode")
    return policy.make_cache


def _laid(x: Any, spec: PartitionSpec, mesh: Mesh | None) -> Any:
    return x if mesh is None else jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))


def _over_rows(mesh: Mesh | None) -> PartitionSpec:
    return SHARED if mesh is None else PartitionSpec(ROWS)


def _where(tree: Any, mesh: Mesh | None) -> Any:
    return None if mesh is None else jax.tree.map(lambda x: x.sharding, tree)


def _sizes_of(mesh: Mesh | None) -> dict[str, int]:
    """The sizes of a mesh by axis."""
    return {} if mesh is None else dict(mesh.shape)


def micro_batches(job: Workload, mesh: Mesh | None) -> int:
    """Say how many micro-batches a device works through for one step."""
    return math.ceil(job.rows / job.mini_batches / (job.micro_rows * ways(_sizes_of(mesh), *ROWS)))


def scored_chunks(case: DryRunCase) -> int:
    """How many chunks of logits a device's share of a micro-batch is scored in, as `sampler.score_next` has it."""
    tokens = case.job.micro_rows * (case.job.length - 1)
    chunk = min(case.job.chunk, max(LOGITS // case.config.v, LEAST_CHUNK), tokens)
    return -(-tokens // chunk)


def slots_at_once(case: DryRunCase) -> int:
    """Count the slots of a cache that decoding attends to at once, as `kv_cache.block_sizes` has it."""
    length = case.job.length if case.job.length <= BLOCK else -(-case.job.length // BLOCK) * BLOCK
    own = min(length, BLOCK)
    if case.target is None or case.target.chip.platform == "cpu":
        return own
    return next((size for size in WIDE_BLOCKS if length % size == 0), own)


def _local_shape(x: Any) -> tuple[int, ...]:
    """The shape of what lies on one device."""
    return x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)


def local_count(tree: Any) -> int:
    """Say how many numbers of a tree of shapes lie on one device."""
    return sum(math.prod(_local_shape(x)) for x in jax.tree.leaves(tree))


def local_bytes(tree: Any) -> int:
    """Say how many bytes of it."""
    return sum(math.prod(_local_shape(x)) * x.dtype.itemsize for x in jax.tree.leaves(tree))
