"""vLLM's engine for CPUs on real weights, with what it does by default: its prefix cache is on."""

# pyright: reportMissingImports=false

import json
from itertools import count
from pathlib import Path

from . import protocol
from .real_torch import step_seconds, timed
from .real_workload import Sizes, random_ids
from .vllm_engine import set_environment


def main() -> None:
    """Decode until the race is over."""
    lane, job = protocol.open_lane()
    set_environment(job.folder)
    sizes = Sizes(**job.sizes)
    vocabulary = json.loads((Path(job.model) / "config.json").read_text())["vocab_size"]

    import vllm

    room = {"max_model_len": sizes.prompt + sizes.long, "max_num_seqs": sizes.rows, "max_num_batched_tokens": 2048}
    engine = vllm.LLM(model=job.model, dtype="float32", skip_tokenizer_init=True, seed=0, **room)

    def generate(prompts: list[dict], length: int) -> None:
        drawn = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "ignore_eos": True, "detokenize": False}
        engine.generate(prompts, vllm.SamplingParams(min_tokens=length, max_tokens=length, **drawn), use_tqdm=False)

    for seed in count():
        lane.wait()
        prompts = [{"prompt_token_ids": ids} for ids in random_ids(vocabulary, sizes.rows, sizes.prompt, seed)]
        prefill = timed(lambda prompts=prompts: generate(prompts, 1))
        rows = step_seconds(lambda length, prompts=prompts: generate(prompts, length), sizes)
        stream = step_seconds(lambda length, prompts=prompts: generate(prompts[:1], length), sizes)
        lane.done(sizes.rows * sizes.prompt, prefill=prefill, rows=rows, stream=stream)


if __name__ == "__main__":
    main()
