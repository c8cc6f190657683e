"""Low-rank adapters: several policies share one set of base weights (Hu et al., 2021, arXiv:2106.09685).

    x W + (alpha / rank) x A B        A random, B zero at the start; alpha / sqrt(rank) with rslora (arXiv:2312.03732)

The parameters of an adapted policy are the pair `LoraParams(base, adapter)`. The base is a decoder's flat dict, and
its arrays are shared: `make_policy(config)` over `params.base` is the reference and every frozen role. No gradient
reaches it; training differentiates with respect to `params.adapter`, which may be float32 over a bfloat16 base.

The axis z is the rank. An adapter is a flat dict too: `q_a` [n d z], `q_b` [n z h e], and so on. `peft` reads and
writes it. The base may be quantised (`quantised.quantise_layers`), to a half or a quarter of its size in bfloat16.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from flowgrpo.contracts import Policy
from flowgrpo.models.attention import Attend, attend
from flowgrpo.models.config import DecoderConfig
from flowgrpo.models.decoder import hidden_tree, is_unstacked, make_policy
from flowgrpo.models.families import TENSORS, check_tensors
from flowgrpo.models.quantised import dequantise_layers
from flowgrpo.types import BadInput, Params, check_range

PROJECTIONS = ("q", "k", "v", "o", "gate", "up", "down")


@dataclass(frozen=True)
class LoraConfig:
    """Settings of an adapter.

    Args:
        rank: Inner dimension of the low-rank product.
        alpha: Strength; the product is scaled by `alpha / rank`.
        targets: The projections that are adapted, out of q, k, v, o, gate, up, down.
        rslora: Scale by `alpha / sqrt(rank)` instead, for large ranks.
    """

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = PROJECTIONS
    rslora: bool = False

    def __post_init__(self):
        check_range("an adapter", "rank", self.rank, 1, whole=True)
        check_range("an adapter", "alpha", self.alpha, 0.0, exclusive=True)
        if not self.targets or set(self.targets) - set(PROJECTIONS) or len(set(self.targets)) < len(self.targets):
            raise BadInput(f"an adapter's targets are {self.targets!r}; give some of {PROJECTIONS}, each once")

    @property
    def scale(self) -> float:
        """Factor that the low-rank product is multiplied with."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


class LoraParams(NamedTuple):
    """The parameters of an adapted policy: the frozen base, which is shared, and the trained adapter."""

    base: Params
    adapter: Params


# The policy -------------------------------------------------------------------------------------------


def lora_policy(
    config: DecoderConfig,
    lora: LoraConfig,
    *,
    dtype=jnp.float32,
    remat: bool = False,
    unstack_on_cpu: bool = False,
    attend: Attend = attend,
) -> Policy:
    """The decoder with an adapter, as pure functions of `LoraParams`; the other arguments are those of `make_policy`.

    `dtype` is that of the base and of the cache; the adapter is float32.
    """
    policy = make_policy(config, dtype=dtype, remat=remat, unstack_on_cpu=unstack_on_cpu, attend=attend)
    freeze = jax.lax.stop_gradient

    def init(key: Array) -> LoraParams:
        base_key, adapter_key = jax.random.split(key)
        return LoraParams(policy.init(base_key), init_adapter(adapter_key, config, lora))

    def hidden(params: LoraParams, tokens, positions=None, segments=None, cache=None, **settings):
        # On several devices its arrays are shards, and unstacked they are those of single layers.
        if settings.get("gather") is None and not is_unstacked(params.base):
            check_adapter(params.adapter, config, lora)
        # B is scaled, so that only small arrays are multiplied by the scale.
        scaled = {
            name: jax.tree.map(lambda x: x * lora.scale, x) if name.endswith("_b") else x
            for name, x in params.adapter.items()
        }
        return policy.hidden(freeze(params.base), tokens, positions, segments, cache, adapter=scaled, **settings)

    def unembed(params: LoraParams, states: Array) -> Array:
        return policy.unembed(freeze(params.base), states)

    def unstack(params: LoraParams) -> LoraParams:
        assert policy.unstack_layers is not None
        base = policy.unstack_layers(params.base)
        adapter: Any = {name: tuple(x) for name, x in params.adapter.items()} if is_unstacked(base) else params.adapter
        return LoraParams(base, adapter)

    return Policy(
        init,
        hidden,
        unembed,
        policy.make_cache,
        unstack_layers=unstack if unstack_on_cpu else None,
        hidden_tree=partial(hidden_tree, hidden),
    )


def init_adapter(key: Array, config: DecoderConfig, lora: LoraConfig, *, dtype=jnp.float32) -> Params:
    """A new adapter, whose product is 0: B is zero, and A uniform within 1 / sqrt(inputs), as in PEFT."""
    shapes, adapter = adapter_shapes(config, lora), {}
    for name in lora.targets:
        # A target's initial values do not depend on which other targets there are.
        target_key = jax.random.fold_in(key, PROJECTIONS.index(name))
        a_shape, b_shape = shapes[f"{name}_a"], shapes[f"{name}_b"]
        bound = math.prod(a_shape[1:-1]) ** -0.5
        adapter[f"{name}_a"] = jax.random.uniform(target_key, a_shape, jnp.float32, -bound, bound).astype(dtype)
        adapter[f"{name}_b"] = jnp.zeros(b_shape, dtype)
    return adapter


def adapter_axes(lora: LoraConfig) -> dict[str, str]:
    """Axis letters of every array of an adapter: A maps a projection's inputs to z, B maps z to its outputs."""
    axes = {}
    for name in lora.targets:
        outputs, inputs = TENSORS[name].axes.split()
        axes |= {f"{name}_a": f"n{inputs}z", f"{name}_b": f"nz{outputs}"}
    return axes


def adapter_shapes(config: DecoderConfig, lora: LoraConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every array of an adapter."""
    sizes = {"n": config.num_layers, "z": lora.rank}
    return {
        name: tuple(sizes.get(axis) or getattr(config, axis) for axis in axes)
        for name, axes in adapter_axes(lora).items()
    }


def merge_adapter(params: LoraParams, config: DecoderConfig, lora: LoraConfig) -> Params:
    """`W + scale A B` in the base's dtype: parameters of the plain decoder, to serve or to save without an adapter.

    A quantised base is dequantised, so the result is the policy that was trained, not that of the original weights.
    """
    check_adapter(params.adapter, config, lora)
    base = dequantise_layers(params.base, dtype=params.base["embed"].dtype)
    axes, merged = adapter_axes(lora), dict(base)
    for name in lora.targets:
        a_axes, b_axes, w = axes[f"{name}_a"], axes[f"{name}_b"], base[name]
        a, b = (params.adapter[f"{name}_{side}"].astype(jnp.float32) for side in "ab")
        change = jnp.einsum(f"{a_axes},{b_axes}->{a_axes[:-1]}{b_axes[2:]}", a, b * lora.scale)
        merged[name] = (w.astype(jnp.float32) + change).astype(w.dtype)
    return merged


def check_adapter(adapter: Mapping[str, Any], config: DecoderConfig, lora: LoraConfig) -> None:
    """Raise `BadInput` unless the arrays are those of an adapter with these settings."""
    check_tensors("the adapter does not fit rank, targets and model", adapter, adapter_shapes(config, lora))
