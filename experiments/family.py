"""Compare the advantages and gradients of all algorithms on one group of trajectories.

    python -m experiments.family
    python -m experiments.family --rewards=1,0,0,0 --turns=3,1,2,2 --tokens=4 --algorithms=flow_grpo,grpo,rloo

Prints, for each algorithm and trajectory, the advantage of its turns, its weight in the loss, and the push:
minus the gradient of the loss with respect to the log-probability of one of its tokens, at the behaviour
parameters. Runs anywhere, in seconds.

Expected with the default group (two wins of 2 turns, two losses of 6): `flow_grpo` gives +0.866 and -0.866,
with statistics over trajectories; `flow_grpo_released`, over turn rows, +1.677 and -0.559.
"""

import json

from absl import flags

from flowgrpo.training import names

from .cli import app
from .cli.help import flag_heading

flag_heading("Run")
_REWARDS = flags.DEFINE_list("rewards", ["1", "1", "0", "0"], "Outcome of each trajectory of the group.")
_TURNS = flags.DEFINE_list("turns", ["2", "2", "6", "6"], "Number of turns of each trajectory.")
_TOKENS = flags.DEFINE_integer("tokens", 8, "Number of chosen tokens per turn.", lower_bound=1)
_ALGORITHMS = flags.DEFINE_list("algorithms", list(names.ALGORITHMS), f"Any of {', '.join(names.ALGORITHMS)}.")
_JSON = flags.DEFINE_bool("json", False, "Print one JSON line instead of a table.")

app.read_flags(__name__)

import jax
import numpy as np

from flowgrpo.batching.collate import collate
from flowgrpo.batching.layouts import place, rows_by_trajectory, unpack
from flowgrpo.contracts import Algorithm, Scores
from flowgrpo.recipes.registry import ALGORITHMS
from flowgrpo.report.tables import show_lines
from flowgrpo.types import BadInput, Trajectories, Trajectory, Turn


def _read_numbers(name: str, values: list[str], kind) -> list:
    """The values of a list flag as numbers."""
    try:
        return [kind(value) for value in values]
    except ValueError:
        raise BadInput(f"--{name}={','.join(values)} must be a comma-separated list of {kind.__name__}s") from None


def make_group(rewards: list[float], turns: list[int], tokens: int) -> Trajectories:
    """One group: turns of one context token and `tokens` chosen ones, scored by a critic that knows nothing.

    The state before a turn counts as equal (GiGPO's anchor) where the turn's number is.
    """
    if len(rewards) != len(turns):
        counts = f"--rewards has {len(rewards)} entries and --turns {len(turns)}"
        raise BadInput(f"{counts}: give one of each a trajectory")
    if min(turns) < 1:
        raise BadInput(f"--turns={','.join(map(str, turns))}: every trajectory needs at least one turn")
    slots, best = np.arange(tokens + 1), max(rewards)
    logp = np.full(tokens + 1, -1.0, np.float32)
    steps = [Turn(slots, slots > 0, logp, anchor=t) for t in range(max(turns))]
    records = [Trajectory(steps[:t], r, 0, correct=r == best) for r, t in zip(rewards, turns, strict=True)]
    trajectories = collate(records)
    same, nothing = trajectories.logp_sampled, np.zeros(trajectories.tokens.shape, np.float32)
    return trajectories.replace(logp_ref=same, value=nothing, last_value=np.zeros(len(rewards), np.float32))


def credit_of(algorithm: Algorithm, trajectories: Trajectories) -> list[dict]:
    """Compute what the algorithm gives each trajectory: advantage of its first and last turn, share, push."""
    adv, weights = algorithm.advantages(trajectories), algorithm.weights(trajectories)
    batch = rows_by_trajectory(trajectories, adv, weights)
    if algorithm.targets is not None:
        batch = batch.replace(target=place(algorithm.targets(trajectories), batch))
    nothing_rs = np.zeros(batch.tokens.shape, np.float32)
    scores = Scores(batch.logp_sampled, nothing_rs, nothing_rs)
    slope_rs = jax.grad(lambda logp_rs: algorithm.loss(scores._replace(logp=logp_rs), batch)[0])(scores.logp)
    adv_ntl = np.broadcast_to(np.reshape(adv, (*np.shape(adv), 1)[:3]), trajectories.tokens.shape)
    push_ntl = -np.asarray(unpack(slope_rs, batch, trajectories.tokens.shape))
    last_n = trajectories.turns.sum(axis=1) - 1
    return [
        {
            "reward": float(trajectories.outcome[i]),
            "turns": int(last) + 1,
            "first_turn": float(adv_ntl[i, 0, -1]),
            "last_turn": float(adv_ntl[i, last, -1]),
            "share": float(np.asarray(weights)[i].sum() / np.asarray(weights).sum()),
            "push": float(push_ntl[i, last, -1]),
        }
        for i, last in enumerate(last_n)
    ]


def build(name: str, tokens: int, turns: list[int]) -> Algorithm:
    """The algorithm by its name, with what it requires filled in from the group."""
    if name not in ALGORITHMS:
        raise BadInput(f"--algorithms: {name!r} is unknown; choose from {', '.join(ALGORITHMS)}")
    return ALGORITHMS[name](**({"max_tokens": tokens * max(turns)} if name == "dr_grpo" else {}))


def main() -> None:
    """Build the group, run every algorithm on it, print."""
    turns = _read_numbers("turns", _TURNS.value, int)
    trajectories = make_group(_read_numbers("rewards", _REWARDS.value, float), turns, _TOKENS.value)
    algorithms = {name: build(name, _TOKENS.value, turns) for name in _ALGORITHMS.value}
    table = {name: credit_of(algorithm, trajectories) for name, algorithm in algorithms.items()}
    if _JSON.value:
        print(json.dumps(table))
    else:
        forms = {"reward": "g", "turns": "d", "first_turn": "+.3f", "last_turn": "+.3f", "share": ".3f", "push": "+.4f"}
        lines = [(name, row) for name, rows in table.items() for row in rows]
        show_lines([{"algorithm": name} | {x: f"{row[x]:{form}}" for x, form in forms.items()} for name, row in lines])


if __name__ == "__main__":
    app.run(main)
