"""GRPO on a workload of no meaning, here and by TRL's GRPOTrainer in the same process; `iteration` calls it.

    prompts of 32 random words -> 8 answers each -> share of digits among the words -> one step of AdamW

The small model of `ceilings`, 64 sequences a step. One turn: at most 64 words, which one id in 512 ends early. Three
turns: a calculator answers the first two, and each word ends its turn with probability 1/16; an episode then holds 64
words in the mean, prompt excepted. TRL has 32 of 512 ids for that. An environment here has one END, so the policy adds
log 34 to its logit, which is the same probability of 1/16. TRL cuts a response at 128 words, here a turn is cut at 96;
both happen to less than one episode in twenty. A random model can't write a call, so TRL's tokenizer reads one in
every turn.

Steps alternate, a callback of TRL's trainer makes ours between two of its own. Both have all cores, float32, beta 0,
the clipped group loss, a gradient norm of at most 1 and no gradient checkpoints.
"""

import contextlib
import io
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array
from jaxtyping import Bool, Int

import flowgrpo as fg
from experiments.benchmarks import ceilings
from experiments.benchmarks.measuring import torch_model
from flowgrpo import loop
from flowgrpo.contracts import Env, Observation, Policy, Sizes, Step
from flowgrpo.envs.env import END, PAD, SPECIAL, absorbing, pad_tokens
from flowgrpo.learner.state import make_optimizer
from flowgrpo.models.decoder import make_policy
from flowgrpo.parallel.row_sharding import data_mesh
from flowgrpo.report.tables import significant, timed

# Words by number: special ones, the marks of a dialogue, ten digits, and others up to the vocabulary's end.
VOCABULARY = 512
TOOL, MODEL, EQUALS, DIGIT, OTHER = 2, 3, 4, 5, 15
WORDS = (*SPECIAL, "<tool>", "<model>", "=", *"0123456789", *(f"w{number}" for number in range(OTHER, VOCABULARY)))

GROUP, PROMPTS, PROMPT = 8, 8, 32
ACTION = {1: 64, 3: 96}  # the longest turn here, by the number of turns
RESPONSE = {1: 64, 3: 128}  # the longest response in TRL
TURN_ENDS = 32  # of TRL's ids
ENDS = 34  # (512 - 2) / 15: one word with this weight among 510 others has a probability of 1/16
RATE = 1e-4
WARM_UP = 2  # steps that aren't counted


# Here -------------------------------------------------------------------------------------------------


class DialogueState(struct.PyTreeNode):
    """How far a dialogue has come."""

    turn: Int[Array, ""]
    done: Bool[Array, ""]
    correct: Bool[Array, ""]


def _dialogue(turns: int) -> Env:
    """Turns that are paid by their share of digits, with a calculator's answer between two of them."""

    def say_zero(*_) -> tuple[Array, Array]:
        return pad_tokens([DIGIT, END], ACTION[turns]), jnp.int32(2)

    return Env(
        name="dialogue",
        words=WORDS,
        tools=("calculator",),
        sizes=Sizes(prompt=PROMPT, observation=6, action=ACTION[turns], turns=turns),
        make_task=_make_task,
        reset=_reset,
        step=absorbing(partial(_calculate, turns=turns)),
        anchor=lambda state: state.turn,
        oracle=say_zero,
        demonstrate=say_zero,
    )


def _make_task(key: Array, split: str) -> Array:
    """Any words but the special ones; all splits are alike."""
    del split
    words = jax.random.randint(key, (PROMPT,), OTHER, VOCABULARY, jnp.int32)
    return words.at[-1].set(MODEL)


def _reset(key: Array, task: Array) -> tuple[DialogueState, Observation]:
    """The prompt."""
    del key
    no = jnp.zeros((), bool)
    return DialogueState(jnp.int32(0), no, no), Observation(task, jnp.int32(PROMPT))


def _calculate(state: DialogueState, tokens: Array, length: Array, *, turns: int) -> tuple[DialogueState, Step]:
    """Pay the share of digits; say their sum, unless this was the last turn."""
    digit = (tokens >= DIGIT) & (tokens < OTHER) & (jnp.arange(len(tokens)) < length)
    total = jnp.where(digit, tokens - DIGIT, 0).sum(dtype=jnp.int32)
    share = digit.sum() / jnp.maximum(length, 1)
    done = state.turn + 1 >= turns
    figures = [DIGIT + total // power % 10 for power in (100, 10, 1)]
    said = pad_tokens([TOOL, EQUALS, *figures, MODEL], 6)
    observation = Observation(jnp.where(done, PAD, said), jnp.where(done, 0, 6))
    no = jnp.zeros((), bool)
    now = Step(observation, share.astype(jnp.float32), done, no, jnp.where(done, -1, 0), no)
    return state.replace(turn=state.turn + 1, done=done), now


def _ends_often(policy: Policy) -> Policy:
    """The policy with a larger logit of END."""
    return policy._replace(
        unembed=lambda params, hidden: policy.unembed(params, hidden).at[..., END].add(math.log(ENDS))
    )


def _our_steps(turns: int) -> Iterator[tuple[float, int]]:
    """Of each step of the loop: its seconds, and the words of its responses, those of the calculator included."""
    model = ceilings.open_model("small")
    policy = make_policy(model.config, unroll=True)
    policy = policy if turns == 1 else _ends_often(policy)
    env, algorithm, optimizer = _dialogue(turns), fg.grpo(beta=0.0), make_optimizer(learning_rate=RATE)
    # The longest trajectory of three turns fills a row, the others share rows: few are left, and large micro-batches
    # would be half empty.
    sizes = loop.Settings(queries=PROMPTS, samples=GROUP, micro_rows=16 if turns == 1 else 4)
    iteration = loop.make_iteration(env, policy._replace(mesh=data_mesh()), algorithm, optimizer, sizes)
    step = loop.three_programs(iteration)
    run = loop.start_run(model.params, optimizer, jax.random.key(0))
    while True:
        took, (run, metrics) = timed(partial(step, run))
        yield took, int(metrics["tokens"]) - GROUP * PROMPTS * PROMPT


# TRL --------------------------------------------------------------------------------------------------

# A message of the user ends with the word that a prompt ends with here, which asks the model to go on.
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
    """The environment of a dialogue, as TRL wants it: its public methods are tools."""

    def reset(self, **_: Any) -> None:
        """Nothing is kept from turn to turn."""

    def calculate(self, expression: str) -> str:
        """The sum of all digits.

        Args:
            expression: Words, of which the digits count.
        """
        total = sum(int(word) for word in expression.split() if word.isdecimal())
        return " ".join(["=", *f"{total % 1000:03d}"])


def _open_tokenizer(turns: int):
    """Words between spaces; with turns, every response is read as a call of the calculator."""
    import tokenizers
    import transformers

    def call_calculator(ids, **_: Any) -> dict:
        text = tokenizer.decode(ids, skip_special_tokens=True)
        call = {"type": "function", "function": {"name": "calculate", "arguments": {"expression": text}}}
        return {"role": "assistant", "content": text, "tool_calls": [call]}

    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token=WORDS[-1])
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    special = {"pad_token": WORDS[PAD], "eos_token": WORDS[END]}
    tokenizer: Any = transformers.PreTrainedTokenizerFast(tokenizer_object=words, padding_side="left", **special)
    tokenizer.chat_template = TEMPLATE
    if turns > 1:
        tokenizer.response_template = "scripted"  # any value keeps TRL from looking for one
        tokenizer.parse_response = call_calculator
    return tokenizer


def _prompts(turns: int, number: int) -> list[dict]:
    """Rows of a dataset whose prompts have exactly as many tokens as ours."""
    id_np = np.random.default_rng(0).integers(OTHER, VOCABULARY, (number, PROMPT - 1))
    texts = [" ".join(WORDS[word] for word in id_p) for id_p in id_np]
    if turns == 1:
        return [{"prompt": f"{text} <model>"} for text in texts]
    return [{"prompt": [{"role": "user", "content": text}]} for text in texts]


def _open_trainer(turns: int, steps: int, folder: str, lengths: list[int], callback: Any):
    """A GRPOTrainer that notes the words of each step's responses in `lengths`."""
    import datasets
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    model = torch_model(ceilings.SHAPES["small"] | {"eos_token_id": END, "pad_token_id": PAD})

    def share_of_digits(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
        """The reward, as TRL calls it."""
        lengths.append(sum(map(len, completion_ids)))
        return [sum(DIGIT <= word < OTHER for word in ids) / max(len(ids), 1) for ids in completion_ids]

    settings: dict[str, Any] = {"max_completion_length": RESPONSE[turns], "max_steps": steps, "learning_rate": RATE}
    extra: dict[str, Any] = {}
    if turns > 1:
        model.generation_config.eos_token_id = [END, *range(VOCABULARY - TURN_ENDS + 1, VOCABULARY)]
        settings["max_tool_calling_iterations"] = turns - 1
        extra["environment_factory"] = Calculator
    settings |= {"per_device_train_batch_size": GROUP * PROMPTS, "num_generations": GROUP, "beta": 0.0}
    settings |= {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "disable_tqdm": True}
    settings |= {"report_to": [], "save_strategy": "no", "logging_strategy": "no"}
    return GRPOTrainer(
        model=model,
        args=GRPOConfig(output_dir=folder, **settings),
        train_dataset=datasets.Dataset.from_list(_prompts(turns, GROUP * PROMPTS * (1 + steps))),
        processing_class=_open_tokenizer(turns),
        reward_funcs=[share_of_digits],
        callbacks=[callback],
        **extra,
    )


def _make_clock(took: list[float], between: Callable[[], None]):
    """A callback that times TRL's steps, and calls a function after each."""
    import transformers

    class Clock(transformers.TrainerCallback):
        def on_step_begin(self, *_, **__):
            self.start = time.perf_counter()

        def on_step_end(self, *_, **__):
            took.append(time.perf_counter() - self.start)
            between()

    return Clock()


# Both -------------------------------------------------------------------------------------------------


def measure_trl(turns: int, repeats: int) -> dict:
    """Seconds of a step, episodes and words a second on both sides, and the ratio."""
    ours, theirs, lengths, steps = [], [], [], repeats + WARM_UP
    mine = _our_steps(turns)
    with tempfile.TemporaryDirectory() as folder:
        clock = _make_clock(theirs, lambda: ours.append(next(mine)))
        trainer = _open_trainer(turns, steps, folder, lengths, clock)
        with contextlib.redirect_stdout(io.StringIO()):
            trainer.train()
    assert len(theirs) == len(ours) == len(lengths) == steps
    took, words = zip(*ours[WARM_UP:], strict=True)
    sides = {"ours": (took, words), "trl": (theirs[WARM_UP:], lengths[WARM_UP:])}
    result: dict[str, Any] = {"turns": turns}
    for side, (seconds, counts) in sides.items():
        result[f"{side}_seconds"] = round(statistics.median(seconds), 3)
        result[f"{side}_episodes_per_second"] = round(GROUP * PROMPTS / statistics.median(seconds), 2)
        result[f"{side}_words"] = round(statistics.mean(counts))
    result["over_trl"] = significant(result["trl_seconds"] / result["ours_seconds"])
    return result
