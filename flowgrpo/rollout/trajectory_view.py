"""Convert trajectories, recorded or in arrays, to what the viewer displays.

    write_viewer([shown_trajectory(record, make_token_decoder(tokenizer)) for record in records], "rollouts.html")
    records = to_records(rollout, tools=env.tools)
    write_viewer([shown_trajectory(record, make_word_decoder(env.vocabulary)) for record in records], "rollouts.html")

Tokens stay the ids that were sampled; a `TokenDecoder` gives the text of each, and no text is tokenised (A5).
"""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import jax
import numpy as np

from flowgrpo.batching.layouts import resolve_lengths
from flowgrpo.data.tokenizer import ChatTokenizer
from flowgrpo.generate.requests import INCOMPLETE
from flowgrpo.report.trajectory_page import PageCall, PageTrajectory, PageTurn
from flowgrpo.rollout.records import RecordedTrajectory
from flowgrpo.types import BadInput, Status, Task, Trajectories, Turn

TokenDecoder = Callable[[Sequence[int]], list[str]]  # ids -> the text of each; joined, the text of all


# Text of tokens -------------------------------------------------------------------------------------------


def make_token_decoder(tokenizer: ChatTokenizer) -> TokenDecoder:
    """The text of each token within a text; a character of several tokens belongs to the first of them."""
    before = tokenizer.encode("a")[-1:]
    start = tokenizer.decode(before)

    @cache
    def read(*ids: int) -> str:
        if max(ids) >= tokenizer.vocab_size:
            return "".join(f"<{i}>" for i in ids)
        text = tokenizer.decode([*before, *ids])
        return text.removeprefix(start) if text.startswith(start) else tokenizer.decode(ids)

    def decode(ids: Sequence[int]) -> list[str]:
        pieces = [read(int(i)) for i in ids]
        for first, piece in enumerate(pieces):
            if INCOMPLETE not in piece:
                continue
            # A character has up to four bytes: give it to its first token if the next ones complete it.
            for last in range(first + 1, min(first + 4, len(ids))):
                if INCOMPLETE not in pieces[last]:
                    break
                text = read(*(int(i) for i in ids[first : last + 1]))
                if INCOMPLETE not in text:
                    pieces[first : last + 1] = [text] + [""] * (last - first)
                    break
        return pieces

    return decode


def make_word_decoder(words: Sequence[str]) -> TokenDecoder:
    """The word of each token, for a vocabulary of words such as that of a pure environment."""
    return lambda ids: [f"{words[int(i)]} " for i in ids]


# Trajectories ---------------------------------------------------------------------------------------------


def shown_trajectory(
    recorded: RecordedTrajectory,
    decode: TokenDecoder,
    *,
    phase: str = "",
    update: int | None = None,
    advantages: Sequence[Any] | None = None,
    ratios: Sequence[np.ndarray] | None = None,
) -> PageTrajectory:
    """A recorded trajectory for the viewer.

    Args:
        recorded: the trajectory.
        decode: gives the text of each token.
        phase: what it was rolled out for, such as "train".
        update: number of the update.
        advantages: of each turn.
        ratios: of each turn, by token.
    """
    task, result, turns = recorded.task, recorded.reward_result, recorded.turns
    task = task if isinstance(task, Task) else Task(str(task), str(task), (), "")
    output = recorded.output
    if output is None and recorded.status == Status.FINISHED and turns:
        # A record without an output, as of a pure environment: the action that finished it.
        output = "".join(decode(np.asarray(turns[-1].tokens)[np.asarray(turns[-1].chosen, bool)].tolist())).strip()
    first_calls, *calls = _calls_by_turn(recorded)
    absent = [None] * len(turns)
    columns = zip(turns, recorded.tools, recorded.errors, calls, advantages or absent, ratios or absent, strict=True)
    return PageTrajectory(
        task=task.id,
        query=task.query,
        answers=task.answers,
        domain=task.domain,
        turns=[
            PageTurn(
                tokens=np.asarray(turn.tokens),
                pieces=decode(np.asarray(turn.tokens).tolist()),
                chosen=np.asarray(turn.chosen),
                logp=np.asarray(turn.logp_sampled),
                version=turn.version,
                tool=tool,
                error=error,
                reward=turn.reward,
                calls=turn_calls,
                advantage=None if advantage is None else np.asarray(advantage, np.float32),
                ratio=ratio,
            )
            for turn, tool, error, turn_calls, advantage, ratio in columns
        ],
        phase=phase,
        update=update,
        group=recorded.group,
        sample=recorded.sample,
        outcome=recorded.outcome,
        correct=recorded.correct,
        status=Status(recorded.status),
        reason=recorded.reason,
        output=output,
        reward_reason="" if result is None else result.reason,
        parts={} if result is None else result.parts,
        seconds=recorded.seconds,
        calls=first_calls,
    )


def _calls_by_turn(recorded: RecordedTrajectory) -> list[list[PageCall]]:
    """The calls of the reset, then those of each turn; the last also has those of a step that did not return."""
    turns = len(recorded.turns)
    ends = list(accumulate(recorded.effect_counts))[: turns + 1]
    ends = [*ends, *[len(recorded.log)] * (turns + 1 - len(ends))]
    ends[-1] = len(recorded.log)
    calls = [
        PageCall(call.kind, call.name, call.arguments, result.text, result.error, result.failure)
        for call, result in recorded.log
    ]
    return [calls[start:end] for start, end in zip([0, *ends], ends, strict=False)]


# Records of arrays ----------------------------------------------------------------------------------------


def to_records(
    trajectories: Trajectories, tasks: Sequence[Task] | None = None, tools: Sequence[str] = ()
) -> list[RecordedTrajectory]:
    """The trajectories of arrays as records, which have no effects, no reward result and no time.

    Args:
        trajectories: the arrays, on any device.
        tasks: the task of each. None, if tasks are arrays as in a pure environment: named by the number of its group.
        tools: the names of the indices in `trajectories.tool`.
    """
    trajectories = jax.device_get(trajectories)
    group_n = np.asarray(trajectories.group).tolist()
    if tasks is None:
        tasks = [Task(f"task {group}", f"task {group}", (), "") for group in group_n]
    if not isinstance(tasks, Sequence) or len(tasks) != len(group_n):
        raise BadInput("tasks must be fg.Task, one a trajectory; leave them out where tasks are arrays")
    length_nt = np.asarray(resolve_lengths(trajectories)[0])
    tool_nt, error_nt = np.asarray(trajectories.tool), np.asarray(trajectories.error)
    last_sample: dict[int, int] = {}  # of each group so far
    records = []
    for n, (task, group) in enumerate(zip(tasks, group_n, strict=True)):
        last_sample[group] = last_sample.get(group, -1) + 1
        turns = np.flatnonzero(trajectories.turns[n]).tolist()
        outcome = float(trajectories.outcome[n])
        records.append(
            RecordedTrajectory(
                turns=[_to_turn(trajectories, n, t, int(length_nt[n, t])) for t in turns],
                outcome=outcome if np.isfinite(outcome) else None,
                group=int(group),
                correct=bool(trajectories.correct[n]),
                status=Status(int(trajectories.status[n])),
                task=task,
                key=(),
                sample=last_sample[group],
                tools=tuple(tools[int(tool_nt[n, t])] if tool_nt[n, t] >= 0 else "" for t in turns),
                errors=tuple(bool(error_nt[n, t]) for t in turns),
                effect_counts=(0,) * (len(turns) + 1),
            )
        )
    return records


def _to_turn(trajectories: Trajectories, n: int, t: int, length: int) -> Turn:
    """Turn t of trajectory n, without padding."""
    columns = (trajectories.tokens, trajectories.chosen, trajectories.logp_sampled, trajectories.version)
    tokens, chosen, logp, version = (np.asarray(x_ntl)[n, t, :length] for x_ntl in columns)
    by_turn, starts_context = trajectories.by_turn, trajectories.starts_context
    return Turn(
        tokens=tokens,
        chosen=chosen,
        logp_sampled=logp,
        version=int(version[0]) if (version == version[0]).all() else version,
        reward=float(trajectories.reward[n, t]) if by_turn is not None and by_turn[n] else None,
        anchor=int(trajectories.anchor[n, t]),
        starts_context=t > 0 and starts_context is not None and bool(starts_context[n, t]),
    )
