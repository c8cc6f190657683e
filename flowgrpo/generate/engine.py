"""Continuous batching: requests flow in at any time, from any thread; completions flow out as futures.

A fixed number of slots decode together. A request takes a free slot, preferably one whose cache holds the
beginning of its conversation; another slot's beginning is copied. Between stretches of decoding, slots
that ended are answered, requests enter, deadlines and cancellations act, and weights are swapped, each
token keeping the version of the weights that chose it. A handful of programs of fixed shape do it all, so
nothing is compiled after the first requests; what a request gets depends on its key alone (E3).
"""

import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from flowgrpo.contracts import Completion, Policy, Request
from flowgrpo.generate.pieces import Piece, cut, rest, shared
from flowgrpo.generate.programs import make_programs
from flowgrpo.generate.sampler import MAX_KEPT, Rows, Sampled, Sampling
from flowgrpo.generate.stops import TextOf, find_stop, stops_of
from flowgrpo.types import BadInput, Fate, Ledger

MAX_STOPS = 8
AtSwap = Literal["recompute", "keep"]


@dataclass(eq=False)
class Job:
    """A request on its way."""

    request: Request
    future: Future
    ends_at: float | None
    tokens: list[int]
    chosen: list[bool]
    stops: tuple[str, ...] = ()
    logp: list[float] = field(default_factory=list)
    version: list[int] = field(default_factory=list)
    margin: list[float] = field(default_factory=list)
    kept: list[np.ndarray] = field(default_factory=list)
    reused: int = 0


@dataclass(eq=False)
class Slot:
    """What a slot's cache holds, and the job that decodes in it."""

    tokens: list[int] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    job: Job | None = None
    used_at: int = 0


class Engine:
    """Slots, a queue and a thread that runs them; close it, or use it in a `with` block."""

    def __init__(
        self,
        policy: Policy,
        params,
        *,
        slots: int = 16,
        slot_length: int = 1024,
        chunk: int = 64,
        steps: int = 16,
        banned: tuple[int, ...] = (),
        kept: int = 0,
        at_swap: AtSwap = "recompute",
        version: int = 0,
        text_of: TextOf | None = None,
    ):
        """`banned` ids are never sampled (the padding token); `text_of` reads ids, for requests with stop strings.

        `kept` is the size of recorded sets, for requests that cut the support; 0 refuses those. `at_swap`
        says what becomes of the caches of requests in flight when weights are swapped.
        """
        if not 0 <= kept <= MAX_KEPT:
            raise BadInput(f"kept={kept}, but recorded sets hold at most {MAX_KEPT} tokens")
        if at_swap not in ("recompute", "keep"):
            raise BadInput(f"at_swap={at_swap!r}, but must be recompute or keep")
        if policy.make_cache is None:
            raise BadInput("the policy has no make_cache, and decoding needs one")
        self.programs = make_programs(policy, steps=steps, banned=banned, width=kept)
        self.slot_length, self.chunk, self.kept, self.at_swap = slot_length, chunk, kept, at_swap
        self.text_of = text_of
        self.lost = Ledger()  # tokens that reached nobody; add it to the ledger of what was delivered
        self._params, self._version, self._swap = params, version, None
        self._slots = [Slot() for _ in range(slots)]
        self._clock = 0
        token, count, budget = (jnp.zeros(slots, jnp.int32) for _ in range(3))
        keys = jax.random.split(jax.random.key(0), slots)
        self._rows = Rows(policy.make_cache(slots, slot_length), token, keys, count, budget, jnp.zeros(slots, bool))
        self._queue: deque[Job] = deque()
        self._wake, self._closed = threading.Condition(), False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="flowgrpo-engine", daemon=True)
        self._thread.start()

    # For any thread -----------------------------------------------------------------------------------

    def submit(self, request: Request) -> Future:
        """A future of the request's `Completion`; cancelling it frees its slot at the next stretch."""
        stops = self._check(request)
        chosen = [False] * len(request.tokens) if request.chosen is None else [bool(x) for x in request.chosen]
        ends_at = None if request.deadline is None else time.monotonic() + request.deadline
        job = Job(request, Future(), ends_at, [int(token) for token in request.tokens], chosen, stops)
        with self._wake:
            if self._closed:
                raise BadInput("the engine is closed: submit before closing it")
            self._queue.append(job)
            self._wake.notify()
        return job.future

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Completions in the order of the requests."""
        return [future.result() for future in [self.submit(request) for request in requests]]

    def swap(self, params, version: int) -> None:
        """Use these weights from the next stretch on; no request is dropped."""
        with self._wake:
            self._swap = (params, version)
            self._wake.notify()

    def close(self) -> None:
        """Cancel what is left and stop the thread."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _check(self, request: Request) -> tuple[str, ...]:
        """The stop strings of a request that can be run; or `BadInput`."""
        size = len(request.tokens)
        if size == 0:
            raise BadInput("a request needs at least one token to continue")
        if request.max_tokens < 1 or size + request.max_tokens > self.slot_length:
            raise BadInput(
                f"{size} tokens and max_tokens={request.max_tokens} must fit a slot of {self.slot_length}: "
                "shorten the request, or raise slot_length"
            )
        if request.chosen is not None and len(request.chosen) != size:
            raise BadInput(f"the request has {size} tokens, but `chosen` has {len(request.chosen)}")
        if not request.temperature > 0:
            raise BadInput(f"temperature is {request.temperature}, but must be greater than 0; top_k=1 is greedy")
        if len(request.stop_ids) > MAX_STOPS:
            raise BadInput(f"{len(request.stop_ids)} stop ids, but at most {MAX_STOPS} are supported")
        stops = stops_of(request.stop)
        if stops and self.text_of is None:
            raise BadInput(f"stop={request.stop!r} needs an engine that can read ids: make it with text_of")
        cuts = request.top_p < 1 or request.min_p > 0 or request.top_k < MAX_KEPT
        if cuts and not (self.kept and 1 <= request.top_k <= self.kept):
            raise BadInput(
                f"top_k={request.top_k}, top_p={request.top_p}, min_p={request.min_p} cut the support: make the engine "
                f"with kept >= top_k (at most {MAX_KEPT}), so that the kept sets are recorded"
            )
        return stops

    # The engine's own thread --------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._wait():
                self._take_weights()
                self._end_late()
                self._admit()
                if any(slot.job for slot in self._slots):
                    self._stretch()
        except BaseException as error:
            self._failure = error
            raise
        finally:
            self._give_up()

    def _wait(self) -> bool:
        """Wait for work; False when closed."""
        with self._wake:
            while not (self._closed or self._queue or self._swap or any(slot.job for slot in self._slots)):
                self._wake.wait()
            return not self._closed

    def _give_up(self) -> None:
        """Answer everything that is left, so that nobody waits for ever."""
        with self._wake:
            self._closed = True
            jobs = [*self._queue, *(slot.job for slot in self._slots if slot.job)]
            self._queue.clear()
        for slot in self._slots:
            slot.job = None
        for job in jobs:
            if self._failure is not None and not job.future.done():
                self._lose(job)
                job.future.set_exception(self._failure)
            else:
                self._answer(job, "cancelled")

    def _take_weights(self) -> None:
        with self._wake:
            swap, self._swap = self._swap, None
        if swap is None:
            return
        self._params, self._version = swap
        # Forget every cache before any is computed again: a slot must not copy what older weights left in another.
        for slot in self._slots:
            slot.tokens, slot.pieces = [], []
        if self.at_swap == "recompute":
            for index, slot in enumerate(self._slots):
                if slot.job is not None:
                    self._fill(index, slot.job)

    def _end_late(self) -> None:
        """End requests that were cancelled or are past their deadline, queued or decoding."""
        now = time.monotonic()
        with self._wake:
            over = [job for job in self._queue if _reason(job, now)]
            for job in over:
                self._queue.remove(job)
        for job in over:
            self._answer(job, _reason(job, now))
        for index, slot in enumerate(self._slots):
            reason = _reason(slot.job, now) if slot.job else ""
            if reason:
                self._leave(index, reason)

    def _admit(self) -> None:
        """Give free slots to waiting requests, oldest first."""
        while free := [index for index, slot in enumerate(self._slots) if slot.job is None]:
            with self._wake:
                if not self._queue:
                    return
                job = self._queue.popleft()
            if not job.future.set_running_or_notify_cancel():
                continue
            pieces = cut(job.chosen, chunk=self.chunk)
            # The slot that holds most of the conversation; else the one that was idle longest.
            index = max(free, key=lambda i: (self._held(i, job, pieces), -self._slots[i].used_at))
            self._slots[index].job = job
            job.reused = self._fill(index, job)
            self._rows = self.programs.enter(self._rows, index, job.tokens[-1], job.request.key, job.request.max_tokens)

    def _held(self, index: int, job: Job, pieces: list[Piece]) -> int:
        """How many tokens of the job the slot's cache holds."""
        slot = self._slots[index]
        common = 0
        for mine, theirs in zip(job.tokens[:-1], slot.tokens, strict=False):
            if mine != theirs:
                break
            common += 1
        return shared(pieces, slot.pieces, common)

    def _fill(self, index: int, job: Job) -> int:
        """Bring all tokens but the last into the slot's cache; returns how many were found in one."""
        pieces = cut(job.chosen, chunk=self.chunk)
        best = max(range(len(self._slots)), key=lambda i: (self._held(i, job, pieces), i == index))
        held = self._held(best, job, pieces)
        cache = self.programs.copy(self._rows.cache, best, index, held)
        for piece in rest(pieces, held):
            program = self.programs.force if piece.stepwise else self.programs.prefill
            for start in range(piece.start, piece.end, self.chunk):
                part = job.tokens[start : min(start + self.chunk, piece.end)]
                tokens = np.zeros(self.chunk, np.int32)
                tokens[: len(part)] = part
                cache = program(self._params, cache, index, tokens, np.arange(self.chunk) < len(part))
        self._rows = self._rows.replace(cache=cache)
        self._slots[index].tokens, self._slots[index].pieces = job.tokens[:-1], pieces
        return held

    def _stretch(self) -> None:
        """Decode until a row ends while others wait, or for the set number of steps; take in what came."""
        with self._wake:
            leave = bool(self._queue)
        self._rows, sampled = self.programs.decode(
            self._params, self._rows, self._settings(), self._stop_ids(), leave=leave
        )
        sampled, active_r = jax.device_get((sampled, self._rows.active))
        for index, slot in enumerate(self._slots):
            if slot.job is not None:
                reason = self._take_in(slot, slot.job, sampled, index)
                if reason or not active_r[index]:
                    self._leave(index, reason or "length")

    def _take_in(self, slot: Slot, job: Job, sampled: Sampled, index: int) -> str | Exception:
        """Add what a slot sampled to its job, up to where that stops; returns why it ends, empty where it need not."""
        live_u = np.asarray(sampled.live[:, index])
        tokens = np.asarray(sampled.token)[live_u, index].tolist()
        job.tokens += tokens
        job.chosen += [True] * len(tokens)
        job.logp += np.asarray(sampled.logp)[live_u, index].tolist()
        job.margin += np.asarray(sampled.margin)[live_u, index].tolist()
        job.version += [self._version] * len(tokens)
        if sampled.kept is not None:
            job.kept += list(np.asarray(sampled.kept)[live_u, index])
        try:
            stopped = self._cut_at_stop(job, len(tokens))
        except Exception as error:  # of text_of, which is foreign: it fails the request that it was called for
            return error
        slot.tokens, slot.pieces = job.tokens[:-1], cut(job.chosen, chunk=self.chunk)
        return "stop" if stopped or job.tokens[-1] in job.request.stop_ids else ""

    def _cut_at_stop(self, job: Job, new: int) -> bool:
        """Take back what was decoded after a stop string was complete among the `new` tokens; whether one was."""
        size = len(job.logp)
        sampled = job.tokens[len(job.tokens) - size :]
        end = find_stop(sampled, size - new, job.stops, self.text_of) if job.stops and self.text_of else None
        if end is None:
            return False
        past = size - end
        for column in (job.tokens, job.chosen, job.logp, job.version, job.margin, job.kept):
            del column[len(column) - past :]
        self.lost += Ledger(past, {Fate.DROPPED_AFTER_STOP: past})
        return True

    def _leave(self, index: int, reason: str | Exception) -> None:
        """Answer the slot's job and free the slot; its cache stays, for the next turn of the conversation."""
        slot = self._slots[index]
        job, slot.job = slot.job, None
        self._clock += 1
        slot.used_at = self._clock
        self._rows = self.programs.leave(self._rows, index)
        if job is not None:
            self._answer(job, reason)

    def _answer(self, job: Job, reason: str | Exception) -> None:
        size = len(job.logp)
        cancelled = job.future.cancelled() or not (job.future.running() or job.future.set_running_or_notify_cancel())
        if cancelled:
            self._lose(job)
            return
        if isinstance(reason, Exception):
            self._lose(job)
            job.future.set_exception(reason)
            return
        kept = np.stack(job.kept) if job.kept else None
        tokens = job.tokens[len(job.tokens) - size :]
        job.future.set_result(Completion(tokens, job.logp, job.version, reason, job.margin, kept, job.reused))

    def _lose(self, job: Job) -> None:
        self.lost += Ledger(len(job.logp), {Fate.DROPPED_CANCELLED: len(job.logp)})

    def _settings(self) -> Sampling:
        requests = [slot.job.request if slot.job else Request((0,), None, 1) for slot in self._slots]
        names = (("temperature", np.float32), ("top_k", np.int32), ("top_p", np.float32), ("min_p", np.float32))
        return Sampling(*(np.array([getattr(r, name) for r in requests], dtype) for name, dtype in names))

    def _stop_ids(self) -> np.ndarray:
        """Each row's own stop ids, padded with -1 -> [r m]."""
        stop_rm = np.full((len(self._slots), MAX_STOPS), -1, np.int32)
        for index, slot in enumerate(self._slots):
            if slot.job is not None:
                stop_rm[index, : len(slot.job.request.stop_ids)] = slot.job.request.stop_ids
        return stop_rm


def _reason(job: Job, now: float) -> str:
    """Why a job must end now; empty where it need not."""
    if job.future.cancelled():
        return "cancelled"
    return "timeout" if job.ends_at is not None and now > job.ends_at else ""
