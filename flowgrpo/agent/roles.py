"""Ask the roles of an agent system, and read what they say: `planner()`, `executor()`, `verifier()`, `generator()`, …

    Role: (state, memory as text) -> messages;  (state, words) -> the next value, or Malformed(reason)
    ScriptedRole: state -> the next value, as plain code

Values: the analyst's and the generator's are text; the planner's a `PlannerChoice`; the executor's the arguments; the
verifier's a `Verdict`. A `Role` is spoken by the policy where it is trained, and else by whoever answers its
`Call("role", ...)`.

The words of a query, a model or a tool stand in every prompt as data: lines that begin with "> ", or JSON within a
line. So nothing in it passes for a field of ours, and two states that differ are never shown alike. A prompt is one
message of the user, which every chat template can render; worked examples of a planner stand before it as a talk. A
form that talks gives up some of that for few tokens: a question after examples, and what a tool said, stand bare, each
in a message of its own, so a tool may say "error: " itself, but not end its message.
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from flowgrpo.agent.action_forms import DATA, LINES, ActionForm, spoken
from flowgrpo.agent.state import (
    ANALYST,
    ANSWER,
    EXECUTOR,
    GENERATOR,
    PLANNER,
    VERIFIER,
    AgentState,
    Line,
    Malformed,
    Verdict,
    record_line,
)
from flowgrpo.agent.tool_arguments import ANSWER_SCHEMA, Schema, arguments_of, describe_tool, read_object
from flowgrpo.data.tokenizer import Messages, as_json, quote

VERDICT = re.compile(r"^[^\w\n]*(?:(?:conclusion|verdict)\W+)?(stop|continue)\b\W*", re.IGNORECASE | re.MULTILINE)
FENCED = re.compile(r"```(?:json)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)
EXECUTE = f"""You write the arguments of a tool. Reply with one JSON object of its arguments and with nothing else.
{DATA}"""
VERIFY = f"""You decide whether what was found out so far is enough to answer a question, and whether it is consistent.
Reply with STOP where it is, and with CONTINUE where something is missing or wrong; then give the reason in one line.
{DATA}"""
GENERATE = f"""You answer a question from what was found out. Reply with the answer alone, as plain text.
{DATA}"""
ANALYZE = f"""You prepare the work on a question. Say in a few lines what it asks for, what has to be found out, and
which of the tools can help. Don't answer it.
{DATA}"""
Prompt = Callable[[AgentState, str], Messages]  # (state, memory as text) -> messages


class Role(NamedTuple):
    """A part that a language model speaks. `follow` is what is appended to a conversation that has the prompt."""

    name: str
    prompt: Prompt  # (state, memory as text) -> messages
    parse: Callable[[AgentState, str], Any]  # (state, words) -> value or Malformed
    follow: Prompt  # (state, new records as text) -> messages
    line: Line = record_line  # a record as a line of that text


class ScriptedRole(NamedTuple):
    """A part that plain code plays."""

    name: str
    act: Callable[[AgentState], Any]  # state -> value or Malformed


# Spoken roles -----------------------------------------------------------------------------------------


def planner(
    *,
    form: ActionForm = LINES,
    instructions: str | None = None,
    describe: Callable[[Schema], str] = describe_tool,
    examples: Messages = (),
) -> Role:
    """Chooses a tool and what it is given, in a form of `action_forms`.

    Args:
        form: how an action is written and read.
        instructions: what the prompt begins with; by default those of the form.
        describe: a tool as a line of the prompt; `signature` and short instructions suit a tiny model.
        examples: messages of worked examples, a user's first, before the question (`examples.worked_examples`).
    """
    begins = form.instructions if instructions is None else instructions

    def prompt(state: AgentState, seen: str) -> Messages:
        tools = "Tools:\n" + "\n".join(describe(schema) for schema in (*state.schemas, ANSWER_SCHEMA))
        if not examples:
            asked = (_data("Question", state.query), _analysis(state))
            return _ask(begins, *asked, tools, _done(seen), _turns_left(form, state))
        first, *later = [*examples, *planner_question(form, state, seen)]
        return [*_ask(begins, tools, first["content"]), *later]  # instructions come once, before the first example

    def follow(state: AgentState, seen: str) -> Messages:
        return _ask(seen, _turns_left(form, state))

    return Role(PLANNER, prompt, form.parse, follow, form.line)


def planner_question(form: ActionForm, state: AgentState, seen: str = "") -> Messages:
    """The message of a planner's first turn without instructions and tools: a worked example begins with it."""
    asked = state.query if form.talks else _data("Question", state.query)
    return _ask(asked, _analysis(state), _done(seen), _turns_left(form, state))


def _turns_left(form: ActionForm, state: AgentState) -> str:
    return "" if form.talks else f"Turns left: {state.budget.turns}"


def executor(*, instructions: str = EXECUTE) -> Role:
    """Writes the arguments of the tool that the planner chose, as a JSON object."""

    def prompt(state: AgentState, seen: str) -> Messages:
        return _ask(instructions, _data("Question", state.query), _done(seen), _planned(state), "Arguments:")

    def follow(state: AgentState, seen: str) -> Messages:
        return _ask(seen, _planned(state), "Arguments:")

    return Role(EXECUTOR, prompt, parse_arguments, follow)


def verifier(*, instructions: str = VERIFY) -> Role:
    """Says STOP or CONTINUE, and why."""
    return Role(VERIFIER, _report(instructions, "STOP or CONTINUE?"), parse_verdict, _what_is_new)


def generator(*, instructions: str = GENERATE) -> Role:
    """Writes the answer."""
    return Role(GENERATOR, _report(instructions, "Answer:"), parse_words, _what_is_new)


def analyst(*, instructions: str = ANALYZE, describe: Callable[[Schema], str] = describe_tool) -> Role:
    """Looks at the query before the planner does."""

    def prompt(state: AgentState, _seen: str) -> Messages:
        tools = "\n".join(describe(schema) for schema in state.schemas)
        return _ask(instructions, _data("Question", state.query), f"Tools:\n{tools}" if tools else "")

    return Role(ANALYST, prompt, parse_words, _what_is_new)


def _report(instructions: str, invitation: str) -> Prompt:
    """A prompt that shows all that was found out."""

    def prompt(state: AgentState, seen: str) -> Messages:
        asked = _data("Question", state.query)
        own = _own_answer(state)
        proposed = "" if own is None else _data("Proposed answer", own)
        return _ask(instructions, asked, _analysis(state), _done(seen), proposed, invitation)

    return prompt


def _what_is_new(_state: AgentState, seen: str) -> Messages:
    return _ask(seen or "Go on.")


def _planned(state: AgentState) -> str:
    """The tool that was chosen, with its schema, and what for."""
    if state.plan is None:
        return ""
    chosen = next(schema for schema in state.schemas if schema["name"] == state.plan.tool)
    fields = [f"Tool: {describe_tool(chosen)}", f"Parameters: {as_json(chosen.get('parameters', {}))}"]
    fields += [_data("Sub-goal", state.plan.sub_goal)] * bool(state.plan.sub_goal)
    return "\n".join([*fields, _data("Context", state.plan.context)])


def _data(name: str, words: str) -> str:
    """A field of what somebody said, for as many lines as it has."""
    return f"{name}:\n{quote(words)}"


def _analysis(state: AgentState) -> str:
    return _data("Analysis", state.analysis) if state.analysis else ""


def _done(seen: str) -> str:
    return f"Done:\n{seen}" if seen else ""


def _own_answer(state: AgentState) -> str | None:
    """The planner's own answer, where it gave one."""
    return state.plan.context if state.plan is not None and state.plan.tool == ANSWER else None


def _ask(*parts: str) -> Messages:
    return [{"role": "user", "content": "\n".join(part for part in parts if part)}]


# What they say ----------------------------------------------------------------------------------------


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


# Plain code in their place ----------------------------------------------------------------------------


def _call_as_planned(state: AgentState) -> dict[str, Any] | Malformed:
    """The arguments that the planner wrote as its context."""
    if state.plan is None:
        return Malformed("nothing is planned")
    chosen = next(schema for schema in state.schemas if schema["name"] == state.plan.tool)
    return arguments_of(chosen, state.plan.context)


rule_executor = ScriptedRole(EXECUTOR, _call_as_planned)
# STOP where the planner chose `answer`, which is then said again; at the limit of turns the system itself stops.
rule_verifier = ScriptedRole(VERIFIER, lambda state: Verdict(_own_answer(state) is not None))
rule_generator = ScriptedRole(GENERATOR, lambda state: _own_answer(state) or "")
