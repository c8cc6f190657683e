"""Run external agents, programs or functions, behind a gateway.

    with AgentHost("python my_agent.py", gateway) as host:
        env = agent_env(text, turns=8, max_tokens=256, context_tokens=2048)
        rollout = hosted(env, host.submit_to(engine.submit), call_tool=host.call_tool)

A program is started for each trajectory. It finds the base URL in OPENAI_BASE_URL, as the SDKs of OpenAI do, and the
task in FLOWGRPO_TASK and on its standard input (a line of JSON); its standard output is its answer. A function is
called with the task and the base URL, and returns its answer, a number that is its reward, or None; one that is given
by name, "MODULE:FUNCTION", runs in a process of its own, which serves all trajectories.

An agent that crashes, hangs or exits with a status other than 0 ends its trajectory as ABORTED, which takes no part in
training (F5); one that does so before its first request is started again, up to `retries` times.
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
from flowgrpo.gateway.agent_env import request_digest
from flowgrpo.gateway.agent_start import AgentFailed, AgentProcess, ExternalAgent, make_starter, run_program
from flowgrpo.gateway.agent_worker import exception_message
from flowgrpo.gateway.live_session import LiveSession, SessionEnd
from flowgrpo.gateway.server import Gateway
from flowgrpo.types import JSON, BadInput, check_range

Submit = Callable[[Request], "Future[Completion]"]


class AgentHost:
    """Starts an external agent for each trajectory, and runs the effects of kind "agent"; close it, or use `with`."""

    def __init__(
        self,
        agent: ExternalAgent,
        gateway: Gateway,
        *,
        model: str | None = None,
        timeout: float = 600.0,
        silent_timeout: float = 60.0,
        retries: int = 2,
        has_reward: bool = False,
        environ: Mapping[str, str] | None = None,
    ):
        """Start nothing yet; `check` says whether the agent can be started.

        Args:
            agent: a command, "MODULE:FUNCTION", or a function of a task and a base URL.
            gateway: the server that the agent's requests are sent to.
            model: value of OPENAI_MODEL for the agent; None: the gateway's model name.
            timeout: seconds that an agent may take in all.
            silent_timeout: seconds between a response and the agent's next request, or its end.
            retries: how often an agent that fails before its first request is started again.
            has_reward: whether a reward function scores the outputs; then agents can't give themselves a reward.
            environ: further environment variables of the agent.
        """
        check_range("AgentHost", "timeout", timeout, 0, exclusive=True)
        check_range("AgentHost", "silent_timeout", silent_timeout, 0, exclusive=True)
        check_range("AgentHost", "retries", retries, 0, whole=True)
        self.gateway, self.timeout, self.silent_timeout, self.retries = gateway, timeout, silent_timeout, retries
        self.has_reward = has_reward
        self._start = make_starter(agent, environ or {}, model or gateway.model)
        self._sessions: dict[tuple[int, ...], LiveSession] = {}  # by the seed of the trajectory
        self._local = threading.local()
        self._lock = threading.Lock()
        self._running: set[asyncio.Task] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="flowgrpo-agents", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise `BadInput` if the agent's program or function does not exist."""
        start = self._start
        if isinstance(start, AgentProcess):
            asyncio.run_coroutine_threadsafe(start.start(), self._loop).result()
        elif isinstance(start, partial) and start.func is run_program and shutil.which(start.args[0][0]) is None:
            raise BadInput(f"the agent's program {start.args[0][0]!r} is not found: give a command that can be run")

    def submit_to(self, submit: Submit) -> Submit:
        """Wrap an engine's `submit` so that agents which request log-probabilities get those of its completions."""

        def submit_and_remember(request: Request) -> "Future[Completion]":
            # A trajectory submits, waits and steps in one thread.
            self._local.future = future = submit(request)
            return future

        return submit_and_remember

    def call_tool(self, call: Call) -> Result:
        """Run an effect of kind "agent": start, answer or stop the agent of a trajectory -> its next event."""
        arguments = call.arguments
        if "task" in arguments and "again" not in arguments:
            return self._start_session(call.seed, arguments["task"])
        if "again" in arguments:
            return self._restart_session(call.seed, arguments["task"], arguments["again"])
        with self._lock:
            session = self._sessions.get(call.seed)
        if session is None or session.is_over:
            return to_result({"gone": True})
        if "stop" in arguments:
            self._drop(call.seed, session)
            return to_result({})
        future = getattr(self._local, "future", None)  # of the completion that this thread waited for last
        completion = future.result() if future is not None and future.done() and not future.cancelled() else None
        event = session.reply(arguments["reply"], completion) or session.next_event(self.silent_timeout)
        if "ended" in event:
            self._drop(call.seed, session)
        return to_result(event)

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

    def _start_session(self, seed: tuple[int, ...], task: JSON) -> Result:
        """Start an agent; one that fails before its first request is started again, up to `retries` times."""
        event: dict[str, JSON] = {}
        for _ in range(self.retries + 1):
            session = self._launch(seed, task)
            event = session.next_event(self.silent_timeout)
            if "asks" in event:
                return to_result(event)
            self._drop(seed, session)
            if not event["ended"]["failed"]:
                return Result("", failure="the agent ended without a request")
        return Result("", failure=f"the agent ended without a request: {event['ended']['failed']}")

    def _restart_session(self, seed: tuple[int, ...], task: JSON, exchanges: Sequence[JSON]) -> Result:
        """Start the agent of a killed process again, and replay its exchanges up to where it was."""
        session = self._launch(seed, task)
        event = session.next_event(self.silent_timeout)
        for number, (digest, reply) in enumerate(exchanges):
            if "asks" not in event or request_digest(event["asks"]) != digest:
                self._drop(seed, session)
                reason = f"the agent was started again after a kill, and its request {number} is another than before"
                return to_result({"ended": SessionEnd(failed=reason).to_json()})
            event = session.reply(reply, None) or session.next_event(self.silent_timeout)
        if "ended" in event:
            self._drop(seed, session)
        return to_result(event)

    def _launch(self, seed: tuple[int, ...], task: JSON) -> LiveSession:
        """A new session with its agent, in place of one that an abandoned rollout left under the same seed."""
        session = LiveSession(task, has_reward=self.has_reward)
        url = self.gateway.add(session)
        with self._lock:
            abandoned = self._sessions.pop(seed, None)
            self._sessions[seed] = session
        if abandoned is not None:
            self._end(abandoned)
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

    # In the agents' event loop ------------------------------------------------------------------------------

    async def _run(self, session: LiveSession, task: JSON, url: str) -> None:
        """Run an agent to its end, and put how it ended into the session's events."""
        current = asyncio.current_task()
        assert current is not None
        self._running.add(current)
        end = SessionEnd(failed="the agent was ended from outside")
        try:
            async with asyncio.timeout(self.timeout):
                end = _to_session_end(await self._start(task, url), has_reward=self.has_reward)
        except TimeoutError:
            end = SessionEnd(failed=f"the agent did not end within {self.timeout:g} s")
        except AgentFailed as error:
            end = SessionEnd(failed=str(error))
        except Exception as error:  # raised by the agent's own code
            end = SessionEnd(failed=exception_message(error))
        finally:
            self._running.discard(current)
            session.events.put(end)
            self.gateway.remove(session)  # also if the trajectory was stopped, whose thread does not return here

    async def _end_all(self) -> None:
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        if isinstance(self._start, AgentProcess):
            await self._start.close()


def to_result(event: Mapping[str, JSON]) -> Result:
    """The result of an effect whose event this is."""
    return Result(json.dumps(event))


def _to_session_end(value: Any, *, has_reward: bool) -> SessionEnd:
    """The end of a session whose agent returned `value`."""
    if value is None or isinstance(value, str):
        return SessionEnd(output=value)
    if has_reward and isinstance(value, bool | int | float):
        reason = f"the agent returned {value!r:.40}, but a reward judges its answer: return that as a string"
        return SessionEnd(failed=f"{reason}, or let agents give their reward (posted)")
    if isinstance(value, bool | int | float):
        if not math.isfinite(value):
            return SessionEnd(failed=f"the agent returned {value}: a reward must be finite")
        return SessionEnd(reward=float(value))
    kind = type(value).__name__
    return SessionEnd(failed=f"the agent returned {kind}: return its answer as a string, a reward, or None")
