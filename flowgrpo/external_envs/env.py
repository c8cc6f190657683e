"""An external environment as a host environment: its observations are messages of a conversation with the model.

    with EnvProcess("gymnasium", "Taxi-v3") as process:
        env = external_env(text, turns=20, max_tokens=16, context_tokens=1024)
        hosted(env, engine.submit, call_tool=process.call_tool)(tasks, keys, groups)

If the environment has tools, an action with tool calls is answered by their results, and one without ends the episode;
else each action is a step. Effects are of kind "env", and results are JSON, so that a trajectory can be replayed
without the environment (A2), and an episode whose process was killed is restored by repeating its calls (S1):

    {"ask": "reset", "with": {"seed", "task"}}, {"ask": "step", "with": {"action"}},
    {"ask": "call", "with": {"name", "arguments"}}, {"ask": "end"}    -> {"said", "tools", "reward", "done", "error"}
    {"again": [...]}                                                 all calls of an episode that is gone
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import numpy as np

from flowgrpo.contracts import Call, HostEnv, HostObservation, HostStep, RewardResult, ToolRunner
from flowgrpo.data.tokenizer import (
    ChatTokenizer,
    Conversation,
    add_messages,
    clean,
    guard,
    start_conversation,
    tokenize_safely,
)
from flowgrpo.gateway.tool_calls import ToolCallFormat, parse_tool_calls, to_openai, tool_call_format
from flowgrpo.rollout.judging import is_solved
from flowgrpo.types import JSON, BadInput, Status, Task, check_range

EMPTY = Conversation((), ())


@dataclass(frozen=True)
class ExternalState:
    """State of an episode: its conversation, and all calls to the environment so far."""

    seed: tuple[int, ...]
    conversation: Conversation = EMPTY
    calls: tuple[Mapping[str, JSON], ...] = ()
    tools: tuple[Mapping[str, JSON], ...] = ()
    total_reward: float = 0.0


def external_env(
    tokenizer: ChatTokenizer,
    *,
    turns: int,
    max_tokens: int,
    context_tokens: int,
    instructions: str = "",
    tools: Sequence[str] = (),
    name: str = "env",
    call_format: ToolCallFormat | None = None,
) -> HostEnv:
    """The environment behind effects of kind "env", which an `EnvProcess` runs.

    Args:
        tokenizer: with the chat template.
        turns: maximal number of actions.
        max_tokens: of an action.
        context_tokens: of a conversation with all its actions.
        instructions: stand before the query and the first observation.
        tools: names of the tools whose calls are counted; `EnvProcess.check` returns all of them.
        name: for messages and metrics.
        call_format: of tool calls; None: the one that the chat template teaches.
    """
    for setting, value in (("turns", turns), ("max_tokens", max_tokens)):
        check_range("external_env", setting, value, 1, whole=True)
    if context_tokens <= max_tokens:
        raise BadInput(f"context_tokens={context_tokens} must be greater than max_tokens={max_tokens}, which it holds")
    call_format = call_format or tool_call_format(tokenizer.hf_tokenizer.chat_template)
    env = ExternalEnv(
        tokenizer, guard(tokenizer), call_format, max_tokens, context_tokens, instructions, tuple(tools), name
    )
    return HostEnv(
        name=name,
        tools=tuple(tools),
        max_turns=turns,
        max_tokens=max_tokens,
        stop_ids=tokenizer.stop_ids,
        reset=env.reset,
        step=env.step,
        anchor=lambda state: len(state.calls),
    )


class ExternalEnv(NamedTuple):
    """`reset` and `step` of the environment, with its settings."""

    tokenizer: ChatTokenizer
    guarded: ChatTokenizer
    call_format: ToolCallFormat | None
    max_tokens: int
    context_tokens: int
    instructions: str
    tools: tuple[str, ...]
    name: str

    def reset(self, key: jax.Array, task: Task, call_tool: ToolRunner) -> tuple[ExternalState, HostObservation]:
        """Start an episode by the seed and the fields in the task's metadata; the query precedes the observation."""
        state = ExternalState(tuple(np.asarray(jax.random.key_data(key)).tolist()))
        fields = dict(task.metadata)
        seed = fields.pop("seed", 0)
        reset = {"ask": "reset", "with": {"seed": seed, "task": fields}}
        result, failure, state = self._call_env(call_tool, state, reset)
        if failure:  # the failed effect ends the trajectory, so that this observation is never answered
            return state, HostObservation((self.tokenizer.pad_id,))
        tools = tuple(result.get("tools") or ())
        if tools and self.call_format is None:
            source = self.tokenizer.source
            raise BadInput(f"the chat template of {source} has no place for tools, and {self.name} has some")
        parts = [self.instructions, clean(task.query), clean(result.get("said") or "")]
        messages = [{"role": "user", "content": "\n\n".join(filter(None, parts))}]
        schemas = list(tools) or None
        ids = tokenize_safely(
            self.guarded, messages, lambda chat, written: start_conversation(chat, written, schemas).tokens
        )
        conversation = EMPTY.extend(ids, chosen=False)
        return replace(state, conversation=conversation, tools=tools), self._observation(ids, len(ids))

    def step(
        self, state: ExternalState, tokens: Sequence[int], call_tool: ToolRunner
    ) -> tuple[ExternalState, HostStep]:
        """A step, or the tool calls of an action; if there are tools, an action that calls none is the last one."""
        state = replace(state, conversation=state.conversation.extend(tuple(map(int, tokens)), chosen=True))
        words, is_complete = self.tokenizer.decode_action(tokens)
        words = clean(words)
        if not state.tools:
            result, failure, state = self._call_env(call_tool, state, {"ask": "step", "with": {"action": words}})
            messages = [{"role": "user", "content": clean(result.get("said") or "")}]
            return self._host_step(state, result, failure, messages, words)
        assert self.call_format is not None
        parsed = parse_tool_calls(words, self.call_format)
        if parsed.is_malformed:
            messages = [{"role": "user", "content": "Error: the tool call can't be read"}]
            return self._host_step(state, {"error": True}, "", messages, words)
        if not parsed.calls:
            result, failure, state = self._call_env(call_tool, state, {"ask": "end"})
            return self._host_step(state, {**result, "done": True, "error": not is_complete}, failure, [], words)
        messages, error = [], False
        for i, call in enumerate(parsed.calls):
            arguments = {"name": call.name, "arguments": dict(call.arguments)}
            result, failure, state = self._call_env(call_tool, state, {"ask": "call", "with": arguments})
            if failure:
                return self._host_step(state, {}, failure, [], words)
            call_id = to_openai(call, f"call{len(state.calls) % 1000:03d}{i % 100:02d}")["id"]
            messages.append({"role": "tool", "content": clean(result.get("said") or ""), "tool_call_id": call_id})
            error = error or bool(result.get("error"))
        state, step = self._host_step(state, {"error": error}, "", messages, words)
        first_tool = parsed.calls[0].name
        return state, step._replace(tool=first_tool if first_tool in self.tools else "")

    def _host_step(
        self,
        state: ExternalState,
        result: Mapping[str, JSON],
        failure: str,
        messages: Sequence[Mapping[str, JSON]],
        words: str,
    ) -> tuple[ExternalState, HostStep]:
        """The step for a result of the environment: the next observation, or how the episode ended."""
        if failure:
            return state, HostStep(None, True, status=Status.TOOL_FAILURE, reason=failure)
        reward, error = result.get("reward"), bool(result.get("error"))
        state = replace(state, total_reward=state.total_reward + (reward or 0.0))
        solved = is_solved(RewardResult(state.total_reward))
        if result.get("done"):
            return state, HostStep(None, True, reward=reward, error=error, correct=solved, output=words)
        last = Conversation((state.conversation.tokens[-1],), (True,))
        ids = tokenize_safely(
            self.guarded, messages, lambda chat, written: add_messages(chat, last, written).tokens[1:]
        )
        state = replace(state, conversation=state.conversation.extend(ids, chosen=False))
        size = len(state.conversation.tokens)
        if size >= self.context_tokens:
            step = HostStep(
                None,
                True,
                reward=reward,
                error=error,
                correct=solved,
                output=words,
                status=Status.TOKEN_LIMIT,
                reason=f"the conversation has {size} tokens, and there is room for {self.context_tokens}",
            )
            return state, step
        return state, HostStep(self._observation(ids, size), False, reward=reward, error=error)

    def _observation(self, ids: Sequence[int], size: int) -> HostObservation:
        """These ids, after which a conversation has `size` tokens; the action gets what is left of the context."""
        return HostObservation(ids, max_tokens=max(min(self.max_tokens, self.context_tokens - size), 1))

    def _call_env(
        self, call_tool: ToolRunner, state: ExternalState, call: Mapping[str, JSON]
    ) -> tuple[Mapping[str, JSON], str, ExternalState]:
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
