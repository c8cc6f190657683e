"""Attention by the kernels of an accelerator, in the place of `attention.attend`.

    plain    block by block, on anything                    `attention.attend`
    splash   JAX's splash attention, for TPU                `splash_attention.splash_rows`
    flash    this project's flash attention, for GPU        `flash_attention.flash_rows`
             and over a cache: prompts by the same, one token a row by `decode_attention.attend_slots`

    policy = make_policy(config, dtype=jnp.bfloat16, attend=best(jax.default_backend()))

A kernel computes what is in bfloat16 (on a GPU, in float16 too). Of float32 it keeps to the plain formula, whose sums
are those of the decoder, so that behaviour and current probabilities stay equal (F7).

The choice is made when a program is traced, by name, because a choice inside the program (`jax.lax.platform_dependent`)
keeps what each of the branches wants for its backward pass. A program that is compiled ahead for another platform is
traced with the kernel of that platform.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import Array

from flowgrpo.models.attention import Attend, Kernels, Sight, Slots, attend
from flowgrpo.models.config import DecoderConfig
from flowgrpo.types import BadInput


def splash(q: Array, k: Array, v: Array, sight: Sight, config: DecoderConfig) -> Array:
    """Attend to whole rows on a TPU; float32 and trees by the plain formula."""
    if q.dtype != jnp.bfloat16 or q.shape[2] != k.shape[2] or sight.k_end is not None:
        return attend(q, k, v, sight, config)
    from flowgrpo.models.splash_attention import splash_rows  # Pallas takes a second to import

    return splash_rows(q, k, v, sight, config)


def _flash_rows(q: Array, k: Array, v: Array, sight: Sight, config: DecoderConfig) -> Array:
    """Attend on a GPU; float32 and trees by the plain formula."""
    if q.dtype not in (jnp.bfloat16, jnp.float16) or sight.k_end is not None:
        return attend(q, k, v, sight, config)
    from flowgrpo.models.flash_attention import flash_rows  # Pallas takes a second to import

    return flash_rows(q, k, v, sight, config)


def _flash_takes(q: Array, k: Array) -> bool:
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return False
    from flowgrpo.models.decode_attention import takes  # Pallas takes a second to import

    return q.shape[2] > 1 or takes(q, k)


def _flash_slots(q: Array, slots: Slots, sight: Sight, config: DecoderConfig) -> Array:
    if q.shape[2] > 1:  # prompts, however wide they are padded
        return _flash_rows(q, slots.k[slots.index], slots.v[slots.index], sight, config)
    from flowgrpo.models.decode_attention import attend_slots  # Pallas takes a second to import

    return attend_slots(q, slots, sight, config)


flash = Kernels(_flash_rows, _flash_slots, _flash_takes)
KERNELS: Mapping[str, Attend] = {"plain": attend, "splash": splash, "flash": flash}
AUTO = "auto"
ATTENTION = (AUTO, *KERNELS)  # names that a setting may have
_OF_PLATFORM = {"tpu": "splash", "gpu": "flash", "cuda": "flash", "rocm": "flash"}


def best(platform: str) -> Attend:
    """The way for programs of a platform, such as `jax.default_backend()`."""
    return KERNELS[best_name(platform)]


def best_name(platform: str) -> str:
    """Its name."""
    return _OF_PLATFORM.get(platform, "plain")


def attention_named(name: str) -> Attend:
    """A way by its name; `auto` is the best of the platform that programs run on."""
    if name not in ATTENTION:
        raise BadInput(f"attention is {name!r}; give one of {', '.join(ATTENTION)}")
    return best(jax.default_backend()) if name == AUTO else KERNELS[name]
