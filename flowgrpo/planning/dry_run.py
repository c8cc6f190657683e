"""Dry run: compile the programs of a run without its weights, and report the cost of each on one device.

    launch.configure(cpu_devices=512)                             # as many as the mesh has, before JAX starts
    case = make_case(config, Workload(rows=512), algorithm, optimizer, mesh=make_mesh(parse_mesh("data=8,fsdp=64")))
    for cost in dry_run(case):
        print(cost.name, cost.peak)

The update, scoring by the reference, prefill and decoding of a real run are lowered and compiled from abstract shapes
and shardings; nothing is allocated. Memory is the compiler's own analysis of one device. FLOPs are those of the traced
program (`count_products`), because XLA's analysis counts each loop once; both are given.

With a `target` (`targets.parse_target`) the programs are compiled by that machine's own compiler, which says whether
they fit, and how many bytes they move and send. Programs for virtual CPU devices are sharded alike, but not fused or
scheduled alike, and compute bfloat16 products in float32: temporary memory tends to be above that of an accelerator.
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
from flowgrpo.generate.sampler import MAX_LOGITS, MIN_CHUNK, decode, make_sampling, prefill, start_rows
from flowgrpo.learner.state import LearnerState, init_learner
from flowgrpo.learner.update import UpdateSettings, make_score, make_update, score_reference
from flowgrpo.models.attention import BLOCK
from flowgrpo.models.attention_kernels import best_kernel
from flowgrpo.models.config import DecoderConfig
from flowgrpo.models.decoder import make_policy, matrices
from flowgrpo.models.kv_cache import WIDE_BLOCKS
from flowgrpo.models.lora import LoraConfig, LoraParams, adapter_axes, lora_policy
from flowgrpo.models.quantised import check_kind, quantise_layers
from flowgrpo.models.trainable import ADAPTER, ALL_PARAMS, TrainableSubset, cast
from flowgrpo.parallel.row_sharding import REPLICATED, ROW_AXES, TENSOR, has_model_axes
from flowgrpo.parallel.sharding import decoder_axes, jit_update, shard_policy, state_shardings
from flowgrpo.planning.cost_model import (
    Workload,
    decode_floor,
    forward_flops,
    mesh_size,
    update_floor,
    update_flops,
)
from flowgrpo.planning.program_cost import ProgramCost, ProgramEstimate, measure_program
from flowgrpo.planning.targets import Target, check_dtype
from flowgrpo.types import BadInput, Batch, PyTree

STOPS = 4  # ids that end a turn


class DryRunCase(NamedTuple):
    """A run to compile without its weights."""

    config: DecoderConfig
    job: Workload
    algorithm: Algorithm
    optimizer: optax.GradientTransformation
    mesh: Mesh | None
    policy: Policy
    axes: PyTree  # axis letters of each parameter
    trainable: TrainableSubset
    gathers: bool = False  # whether one device of the mesh decodes, with all parameters
    target: Target | None = None  # None: virtual CPU devices
    decode_mesh: Mesh | None = None  # of the same devices, for decoding; None: `mesh`


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
    """A run to compile.

    Args:
        mesh: of the devices, which are `target_devices(target)` if there is a target; None: one device.
        lora: adapter to train; None: all parameters are trained.
        quantised: type of the base under an adapter, "int8" or "nf4"; None: not quantised.
        gathers: whether one device decodes, with all parameters.
        target: the machine to compile for; None: virtual CPU devices.
        decode_mesh: of the same devices, for decoding; the parameters are resharded to it after each update.
    """
    if target is not None:
        check_dtype(target, job.compute_dtype or job.dtype)
    axes: Any = decoder_axes(config)
    dtype, kernel = jnp.dtype(job.dtype), best_kernel("cpu" if target is None else target.chip.platform)
    if lora is None:
        if quantised is not None:
            raise BadInput(f"weights that are {quantised} can't be trained: give lora=, an adapter over them")
        policy = make_policy(config, dtype=dtype, remat=job.remat, attend=kernel)
        policy = shard_policy(policy, mesh, axes)
        return DryRunCase(
            config, job, algorithm, optimizer, mesh, policy, axes, ALL_PARAMS, gathers, target, decode_mesh
        )
    policy: Policy = lora_policy(config, lora, dtype=dtype, remat=job.remat, attend=kernel)
    if quantised is not None:
        policy = policy._replace(init=partial(_quantised_init, policy.init, config=config, kind=check_kind(quantised)))
    lora_axes: Any = adapter_axes(lora)
    axes = LoraParams(axes, lora_axes)
    policy = shard_policy(policy, mesh, axes)
    return DryRunCase(config, job, algorithm, optimizer, mesh, policy, axes, ADAPTER, gathers, target, decode_mesh)


def _quantised_init(init: Callable, key: jax.Array, *, config: DecoderConfig, kind: str) -> LoraParams:
    params = init(key)
    return params._replace(base=quantise_layers(params.base, matrices(config), kind=kind))


def dry_run(case: DryRunCase, programs: Sequence[str] | None = None) -> list[ProgramCost]:
    """Compile these programs, by default all that the run has -> their costs.

    They are `update`, `reference` if there is a KL term, `reshard` if decoding has a mesh of its own, `prefill` and
    `decode`.
    """
    available: dict[str, Callable[[DryRunCase], ProgramCost]] = {"update": dry_update}
    available |= {"reference": dry_reference} if "logp_ref" in case.algorithm.needs else {}
    available |= {"reshard": dry_reshard} if case.decode_mesh is not None else {}
    available |= {"prefill": dry_prefill, "decode": dry_decode}
    unknown = sorted(set(programs or ()) - set(available))
    if unknown:
        raise BadInput(f"there is no program {unknown[0]!r} to compile here; choose from {', '.join(available)}")
    return [available[name](case) for name in programs or available]


# The programs -----------------------------------------------------------------------------------------


def dry_update(case: DryRunCase) -> ProgramCost:
    """The update, with its state donated."""
    job, mesh = case.job, case.mesh
    update = make_update(
        case.policy,
        case.algorithm,
        case.optimizer,
        UpdateSettings(
            micro_rows=job.micro_rows,
            mini_batches=job.mini_batches,
            epochs=job.epochs,
            chunk=job.chunk,
            compute_dtype=job.compute_dtype,
        ),
        trainable=case.trainable,
    )
    state = abstract_state(case)
    shardings = jax.tree.map(lambda x: x.sharding, state)
    work = jax.jit(update, donate_argnums=0) if mesh is None else jit_update(update, shardings, donate=True)
    part = case.trainable.split(state.params)
    trips = (micro_batches(job, mesh), scored_chunks(case))
    if job.rows <= job.micro_rows * mesh_size(_axis_sizes(mesh), *ROW_AXES):
        trips = trips[1:]  # one micro-batch is no loop
    floor = {"parameters": local_bytes(state.params), "optimizer": local_bytes(state.optimizer)}
    floor |= update_floor(case.config, job, _axis_sizes(mesh), moved=local_count(part))
    return measure_program(
        "update",
        work,
        (state, abstract_batch(case)),
        mesh,
        ProgramEstimate(
            trips,
            useful_flops=update_flops(case.config, job),
            floor=floor,
            resident_bytes=local_bytes(part) if "logp_ref" in case.algorithm.needs else 0,
        ),
        target=case.target,
    )


def dry_reference(case: DryRunCase) -> ProgramCost:
    """Scoring of a batch by the reference, which is sharded like the policy."""
    job, state = case.job, abstract_state(case)
    score = make_score(case.policy, chunk=job.chunk, compute_dtype=job.compute_dtype)
    return measure_program(
        "reference",
        jax.jit(partial(score_reference, score, micro_rows=job.micro_rows, mesh=case.mesh)),
        (state.params, abstract_batch(case).replace(logp_ref=None)),
        case.mesh,
        ProgramEstimate(
            trips=(micro_batches(job, case.mesh) * job.mini_batches, scored_chunks(case)),
            useful_flops=forward_flops(case.config, job.rows * job.length, job.length / 2),
            floor={"parameters": local_bytes(state.params)},
            resident_bytes=local_bytes(state.optimizer) + local_bytes(case.trainable.split(state.params)),
        ),
        target=case.target,
    )


def dry_reshard(case: DryRunCase) -> ProgramCost:
    """Resharding of the parameters from the training mesh to the decoding mesh, in the compute dtype."""
    params = abstract_state(case).params
    resharded = _cast(abstract_state(_on_decode_mesh(case)).params, case.job)
    convert = partial(cast, dtype=jnp.dtype(case.job.compute_dtype or case.job.dtype))
    return measure_program(
        "reshard",
        jax.jit(convert, out_shardings=_shardings(resharded, case.decode_mesh)),
        (params,),
        case.mesh,
        ProgramEstimate(
            trips=(),
            useful_flops=0.0,
            floor={"parameters": local_bytes(resharded)},
            resident_bytes=local_bytes(abstract_state(case).optimizer),
        ),
        target=case.target,
    )


def _on_decode_mesh(case: DryRunCase) -> DryRunCase:
    """The case on the mesh for decoding."""
    if case.decode_mesh is None:
        return case
    alone = case.policy if case.policy.sharded is None else case.policy.sharded.unsharded
    return case._replace(
        mesh=case.decode_mesh, policy=shard_policy(alone, case.decode_mesh, case.axes), decode_mesh=None
    )


def dry_prefill(case: DryRunCase) -> ProgramCost:
    """Prefill of the prompts of all slots, in an empty cache."""
    case = _on_decode_mesh(case)
    params, rows, mesh = _decoding(case)
    size = (len(rows.token), case.job.prompt)
    tokens, real = (_abstract(jax.ShapeDtypeStruct(size, x), _over_rows(mesh), mesh) for x in (jnp.int32, jnp.bool_))
    work = jax.jit(partial(prefill, case.policy), donate_argnums=1, out_shardings=_shardings(rows.cache, mesh))
    useful_flops = forward_flops(case.config, math.prod(size), case.job.prompt / 2)
    unembedding = 2.0 * math.prod(size) * case.config.v * case.config.d  # which a prefill does not do
    trips = (-(-case.job.prompt // slots_at_once(case)),)
    return _measure_decoding(
        "prefill", work, (params, rows.cache, tokens, real), case, trips, useful_flops - unembedding
    )


def dry_decode(case: DryRunCase) -> ProgramCost:
    """A call of decoding in all slots, sampling from the full vocabulary."""
    case = _on_decode_mesh(case)
    params, rows, mesh = _decoding(case)
    count = len(rows.token)
    settings = jax.tree.map(
        lambda x: _abstract(x, _over_rows(mesh), mesh), jax.eval_shape(lambda: make_sampling(count))
    )
    stops = _abstract(jax.ShapeDtypeStruct((count, STOPS), jnp.int32), _over_rows(mesh), mesh)
    after = None if mesh is None else (_shardings(rows, mesh), None)
    work = jax.jit(partial(decode, case.policy, steps=case.job.steps), donate_argnums=1, out_shardings=after)
    middle = case.job.length / 2
    trips = (case.job.steps, math.ceil(middle / slots_at_once(case)))
    useful_flops = forward_flops(case.config, count * case.job.steps, middle)
    return _measure_decoding("decode", work, (params, rows, settings, stops), case, trips, useful_flops)


def _measure_decoding(
    name: str, work, arguments: tuple, case: DryRunCase, trips: tuple[int, ...], useful_flops: float
) -> ProgramCost:
    state, copied = abstract_state(case), bool(case.job.compute_dtype) or (case.gathers and case.mesh is not None)
    sizes = {} if case.gathers else _axis_sizes(case.mesh)
    floor = {"parameters": local_bytes(arguments[0])} | decode_floor(case.config, case.job, sizes)
    resident_bytes = local_bytes(state.optimizer) + (local_bytes(state.params) if copied else 0)
    resident_bytes += local_bytes(case.trainable.split(state.params)) if "logp_ref" in case.algorithm.needs else 0
    mesh = case.mesh if has_model_axes(case.mesh) and not case.gathers else None
    steps = case.job.steps if name == "decode" else 1
    estimate = ProgramEstimate(trips, useful_flops, floor, resident_bytes, steps)
    return measure_program(name, work, arguments, mesh, estimate, target=case.target)


# Abstract arguments -----------------------------------------------------------------------------------


def abstract_state(case: DryRunCase) -> LearnerState:
    """The learner state as shapes, sharded on the mesh."""
    params = case.policy.init
    state = jax.eval_shape(lambda: init_learner(params(jax.random.key(0)), case.optimizer, case.trainable))
    if case.mesh is None:
        return state
    shardings = state_shardings(state, case.mesh, case.axes, trainable=case.trainable)
    return jax.tree.map(lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), state, shardings)


def abstract_batch(case: DryRunCase) -> Batch:
    """A batch from the host, with the fields that the algorithm reads, in plain rows without shared prefixes."""
    shape, read = (case.job.rows, case.job.length), case.algorithm.needs
    whole = {np_type: _abstract(jax.ShapeDtypeStruct(shape, np_type), REPLICATED, case.mesh) for np_type in _TYPES}
    integer, real, flag = whole.values()
    names = ("tokens", "positions", "segments", "trajectory", "turn", "slot", "group")
    fields: dict[str, Any] = dict.fromkeys(names, integer)
    fields |= dict.fromkeys(("logp_sampled", "logp_old", "advantage", "weight"), real)
    return Batch(**fields, chosen=flag, logp_ref=real if "logp_ref" in read else None)


_TYPES = (jnp.int32, jnp.float32, jnp.bool_)


def _decoding(case: DryRunCase) -> tuple:
    """Parameters and slots as shapes, and the mesh over which XLA shards decoding.

    On a mesh with data axes alone each device decodes its own slots, in a program of its own.
    """
    mesh = case.mesh if has_model_axes(case.mesh) and not case.gathers else None
    count = -(-case.job.slots // (1 if mesh or case.gathers else mesh_size(_axis_sizes(case.mesh), *ROW_AXES)))
    if mesh is not None and count % mesh_size(_axis_sizes(mesh), *ROW_AXES):
        raise BadInput(
            f"{count} slots can't be sharded evenly over mesh {dict(mesh.shape)}: take a multiple of data x fsdp"
        )

    make_cache = case.policy.make_cache
    assert make_cache is not None  # decoders have one

    def start():
        keys, zeros = jax.random.split(jax.random.key(0), count), jnp.zeros(count, jnp.int32)
        return start_rows(make_cache(count, case.job.length), zeros, keys, zeros)

    rows, params = jax.eval_shape(start), _cast(abstract_state(case).params, case.job)
    rows = rows.replace(cache=_cast(rows.cache, case.job))
    if mesh is None:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params), rows, None
    heads = TENSOR if case.config.k % mesh.shape[TENSOR] == 0 else None
    wide = PartitionSpec(None, ROW_AXES, heads)
    sharded = jax.tree.map(lambda x: _abstract(x, wide if x.ndim == 5 else _over_rows(mesh), mesh), rows)
    return params, sharded, mesh


def _cast(tree: Any, job: Workload) -> Any:
    """The shapes in the compute dtype."""
    computed = jnp.dtype(job.compute_dtype or job.dtype)
    return jax.tree.map(lambda x: x.update(dtype=computed) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


def _abstract(x: Any, spec: PartitionSpec, mesh: Mesh | None) -> Any:
    return x if mesh is None else jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))


def _over_rows(mesh: Mesh | None) -> PartitionSpec:
    return REPLICATED if mesh is None else PartitionSpec(ROW_AXES)


def _shardings(tree: Any, mesh: Mesh | None) -> Any:
    return None if mesh is None else jax.tree.map(lambda x: x.sharding, tree)


def _axis_sizes(mesh: Mesh | None) -> dict[str, int]:
    """Sizes of the axes of a mesh."""
    return {} if mesh is None else dict(mesh.shape)


def micro_batches(job: Workload, mesh: Mesh | None) -> int:
    """Number of micro-batches of one device in a gradient step."""
    return math.ceil(job.rows / job.mini_batches / (job.micro_rows * mesh_size(_axis_sizes(mesh), *ROW_AXES)))


def scored_chunks(case: DryRunCase) -> int:
    """Number of chunks of logits of a micro-batch of one device, as in `sampler.score_next`."""
    tokens = case.job.micro_rows * (case.job.length - 1)
    chunk = min(case.job.chunk, max(MAX_LOGITS // case.config.v, MIN_CHUNK), tokens)
    return -(-tokens // chunk)


def slots_at_once(case: DryRunCase) -> int:
    """Number of cache slots that decoding attends to at once, as in `kv_cache.block_sizes`."""
    length = case.job.length if case.job.length <= BLOCK else -(-case.job.length // BLOCK) * BLOCK
    block = min(length, BLOCK)
    if case.target is None or case.target.chip.platform == "cpu":
        return block
    return next((size for size in WIDE_BLOCKS if length % size == 0), block)


def _local_shape(x: Any) -> tuple[int, ...]:
    """The shape on one device."""
    return x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)


def local_count(tree: Any) -> int:
    """Number of elements on one device of a tree of shapes."""
    return sum(math.prod(_local_shape(x)) for x in jax.tree.leaves(tree))


def local_bytes(tree: Any) -> int:
    """Number of bytes on one device of a tree of shapes."""
    return sum(math.prod(_local_shape(x)) * x.dtype.itemsize for x in jax.tree.leaves(tree))
