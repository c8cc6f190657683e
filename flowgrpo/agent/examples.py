"""Worked examples for a planner's prompt: tasks that are solved with the real tools, as messages of a conversation.

    user       Question: Ben has 120 pens and buys 35 more. How many has he?
    assistant  calculator(120 + 35)
    user       155
    assistant  answer(155)

A task says how it is solved: `metadata["steps"]`, pairs of a tool and what it is given, and `metadata["final"]`, the
answer. What the tools say is what they say now, so an example shows exactly what a turn of the planner will look like.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from flowgrpo.agent.action_forms import ActionForm
from flowgrpo.agent.rendering import Frame, appending
from flowgrpo.agent.roles import planner, planner_question
from flowgrpo.agent.state import ANSWER, Memory, render
from flowgrpo.agent.system import agent_system
from flowgrpo.agent.tool_arguments import ANSWER_SCHEMA, Schema
from flowgrpo.contracts import Do
from flowgrpo.data.tokenizer import Text, as_json, guard
from flowgrpo.types import BadInput, Task

ROOM = 1 << 20  # tokens: examples are measured against a context where they are used


def scripted_actions(task: Task, form: ActionForm, schemas: Sequence[Schema]) -> list[str]:
    """The actions with which a task says that it is solved, in the words of a form; the last one is the answer."""
    steps, final = task.metadata.get("steps"), task.metadata.get("final")
    by_name: dict[str, Mapping[str, Any]] = {schema["name"]: schema for schema in (*schemas, ANSWER_SCHEMA)}
    if not isinstance(steps, Sequence) or isinstance(steps, str) or final is None:
        raise BadInput(
            f"task {task.id!r} doesn't say how it is solved: give it the fields steps, a list of [tool, text], and "
            "final, the answer"
        )
    actions = []
    for step in (*steps, (ANSWER, str(final))):
        pair = isinstance(step, Sequence) and not isinstance(step, str) and len(step) == 2
        if not pair or not isinstance(step[0], str) or step[0] not in by_name:
            known = ", ".join(by_name)
            raise BadInput(f"task {task.id!r} has the step {step!r:.80}: give [tool, text], with a tool of {known}")
        context = step[1] if isinstance(step[1], str) else as_json(step[1])
        actions.append(form.write(by_name[step[0]], context))
    return actions


def worked_examples(
    text: Text, form: ActionForm, tasks: Sequence[Task], do: Do, *, schemas: Sequence[Schema], memory_tokens: int
) -> tuple[Mapping[str, str], ...]:
    """The messages of these tasks, each played to its end by its own steps.

    `BadInput` for a step that is refused, or an answer that isn't among those of the task: examples must be right.
    """
    role, frame = planner(form=form), Frame(guard(text), memory_tokens)
    scripts = [scripted_actions(task, form, schemas) for task in tasks]
    env = agent_system(
        text,
        schemas=schemas,
        planner=role,
        rendering=appending,
        turns=max(map(len, scripts), default=1),
        max_tokens=ROOM,
        context_tokens=2 * ROOM,
        memory_tokens=memory_tokens,
    )
    messages = []
    for number, (task, script) in enumerate(zip(tasks, scripts, strict=True)):
        state, _ = env.reset(number, task, do)
        messages += planner_question(form, state)
        for words in script:
            messages.append({"role": "assistant", "content": words})
            state, step = env.step(state, (*text.encode(words), text.stop_ids[0]), do)
            if state.error:
                why = state.memory.records[-1].observation
                raise BadInput(f"the example {task.id!r} is refused at {words!r:.200}: {why:.200}")
            if not step.done:
                newest = Memory(state.memory.records[-1:])
                seen = render(newest, budget=memory_tokens, count=frame.count, write_record=role.line)
                messages += role.follow(state, seen)
        if state.turn < len(script):
            why = state.reason or "it answers before its last step"
            raise BadInput(f"the example {task.id!r} ends at {script[state.turn - 1]!r:.200}: {why:.200}")
        if task.answers and state.output not in task.answers:
            raise BadInput(
                f"the example {task.id!r} answers {state.output!r:.80}, but its answer is {task.answers[0]!r:.80}: "
                "correct final or answers"
            )
    return tuple(messages)
