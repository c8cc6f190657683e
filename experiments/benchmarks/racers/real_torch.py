"""PyTorch and transformers on real weights: prefill, `generate`, and an update in plain autograd."""

import time
from collections.abc import Callable
from itertools import count
from typing import Any

from . import protocol
from .real_workload import CLIP, RATE, SHORT, Sizes, random_ids


def _decode(lane: protocol.Lane, sizes: Sizes, model: Any) -> None:
    """Prefill fresh prompts, then generate from them and from one of them, in two lengths."""
    import torch

    vocabulary = model.config.vocab_size
    drawn = {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0, "pad_token_id": 0, "eos_token_id": None}

    def generate(ids: Any, length: int) -> None:
        lengths = {"min_new_tokens": length, "max_new_tokens": length}
        answers = model.generate(ids, attention_mask=torch.ones_like(ids), **drawn, **lengths)
        assert answers.shape[1] == ids.shape[1] + length

    for seed in count():
        lane.wait()
        with torch.inference_mode():
            ids = torch.tensor(random_ids(vocabulary, sizes.rows, sizes.prompt, seed))
            prefill = timed(lambda ids=ids: model(input_ids=ids, use_cache=True, logits_to_keep=1))
            # The prefill stands in both lengths and drops out of the difference, so short prompts will do.
            short = ids[:, : min(sizes.prompt, 32)]
            rows = step_seconds(lambda length, ids=short: generate(ids, length), sizes)
            stream = step_seconds(lambda length, ids=short[:1]: generate(ids, length), sizes)
        lane.done(sizes.rows * sizes.prompt, prefill=prefill, rows=rows, stream=stream)


def _update(lane: protocol.Lane, sizes: Sizes, model: Any) -> None:
    """Accumulate the gradient row by row, and take a step of AdamW."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), RATE)
    ids = torch.tensor(random_ids(model.config.vocab_size, sizes.update_rows, sizes.update_length, 0))
    while True:
        lane.wait()
        for row in ids[:, None]:
            logp = torch.log_softmax(model(input_ids=row).logits[:, :-1].float(), -1)
            (-logp.gather(-1, row[:, 1:, None]).mean() / len(ids)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        lane.done(ids.numel())


def timed(work: Callable[[], Any]) -> float:
    """Seconds of a call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def step_seconds(generate: Callable[[int], Any], sizes: Sizes) -> float:
    """Seconds of one decode step: those of longer answers less those of shorter ones, by the steps between them."""
    short, long = (timed(lambda length=length: generate(length)) for length in (SHORT, sizes.long))
    return (long - short) / sizes.steps


def main() -> None:
    """Open the model and do the work that is asked for."""
    lane, job = protocol.open_lane()
    import torch
    import transformers

    torch.set_num_threads(job.cores)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32)
    model.eval() if job.case == "decode" else model.train()
    {"decode": _decode, "update": _update}[job.case](lane, Sizes(**job.sizes), model)


if __name__ == "__main__":
    main()
