"""Make our update in PyTorch: transformers' model of the same shape, a clipped surrogate, a clip of the norm, AdamW.

As TRL has it: logits, log-probabilities of the tokens that were sampled, token by token, and the mean entropy without a
gradient; rows in micro-batches whose gradients add up, as here.
"""

import os
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

from flowgrpo.types import BadInput, Batch

CLIP = 0.2


def check_installed() -> None:
    """`BadInput` where there is no PyTorch."""
    if find_spec("torch") is None:
        raise BadInput("--parts=torch needs PyTorch: install the extra [oracle], or leave the part out")


def make_step(source: Mapping[str, Any], batch: Batch, *, micro_rows: int, rate: float) -> Callable[[], float]:
    """A function that makes one update of the batch and gives its loss."""
    import torch
    import transformers

    torch.set_num_threads(os.cpu_count() or 1)
    config = transformers.AutoConfig.for_model(**source)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    names = ("tokens", "logp_old", "advantage", "weight")
    rows = [torch.from_numpy(getattr(batch, name)) for name in names]

    def step() -> float:
        optimizer.zero_grad()
        total = 0.0
        for part in zip(*(x.split(micro_rows) for x in rows), strict=True):
            loss = surrogate(model, *part)
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return total

    return step


def surrogate(model: Any, tokens: Any, logp_old: Any, advantage: Any, weight: Any) -> Any:
    """The clipped surrogate of a few rows; the entropy is computed for its metric alone."""
    import torch

    logits = model(input_ids=tokens.long()).logits[:, :-1]
    logps = torch.log_softmax(logits, dim=-1)
    with torch.no_grad():
        (logps.exp() * logps).sum(-1).mean()
    logp = logps.gather(-1, tokens[:, 1:].long().unsqueeze(-1)).squeeze(-1)
    ratio, gain = torch.exp(logp - logp_old[:, 1:]), advantage[:, 1:]
    least = torch.minimum(ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain)
    return -(least * weight[:, 1:]).sum()
