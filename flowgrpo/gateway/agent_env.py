"""An external agent as a host environment: each of its requests is an observation of the policy (A1, A7).

    env = agent_env(text, turns=8, max_tokens=256, context_tokens=2048)
    hosted(env, host.submit_to(engine.submit), call_tool=host.call_tool)(tasks, keys, groups)     host: an `AgentHost`

Each request of the agent is a turn: its messages are rendered by the model's chat template, and the action is the
response. A request that continues the newest response appends to that context's ids; one that continues an older
response starts a context with the ids that were recorded up to there; one that rewrites the history, or starts another
(a sub-agent's), starts a context that is rendered from scratch. All of this follows from the agent's requests, which
are recorded effects like any other, so that a trajectory can be replayed without the agent (A2).

Effects, all of kind "agent", whose results are JSON:

    {"task": ...}                   start the agent                        -> {"asks": ...}, or {"ended": ...}
    {"turn": t, "reply": ...}       answer or refuse its request           -> the same, or {"gone": true}
    {"turn": t, "again": [...]}     restart it, and give these replies to these requests -> the same
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

from flowgrpo.contracts import Call, HostEnv, HostObservation, HostStep, RewardResult, ToolRunner
from flowgrpo.data.chat import EMPTY, Chat, make_chat, read_action
from flowgrpo.data.tokenizer import ChatTokenizer, Conversation, clean
from flowgrpo.data.tool_calls import ToolCallFormat, parse_tool_calls, to_openai
from flowgrpo.gateway.histories import to_template
from flowgrpo.gateway.wire import ChatResponse
from flowgrpo.rollout.effects import Effect
from flowgrpo.rollout.judging import is_solved
from flowgrpo.rollout.records import RecordedTrajectory
from flowgrpo.types import JSON, BadInput, Status, Task, first_line

MAX_REFUSALS = 3  # consecutive requests that can be refused before the agent is ended
TURNS_USED, TOO_LONG, UNREADABLE = "turn_limit", "context_length_exceeded", "invalid_messages"
SEND_WHOLE = {"whole": True}  # the reply that requests all messages of a request, not only the new ones


@dataclass(frozen=True)
class AgentEnvState:
    """The exchange of an agent with its model so far."""

    task: Mapping[str, JSON]
    seed: tuple[int, ...]
    request: Mapping[str, JSON] | None = None  # the one that waits for a response
    prompt: Conversation = EMPTY  # its tokens
    contexts: tuple[Conversation, ...] = ()  # by turn, up to the response
    exchanges: tuple[tuple[str, Mapping[str, JSON]], ...] = ()  # (digest of a request, reply)
    limit: Status | None = None  # the limit that the last request ran into
    kinds: tuple[str, ...] = ()  # by turn: what its request continues, see `HistoryMatch`
    failure: str = ""  # why the agent made no request


class RenderedRequest(NamedTuple):
    """A request as tokens: its whole context, and how many of them the newest context has already."""

    context: Conversation
    num_shared: int | None  # None: it starts a context of its own
    kind: str


def agent_env(
    tokenizer: ChatTokenizer,
    *,
    turns: int,
    max_tokens: int,
    context_tokens: int,
    tools: Sequence[str] = (),
    name: str = "agent",
    call_format: ToolCallFormat | None = None,
) -> HostEnv:
    """The environment that an external agent is to its model.

    Args:
        tokenizer: with the chat template.
        turns: number of requests that are answered; later ones get an error, and the agent may end with what it has.
        max_tokens: of an action.
        context_tokens: of a context together with its action.
        tools: names of the tools whose calls are counted.
        name: for messages and metrics.
        call_format: of tool calls; None: the one that the chat template teaches.
    """
    chat = make_chat(
        "agent_env",
        tokenizer,
        turns=turns,
        max_tokens=max_tokens,
        context_tokens=context_tokens,
        call_format=call_format,
    )
    agent = AgentEnv(chat, turns, tuple(tools), name)
    return HostEnv(
        name=name,
        tools=tuple(tools),
        max_turns=turns,
        max_tokens=max_tokens,
        stop_ids=tokenizer.stop_ids,
        reset=agent.reset,
        step=agent.step,
        anchor=context_anchor,
    )


def context_anchor(state: AgentEnvState) -> int:
    """Hash of the prompt's tokens: equal exactly if the contexts are."""
    return int.from_bytes(blake2b(np.array(state.prompt.tokens, np.int32).tobytes(), digest_size=6).digest())


class AgentEnv(NamedTuple):
    """`reset` and `step` of the environment, with its settings."""

    chat: Chat
    turns: int
    tools: tuple[str, ...]
    name: str

    def reset(self, key: jax.Array, task: Any, call_tool: ToolRunner) -> tuple[AgentEnvState, HostObservation]:
        """Start the agent on a task, without its answers; its first request is the first observation."""
        task_json = public_task(task)
        state = AgentEnvState(task_json, tuple(np.asarray(jax.random.key_data(key)).tolist()))
        event, failure = self._run_effect(call_tool, state, {"task": task_json})
        if failure:  # the failed effect ends the trajectory, so that this observation is never answered
            return replace(state, failure=failure), HostObservation((self.chat.tokenizer.pad_id,))
        state, step = self._advance(state, event, "", call_tool)
        if step.observation is None:
            raise BadInput(f"the agent ended without a request that could be answered: {step.reason}")
        return state, step.observation

    def step(
        self, state: AgentEnvState, tokens: Sequence[int], call_tool: ToolRunner
    ) -> tuple[AgentEnvState, HostStep]:
        """Send the action as the response to the request; the next request, or the end, follows."""
        if state.request is None:  # only if the caller ignores the failure of an effect, as scripted demonstrations do
            raise BadInput(state.failure)
        response, is_malformed = to_response(
            self.chat.tokenizer,
            self.chat.call_format,
            tokens,
            state.prompt.tokens,
            stop=state.request.get("stop", ()),
            tools=state.request.get("tools", ()),
            turn=len(state.contexts),
        )
        context = state.prompt.extend(tuple(map(int, tokens)), chosen=True)
        state = replace(state, contexts=(*state.contexts, context), limit=None)
        event, failure, state = self._send_reply(call_tool, state, {"answer": response_to_json(response)})
        state, step = self._advance(state, event, failure, call_tool)
        tool = response.tool_calls[0]["function"]["name"] if response.tool_calls else ""
        return state, step._replace(error=is_malformed, tool=tool if tool in self.tools else "")

    def _advance(
        self, state: AgentEnvState, event: JSON, failure: str, call_tool: ToolRunner
    ) -> tuple[AgentEnvState, HostStep]:
        """Refuse requests that can't be answered, until one can be or the agent has ended."""
        num_refused = 0
        while not failure and "asks" in event:
            request = event["asks"]
            state = replace(state, request=request)
            rendered = self._render(state, request)
            if isinstance(rendered, RenderedRequest):
                context, num_shared, kind = rendered
                state = replace(state, prompt=context, kinds=(*state.kinds, kind), limit=None)
                room, wanted = self.chat.room(context), request.get("max_tokens")
                observation = HostObservation(
                    tokens=context.tokens[num_shared or 0 :],
                    # True for the first one too: whether later ones may extend it depends on it.
                    extends_context=num_shared is not None or not state.contexts,
                    chosen=context.chosen if num_shared is None and any(context.chosen) else None,
                    max_tokens=room if wanted is None else min(wanted, room),
                    stop=tuple(request.get("stop", ())),
                )
                return state, HostStep(observation, False)
            num_refused += rendered is not SEND_WHOLE
            if num_refused > MAX_REFUSALS:
                stop = {"turn": len(state.contexts), "stop": "it asks for what it can't have"}
                self._run_effect(call_tool, state, stop)
                reason = rendered["refuse"]["message"] if "refuse" in rendered else ""
                return state, HostStep(None, True, status=state.limit or Status.ABORTED, reason=reason)
            if rendered is not SEND_WHOLE:
                limits = {TURNS_USED: Status.TURN_LIMIT, TOO_LONG: Status.TOKEN_LIMIT}
                state = replace(state, limit=limits.get(rendered["refuse"]["code"]))
            event, failure, state = self._send_reply(call_tool, state, rendered)
        if failure:  # the failed effect ends the trajectory, whatever is returned here
            return state, HostStep(None, True, status=Status.ABORTED, reason=failure)
        return self._end(state, event["ended"])

    def _end(self, state: AgentEnvState, ended: Mapping[str, JSON]) -> tuple[AgentEnvState, HostStep]:
        """The last step: a limit that the agent ran into counts, whatever it made of that; a crash does not (F5)."""
        output, reward, failed = ended.get("output"), ended.get("reward"), ended.get("failed", "")
        status = Status.FINISHED if state.limit is None else state.limit
        if failed and state.limit is None:
            return state, HostStep(None, True, status=Status.ABORTED, reason=failed)
        correct = ended.get("correct")
        solved = reward is not None and is_solved(RewardResult(reward)) if correct is None else bool(correct)
        reason = failed or ("" if state.limit is None else "the agent ended when it could ask for no more")
        output = None if output is None else clean(output)
        step = HostStep(None, True, reward=reward, correct=solved, output=output, status=status, reason=reason)
        return replace(state, request=None), step

    # Effects --------------------------------------------------------------------------------------------

    def _run_effect(
        self, call_tool: ToolRunner, state: AgentEnvState, arguments: Mapping[str, JSON]
    ) -> tuple[JSON, str]:
        """Run an effect -> (the agent's next event, why there is none)."""
        result = call_tool(Call("agent", self.name, arguments, state.seed))
        return (json.loads(result.text) if result.text else {}), result.failure

    def _send_reply(
        self, call_tool: ToolRunner, state: AgentEnvState, reply: Mapping[str, JSON]
    ) -> tuple[JSON, str, AgentEnvState]:
        """Send a reply to the agent. If the agent is gone, because its process was killed, it is restarted."""
        turn = len(state.contexts)
        state = replace(state, exchanges=(*state.exchanges, (request_digest(state.request), reply)))
        arguments = {"turn": turn, "reply": reply, "exchange": len(state.exchanges)}
        event, failure = self._run_effect(call_tool, state, arguments)
        if not failure and event.get("gone"):
            restart = {"task": state.task, "turn": turn, "again": [list(exchange) for exchange in state.exchanges]}
            event, failure = self._run_effect(call_tool, state, restart)
        return event, failure, state

    # Requests as tokens ---------------------------------------------------------------------------------

    def _render(self, state: AgentEnvState, request: Mapping[str, JSON]) -> RenderedRequest | Mapping[str, JSON]:
        """The request as tokens, or a reply that refuses it."""
        if len(state.contexts) >= self.turns:
            return _refusal(TURNS_USED, f"all {self.turns} requests of this session were used: end with what you have")
        messages, prompt = request.get("messages", ()), request.get("prompt")
        if reason := too_long_reason(self.chat.tokenizer, messages, prompt, self.chat.context_tokens):
            return _refusal(TOO_LONG, reason)
        try:
            is_chat = prompt is None
            rendered = self._render_chat(state, request) if is_chat else self._render_prompt(state, prompt)
        except BadInput as error:
            return SEND_WHOLE if request.get("after") is not None else _refusal(UNREADABLE, first_line(error))
        if self.chat.is_full(rendered.context):
            size, most = len(rendered.context.tokens), self.chat.context_tokens
            return _refusal(TOO_LONG, f"the request has {size} tokens, which must be less than {most}")
        return rendered

    def _render_chat(self, state: AgentEnvState, request: Mapping[str, JSON]) -> RenderedRequest:
        """Messages, after the response that they continue or from scratch."""
        messages, after = [to_template(message) for message in request["messages"]], request.get("after")
        if after is None:
            return RenderedRequest(self.chat.begin(messages, request.get("tools", ())), None, request["kind"])
        context = state.contexts[after]
        ids = self.chat.add(context, messages)
        num_shared = len(context.tokens) if after == len(state.contexts) - 1 else None
        return RenderedRequest(context.extend(ids, chosen=False), num_shared, request["kind"])

    def _render_prompt(self, state: AgentEnvState, prompt: str | Sequence[int]) -> RenderedRequest:
        """A prompt of text or ids; ids continue the newest context that they start with."""
        ids = tuple(self.chat.tokenizer.encode(clean(prompt)) if isinstance(prompt, str) else prompt)
        if not isinstance(prompt, str) and ids and max(ids) >= self.chat.tokenizer.vocab_size:
            raise BadInput(f"the prompt has an id of {max(ids)}, but ids are below {self.chat.tokenizer.vocab_size}")
        for after in range(len(state.contexts) - 1, -1, -1):
            context = state.contexts[after]
            size = len(context.tokens)
            if len(ids) > size and ids[:size] == context.tokens:
                is_newest = after == len(state.contexts) - 1
                kind = "append" if is_newest else "branch"
                return RenderedRequest(context.extend(ids[size:], chosen=False), size if is_newest else None, kind)
        kind = "branch" if state.contexts else "first"
        return RenderedRequest(EMPTY.extend(ids, chosen=False), None, kind)


def too_long_reason(
    tokenizer: ChatTokenizer,
    messages: Sequence[Mapping[str, JSON]],
    prompt: str | Sequence[int] | None,
    context_tokens: int,
) -> str:
    """Why a request is too long however it is tokenized, found without tokenizing it; "" if it may fit.

    A message has at least one token, and a token has at most the characters of the longest one.
    """
    if len(messages) >= context_tokens:
        return f"the request has {len(messages)} messages, which must be fewer than the {context_tokens} tokens of all"
    if prompt is not None and not isinstance(prompt, str):
        size = len(prompt)
        return f"the request has {size} tokens, which must be less than {context_tokens}" * (size >= context_tokens)
    characters = len(prompt or "") + sum(len(message.get("content") or "") for message in messages)
    most = context_tokens * _longest_token(tokenizer.hf_tokenizer)
    return f"the request has {characters} characters, and {context_tokens} tokens hold {most}" * (characters > most)


@lru_cache(maxsize=8)
def _longest_token(tokenizer: Any) -> int:
    """Number of characters of the longest token."""
    return max(map(len, tokenizer.get_vocab()), default=1)


def to_response(
    tokenizer: ChatTokenizer,
    call_format: ToolCallFormat | None,
    tokens: Sequence[int],
    prompt: Sequence[int],
    *,
    stop: Sequence[str],
    tools: Sequence[JSON],
    turn: int,
) -> tuple[ChatResponse, bool]:
    """The response that sampled tokens are, and whether they have a malformed tool call."""
    words, is_complete = read_action(tokenizer, tokens)
    end = min((index for string in stop if (index := words.find(string)) >= 0), default=None)
    if end is not None:
        words, is_complete = words[:end], True
    content, calls, is_malformed = words, (), False
    if tools and call_format is not None:
        content, calls, is_malformed = parse_tool_calls(words, call_format)
    # Ids of nine letters and digits, as some templates require.
    tool_calls = tuple(to_openai(call, f"call{turn % 1000:03d}{i % 100:02d}") for i, call in enumerate(calls))
    response = ChatResponse(
        content=content if content or not tool_calls else None,
        finish_reason="tool_calls" if tool_calls else "stop" if is_complete else "length",
        tokens=tuple(map(int, tokens)),
        prompt=tuple(prompt),
        tool_calls=tool_calls,
    )
    return response, is_malformed


def context_metrics(trajectories: Sequence[RecordedTrajectory]) -> dict[str, float]:
    """Mean number of contexts of a trajectory, and of answered requests that rewrote its history (A6)."""
    if not trajectories:
        return {}
    contexts = [
        bool(trajectory.turns) + sum(turn.starts_context for turn in trajectory.turns) for trajectory in trajectories
    ]
    rewrites = [_answered_kinds(trajectory.log).count("rewrite") for trajectory in trajectories]
    return {"contexts": float(np.mean(contexts)), "rewrites": float(np.mean(rewrites))}


def _answered_kinds(log: Sequence[Effect]) -> list[str]:
    """The kind of each answered request that came as messages, see `HistoryMatch`."""
    kinds, kind = [], ""
    for call, result in log:
        if "answer" in call.arguments.get("reply", {}):
            kinds.append(kind)
        event = json.loads(result.text) if result.text else {}
        kind = event["asks"].get("kind", "") if "asks" in event else kind
    return kinds


def response_to_json(response: ChatResponse) -> dict[str, JSON]:
    """The response as the reply to the agent has it."""
    names = ("content", "finish_reason", "tokens", "prompt", "tool_calls")
    fields = {name: value for name, value in asdict(response).items() if name in names}
    return fields | {name: list(fields[name]) for name in ("tokens", "prompt", "tool_calls")}


def response_from_json(value: Mapping[str, JSON]) -> ChatResponse:
    """The response that `response_to_json` wrote."""
    tuples = {name: tuple(value[name]) for name in ("tokens", "prompt", "tool_calls")}
    return ChatResponse(**{**value, **tuples})


def request_digest(request: JSON) -> str:
    """Hash of an agent's request, by which a restarted agent is checked."""
    return blake2b(json.dumps(request, sort_keys=True).encode(), digest_size=12).hexdigest()


def public_task(task: Any) -> Any:
    """The public part of a task, as sent to the agent: no answers and no metadata, which rewards read."""
    return {"id": task.id, "query": task.query, "domain": task.domain} if isinstance(task, Task) else task


def _refusal(code: str, message: str) -> dict[str, JSON]:
    return {"refuse": {"code": code, "message": message}}
