"""Demonstrations of the offline tasks, played with the real tools, and flawed on purpose.

    records = demonstrate(env, text, tasks, do, seed=0)  ->  trajectories whose actions are to be imitated

The script knows what is right (`metadata["steps"]` and `["final"]`), and at every action slips with the chances in
`Flaws`: it names a tool that is wrong or doesn't exist, damages a command, forgets the form, answers before it knows,
or answers wrongly. Nothing in a demonstration says which of its actions were slips. That is left to training.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import jax
import numpy as np

from experiments.offline_tasks import LANDS, TOWNS, TRADES, WARES
from flowgrpo.contracts import Do, HostEnv, HostStep, Said
from flowgrpo.text import Text
from flowgrpo.types import Status, Task, Trajectory, Turn

TOOLS = ("calculator", "python", "search")
STRANGERS = ("browser", "lookup", "solver")  # tools that don't exist
Random = np.random.Generator


@dataclass(frozen=True)
class Flaws:
    """How often the script slips."""

    wrong_tool: float = 0.18  # a step by another tool, or by one that doesn't exist
    damaged: float = 0.12  # a step whose command has lost something
    formless: float = 0.06  # an action without its form
    early: float = 0.15  # an answer before the last step
    wrong_sign: float = 0.12  # a step that computes or looks up something else
    wrong_answer: float = 0.22  # at the end
    wrong_drawing: float = 0.60


def action(tool: str, context: str) -> str:
    """An action of a planner in its form."""
    return f"Tool: {tool}\nContext: {context}"


def script(task: Task, random: Random, flaws: Flaws) -> Iterator[str]:
    """Actions for a task, one after the other; the last is the answer."""
    for tool, context in task.metadata["steps"]:  # type: ignore[union-attr]
        while random.random() < flaws.wrong_tool + flaws.damaged + flaws.formless:
            yield _slip(tool, context, random, flaws)
        if random.random() < flaws.early:
            yield action("answer", _wrong(task, random))
            return
        context = _other(context, random) if random.random() < flaws.wrong_sign else context
        yield action(tool, context)
    slips = random.random() < (flaws.wrong_answer if task.metadata["steps"] else flaws.wrong_drawing)
    yield action("answer", _wrong(task, random) if slips else str(task.metadata["final"]))


def _slip(tool: str, context: str, random: Random, flaws: Flaws) -> str:
    """A step that brings nothing."""
    chances = np.array([flaws.wrong_tool, flaws.damaged, flaws.formless])
    kind = random.choice(3, p=chances / chances.sum())
    if kind == 0:
        others = [name for name in (*TOOLS, *STRANGERS) if name != tool]
        return action(others[int(random.integers(len(others)))], context)
    if kind == 1:
        at = [i for i, letter in enumerate(context) if letter in "()'"] or [0]
        i = at[int(random.integers(len(at)))]
        return action(tool, context[:i] + context[i + 1 :])
    return context


def _other(context: str, random: Random) -> str:
    """A command that gives something else."""
    for sign in random.permutation(["+", "-", "*"]):
        if f" {sign} " in context:
            return context.replace(f" {sign} ", random.choice([f" {x} " for x in "+-*" if x != sign]), 1)
    digits = [i for i, letter in enumerate(context) if letter.isdigit()]
    if digits:
        i = digits[int(random.integers(len(digits)))]
        return context[:i] + str((int(context[i]) + int(random.integers(1, 10))) % 10) + context[i + 1 :]
    return context.split()[0]


def _wrong(task: Task, random: Random) -> str:
    """An answer that is not the right one."""
    final = str(task.metadata["final"])
    if task.domain == "search":
        return _another(final, random)
    numbers = [i for i, letter in enumerate(final) if letter.isdigit()]
    i = numbers[int(random.integers(len(numbers)))]
    return final[:i] + str((int(final[i]) + int(random.integers(1, 10))) % 10) + final[i + 1 :]


def _another(name: str, random: Random) -> str:
    """Another name of the same kind."""
    own = next(names for names in (TOWNS, LANDS, TRADES, WARES) if name in names)
    others = [other for other in own if other != name]
    return others[int(random.integers(len(others)))]


# Played -------------------------------------------------------------------------------------------------


def demonstrate(
    env: HostEnv,
    text: Text,
    tasks: Sequence[Task],
    do: Do,
    *,
    seed: int,
    flaws: Flaws = Flaws(),
    workers: int = 8,
) -> list[Trajectory]:
    """One trajectory a task, played with real tools; each depends on the seed and its task alone."""
    with ThreadPoolExecutor(workers) as pool:
        played = pool.map(partial(_demonstrate, env, text, do, seed, flaws), range(len(tasks)), tasks)
        return list(played)


def _demonstrate(env: HostEnv, text: Text, do: Do, seed: int, flaws: Flaws, number: int, task: Task) -> Trajectory:
    random = np.random.default_rng([seed, number])
    return play_script(env, text, do, task, script(task, random, flaws), group=number)


def play_script(env: HostEnv, text: Text, do: Do, task: Task, actions: Iterator[str], *, group: int = 0) -> Trajectory:
    """The trajectory of these actions, up to the environment's limit."""
    key = jax.random.key(group)
    state, said = env.reset(key, task, do)
    turns: list[Turn] = []
    step: HostStep | None = None
    for words in actions:
        sampled = [*text.encode(words), text.stop_ids[0]]
        turns.append(_turn(said, sampled))
        state, step = env.step(state, sampled, do)
        if step.done or len(turns) == env.turns:
            break
        assert step.said is not None
        said = step.said
    status = step.status if step is not None else Status.ABORTED
    return Trajectory(turns, 1.0, group, status=status, appends=said.appends)


def _turn(said: Said, sampled: Sequence[int]) -> Turn:
    size = len(said.tokens)
    tokens = np.array([*said.tokens, *sampled], np.int32)
    return Turn(tokens, np.arange(len(tokens)) >= size, np.zeros(len(tokens), np.float32))
