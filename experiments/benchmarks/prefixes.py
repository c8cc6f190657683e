"""Shared prefixes of contexts: tokens and seconds of the learner, packed plainly and in prefix trees.

    python -m experiments.benchmarks.prefixes
    python -m experiments.benchmarks.prefixes --model=smollm2 --cases=prompts --parts=score,update --repeats=3

Groups of trajectories of random words. `prompts`: a prompt that a group shares, and one action. `appended`: three turns
after it, each an action with an observation. `instructions`: the first four fifths of the prompt are shared by all
groups. `fresh`: three turns in contexts rendered afresh, each with the earlier actions. `branches`: three turns of an
external agent, a second conversation that branches off after the first turn, and one with the same instructions and
another question.

`laid_out` counts the tokens of all contexts one by one, `computed` those of the trees (`pack_tree`); `slots` are those
of the visited rows, which determine the time of a program, packed plainly and in trees. With a model: seconds of
scoring, of an update and of a step of imitation, plain and tree in turn, and the speed-up by the tree.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from absl import flags

from ..cli import app
from ..cli.help import flag_heading

CASES = ("prompts", "appended", "instructions", "fresh", "branches")
PARTS = ("score", "update", "imitation")

flag_heading("Run")
_CASES = flags.DEFINE_list("cases", list(CASES), f"Any of {', '.join(CASES)}.")
_PARTS = flags.DEFINE_list("parts", list(PARTS), "Parts that are timed if there is a model.")
_MODEL = flags.DEFINE_string("model", None, "Folder or file of the model; without one only tokens are counted.")
flag_heading("Sizes")
_GROUPS = flags.DEFINE_integer("groups", 8, "Groups.", lower_bound=1)
_SAMPLES = flags.DEFINE_integer("samples", 8, "Trajectories of a group.", lower_bound=1)
_PROMPT = flags.DEFINE_integer("prompt", 250, "Tokens of a prompt.", lower_bound=5)
_OWN = flags.DEFINE_integer(
    "own", 60, "Tokens of a turn; from the second turn on, a third of them is an observation.", lower_bound=3
)
_MICRO = flags.DEFINE_integer("micro_rows", 8, "Rows of a micro-batch.", lower_bound=1)
_REPEATS = flags.DEFINE_integer("repeats", 3, "Runs of which the median counts.", lower_bound=1)

app.read_flags(__name__)

import jax
import numpy as np

from flowgrpo.algorithms.policy_gradient import grpo
from flowgrpo.batching.collate import collate
from flowgrpo.batching.prefix_tree import count_tokens, make_packer
from flowgrpo.learner.imitation import make_supervised
from flowgrpo.learner.state import adamw, init_learner
from flowgrpo.learner.update import UpdateSettings, make_score, make_update, score_batch
from flowgrpo.models.hf import Model, load_model
from flowgrpo.report.progress import with_progress
from flowgrpo.report.tables import show_lines, significant
from flowgrpo.types import Batch, Trajectory, Turn

from . import measuring

WORDS = 1000  # below the vocabulary of any model
RATE = 1e-6


def make_records(case: str, *, groups: int, samples: int, prompt: int, own: int) -> list[Trajectory]:
    """Trajectories of a case."""
    rng = np.random.default_rng(0)
    words = partial(rng.integers, 0, WORDS, dtype=np.int32)
    shared_length = prompt * 4 // 5
    instructions, records = words(shared_length), []
    for group in range(groups):
        prompt_tokens = words(prompt)
        if case in ("instructions", "branches"):
            prompt_tokens[:shared_length] = instructions
        for sample in range(samples):
            actions = [words(own) for _ in range(3)]
            result = own // 3  # tokens of the observation of a later turn
            first = _make_turn(prompt_tokens, actions[0])
            later = [_make_turn(act[:result], act[result:]) for act in actions[1:]]
            turns, extends_context = [first], True
            if case in ("appended", "branches"):
                turns += later
            if case == "fresh":
                contexts = [np.concatenate([prompt_tokens, *actions[:t]]) for t in range(3)]
                turns, extends_context = [_make_turn(*pair) for pair in zip(contexts, actions, strict=True)], False
            if case == "branches":
                branch = np.concatenate([prompt_tokens, actions[0], words(result)])
                question = np.concatenate([instructions, words(prompt - shared_length)])
                turns += [_make_turn(context, words(own), starts_context=True) for context in (branch, question)]
            records.append(Trajectory(turns, float(sample % 2), group, extends_context=extends_context))
    return records


def _make_turn(context: np.ndarray, action: np.ndarray, **settings: bool) -> Turn:
    tokens = np.concatenate([context, action])
    chosen = np.arange(len(tokens)) >= len(context)
    return Turn(tokens, chosen, np.where(chosen, -np.log(WORDS), 0.0).astype(np.float32), **settings)


def _lay_out(records: list[Trajectory], shares: bool) -> Batch:
    """Rows of a GRPO update as in a run, without empty rows."""
    trajectories, algorithm = collate(records), grpo(beta=0.0)
    adv, weights = (np.asarray(per_turn(trajectories)) for per_turn in (algorithm.advantages, algorithm.weights))
    contexts = _context_lengths(records)
    turns = -(-len(contexts) // len(records))
    sizes = {
        "max_trajectory_tokens": max(contexts),
        "trajectories": len(records),
        "turns": turns,
        "micro_rows": _MICRO.value,
    }
    batch = make_packer(shares, **sizes)(trajectories, adv, weights)
    used_r = (batch.segments > 0).any(axis=1)
    return jax.tree.map(lambda x: x[used_r], batch)


def _context_lengths(records: list[Trajectory]) -> list[int]:
    lengths: list[int] = []
    for record in records:
        for t, turn in enumerate(record.turns):
            if t == 0 or turn.starts_context or not record.extends_context:
                lengths.append(0)
            lengths[-1] += len(turn.tokens)
    return lengths


def _works(model: Model, part: str, batches: dict[str, Batch]) -> dict[str, Callable[[], Any]]:
    """One part of learning on each batch, without changing the parameters."""
    rows = {"plain": _MICRO.value, "tree": 1}
    if part == "score":
        score = {name: jax.jit(partial(score_batch, make_score(model.policy), micro_rows=rows[name])) for name in rows}
        return {name: partial(score[name], model.params, batch) for name, batch in batches.items()}
    optimizer = adamw(RATE)
    state = init_learner(model.params, optimizer)

    def make(micro_rows: int) -> Callable:
        if part != "update":
            return make_supervised(model.policy, optimizer, micro_rows=micro_rows)
        settings = UpdateSettings(micro_rows=micro_rows, diagnostics=None)
        return make_update(model.policy, grpo(beta=0.0), optimizer, settings)

    steps = {name: jax.jit(make(rows[name])) for name in rows}
    return {name: partial(steps[name], state, batch) for name, batch in batches.items()}


def _measure(case: str, model: Model | None) -> dict[str, Any]:
    """Tokens and seconds of a case."""
    sizes = {"groups": _GROUPS.value, "samples": _SAMPLES.value, "prompt": _PROMPT.value, "own": _OWN.value}
    records = make_records(case, **sizes)
    batches = {name: _lay_out(records, name == "tree") for name in ("plain", "tree")}
    laid_out, computed = count_tokens(batches["tree"])
    tree = batches["tree"].tree
    assert tree is not None, "packed as a tree above"
    slots = {"plain": batches["plain"].tokens.size, "tree": tree.tokens.size}
    figures: dict[str, Any] = {"case": case, "laid_out": laid_out, "computed": computed}
    figures |= {"share": significant(computed / laid_out), "plain_slots": slots["plain"], "tree_slots": slots["tree"]}
    if model is None:
        return figures
    for part in _PARTS.value:
        durations = measuring.medians_in_turn(_works(model, part, batches), _REPEATS.value)
        figures |= {f"{part}_{name}_s": round(seconds, 3) for name, seconds in durations.items()}
        figures[f"{part}_times"] = significant(durations["plain"] / durations["tree"])
    return figures


def main() -> None:
    """Measure every case, print the table and one JSON line."""
    measuring.check_known(_CASES, CASES)
    measuring.check_known(_PARTS, PARTS)
    model = None if _MODEL.value is None else load_model(_MODEL.value)
    rows = [_measure(case, model) for case in with_progress("case", _CASES.value)]
    show_lines(rows)
    sizes = {"groups": _GROUPS.value, "samples": _SAMPLES.value, "prompt": _PROMPT.value, "own": _OWN.value}
    measuring.print_result("prefixes", **sizes, rows=rows)


if __name__ == "__main__":
    app.run(main)
