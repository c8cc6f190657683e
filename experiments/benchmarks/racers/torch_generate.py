"""transformers' `generate` in PyTorch; and the random PyTorch model that other racers start from."""

from collections.abc import Mapping
from typing import Any

from . import protocol, workload


def random_torch_model(shape: Mapping[str, Any], cores: int) -> Any:
    """Make a float32 model of transformers from its config.json, and let PyTorch use so many threads."""
    import torch
    import transformers

    torch.set_num_threads(cores)
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**shape, eos_token_id=workload.END, pad_token_id=workload.PAD)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def main() -> None:
    """Generate a block of rows in every step."""
    lane, job = protocol.open_lane()
    import torch

    rows, tokens = workload.decoding(job.case)
    model = random_torch_model(job.shape, job.cores).eval()
    prompts = torch.tensor(workload.random_ids(rows))
    sampled = {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0, "pad_token_id": workload.PAD}
    lengths = {"min_new_tokens": tokens, "max_new_tokens": tokens, "eos_token_id": None}
    while True:
        lane.wait()
        with torch.inference_mode():
            found = model.generate(prompts, attention_mask=torch.ones_like(prompts), **sampled, **lengths)
        assert found.shape == (rows, workload.PROMPT + tokens)
        lane.done(rows * tokens)


if __name__ == "__main__":
    main()
