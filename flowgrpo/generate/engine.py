"""Continuous batching: an `Engine` answers requests that come at any time, from any thread, by futures.

A fixed number of slots decode together. A request takes a free slot, preferably one whose cache holds the beginning of
its conversation; another slot's beginning is copied. `admission` says who waits where more conversations than slots are
under way; the engine warns where caches that were lost to others are computed again. Between stretches of decoding,
slots that ended are answered, requests enter, deadlines and cancellations act, and weights are swapped, each token
keeping the version of the weights that chose it. What a request gets depends on its key alone (E3). Between rollouts
`release` gives the memory of all slots back, and the next request makes them again.

A few programs of fixed shape do it all (`make_programs`): `extend` compiles once for each shape of a batch of pieces,
the others once, whatever requests come, because a slot is an index and not a shape. Engines of one policy and one shape
share what was compiled. Requests that enter together share what they have in common (`prefill`).
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

from flowgrpo import launch
from flowgrpo.contracts import Completion, EngineClosed, Policy, Request
from flowgrpo.generate.admission import Admission, Recomputed
from flowgrpo.generate.cache_copy import copy_rows
from flowgrpo.generate.kv_slots import (
    Slot,
    TokenSpan,
    decode_inputs,
    held_by,
    narrower,
    slots_to_decode,
    widths,
)
from flowgrpo.generate.prefill import ROWS, Batch, Fill, Prefilled, Round, batches, empty_batch
from flowgrpo.generate.requests import Job, TextOf, make_job
from flowgrpo.generate.sampler import (
    EACH,
    MAX_KEPT,
    Rows,
    Sampled,
    decode,
    prefill,
    start_rows,
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
    copy: Any  # (rows, source_r, target_r, held_r, count) -> rows
    extend: Any  # (params, rows, slot_p, start_p, tokens_pc, size_p) -> rows
    force: Any  # (params, rows, index_w, tokens_wc, size_w) -> rows
    enter: Any  # (token_r, key_r, count_r, budget_r, active_r, row, entry) -> these five
    decode: Any  # (params, rows, index_w, going_w, settings, stop_ids, leave) -> (rows, sampled)


def make_programs(policy: Policy, *, steps: int, banned: tuple[int, ...], width: int, mixed: bool = False) -> Programs:
    """The programs for a policy."""
    return Programs(
        lay=partial(_lay, policy),
        start=partial(_start, policy),
        copy=_copy,
        extend=partial(_extend, policy),
        force=partial(_force, policy),
        enter=_enter,
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


@partial(jax.jit, donate_argnums=0)
def _copy(rows: Rows, source, target, held, count) -> Rows:
    """The first `held` tokens of one slot as those of another, for the first `count` of these, one after the other."""
    return rows.replace(cache=copy_rows(rows.cache, source, target, held, count))


@partial(jax.jit, static_argnums=0, donate_argnums=2)
def _extend(policy, params, rows: Rows, slot_p, start_p, tokens_pc, size_p) -> Rows:
    """The first `size` tokens of each piece in its slot, which has `start` tokens or is given them in this call."""
    real_pc = jnp.arange(tokens_pc.shape[1])[None] < size_p[:, None]
    some = prefill(policy, params, rows.cache.replace(rows=slot_p, next=start_p), tokens_pc, real_pc)
    following = rows.cache.next.at[slot_p].max(some.next, mode="drop")
    return rows.replace(cache=some.replace(rows=None, next=following))


@partial(jax.jit, static_argnums=0, donate_argnums=2)
def _force(policy, params, rows: Rows, index_w, tokens_wc, size_w) -> Rows:
    """The first `size` tokens, which were sampled before, fed again to each of these slots (None: of all), in decode
    steps of their width."""
    some = rows if index_w is None else _pick_rows(rows, index_w)

    def step(i, cache):
        return prefill(policy, params, cache, tokens_wc[:, i][:, None], (i < size_w)[:, None])

    some = some.replace(cache=jax.lax.fori_loop(0, size_w.max(), step, some.cache))
    return some if index_w is None else _return_rows(rows, index_w, some)


@jax.jit
def _enter(token, key, count, budget, active, row, entry: Entry) -> tuple:
    """What each row goes on from, where one begins anew."""
    new = (*entry, entry.budget > 0)
    return tuple(x.at[row].set(y) for x, y in zip((token, key, count, budget, active), new, strict=True))


@partial(jax.jit, static_argnums=0, static_argnames=("steps", "banned", "width", "mixed"), donate_argnums=2)
def _decode(policy, params, rows: Rows, index_w, going_w, settings, stop_ids, leave, *, steps, banned, width, mixed):
    """A stretch of decoding in the rows that are still wanted: of all, or of these alone (None: all)."""
    own = rows if index_w is None else _pick_rows(rows, index_w)
    own = own.replace(active=own.active & going_w)
    how = {"steps": steps, "leave": leave, "banned": banned, "width": width, "mixed": mixed}
    own, sampled = decode(policy, params, own, settings, stop_ids, **how)
    return (own if index_w is None else _return_rows(rows, index_w, own)), sampled


def _pick_rows(rows: Rows, index_w) -> Rows:
    """These rows alone, whose caches stay where they lie."""
    cache = rows.cache.replace(rows=index_w, next=rows.cache.next[index_w])
    return Rows(cache, **{name: getattr(rows, name)[index_w] for name in EACH})


def _return_rows(rows: Rows, index_w, some: Rows) -> Rows:
    """All rows, with what has become of those that were picked."""
    cache = some.cache.replace(rows=None, next=rows.cache.next.at[index_w].set(some.cache.next))
    return Rows(cache, **{name: getattr(rows, name).at[index_w].set(getattr(some, name)) for name in EACH})


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
        self.kept, self.mixed, self.banned = kept, mixed, banned
        self.text_of = text_of
        self.lost = Ledger()  # tokens that reached nobody; add it to the ledger of what was delivered
        self.recomputed = Recomputed()
        self.prefilled = Prefilled()
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
        self._round = Round()  # of slots that are to be filled
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
        self._make_slots()
        self._copy([])
        for width in widths(self.chunk):
            for rows in ROWS:
                self._extend(empty_batch(rows, width, len(self._slots)))
        self._force([])
        self._enter_row(0, Entry(0, jax.random.key(0), 0, 0))
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
        launch.return_memory()
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
                self._plan(index, slot.job, self._held(slot.job))
        self._fill()

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
        self._fill()
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
        job.reused = self._plan(index, job, held_r).held
        self._count(prompt_tokens=len(job.tokens) - 1)
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

    def _plan(self, index: int, job: Job, held_r: list[int]) -> Fill:
        """Plan to bring all tokens but the last into a slot, which holds them from here on for all that come later."""
        fill = self._round.add(index, job, held_r, self.chunk)
        self._slots[index].record(job, self.chunk)
        self._slots[index].weights = self._weights
        return fill

    def _fill(self) -> None:
        """Fill the slots that were planned to be, so that their rows can go on."""
        filling, self._round = self._round, Round()
        for copies, pieces in filling.waves():
            self._copy(copies)
            prefills = [(fill, piece) for fill, piece in pieces if not piece.stepwise]
            for batch in batches(prefills, chunk=self.chunk, slots=len(self._slots)):
                self._extend(batch)
            forced, width = [pair for pair in pieces if pair[1].stepwise], self._widths[-1]
            for start in range(0, len(forced), width):
                self._force(forced[start : start + width])
            self._count(computed=sum(piece.end - piece.start for _, piece in pieces))
        for index, fill in filling.fills.items():
            job = fill.job
            self._enter_row(index, Entry(job.tokens[-1], job.request.key, len(job.sampled), job.room))
        self._filled |= bool(filling.fills)

    def _copy(self, fills: Sequence[Fill]) -> None:
        """Have slots hold the beginnings that they are filled from, in this order, and nothing else."""
        source_r, target_r, held_r = np.zeros((3, len(self._slots)), np.int32)
        for i, fill in enumerate(fills):
            source_r[i], target_r[i], held_r[i] = fill.source, fill.slot, fill.held
        self._rows = self.programs.copy(self._rows, source_r, target_r, held_r, len(fills))

    def _extend(self, batch: Batch) -> None:
        self._rows = self.programs.extend(self._laid, self._rows, *batch)

    def _force(self, pieces: Sequence[tuple[Fill, TokenSpan]]) -> None:
        """Feed tokens that were sampled before, in the fewest slots that are computed together, these among them."""
        width = self._widths[-1]
        forced = [fill.slot for fill, _ in pieces]
        others = (index for index in range(len(self._slots)) if index not in forced)
        index_w = sorted([*forced, *islice(others, width - len(forced))])
        tokens_wc, size_w = np.zeros((width, self.chunk), np.int32), np.zeros(width, np.int32)
        for fill, (start, end, _) in pieces:
            row = index_w.index(fill.slot)
            tokens_wc[row, : end - start], size_w[row] = fill.job.tokens[start:end], end - start
        index = None if width == len(self._slots) else np.array(index_w, np.int32)
        self._rows = self.programs.force(self._laid, self._rows, index, tokens_wc, size_w)

    def _enter_row(self, index: int, entry: Entry) -> None:
        columns = self.programs.enter(*(getattr(self._rows, name) for name in EACH), index, entry)
        self._rows = self._rows.replace(**dict(zip(EACH, columns, strict=True)))

    def _count(self, *, prompt_tokens: int = 0, computed: int = 0) -> None:
        known = self.prefilled
        self.prefilled = Prefilled(known.prompt_tokens + prompt_tokens, known.computed + computed)

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
