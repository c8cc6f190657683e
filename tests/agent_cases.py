"""A tokenizer of each template style, tools, and a way to play an agent system, for the tests of `agent`."""

from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from tokenizer_cases import NAMES, STYLES, byte_level, fast

from flowgrpo.agent.system import AgentLimits, AgentRoles, agent_system
from flowgrpo.contracts import Call, HostEnv, HostObservation, HostStep, Result
from flowgrpo.data.tokenizer import ChatTokenizer, load_tokenizer
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
def agent_text(style: str = "qwen2.5") -> ChatTokenizer:
    """Byte-level BPE with the template and the tokens of a style."""
    with TemporaryDirectory() as folder:
        fast(byte_level(), STYLES[style], STYLES[style].template).save_pretrained(folder)
        return load_tokenizer(Path(folder))


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


def make_system(text: ChatTokenizer, *, schemas: Sequence[Any] = SCHEMAS, **settings: Any) -> HostEnv:
    """An agent system of flat settings: the fields of `AgentRoles` and `AgentLimits`, `rendering` and `name`."""
    roles, limits = (
        {field.name: settings.pop(field.name) for field in fields(kind) if field.name in settings}
        for kind in (AgentRoles, AgentLimits)
    )
    return agent_system(text, schemas=schemas, roles=AgentRoles(**roles), limits=AgentLimits(**limits), **settings)


def plan(tool: str, context: str = "", goal: str = "") -> str:
    return (f"Sub-goal: {goal}\n" if goal else "") + f"Tool: {tool}\nContext: {context}"


def ids(text: ChatTokenizer, words: str, end: bool = True) -> list[int]:
    """Sampled ids that read `words`, with a stop token unless they were cut."""
    return [*text.encode(words), *[text.stop_ids[-1]] * end]


class AgentEpisode(NamedTuple):
    """Record of an episode: one more state than steps, and a prompt for each state but one in which it ended."""

    states: list[Any]
    said: list[HostObservation]
    sampled: list[list[int]]
    steps: list[HostStep]

    def prompts(self, text: ChatTokenizer) -> list[str]:
        return [text.decode(said.tokens) for said in self.said]


def play(
    env: HostEnv,
    text: ChatTokenizer,
    actions: Sequence[str | Sequence[int]],
    call_tool: Callable = run_tools,
    *,
    of=None,
    key: Any = 0,
) -> AgentEpisode:
    """The episode of these actions: words, which end in a stop token, or ids as they are."""
    state, said = env.reset(key, of or task(), call_tool)
    played = AgentEpisode([state], [said], [], [])
    for action in actions:
        sampled = ids(text, action) if isinstance(action, str) else list(action)
        state, step = env.step(state, sampled, call_tool)
        played.states.append(state)
        played.sampled.append(sampled)
        played.steps.append(step)
        if step.done:
            break
        assert step.observation is not None
        played.said.append(step.observation)
    return played
