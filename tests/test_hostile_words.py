"""Time to parse long words on the host, where no deadline can stop a pattern or a loop: linear in their length (R2).

The rewards have a table of their own in `rewards/test_hostile_answers.py`.
"""

from functools import partial

import pytest
from agent_cases import ECHO, agent_text
from timing import deadline

from flowgrpo.agent.action_forms import parse_call, parse_lines, parse_tool_call
from flowgrpo.agent.rendering import PromptSettings
from flowgrpo.agent.roles import parse_arguments, parse_text, parse_verdict
from flowgrpo.agent.state import PLANNER, AgentState, Budget, Memory, MemoryRecord, render_memory
from flowgrpo.contracts import Call
from flowgrpo.data.tokenizer import clean as valid
from flowgrpo.data.tool_calls import to_arguments
from flowgrpo.generate.openai_wire import RemoteFailure, TextRequest, failure_message, parse_completion, retry_after
from flowgrpo.generate.requests import find_stop
from flowgrpo.report.trajectory_page import as_script
from flowgrpo.rewards.judge import shorten_quote
from flowgrpo.tools.calculator import calculator
from flowgrpo.tools.python import strip_fences
from flowgrpo.tools.schema import check_arguments
from flowgrpo.tools.search import read_corpus, split_passages, split_words
from flowgrpo.tools.toolset import clean_observation, format_observation, toolset

SIZE = 60_000  # characters
DEADLINE = 1.0  # processor seconds; 0.03 are ample, and quadratic time takes 10 or more
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


def _call_tools(tools, words):
    tools.call_tool(Call("tool", "calculator", {"expression": words}))
    tools.call_tool(Call("tool", words, {}))


def _read_response(words):
    body = words.encode("utf-8", "replace")
    failure_message(body)
    with pytest.raises(RemoteFailure):
        parse_completion(body, TextRequest(prompt="x"))


def _cut_corpus(folder, words):
    (folder / "a.md").write_text(f"a\n\n# {words}x", "utf-8", "replace")
    split_passages(read_corpus(folder), 100, 20)


def _render_memory(words):
    record = MemoryRecord(1, words, "echo", words, words, stop=True, reason=words)
    render_memory(Memory((record, record)), budget=300, count=len)


def readers(folder, tools):
    text = agent_text()
    return {
        "roles": lambda words: [
            parse(STATE, words)
            for parse in (parse_lines, parse_call, parse_tool_call, parse_arguments, parse_verdict, parse_text)
        ],
        "arguments": partial(to_arguments, ECHO),
        "schema": lambda words: check_arguments(ECHO, {words: words}),
        "memory": _render_memory,
        "tokens": lambda words: PromptSettings(text, 0).count(valid(words[:10_000])),
        "judge": lambda words: shorten_quote(text, words, 512),
        "observation": lambda words: [
            format_observation(words, 4000),
            format_observation([words], 4000),
            clean_observation(words),
        ],
        "tools": partial(_call_tools, tools),
        "program": strip_fences,
        "query": split_words,
        "corpus": partial(_cut_corpus, folder),
        "endpoint": _read_response,
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


def test_R2_recursive_alternatives_are_tried_once_per_level():
    lists = [{"type": "array", "items": {"$ref": "#/$defs/tree"}, "minItems": count} for count in (0, 1)]
    tree = {"anyOf": [{"type": "string"}, *lists]}
    parameters = {"type": "object", "properties": {"a": {"$ref": "#/$defs/tree"}}, "$defs": {"tree": tree}}
    value = 1
    for _ in range(18):  # each level would double the time of trying all, to 40 s
        value = [value]
    with deadline(DEADLINE):
        problem = check_arguments({"name": "x", "parameters": parameters}, {"a": value})
    assert problem == f'x: argument "a"{"[0]" * 18} must be a string or a list, not 1'
