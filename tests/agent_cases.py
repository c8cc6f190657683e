"""A tokenizer of each template style, tools, and a way to play an agent system, for the tests of `agent`."""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from tokenizer_cases import NAMES, STYLES, byte_level, fast

from flowgrpo.contracts import Call, HostEnv, HostStep, Result, Said
from flowgrpo.data.tokenizer import Text, load_text
from flowgrpo.types import Task

TEMPLATES = NAMES
ECHO = {
    "name": "echo",
    "description": "Says a text again.",
    "parameters": {"type": "object", "properties": {"words": {"type": "string"}}, "required": ["words"]},
}
ADD = {
    "name": "add",
    "description": "The sum of two numbers.",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}, "note": {"type": "string"}},
        "required": ["a", "b"],
    },
}
SCHEMAS = (ECHO, ADD)


@cache
def agent_text(style: str = "qwen2.5") -> Text:
    """Byte-level BPE with the template and the tokens of a style."""
    with TemporaryDirectory() as folder:
        fast(byte_level(), STYLES[style], STYLES[style].template).save_pretrained(folder)
        return load_text(Path(folder))


def task(query: str = "what is 2 + 3?", identity: str = "t") -> Task:
    return Task(identity, query, ("5",), "any")


def run_tools(call: Call) -> Result:
    """`echo` and `add`; the words "down" and "wrong" make echo fail and refuse."""
    assert call.kind == "tool"
    if call.name == "add":
        try:
            return Result(str(call.arguments["a"] + call.arguments["b"]))
        except (KeyError, TypeError) as error:
            return Result(f"bad arguments: {error!r}", error=True)
    words = call.arguments.get("words")
    if words == "down":
        return Result("", failure="the server is down")
    return Result("refused", error=True) if words == "wrong" else Result(f"heard {words}")


def plan(tool: str, context: str = "", goal: str = "") -> str:
    return (f"Sub-goal: {goal}\n" if goal else "") + f"Tool: {tool}\nContext: {context}"


def ids(text: Text, words: str, end: bool = True) -> list[int]:
    """Sampled ids that read `words`, with a stop token unless they were cut."""
    return [*text.encode(words), *[text.stop_ids[-1]] * end]


class Played(NamedTuple):
    """Record of an episode: one more state than steps, and a prompt for each state but one in which it ended."""

    states: list[Any]
    said: list[Said]
    sampled: list[list[int]]
    steps: list[HostStep]

    def prompts(self, text: Text) -> list[str]:
        return [text.decode(said.tokens) for said in self.said]


def play(
    env: HostEnv, text: Text, actions: Sequence[str | Sequence[int]], do: Callable = run_tools, *, of=None, key: Any = 0
) -> Played:
    """The episode of these actions: words, which end in a stop token, or ids as they are."""
    state, said = env.reset(key, of or task(), do)
    played = Played([state], [said], [], [])
    for action in actions:
        sampled = ids(text, action) if isinstance(action, str) else list(action)
        state, step = env.step(state, sampled, do)
        played.states.append(state)
        played.sampled.append(sampled)
        played.steps.append(step)
        if step.done:
            break
        assert step.said is not None
        played.said.append(step.said)
    return played
