"""Steps of TRL's GRPOTrainer, whose callbacks wait for the race.

TRL ends a turn at any of 32 ids of 512, which is a probability of 1/16 a word, and cuts a response of three turns at
128 words, which happens to less than one episode in twenty. A random model can't write a call, so the tokenizer reads
one in every turn. After each call TRL prefills the whole episode again.
"""

from pathlib import Path
from typing import Any

from . import protocol, workload
from .torch_generate import random_torch_model
from .workload import EPISODES, GROUP, VOCABULARY, Training

RESPONSE = {1: workload.ANSWER, 3: 128}  # the longest response, by the number of turns
TURN_ENDS = 32  # ids
ROWS = 4096  # of the dataset, which is gone through again and again
ENDLESS = 10**6  # steps, so that the learning rate stays as it is

# A message of the user ends with the word that a prompt ends with, which asks the model to go on.
TEMPLATE = """
{%- for message in messages %}
{%- if message.role == 'user' %}{{ message.content }}
{%- elif message.role == 'tool' %}{{ ' <tool> ' + message.content }}
{%- else %}{{ ' <model> ' + message.content }}
{%- for call in message.tool_calls or [] %}{{ call.function.name + ' ' + call.function.arguments | tojson }}{% endfor %}
{{- ' <end>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ ' <model>' }}{% endif %}"""


class Calculator:
    """The environment of an episode, as TRL wants it: its public methods are tools."""

    def reset(self, **_: Any) -> None:
        """Nothing is kept from turn to turn."""

    def calculate(self, expression: str) -> str:
        """The sum of all digits.

        Args:
            expression: Words, of which the digits count.
        """
        total = sum(int(word) for word in expression.split() if word.isdecimal())
        return " ".join(["=", *f"{total % 1000:03d}"])


def _open_tokenizer(turns: int) -> Any:
    """The words; with turns, every response is read as a call of the calculator."""

    def call_calculator(ids, **_: Any) -> dict:
        text = tokenizer.decode(ids, skip_special_tokens=True)
        call = {"type": "function", "function": {"name": "calculate", "arguments": {"expression": text}}}
        return {"role": "assistant", "content": text, "tool_calls": [call]}

    tokenizer: Any = workload.open_tokenizer()
    tokenizer.chat_template = TEMPLATE
    if turns > 1:
        tokenizer.response_template = "scripted"  # any value keeps TRL from looking for one
        tokenizer.parse_response = call_calculator
    return tokenizer


def _open_model(job: protocol.RacerJob) -> Any:
    """The random model from a folder, since TRL reads the reference from where the model was read."""
    import transformers

    random_torch_model(job.shape, job.cores).save_pretrained(folder := Path(job.folder) / "model")
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32")


def _rows(turns: int) -> list[dict]:
    """The dataset, whose prompts have exactly `workload.PROMPT` tokens."""
    prompts = workload.random_ids(ROWS)
    if turns == 1:
        return [{"prompt": workload.spell(ids)} for ids in prompts]
    # The template adds the last word.
    return [{"prompt": [{"role": "user", "content": workload.spell(ids[:-1])}]} for ids in prompts]


def _settings(case: Training) -> dict[str, Any]:
    """Choose what GRPOConfig is given; the rest are TRL's own defaults."""
    found: dict[str, Any] = {"max_completion_length": RESPONSE[case.turns], "max_steps": ENDLESS, "beta": case.beta}
    found |= {"learning_rate": workload.RATE, "max_grad_norm": workload.CLIP}
    found |= {"per_device_train_batch_size": EPISODES, "num_generations": GROUP}
    found |= {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "disable_tqdm": True}
    found |= {"report_to": [], "save_strategy": "no", "logging_strategy": "no"}
    return found | ({"max_tool_calling_iterations": case.turns - 1} if case.turns > 1 else {})


def _make_callback(lane: protocol.Lane, lengths: list[int]) -> Any:
    """A callback that waits before each step, and answers after it with what the reward has noted."""
    import transformers

    class Turns(transformers.TrainerCallback):
        def on_step_begin(self, *_, **__):
            lengths.clear()
            lane.wait()

        def on_step_end(self, *_, **__):
            lane.done(sum(lengths))

    return Turns()


def main() -> None:
    """Train until the race is over."""
    lane, job = protocol.open_lane()
    import datasets
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    case, model = workload.training(job.case), _open_model(job)
    lengths: list[int] = []

    def pay(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
        lengths.extend(map(len, completion_ids))
        return [workload.fraction_of_digits(ids) for ids in completion_ids]

    if case.turns > 1:
        model.generation_config.eos_token_id = [workload.END, *range(VOCABULARY - TURN_ENDS + 1, VOCABULARY)]
    GRPOTrainer(
        model=model,
        args=GRPOConfig(output_dir=job.folder, **_settings(case)),
        train_dataset=datasets.Dataset.from_list(_rows(case.turns)),
        processing_class=_open_tokenizer(case.turns),
        reward_funcs=[pay],
        callbacks=[_make_callback(lane, lengths)],
        environment_factory=Calculator if case.turns > 1 else None,
    ).train()


if __name__ == "__main__":
    main()
