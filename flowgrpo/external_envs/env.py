"""An environment of somebody else's as a host environment: what it shows is said in a conversation with the model.

    with EnvProcess("gymnasium", "Taxi-v3") as process:
        env = external_env(text, turns=20, max_tokens=16, context_tokens=1024)
        hosted(env, engine.submit, do=process.do)(tasks, keys, groups)

If the environment has tools, an action that calls some is answered by them, and one that calls none ends the
episode; else each action is a step. Effects are of kind "env", and results JSON, so that a trajectory is replayed
without the environment (A2), and one whose process was killed is brought to where it was (S1):

    {"ask": "reset", "with": {"seed", "task"}}, {"ask": "step", "with": {"action"}},
    {"ask": "call", "with": {"name", "arguments"}}, {"ask": "end"}    -> {"said", "tools", "reward", "done", "error"}
    {"again": [...]}                                                 all that was asked, of an episode that is gone
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import numpy as np

from flowgrpo.contracts import Call, Do, HostEnv, HostStep, Said, Scored
from flowgrpo.data.tokenizer import Conversation, Text, add_messages, clean, guard, start, write_plainly
from flowgrpo.gateway.tool_calls import Form, as_openai, form_of, parse_calls
from flowgrpo.rollout.judging import is_solved
from flowgrpo.types import BadInput, Status, Task, check_range


@dataclass(frozen=True)
class ExternalState:
    """An episode: what was asked of its environment, and the conversation."""

    seed: tuple[int, ...]
    talk: Conversation = Conversation((), ())  # noqa: RUF009
    asked: tuple[Mapping[str, Any], ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    paid: float = 0.0


def external_env(
    text: Text,
    *,
    turns: int,
    max_tokens: int,
    context_tokens: int,
    instructions: str = "",
    tools: Sequence[str] = (),
    name: str = "env",
    form: Form | None = None,
) -> HostEnv:
    """The environment behind effects of kind "env". A conversation has at most `context_tokens`, with its actions.

    `tools` names those whose calls are counted, of which `EnvProcess.check` knows.
    """
    for setting, value in (("turns", turns), ("max_tokens", max_tokens)):
        check_range("external_env", setting, value, 1, whole=True)
    if context_tokens <= max_tokens:
        raise BadInput(f"context_tokens={context_tokens} must be greater than max_tokens={max_tokens}, which it holds")
    form = form or form_of(text.tokenizer.chat_template)
    own = ExternalEnv(text, guard(text), form, max_tokens, context_tokens, instructions, tuple(tools), name)
    return HostEnv(
        name=name,
        tools=tuple(tools),
        turns=turns,
        max_tokens=max_tokens,
        stop_ids=text.stop_ids,
        reset=own.reset,
        step=own.step,
        anchor=lambda state: len(state.asked),
    )


class ExternalEnv(NamedTuple):
    """The settings of one, and its functions."""

    text: Text
    guarded: Text
    form: Form | None
    max_tokens: int
    context_tokens: int
    instructions: str
    tools: tuple[str, ...]
    name: str

    def reset(self, key: jax.Array, task: Task, do: Do) -> tuple[ExternalState, Said]:
        """Begin an episode by the seed and the fields in the task's metadata; the query stands before what is shown."""
        state = ExternalState(tuple(np.asarray(jax.random.key_data(key)).tolist()))
        fields = dict(task.metadata)
        seed = fields.pop("seed", 0)
        found, failure, state = self._ask(do, state, {"ask": "reset", "with": {"seed": seed, "task": fields}})
        if failure:  # which decides: what is said here is never answered
            return state, Said((self.text.pad_id,))
        tools = tuple(found.get("tools") or ())
        if tools and self.form is None:
            raise BadInput(f"the chat template of {self.text.source} has no place for tools, and {self.name} has some")
        words = [self.instructions, clean(task.query), clean(found.get("said") or "")]
        messages = [{"role": "user", "content": "\n\n".join(filter(None, words))}]
        ids = write_plainly(self.guarded, messages, lambda text, said: start(text, said, list(tools) or None).tokens)
        talk = Conversation((), ()).extend(ids, chosen=False)
        return replace(state, talk=talk, tools=tools), self._said(ids, len(ids))

    def step(self, state: ExternalState, tokens: Sequence[int], do: Do) -> tuple[ExternalState, HostStep]:
        """A step, or calls of tools; an action that calls none where there are some is the last."""
        state = replace(state, talk=state.talk.extend(tuple(map(int, tokens)), chosen=True))
        words, whole = self.text.spoken(tokens)
        words = clean(words)
        if not state.tools:
            found, failure, state = self._ask(do, state, {"ask": "step", "with": {"action": words}})
            messages = [{"role": "user", "content": clean(found.get("said") or "")}]
            return self._then(state, found, failure, messages, words)
        assert self.form is not None
        parsed = parse_calls(words, self.form)
        if parsed.broken:
            said = [{"role": "user", "content": "Error: the tool call can't be read"}]
            return self._then(state, {"error": True}, "", said, words)
        if not parsed.calls:
            found, failure, state = self._ask(do, state, {"ask": "end"})
            return self._then(state, {**found, "done": True, "error": not whole}, failure, [], words)
        messages, error = [], False
        for i, call in enumerate(parsed.calls):
            given = {"name": call.name, "arguments": dict(call.arguments)}
            found, failure, state = self._ask(do, state, {"ask": "call", "with": given})
            if failure:
                return self._then(state, {}, failure, [], words)
            identity = as_openai(call, f"call{len(state.asked) % 1000:03d}{i % 100:02d}")["id"]
            messages.append({"role": "tool", "content": clean(found.get("said") or ""), "tool_call_id": identity})
            error = error or bool(found.get("error"))
        state, step = self._then(state, {"error": error}, "", messages, words)
        called = parsed.calls[0].name
        return state, step._replace(tool=called if called in self.tools else "")

    def _then(
        self, state: ExternalState, found: Mapping[str, Any], failure: str, messages: Sequence[Any], words: str
    ) -> tuple[ExternalState, HostStep]:
        """Return the step: with what is said next, or how it ended."""
        if failure:
            return state, HostStep(None, True, status=Status.TOOL_FAILURE, reason=failure)
        reward, error = found.get("reward"), bool(found.get("error"))
        state = replace(state, paid=state.paid + (reward or 0.0))
        how = {"reward": reward, "error": error}
        solved = is_solved(Scored(state.paid))
        if found.get("done"):
            return state, HostStep(None, True, correct=solved, output=words, **how)
        last = Conversation((state.talk.tokens[-1],), (True,))
        ids = write_plainly(self.guarded, messages, lambda text, said: add_messages(text, last, said).tokens[1:])
        state = replace(state, talk=state.talk.extend(ids, chosen=False))
        size = len(state.talk.tokens)
        if size >= self.context_tokens:
            why = f"the conversation has {size} tokens, and there is room for {self.context_tokens}"
            step = HostStep(None, True, correct=solved, output=words, status=Status.TOKEN_LIMIT, reason=why, **how)
            return state, step
        return state, HostStep(self._said(ids, size), False, **how)

    def _said(self, ids: Sequence[int], size: int) -> Said:
        return Said(ids, max_tokens=max(min(self.max_tokens, self.context_tokens - size), 1))

    def _ask(
        self, do: Do, state: ExternalState, asked: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any], str, ExternalState]:
        """Ask the environment; return its answer, or why there is none. One whose process was killed is begun again."""
        state = replace(state, asked=(*state.asked, asked))
        result = do(Call("env", self.name, {**asked, "number": len(state.asked)}, state.seed))
        found = json.loads(result.text) if result.text else {}
        if found.get("gone") and not result.failure:
            result = do(Call("env", self.name, {"again": list(state.asked)}, state.seed))
            found = json.loads(result.text) if result.text else {}
        return found, result.failure, state
