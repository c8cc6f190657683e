"""From a role's words to a value: text flows in; a plan, arguments, a verdict or `Malformed` with the reason flow out.

    Sub-goal: one line, may be left out
    Tool: name
    Context: the rest of the text, over several lines where needed

Case and spaces don't matter, nor what stands before these lines; that there is one tool, and one that exists, does.
What a model thinks between <think> and </think> is no part of what it says.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from flowgrpo.agent.state import ANSWER, AgentState, Malformed, Plan, Verdict
from flowgrpo.text import clean

HEADER = re.compile(r"[ \t]*(sub[-_ ]?goal|tool|context)[ \t]*:[ \t]*(.*)", re.IGNORECASE)
VERDICT = re.compile(r"^[^\w\n]*(?:(?:conclusion|verdict)\W+)?(stop|continue)\b\W*", re.IGNORECASE | re.MULTILINE)
FENCED = re.compile(r"```(?:json)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)


def parse_plan(state: AgentState, text: str) -> Plan | Malformed:
    """The planner's choice."""
    lines, found = spoken(text).replace("\r\n", "\n").split("\n"), {}
    if not "".join(lines).strip():
        return Malformed("the action is empty")
    for i, line in enumerate(lines):
        if (header := HEADER.fullmatch(line)) is None:
            continue
        name = header[1][0].lower()
        if name in found:
            return Malformed(f"{header[1]} is there twice")
        found[name] = header[2].strip()
        if name == "c":
            found[name] = "\n".join([header[2]] * bool(header[2]) + lines[i + 1 :]).strip("\n").rstrip()
            break
    if not found.get("t"):
        return Malformed('there is no line "Tool: name"')
    names = {name.casefold(): name for name in (*(schema["name"] for schema in state.schemas), ANSWER)}
    tool = names.get(found["t"].casefold())
    if tool is None:
        return Malformed(f"there is no tool {found['t']!r:.60}; choose one of {', '.join(names.values())}")
    if tool == ANSWER and not found.get("c", "").strip():
        return Malformed("the answer is empty")
    return Plan(found.get("s", ""), tool, found.get("c", ""))


def parse_arguments(_state: AgentState, text: str) -> dict[str, Any] | Malformed:
    """The executor's arguments: one JSON object, alone, between fences, or with words around it."""
    said = spoken(text).strip()
    fenced = FENCED.search(said)
    between = said[said.find("{") : said.rfind("}") + 1]
    for candidate in (said, fenced[1] if fenced else "", between):
        if (found := read_object(candidate)) is not None:
            return found
    return Malformed("the arguments are no JSON object")


def parse_verdict(_state: AgentState, text: str) -> Verdict | Malformed:
    """The verifier's STOP or CONTINUE at the beginning of a line, and its reason."""
    said = spoken(text)
    found = list(VERDICT.finditer(said))
    if len({match[1].lower() for match in found}) != 1:
        return Malformed("no line begins with STOP or CONTINUE" if not found else "both STOP and CONTINUE are said")
    after, before = said[found[-1].end() :], said[: found[0].start()]
    return Verdict(found[0][1].lower() == "stop", " ".join((after.strip() or before).split()))


def parse_words(_state: AgentState, text: str) -> str | Malformed:
    """Parse the words of an analyst or a generator: the text after the thoughts, without outer white space."""
    return spoken(text).strip() or Malformed("nothing was said")


def spoken(text: str) -> str:
    """Extract the text after the thoughts; "" where the thoughts have no end."""
    _, closed, said = text.rpartition("</think>")
    return "" if "<think>" in said else said if closed else text


# Arguments --------------------------------------------------------------------------------------------


def arguments_of(schema: Mapping[str, Any], context: str) -> dict[str, Any] | Malformed:
    """The planner's context as arguments of a tool: a JSON object, or plain text where the tool takes one text."""
    if (found := read_object(context)) is not None:
        return found
    kinds, required = parameters_of(schema)
    if not context.strip() and not required:
        return {}
    names = required or list(kinds)
    if len(names) == 1 and "string" in kinds.get(names[0], ()):
        return {names[0]: context} if context.strip() else Malformed(f"the context is empty; {names[0]} is needed")
    return Malformed(f"the context must be a JSON object of {', '.join(kinds) or 'no arguments'}")


def read_object(text: str) -> dict[str, Any] | None:
    """The JSON object that `text` is, or None."""
    try:
        found = json.loads(text, parse_constant=_refuse)
        return _cleaned(found, allow_nan=False) if isinstance(found, dict) else None
    except (ValueError, RecursionError):
        return None


def command_of(arguments: Mapping[str, Any]) -> str | dict[str, Any]:
    """Arguments as they are remembered: the one text that is given, or a copy of them all."""
    given = _cleaned(dict(arguments))
    (value, *more) = given.values() or [None]
    return value if isinstance(value, str) and not more else given


def _cleaned(arguments: dict[str, Any], *, allow_nan: bool = True) -> dict[str, Any]:
    """Copy arguments with valid Unicode only."""
    return json.loads(clean(json.dumps(arguments, ensure_ascii=False, allow_nan=allow_nan)))


def parameters_of(schema: Mapping[str, Any]) -> tuple[dict[str, list[str]], list[str]]:
    """The types of each parameter of a tool, and the names of those that it requires."""
    parameters = schema.get("parameters") or {}
    kinds = {}
    for name, what in (parameters.get("properties") or {}).items():
        kind = what.get("type", []) if isinstance(what, Mapping) else []  # JSON Schema also knows `true`
        kinds[name] = [kind] if isinstance(kind, str) else list(kind)
    return kinds, list(parameters.get("required") or ())


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
