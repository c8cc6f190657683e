"""Continuous batching: an `Engine` answers requests that come at any time, from any thread, by futures.

    with Engine(policy, params, EngineSettings(slots=32, slot_length=2048), detokenize=model.text.decode) as engine:
        completion = engine.submit(request).result()

A fixed number of slots decode together. A request takes a free slot, preferably one whose cache has a prefix of its
conversation; another slot's prefix is copied. `admission` decides who waits if there are more conversations than slots;
the engine warns if caches that were lost to others are computed again. Between stretches of decoding, slots that ended
are answered, requests enter, deadlines and cancellations act, and weights are updated, each token keeping the version
of the weights that chose it. What a request gets depends on its key alone (E3). Between rollouts `release` frees the
memory of all slots, and the next request allocates them again.

A few programs of fixed shape do it all (`make_programs`): `extend` compiles once for each shape of a batch of spans,
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
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flowgrpo import launch
from flowgrpo.contracts import Completion, EngineClosed, Policy, Request
from flowgrpo.generate.admission import Admission, RecomputeStats
from flowgrpo.generate.cache_copy import copy_rows
from flowgrpo.generate.kv_slots import (
    Slot,
    TokenSpan,
    cached_lengths,
    decode_inputs,
    decode_widths,
    padded_widths,
    slots_to_decode,
)
from flowgrpo.generate.prefill import ROWS, FillPlan, PrefillBatch, PrefillStats, SlotFill, empty_batch, make_batches
from flowgrpo.generate.requests import Detokenize, EngineSettings, Job, make_job
from flowgrpo.generate.sampler import ROW_FIELDS, DecodeState, SampledTokens, decode, prefill, start_rows
from flowgrpo.types import BadInput, Fate, Ledger, Params


class RowStart(NamedTuple):
    """State from which a request's row continues to decode."""

    token: int  # its last token, which is not in the cache
    key: jax.Array
    count: int  # tokens sampled so far
    budget: int  # tokens that may still be sampled


class Programs(NamedTuple):
    """Pure functions of fixed shape; the state of decoding is donated from call to call."""

    unstack: Callable[..., Params]  # params -> the same, laid out for many small steps
    start: Callable[..., DecodeState]  # (slots, slot_length) -> rows
    copy: Callable[..., DecodeState]  # (rows, source_r, target_r, length_r, count) -> rows
    extend: Callable[..., DecodeState]  # (params, rows, slot_p, start_p, tokens_pc, size_p) -> rows
    force: Callable[..., DecodeState]  # (params, rows, index_w, tokens_wc, size_w) -> rows
    enter: Callable[..., tuple]  # (token_r, key_r, count_r, budget_r, active_r, row, row_start) -> these five
    decode: Callable[..., tuple]  # (params, rows, index_w, has_job_w, settings, stop_ids, leave) -> (rows, sampled)


def make_programs(policy: Policy, *, steps: int, banned: tuple[int, ...], width: int, mixed: bool = False) -> Programs:
    """The programs of a policy; `width` is the size of the recorded support."""
    return Programs(
        unstack=partial(_unstack, policy),
        start=partial(_start, policy),
        copy=_copy,
        extend=partial(_extend, policy),
        force=partial(_force, policy),
        enter=_enter,
        decode=partial(_decode, policy, steps=steps, banned=banned, width=width, mixed=mixed),
    )


def _unstack(policy, params):
    """Parameters in the layout that decode steps read: converted here once, and not in each stretch."""
    return params if policy.unstack_layers is None else _unstack_layers(policy, params)


@partial(jax.jit, static_argnums=0)
def _unstack_layers(policy, params):
    return policy.unstack_layers(params)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _start(policy, slots: int, slot_length: int) -> DecodeState:
    """Empty slots, none of which decodes."""
    zeros_r, keys = jnp.zeros(slots, jnp.int32), jax.random.split(jax.random.key(0), slots)
    return start_rows(policy.make_cache(slots, slot_length), zeros_r, keys, zeros_r)


@partial(jax.jit, donate_argnums=0)
def _copy(rows: DecodeState, source, target, length, count) -> DecodeState:
    """Copy the first `length` tokens of one slot to another, for the first `count` of these, one after the other."""
    return rows.replace(cache=copy_rows(rows.cache, source, target, length, count))


@partial(jax.jit, static_argnums=0, donate_argnums=2)
def _extend(policy, params, rows: DecodeState, slot_p, start_p, tokens_pc, size_p) -> DecodeState:
    """Prefill the first `size` tokens of each span in its slot, which has `start` tokens or gets them in this call."""
    real_pc = jnp.arange(tokens_pc.shape[1])[None] < size_p[:, None]
    picked = prefill(policy, params, rows.cache.replace(rows=slot_p, next=start_p), tokens_pc, real_pc)
    next_r = rows.cache.next.at[slot_p].max(picked.next, mode="drop")
    return rows.replace(cache=picked.replace(rows=None, next=next_r))


@partial(jax.jit, static_argnums=0, donate_argnums=2)
def _force(policy, params, rows: DecodeState, index_w, tokens_wc, size_w) -> DecodeState:
    """Feed the first `size` tokens, which were sampled before, to each of these slots (None: to all), in decode steps
    of their width."""
    picked = rows if index_w is None else _pick_rows(rows, index_w)

    def step(i, cache):
        return prefill(policy, params, cache, tokens_wc[:, i][:, None], (i < size_w)[:, None])

    picked = picked.replace(cache=jax.lax.fori_loop(0, size_w.max(), step, picked.cache))
    return picked if index_w is None else _return_rows(rows, index_w, picked)


@jax.jit
def _enter(token, key, count, budget, active, row, row_start: RowStart) -> tuple:
    """The state of all rows, with a new request in one of them."""
    new = (*row_start, row_start.budget > 0)
    return tuple(x.at[row].set(y) for x, y in zip((token, key, count, budget, active), new, strict=True))


@partial(jax.jit, static_argnums=0, static_argnames=("steps", "banned", "width", "mixed"), donate_argnums=2)
def _decode(
    policy, params, rows: DecodeState, index_w, has_job_w, settings, stop_ids, leave, *, steps, banned, width, mixed
):
    """Decode a stretch in these rows (None: in all), as far as they have a job -> (all rows, sampled)."""
    picked = rows if index_w is None else _pick_rows(rows, index_w)
    picked = picked.replace(active=picked.active & has_job_w)
    options = {"steps": steps, "leave": leave, "banned": banned, "width": width, "mixed": mixed}
    picked, sampled = decode(policy, params, picked, settings, stop_ids, **options)
    return (picked if index_w is None else _return_rows(rows, index_w, picked)), sampled


def _pick_rows(rows: DecodeState, index_w) -> DecodeState:
    """These rows alone; their caches stay in place."""
    cache = rows.cache.replace(rows=index_w, next=rows.cache.next[index_w])
    return DecodeState(cache, **{name: getattr(rows, name)[index_w] for name in ROW_FIELDS})


def _return_rows(rows: DecodeState, index_w, picked: DecodeState) -> DecodeState:
    """All rows, with the new state of the picked ones."""
    cache = picked.cache.replace(rows=None, next=rows.cache.next.at[index_w].set(picked.cache.next))
    return DecodeState(cache, **{n: getattr(rows, n).at[index_w].set(getattr(picked, n)) for n in ROW_FIELDS})


LOOKAHEAD = 1024  # waiting requests among which those that continue from a cache are looked for
BLOCKED_SECONDS = 0.01  # between two looks, if all free slots are held and nothing decodes
LOST_FRACTION, LOST_TOKENS = 0.1, 512  # of the sampled tokens: computing more of them again is worth a warning


class Engine:
    """Slots, a queue and a thread that runs them; close it, or use it in a `with` block."""

    def __init__(
        self,
        policy: Policy,
        params: Params,
        settings: EngineSettings = EngineSettings(),  # noqa: B008
        *,
        version: int = 0,
        detokenize: Detokenize | None = None,
    ):
        """An engine over a policy.

        Args:
            policy: the model; it needs `make_cache`.
            params: its weights until `update_weights`.
            settings: sizes and behaviour.
            version: of these weights, which completions report for each token.
            detokenize: ids -> text, for requests with stop strings.
        """
        if policy.make_cache is None:
            raise BadInput("the policy has no make_cache, and decoding needs one")
        self.settings, self.detokenize = settings, detokenize
        self.programs = make_programs(
            policy,
            steps=settings.steps,
            banned=settings.banned,
            width=settings.max_recorded_top_k,
            mixed=settings.mixed,
        )
        self.lost = Ledger()  # tokens that reached nobody; add it to the ledger of what was delivered
        self.recomputed = RecomputeStats()
        self.prefilled = PrefillStats()
        self._params, self._version = params, version
        self._new_weights: tuple[Params, int] | None = None  # of `update_weights`, until the next stretch
        self._unstacked: Params = None  # these parameters, laid out for decoding; made and released with the slots
        self._weights = 0  # counts updates, since a version may come twice
        self._releases = 0
        self._answered, self._sampled = 0, 0  # requests and tokens
        # At least two: sums over a single row go in an order of their own, and results must not depend on the width.
        self._slots = [Slot() for _ in range(max(settings.slots, 2))]
        self._widths = decode_widths(len(self._slots), settings.min_decode_batch)
        self._admission = Admission(self._slots)
        self._has_filled = False  # since the last stretch, whose time is then no measure of its steps
        self._is_blocked = False  # requests wait for slots that conversations hold
        self._entered: set[Job] = set()  # in this round of admission
        self._plan = FillPlan()  # of slots that are to be filled
        self._has_warned = False
        self._clock = 0
        self._rows: DecodeState | None = None  # made with the first request, and again after each release
        self._releasing: list[Future] = []  # of `release`: answered with the number of bytes that were freed
        self._queue: deque[Job] = deque()
        self._wake, self._closed = threading.Condition(), False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="flowgrpo-engine", daemon=True)
        self._thread.start()

    # For any thread -----------------------------------------------------------------------------------

    @property
    def slots(self) -> int:
        """Number of requests that decode together at most."""
        return len(self._slots)

    @property
    def banned(self) -> tuple[int, ...]:
        """Ids that are never sampled."""
        return self.settings.banned

    @property
    def max_recorded_top_k(self) -> int:
        """Size of the recorded support; 0 if tokens are sampled from the whole vocabulary."""
        return self.settings.max_recorded_top_k

    @property
    def mixed(self) -> bool:
        """Whether requests with and without full support are both served."""
        return self.settings.mixed

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

    def update_weights(self, params: Params, version: int) -> None:
        """Use these weights from the next stretch on; no request is dropped."""
        with self._wake:
            if self._closed:
                raise EngineClosed("the engine is closed: update weights before closing it") from self._failure
            self._new_weights = (params, version)
            self._wake.notify()

    def release(self) -> int:
        """Destroy the cache of all slots, until the next request makes them again; returns the number of freed bytes.

        Requests that decode at this moment are computed again and continue, to the same bits.
        """
        if threading.current_thread() is self._thread:
            raise BadInput("release was called from a future's callback, where it would wait for itself: call it later")
        freed: Future[int] = Future()
        with self._wake:
            if self._closed:
                return 0
            self._releasing.append(freed)
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
        now, has_detokenizer = time.monotonic(), self.detokenize is not None
        jobs = [make_job(request, now, self.settings, has_detokenizer=has_detokenizer) for request in requests]
        with self._wake:
            if not self._closed:
                self._queue.extend(jobs)
                self._wake.notify()
            elif self._failure is None:
                raise EngineClosed("the engine is closed: submit before closing it")
            else:  # as for those that came just before the failure
                for job in jobs:
                    job.resolve(self._failure)
        return [job.future for job in jobs]

    # The engine's own thread --------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            if self._wait():
                self._warm_up()
            while self._wait():
                self._end_aborted()  # first, so that what was cancelled is not computed again in new slots
                self._release_slots()
                self._take_weights()
                self._admit()
                if self._is_busy():
                    self._decode_stretch()
        except BaseException as error:
            self._failure = error
            raise
        finally:  # answer everything that is left, so that no caller waits for ever
            with self._wake:
                self._closed, self._rows, self._unstacked = True, None, None
                for freed in self._releasing:
                    freed.set_result(0)
                jobs = {*self._queue, *(slot.job for slot in self._slots if slot.job)}
                self._queue.clear()
            for job in jobs:
                self._answer(job, self._failure or "cancelled")

    def _wait(self) -> bool:
        """Wait for work; False when closed."""
        with self._wake:
            if self._is_blocked and not (self._closed or self._new_weights or self._releasing or self._is_busy()):
                self._wake.wait(BLOCKED_SECONDS)
            while not (self._closed or self._queue or self._new_weights or self._releasing or self._is_busy()):
                self._wake.wait()
            return not self._closed

    def _is_busy(self) -> bool:
        return any(slot.job for slot in self._slots)

    def _warm_up(self) -> None:
        """Run every program once without a token, so that all are compiled by the first request and none later."""
        self._make_slots()
        self._copy([])
        for width in padded_widths(self.settings.chunk):
            for rows in ROWS:
                self._extend(empty_batch(rows, width, len(self._slots)))
        self._force([])
        self._enter_row(0, RowStart(0, jax.random.key(0), 0, 0))
        for width in self._widths:
            self._rows, _ = self._decode(list(range(width)), leave=False)

    def _make_slots(self) -> None:
        """Make empty slots, and lay the parameters out, unless that is done."""
        if self._rows is None:
            self._rows = self.programs.start(len(self._slots), self.settings.slot_length)
        if self._unstacked is None:
            self._unstacked = self.programs.unstack(self._params)

    def _release_slots(self) -> None:
        """Destroy the slots for callers of `release`; jobs that were decoding in some start again in new ones."""
        with self._wake:
            releasing, self._releasing = self._releasing, []
        if not releasing:
            return
        freed, self._rows, self._unstacked = sum(x.nbytes for x in jax.tree.leaves(self._rows)), None, None
        self._releases += 1
        launch.trim_memory()
        for slot in self._slots:
            slot.clear()
        for future in releasing:
            future.set_result(freed)
        if self._is_busy():
            self._make_slots()
            self._refill()

    def _take_weights(self) -> None:
        with self._wake:
            new_weights, self._new_weights = self._new_weights, None
        if new_weights is None:
            return
        self._params, self._version = new_weights
        self._unstacked = None if self._unstacked is None else self.programs.unstack(self._params)
        self._weights += 1
        if self.settings.on_weight_update == "recompute":
            self._refill()

    def _refill(self) -> None:
        """Compute the caches of all requests in flight again."""
        for index, slot in enumerate(self._slots):
            if slot.job is not None:
                self._plan_fill(index, slot.job, self._cached_lengths(slot.job))
        self._fill()

    def _end_aborted(self) -> None:
        """End requests that were cancelled or are past their deadline, queued or decoding."""
        now = time.monotonic()
        with self._wake:
            aborted = {job for job in self._queue if job.abort_reason(now)}
            if aborted:
                self._queue = deque(job for job in self._queue if job not in aborted)
        for job in aborted:
            self._answer(job, job.abort_reason(now))
        for index, slot in enumerate(self._slots):
            reason = slot.job.abort_reason(now) if slot.job else ""
            if reason:
                self._leave(index, reason)

    def _admit(self) -> None:
        """Give free slots to waiting requests: first to those that continue from a cache, then to the oldest."""
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
            self._is_blocked = bool(free and self._queue)

    def _enter(self, job: Job, free: set[int], place: Callable[..., int | None], now: float) -> bool:
        """Give a job the slot that `place` chooses for it, if there is one."""
        cached_r = self._cached_lengths(job)
        index = place(job, free, cached_r, now)
        if index is None:
            return False
        self._make_slots()
        self._count_lost(job, max(cached_r))
        # In a slot before it leaves the queue: whatever fails, it is in one of them and gets its answer.
        self._slots[index].job, self._slots[index].conversation = job, None
        with self._wake:
            self._queue.remove(job)
        free.remove(index)
        self._entered.add(job)
        job.reused = self._plan_fill(index, job, cached_r).copied
        self._count(prompt_tokens=len(job.tokens) - 1)
        return True

    @property
    def _cache_identity(self) -> tuple[int, int, int]:
        """What a cache was computed with: as long as it is the same, so are the bits of a slot."""
        return id(self), self._weights, self._releases

    def _cached_lengths(self, job: Job) -> list[int]:
        return cached_lengths(self._slots, job, self._weights, self.settings.chunk)

    def _count_lost(self, job: Job, cached: int) -> None:
        """Count what a conversation had computed here and has lost to others, and warn once if that is much."""
        conversation = job.request.conversation
        if conversation is None or conversation.computed_by != self._cache_identity:
            return
        again = sum(span.end - max(span.start, cached) for span in job.spans if span.stepwise and span.end > cached)
        if not again:
            return
        self.recomputed = RecomputeStats(self.recomputed.requests + 1, self.recomputed.tokens + again)
        requests, tokens = self.recomputed
        if not self._has_warned and tokens >= max(LOST_FRACTION * self._sampled, LOST_TOKENS):
            self._has_warned = True
            logging.getLogger(__name__).warning(
                f"there are more conversations than the engine has slots ({self.slots}): {requests} of "
                f"{self._answered} requests have lost their caches to others, and {tokens} sampled tokens were "
                f"computed again, one by one, besides {self._sampled} new ones; raise slots, or have fewer "
                "conversations at a time"
            )

    def _plan_fill(self, index: int, job: Job, cached_r: list[int]) -> SlotFill:
        """Plan to bring all tokens but the last into a slot, which counts as filled for all that come later."""
        fill = self._plan.add(index, job, cached_r, self.settings.chunk)
        self._slots[index].record(job, self.settings.chunk)
        self._slots[index].weights = self._weights
        return fill

    def _fill(self) -> None:
        """Carry out the plan, so that the rows of its slots can decode."""
        plan, self._plan = self._plan, FillPlan()
        for copies, spans in plan.waves():
            self._copy(copies)
            prefills = [(fill, span) for fill, span in spans if not span.stepwise]
            for batch in make_batches(prefills, chunk=self.settings.chunk, slots=len(self._slots)):
                self._extend(batch)
            forced, width = [pair for pair in spans if pair[1].stepwise], self._widths[-1]
            for start in range(0, len(forced), width):
                self._force(forced[start : start + width])
            self._count(computed=sum(span.end - span.start for _, span in spans))
        for index, fill in plan.fills.items():
            job = fill.job
            self._enter_row(index, RowStart(job.tokens[-1], job.request.key, len(job.sampled), job.tokens_left))
        self._has_filled |= bool(plan.fills)

    def _copy(self, fills: Sequence[SlotFill]) -> None:
        """Copy to slots the prefixes from which they start, in this order; nothing else stays in them."""
        source_r, target_r, length_r = np.zeros((3, len(self._slots)), np.int32)
        for i, fill in enumerate(fills):
            source_r[i], target_r[i], length_r[i] = fill.source, fill.slot, fill.copied
        self._rows = self.programs.copy(self._rows, source_r, target_r, length_r, len(fills))

    def _extend(self, batch: PrefillBatch) -> None:
        self._rows = self.programs.extend(self._unstacked, self._rows, *batch)

    def _force(self, spans: Sequence[tuple[SlotFill, TokenSpan]]) -> None:
        """Feed tokens that were sampled before, in the fewest slots that are computed together, these among them."""
        width = self._widths[-1]
        forced = [fill.slot for fill, _ in spans]
        others = (index for index in range(len(self._slots)) if index not in forced)
        index_w = sorted([*forced, *islice(others, width - len(forced))])
        tokens_wc, size_w = np.zeros((width, self.settings.chunk), np.int32), np.zeros(width, np.int32)
        for fill, (start, end, _) in spans:
            row = index_w.index(fill.slot)
            tokens_wc[row, : end - start], size_w[row] = fill.job.tokens[start:end], end - start
        index = None if width == len(self._slots) else np.array(index_w, np.int32)
        self._rows = self.programs.force(self._unstacked, self._rows, index, tokens_wc, size_w)

    def _enter_row(self, index: int, row_start: RowStart) -> None:
        assert self._rows is not None
        columns = self.programs.enter(*(getattr(self._rows, name) for name in ROW_FIELDS), index, row_start)
        self._rows = self._rows.replace(**dict(zip(ROW_FIELDS, columns, strict=True)))

    def _count(self, *, prompt_tokens: int = 0, computed: int = 0) -> None:
        before = self.prefilled
        self.prefilled = PrefillStats(before.prompt_tokens + prompt_tokens, before.computed + computed)

    def _decode_stretch(self) -> None:
        """Decode for `steps` steps, or until a row ends while others wait; append the sampled tokens to their jobs."""
        # The slot of a conversation is not free for others when its row ends, so no request waits for that.
        ending = any(slot.job is not None and slot.job.request.conversation is None for slot in self._slots)
        with self._wake:
            leave = ending and bool(self._queue)
        indices = slots_to_decode(self._slots, self._widths)
        start, has_filled, self._has_filled = time.monotonic(), self._has_filled, False
        self._rows, sampled = self._decode(indices, leave=leave)
        sampled, active_r = jax.device_get((sampled, self._rows.active))
        self._sampled += int(sampled.live.sum())
        if not has_filled:
            self._admission.measure(time.monotonic() - start, int(sampled.live.any(axis=1).sum()))
        for row, index in enumerate(indices):
            job = self._slots[index].job
            if job is None:
                continue
            num_new = job.append(sampled, row, self._version)
            try:
                stops, excess = job.apply_stop(num_new, self.detokenize)
            except Exception as error:  # of detokenize, which is foreign: it fails the request that it was called for
                self._leave(index, error)
                continue
            self._lose(excess, Fate.DROPPED_AFTER_STOP)
            if stops or not active_r[index]:
                self._leave(index, "stop" if stops else job.limit_reason)

    def _decode(self, indices: Sequence[int], *, leave: bool) -> tuple[DecodeState, SampledTokens]:
        """Decode in these slots -> (all rows, what those sampled)."""
        index = None if len(indices) == len(self._slots) else np.array(indices, np.int32)
        inputs = decode_inputs([self._slots[i] for i in indices])
        return self.programs.decode(self._unstacked, self._rows, index, *inputs, leave)

    def _leave(self, index: int, outcome: str | Exception) -> None:
        """Answer the slot's job and free the slot; its cache stays, for the next turn of the conversation."""
        slot = self._slots[index]
        job, slot.job = slot.job, None
        self._clock += 1
        slot.used_at = self._clock
        if job is not None:
            slot.record(job, self.settings.chunk)
            self._admission.hold(slot, job, time.monotonic())
            if job.request.conversation is not None:
                job.request.conversation.computed_by = self._cache_identity
            self._answered += 1
            self._answer(job, outcome)

    def _answer(self, job: Job, outcome: str | BaseException) -> None:
        if not job.resolve(outcome):
            self._lose(job.num_new, Fate.DROPPED_CANCELLED)

    def _lose(self, count: int, fate: Fate) -> None:
        if count:
            self.lost += Ledger(count, {fate: count})
