"""Show a trajectory of an agent system as text to read, from its last state and its recorded turns.

turn 1
  prompt   412 tokens: Question: what is 2*3? [... 800 characters ...] Turns left: 3
  planner  Tool: calculator
           Context: 2*3
  call     calculator(2*3)
  seen     6
  verdict  continue: it may be checked
output     6
ended      FINISHED
"""

from collections.abc import Iterator, Sequence

import numpy as np

from flowgrpo.agent.state import AgentState, shorten
from flowgrpo.data.tokenizer import Text, as_json
from flowgrpo.types import Turn

WIDTH = 9  # of the column that says what a line is
LONGEST = 2000  # characters of anything that is shown


def show_transcript(text: Text, state: AgentState, turns: Sequence[Turn] = (), *, prompt: int = 400) -> str:
    """The trajectory that ended, or stands, in `state`; of each prompt both ends, `prompt` characters in all."""
    lines = _entry("task", state.task_id) + _entry("query", state.query)
    lines += _entry("analysis", state.analysis) if state.analysis else []
    spoken = list(zip(state.actors, turns, strict=False))
    lines += [line for (role, number), turn in spoken if number == 0 for line in _action(text, role, turn, prompt)]
    for number in range(1, max([state.turn, *(turn for (_, turn), _ in spoken)]) + 1):
        lines += [f"turn {number}", *(f"  {line}" for line in _turn(text, state, spoken, number, prompt))]
    lines += [line for lapse in state.lapses for line in _entry("lapse", f"{lapse.role}: {lapse.reason}")]
    if state.output is not None:
        lines += _entry("output", state.output)
    ended = state.status.name + (f" ({state.reason})" if state.reason else "") if state.stage == "" else "not yet"
    return "\n".join(lines + _entry("ended", ended))


def _turn(text: Text, state: AgentState, spoken: list, number: int, prompt: int) -> Iterator[str]:
    """Yield the lines of one turn of the planner: all that was said in it, and what came of it."""
    for (role, at), turn in spoken:
        if at == number:
            yield from _action(text, role, turn, prompt)
    for record in state.memory.records:
        if record.turn != number:
            continue
        if record.tool:
            given = record.command if isinstance(record.command, str) else as_json(record.command)
            yield from _entry("call", f"{record.tool}({given})")
        yield from _entry("error" if record.error else "seen", record.observation)
        if record.stop or record.reason:
            verdict = "stop" if record.stop else "continue"
            yield from _entry("verdict", f"{verdict}: {record.reason}" if record.reason else verdict)


def _action(text: Text, role: str, turn: Turn, prompt: int) -> list[str]:
    """A prompt's ends, and the role's words."""
    chosen_l = np.asarray(turn.chosen, bool)
    said, given = (np.asarray(turn.tokens)[mask_l].tolist() for mask_l in (chosen_l, ~chosen_l))
    shown = shorten(text.decode(given), prompt, len)
    words = text.decode(i for i in said if i < text.vocab_size)
    return _entry("prompt", f"{len(given)} tokens: {shown}") + _entry(role, words)


def _entry(name: str, words: str) -> list[str]:
    """Words beside what they are; their later lines stand below the first."""
    first, *rest = shorten(words, LONGEST, len).splitlines() or [""]
    return [f"{name:<{WIDTH}} {first}".rstrip(), *(" " * (WIDTH + 1) + line for line in rest)]
