"""The planner of a hosted run: which part of a model is trained, in which type, and what the engine decodes with.

float32                 everything is trained, and served as it is
bfloat16, float16       float32 masters are trained; a copy of them in this type computes, and is served (F7)
an adapter              the base stays as it is, in whatever type; a float32 adapter beside it is trained
... over int8 or nf4    the base's matrices are quantised while they are read; the rest of it, and the cache, is `dtype`
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
from flowgrpo.loop import sampled
from flowgrpo.models.attention_kernels import attention_named
from flowgrpo.models.decoder import make_policy
from flowgrpo.models.hf import Model, load_model
from flowgrpo.models.lora import Adapted, LoraConfig, adapter_axes, init_adapter, lora_policy
from flowgrpo.models.trainable import ADAPTER, WHOLE, Trained, cast
from flowgrpo.parallel.offload import DEVICE, DISK, HOST
from flowgrpo.parallel.sharding import decoder_axes, mesh_of, place_state, settle
from flowgrpo.recipes.hosted_config import PlannerConfig
from flowgrpo.recipes.names import WHOLE_BASE
from flowgrpo.types import BadInput

OFFLOAD = {"none": DEVICE, "host": HOST, "disk": DISK}
FEW_LAYERS = 4  # of a model whose layers are compiled one after the other


def lora_of(config: PlannerConfig) -> LoraConfig | None:
    """The adapter of a run; None where it has none."""
    if not config.lora_rank:
        return None
    return LoraConfig(rank=config.lora_rank, alpha=config.lora_alpha, targets=tuple(config.lora_targets.split(",")))


def base_kind(config: PlannerConfig) -> str | None:
    """Name how the base of a run's adapter is quantised; None where it is whole, or where there is none."""
    return None if config.base == WHOLE_BASE else config.base


class Planner(NamedTuple):
    """Parts of a planner: what learns, and what the engine decodes with."""

    policy: Policy  # of the update, on its mesh
    served: Policy  # of the engine
    params: Any  # to begin with
    trained: Trained
    compute_dtype: Any  # None: that of the parameters
    serve: Callable[[Any], Any]  # parameters that learn -> those of the engine, on its device
    place: Callable[[Any], Any]  # what holds parameters -> the same on the mesh


def load_start(path: str | Path, config: PlannerConfig) -> Model:
    """The model that a planner starts as, in the type in which its parameters are kept."""
    dtype = "float32" if has_masters(config) else config.dtype
    return load_model(path, dtype=dtype, quantised=base_kind(config), template=template_of(config))


def template_of(config: PlannerConfig) -> str | None:
    """The chat template that a run's settings give a model; None where it has its own."""
    return None if config.chat_template is None else read_template(config.chat_template)


def frozen(start: Model, config: PlannerConfig) -> Model:
    """The model as it was at the start, in the type that computes: what other roles speak with."""
    if not has_masters(config):
        return start
    attend = attention_named(config.attention)
    policy = make_policy(start.config, dtype=config.dtype, unroll=_unrolls(start), apart=True, attend=attend)
    return start._replace(policy=policy, params=cast(start.params, config.dtype))


def _unrolls(start: Model) -> bool | int:
    """Say whether layers are compiled one after the other: of a few that is faster, and takes little longer."""
    return True if start.config.num_layers <= FEW_LAYERS else 1


def check_planner(config: PlannerConfig) -> tuple[LoraConfig | None, Mesh | None]:
    """Raise `BadInput` where settings of a planner contradict each other; return its adapter and its mesh."""
    lora, offloads = lora_of(config), config.offload != "none"
    if lora is not None and offloads:
        raise BadInput("--offload takes away what the base of an adapter is shared with: leave one of them out")
    if lora is not None and config.model is None:
        raise BadInput("--lora_rank needs --model: the small model that is made here has to be trained whole")
    if lora is None and config.base != WHOLE_BASE:
        raise BadInput(f"--base={config.base} freezes the weights: give --lora_rank=16 too, for an adapter beside them")
    if config.mesh is None:
        return lora, None  # one device: an engine decodes on the first
    if offloads:
        raise BadInput("--offload moves the models of one device: leave out --mesh, or --offload")
    return lora, mesh_of(config.mesh)


def make_planner(start: Model, config: PlannerConfig) -> Planner:
    """The planner that starts as this model."""
    lora, mesh = check_planner(config)
    axes: Any = decoder_axes(start.config)
    policy = make_policy(start.config, unroll=_unrolls(start), apart=config.mesh is None, **computes_in(config))
    params, trained = start.params, WHOLE
    if lora is not None:
        policy = lora_policy(start.config, lora, apart=config.mesh is None, **computes_in(config))
        params = Adapted(start.params, init_adapter(jax.random.key(config.seed), start.config, lora))
        axes, trained = Adapted._make((axes, adapter_axes(lora))), ADAPTER
    compute_dtype = jnp.dtype(config.dtype) if has_masters(config) else None
    return Planner(
        policy=settle(policy, mesh, axes),
        served=policy,
        params=params,
        trained=trained,
        compute_dtype=compute_dtype,
        serve=partial(_serve, compute_dtype=compute_dtype, mesh=mesh),
        place=partial(place_state, mesh=mesh, axes=axes),
    )


def computes_in(config: PlannerConfig) -> dict[str, Any]:
    """Settings of how a policy computes: its type and attention, and whether layers go again for the gradient."""
    return {"dtype": config.dtype, "remat": config.remat, "attend": attention_named(config.attention)}


def has_masters(config: PlannerConfig) -> bool:
    """Say whether float32 masters are trained that compute in another type; a base is frozen, and needs none."""
    return config.dtype != "float32" and lora_of(config) is None


def _serve(params: Any, *, compute_dtype: Any, mesh: Mesh | None) -> Any:
    """Make the parameters that the engine decodes with; over a mesh, gathered on the first local device."""
    served = sampled(params, compute_dtype)
    return served if mesh is None else jax.device_put(served, jax.local_devices()[0])
