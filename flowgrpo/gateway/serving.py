"""Serve a model: complete requests without a session, and record sessions of external agents as trajectories.

    server = ModelServer(engine, model.tokenizer, model.policy, model.params, ServerSettings(context_tokens=2048))
    with Gateway(model="planner", decode=model.tokenizer.decode, complete=server.complete, ...):
        ...

A session is opened by a request (POST /sessions, with a task, and a seed if it is to be reproducible). It ends with
its reward (POST /s/NAME/reward), or with the output that a reward function scores; one that is deleted or silent for
too long is ABORTED. Each session is a rollout of one trajectory like any other, so that it has the ids and
log-probabilities that `fg.hosted` gives under the same key.
"""

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp

from flowgrpo.contracts import Call, Completion, Policy, Request, Result, Reward
from flowgrpo.data.chat import make_chat
from flowgrpo.data.tokenizer import ChatTokenizer
from flowgrpo.gateway.agent_env import agent_env, to_response, too_long_reason
from flowgrpo.gateway.agents import to_result
from flowgrpo.gateway.histories import to_template
from flowgrpo.gateway.live_session import LiveSession, SessionEnd, parse_reward, shielded, with_logprobs
from flowgrpo.gateway.server import Tombstone, body_digest
from flowgrpo.gateway.wire import MAX_INT32, ChatRequest, ChatResponse, HTTPError
from flowgrpo.generate.engine import Engine
from flowgrpo.generate.sampler import MAX_TOP_K
from flowgrpo.models.hf import Model, load_model
from flowgrpo.rollout.hosted import hosted
from flowgrpo.rollout.records import RecordedTrajectory
from flowgrpo.types import JSON, BadInput, Params, Status, Task, first_line

NUM_SEEDS = 1 << 63
SCORE_CHUNK = 64  # tokens whose logits are computed at a time; prompts to be scored are padded to multiples of it


class RecordedSession(LiveSession):
    """A session of an external agent that runs elsewhere, which ends with its reward."""

    def __init__(self, task: JSON, *, has_reward: bool = False):
        super().__init__(task, has_reward=has_reward)
        self.trajectory: Future[RecordedTrajectory] = Future()
        self._summary: Mapping[str, JSON] | None = None

    async def post_reward(self, body: Mapping[str, JSON]) -> Mapping[str, JSON]:
        """End the session with its reward, or with the output that the server's reward function scores."""
        output = body.get("output")
        if output is not None and not isinstance(output, str):
            raise HTTPError("output must be a string", field="output")
        if self.has_reward:
            for name in ("reward", "correct"):
                if body.get(name) is not None:
                    message = f'this server judges the output itself: send {{"output": ...}} without {name}'
                    raise HTTPError(message, code="reward_not_used", field=name)
            if output is None:
                raise HTTPError("give the output, which this server judges", field="output")
            end = SessionEnd(output=output)
        else:
            if body.get("reward") is None:
                message = "give a reward, a number: this server has nothing that judges an output (--reward)"
                raise HTTPError(message, field="reward")
            reward, correct = parse_reward(body)
            end = SessionEnd(output=output, reward=reward, correct=correct)
        self.end_with(end, body_digest(body))
        return session_summary(self.name, await shielded(self.trajectory))

    def finish(self, trajectory: RecordedTrajectory) -> None:
        """Close the session when its trajectory has ended."""
        if trajectory.status != Status.FINISHED:
            self.reason = f"{trajectory.status.name}, {trajectory.reason}"
        self.close()
        self._summary = session_summary(self.name, trajectory)

    def tombstone(self) -> Tombstone:
        """Why the session ended, and the response to the reward that ended it."""
        return Tombstone(self.reason, self._reward_digest, self._summary)

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call `callback` once the rollout is over, or now if it is."""
        self.trajectory.add_done_callback(lambda _: callback())

    async def end(self) -> None:
        """End the session without a reward."""
        self.end_with(SessionEnd(failed="the session was ended by its client"))
        await shielded(self.trajectory)


def session_summary(name: str, trajectory: RecordedTrajectory) -> dict[str, JSON]:
    """Status and outcome of a session, as JSON."""
    contexts = bool(trajectory.turns) + sum(turn.starts_context for turn in trajectory.turns)
    return {
        "session": name,
        "status": trajectory.status.name,
        "reason": trajectory.reason,
        "turns": len(trajectory.turns),
        "contexts": contexts,
        "outcome": trajectory.outcome,
        "correct": trajectory.correct,
    }


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Limits of a model server.

    Args:
        turns: number of requests of a session that are answered.
        max_tokens: of a response.
        context_tokens: of a context together with its response.
        temperature: of sessions, whatever their requests ask for.
        silent_seconds: until a session without a request is ABORTED.
        timeout_seconds: of a request without a session.
        max_sessions: number of sessions that may be open at once.
    """

    turns: int = 64
    max_tokens: int = 512
    context_tokens: int = 2048
    temperature: float = 1.0
    silent_seconds: float = 600.0
    timeout_seconds: float = 600.0
    max_sessions: int = 1024


class ModelServer:
    """A model behind a gateway: `complete`, `open_session` and `update_weights` are the gateway's callables."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: ChatTokenizer,
        policy: Policy,
        params: Params,
        settings: ServerSettings = ServerSettings(),
        *,
        reward: Reward | None = None,
        on_session_end: Callable[[RecordedTrajectory], None] = lambda _trajectory: None,
        load: Callable[[str], Model] = load_model,
    ):
        """Serve `policy` with `params` by `engine`.

        Args:
            engine: generates the responses.
            tokenizer: with the chat template.
            policy: scores prompts, for echoed log-probabilities.
            params: of the policy.
            settings: limits.
            reward: scores the output of a session; None: clients post rewards.
            on_session_end: gets the trajectory of each session that has ended, in the session's thread.
            load: reads the model folder of POST /weights.
        """
        self.engine, self.tokenizer, self.policy, self.params = engine, tokenizer, policy, params
        self.settings = settings
        self.reward, self.on_session_end, self.load = reward, on_session_end, load
        self.env = agent_env(
            tokenizer, turns=settings.turns, max_tokens=settings.max_tokens, context_tokens=settings.context_tokens
        )
        self.sessions: dict[str, RecordedSession] = {}
        self._lock = threading.Lock()
        self._chat = make_chat(
            "serving",
            tokenizer,
            turns=settings.turns,
            max_tokens=settings.max_tokens,
            context_tokens=settings.context_tokens,
        )

    # Sessions -----------------------------------------------------------------------------------------------

    def open_session(self, body: Mapping[str, JSON]) -> RecordedSession:
        """Open a session for a task and start its rollout, whose random key follows from the seed, if one is given."""
        task, seed = _parse_task(body.get("task")), body.get("seed")
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < NUM_SEEDS):
            raise HTTPError("seed must be a whole number of at least 0 and below 2**63", field="seed")
        session = RecordedSession(task, has_reward=self.reward is not None)
        with self._lock:
            limit = self.settings.max_sessions
            if len(self.sessions) >= limit:
                message = f"there are {limit} sessions, and there may be no more: end some"
                raise HTTPError(message, status=429, code="too_many_sessions")
            self.sessions[session.name] = session
        key = jax.random.key(random_seed() if seed is None else seed)
        threading.Thread(target=self._roll_out, args=(session, task, key), name="flowgrpo-session", daemon=True).start()
        return session

    def _roll_out(self, session: RecordedSession, task: Task, key: jax.Array) -> None:
        """Roll out the one trajectory of a session, in the session's thread."""
        completion: list[Future[Completion]] = []

        def submit(request: Request) -> "Future[Completion]":
            completion[:] = [self.engine.submit(request)]
            return completion[0]

        def call_tool(call: Call) -> Result:
            if "stop" in call.arguments:
                return to_result({})
            event = None
            if "reply" in call.arguments:
                event = session.reply(call.arguments["reply"], completion[0].result() if completion else None)
            event = event or session.next_event(self.settings.silent_seconds)
            if "ended" in event and "task" in call.arguments:
                return Result("", failure=event["ended"]["failed"] or "the session ended without a request")
            return to_result(event)

        try:
            rollout = hosted(
                self.env,
                submit,
                call_tool=call_tool,
                reward=self.reward,
                temperature=self.settings.temperature,
                concurrency=1,
            )
            trajectory = rollout([task], key[None], [0]).trajectories[0]
            self.on_session_end(trajectory)
            session.finish(trajectory)
            resolve = partial(session.trajectory.set_result, trajectory)
        except Exception as error:  # the engine is closed, or a file can't be written
            reason = f"it failed: {first_line(error)}"
            logging.getLogger(__name__).warning(f"session {session.name} is over: {reason}")
            session.close(reason)
            resolve = partial(session.trajectory.set_exception, HTTPError(reason, status=500, code="session_failed"))
        with self._lock:
            self.sessions.pop(session.name, None)
        resolve()  # last: whoever waits for it may open another session

    # Weights ------------------------------------------------------------------------------------------------

    async def update_weights(self, body: Mapping[str, JSON]) -> Mapping[str, JSON]:
        """Load weights of the same shape from a model folder; no request is dropped, and later tokens have the new
        version."""
        folder, version = body.get("folder"), body.get("version")
        if not isinstance(version, int) or isinstance(version, bool) or not 0 <= version <= MAX_INT32:
            raise HTTPError(f"version must be a whole number of at most {MAX_INT32}, of the weights", field="version")
        if not isinstance(folder, str) or not folder:
            raise HTTPError("give the folder of a model", field="folder")
        try:
            params = (await asyncio.to_thread(self.load, folder)).params
        except (BadInput, OSError, ValueError) as error:  # ValueError: of a name that no file can have
            raise HTTPError(f"no model can be loaded: {first_line(error):.500}", field="folder") from None
        shapes = [jax.tree.map(jnp.shape, tree) for tree in (params, self.params)]
        if shapes[0] != shapes[1]:
            raise HTTPError(f"the model in {folder} has another shape than the one that is served", field="folder")
        self.params = params
        self.engine.update_weights(params, version)
        return {"version": version}

    # Requests without a session -----------------------------------------------------------------------------

    async def complete(self, request: ChatRequest) -> list[ChatResponse]:
        """Responses to a request without a session, `request.n` of them."""
        settings = self.settings
        if reason := too_long_reason(self.tokenizer, request.messages, request.prompt, settings.context_tokens):
            raise HTTPError(reason, code="context_length_exceeded")
        prompt = await asyncio.to_thread(self._tokenize, request)
        available = settings.context_tokens - len(prompt)
        max_tokens = min(available, settings.max_tokens if request.max_tokens is None else request.max_tokens)
        if available < (request.max_tokens != 0):
            raise HTTPError(
                f"the request has {len(prompt)} tokens, which must be less than {settings.context_tokens}",
                code="context_length_exceeded",
            )
        scores_prompt = request.echo and request.logprobs is not None
        prompt_scores, banned_mass = (
            await asyncio.to_thread(self._score_prompt, prompt) if scores_prompt else (None, ())
        )
        banned_ids = self.engine.banned
        if max_tokens == 0:
            empty = ChatResponse(
                content="",
                finish_reason="length",
                tokens=(),
                prompt=prompt,
                logprobs=(),
                prompt_scores=prompt_scores,
                banned_ids=banned_ids,
                banned_mass=banned_mass,
            )
            return [empty] * request.n
        is_greedy = request.temperature == 0
        if (is_greedy or (request.top_p is not None and request.top_p < 1)) and not self.engine.mixed:
            raise HTTPError("this gateway samples from the whole distribution: leave out temperature=0 and top_p")
        key = jax.random.key(random_seed() if request.seed is None else request.seed % NUM_SEEDS)
        generation = Request(
            tokens=prompt,
            key=key,
            max_tokens=max_tokens,
            temperature=1.0 if is_greedy or request.temperature is None else request.temperature,
            top_k=1 if is_greedy else MAX_TOP_K,
            top_p=1.0 if request.top_p is None else request.top_p,
            stop_ids=self.tokenizer.stop_ids,
            stop=request.stop,
            deadline=settings.timeout_seconds,
        )
        try:
            futures = [
                self.engine.submit(generation._replace(key=jax.random.fold_in(key, i))) for i in range(request.n)
            ]
        except BadInput as error:
            raise HTTPError(first_line(error)) from None
        try:
            completions = await asyncio.gather(*map(asyncio.wrap_future, futures))
        finally:  # if the client has disconnected, its slots become free
            for future in futures:
                future.cancel()
        responses = []
        for completion in completions:
            if completion.finish_reason not in ("stop", "length"):
                raise HTTPError(f"no answer came within {settings.timeout_seconds:g} s", status=504, code="timeout")
            response, _ = to_response(
                self.tokenizer,
                self._chat.call_format,
                completion.tokens,
                prompt,
                stop=request.stop,
                tools=request.tools,
                turn=0,
            )
            response = with_logprobs(response, completion)
            responses.append(
                replace(response, prompt_scores=prompt_scores, banned_ids=banned_ids, banned_mass=banned_mass)
            )
        return responses

    def _tokenize(self, request: ChatRequest) -> tuple[int, ...]:
        """Token ids of the request's messages or prompt."""
        try:
            if request.prompt is None:
                messages = [to_template(message) for message in request.messages]
                return self._chat.begin(messages, request.tools).tokens
            ids = tuple(self.tokenizer.encode(request.prompt)) if isinstance(request.prompt, str) else request.prompt
        except BadInput as error:
            raise HTTPError(first_line(error)) from None
        if not ids or max(ids) >= self.tokenizer.vocab_size:
            raise HTTPError(f"prompt must hold ids below {self.tokenizer.vocab_size}", field="prompt")
        return ids

    def _score_prompt(
        self, prompt: tuple[int, ...]
    ) -> tuple[list[tuple[float | None, dict[int, float]]], list[float | None]]:
        """Scores of each prompt token, as `ChatResponse.prompt_scores` and `banned_mass`; the first token has none.

        Log-probabilities are among all ids; the alternatives are the likeliest id and the token itself.
        """
        length = -(-len(prompt) // SCORE_CHUNK) * SCORE_CHUNK
        tokens = jnp.zeros((1, length), jnp.int32).at[0, : len(prompt)].set(jnp.array(prompt, jnp.int32))
        logp, best_id, best_logp, mass = jax.device_get(_score(self.policy, self.params, tokens, self.engine.banned))
        scores: list[tuple[float | None, dict[int, float]]] = [(None, {})]
        for position in range(len(prompt) - 1):
            alternatives = {int(best_id[position]): float(best_logp[position])}
            alternatives[prompt[position + 1]] = float(logp[position])
            scores.append((float(logp[position]), alternatives))
        return scores, [None, *map(float, mass[: len(prompt) - 1])]


@partial(jax.jit, static_argnums=(0, 3))
def _score(policy: Policy, params: Params, tokens: jax.Array, banned: tuple[int, ...]) -> tuple[jax.Array, ...]:
    """(log-probability of the next token, likeliest id at its position, log-probability of that, probability of the
    `banned` ids), for every token but the last; logits are computed for `SCORE_CHUNK` tokens at a time."""
    hidden = policy.hidden(params, tokens, None, None, None)[0][0]
    following = jnp.append(tokens[0, 1:], 0)

    def score_chunk(chunk):
        hidden_sd, next_s = chunk
        logp_sv = jax.nn.log_softmax(policy.unembed(params, hidden_sd[None])[0].astype(jnp.float32))
        next_logp_s = jnp.take_along_axis(logp_sv, next_s[:, None], axis=-1)[:, 0]
        mass_s = jnp.exp(logp_sv[:, jnp.array(banned, jnp.int32)]).sum(axis=-1)
        return next_logp_s, logp_sv.argmax(axis=-1), logp_sv.max(axis=-1), mass_s

    hidden_csd = hidden.reshape(-1, SCORE_CHUNK, hidden.shape[-1])
    chunks = jax.lax.map(score_chunk, (hidden_csd, following.reshape(-1, SCORE_CHUNK)))
    return tuple(x.reshape(-1) for x in chunks)  # type: ignore[return-value]


def random_seed() -> int:
    """A seed that nobody can guess."""
    return int.from_bytes(os.urandom(7))


def _parse_task(value: JSON) -> Task:
    """The task of a session, with the fields of a task file; an empty query if none is given."""
    fields = {} if value is None else {"query": value} if isinstance(value, str) else value
    if not isinstance(fields, Mapping) or not isinstance(fields.get("query", ""), str):
        raise HTTPError("task must be a query, or an object with query, answers and domain", field="task")
    answers = fields.get("answers", [])
    answers = [answers] if isinstance(answers, str) else answers
    if not isinstance(answers, list) or not all(isinstance(answer, str) for answer in answers):
        raise HTTPError("task.answers must be a list of strings", field="task")
    metadata = {name: field for name, field in fields.items() if name not in ("id", "query", "answers", "domain")}
    return Task(
        str(fields.get("id", "")), fields.get("query", ""), tuple(answers), str(fields.get("domain", "")), metadata
    )
