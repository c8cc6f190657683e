"""Run agents of somebody else's, a program or a function, behind a gateway.

    with AgentHost("python my_agent.py", gateway) as host:
        env = agent_env(text, turns=8, max_tokens=256, context_tokens=2048)
        rollout = hosted(env, host.submit_to(engine), do=host.do)

A program is started for each trajectory. It finds the base URL in OPENAI_BASE_URL, as the SDKs of OpenAI do, the task
in FLOWGRPO_TASK and on its standard input (a line of JSON), and its standard output is its answer. A function is called
with the task and the base URL, and returns its answer, a number that is its reward, or None; one that is named,
"MODULE:FUNCTION", runs in a process of its own, which serves all trajectories.

An agent that crashes, hangs or exits with another status than 0 ends its trajectory as ABORTED, which takes no part in
training (F5); one that does so before its first request is started again, a few times.
"""

import asyncio
import inspect
import json
import math
import os
import queue
import re
import secrets
import shlex
import shutil
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any

from flowgrpo.contracts import Call, Completion, Request, Result
from flowgrpo.gateway.agent_env import answer_from_json, digest_of
from flowgrpo.gateway.agent_worker import READY, failure_of, task_told
from flowgrpo.gateway.histories import Histories
from flowgrpo.gateway.server import Gateway
from flowgrpo.gateway.wire import Answer, Asked, Refusal
from flowgrpo.types import BadInput, check_range

Agent = str | Sequence[str] | Callable[..., Any]
Submit = Callable[[Request], "Future[Completion]"]
MAX_OUTPUT = 1 << 20  # bytes that a program writes
ENDING = 1.0  # seconds that a process which says no more is given to end by itself
FUNCTION = re.compile(r"[\w.]+:\w+")  # what names one, and is no command
OVER = Refusal("the session is over", status=410, code="session_over")


@dataclass(frozen=True)
class Ended:
    """How an agent ended."""

    output: str | None = None
    reward: float | None = None
    correct: bool | None = None
    failed: str = ""  # why there is no answer

    def as_json(self) -> dict[str, Any]:
        """As the environment reads it."""
        return {"output": self.output, "reward": self.reward, "correct": self.correct, "failed": self.failed}


@dataclass(eq=False)
class Pending:
    """A request that waits for its answer."""

    asked: Asked
    future: "Future[Answer]" = field(default_factory=Future)


class LiveSession:
    """An agent at work, between the server's loop, which has its requests, and the thread that plays its trajectory."""

    def __init__(self, task: Any):
        self.name, self.task = secrets.token_urlsafe(16), task
        self.events: queue.SimpleQueue[Pending | Ended] = queue.SimpleQueue()
        self.current: Pending | None = None  # what the trajectory's thread is to answer
        self.histories = Histories()
        self.rewarded: Mapping[str, Any] | None = None
        self.over = False
        self.answered = 0
        self._ended = False
        self._lock = threading.Lock()
        self._by_identity: dict[tuple[Any, ...], Pending] = {}  # the newest of each
        self._stop: Callable[[], Any] = lambda: None  # ends the agent

    # In the server's loop ---------------------------------------------------------------------------------

    async def ask(self, asked: Asked, *, again: bool) -> list[Answer]:
        """Pass a request on, and wait for its answer; one that a client repeats is answered once."""
        if asked.n > 1:
            raise Refusal("n must be 1 within a session, where each answer is a turn", field="n")
        with self._lock:
            if self.over or self._ended:
                raise OVER
            pending = self._by_identity.get(asked.identity) if again else None
            if pending is None:
                pending = self._by_identity[asked.identity] = Pending(asked)
                self.events.put(pending)
        try:
            # Shielded: the turn is counted, whether this client is still there or comes again.
            return [await asyncio.shield(asyncio.wrap_future(pending.future))]
        except CancelledError:
            raise OVER from None

    async def reward(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Take the reward that the agent gives itself, once."""
        reward, correct = read_reward(given)
        with self._lock:
            if self.over:
                raise OVER
            if self.rewarded is not None:
                raise Refusal("the session has its reward: it is given once", status=409, code="reward_given")
            self.rewarded = {"reward": reward, "correct": correct}
        return {"session": self.name, "reward": reward}

    async def end(self) -> None:
        """End the agent from outside."""
        self._stop()

    def end_with(self, ended: Ended) -> None:
        """End the session from the server's side, once."""
        with self._lock:
            if self.over or self._ended:
                raise OVER
            self._ended = True
        self.events.put(ended)

    def describe(self) -> Mapping[str, Any]:
        """How far it is."""
        return {"session": self.name, "answered": self.answered, "over": self.over}

    # In the trajectory's thread -----------------------------------------------------------------------------

    def next_event(self, seconds: float) -> dict[str, Any]:
        """Wait for what the agent does next, as the environment hears it."""
        try:
            event = self.events.get(timeout=seconds)
        except queue.Empty:
            self.close()
            self._stop()
            return {"ended": Ended(failed=f"the agent asked for nothing and did not end in {seconds:g} s").as_json()}
        if isinstance(event, Ended):
            self.close()
            return {"ended": self._with_reward(event).as_json()}
        self.current = event
        return {"asks": self._asks(event.asked, whole=False)}

    def reply(self, reply: Mapping[str, Any], completion: Completion | None) -> dict[str, Any] | None:
        """Answer the request, or refuse it. Returns the same request where all of it is wanted; else None."""
        pending = self.current
        assert pending is not None
        if reply.get("whole"):
            return {"asks": self._asks(pending.asked, whole=True)}
        self.current = None
        if "refuse" in reply:
            refused = reply["refuse"]
            _settle(pending, Refusal(refused["message"], code=refused["code"], field="messages"))
            return None
        answer = answer_from_json(reply["answer"])
        if pending.asked.messages:
            self.histories.answered(pending.asked.messages, pending.asked.tools, answer.message)
        else:
            self.histories.answered_prompt()
        self.answered += 1
        _settle(pending, with_scores(answer, completion))
        return None

    def close(self) -> None:
        """Refuse whatever comes, or still waits."""
        with self._lock:
            self.over = True
            waiting = list(self._by_identity.values())
        for pending in waiting:
            _settle(pending, OVER)

    def _with_reward(self, ended: Ended) -> Ended:
        return ended if self.rewarded is None or ended.failed else replace(ended, **self.rewarded)

    def _asks(self, asked: Asked, *, whole: bool) -> dict[str, Any]:
        """A request as the environment hears it: what is new in it, and where it goes on from."""
        how: dict[str, Any] = {"max_tokens": asked.max_tokens, "stop": list(asked.stop)}
        if asked.prompt is not None:
            return how | {"prompt": asked.prompt if isinstance(asked.prompt, str) else list(asked.prompt)}
        place = self.histories.place(asked.messages, asked.tools)
        if whole:
            return how | {
                "kind": "rewrite",
                "after": None,
                "messages": list(map(dict, asked.messages)),
                "tools": list(asked.tools),
            }
        found = how | {"kind": place.kind, "after": place.after, "messages": list(map(dict, place.new))}
        # Tools are in what a context begins with, and answers are read by them.
        return found | {"tools": list(asked.tools)}


def read_reward(given: Mapping[str, Any]) -> tuple[float, bool | None]:
    """The reward of a body, and whether it says that the task is solved; raises `Refusal`."""
    reward, correct = given.get("reward"), given.get("correct")
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
        raise Refusal("reward must be a finite number", field="reward")
    if correct is not None and not isinstance(correct, bool):
        raise Refusal("correct must be true or false", field="correct")
    return float(reward), correct


def with_scores(answer: Answer, completion: Completion | None) -> Answer:
    """The answer with the log-probabilities and versions of its tokens, where this completion is where they come
    from."""
    if completion is None or tuple(completion.tokens) != answer.tokens:
        return answer
    scores = tuple(map(float, completion.logp_sampled))
    return replace(answer, logprobs=scores, version=tuple(map(int, completion.version)), reused=completion.reused)


def _settle(pending: Pending, outcome: Answer | Refusal) -> None:
    """Answer a request that is not answered yet."""
    if pending.future.done():
        return
    with suppress(Exception):  # answered by another thread in this moment
        if isinstance(outcome, Refusal):
            pending.future.set_exception(outcome)
        else:
            pending.future.set_result(outcome)


class AgentHost:
    """Starts an agent for each trajectory, and plays it as the effect of kind "agent"; close it, or use a block."""

    def __init__(
        self,
        agent: Agent,
        gateway: Gateway,
        *,
        model: str | None = None,
        seconds: float = 600.0,
        silence: float = 60.0,
        retries: int = 2,
        environ: Mapping[str, str] | None = None,
    ):
        """An agent has so many `seconds` in all, and `silence` between an answer and its next request, or its end."""
        check_range("AgentHost", "seconds", seconds, 0, exclusive=True)
        check_range("AgentHost", "silence", silence, 0, exclusive=True)
        check_range("AgentHost", "retries", retries, 0, whole=True)
        self.gateway, self.seconds, self.silence, self.retries = gateway, seconds, silence, retries
        self._start = _starter(agent, environ or {}, model or gateway.model)
        self._sessions: dict[tuple[int, ...], LiveSession] = {}
        self._local = threading.local()
        self._lock = threading.Lock()
        self._running: set[asyncio.Task] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="flowgrpo-agents", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise `BadInput` where there is no such agent."""
        start = self._start
        if isinstance(start, _Worker):
            asyncio.run_coroutine_threadsafe(start.begin(), self._loop).result()
        elif isinstance(start, partial) and start.func is _program and shutil.which(start.args[0][0]) is None:
            raise BadInput(f"the agent's program {start.args[0][0]!r} is not found: give a command that can be run")

    def submit_to(self, submit: Submit) -> Submit:
        """`submit` of an engine, whose completions also tell agents that ask for them their log-probabilities."""
        return partial(self._submit, submit)

    def _submit(self, submit: Submit, request: Request) -> "Future[Completion]":
        # A trajectory submits, waits and steps in one thread.
        self._local.future = future = submit(request)
        return future

    def do(self, call: Call) -> Result:
        """The effect: start, answer or stop the agent of a trajectory -> what it does next."""
        given = call.arguments
        if "task" in given and "again" not in given:
            return self._begin(call.seed, given["task"])
        if "again" in given:
            return self._begin_again(call.seed, given["task"], given["again"])
        with self._lock:
            session = self._sessions.get(call.seed)
        if session is None or session.over:
            return as_result({"gone": True})
        if "stop" in given:
            self._drop(call.seed, session)
            return as_result({})
        event = session.reply(given["reply"], self._completion()) or session.next_event(self.silence)
        if "ended" in event:
            self._drop(call.seed, session)
        return as_result(event)

    def close(self) -> None:
        """End all agents."""
        for session in list(self._sessions.values()):
            session.close()
            self.gateway.remove(session)
        self._sessions.clear()
        if self._loop.is_running():
            asyncio.run_coroutine_threadsafe(self._end_all(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        if not self._loop.is_closed():
            self._loop.close()

    def __enter__(self) -> "AgentHost":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    # Sessions -----------------------------------------------------------------------------------------------

    def _begin(self, seed: tuple[int, ...], task: Any) -> Result:
        """Start an agent; what ends before its first request is started again, a few times."""
        event: dict[str, Any] = {}
        for _ in range(self.retries + 1):
            session = self._launch(seed, task)
            event = session.next_event(self.silence)
            if "asks" in event:
                return as_result(event)
            self._drop(seed, session)
            if not event["ended"]["failed"]:
                return Result("", failure="the agent ended without a request")
        return Result("", failure=f"the agent ended without a request: {event['ended']['failed']}")

    def _begin_again(self, seed: tuple[int, ...], task: Any, exchanges: Sequence[Any]) -> Result:
        """Start the agent of a process that was killed, and bring it to where it was."""
        session = self._launch(seed, task)
        event = session.next_event(self.silence)
        for number, (digest, reply) in enumerate(exchanges):
            if "asks" not in event or digest_of(event["asks"]) != digest:
                self._drop(seed, session)
                why = f"the agent was started again after a kill, and its request {number} is another than before"
                return as_result({"ended": Ended(failed=why).as_json()})
            event = session.reply(reply, None) or session.next_event(self.silence)
        if "ended" in event:
            self._drop(seed, session)
        return as_result(event)

    def _launch(self, seed: tuple[int, ...], task: Any) -> LiveSession:
        session = LiveSession(task)
        url = self.gateway.add(session)
        with self._lock:
            old = self._sessions.pop(seed, None)
            self._sessions[seed] = session
        if old is not None:  # of a rollout that was abandoned
            self._end(old)
        running = asyncio.run_coroutine_threadsafe(self._run(session, task, url), self._loop)
        session._stop = running.cancel
        return session

    def _drop(self, seed: tuple[int, ...], session: LiveSession) -> None:
        with self._lock:
            if self._sessions.get(seed) is session:
                del self._sessions[seed]
        self._end(session)

    def _end(self, session: LiveSession) -> None:
        session.close()
        self.gateway.remove(session)
        session._stop()

    def _completion(self) -> Completion | None:
        """The completion that this thread waited for last."""
        future = getattr(self._local, "future", None)
        return future.result() if future is not None and future.done() and not future.cancelled() else None

    # In the agents' loop ------------------------------------------------------------------------------------

    async def _run(self, session: LiveSession, task: Any, url: str) -> None:
        """Run an agent to its end, whatever that is, and say how it ended."""
        own = asyncio.current_task()
        assert own is not None
        self._running.add(own)
        ended = Ended(failed="the agent was ended from outside")
        try:
            async with asyncio.timeout(self.seconds):
                ended = _ended(await self._start(task, url))
        except TimeoutError:
            ended = Ended(failed=f"the agent did not end within {self.seconds:g} s")
        except AgentFailed as error:
            ended = Ended(failed=str(error))
        except Exception as error:  # of somebody else's code
            ended = Ended(failed=failure_of(error))
        finally:
            self._running.discard(own)
            session.events.put(ended)

    async def _end_all(self) -> None:
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        if isinstance(self._start, _Worker):
            await self._start.close()


class AgentFailed(RuntimeError):
    """An agent's program that ended badly."""


def as_result(event: Mapping[str, Any]) -> Result:
    """Make the result of an effect of what an agent does next."""
    return Result(json.dumps(event))


def _ended(given: Any) -> Ended:
    """How a function's value ends its trajectory."""
    if given is None or isinstance(given, str):
        return Ended(output=given)
    if isinstance(given, bool | int | float):
        if not math.isfinite(given):
            return Ended(failed=f"the agent returned {given}: a reward must be finite")
        return Ended(reward=float(given))
    return Ended(failed=f"the agent returned {type(given).__name__}: return its answer as a string, a reward, or None")


# Starting an agent ------------------------------------------------------------------------------------------

Start = Callable[[Any, str], Awaitable[Any]]


def _starter(agent: Agent, environ: Mapping[str, str], model: str) -> Start:
    """`start(task, base URL)` of a program or a function."""
    if isinstance(agent, str) and FUNCTION.fullmatch(agent):
        return _Worker(agent, {**environ, "OPENAI_MODEL": model})
    if isinstance(agent, str | list | tuple):
        words = shlex.split(agent) if isinstance(agent, str) else [str(word) for word in agent]
        if not words:
            raise BadInput("the agent's command is empty: give a program with its arguments")
        return partial(_program, words, {**environ, "OPENAI_MODEL": model})
    if not callable(agent):
        raise BadInput(f"agent={agent!r:.80} must be a command or a function of a task and a base URL")
    return partial(_coroutine if inspect.iscoroutinefunction(agent) else _function, agent)


async def _function(agent: Callable[..., Any], told: Any, url: str) -> Any:
    """Call a function in a thread of its own, which nothing can end; whoever waits for it goes on all the same."""
    loop, done = asyncio.get_running_loop(), asyncio.Event()
    outcome: list[Any] = []

    def call() -> None:
        try:
            outcome.append((agent(task_told(told), url), None))
        except BaseException as error:
            outcome.append((None, error))
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(done.set)

    threading.Thread(target=call, name="flowgrpo-agent", daemon=True).start()
    await done.wait()
    value, error = outcome[0]
    if error is not None:
        raise error if isinstance(error, Exception) else AgentFailed(failure_of(error))
    return await value if inspect.isawaitable(value) else value


async def _coroutine(agent: Callable[..., Awaitable[Any]], told: Any, url: str) -> Any:
    return await agent(task_told(told), url)


def kill_group(process: asyncio.subprocess.Process) -> None:
    """End a process and all that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


class _Worker:
    """A process that calls an agent's function, started when it is first needed, and again when it has died."""

    def __init__(self, name: str, environ: Mapping[str, str]):
        self.name, self.environ = name, environ
        self._process: asyncio.subprocess.Process | None = None
        self._starting = asyncio.Lock()
        self._waiting: dict[int, asyncio.Future] = {}
        self._numbers = count()
        self._readings: set[asyncio.Task] = set()  # one for each process, until it has ended

    async def begin(self) -> None:
        """Start the process; `BadInput` where there is no such function."""
        try:
            async with self._starting:
                await self._begin()
        except AgentFailed as error:
            raise BadInput(str(error)) from None

    async def __call__(self, told: Any, url: str) -> Any:
        """Call the function, and return its value."""
        async with self._starting:
            if self._process is None:
                await self._begin()
        return await self._call(told, url)

    async def _call(self, told: Any, url: str) -> Any:
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            await self._send({"number": number, "task": told, "url": url})
            said = await answer
        except asyncio.CancelledError:
            await self._send({"number": number, "stop": True})
            raise
        finally:
            self._waiting.pop(number, None)
        if "failed" in said:
            raise AgentFailed(said["failed"])
        return said["value"]

    async def _begin(self) -> None:
        words = [sys.executable, "-c", "from flowgrpo.gateway.agent_worker import main; main()", self.name]
        env = {**os.environ, "OPENAI_API_KEY": "flowgrpo", "JAX_PLATFORMS": "cpu", **self.environ}
        pipe = asyncio.subprocess.PIPE
        self._process = process = await asyncio.create_subprocess_exec(
            *words, stdin=pipe, stdout=pipe, env=env, start_new_session=True, limit=MAX_OUTPUT
        )
        ready = self._waiting[READY] = asyncio.get_running_loop().create_future()
        reading = asyncio.create_task(self._read(process))
        self._readings.add(reading)
        reading.add_done_callback(self._readings.discard)
        if "failed" in (said := await ready):
            self._process = None
            raise AgentFailed(said["failed"])

    async def _send(self, line: Mapping[str, Any]) -> None:
        process = self._process
        with suppress(ConnectionError, RuntimeError):  # it has died, which `_read` says
            assert process is not None
            assert process.stdin is not None
            process.stdin.write(json.dumps(line).encode() + b"\n")
            await process.stdin.drain()

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        """Pass answers on; where the process ends, nobody who waits for it waits on."""
        assert process.stdout is not None
        with suppress(ValueError):  # a line that is too long: the process is ended
            while line := await process.stdout.readline():
                said = json.loads(line)
                answer = self._waiting.get(said["number"])
                if answer is not None and not answer.done():
                    answer.set_result(said)
        self._process, left = None, list(self._waiting.values())  # what comes later is for the next process
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), ENDING)
        kill_group(process)
        status = await process.wait()
        for answer in left:
            if not answer.done():
                answer.set_result({"failed": f"the process of {self.name} ended with status {status}"})

    async def close(self) -> None:
        """End the process."""
        if self._process is not None:
            kill_group(self._process)
        await asyncio.gather(*self._readings)


async def _program(words: Sequence[str], environ: Mapping[str, str], told: Any, url: str) -> str:
    """Run a program to its end; what it writes is its answer. It is killed, with all that it started, where it is not
    waited for any more."""
    query = told["query"] if isinstance(told, Mapping) and "query" in told else json.dumps(told)
    filled = [word.replace("{query}", query).replace("{base_url}", url) for word in words]
    line = json.dumps(told)
    env = {**os.environ, "OPENAI_API_KEY": "flowgrpo", **environ, "OPENAI_BASE_URL": url, "FLOWGRPO_TASK": line}
    pipe = asyncio.subprocess.PIPE
    try:
        process = await asyncio.create_subprocess_exec(
            *filled, stdin=pipe, stdout=pipe, stderr=pipe, env=env, start_new_session=True, limit=MAX_OUTPUT
        )
    except OSError as error:
        raise AgentFailed(f"{filled[0]!r} can't be started: {error.strerror}") from None
    try:
        said, complaint, _ = await asyncio.gather(
            _read(process.stdout), _read(process.stderr), _write(process.stdin, line), return_exceptions=False
        )
        status = await process.wait()
    finally:
        kill_group(process)
    if status:
        last = complaint.decode(errors="replace").strip().splitlines()[-1:]
        raise AgentFailed(f"the agent exited with status {status}: {''.join(last):.300}")
    return said.decode(errors="replace").strip()


async def _read(stream: asyncio.StreamReader | None) -> bytes:
    """All that a program writes; the last part of it where that is too much."""
    assert stream is not None
    found = b""
    while part := await stream.read(1 << 16):
        found = (found + part)[-MAX_OUTPUT:]
    return found


async def _write(stream: asyncio.StreamWriter | None, line: str) -> None:
    assert stream is not None
    with suppress(ConnectionError, BrokenPipeError):
        stream.write(line.encode() + b"\n")
        await stream.drain()
        stream.close()
