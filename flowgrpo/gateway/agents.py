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
import json
import math
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from flowgrpo.contracts import Call, Completion, Request, Result
from flowgrpo.gateway.agent_env import digest_of
from flowgrpo.gateway.agent_start import Agent, AgentFailed, AgentProcess, make_starter, run_program
from flowgrpo.gateway.agent_worker import failure_of
from flowgrpo.gateway.live_session import Ended, LiveSession
from flowgrpo.gateway.server import Gateway
from flowgrpo.types import BadInput, check_range

Submit = Callable[[Request], "Future[Completion]"]


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
        judged: bool = False,
        environ: Mapping[str, str] | None = None,
    ):
        """An agent has so many `seconds` in all, and `silence` between an answer and its next request, or its end.

        Where a reward judges what they answer (`judged`), agents can give themselves none.
        """
        check_range("AgentHost", "seconds", seconds, 0, exclusive=True)
        check_range("AgentHost", "silence", silence, 0, exclusive=True)
        check_range("AgentHost", "retries", retries, 0, whole=True)
        self.gateway, self.seconds, self.silence, self.retries = gateway, seconds, silence, retries
        self.judged = judged
        self._start = make_starter(agent, environ or {}, model or gateway.model)
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
        if isinstance(start, AgentProcess):
            asyncio.run_coroutine_threadsafe(start.begin(), self._loop).result()
        elif isinstance(start, partial) and start.func is run_program and shutil.which(start.args[0][0]) is None:
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
        session = LiveSession(task, judged=self.judged)
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
                ended = _ended(await self._start(task, url), judged=self.judged)
        except TimeoutError:
            ended = Ended(failed=f"the agent did not end within {self.seconds:g} s")
        except AgentFailed as error:
            ended = Ended(failed=str(error))
        except Exception as error:  # of somebody else's code
            ended = Ended(failed=failure_of(error))
        finally:
            self._running.discard(own)
            session.events.put(ended)
            self.gateway.remove(session)  # also of a trajectory that was stopped, whose thread does not come again

    async def _end_all(self) -> None:
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        if isinstance(self._start, AgentProcess):
            await self._start.close()


def as_result(event: Mapping[str, Any]) -> Result:
    """Make the result of an effect of what an agent does next."""
    return Result(json.dumps(event))


def _ended(given: Any, *, judged: bool) -> Ended:
    """How a function's value ends its trajectory."""
    if given is None or isinstance(given, str):
        return Ended(output=given)
    if judged and isinstance(given, bool | int | float):
        why = f"the agent returned {given!r:.40}, but a reward judges its answer: return that as a string"
        return Ended(failed=f"{why}, or let agents give their reward (posted)")
    if isinstance(given, bool | int | float):
        if not math.isfinite(given):
            return Ended(failed=f"the agent returned {given}: a reward must be finite")
        return Ended(reward=float(given))
    return Ended(failed=f"the agent returned {type(given).__name__}: return its answer as a string, a reward, or None")
