"""An agent of somebody else's as a host environment: what it asks for is what the environment says (A1, A7).

    env = agent_env(text, turns=8, max_tokens=256, context_tokens=2048)
    hosted(env, host.submit, do=host.do)(tasks, keys, groups)       host: an `AgentHost`, which runs the agent

Each request of the agent is a turn: its messages are rendered by the model's template, the action is what it is
answered with. A request that goes on from the newest answer appends to that context's ids; one that goes on from an
older answer begins a context with the ids that were recorded up to there; one that rewrites history, or begins another
(a sub-agent's), begins a context that is rendered whole. All of it follows from what the agent asked for, which is an
effect like any other, so that a trajectory can be replayed without the agent (A2).

Effects, all of kind "agent", whose results are JSON:

    {"task": ...}                   start the agent                    -> {"asks": ...}, or {"ended": ...}
    {"turn": t, "reply": ...}       answer its request, or refuse it   -> likewise, or {"gone": true}
    {"turn": t, "again": [...]}     start it again, and give it these replies to these requests -> likewise
    {"turn": t, "stop": reason}     end it
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from hashlib import blake2b
from typing import Any, NamedTuple

import jax
import numpy as np

from flowgrpo.contracts import Call, Do, HostEnv, HostStep, Said, Scored
from flowgrpo.data.tokenizer import Conversation, Text, add_messages, clean, guard, start, write_plainly
from flowgrpo.gateway.histories import for_template
from flowgrpo.gateway.tool_calls import Form, as_openai, form_of, parse_calls
from flowgrpo.gateway.wire import Answer
from flowgrpo.rollout.effects import Effect
from flowgrpo.rollout.judging import is_solved
from flowgrpo.rollout.records import Played
from flowgrpo.types import BadInput, Status, Task, check_range, first_line

REFUSALS = 3  # requests in a row that can't be answered, until the agent is ended
TURNS_USED, TOO_LONG, UNREADABLE = "turn_limit", "context_length_exceeded", "invalid_messages"
NOTHING = Conversation((), ())
WHOLE = {"whole": True}  # the reply that asks for all messages of a request, also those that are recorded


@dataclass(frozen=True)
class ServedState:
    """The exchange of an agent and its model so far."""

    task: Mapping[str, Any]
    seed: tuple[int, ...]
    asks: Mapping[str, Any] | None = None  # what waits for an answer
    prompt: Conversation = NOTHING  # of it
    contexts: tuple[Conversation, ...] = ()  # up to each answer
    exchanges: tuple[tuple[str, Mapping[str, Any]], ...] = ()  # digests of what it asked for, and the replies
    limit: Status | None = None  # of what it wanted last and could not have
    kinds: tuple[str, ...] = ()  # of each turn, where it goes on from
    failure: str = ""  # why it made no request


class Rendered(NamedTuple):
    """A request as tokens: the whole context, and how much of it the newest one holds already."""

    context: Conversation
    kept: int | None  # None: a context of its own
    kind: str


def agent_env(
    text: Text,
    *,
    turns: int,
    max_tokens: int,
    context_tokens: int,
    tools: Sequence[str] = (),
    name: str = "agent",
    form: Form | None = None,
) -> HostEnv:
    """The environment that an agent is to its model.

    `turns` are the requests that are answered; to any other the agent gets an error, and may end with what it has. A
    context and its action have at most `context_tokens`. `form` is that of tool calls, by default what the chat
    template teaches, and `tools` names those whose calls are counted.
    """
    for setting, value in (("turns", turns), ("max_tokens", max_tokens)):
        check_range("agent_env", setting, value, 1, whole=True)
    if context_tokens <= max_tokens:
        raise BadInput(f"context_tokens={context_tokens} must be greater than max_tokens={max_tokens}, which it holds")
    form = form or form_of(text.tokenizer.chat_template)
    agent = AgentEnv(text, guard(text), form, turns, max_tokens, context_tokens, tuple(tools), name)
    return HostEnv(
        name=name,
        tools=tuple(tools),
        turns=turns,
        max_tokens=max_tokens,
        stop_ids=text.stop_ids,
        reset=agent.reset,
        step=agent.step,
        anchor=context_anchor,
    )


def context_anchor(state: ServedState) -> int:
    """Hash the context to a number that is equal where the contexts are."""
    return int.from_bytes(blake2b(np.array(state.prompt.tokens, np.int32).tobytes(), digest_size=6).digest())


class AgentEnv(NamedTuple):
    """The settings of one, and its functions."""

    text: Text
    guarded: Text
    form: Form | None
    turns: int
    max_tokens: int
    context_tokens: int
    tools: tuple[str, ...]
    name: str

    def reset(self, key: jax.Array, task: Any, do: Do) -> tuple[ServedState, Said]:
        """Start the agent on a task, whose answers it is not told; the first request is the first prompt."""
        told = task_of(task)
        state = ServedState(told, tuple(np.asarray(jax.random.key_data(key)).tolist()))
        event, failure = self._do(do, state, {"task": told})
        if failure:  # of the effect, which decides: what is said here is never answered
            return replace(state, failure=failure), Said((self.text.pad_id,))
        state, step = self._go_on(state, event, "", do)
        if step.said is None:
            raise BadInput(f"the agent ended without a request that could be answered: {step.reason}")
        return state, step.said

    def step(self, state: ServedState, tokens: Sequence[int], do: Do) -> tuple[ServedState, HostStep]:
        """Answer the request with an action; the next request, or the end, follows."""
        if state.asks is None:  # only where nobody heeds the failure of an effect, as a script's demonstrations
            raise BadInput(state.failure)
        turn = len(state.contexts)
        answer, broken = answer_of(self.text, self.form, state.asks, tokens, state.prompt.tokens, turn=turn)
        context = state.prompt.extend(tuple(map(int, tokens)), chosen=True)
        state = replace(state, contexts=(*state.contexts, context), limit=None)
        event, failure, state = self._reply(do, state, {"answer": answer_to_json(answer)})
        state, step = self._go_on(state, event, failure, do)
        called = answer.tool_calls[0]["function"]["name"] if answer.tool_calls else ""
        return state, step._replace(error=broken, tool=called if called in self.tools else "")

    def _go_on(self, state: ServedState, event: Any, failure: str, do: Do) -> tuple[ServedState, HostStep]:
        """Until there is a request that can be answered, or the agent has ended."""
        refused = 0
        while not failure and "asks" in event:
            asks = event["asks"]
            state = replace(state, asks=asks)
            rendered = self._render(state, asks)
            if isinstance(rendered, Rendered):
                return self._said(state, rendered, asks)
            refused += rendered is not WHOLE
            if refused > REFUSALS:
                self._do(do, state, {"turn": len(state.contexts), "stop": "it asks for what it can't have"})
                return state, HostStep(None, True, status=state.limit or Status.ABORTED, reason=_said_to(rendered))
            if rendered is not WHOLE:
                limits = {TURNS_USED: Status.TURN_LIMIT, TOO_LONG: Status.TOKEN_LIMIT}
                state = replace(state, limit=limits.get(rendered["refuse"]["code"]))
            event, failure, state = self._reply(do, state, rendered)
        if failure:  # which decides, whatever is given here
            return state, HostStep(None, True, status=Status.ABORTED, reason=failure)
        return self._ended(state, event["ended"])

    def _said(self, state: ServedState, rendered: Rendered, asks: Mapping[str, Any]) -> tuple[ServedState, HostStep]:
        context, kept, kind = rendered
        state = replace(state, prompt=context, kinds=(*state.kinds, kind), limit=None)
        room, wanted = self.context_tokens - len(context.tokens), asks.get("max_tokens")
        own = context.chosen if kept is None and any(context.chosen) else None
        said = Said(
            tokens=context.tokens[kept or 0 :],
            appends=kept is not None or not state.contexts,  # the first does, in the sense that later ones may
            chosen=own,
            max_tokens=min(self.max_tokens if wanted is None else wanted, self.max_tokens, room),
            stop=tuple(asks.get("stop", ())),
        )
        return state, HostStep(said, False)

    def _ended(self, state: ServedState, ended: Mapping[str, Any]) -> tuple[ServedState, HostStep]:
        """How it ended: a limit that it ran into counts, whatever it made of that; a crash does not (F5)."""
        output, reward, failed = ended.get("output"), ended.get("reward"), ended.get("failed", "")
        status = Status.FINISHED if state.limit is None else state.limit
        if failed and state.limit is None:
            return state, HostStep(None, True, status=Status.ABORTED, reason=failed)
        correct = ended.get("correct")
        solved = reward is not None and is_solved(Scored(reward)) if correct is None else bool(correct)
        reason = failed or ("" if state.limit is None else "the agent ended when it could ask for no more")
        output = None if output is None else clean(output)
        step = HostStep(None, True, reward=reward, correct=solved, output=output, status=status, reason=reason)
        return replace(state, asks=None), step

    # The agent ------------------------------------------------------------------------------------------

    def _do(self, do: Do, state: ServedState, arguments: Mapping[str, Any]) -> tuple[Any, str]:
        """Have the effect done; return the agent's next event, or why there is none."""
        result = do(Call("agent", self.name, arguments, state.seed))
        return (json.loads(result.text) if result.text else {}), result.failure

    def _reply(self, do: Do, state: ServedState, reply: Mapping[str, Any]) -> tuple[Any, str, ServedState]:
        """Give the agent a reply. One that is no longer there, since its process was killed, is started again."""
        turn = len(state.contexts)
        state = replace(state, exchanges=(*state.exchanges, (digest_of(state.asks), reply)))
        event, failure = self._do(do, state, {"turn": turn, "reply": reply, "exchange": len(state.exchanges)})
        if not failure and event.get("gone"):
            again = {"task": state.task, "turn": turn, "again": [list(one) for one in state.exchanges]}
            event, failure = self._do(do, state, again)
        return event, failure, state

    # As tokens ------------------------------------------------------------------------------------------

    def _render(self, state: ServedState, asks: Mapping[str, Any]) -> Rendered | Mapping[str, Any]:
        """The request as tokens, or a reply that refuses it."""
        if len(state.contexts) >= self.turns:
            return _refusal(TURNS_USED, f"all {self.turns} requests of this session were used: end with what you have")
        if too_long := cant_fit(self.text, asks.get("messages", ()), asks.get("prompt"), self.context_tokens):
            return _refusal(TOO_LONG, too_long)
        try:
            rendered = self._prompt(state, asks) if "prompt" in asks else self._messages(state, asks)
        except BadInput as error:
            return WHOLE if asks.get("after") is not None else _refusal(UNREADABLE, first_line(error))
        size = len(rendered.context.tokens)
        if size >= self.context_tokens:
            return _refusal(TOO_LONG, f"the request has {size} tokens, which must be less than {self.context_tokens}")
        return rendered

    def _messages(self, state: ServedState, asks: Mapping[str, Any]) -> Rendered:
        """Messages: after the answer that they follow, or from the beginning."""
        messages, after = [for_template(message) for message in asks["messages"]], asks.get("after")
        if after is None:
            return Rendered(first_context(self.guarded, self.form, messages, asks.get("tools", ())), None, asks["kind"])
        context = state.contexts[after]
        # The last token is enough to close an action, or to see that it is closed.
        last = Conversation((context.tokens[-1],), (True,))
        new = write_plainly(self.guarded, messages, lambda text, said: add_messages(text, last, said).tokens[1:])
        kept = len(context.tokens) if after == len(state.contexts) - 1 else None
        return Rendered(context.extend(new, chosen=False), kept, asks["kind"])

    def _prompt(self, state: ServedState, asks: Mapping[str, Any]) -> Rendered:
        """A prompt: ids, after the recorded ones that they begin with, or text."""
        given = asks["prompt"]
        ids = tuple(self.text.encode(clean(given)) if isinstance(given, str) else given)
        if not isinstance(given, str) and ids and max(ids) >= self.text.vocab_size:
            raise BadInput(f"the prompt has an id of {max(ids)}, but ids are below {self.text.vocab_size}")
        for after in range(len(state.contexts) - 1, -1, -1):
            context = state.contexts[after]
            size = len(context.tokens)
            if len(ids) > size and ids[:size] == context.tokens:
                newest = after == len(state.contexts) - 1
                kind = "append" if newest else "branch"
                return Rendered(context.extend(ids[size:], chosen=False), size if newest else None, kind)
        kind = "branch" if state.contexts else "first"
        return Rendered(NOTHING.extend(ids, chosen=False), None, kind)


def cant_fit(
    text: Text, messages: Sequence[Mapping[str, Any]], prompt: str | Sequence[int] | None, context_tokens: int
) -> str:
    """Why a request is too long however it is written as tokens, found without writing it; empty where it may fit.

    A message has at least one token, and a token has at most the characters of the longest one.
    """
    if len(messages) >= context_tokens:
        return f"the request has {len(messages)} messages, which must be fewer than the {context_tokens} tokens of all"
    if prompt is not None and not isinstance(prompt, str):
        size = len(prompt)
        return f"the request has {size} tokens, which must be less than {context_tokens}" * (size >= context_tokens)
    characters = len(prompt or "") + sum(len(message.get("content") or "") for message in messages)
    most = context_tokens * longest_token(text)
    return f"the request has {characters} characters, and {context_tokens} tokens hold {most}" * (characters > most)


@lru_cache(maxsize=8)
def _longest_spelling(tokenizer: Any) -> int:
    return max(map(len, tokenizer.get_vocab()), default=1)


def longest_token(text: Text) -> int:
    """Characters of the longest token."""
    return _longest_spelling(text.tokenizer)


def first_context(
    guarded: Text, form: Form | None, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any]
) -> Conversation:
    """Messages from the beginning, and the schemas of tools."""
    if tools and form is None:
        raise BadInput(f"the chat template of {guarded.source} has no place for tools: leave them out of the request")
    shown = list(tools) or None
    ids = write_plainly(guarded, messages, lambda text, said: start(text, said, shown).tokens)
    return NOTHING.extend(ids, chosen=False)


def answer_of(
    text: Text,
    form: Form | None,
    asks: Mapping[str, Any],
    tokens: Sequence[int],
    prompt: Sequence[int],
    *,
    turn: int,
) -> tuple[Answer, bool]:
    """The answer that an action is, and whether it begins a tool call that can't be read."""
    words, whole = text.spoken(tokens)
    words = clean(words)
    cut = min((at for stop in asks.get("stop", ()) if (at := words.find(stop)) >= 0), default=None)
    words, whole = (words, whole) if cut is None else (words[:cut], True)
    content, calls, broken = words, (), False
    if asks.get("tools") and form is not None:
        content, calls, broken = parse_calls(words, form)
    # Nine letters and digits, as some templates want them.
    named = tuple(as_openai(call, f"call{turn % 1000:03d}{i % 100:02d}") for i, call in enumerate(calls))
    answer = Answer(
        content=content if content or not named else None,
        finish_reason="tool_calls" if named else "stop" if whole else "length",
        tokens=tuple(map(int, tokens)),
        prompt=tuple(prompt),
        tool_calls=named,
    )
    return answer, broken


def context_figures(played: Sequence[Played]) -> dict[str, float]:
    """Count the contexts of a trajectory, and of its requests those that rewrote history, both in the mean (A6)."""
    if not played:
        return {}
    contexts = [bool(one.turns) + sum(turn.begins for turn in one.turns) for one in played]
    rewrites = [_answered_kinds(one.log).count("rewrite") for one in played]
    return {"contexts": float(np.mean(contexts)), "rewrites": float(np.mean(rewrites))}


def _answered_kinds(log: Sequence[Effect]) -> list[str]:
    """Say of each request that was answered where it went on from, as far as it came as messages."""
    kinds, kind = [], ""
    for call, result in log:
        if "answer" in call.arguments.get("reply", {}):
            kinds.append(kind)
        event = json.loads(result.text) if result.text else {}
        kind = event["asks"].get("kind", "") if "asks" in event else kind
    return kinds


def answer_to_json(answer: Answer) -> dict[str, Any]:
    """An answer as a reply to the agent holds it."""
    names = ("content", "finish_reason", "tokens", "prompt", "tool_calls")
    found = {name: value for name, value in asdict(answer).items() if name in names}
    return found | {name: list(found[name]) for name in ("tokens", "prompt", "tool_calls")}


def answer_from_json(value: Mapping[str, Any]) -> Answer:
    """The answer that `answer_to_json` wrote."""
    tuples = {name: tuple(value[name]) for name in ("tokens", "prompt", "tool_calls")}
    return Answer(**{**value, **tuples})


def digest_of(asks: Any) -> str:
    """A short name of what an agent asked for."""
    return blake2b(json.dumps(asks, sort_keys=True).encode(), digest_size=12).hexdigest()


def task_of(task: Any) -> Any:
    """Give what an agent is told of a task: not its answers, nor what a reward reads."""
    return {"id": task.id, "query": task.query, "domain": task.domain} if isinstance(task, Task) else task


def _refusal(code: str, message: str) -> dict[str, Any]:
    return {"refuse": {"code": code, "message": message}}


def _said_to(refusal: Mapping[str, Any]) -> str:
    return refusal["refuse"]["message"] if "refuse" in refusal else ""
