"""Requests in flight in an engine, and where a stop string ends a completion.

`make_job` checks a request and makes its `Job`, to which tokens are appended as they are sampled, and whose future is
resolved once. `find_stop` gives the number of sampled tokens to keep: up to the first one at which their text contains
a stop string. Text is read only to find that token (A5): the ids stay as they were sampled, and the prompt's text takes
no part.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal

from flowgrpo.contracts import Completion, Request
from flowgrpo.generate.sampler import MAX_TOP_K, SampledTokens, cuts_support
from flowgrpo.types import BadInput, check_range

Detokenize = Callable[[Sequence[int]], str]
OnWeightUpdate = Literal["recompute", "keep"]
INCOMPLETE = "\ufffd"  # what a decoder writes for bytes that are no character yet
SLACK = 8  # characters that may read differently if the ids before them are left out
MAX_STOPS = 8  # stop ids of a request


@dataclass(frozen=True)
class EngineSettings:
    """Sizes and behaviour of an `Engine`.

    Args:
        slots: number of requests that decode together at most.
        slot_length: tokens of a slot's cache; a request and its completion must fit.
        chunk: tokens of the largest piece of a prompt that is computed in one call.
        steps: decode steps between two looks at the queue. More steps cost less on the host; fewer let a request enter
            sooner.
        banned: ids that are never sampled, such as the padding token.
        max_recorded_top_k: size of the recorded support. 0 samples from the whole vocabulary, as training needs, and
            refuses requests with top_k, top_p or min_p. With k > 0 the engine samples from at most the k likeliest
            tokens, and serves such requests alone, unless it is `mixed`.
        mixed: serve requests of both kinds from one cache, each by its own settings; needs `max_recorded_top_k`.
        on_weight_update: what becomes of the caches of requests in flight when weights are updated: "recompute", or
            "keep" for the rest of the request and no longer.
        min_decode_batch: if few requests are in flight, decode in a quarter of the slots, a quarter of that, and so on
            down to this number. It is faster if a step takes as long as its rows, as on a CPU. Bits don't depend on it
            if kernels round every row alike (`launch.configure(exact=True)` on a CPU). None: always in all slots.
    """

    slots: int = 16
    slot_length: int = 1024
    chunk: int = 64
    steps: int = 16
    banned: tuple[int, ...] = ()
    max_recorded_top_k: int = 0
    mixed: bool = False
    on_weight_update: OnWeightUpdate = "recompute"
    min_decode_batch: int | None = None

    def __post_init__(self):
        for name in ("slots", "slot_length", "chunk", "steps"):
            check_range("EngineSettings", name, getattr(self, name), 1, whole=True)
        check_range("EngineSettings", "max_recorded_top_k", self.max_recorded_top_k, 0, MAX_TOP_K, whole=True)
        check_range("EngineSettings", "min_decode_batch", self.min_decode_batch, 2, whole=True, optional=True)
        if self.mixed and not self.max_recorded_top_k:
            raise BadInput("EngineSettings: mixed is True, but max_recorded_top_k is 0; set it to the largest top_k")
        if self.on_weight_update not in ("recompute", "keep"):
            raise BadInput(f"on_weight_update={self.on_weight_update!r}, but must be recompute or keep")


# Stop strings -------------------------------------------------------------------------------------------


def stops_of(stop: str | Sequence[str]) -> tuple[str, ...]:
    """The stop strings of a request, which may be a single string; or `BadInput`."""
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(isinstance(text, str) and text and INCOMPLETE not in text for text in stops):
        raise BadInput(f"stop={stop!r} must hold strings of at least one character, none of them U+FFFD")
    return stops


def find_stop(tokens: Sequence[int], searched: int, stops: Sequence[str], detokenize: Detokenize) -> int | None:
    """Number of tokens up to the first at which a stop string is complete; None if there is none.

    The first `searched` tokens have none. A character that is cut may read as U+FFFD until its last byte comes, so no
    stop string contains one; other than that, text only grows as tokens come. So a text without a stop string has none
    in any of its prefixes, and the result does not depend on how many tokens came at once (E3).
    """
    # As much text before the new tokens as a stop string that starts there can need.
    needed = max(map(len, stops)) + SLACK
    start = max(searched - needed, 0)
    while start and len(detokenize(tokens[start:searched])) < needed:
        start = max(2 * start - searched, 0)

    def has_stop(end: int) -> bool:
        text = detokenize(tokens[start:end])
        return any(stop in text for stop in stops)

    if not has_stop(len(tokens)):
        return None
    return next(end for end in range(searched + 1, len(tokens) + 1) if has_stop(end))


# Jobs ---------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Job:
    """A request with its future and the tokens sampled for it so far; only the engine's thread changes it."""

    request: Request
    deadline: float | None  # by time.monotonic
    stops: tuple[str, ...]
    tokens: list[int]  # those of the request, then the sampled ones
    chosen: list[bool]  # which of them a policy sampled
    future: Future = field(default_factory=Future)
    logp_sampled: list[float] = field(default_factory=list)
    version: list[int] = field(default_factory=list)
    reused: int = 0  # tokens of the prompt that were in a cache
    num_resumed: int = 0  # sampled tokens that came with the request, as its `partial`
    spans: list[Any] = field(default_factory=list)  # of its tokens so far, as `kv_slots.cached_lengths` splits them

    @property
    def sampled(self) -> list[int]:
        """All sampled tokens, those of `partial` included."""
        return self.tokens[len(self.request.tokens) :]

    @property
    def num_new(self) -> int:
        """Number of tokens sampled for this request alone; those of `partial` are accounted for elsewhere (A6)."""
        return len(self.logp_sampled) - self.num_resumed

    @property
    def tokens_left(self) -> int:
        """Number of tokens that may still be sampled."""
        limit, budget = self.request.max_tokens, self.request.budget
        if budget is not None:
            limit = min(limit, self.num_resumed + budget)
        return limit - len(self.logp_sampled)

    @property
    def limit_reason(self) -> str:
        """Finish reason of a job with no tokens left: "length" or "budget"."""
        return "length" if len(self.logp_sampled) >= self.request.max_tokens else "budget"

    def abort_reason(self, now: float) -> str:
        """Finish reason if the job must end whatever it has, "cancelled" or "timeout"; else empty."""
        if self.future.cancelled():
            return "cancelled"
        return "timeout" if self.deadline is not None and now > self.deadline else ""

    def append(self, sampled: SampledTokens, row: int, version: int) -> int:
        """Append the tokens that a row sampled, and return their number."""
        # A row that ends stays so: its sampled tokens come first.
        size = int(sampled.live[:, row].sum())
        self.tokens += sampled.token[:size, row].tolist()
        self.chosen += [True] * size
        self.logp_sampled += sampled.logp_sampled[:size, row].tolist()
        self.version += [version] * size
        return size

    def apply_stop(self, num_new: int, detokenize: Detokenize | None) -> tuple[bool, int]:
        """(whether the job stops within its `num_new` last tokens, number of tokens past the stop, which are cut)."""
        size = len(self.logp_sampled)
        end = find_stop(self.sampled, size - num_new, self.stops, detokenize) if self.stops and detokenize else None
        if end is None:
            return self.tokens[-1] in self.request.stop_ids, 0
        excess = size - end
        for column in (self.tokens, self.chosen, self.logp_sampled, self.version):
            del column[len(column) - excess :]
        return True, excess

    def resolve(self, outcome: str | BaseException) -> bool:
        """Resolve the future with a finish reason or an error; returns whether the tokens reach it."""
        # Until here the future can be cancelled, from here on it can't.
        if not self.future.set_running_or_notify_cancel():
            return False
        if isinstance(outcome, BaseException):
            self.future.set_exception(outcome)
            return False
        self.future.set_result(Completion(self.sampled, self.logp_sampled, self.version, outcome, self.reused))
        return True


def make_job(request: Request, now: float, settings: EngineSettings, *, has_detokenizer: bool) -> Job:
    """The job of a request, if an engine with these settings can serve it; else `BadInput`."""
    stops = stops_of(request.stop)
    if stops and not has_detokenizer:
        raise BadInput(f"stop={request.stop!r} needs an engine that can read ids: make it with detokenize")
    size = len(request.tokens)
    if size == 0:
        raise BadInput("a request needs at least one token to continue")
    if request.max_tokens < 1 or size + request.max_tokens > settings.slot_length:
        raise BadInput(
            f"{size} tokens and max_tokens={request.max_tokens} must fit a slot of {settings.slot_length}: "
            "shorten the request, or raise slot_length"
        )
    if request.budget is not None and request.budget < 1:
        raise BadInput(f"budget={request.budget}, but a request samples at least one token")
    if request.chosen is not None and len(request.chosen) != size:
        raise BadInput(f"the request has {size} tokens, but `chosen` has {len(request.chosen)}")
    if not request.temperature > 0:
        raise BadInput(f"temperature is {request.temperature}, but must be greater than 0; top_k=1 is greedy")
    if len(request.stop_ids) > MAX_STOPS:
        raise BadInput(f"{len(request.stop_ids)} stop ids, but at most {MAX_STOPS} are supported")
    max_top_k = settings.max_recorded_top_k
    cuts = cuts_support(request)
    if cuts and not (max_top_k and 1 <= request.top_k <= max_top_k):
        raise BadInput(
            f"top_k={request.top_k}, top_p={request.top_p}, min_p={request.min_p} cut the support, which training "
            "never does: take them out, or sample from an engine with max_recorded_top_k >= top_k (at most "
            f"{MAX_TOP_K})"
        )
    if max_top_k and not cuts and not settings.mixed:
        raise BadInput(
            f"this engine samples from at most max_recorded_top_k={max_top_k} tokens, but the request wants full "
            "support, as all training does: make the engine with max_recorded_top_k=0 or mixed=True, or ask for a "
            "smaller top_k"
        )
    tokens = [int(token) for token in request.tokens]
    chosen = [False] * size if request.chosen is None else [bool(x) for x in request.chosen]
    job = Job(request, None if request.deadline is None else now + request.deadline, stops, tokens, chosen)
    partial = request.partial
    if partial is not None:
        count = len(partial.tokens)
        if partial.finish_reason in ("stop", "length"):
            raise BadInput(f"the partial completion has ended as {partial.finish_reason!r}: nothing comes after it")
        if not 1 <= count < request.max_tokens:
            raise BadInput(
                f"the partial completion has {count} tokens, but must have at least one and less than "
                f"max_tokens={request.max_tokens}"
            )
        if {len(partial.logp_sampled), len(partial.version)} != {count}:
            raise BadInput(
                f"the partial completion has {count} tokens, {len(partial.logp_sampled)} log-probabilities and "
                f"{len(partial.version)} versions: give it as an engine gave it"
            )
        job.num_resumed = count
        job.tokens += [int(token) for token in partial.tokens]
        job.chosen += [True] * count
        job.logp_sampled += [float(logp) for logp in partial.logp_sampled]
        job.version += [int(version) for version in partial.version]
    return job
