"""The planner of a hosted run: which part of a model is trained, in which type, and what the engine decodes with.

float32               all parameters are trained, and sent to the engine
bfloat16, float16     float32 master weights are trained; a copy of them in this type computes, and is sent (F7)
LoRA                  the base is frozen, in any type; a float32 adapter is trained
LoRA, int8 or nf4     the base's matrices are quantised as they are read; its other weights and the cache are `dtype`
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from flowgrpo.contracts import Policy
from flowgrpo.data.chat_templates import read_template
from flowgrpo.models.attention_kernels import get_kernel
from flowgrpo.models.decoder import make_policy
from flowgrpo.models.hf import Model, load_model
from flowgrpo.models.lora import LoraConfig, LoraParams, adapter_axes, init_adapter, lora_policy
from flowgrpo.models.quantised import Quantised
from flowgrpo.models.trainable import ADAPTER, ALL_PARAMS, TrainableSubset, cast
from flowgrpo.parallel.offload import DEVICE, DISK, HOST
from flowgrpo.parallel.sharding import decoder_axes, place_state, resolve_mesh, shard_policy
from flowgrpo.training.names import WHOLE_BASE
from flowgrpo.training.settings import DevicesSection, ModelSection
from flowgrpo.training.stages import rollout_params
from flowgrpo.types import BadInput, Params, PyTree

OFFLOAD = {"none": DEVICE, "host": HOST, "disk": DISK}
MAX_UNROLLED_LAYERS = 4  # a model of few layers is compiled without a loop over them: faster, and soon compiled


class Planner(NamedTuple):
    """What is trained, and what the engine decodes with."""

    policy: Policy  # of the update, on its mesh
    engine_policy: Policy
    params: Params  # at the start
    trainable: TrainableSubset
    compute_dtype: Any  # None: that of the parameters
    to_engine: Callable[[Params], Params]  # trained parameters -> those of the engine, on its device
    to_mesh: Callable[[PyTree], PyTree]  # places a tree of parameters on the mesh
    lora: LoraConfig | None = None  # of the adapter, if that is what is trained


def lora_of(settings: ModelSection) -> LoraConfig | None:
    """The adapter of a run; None if it trains all parameters."""
    if not settings.lora_rank:
        return None
    return LoraConfig(
        rank=settings.lora_rank, alpha=settings.lora_alpha, targets=tuple(settings.lora_targets.split(","))
    )


def frozen_base_dtype(settings: ModelSection) -> str | None:
    """The quantised type of the weights under an adapter; None if they are not quantised."""
    return None if settings.base_dtype == WHOLE_BASE else settings.base_dtype


def has_master_weights(settings: ModelSection) -> bool:
    """Whether float32 master weights are trained that compute in another type; a frozen base needs none."""
    return settings.dtype != "float32" and lora_of(settings) is None


def template_of(settings: ModelSection) -> str | None:
    """The chat template that the settings give the model; None for its own."""
    return None if settings.chat_template is None else read_template(settings.chat_template)


def load_start(path: str | Path, settings: ModelSection, model: Model | None = None) -> Model:
    """The planner's start, in the type in which its parameters are trained; `model` is one that has been loaded."""
    dtype = "float32" if has_master_weights(settings) else settings.dtype
    if model is not None:
        if frozen_base_dtype(settings) is not None:
            raise BadInput(
                f"--base_dtype={settings.base_dtype} quantises weights as they are read, and the model has been: load "
                "it with quantised=, or give its folder"
            )
        if any(isinstance(x, Quantised) for x in model.base.params.values()):
            return model
        if model.lora is None:
            return model._replace(params=cast(model.params, dtype))
        return model._replace(params=LoraParams(cast(model.params.base, dtype), model.params.adapter))
    return load_model(path, dtype=dtype, quantised=frozen_base_dtype(settings), template=template_of(settings))


def frozen_start(start: Model, settings: ModelSection) -> Model:
    """The planner's start in the type that computes, without its adapter; frozen, it speaks the other roles."""
    start = start.base
    if not has_master_weights(settings):
        return start
    policy = make_policy(
        start.config,
        dtype=settings.dtype,
        unroll=_unroll(start),
        unstack_on_cpu=True,
        attend=get_kernel(settings.attention),
    )
    return start._replace(policy=policy, params=cast(start.params, settings.dtype))


def check_planner(settings: ModelSection, devices: DevicesSection) -> tuple[LoraConfig | None, Mesh | None]:
    """The adapter and the mesh of a planner; raises `BadInput` if its settings contradict each other."""
    lora, offloads = lora_of(settings), devices.offload != "none"
    if lora is not None and offloads:
        raise BadInput("--offload moves the weights that an adapter's base shares: leave out --offload or --lora_rank")
    if lora is not None and settings.model is None:
        raise BadInput("--lora_rank needs --model: the small model that is made here has to be trained whole")
    if lora is None and settings.base_dtype != WHOLE_BASE:
        raise BadInput(
            f"--base_dtype={settings.base_dtype} freezes the weights: give --lora_rank=16 too, for an adapter"
        )
    if devices.mesh is None:
        return lora, None  # one device: an engine decodes on the first
    if offloads:
        raise BadInput("--offload moves the models of one device: leave out --mesh, or --offload")
    return lora, resolve_mesh(devices.mesh)


def make_planner(start: Model, settings: ModelSection, devices: DevicesSection, *, seed: int) -> Planner:
    """The planner that starts as this model, with its adapter, or else with a new one if the settings have one."""
    lora, mesh = check_planner(settings, devices)
    if start.lora is not None:
        if lora is None or lora.rank != start.lora.rank:
            raise BadInput(
                f"--lora_rank={settings.lora_rank} contradicts the model, whose adapter has rank {start.lora.rank}: "
                f"give --lora_rank={start.lora.rank}, or the model without it"
            )
        lora = start.lora
    axes: Any = decoder_axes(start.config)
    attend, unstack = get_kernel(settings.attention), devices.mesh is None
    if lora is None:
        policy = make_policy(
            start.config,
            dtype=settings.dtype,
            remat=settings.remat,
            unroll=_unroll(start),
            unstack_on_cpu=unstack,
            attend=attend,
        )
        params, trainable = start.params, ALL_PARAMS
    else:
        policy = lora_policy(
            start.config, lora, dtype=settings.dtype, remat=settings.remat, unstack_on_cpu=unstack, attend=attend
        )
        adapter = init_adapter(jax.random.key(seed), start.config, lora)
        params = LoraParams(start.params, adapter) if start.lora is None else start.params
        axes, trainable = LoraParams._make((axes, adapter_axes(lora))), ADAPTER
    compute_dtype = jnp.dtype(settings.dtype) if has_master_weights(settings) else None

    def to_engine(params: Params) -> Params:
        """Parameters in the type that computes; over a mesh, gathered on the first local device."""
        weights = rollout_params(params, compute_dtype)
        return weights if mesh is None else jax.device_put(weights, jax.local_devices()[0])

    return Planner(
        policy=shard_policy(policy, mesh, axes),
        engine_policy=policy,
        params=params,
        trainable=trainable,
        compute_dtype=compute_dtype,
        to_engine=to_engine,
        to_mesh=partial(place_state, mesh=mesh, axes=axes),
        lora=lora,
    )


def _unroll(start: Model) -> bool | int:
    """`unroll` of `make_policy`."""
    return True if start.config.num_layers <= MAX_UNROLLED_LAYERS else 1
