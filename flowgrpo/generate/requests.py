"""Requests under way in an engine, and where a stop string ends a completion.

`make_job` checks a request and makes its `Job`, which is filled as tokens are sampled and answered once. `find_stop`
says how many sampled ids stay: those up to the first at which their text contains a stop string. Text is read only to
find that token (A5): the ids stay as they were sampled, and the prompt's text takes no part.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from flowgrpo.contracts import Completion, Request
from flowgrpo.generate.sampler import MAX_KEPT, Sampled, cuts_support
from flowgrpo.types import BadInput

TextOf = Callable[[Sequence[int]], str]
INCOMPLETE = "\ufffd"  # what a decoder writes for bytes that are no character yet
SLACK = 8  # characters that may read differently where the ids before them are left out


def stops_of(stop: str | Sequence[str]) -> tuple[str, ...]:
    """The stop strings of a request, of which one may stand alone; or `BadInput`."""
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(isinstance(text, str) and text and INCOMPLETE not in text for text in stops):
        raise BadInput(f"stop={stop!r} must hold strings of at least one character, none of them U+FFFD")
    return stops


def find_stop(tokens: Sequence[int], seen: int, stops: Sequence[str], text_of: TextOf) -> int | None:
    """Say how many tokens stay: those up to the first at which a stop string is complete, None where there is none.

    The first `seen` tokens hold none. A character that is cut may read as U+FFFD until its last byte comes, which is
    why no stop string holds one; other than that, text only grows as tokens come. So a text without a stop string has
    none in any of its beginnings, and what is found does not depend on how many tokens came at once (E3).
    """
    # As much text before the new tokens as a stop string that began there can need.
    needed = max(map(len, stops)) + SLACK
    start = max(seen - needed, 0)
    while start and len(text_of(tokens[start:seen])) < needed:
        start = max(2 * start - seen, 0)

    def holds(end: int) -> bool:
        text = text_of(tokens[start:end])
        return any(stop in text for stop in stops)

    if not holds(len(tokens)):
        return None
    return next(end for end in range(seen + 1, len(tokens) + 1) if holds(end))


MAX_STOPS = 8


@dataclass(eq=False)
class Job:
    """A request with its future and what was sampled for it so far; only the engine's thread changes it."""

    request: Request
    ends_at: float | None
    stops: tuple[str, ...]
    tokens: list[int]  # the request's, then those that were sampled
    chosen: list[bool]
    future: Future = field(default_factory=Future)
    logp_sampled: list[float] = field(default_factory=list)
    version: list[int] = field(default_factory=list)
    reused: int = 0
    before: int = 0  # of the sampled tokens, those that an earlier request got
    pieces: list[Any] = field(default_factory=list)  # of its tokens so far, as `kv_slots.held_by` cuts them

    @property
    def sampled(self) -> list[int]:
        """The tokens that were sampled, those of an earlier request too."""
        return self.tokens[len(self.request.tokens) :]

    @property
    def own(self) -> int:
        """Say how many tokens were sampled for this request alone; the others are accounted for elsewhere (A6)."""
        return len(self.logp_sampled) - self.before

    @property
    def room(self) -> int:
        """Tokens that may still be sampled."""
        most, budget = self.request.max_tokens, self.request.budget
        return (most if budget is None else min(most, self.before + budget)) - len(self.logp_sampled)

    @property
    def limit(self) -> str:
        """Say why a job ends that has no room left."""
        return "length" if len(self.logp_sampled) >= self.request.max_tokens else "budget"

    def ending(self, now: float) -> str:
        """Say why the job must end whatever it has; empty where it need not."""
        if self.future.cancelled():
            return "cancelled"
        return "timeout" if self.ends_at is not None and now > self.ends_at else ""

    def take_in(self, sampled: Sampled, index: int, version: int) -> int:
        """Add what row `index` sampled in a stretch; returns how many tokens."""
        # A row that ends stays so, so what it sampled stands at the beginning.
        size = int(sampled.live[:, index].sum())
        self.tokens += sampled.token[:size, index].tolist()
        self.chosen += [True] * size
        self.logp_sampled += sampled.logp_sampled[:size, index].tolist()
        self.version += [version] * size
        return size

    def stop(self, new: int, text_of: TextOf | None) -> tuple[bool, int]:
        """Say whether the job stops within its `new` tokens, and how many it takes back that were decoded past that."""
        size = len(self.logp_sampled)
        found = find_stop(self.sampled, size - new, self.stops, text_of) if self.stops and text_of else None
        if found is None:
            return self.tokens[-1] in self.request.stop_ids, 0
        past = size - found
        for column in (self.tokens, self.chosen, self.logp_sampled, self.version):
            del column[len(column) - past :]
        return True, past

    def answer(self, outcome: str | BaseException) -> bool:
        """Settle the future with a reason to have finished, or with an error; returns whether the tokens reach it."""
        # Until here the future can be cancelled, from here on it can't.
        if not self.future.set_running_or_notify_cancel():
            return False
        if isinstance(outcome, BaseException):
            self.future.set_exception(outcome)
            return False
        self.future.set_result(Completion(self.sampled, self.logp_sampled, self.version, outcome, self.reused))
        return True


def make_job(request: Request, now: float, *, slot_length: int, kept: int, reads: bool, mixed: bool = False) -> Job:
    """The job of a request that can be run in slots of that length; or `BadInput`."""
    stops = stops_of(request.stop)
    if stops and not reads:
        raise BadInput(f"stop={request.stop!r} needs an engine that can read ids: make it with text_of")
    _check(request, slot_length, kept, mixed)
    tokens = [int(token) for token in request.tokens]
    chosen = [False] * len(tokens) if request.chosen is None else [bool(x) for x in request.chosen]
    job = Job(request, None if request.deadline is None else now + request.deadline, stops, tokens, chosen)
    if request.begun is not None:
        _go_on(job, request.begun)
    return job


def _go_on(job: Job, begun: Completion) -> None:
    """Have the job begin with what an earlier request got; or `BadInput`."""
    size, most = len(begun.tokens), job.request.max_tokens
    if begun.finish_reason in ("stop", "length"):
        raise BadInput(f"what was begun has ended as {begun.finish_reason!r}: nothing comes after it")
    if not 1 <= size < most:
        raise BadInput(f"what was begun has {size} tokens, but must have at least one and less than max_tokens={most}")
    if {len(begun.logp_sampled), len(begun.version)} != {size}:
        raise BadInput(
            f"what was begun has {size} tokens, {len(begun.logp_sampled)} log-probabilities and "
            f"{len(begun.version)} versions: give it as an engine gave it"
        )
    job.before = size
    job.tokens += [int(token) for token in begun.tokens]
    job.chosen += [True] * size
    job.logp_sampled += [float(logp) for logp in begun.logp_sampled]
    job.version += [int(version) for version in begun.version]


def _check(request: Request, slot_length: int, kept: int, mixed: bool) -> None:
    size = len(request.tokens)
    if size == 0:
        raise BadInput("a request needs at least one token to continue")
    if request.max_tokens < 1 or size + request.max_tokens > slot_length:
        raise BadInput(
            f"{size} tokens and max_tokens={request.max_tokens} must fit a slot of {slot_length}: "
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
    cuts = cuts_support(request)
    if cuts and not (kept and 1 <= request.top_k <= kept):
        raise BadInput(
            f"top_k={request.top_k}, top_p={request.top_p}, min_p={request.min_p} cut the support, which training "
            f"never does: take them out, or sample from an engine made with kept >= top_k (at most {MAX_KEPT})"
        )
    if kept and not cuts and not mixed:
        raise BadInput(
            f"this engine draws from at most kept={kept} tokens, but the request wants full support, as all training "
            "does: make the engine with kept=0 or mixed=True, or ask for a smaller top_k"
        )
