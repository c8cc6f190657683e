"""The planner of a hosted run: a model flows in, what is trained of it and how it is served flow out.

float32                 everything is trained, and served as it is
bfloat16                float32 masters are trained; a bfloat16 copy of them computes, and is served (F7)
an adapter              the base stays as it is, in whatever type; a float32 adapter beside it is trained
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from experiments.devices import mesh_of, placing
from experiments.lora_setup import LORA, lora_of
from flowgrpo.contracts import Policy
from flowgrpo.learner.residency import DEVICE, DISK, HOST
from flowgrpo.learner.sharding import decoder_axes, settled
from flowgrpo.learner.trained import ADAPTER, WHOLE, Trained
from flowgrpo.learner.update import cast
from flowgrpo.loop import sampled
from flowgrpo.models.decoder import make_policy
from flowgrpo.models.hf import Model, load_model
from flowgrpo.models.lora import Adapted, LoraConfig, adapter_axes, init_adapter, lora_policy
from flowgrpo.types import BadInput

OFFLOAD = {"none": DEVICE, "host": HOST, "disk": DISK}
PLANNER: dict[str, Any] = LORA | {
    "dtype": "float32",
    "remat": False,
    "optimizer": "adamw",
    "mesh": None,  # one device
    "offload": "none",  # or host, disk: where models are that a stage doesn't use
    "watch_seconds": 1800.0,  # of an iteration, until it says what it waits for
}


class Planner(NamedTuple):
    """Parts of a planner: what learns, and what the engine decodes with."""

    policy: Policy  # of the update, settled on the mesh
    served: Policy  # of the engine
    params: Any  # to begin with
    trained: Trained
    compute_dtype: Any  # None: that of the parameters
    serve: Callable[[Any], Any]  # parameters that learn -> those of the engine, on its device
    mesh: Mesh | None
    place: Callable[[Any], Any]  # what holds parameters -> the same on the mesh


def load_start(path: str | Path, settings: Mapping[str, Any]) -> Model:
    """The model that a planner starts as, in the type in which its parameters are kept."""
    return load_model(path, dtype="float32" if has_masters(settings) else settings["dtype"])


def frozen(start: Model, settings: Mapping[str, Any]) -> Model:
    """The model as it was at the start, in the type that computes: what other roles speak with."""
    if not has_masters(settings):
        return start
    policy = make_policy(start.config, dtype=settings["dtype"])
    return start._replace(policy=policy, params=cast(start.params, settings["dtype"]))


def check_planner(settings: Mapping[str, Any]) -> tuple[LoraConfig | None, Mesh | None]:
    """Raise `BadInput` where settings of a planner contradict each other; return its adapter and its mesh."""
    lora, offloads = lora_of(settings), settings["offload"] != "none"
    if lora is not None and offloads:
        raise BadInput("--offload takes away what the base of an adapter is shared with: leave one of them out")
    if lora is not None and settings["model"] is None:
        raise BadInput("--lora_rank needs --model: the small model that is made here has to be trained whole")
    if settings["mesh"] is None:
        return lora, None  # one device: an engine decodes on the first
    if offloads:
        raise BadInput("--offload moves the models of one device: leave out --mesh, or --offload")
    return lora, mesh_of(settings["mesh"])


def make_planner(start: Model, settings: Mapping[str, Any]) -> Planner:
    """The planner that starts as this model."""
    lora, mesh = check_planner(settings)
    axes = decoder_axes(start.config)
    letters: Any = axes
    policy, params, trained = make_policy(start.config, **computes_in(settings)), start.params, WHOLE
    if lora is not None:
        policy, params = _adapted(start, lora, settings)
        letters, axes = Adapted._make((axes, adapter_axes(lora))), axes | adapter_axes(lora)
        trained = ADAPTER
    compute_dtype = jnp.dtype(settings["dtype"]) if has_masters(settings) else None
    return Planner(
        policy=settled(policy, mesh, axes),
        served=policy,
        params=params,
        trained=trained,
        compute_dtype=compute_dtype,
        serve=partial(_serve, compute_dtype=compute_dtype, mesh=mesh),
        mesh=mesh,
        place=placing(mesh, letters),
    )


def computes_in(settings: Mapping[str, Any]) -> dict[str, Any]:
    """How a policy computes: in which type, and whether layers are computed again for the gradient."""
    return {"dtype": settings["dtype"], "remat": settings["remat"]}


def has_masters(settings: Mapping[str, Any]) -> bool:
    """Whether float32 masters are trained that compute in another type; a base is frozen, and needs none."""
    return settings["dtype"] != "float32" and lora_of(settings) is None


def _adapted(start: Model, lora: LoraConfig, settings: Mapping[str, Any]) -> tuple[Policy, Adapted]:
    """The model as a base, and a new adapter, which follows from the run's seed."""
    policy = lora_policy(start.config, lora, **computes_in(settings))
    return policy, Adapted(start.params, init_adapter(jax.random.key(settings["seed"]), start.config, lora))


def _serve(params: Any, *, compute_dtype: Any, mesh: Mesh | None) -> Any:
    """Make the parameters that the engine decodes with; over a mesh, gathered on the first local device."""
    served = sampled(params, compute_dtype)
    return served if mesh is None else jax.device_put(served, jax.local_devices()[0])
