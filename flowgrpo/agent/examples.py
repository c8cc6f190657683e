"""Worked examples for a planner's prompt: tasks that are solved with the real tools, as messages of a conversation.

    user       Question: Ben has 120 pens and buys 35 more. How many has he?
    assistant  calculator(120 + 35)
    user       155
    assistant  answer(155)

A task has its solution in its metadata: `steps`, pairs of a tool and its context, and `final`, the answer. The tools
are called, so an example shows exactly what a turn of the planner will look like.
"""

from collections.abc import Mapping, Sequence

from flowgrpo.agent.action_forms import ActionForm
from flowgrpo.agent.rendering import PromptSettings, growing_context
from flowgrpo.agent.roles import planner, planner_question
from flowgrpo.agent.state import ANSWER, ANSWER_SCHEMA, Memory, render_memory
from flowgrpo.agent.system import AgentLimits, AgentRoles, agent_system
from flowgrpo.contracts import ToolRunner
from flowgrpo.data.tokenizer import ChatTokenizer, guard, to_json_line
from flowgrpo.data.tool_calls import Schema
from flowgrpo.types import BadInput, Task

NO_LIMIT = 1 << 20  # tokens: examples are measured against a context where they are used


def scripted_actions(task: Task, form: ActionForm, schemas: Sequence[Schema]) -> list[str]:
    """The actions of a task's own solution, written in a form; the last one is the answer."""
    steps, final = task.metadata.get("steps"), task.metadata.get("final")
    by_name: dict[str, Schema] = {schema["name"]: schema for schema in (*schemas, ANSWER_SCHEMA)}
    if not isinstance(steps, Sequence) or isinstance(steps, str) or final is None:
        raise BadInput(
            f"task {task.id!r} doesn't say how it is solved: give it the fields steps, a list of [tool, text], and "
            "final, the answer"
        )
    actions = []
    for step in (*steps, (ANSWER, str(final))):
        is_pair = isinstance(step, Sequence) and not isinstance(step, str) and len(step) == 2
        if not is_pair or not isinstance(step[0], str) or step[0] not in by_name:
            names = ", ".join(by_name)
            raise BadInput(f"task {task.id!r} has the step {step!r:.80}: give [tool, text], with a tool of {names}")
        context = step[1] if isinstance(step[1], str) else to_json_line(step[1])
        actions.append(form.write(by_name[step[0]], context))
    return actions


def worked_examples(
    tokenizer: ChatTokenizer,
    form: ActionForm,
    tasks: Sequence[Task],
    call_tool: ToolRunner,
    *,
    schemas: Sequence[Schema],
    memory_tokens: int,
) -> tuple[Mapping[str, str], ...]:
    """The messages of these tasks, each run to its end with the steps of its own solution.

    Raises `BadInput` for a step that is an error, or an answer that isn't among the task's: examples must be right.
    """
    role, settings = planner(form=form), PromptSettings(guard(tokenizer), memory_tokens)
    scripts = [scripted_actions(task, form, schemas) for task in tasks]
    env = agent_system(
        tokenizer,
        schemas=schemas,
        roles=AgentRoles(planner=role),
        limits=AgentLimits(
            turns=max(map(len, scripts), default=1),
            max_tokens=NO_LIMIT,
            context_tokens=2 * NO_LIMIT,
            memory_tokens=memory_tokens,
        ),
        rendering=growing_context,
    )
    messages = []
    for number, (task, script) in enumerate(zip(tasks, scripts, strict=True)):
        state, _ = env.reset(number, task, call_tool)
        messages += planner_question(form, state)
        for action in script:
            messages.append({"role": "assistant", "content": action})
            state, step = env.step(state, (*tokenizer.encode(action), tokenizer.stop_ids[0]), call_tool)
            if state.error:
                reason = state.memory.records[-1].observation
                raise BadInput(f"the example {task.id!r} is refused at {action!r:.200}: {reason:.200}")
            if not step.done:
                newest = Memory(state.memory.records[-1:])
                text = render_memory(newest, budget=memory_tokens, count=settings.count, write_record=role.write_record)
                messages += role.follow_up(state, text)
        if state.turn < len(script):
            reason = state.reason or "it answers before its last step"
            raise BadInput(f"the example {task.id!r} ends at {script[state.turn - 1]!r:.200}: {reason:.200}")
        if task.answers and state.output not in task.answers:
            raise BadInput(
                f"the example {task.id!r} answers {state.output!r:.80}, but its answer is {task.answers[0]!r:.80}: "
                "correct final or answers"
            )
    return tuple(messages)
