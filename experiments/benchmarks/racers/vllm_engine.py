"""vLLM's engine on CPUs, which decodes blocks of rows.

The engine runs in this process and not in one of its own, which is faster here and sleeps when nothing is asked for.
vLLM binds its threads to cores by itself. What it compiles is kept in the race's folder, so that every race compiles.
"""

# pyright: reportMissingImports=false

import os

from . import protocol, workload
from .torch_generate import random_torch_model

KEPT = 1  # GiB of keys and values


def set_environment(folder: str) -> None:
    """Set what vLLM reads when it is imported."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(KEPT)
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "auto"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ["VLLM_CACHE_ROOT"] = os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/compiled"


def main() -> None:
    """Generate a block of rows in every step."""
    lane, job = protocol.open_lane()
    set_environment(job.folder)
    rows, tokens = workload.decoding(job.case)
    model = f"{job.folder}/model"
    random_torch_model(job.shape, job.cores).save_pretrained(model)

    import vllm

    length = workload.PROMPT + tokens
    sizes = {"max_model_len": length, "max_num_seqs": rows, "max_num_batched_tokens": max(2048, rows * workload.PROMPT)}
    engine = vllm.LLM(
        model=model, dtype="float32", skip_tokenizer_init=True, enable_prefix_caching=False, seed=0, **sizes
    )
    drawn = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
    lengths = {"min_tokens": tokens, "max_tokens": tokens, "ignore_eos": True}
    settings = vllm.SamplingParams(detokenize=False, **drawn, **lengths)
    prompts = [{"prompt_token_ids": ids} for ids in workload.random_ids(rows)]
    while True:
        lane.wait()
        found = engine.generate(prompts, settings, use_tqdm=False)
        assert all(len(request.outputs[0].token_ids) == tokens for request in found)
        lane.done(rows * tokens)


if __name__ == "__main__":
    main()
