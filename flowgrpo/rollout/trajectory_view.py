"""Show trajectories: turn records and arrays into what the viewer displays.

    viewer([shown_trajectory(one, speller(text)) for one in played], "rollouts.html")
    records = records_of(rollout, tools=env.tools)
    viewer([shown_trajectory(one, word_speller(env.words)) for one in records], "rollouts.html")

Tokens stay the ids that were sampled; a `Spell` says what each of them reads as, and no text is tokenised (A5).
"""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import jax
import numpy as np

from flowgrpo.batching.layouts import filled
from flowgrpo.data.tokenizer import Text
from flowgrpo.generate.requests import INCOMPLETE
from flowgrpo.report.trajectory_page import Shown, ShownCall, ShownTurn
from flowgrpo.rollout.effects import Effect
from flowgrpo.rollout.records import Played
from flowgrpo.types import BadInput, Status, Task, Trajectories, Turn

Spell = Callable[[Sequence[int]], list[str]]  # ids -> the text of each; together, that of all


# Text of tokens -------------------------------------------------------------------------------------------


def speller(text: Text) -> Spell:
    """Make a `Spell` that gives each token's text after others; where several make one character, the first has it."""
    before = text.encode("a")[-1:]
    start = text.decode(before)

    @cache
    def read(*ids: int) -> str:
        if max(ids) >= text.vocab_size:
            return "".join(f"<{i}>" for i in ids)
        whole = text.decode([*before, *ids])
        return whole.removeprefix(start) if whole.startswith(start) else text.decode(ids)

    def spell(ids: Sequence[int]) -> list[str]:
        pieces = [read(int(i)) for i in ids]
        for first, piece in enumerate(pieces):
            if INCOMPLETE in piece:
                _complete(ids, pieces, first, read)
        return pieces

    return spell


def _complete(ids: Sequence[int], pieces: list[str], first: int, read: Callable[..., str]) -> None:
    """Give the character that begins at `first` to that token, where the next ones end it."""
    for last in range(first + 1, min(first + 4, len(ids))):
        if INCOMPLETE not in pieces[last]:
            return
        whole = read(*(int(i) for i in ids[first : last + 1]))
        if INCOMPLETE not in whole:
            pieces[first : last + 1] = [whole] + [""] * (last - first)
            return


def word_speller(words: Sequence[str]) -> Spell:
    """Make a `Spell` for a vocabulary of whole words, such as that of a pure environment."""
    return lambda ids: [f"{words[int(i)]} " for i in ids]


# Trajectories ---------------------------------------------------------------------------------------------


def shown_trajectory(
    played: Played,
    spell: Spell,
    *,
    phase: str = "",
    update: int | None = None,
    advantages: Sequence[Any] | None = None,
    ratios: Sequence[np.ndarray] | None = None,
) -> Shown:
    """A trajectory of a hosted rollout; `advantages` and `ratios` have an entry a turn."""
    task, scored = played.task, played.scored
    own = task if isinstance(task, Task) else Task(str(task), str(task), (), "")
    first, *later = _calls(played)
    nothing = [None] * len(played.turns)
    given = (played.turns, played.tools, played.errors, later, advantages or nothing, ratios or nothing)
    turns = [_turn(spell, *each) for each in zip(*given, strict=True)]
    return Shown(
        task=own.id,
        query=own.query,
        answers=own.answers,
        domain=own.domain,
        turns=turns,
        phase=phase,
        update=update,
        group=played.group,
        sample=played.sample,
        reward=played.outcome,
        correct=played.correct,
        status=Status(played.status),
        reason=played.reason,
        output=_output(played, spell),
        verdict="" if scored is None else scored.reason,
        parts={} if scored is None else scored.parts,
        seconds=played.seconds,
        calls=first,
    )


def _output(played: Played, spell: Spell) -> str | None:
    """The answer in the end; where a record has none, as in a pure environment, the action that finished it."""
    if played.output is not None or played.status != Status.FINISHED or not played.turns:
        return played.output
    last = played.turns[-1]
    return "".join(spell(np.asarray(last.tokens)[np.asarray(last.chosen, bool)].tolist())).strip()


def _turn(
    spell: Spell, turn: Turn, tool: str, error: bool, calls: Sequence[ShownCall], advantage: Any, ratio: Any
) -> ShownTurn:
    return ShownTurn(
        tokens=np.asarray(turn.tokens),
        pieces=spell(np.asarray(turn.tokens).tolist()),
        chosen=np.asarray(turn.chosen),
        logp=np.asarray(turn.logp_sampled),
        version=turn.version,
        tool=tool,
        error=error,
        reward=turn.reward,
        calls=calls,
        advantage=None if advantage is None else np.asarray(advantage, np.float32),
        ratio=ratio,
    )


def _calls(played: Played) -> list[list[ShownCall]]:
    """List the calls before the first turn, then those of each turn; the last also has those of a step that was cut."""
    turns = len(played.turns)
    ends = list(accumulate(played.lens))[: turns + 1]
    ends = [*ends, *[len(played.log)] * (turns + 1 - len(ends))]
    ends[-1] = len(played.log)
    return [[_call(effect) for effect in played.log[a:b]] for a, b in zip([0, *ends], ends, strict=False)]


def _call(effect: Effect) -> ShownCall:
    call, result = effect
    return ShownCall(call.kind, call.name, call.arguments, result.text, result.error, result.failure)


# Records of arrays ----------------------------------------------------------------------------------------


def records_of(
    trajectories: Trajectories, tasks: Sequence[Task] | None = None, tools: Sequence[str] = ()
) -> list[Played]:
    """The trajectories of a batch as records, a task each; on the host. `tools` are those that `tool` numbers.

    Nothing was asked of the world, no reward but the environment judged, and no clock ran for each alone. Without
    `tasks`, which are arrays in a pure environment, each is named by the number of its group.
    """
    trajectories = jax.device_get(trajectories)
    group_n = np.asarray(trajectories.group).tolist()
    if tasks is None:
        tasks = [Task(f"task {group}", f"task {group}", (), "") for group in group_n]
    if not isinstance(tasks, Sequence) or len(tasks) != len(group_n):
        raise BadInput("tasks must be fg.Task, one a trajectory; leave them out where tasks are arrays")
    length_nt = np.asarray(filled(trajectories)[0])
    before: dict[int, int] = {}
    records = []
    for n, task in enumerate(tasks):
        group = int(trajectories.group[n])
        before[group] = before.get(group, -1) + 1
        records.append(_record(trajectories, n, length_nt[n], task, tools, before[group]))
    return records


def _record(
    trajectories: Trajectories, n: int, length_t: np.ndarray, task: Task, tools: Sequence[str], sample: int
) -> Played:
    turns = np.flatnonzero(trajectories.turns[n]).tolist()
    outcome = float(trajectories.outcome[n])
    tool_t, error_t = np.asarray(trajectories.tool)[n], np.asarray(trajectories.error)[n]
    return Played(
        turns=[_cut(trajectories, n, t, int(length_t[t])) for t in turns],
        outcome=outcome if np.isfinite(outcome) else None,
        group=int(trajectories.group[n]),
        correct=bool(trajectories.correct[n]),
        status=Status(int(trajectories.status[n])),
        task=task,
        key=(),
        sample=sample,
        tools=tuple(tools[int(tool_t[t])] if tool_t[t] >= 0 else "" for t in turns),
        errors=tuple(bool(error_t[t]) for t in turns),
        lens=(0,) * (len(turns) + 1),
    )


def _cut(given: Trajectories, n: int, t: int, length: int) -> Turn:
    """One turn without padding."""
    columns = (given.tokens, given.chosen, given.logp_sampled, given.version)
    tokens, chosen, logp, version = (np.asarray(x_ntl)[n, t, :length] for x_ntl in columns)
    return Turn(
        tokens=tokens,
        chosen=chosen,
        logp_sampled=logp,
        version=int(version[0]) if (version == version[0]).all() else version,
        reward=float(given.reward[n, t]) if given.by_turn is not None and given.by_turn[n] else None,
        anchor=int(given.anchor[n, t]),
        begins=t > 0 and given.begins is not None and bool(given.begins[n, t]),
    )
