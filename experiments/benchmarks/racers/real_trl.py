"""A whole step of TRL's GRPOTrainer on real weights, with its defaults but for bfloat16 and checkpoints of activations.

Prompts are text, which the model's own tokenizer reads as about as many tokens as ours have.
"""

# pyright: reportMissingImports=false

import time
from typing import Any

from . import protocol
from .real_workload import CLIP, RATE, Sizes

ROWS_AT_ONCE = 8  # sequences of a micro-batch
SENTENCE = "The planner writes one call and waits for what the tool says. "
QUESTION = "Question {i}: a shop has {a} boxes of {b} pens each and sells {i} of them on every day. How many are left? "


def _prompts(tokenizer: Any, sizes: Sizes, number: int) -> list[str]:
    """A beginning that all prompts share, and a question of each."""

    def cut(text: str, length: int) -> str:
        return tokenizer.decode(tokenizer(text * (1 + length // 8))["input_ids"][:length])

    beginning = cut(SENTENCE, sizes.shared)
    return [beginning + cut(QUESTION.format(i=i, a=i + 3, b=2 * i + 7), sizes.own) for i in range(number)]


def main() -> None:
    """Train until the race is over."""
    lane, job = protocol.open_lane()
    import datasets
    import torch
    import transformers
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    torch.set_num_threads(job.cores)
    torch.manual_seed(0)
    sizes, seconds = Sizes(**job.sizes), {"rollout": 0.0}
    group = sizes.queries * sizes.samples
    tokenizer = transformers.AutoTokenizer.from_pretrained(job.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = transformers.AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32)

    class Turns(transformers.TrainerCallback):
        """Wait before each step, answer after it."""

        def on_step_begin(self, *_, **__):
            seconds["rollout"] = 0.0
            lane.wait()

        def on_step_end(self, *_, **__):
            lane.done(sizes.laid_out, **seconds)

    class TimedTrainer(GRPOTrainer):
        """The trainer, which notes the seconds of its rollout; what wraps `_generate` changes nothing of it."""

        def _generate(self, *arguments, **settings):
            start = time.perf_counter()
            try:
                return super()._generate(*arguments, **settings)
            finally:
                seconds["rollout"] += time.perf_counter() - start

    def pay(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
        assert all(len(ids) == sizes.answer for ids in completion_ids)
        return [float(sum(ids) % 2) for ids in completion_ids]

    micro = min(ROWS_AT_ONCE, group)
    TimedTrainer(
        model=model,
        args=GRPOConfig(
            output_dir=job.folder,
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=group // micro,
            num_generations=sizes.samples,
            generation_batch_size=group,
            max_completion_length=sizes.answer,
            generation_kwargs={"min_new_tokens": sizes.answer},
            temperature=1.0,
            beta=0.0,
            learning_rate=RATE,
            max_grad_norm=CLIP,
            max_steps=10**6,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            disable_tqdm=True,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
        ),
        train_dataset=datasets.Dataset.from_dict({"prompt": _prompts(tokenizer, sizes, 8 * sizes.queries)}),
        processing_class=tokenizer,
        reward_funcs=[pay],
        callbacks=[Turns()],
    ).train()


if __name__ == "__main__":
    main()
