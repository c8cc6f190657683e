"""Attention by accelerator kernels, in place of `attention.attend`.

    plain    block by block, on any platform                `attention.attend`
    splash   JAX's splash attention, for TPU                `splash_attention.splash_rows`
    flash    this project's flash attention, for GPU        `flash_attention.flash_rows`
             over a cache: the same for prompts, `decode_attention.flash_decode` for one token a row

    policy = make_policy(config, dtype=jnp.bfloat16, attend=best_kernel(jax.default_backend()))

A kernel is used for bfloat16 (on a GPU, for float16 too). For float32 the plain formula is used, which sums in the same
order over a cache and over whole rows, so that behaviour and current probabilities stay equal (F7).

The choice is made by name when a program is traced, because a choice inside the program
(`jax.lax.platform_dependent`) keeps the residuals of each branch for its backward pass. A program that is compiled
ahead for another platform is traced with the kernel of that platform.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import Array

from flowgrpo.models.attention import Attend, AttentionKernels, LayerCache, MaskSpec, attend
from flowgrpo.models.config import DecoderConfig
from flowgrpo.types import BadInput


def splash(q: Array, k: Array, v: Array, mask: MaskSpec, config: DecoderConfig) -> Array:
    """Attention over whole rows on a TPU; float32 and trees by the plain formula."""
    if q.dtype != jnp.bfloat16 or q.shape[2] != k.shape[2] or mask.k_end is not None:
        return attend(q, k, v, mask, config)
    from flowgrpo.models.splash_attention import splash_rows  # Pallas takes a second to import

    return splash_rows(q, k, v, mask, config)


def _flash_rows(q: Array, k: Array, v: Array, mask: MaskSpec, config: DecoderConfig) -> Array:
    """Attention over whole rows on a GPU; float32 by the plain formula."""
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return attend(q, k, v, mask, config)
    from flowgrpo.models.flash_attention import flash_rows  # Pallas takes a second to import

    return flash_rows(q, k, v, mask, config)


def _flash_supports(q: Array, k: Array) -> bool:
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return False
    from flowgrpo.models.decode_attention import supports  # Pallas takes a second to import

    return q.shape[2] > 1 or supports(q, k)


def _flash_cached(q: Array, cache: LayerCache, mask: MaskSpec, config: DecoderConfig) -> Array:
    if q.shape[2] > 1:  # prompts
        return _flash_rows(q, cache.k[cache.index], cache.v[cache.index], mask, config)
    from flowgrpo.models.decode_attention import flash_decode  # Pallas takes a second to import

    return flash_decode(q, cache, mask, config)


flash = AttentionKernels(_flash_rows, _flash_cached, _flash_supports)
KERNELS: Mapping[str, Attend] = {"plain": attend, "splash": splash, "flash": flash}
AUTO = "auto"
ATTENTION = (AUTO, *KERNELS)  # values of the setting `attention`
BEST_ON_PLATFORM = {"tpu": "splash", "gpu": "flash", "cuda": "flash", "rocm": "flash"}


def best_kernel(platform: str) -> Attend:
    """The fastest attention on a platform, such as `jax.default_backend()`."""
    return KERNELS[best_kernel_name(platform)]


def best_kernel_name(platform: str) -> str:
    """Name of the fastest attention on a platform."""
    return BEST_ON_PLATFORM.get(platform, "plain")


def get_kernel(name: str) -> Attend:
    """Attention by its name; `auto` is the fastest on the current platform."""
    if name not in ATTENTION:
        raise BadInput(f"attention is {name!r}; give one of {', '.join(ATTENTION)}")
    return best_kernel(jax.default_backend()) if name == AUTO else KERNELS[name]
