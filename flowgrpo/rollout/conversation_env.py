"""An environment of text as a host environment: its observations are messages of a conversation with the model.

    env = conversation_env(tokenizer, turns=20, max_tokens=16, context_tokens=1024)
    hosted(env, engine.submit, call_tool=process.call_tool)(tasks, keys, groups)

Who has the environment answers effects of kind "env": an `EnvProcess` for those of other libraries, a `TextEnvRunner`
for a `TextEnv` in this process. Results are JSON, so that a trajectory can be replayed without the environment (A2),
and an episode that is gone, with the process that had it, is restored by repeating its calls (S1):

    {"ask": "reset", "with": {"seed", "task"}}, {"ask": "step", "with": {"action"}},
    {"ask": "call", "with": {"name", "arguments"}}, {"ask": "end"}    -> {"said", "tools", "reward", "done", "error"}
    {"again": [...]}                                                 all calls of an episode that is gone

An action with tool calls is answered by their results. Without a call it is a step; but if an environment of another
library has tools, the episode ends with it. A `TextEnv` also returns "output", "correct" and "reason" when it is done.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import NamedTuple

import jax
import numpy as np

from flowgrpo.contracts import Call, HostEnv, HostObservation, HostStep, RewardResult, ToolRunner
from flowgrpo.data.chat import EMPTY, Chat, make_chat, read_action
from flowgrpo.data.tokenizer import ChatTokenizer, Conversation, clean
from flowgrpo.data.tool_calls import (
    Malformed,
    Schema,
    ToolCall,
    ToolCallFormat,
    describe_tool,
    parse_code_call,
    parse_tool_calls,
    to_openai,
)
from flowgrpo.rollout.judging import is_solved
from flowgrpo.types import JSON, BadInput, Status, Task

CALL_INSTRUCTIONS = """To call a tool, write the call alone as your message: name("text"), or
name({"argument": value, ...}) for other arguments than one text. Its result comes back to you. The tools are:"""


@dataclass(frozen=True)
class ConversationState:
    """State of an episode: its conversation, and all calls to the environment so far."""

    seed: tuple[int, ...]
    conversation: Conversation = EMPTY
    calls: tuple[Mapping[str, JSON], ...] = ()
    tools: tuple[Mapping[str, JSON], ...] = ()
    total_reward: float = 0.0
    turns: int = 0
    anchor: int = 0


def conversation_env(
    tokenizer: ChatTokenizer,
    *,
    turns: int,
    max_tokens: int,
    context_tokens: int,
    instructions: str = "",
    tools: Sequence[str] = (),
    schemas: Sequence[Schema] = (),
    name: str = "env",
    call_format: ToolCallFormat | None = None,
    is_text_env: bool = False,
) -> HostEnv:
    """The environment behind effects of kind "env".

    Args:
        tokenizer: with the chat template.
        turns: maximal number of actions.
        max_tokens: of an action.
        context_tokens: of a conversation with all its actions.
        instructions: stand before the query and the first observation.
        tools: names of the tools whose calls are counted; `EnvProcess.check` returns all of them.
        schemas: of the tools, unless the environment returns them at its reset.
        name: for messages and metrics.
        call_format: of tool calls; None: the one that the chat template teaches.
        is_text_env: whether a `TextEnvRunner` answers.
    """
    chat = make_chat(
        name,
        tokenizer,
        turns=turns,
        max_tokens=max_tokens,
        context_tokens=context_tokens,
        call_format=call_format,
    )
    env = ConversationEnv(chat, instructions, tuple(tools), tuple(schemas), name, turns, is_text_env)
    return HostEnv(
        name=name,
        tools=tuple(tools),
        max_turns=turns,
        max_tokens=max_tokens,
        stop_ids=tokenizer.stop_ids,
        reset=env.reset,
        step=env.step,
        anchor=(lambda state: state.anchor) if is_text_env else (lambda state: len(state.calls)),
    )


def task_fields(task: Task) -> dict[str, JSON]:
    """The fields of a task that a `TextEnv` gets; those of its own line come first."""
    fields = {"id": task.id, "query": task.query, "answers": list(task.answers), "domain": task.domain}
    return fields | dict(task.metadata)


class ConversationEnv(NamedTuple):
    """`reset` and `step` of the environment, with its settings."""

    chat: Chat
    instructions: str
    tools: tuple[str, ...]
    schemas: tuple[Schema, ...]
    name: str
    turns: int
    is_text_env: bool

    def reset(self, key: jax.Array, task: Task, call_tool: ToolRunner) -> tuple[ConversationState, HostObservation]:
        """Start an episode on a task.

        Environments of other libraries get the seed and the fields in the metadata, and the query precedes what they
        observe; a `TextEnv` gets all fields, and decides what is shown.
        """
        state = ConversationState(tuple(np.asarray(jax.random.key_data(key)).tolist()))
        fields = dict(task.metadata)
        seed = fields.get("seed", 0)
        if self.is_text_env:
            fields = task_fields(task)
        else:
            fields.pop("seed", None)
        result, failure, state = self._call_env(
            call_tool, state, {"ask": "reset", "with": {"seed": seed, "task": fields}}
        )
        if failure:  # the failed effect ends the trajectory, so that this observation is never answered
            return state, HostObservation((self.chat.tokenizer.pad_id,))
        tools = tuple(result.get("tools") or ()) or tuple(
            {"type": "function", "function": schema} for schema in self.schemas
        )
        parts = [self.instructions, self._describe_tools(tools)]
        parts += ["" if self.is_text_env else clean(task.query), clean(result.get("said") or "")]
        messages = [{"role": "user", "content": "\n\n".join(filter(None, parts))}]
        conversation = self.chat.begin(messages, tools if self.chat.call_format else ())
        state = replace(state, conversation=conversation, tools=tools)
        if self.is_text_env and self.chat.is_full(conversation):
            raise BadInput(
                f"{self.name}: the first observation of task {task.id!r} has {len(conversation.tokens)} tokens, and "
                f"context_tokens={self.chat.context_tokens} holds no action after it: raise context_tokens"
            )
        return self._observe(state, conversation.tokens)

    def step(
        self, state: ConversationState, tokens: Sequence[int], call_tool: ToolRunner
    ) -> tuple[ConversationState, HostStep]:
        """The next observation, or the end: a step of the environment, or the tool calls of an action."""
        conversation = state.conversation.extend(tuple(map(int, tokens)), chosen=True)
        state = replace(state, conversation=conversation, turns=state.turns + 1)
        words, is_complete = read_action(self.chat.tokenizer, tokens)
        action_error = self.is_text_env and (not is_complete or not words.strip())
        calls = self._read_calls(state, words)
        if isinstance(calls, Malformed):
            messages = [{"role": "user", "content": f"Error: {calls.reason}"}]
            return self._continue(state, {"error": True}, messages, words, call_tool)
        if calls:
            return self._call_tools(state, calls, words, call_tool)
        ends = bool(state.tools) and not self.is_text_env
        call = {"ask": "end"} if ends else {"ask": "step", "with": {"action": words}}
        result, failure, state = self._call_env(call_tool, state, call)
        if failure:
            return state, HostStep(None, True, status=Status.TOOL_FAILURE, reason=failure)
        if ends:
            result = {**result, "done": True, "error": not is_complete}
        if result.get("done"):
            status = Status.TOKEN_LIMIT if self.is_text_env and not is_complete else Status.FINISHED
            return self._end(state, result, words, status, action_error)
        messages = [{"role": "user", "content": clean(result.get("said") or "")}]
        result = {**result, "error": bool(result.get("error")) or action_error}
        return self._continue(state, result, messages, words, call_tool)

    def _describe_tools(self, tools: Sequence[Mapping[str, JSON]]) -> str:
        """The tools in words, for a template that has no place for them."""
        if not tools or self.chat.call_format is not None:
            return ""
        if not self.is_text_env:
            source = self.chat.tokenizer.source
            raise BadInput(f"the chat template of {source} has no place for tools, and {self.name} has some")
        return "\n".join([CALL_INSTRUCTIONS, *(describe_tool(tool["function"]) for tool in tools)])

    def _read_calls(self, state: ConversationState, words: str) -> tuple[ToolCall, ...] | Malformed:
        """The tool calls of an action."""
        if not state.tools:
            return ()
        if self.chat.call_format is None:
            return parse_code_call(words, [tool["function"] for tool in state.tools])
        parsed = parse_tool_calls(words, self.chat.call_format)
        return Malformed("the tool call can't be read") if parsed.is_malformed else parsed.calls

    def _call_tools(
        self, state: ConversationState, calls: Sequence[ToolCall], words: str, call_tool: ToolRunner
    ) -> tuple[ConversationState, HostStep]:
        """Call the tools of an action one after the other; their results are its answer."""
        messages, error = [], False
        for i, call in enumerate(calls):
            arguments = {"name": call.name, "arguments": dict(call.arguments)}
            result, failure, state = self._call_env(call_tool, state, {"ask": "call", "with": arguments})
            if failure:
                return state, HostStep(None, True, status=Status.TOOL_FAILURE, reason=failure)
            call_id = to_openai(call, f"call{len(state.calls) % 1000:03d}{i % 100:02d}")["id"]
            role = {"role": "user"} if self.chat.call_format is None else {"role": "tool", "tool_call_id": call_id}
            messages.append({**role, "content": clean(result.get("said") or "")})
            error = error or bool(result.get("error"))
        state, step = self._continue(state, {"error": error}, messages, words, call_tool)
        first_tool = calls[0].name
        return state, step._replace(tool=first_tool if first_tool in self.tools else "")

    def _continue(
        self,
        state: ConversationState,
        result: Mapping[str, JSON],
        messages: Sequence[Mapping[str, JSON]],
        words: str,
        call_tool: ToolRunner,
    ) -> tuple[ConversationState, HostStep]:
        """The step whose observation is messages; the end, if they leave no room for an action."""
        reward, error = result.get("reward"), bool(result.get("error"))
        ids = self.chat.add(state.conversation, messages)
        state = replace(state, conversation=state.conversation.extend(ids, chosen=False))
        is_full = self.chat.is_full(state.conversation)
        if self.is_text_env and (is_full or state.turns >= self.turns):  # its instance is not needed any more
            _, failure, state = self._call_env(call_tool, state, {"ask": "end"})
            if failure:
                return state, HostStep(None, True, status=Status.TOOL_FAILURE, reason=failure)
        if is_full:
            size, room = len(state.conversation.tokens), self.chat.context_tokens
            reason = f"the conversation has {size} tokens, and there is room for {room}"
            state, step = self._end(state, {**result, "reason": reason}, words, Status.TOKEN_LIMIT, error)
            return state, step._replace(output=None) if self.is_text_env else step
        state = replace(state, total_reward=state.total_reward + (reward or 0.0))
        state, observation = self._observe(state, ids)
        return state, HostStep(observation, False, reward=reward, error=error)

    def _end(
        self, state: ConversationState, result: Mapping[str, JSON], words: str, status: Status, action_error: bool
    ) -> tuple[ConversationState, HostStep]:
        """The last step; the output is the action, unless the environment returned another."""
        reward = result.get("reward")
        state = replace(state, total_reward=state.total_reward + (reward or 0.0))
        correct = result.get("correct")
        step = HostStep(
            None,
            True,
            reward=reward,
            error=bool(result.get("error")) or action_error,
            correct=is_solved(RewardResult(state.total_reward)) if correct is None else correct,
            output=clean(result.get("output", words)),
            status=status,
            reason=clean(result.get("reason", "")),
            is_judged=self.is_text_env and reward is not None,
        )
        return state, step

    def _observe(self, state: ConversationState, ids: Sequence[int]) -> tuple[ConversationState, HostObservation]:
        """The observation of ids that the conversation ends with; the action gets what is left of the context."""
        if self.is_text_env:
            digest = blake2b(np.array(ids, np.int32).tobytes(), digest_size=6).digest()
            state = replace(state, anchor=int.from_bytes(digest))
        return state, HostObservation(ids, max_tokens=max(self.chat.room(state.conversation), 1))

    def _call_env(
        self, call_tool: ToolRunner, state: ConversationState, call: Mapping[str, JSON]
    ) -> tuple[Mapping[str, JSON], str, ConversationState]:
        """Call the environment -> (its result, why there is none, the state with this call).

        An episode that is gone, because its process was killed, is restored by repeating all its calls.
        """
        state = replace(state, calls=(*state.calls, call))
        answer = call_tool(Call("env", self.name, {**call, "number": len(state.calls)}, state.seed))
        result = json.loads(answer.text) if answer.text else {}
        if result.get("gone") and not answer.failure:
            answer = call_tool(Call("env", self.name, {"again": list(state.calls)}, state.seed))
            result = json.loads(answer.text) if answer.text else {}
        return result, answer.failure, state
