"""Continuous batching: an `Engine` answers requests that come at any time, from any thread, by futures.

A fixed number of slots decode together. A request takes a free slot, preferably one whose cache holds the beginning of
its conversation; another slot's beginning is copied. `admission` says who waits where more conversations than slots are
under way; the engine warns where caches that were lost to others are computed again. Between stretches of decoding,
slots that ended are answered, requests enter, deadlines and cancellations act, and weights are swapped, each token
keeping the version of the weights that chose it. What a request gets depends on its key alone (E3). Between rollouts
`release` gives the memory of all slots back, and the next request makes them again.

Four programs of fixed shape do it all (`make_programs`): `extend` compiles once for each width of a piece, the others
once, whatever requests come, because a slot is an index and not a shape. Engines of one policy and one shape share what
was compiled.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import islice
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flowgrpo.contracts import Completion, EngineClosed, Policy, Request
from flowgrpo.generate.admission import Admission, Recomputed
from flowgrpo.generate.kv_slots import (
    Slot,
    TokenSpan,
    cut,
    decode_inputs,
    held_by,
    narrower,
    rest,
    slots_to_decode,
    widths,
)
from flowgrpo.generate.requests import Job, TextOf, make_job
from flowgrpo.generate.sampler import (
    MAX_KEPT,
    Rows,
    Sampled,
    decode,
    prefill,
    put_rows,
    row_axis,
    start_rows,
    take_rows,
)
from flowgrpo.types import BadInput, Fate, Ledger, check_range


class Entry(NamedTuple):
    """State from which a request's row goes on decoding."""

    token: int  # its last token, which is not in the cache
    key: Any
    count: int  # tokens sampled so far
    budget: int  # tokens that may still be sampled


class Programs(NamedTuple):
    """Pure functions of fixed shape; the state of decoding is donated from call to call."""

    lay: Any  # params -> the same, laid out for many small steps
    start: Any  # (slots, slot_length) -> rows
    extend: Any  # (params, rows, source, target, held, tokens [c], size, entry) -> rows
    force: Any  # (params, rows, index_w, row, tokens [c], size) -> rows
    decode: Any  # (params, rows, index_w, going_w, settings, stop_ids, leave) -> (rows, sampled)


def make_programs(policy: Policy, *, steps: int, banned: tuple[int, ...], width: int, mixed: bool = False) -> Programs:
    """The programs for a policy."""
    return Programs(
        lay=partial(_lay, policy),
        start=partial(_start, policy),
        extend=partial(_extend, policy),
        force=partial(_force, policy),
        decode=partial(_decode, policy, steps=steps, banned=banned, width=width, mixed=mixed),
    )


def _lay(policy, params):
    """Parameters as every stretch reads them: laid out in each, they would be copied in each."""
    return params if policy.unstack_layers is None else _unstack(policy, params)


@partial(jax.jit, static_argnums=0)
def _unstack(policy, params):
    return policy.unstack_layers(params)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _start(policy, slots: int, slot_length: int) -> Rows:
    """Empty slots, none of which decodes."""
    nothing_r, keys = jnp.zeros(slots, jnp.int32), jax.random.split(jax.random.key(0), slots)
    return start_rows(policy.make_cache(slots, slot_length), nothing_r, keys, nothing_r)


@partial(jax.jit, static_argnums=0, donate_argnums=2)
def _extend(policy, params, rows: Rows, source, target, held, tokens, size, entry: Entry) -> Rows:
    """The first `held` tokens of one slot, and `size` of these after them, in another, whose row decodes from there.

    The tokens are given ones, computed as a batch of one whichever slot it is; without any, this is a copy. Source and
    target may be the same.
    """
    one = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, source, 1, row_axis(x)), rows.cache)
    kept_c = jnp.arange(one.segments.shape[1]) < held
    one = one.replace(segments=jnp.where(kept_c[None], one.segments, 0), next=jnp.full_like(one.next, held))
    if len(tokens):
        one = prefill(policy, params, one, tokens[None], (jnp.arange(len(tokens)) < size)[None])
    return Rows(
        cache=jax.tree.map(partial(_put, slot=target), rows.cache, one),
        token=rows.token.at[target].set(entry.token),
        key=rows.key.at[target].set(entry.key),
        count=rows.count.at[target].set(entry.count),
        budget=rows.budget.at[target].set(entry.budget),
        active=rows.active.at[target].set(entry.budget > 0),
    )


@partial(jax.jit, static_argnums=0, donate_argnums=2)
def _force(policy, params, rows: Rows, index_w, row, tokens, size) -> Rows:
    """The first `size` tokens, which were sampled before, fed again to a row of these slots (None: of all), in decode
    steps of their width."""
    some = rows if index_w is None else take_rows(rows, index_w)
    own_w = jnp.arange(len(some.token)) == row

    def step(i, cache):
        return prefill(policy, params, cache, jnp.where(own_w, tokens[i], 0)[:, None], own_w[:, None])

    some = some.replace(cache=jax.lax.fori_loop(0, size, step, some.cache))
    return some if index_w is None else put_rows(rows, index_w, some)


@partial(jax.jit, static_argnums=0, static_argnames=("steps", "banned", "width", "mixed"), donate_argnums=2)
def _decode(policy, params, rows: Rows, index_w, going_w, settings, stop_ids, leave, *, steps, banned, width, mixed):
    """A stretch of decoding in the rows that are still wanted: of all, or of these alone (None: all)."""
    own = rows if index_w is None else take_rows(rows, index_w)
    own = own.replace(active=own.active & going_w)
    how = {"steps": steps, "leave": leave, "banned": banned, "width": width, "mixed": mixed}
    own, sampled = decode(policy, params, own, settings, stop_ids, **how)
    return (own if index_w is None else put_rows(rows, index_w, own)), sampled


def _put(x, row, *, slot):
    return jax.lax.dynamic_update_slice_in_dim(x, row, slot, row_axis(x))


AtSwap = Literal["recompute", "keep"]
LOOKAHEAD = 1024  # waiting requests among which those that go on from a cache are looked for
BLOCKED_SECONDS = 0.01  # between two looks, where all free slots are held and nothing decodes
LOST_SHARE, LOST_TOKENS = 0.1, 512  # of what was sampled, from where on computing it again is worth a warning


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
        mixed: bool = False,
        at_swap: AtSwap = "recompute",
        version: int = 0,
        narrowest: int | None = None,
        text_of: TextOf | None = None,
    ):
        """`banned` ids are never sampled (the padding token); `text_of` reads ids, for requests with stop strings.

        An engine with `kept` draws from at most that many of the likeliest tokens, and serves requests with top_k,
        top_p or min_p alone; with 0 it draws from all, as training needs, and refuses such requests. One that is
        `mixed` serves both over one cache, each request by its own settings. `at_swap` says what becomes of the caches
        of requests in flight when weights are swapped: they are computed again, or kept for the rest of the request
        and no longer.

        With `narrowest` few requests decode in a quarter of the slots, a quarter of those, and so on down to so many,
        which is faster where a step takes as long as its rows, as on a CPU. Bits don't depend on that where kernels
        round every row alike (`launch.configure(exact=True)` on a CPU). Elsewhere leave it out: all slots are computed.
        """
        check_range("Engine", "kept", kept, 0, MAX_KEPT, whole=True)
        if mixed and not kept:
            raise BadInput("Engine: mixed needs kept, the most tokens that a request may be cut to")
        for name, value in (("slots", slots), ("slot_length", slot_length), ("chunk", chunk), ("steps", steps)):
            check_range("Engine", name, value, 1, whole=True)
        check_range("Engine", "narrowest", narrowest, 2, whole=True, optional=True)
        if at_swap not in ("recompute", "keep"):
            raise BadInput(f"at_swap={at_swap!r}, but must be recompute or keep")
        if policy.make_cache is None:
            raise BadInput("the policy has no make_cache, and decoding needs one")
        self.programs = make_programs(policy, steps=steps, banned=banned, width=kept, mixed=mixed)
        self.slot_length, self.chunk, self.at_swap = slot_length, chunk, at_swap
        self.kept, self.mixed = kept, mixed
        self.text_of = text_of
        self.lost = Ledger()  # tokens that reached nobody; add it to the ledger of what was delivered
        self.recomputed = Recomputed()
        self._params, self._version, self._swap = params, version, None
        self._laid: Any = None  # these parameters, laid out; made and released with the slots
        self._weights = 0  # counts swaps, since a version may come twice
        self._releases = 0
        self._answered, self._sampled = 0, 0  # requests and tokens
        # At least two: sums over a single row go in an order of their own, and results must not depend on the width.
        self._slots = [Slot() for _ in range(max(slots, 2))]
        self._widths = narrower(len(self._slots), narrowest)
        self._admission = Admission(self._slots)
        self._filled = False  # since the last stretch, whose time then says nothing of its steps
        self._blocked = False  # requests wait for slots that conversations hold
        self._entered: set[Job] = set()  # in this round of admission
        self._warned = False
        self._clock = 0
        self._rows: Any = None  # made with the first request, and again after each release
        self._leaving: list[Future] = []  # of `release`: answered with the bytes that were freed
        self._queue: deque[Job] = deque()
        self._wake, self._closed = threading.Condition(), False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="flowgrpo-engine", daemon=True)
        self._thread.start()

    # For any thread -----------------------------------------------------------------------------------

    @property
    def slots(self) -> int:
        """Requests that decode together at most."""
        return len(self._slots)

    def submit(self, request: Request) -> Future:
        """A future of the request's `Completion`; cancelling it at any moment frees its slot at the next stretch."""
        return self._enqueue([request])[0]

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Completions in the order of the requests; none is run if one can't be."""
        futures = self._enqueue(requests)
        try:
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()

    def swap(self, params, version: int) -> None:
        """Use these weights from the next stretch on; no request is dropped."""
        with self._wake:
            if self._closed:
                raise EngineClosed("the engine is closed: swap before closing it") from self._failure
            self._swap = (params, version)
            self._wake.notify()

    def release(self) -> int:
        """Destroy the cache and all slots, until the next request makes them again; returns the bytes that were freed.

        Requests that decode at this moment are computed again and go on, to the same bits.
        """
        if threading.current_thread() is self._thread:
            raise BadInput("release was called from a future's callback, where it would wait for itself: call it later")
        freed: Future[int] = Future()
        with self._wake:
            if self._closed:
                return 0
            self._leaving.append(freed)
            self._wake.notify()
        return freed.result()

    def close(self) -> None:
        """Cancel what is left and stop the thread."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        if threading.current_thread() is not self._thread:  # a future's callback may close
            self._thread.join()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _enqueue(self, requests: Sequence[Request]) -> list[Future]:
        now = time.monotonic()
        settings: dict[str, Any] = {"slot_length": self.slot_length, "kept": self.kept, "mixed": self.mixed}
        settings["reads"] = self.text_of is not None
        jobs = [make_job(request, now, **settings) for request in requests]
        with self._wake:
            if not self._closed:
                self._queue.extend(jobs)
                self._wake.notify()
            elif self._failure is None:
                raise EngineClosed("the engine is closed: submit before closing it")
            else:  # as for those that came just before the failure
                for job in jobs:
                    job.answer(self._failure)
        return [job.future for job in jobs]

    # The engine's own thread --------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            if self._wait():
                self._warm_up()
            while self._wait():
                self._end_late()  # first, so that what was cancelled is not computed again in new slots
                self._free()
                self._take_weights()
                self._admit()
                if self._busy():
                    self._stretch()
        except BaseException as error:
            self._failure = error
            raise
        finally:
            self._give_up()

    def _wait(self) -> bool:
        """Wait for work; False when closed."""
        with self._wake:
            if self._blocked and not (self._closed or self._swap or self._leaving or self._busy()):
                self._wake.wait(BLOCKED_SECONDS)
            while not (self._closed or self._queue or self._swap or self._leaving or self._busy()):
                self._wake.wait()
            return not self._closed

    def _busy(self) -> bool:
        return any(slot.job for slot in self._slots)

    def _warm_up(self) -> None:
        """Run every program once without a token, so that all are compiled by the first request and none later."""
        program, entry = self.programs, Entry(0, jax.random.key(0), 0, 0)
        self._make_slots()
        params = self._laid
        for width in widths(self.chunk):
            nothing = np.zeros(width, np.int32)
            self._rows = program.extend(params, self._rows, 0, 0, 0, nothing, 0, entry)
        self._rows = program.force(params, self._rows, *self._company(0), nothing, 0)
        for width in self._widths:
            self._rows, _ = self._decode(list(range(width)), leave=False)

    def _make_slots(self) -> None:
        """Make empty slots, and lay the parameters out, where that isn't done."""
        if self._rows is None:
            self._rows = self.programs.start(len(self._slots), self.slot_length)
        if self._laid is None:
            self._laid = self.programs.lay(self._params)

    def _free(self) -> None:
        """Destroy the slots for whoever waits for that; jobs that were decoding in some begin again in new ones."""
        with self._wake:
            leaving, self._leaving = self._leaving, []
        if not leaving:
            return
        freed, self._rows, self._laid = sum(x.nbytes for x in jax.tree.leaves(self._rows)), None, None
        self._releases += 1
        for slot in self._slots:
            slot.forget()
        for one in leaving:
            one.set_result(freed)
        if self._busy():
            self._make_slots()
            self._fill_again()

    def _give_up(self) -> None:
        """Answer everything that is left, so that nobody waits for ever."""
        with self._wake:
            self._closed, self._rows, self._laid = True, None, None
            for one in self._leaving:
                one.set_result(0)
            jobs = {*self._queue, *(slot.job for slot in self._slots if slot.job)}
            self._queue.clear()
        for job in jobs:
            self._answer(job, self._failure or "cancelled")

    def _take_weights(self) -> None:
        with self._wake:
            swap, self._swap = self._swap, None
        if swap is None:
            return
        self._params, self._version = swap
        self._laid = None if self._laid is None else self.programs.lay(self._params)
        self._weights += 1
        if self.at_swap == "recompute":
            self._fill_again()

    def _fill_again(self) -> None:
        """Compute the caches of all requests in flight again."""
        for index, slot in enumerate(self._slots):
            if slot.job is not None:
                self._fill(index, slot.job, self._held(slot.job))

    def _end_late(self) -> None:
        """End requests that were cancelled or are past their deadline, queued or decoding."""
        now = time.monotonic()
        with self._wake:
            over = {job for job in self._queue if job.ending(now)}
            if over:
                self._queue = deque(job for job in self._queue if job not in over)
        for job in over:
            self._answer(job, job.ending(now))
        for index, slot in enumerate(self._slots):
            reason = slot.job.ending(now) if slot.job else ""
            if reason:
                self._leave(index, reason)

    def _admit(self) -> None:
        """Give free slots to waiting requests: first to those that go on from one, then to the oldest."""
        with self._wake:
            waiting = list(islice(self._queue, LOOKAHEAD + len(self._slots)))
        now = time.monotonic()
        self._admission.accrue(bool(waiting), now)
        free = {index for index, slot in enumerate(self._slots) if slot.job is None}
        for job in self._admission.may_return(waiting, free, now):
            if free:
                self._enter(job, free, self._admission.place_returning, now)
        for job in waiting:
            if not free or (job not in self._entered and not self._enter(job, free, self._admission.place, now)):
                break
        self._entered.clear()
        with self._wake:
            self._blocked = bool(free and self._queue)

    def _enter(self, job: Job, free: set[int], place: Callable[..., int | None], now: float) -> bool:
        """Give a job the slot that it has by that rule, if there is one."""
        held_r = self._held(job)
        index = place(job, free, held_r, now)
        if index is None:
            return False
        self._make_slots()
        self._count_lost(job, max(held_r))
        # In a slot before it leaves the queue: whatever fails, it is in one of them and gets its answer.
        self._slots[index].job, self._slots[index].conversation = job, None
        with self._wake:
            self._queue.remove(job)
        free.remove(index)
        self._entered.add(job)
        job.reused = self._fill(index, job, held_r)
        return True

    @property
    def _computing(self) -> tuple[int, int, int]:
        """What a cache is computed with, and stays as long as its slot."""
        return id(self), self._weights, self._releases

    def _held(self, job: Job) -> list[int]:
        return held_by(self._slots, job, self._weights, self.chunk)

    def _count_lost(self, job: Job, held: int) -> None:
        """Count what a conversation had computed here and has lost to others, and warn once where that is much."""
        conversation = job.request.conversation
        if conversation is None or conversation.computed_by != self._computing:
            return
        again = sum(piece.end - max(piece.start, held) for piece in job.pieces if piece.stepwise and piece.end > held)
        if not again:
            return
        self.recomputed = Recomputed(self.recomputed.requests + 1, self.recomputed.tokens + again)
        requests, tokens = self.recomputed
        if not self._warned and tokens >= max(LOST_SHARE * self._sampled, LOST_TOKENS):
            self._warned = True
            logging.getLogger(__name__).warning(
                f"more conversations are under way than the engine has slots ({self.slots}): {requests} of "
                f"{self._answered} requests have lost their caches to others, and {tokens} sampled tokens were "
                f"computed again, one by one, beside {self._sampled} new ones; raise slots, or have fewer "
                "conversations under way"
            )

    def _fill(self, index: int, job: Job, held_r: list[int]) -> int:
        """Bring all tokens but the last into the slot's cache, so that its row can go on; returns how many one held."""
        source = max(range(len(self._slots)), key=lambda i: (held_r[i], i == index))
        done = held = held_r[source]
        entry = Entry(job.tokens[-1], job.request.key, len(job.sampled), job.room)
        pieces = rest(cut(job.chosen, chunk=self.chunk), held, chunk=self.chunk)
        if not pieces or pieces[0].stepwise:
            pieces.insert(0, TokenSpan(held, held, False))  # copies what is held, and lets the row go on
        for start, end, stepwise in pieces:
            fitting = [width for width in widths(self.chunk) if width >= end - start]
            tokens = np.zeros(self.chunk if stepwise else fitting[0], np.int32)
            tokens[: end - start] = job.tokens[start:end]
            if stepwise:
                self._rows = self.programs.force(self._laid, self._rows, *self._company(index), tokens, end - start)
            else:
                part = (source, index, done, tokens, end - start)
                self._rows = self.programs.extend(self._laid, self._rows, *part, entry)
            source, done = index, end
        self._slots[index].record(job, self.chunk)
        self._slots[index].weights = self._weights
        self._filled = True
        return held

    def _company(self, index: int) -> tuple[np.ndarray | None, int]:
        """The fewest slots that are computed together, this one among them (None: all), and its place there."""
        width = self._widths[-1]
        if width == len(self._slots):
            return None, index
        first = min(index, len(self._slots) - width)
        return np.arange(first, first + width, dtype=np.int32), index - first

    def _stretch(self) -> None:
        """Decode until a row ends while others wait, or for the set number of steps; take in what came."""
        # The slot of a conversation is not free for others when its row ends, so that nobody waits for that.
        ending = any(slot.job is not None and slot.job.request.conversation is None for slot in self._slots)
        with self._wake:
            leave = ending and bool(self._queue)
        chosen = slots_to_decode(self._slots, self._widths)
        began, filled, self._filled = time.monotonic(), self._filled, False
        self._rows, sampled = self._decode(chosen, leave=leave)
        sampled, active_r = jax.device_get((sampled, self._rows.active))
        self._sampled += int(sampled.live.sum())
        if not filled:
            self._admission.measure(time.monotonic() - began, int(sampled.live.any(axis=1).sum()))
        for row, index in enumerate(chosen):
            job = self._slots[index].job
            if job is not None:
                outcome = self._take_in(job, sampled, row)
                if outcome or not active_r[index]:
                    self._leave(index, outcome or job.limit)

    def _decode(self, chosen: Sequence[int], *, leave: bool) -> tuple[Rows, Sampled]:
        """Decode in these slots -> (all rows, what those sampled)."""
        index = None if len(chosen) == len(self._slots) else np.array(chosen, np.int32)
        inputs = decode_inputs([self._slots[i] for i in chosen])
        return self.programs.decode(self._laid, self._rows, index, *inputs, leave)

    def _take_in(self, job: Job, sampled: Sampled, row: int) -> str | Exception:
        """Add what a row sampled to its job, up to where that stops; returns why it ends, empty where it need not."""
        new = job.take_in(sampled, row, self._version)
        try:
            stopped, past = job.stop(new, self.text_of)
        except Exception as error:  # of text_of, which is foreign: it fails the request that it was called for
            return error
        self._lose(past, Fate.DROPPED_AFTER_STOP)
        return "stop" if stopped else ""

    def _leave(self, index: int, outcome: str | Exception) -> None:
        """Answer the slot's job and free the slot; its cache stays, for the next turn of the conversation."""
        slot = self._slots[index]
        job, slot.job = slot.job, None
        self._clock += 1
        slot.used_at = self._clock
        if job is not None:
            slot.record(job, self.chunk)
            self._admission.hold(slot, job, time.monotonic())
            if job.request.conversation is not None:
                job.request.conversation.computed_by = self._computing
            self._answered += 1
            self._answer(job, outcome)

    def _answer(self, job: Job, outcome: str | BaseException) -> None:
        if not job.answer(outcome):
            self._lose(job.own, Fate.DROPPED_CANCELLED)

    def _lose(self, count: int, fate: Fate) -> None:
        if count:
            self.lost += Ledger(count, {fate: count})
