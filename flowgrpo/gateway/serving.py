"""Serve a model: answer requests of no session, and record sessions of agents that run elsewhere as trajectories.

    served = Served(engine, model.text, context_tokens=2048, ...)
    with Gateway(model="planner", spell=model.text.decode, ask=served.ask, begin=served.begin) as gateway: ...

A session is begun by a request (POST /sessions, with a task, and a seed where it is to be repeated) and ends with its
reward (POST /s/NAME/reward), or with the answer that is to be judged; one that is ended (DELETE), or of which nothing
is heard any more, is ABORTED. Each is a rollout of one trajectory, in the way of any other, so that it has the ids and
log-probabilities that `fg.hosted` gives under the same key.
"""

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from flowgrpo.contracts import Call, Completion, Do, Policy, Request, Result, Reward
from flowgrpo.data.tokenizer import Text, guard
from flowgrpo.gateway.agent_env import agent_env, answer_of, cant_fit, first_context
from flowgrpo.gateway.agents import as_result
from flowgrpo.gateway.histories import for_template
from flowgrpo.gateway.live_session import Ended, LiveSession, outcome_of, read_reward, with_scores
from flowgrpo.gateway.server import Ending, digest_of
from flowgrpo.gateway.tool_calls import Form, form_of
from flowgrpo.gateway.wire import LARGEST, Answer, Asked, Refusal
from flowgrpo.generate.engine import Engine
from flowgrpo.generate.sampler import MAX_KEPT
from flowgrpo.models.hf import Model, load_model
from flowgrpo.rollout.hosted import hosted
from flowgrpo.rollout.records import Played
from flowgrpo.types import BadInput, Status, Task, first_line

SEEDS = 1 << 63
SCORED = 64  # prompts to be scored are padded to multiples of so many tokens


class OpenSession(LiveSession):
    """A session of an agent that runs elsewhere, which its reward ends."""

    def __init__(self, task: Any, *, judged: bool = False):
        super().__init__(task, judged=judged)
        self.played: Future[Played] = Future()
        self._record: Mapping[str, Any] | None = None

    async def reward(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """End the session with its reward, or with the answer that is to be judged."""
        output = given.get("output")
        if output is not None and not isinstance(output, str):
            raise Refusal("output must be a string", field="output")
        if self.judged:
            for name in ("reward", "correct"):
                if given.get(name) is not None:
                    message = f'this server judges the output itself: send {{"output": ...}} without {name}'
                    raise Refusal(message, code="reward_not_used", field=name)
            if output is None:
                raise Refusal("give the output, which this server judges", field="output")
            ended = Ended(output=output)
        else:
            if given.get("reward") is None:
                message = "give a reward, a number: this server has nothing that judges an output (--reward)"
                raise Refusal(message, field="reward")
            reward, correct = read_reward(given)
            ended = Ended(output=output, reward=reward, correct=correct)
        self.end_with(ended, digest_of(given))
        return record_of(self.name, await outcome_of(self.played))

    def finish(self, played: Played) -> None:
        """It has ended so."""
        if played.status != Status.FINISHED:
            self.why = f"{played.status.name}, {played.reason}"
        self.close()
        self._record = record_of(self.name, played)

    def ending(self) -> Ending:
        """How it ended, and what was answered to the reward that ended it."""
        return Ending(self.why, self._posted, self._record)

    def when_over(self, act: Callable[[], None]) -> None:
        """Call this once its rollout is over, or now."""
        self.played.add_done_callback(lambda _: act())

    async def end(self) -> None:
        """End it without a reward."""
        self.end_with(Ended(failed="the session was ended by its client"))
        await outcome_of(self.played)


def record_of(name: str, played: Played) -> dict[str, Any]:
    """How a session ended, as JSON."""
    contexts = bool(played.turns) + sum(turn.begins for turn in played.turns)
    return {
        "session": name,
        "status": played.status.name,
        "reason": played.reason,
        "turns": len(played.turns),
        "contexts": contexts,
        "outcome": played.outcome,
        "correct": played.correct,
    }


@dataclass(eq=False)
class Served:
    """A model as a gateway serves it.

    turns, max_tokens, context_tokens    of a session, and of an answer
    temperature                          of sessions, whatever their requests ask for
    silent_seconds                       until a session of which nothing is heard is ABORTED
    seconds                              of a request that belongs to no session
    reward                               judges the output of a session; None: rewards are posted
    on_played                            is given each session that has ended
    load                                 reads a model folder, for `swap`
    """

    engine: Engine
    text: Text
    policy: Policy
    params: Any
    turns: int = 64
    max_tokens: int = 512
    context_tokens: int = 2048
    temperature: float = 1.0
    silent_seconds: float = 600.0
    seconds: float = 600.0
    sessions: int = 1024
    reward: Reward | None = None
    on_played: Callable[[Played], None] = lambda _played: None
    load: Callable[[str], Model] = load_model

    def __post_init__(self) -> None:
        self.env = agent_env(
            self.text, turns=self.turns, max_tokens=self.max_tokens, context_tokens=self.context_tokens
        )
        self.live: dict[str, OpenSession] = {}
        self._lock = threading.Lock()
        self._form: Form | None = form_of(self.text.tokenizer.chat_template)
        self._guarded = guard(self.text)

    # Sessions -----------------------------------------------------------------------------------------------

    def begin(self, body: Mapping[str, Any]) -> OpenSession:
        """Begin a session with a task, under a key that a seed makes, or chance."""
        task, seed = _task(body.get("task")), body.get("seed")
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < SEEDS):
            raise Refusal("seed must be a whole number of at least 0 and below 2**63", field="seed")
        session = OpenSession(task, judged=self.reward is not None)
        with self._lock:
            if len(self.live) >= self.sessions:
                message = f"there are {self.sessions} sessions, and there may be no more: end some"
                raise Refusal(message, status=429, code="too_many_sessions")
            self.live[session.name] = session
        key = jax.random.key(chance() if seed is None else seed)
        threading.Thread(target=self._play, args=(session, task, key), name="flowgrpo-session", daemon=True).start()
        return session

    def _play(self, session: OpenSession, task: Any, key: jax.Array) -> None:
        """The thread of a session: a rollout of one trajectory."""
        completion: list[Future[Completion]] = []

        def submit(request: Request) -> "Future[Completion]":
            completion[:] = [self.engine.submit(request)]
            return completion[0]

        settings: dict[str, Any] = {"do": self._effects(session, completion), "reward": self.reward}
        try:
            rollout = hosted(self.env, submit, temperature=self.temperature, width=1, **settings)
            played = rollout([task], key[None], [0]).played[0]
            self.on_played(played)
            session.finish(played)
            settle = partial(session.played.set_result, played)
        except Exception as error:  # of the engine that is closed, or of a file that can't be written
            why = f"it failed: {first_line(error)}"
            logging.getLogger(__name__).warning(f"session {session.name} is over: {why}")
            session.close(why)
            settle = partial(session.played.set_exception, Refusal(why, status=500, code="session_failed"))
        with self._lock:
            self.live.pop(session.name, None)
        settle()  # last: whoever waits for it may begin another session

    def _effects(self, session: OpenSession, completion: Sequence["Future[Completion]"]) -> Do:
        def do(call: Call) -> Result:
            if "stop" in call.arguments:
                return as_result({})
            following = None
            if "reply" in call.arguments:
                following = session.reply(call.arguments["reply"], completion[0].result() if completion else None)
            event = following or session.next_event(self.silent_seconds)
            if "ended" in event and "task" in call.arguments:
                return Result("", failure=event["ended"]["failed"] or "the session ended without a request")
            return as_result(event)

        return do

    # Weights ------------------------------------------------------------------------------------------------

    async def swap(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Take other weights of the same shape from a model folder; no request is dropped, and later tokens carry
        their version."""
        folder, version = body.get("folder"), body.get("version")
        if not isinstance(version, int) or isinstance(version, bool) or not 0 <= version <= LARGEST:
            raise Refusal(f"version must be a whole number of at most {LARGEST}, of the weights", field="version")
        if not isinstance(folder, str) or not folder:
            raise Refusal("give the folder of a model", field="folder")
        try:
            params = (await asyncio.to_thread(self.load, folder)).params
        except (BadInput, OSError, ValueError) as error:  # of a name that is none, too
            raise Refusal(f"no model can be loaded: {first_line(error):.500}", field="folder") from None
        shapes = [jax.tree.map(jnp.shape, tree) for tree in (params, self.params)]
        if shapes[0] != shapes[1]:
            raise Refusal(f"the model in {folder} has another shape than the one that is served", field="folder")
        self.params = params
        self.engine.swap(params, version)
        return {"version": version}

    # Requests of no session ---------------------------------------------------------------------------------

    async def ask(self, asked: Asked) -> list[Answer]:
        """Answers to a request that belongs to no session."""
        if too_long := cant_fit(self.text, asked.messages, asked.prompt, self.context_tokens):
            raise Refusal(too_long, code="context_length_exceeded")
        prompt = await asyncio.to_thread(self._prompt, asked)
        room = self.context_tokens - len(prompt)
        most = min(room, self.max_tokens if asked.max_tokens is None else asked.max_tokens)
        if room < (asked.max_tokens != 0):
            raise Refusal(
                f"the request has {len(prompt)} tokens, which must be less than {self.context_tokens}",
                code="context_length_exceeded",
            )
        echoes = asked.echo and asked.logprobs is not None
        scored, banned_mass = await asyncio.to_thread(self._scores, prompt) if echoes else (None, ())
        more: dict[str, Any] = {"scored": scored, "banned": self.engine.banned, "banned_mass": banned_mass}
        if most == 0:
            empty = Answer(content="", finish_reason="length", tokens=(), prompt=prompt, logprobs=(), **more)
            return [empty] * asked.n
        key = jax.random.key(chance() if asked.seed is None else asked.seed % (1 << 63))
        cuts = asked.temperature == 0 or (asked.top_p is not None and asked.top_p < 1)
        if cuts and not self.engine.mixed:
            raise Refusal("this gateway samples from the whole distribution: leave out temperature=0 and top_p")
        request = self._request(asked, prompt, most)
        try:
            futures = [self.engine.submit(request._replace(key=jax.random.fold_in(key, i))) for i in range(asked.n)]
        except BadInput as error:
            raise Refusal(first_line(error)) from None
        try:
            completions = await asyncio.gather(*map(asyncio.wrap_future, futures))
        finally:  # a client that has left frees its slots
            for future in futures:
                future.cancel()
        return [replace(self._answer(asked, prompt, one), **more) for one in completions]

    def _prompt(self, asked: Asked) -> tuple[int, ...]:
        """The ids of a request."""
        try:
            if asked.prompt is None:
                messages = [for_template(message) for message in asked.messages]
                return first_context(self._guarded, self._form, messages, asked.tools).tokens
            ids = tuple(self.text.encode(asked.prompt)) if isinstance(asked.prompt, str) else asked.prompt
        except BadInput as error:
            raise Refusal(first_line(error)) from None
        if not ids or max(ids) >= self.text.vocab_size:
            raise Refusal(f"prompt must hold ids below {self.text.vocab_size}", field="prompt")
        return ids

    def _request(self, asked: Asked, prompt: tuple[int, ...], most: int) -> Request:
        greedy = asked.temperature == 0
        return Request(
            tokens=prompt,
            key=jax.random.key(0),
            max_tokens=most,
            temperature=1.0 if greedy or asked.temperature is None else asked.temperature,
            top_k=1 if greedy else MAX_KEPT,
            top_p=1.0 if asked.top_p is None else asked.top_p,
            stop_ids=self.text.stop_ids,
            stop=asked.stop,
            deadline=self.seconds,
        )

    def _answer(self, asked: Asked, prompt: tuple[int, ...], completion: Completion) -> Answer:
        if completion.finish_reason not in ("stop", "length"):
            raise Refusal(f"no answer came within {self.seconds:g} s", status=504, code="timeout")
        asks = {"stop": asked.stop, "tools": asked.tools}
        answer, _ = answer_of(self.text, self._form, asks, completion.tokens, prompt, turn=0)
        return with_scores(answer, completion)

    def _scores(
        self, prompt: tuple[int, ...]
    ) -> tuple[list[tuple[float | None, dict[int, float]]], list[float | None]]:
        """Of each token of a prompt its log-probability among all ids and the likeliest token in its place, and the
        probability there of ids that are never sampled; of the first, none."""
        tokens = (
            jnp.zeros((1, -(-len(prompt) // SCORED) * SCORED), jnp.int32)
            .at[0, : len(prompt)]
            .set(jnp.array(prompt, jnp.int32))
        )
        banned = self.engine.banned
        own, best, most, mass = jax.device_get(_score(self.policy, self.params, tokens, banned))
        found: list[tuple[float | None, dict[int, float]]] = [(None, {})]
        for place in range(len(prompt) - 1):
            top = {prompt[place + 1]: float(own[place])}
            found.append((float(own[place]), {int(best[place]): float(most[place])} | top))
        return found, [None, *map(float, mass[: len(prompt) - 1])]


@partial(jax.jit, static_argnums=(0, 3))
def _score(policy: Policy, params: Any, tokens: jax.Array, banned: tuple[int, ...]) -> tuple[jax.Array, ...]:
    """(log-probability of the next token, the likeliest id in its place, its log-probability, the probability of the
    `banned` ids), of every token but the last; the vocabulary is met `SCORED` tokens at a time."""
    hidden = policy.hidden(params, tokens, None, None, None)[0][0]
    following = jnp.append(tokens[0, 1:], 0)

    def part(given):
        hidden_sd, next_s = given
        logp_sv = jax.nn.log_softmax(policy.unembed(params, hidden_sd[None])[0].astype(jnp.float32))
        own_s = jnp.take_along_axis(logp_sv, next_s[:, None], axis=-1)[:, 0]
        mass_s = jnp.exp(logp_sv[:, jnp.array(banned, jnp.int32)]).sum(axis=-1)
        return own_s, logp_sv.argmax(axis=-1), logp_sv.max(axis=-1), mass_s

    parts = jax.lax.map(part, (hidden.reshape(-1, SCORED, hidden.shape[-1]), following.reshape(-1, SCORED)))
    return tuple(x.reshape(-1) for x in parts)  # type: ignore[return-value]


def chance() -> int:
    """A seed that nobody can guess."""
    return int.from_bytes(os.urandom(7))


def _task(given: Any) -> Task:
    """The task of a session, as a task file has it; without one, an empty query."""
    fields = {} if given is None else {"query": given} if isinstance(given, str) else given
    if not isinstance(fields, Mapping) or not isinstance(fields.get("query", ""), str):
        raise Refusal("task must be a query, or an object with query, answers and domain", field="task")
    answers = fields.get("answers", [])
    answers = [answers] if isinstance(answers, str) else answers
    if not isinstance(answers, list) or not all(isinstance(answer, str) for answer in answers):
        raise Refusal("task.answers must be a list of strings", field="task")
    known = ("id", "query", "answers", "domain")
    metadata = {name: value for name, value in fields.items() if name not in known}
    return Task(
        str(fields.get("id", "")), fields.get("query", ""), tuple(answers), str(fields.get("domain", "")), metadata
    )
