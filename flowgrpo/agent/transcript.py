"""The trajectory of an agent system as text to read, from its last state and its recorded turns.

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
from flowgrpo.data.tokenizer import ChatTokenizer, to_json_line
from flowgrpo.types import Turn

NAME_WIDTH = 9  # characters of the first column
MAX_CHARS = 2000  # of any entry


def show_transcript(
    tokenizer: ChatTokenizer, state: AgentState, turns: Sequence[Turn] = (), *, prompt: int = 400
) -> str:
    """The trajectory up to `state`, ended or not; of each prompt both ends, `prompt` characters in all."""
    actions = list(zip(state.actors, turns, strict=False))

    def lines_of(number: int) -> Iterator[str]:
        """The lines of one turn of the planner: the actions in it, and their results."""
        for (role, actor_turn), turn in actions:
            if actor_turn == number:
                yield from _action(tokenizer, role, turn, prompt)
        for record in state.memory.records:
            if record.turn != number:
                continue
            if record.tool:
                command = record.command if isinstance(record.command, str) else to_json_line(record.command)
                yield from _entry("call", f"{record.tool}({command})")
            yield from _entry("error" if record.error else "seen", record.observation)
            if record.stop or record.reason:
                verdict = "stop" if record.stop else "continue"
                yield from _entry("verdict", f"{verdict}: {record.reason}" if record.reason else verdict)

    lines = _entry("task", state.task_id) + _entry("query", state.query)
    lines += _entry("analysis", state.analysis) if state.analysis else []
    for (role, actor_turn), turn in actions:
        if actor_turn == 0:  # the analyst, before the planner's first turn
            lines += _action(tokenizer, role, turn, prompt)
    for number in range(1, max([state.turn, *(turn for (_, turn), _ in actions)]) + 1):
        lines += [f"turn {number}", *(f"  {line}" for line in lines_of(number))]
    lines += [line for lapse in state.lapses for line in _entry("lapse", f"{lapse.role}: {lapse.reason}")]
    if state.output is not None:
        lines += _entry("output", state.output)
    ended = state.status.name + (f" ({state.reason})" if state.reason else "") if state.stage == "" else "not yet"
    return "\n".join(lines + _entry("ended", ended))


def _action(tokenizer: ChatTokenizer, role: str, turn: Turn, prompt_chars: int) -> list[str]:
    """Both ends of the prompt, and the action's text."""
    tokens, chosen_l = np.asarray(turn.tokens), np.asarray(turn.chosen, bool)
    context, action = tokens[~chosen_l].tolist(), tokens[chosen_l].tolist()
    prompt = shorten(tokenizer.decode(context), prompt_chars, len)
    text = tokenizer.decode(i for i in action if i < tokenizer.vocab_size)
    return _entry("prompt", f"{len(context)} tokens: {prompt}") + _entry(role, text)


def _entry(name: str, text: str) -> list[str]:
    """A name and a text in two columns."""
    first, *others = shorten(text, MAX_CHARS, len).splitlines() or [""]
    return [f"{name:<{NAME_WIDTH}} {first}".rstrip(), *(" " * (NAME_WIDTH + 1) + line for line in others)]
