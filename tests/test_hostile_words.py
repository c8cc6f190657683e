"""Time that long words take on the host, where no deadline acts on a pattern or a loop: linear in their length (R2).

The rewards have a table of their own in `rewards/test_hostile_answers.py`.
"""

from functools import partial

import pytest
from agent_cases import ECHO, agent_text
from timing import deadline

from flowgrpo.agent.action_forms import parse_call, parse_lines, parse_tool_call
from flowgrpo.agent.rendering import Frame
from flowgrpo.agent.roles import parse_arguments, parse_verdict, parse_words
from flowgrpo.agent.state import PLANNER, AgentState, Budget, Memory, MemoryRecord, render
from flowgrpo.agent.tool_arguments import arguments_of
from flowgrpo.contracts import Call
from flowgrpo.data.tokenizer import clean as valid
from flowgrpo.generate.openai_wire import RemoteFailure, TextRequest, completion_of, failure_message, retry_after
from flowgrpo.generate.requests import find_stop
from flowgrpo.report.trajectory_page import as_script
from flowgrpo.rewards.judge import shorten_quote
from flowgrpo.tools.calculator import calculator
from flowgrpo.tools.python import take_off_fences
from flowgrpo.tools.schema import check_arguments
from flowgrpo.tools.search import passages_of, read_corpus
from flowgrpo.tools.search import words_of as words_of_query
from flowgrpo.tools.toolset import clean_observation, observation, toolset

SIZE = 60_000  # characters
DEADLINE = 1.0  # processor seconds, where 0.03 are ample: what grows with the square of the length takes 10 and more
STATE = AgentState("t", "?", (ECHO,), Budget(3, 1000), PLANNER)
PIECES = [
    "1",
    "(",
    "[",
    "{",
    " ",
    "\n",
    "#",
    "# #a ",
    "`",
    "```\n",
    "```json  ",
    "<think>",
    "</think>",
    "\x1b[0;",
    "\x1b",
]
PIECES += [
    "Tool: ",
    "Context:\n",
    "verdict\n",
    "verdict ",
    "stop ",
    '{"a":',
    '\\"',
    "\ud800",
    "\U000e0041",
    "one a ",
    "echo(a) ",
]


def _called(tools, words):
    tools.do(Call("tool", "calculator", {"expression": words}))
    tools.do(Call("tool", words, {}))


def _answered(words):
    body = words.encode("utf-8", "replace")
    failure_message(body)
    with pytest.raises(RemoteFailure):
        completion_of(body, TextRequest(prompt="x"))


def _cut(folder, words):
    (folder / "a.md").write_text(f"a\n\n# {words}x", "utf-8", "replace")
    passages_of(read_corpus(folder), 100, 20)


def _remembered(words):
    record = MemoryRecord(1, words, "echo", words, words, stop=True, reason=words)
    render(Memory((record, record)), budget=300, count=len)


def readers(folder, tools):
    text = agent_text()
    return {
        "roles": lambda words: [
            parse(STATE, words)
            for parse in (parse_lines, parse_call, parse_tool_call, parse_arguments, parse_verdict, parse_words)
        ],
        "arguments": partial(arguments_of, ECHO),
        "schema": lambda words: check_arguments(ECHO, {words: words}),
        "memory": _remembered,
        "tokens": lambda words: Frame(text, 0).count(valid(words[:10_000])),
        "judge": lambda words: shorten_quote(text, words, 512),
        "observation": lambda words: [observation(words, 4000), observation([words], 4000), clean_observation(words)],
        "tools": partial(_called, tools),
        "program": take_off_fences,
        "query": words_of_query,
        "corpus": partial(_cut, folder),
        "endpoint": _answered,
        "retry": retry_after,
        "stop": lambda words: find_stop(
            [*range(len(words))], len(words) - 16, ["stop!"], lambda ids: words[: len(ids)]
        ),
        "viewer": as_script,
    }


def test_R2_long_words_take_linear_time_on_the_host(tmp_path):
    with toolset([calculator()]) as tools:
        for name, read in readers(tmp_path, tools).items():
            for piece in PIECES:
                words = (piece * SIZE)[:SIZE]
                with deadline(DEADLINE, name, piece):
                    read(words)


def test_R2_alternatives_that_lead_back_to_themselves_are_tried_once_a_level():
    lists = [{"type": "array", "items": {"$ref": "#/$defs/tree"}, "minItems": least} for least in (0, 1)]
    tree = {"anyOf": [{"type": "string"}, *lists]}
    parameters = {"type": "object", "properties": {"a": {"$ref": "#/$defs/tree"}}, "$defs": {"tree": tree}}
    value = 1
    for _ in range(18):  # a level doubles the time of trying all, to 40 s
        value = [value]
    with deadline(DEADLINE):
        wrong = check_arguments({"name": "x", "parameters": parameters}, {"a": value})
    assert wrong == f'x: argument "a"{"[0]" * 18} must be a string or a list, not 1'
