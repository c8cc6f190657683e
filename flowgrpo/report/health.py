"""Detect a run that collapses from its metrics: which number crossed which limit, and how to fix it.

    diagnose(lines)          what is wrong at the end of these lines
    all_warnings(lines)      all warnings of a run with these lines, in order
    health_sink              a sink of `MetricsWriter` that warns during the run, and writes `warnings.jsonl`

Numbers are means over a window of updates, except those of validations. A warning is given when a limit is crossed, and
again when it is twice as bad. What can't be known yet, or isn't in the metrics, is not wrong. Everything is a function
of `metrics.jsonl`, so a resumed run writes the same warnings as an undisturbed one.
"""

import json
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flowgrpo.report.metrics import Line, Sink, without_empty_means
from flowgrpo.types import BadInput

WORST = 10.0  # times the limit: the severity of a number that falls towards 0 is bounded by this
RISEN = 0.02  # smallest rise of the success rate between two windows
INFORMED = 0.1  # nats: smallest fall of the task information
CHANCE = 5.0  # standard errors of a difference to the best window, which is selected from many
WARNINGS = "warnings.jsonl"
WORSE = 2.0  # times the severity of the last warning, from which there is another
WATCHED = {  # metrics by phase
    "train": (
        *("success", "entropy", "repeated_text", "repeated_actions", "ratio_p01", "ratio_p99", "clip_low_fraction"),
        *("clip_high_fraction", "zero_signal_groups", "tool_errors", "chosen_per_trajectory", "gap"),
        *("task_information", "sampler_kl", "correction"),
    ),
    "validation": ("success", "success_low", "success_high", "gap"),
}
History = dict[str, list[float]]  # the values so far, by `phase/name`


@dataclass(frozen=True, kw_only=True)
class HealthLimits:
    """Limits beyond which there is a warning."""

    window: int = 5  # number of updates of a mean
    entropy: float = 0.01  # nats per token, below which a policy hardly explores
    entropy_share: float = 0.5  # fraction of the window before, below which entropy falls fast
    information_share: float = 0.5  # fraction of the first window, below which actions no longer depend on their task
    solved: float = 0.9  # success from which low entropy and groups without a signal are as they should be
    repeated_text: float = 0.3  # fraction of the 4-grams
    repeated_actions: float = 0.6  # fraction of the actions that follow another
    ratio: float = 2.0  # factor by which one token in a hundred is more, or less, likely than when it was sampled
    clip_fraction: float = 0.4  # of the tokens
    zero_signal_groups: float = 0.85  # fraction of the groups
    zero_signal_rise: float = 0.3  # rise of this fraction since its lowest
    tool_errors_rise: float = 0.25  # rise of the fraction of turns with an error, since its lowest
    drift: float = 2.0  # factor by which the number of chosen tokens has grown, or shrunk, since the first window
    fall: float = 0.1  # of the success rate, and by more than chance
    sampler_kl: float = 0.002  # nats per token between sampler and learner; rounding to bfloat16 gives far less
    gap: float = 0.1  # growth of the gap since the start: over two standard deviations of 256 answers

    def __post_init__(self) -> None:
        if self.window < 1:
            raise BadInput(f"Limits: window={self.window} must be at least 1")


class Finding(NamedTuple):
    """A number beyond its limit."""

    name: str  # of the check
    figure: float
    limit: float
    severity: float  # 1 at the limit
    words: str


Check = Callable[[History, HealthLimits], Finding | None]


# Warnings ---------------------------------------------------------------------------------------------


def diagnose(lines: Iterable[Line], limits: HealthLimits | None = None) -> list[Finding]:
    """What is wrong at the end of these lines of metrics."""
    history: History = {}
    for line in lines:
        _record(history, line)
    return _check(history, limits or HealthLimits())


def all_warnings(lines: Iterable[Line], limits: HealthLimits | None = None) -> list[dict[str, Any]]:
    """All warnings of a run with these lines, in order, as lines of `warnings.jsonl`."""
    monitor = HealthMonitor(limits or HealthLimits())
    return [warning for line in lines for warning in monitor.observe(line)]


class HealthMonitor:
    """Metrics of a run so far, and the severity of the last warning of each check."""

    def __init__(self, limits: HealthLimits):
        self._limits, self._history, self._last_severity = limits, {}, {}

    def observe(self, line: Line) -> list[dict[str, Any]]:
        """Warnings after this line: of new findings, and of those `WORSE` times as severe as at their last warning."""
        if not _record(self._history, line):
            return []
        last, findings = self._last_severity, _check(self._history, self._limits)
        due = [finding for finding in findings if finding.severity >= WORSE * last.get(finding.name, 0.0)]
        last |= {finding.name: max(finding.severity, 1e-9) for finding in due}
        return [
            {
                "phase": line.get("phase", "train"),
                "update": line["update"],
                "warning": finding.name,
                "figure": round(finding.figure, 6),
                "limit": round(finding.limit, 6),
                "words": finding.words,
            }
            for finding in due
        ]


def health_sink(
    folder: Path, kept_lines: Sequence[Line], *, log: Callable[[str], None], limits: HealthLimits | None = None
) -> Sink:
    """A sink that logs warnings and writes `warnings.jsonl`, first again for the lines that the run has kept."""
    monitor, path = HealthMonitor(limits or HealthLimits()), Path(folder) / WARNINGS
    earlier = [warning for line in kept_lines for warning in monitor.observe(line)]
    path.write_text("".join(json.dumps(warning) + "\n" for warning in earlier))

    def write(line: Line, _timings: Line) -> None:
        for warning in monitor.observe(line):
            with path.open("a") as file:
                file.write(json.dumps(warning) + "\n")
            log(f"warning: {warning['phase']} {warning['update']}: {warning['words']}")

    return Sink(write, lambda: None)


def health_summary(warnings: Sequence[Mapping[str, Any]]) -> str | None:
    """One line for the end of a run: the number of warnings, and the first update of each kind; None without any."""
    if not warnings:
        return None
    first: dict[str, int] = {}
    for warning in warnings:
        first.setdefault(warning["warning"], warning["update"])
    places = ", ".join(f"{name} (from update {update} on)" for name, update in first.items())
    return f"{len(warnings)} {'warning' if len(warnings) == 1 else 'warnings'}: {places}; see {WARNINGS}"


def make_sampler_warning(limits: HealthLimits | None = None) -> Callable[[Any], None]:
    """`warn(sampler_kl)` gives a Python warning the first time that the KL is above its limit.

    It takes the KL of one update or several, and is for loops of one's own: a run checks all metrics, and writes its
    warnings to a file.
    """
    limit, warned = (limits or HealthLimits()).sampler_kl, []

    def warn(kl: Any) -> None:
        worst = float(np.max(kl))
        if worst > limit and not warned:
            warned.append(worst)
            warnings.warn(_sampler_words(worst, limit), stacklevel=2)

    return warn


def _sampler_words(kl: float, limit: float) -> str:
    return (
        f"the learner has other probabilities than the sampler had with the same weights: KL {kl:.4f} per token, above "
        f"{limit:g}: give both the same temperature, banned tokens, top-k, top-p and dtype, or an algorithm with a "
        "correction if they are to differ"
    )


# Metrics over time ------------------------------------------------------------------------------------


def _record(history: History, line: Line) -> bool:
    """Append the metrics of a line -> whether any metrics of its phase are watched."""
    phase = line.get("phase", "train")  # lines of `training.train_loop` have none
    names = WATCHED.get(phase, ())
    metrics = without_empty_means(line)
    for name in names:
        if metrics.get(name) is not None:
            history.setdefault(f"{phase}/{name}", []).append(float(metrics[name]))
    return bool(names)


def _check(history: History, limits: HealthLimits) -> list[Finding]:
    """What all checks find now."""
    findings = (check(history, limits) for check in CHECKS)
    return [finding for finding in findings if finding is not None]


def _mean(history: History, name: str, limits: HealthLimits, *, ago: int = 0) -> float | None:
    """Mean over the window that ended `ago` windows ago; None if there are too few updates."""
    series, size = history.get(f"train/{name}", []), limits.window
    end = len(series) - ago * size
    return sum(series[end - size : end]) / size if end >= size else None


def _first(history: History, name: str, limits: HealthLimits) -> float | None:
    """Mean over the first window; None until a second one is over."""
    series = history.get(f"train/{name}", [])
    return sum(series[: limits.window]) / limits.window if len(series) >= 2 * limits.window else None


def _means(history: History, name: str, limits: HealthLimits) -> np.ndarray:
    """Means over each two consecutive windows; empty until there are updates before the last two."""
    series, size = history.get(f"train/{name}", []), 2 * limits.window
    return np.convolve(series, np.full(size, 1 / size), "valid") if len(series) >= 2 * size else np.empty(0)


def _by_chance(history: History, name: str, limits: HealthLimits) -> float:
    """Difference of means over two windows that chance explains, from the differences of successive updates."""
    variance = np.mean(np.diff(history[f"train/{name}"]) ** 2) / 2
    return CHANCE * float(np.sqrt(variance / limits.window))


def _is_solved(history: History, limits: HealthLimits) -> bool:
    return (_mean(history, "success", limits) or 0.0) >= limits.solved


def _risen(now: float | None, before: float | None) -> bool:
    """Whether success has risen; it has not if it is unknown."""
    return now is not None and before is not None and now >= before + RISEN


# The checks -------------------------------------------------------------------------------------------


def _low_entropy(history: History, limits: HealthLimits) -> Finding | None:
    now = _mean(history, "entropy", limits)
    if now is None or now >= limits.entropy or _is_solved(history, limits):
        return None
    words = (
        f"entropy is {now:.4f}, below {limits.entropy:g}: the policy hardly explores; try a higher temperature, an "
        "entropy bonus, more KL, or an earlier checkpoint at a lower learning rate"
    )
    return Finding("entropy", now, limits.entropy, limits.entropy / max(now, limits.entropy / WORST), words)


def _falling_entropy(history: History, limits: HealthLimits) -> Finding | None:
    now, before = (_mean(history, "entropy", limits, ago=ago) for ago in (0, 1))
    success = [_mean(history, "success", limits, ago=ago) for ago in (0, 1)]
    if now is None or before is None or now >= before * limits.entropy_share or _risen(*success):
        return None
    if _is_solved(history, limits):
        return None
    limit = before * limits.entropy_share
    words = (
        f"entropy fell from {before:.4f} to {now:.4f} within {limits.window} updates, below "
        f"{limits.entropy_share:.0%} of it, and success did not rise: try a lower learning rate, or an entropy bonus"
    )
    return Finding("entropy_falls", now, limit, limit / max(now, 1e-9), words)


def _falling_information(history: History, limits: HealthLimits) -> Finding | None:
    """Mutual information of first actions and tasks, against that of the first window."""
    name = "task_information"
    now, first = _mean(history, name, limits), _first(history, name, limits)
    success = _mean(history, "success", limits), _first(history, "success", limits)
    if now is None or first is None or _risen(*success):
        return None
    limit = min(first * limits.information_share, first - max(INFORMED, _by_chance(history, name, limits)))
    if now >= limit:
        return None
    words = (
        f"the first action has {now:.2f} nats of information about its task, and had {first:.2f} at first, below "
        f"{limit:.2f}: the policy acts alike whatever the task; resume from an earlier checkpoint with a lower "
        "learning rate, or learn from groups with a signal only"
    )
    return Finding(name, now, limit, limit / max(now, limit / WORST), words)


def _above(history: History, limits: HealthLimits, name: str, what: str, fix: str) -> Finding | None:
    """A fraction that should stay below its limit."""
    now, limit = _mean(history, name, limits), getattr(limits, name)
    if now is None or now <= limit:
        return None
    return Finding(name, now, limit, now / limit, f"{what} is {now:.2f}, above {limit:g}: {fix}")


def _ratio(history: History, limits: HealthLimits) -> Finding | None:
    high, low = (_mean(history, name, limits) for name in ("ratio_p99", "ratio_p01"))
    if high is None or low is None:
        return None
    now = max(high, 1 / max(low, 1e-9))
    if now <= limits.ratio:
        return None
    words = (
        f"one token in a hundred is {now:.2f} times more or less likely than when it was sampled, above "
        f"{limits.ratio:g}: try a lower learning rate, fewer epochs and mini-batches, or less staleness"
    )
    return Finding("ratio", now, limits.ratio, (now - 1) / max(limits.ratio - 1, 1e-9), words)


def _sampler(history: History, limits: HealthLimits) -> Finding | None:
    """The last update alone: what disagrees does so from the first one on."""
    now = history.get("train/sampler_kl", [0.0])[-1]
    if now <= limits.sampler_kl or history.get("train/correction"):
        return None
    return Finding(
        "sampler_kl", now, limits.sampler_kl, now / limits.sampler_kl, _sampler_words(now, limits.sampler_kl)
    )


def _clip_fraction(history: History, limits: HealthLimits) -> Finding | None:
    low, high = (_mean(history, f"clip_{side}_fraction", limits) for side in ("low", "high"))
    now = (low or 0.0) + (high or 0.0)
    if now <= limits.clip_fraction:
        return None
    words = (
        f"{now:.0%} of the tokens are clipped, above {limits.clip_fraction:.0%}: try a lower learning rate, or fewer "
        "epochs and mini-batches"
    )
    return Finding("clip_fraction", now, limits.clip_fraction, now / limits.clip_fraction, words)


def _dead_groups(history: History, limits: HealthLimits) -> Finding | None:
    if _is_solved(history, limits):
        return None
    fix = "there is little to learn from; try more samples per task, easier or other tasks, or a partial reward"
    finding = _above(history, limits, "zero_signal_groups", "the fraction of groups with equal rewards", fix)
    if finding is None:
        return None
    tolerated = 1 - finding.limit
    severity = tolerated / max(1 - finding.figure, tolerated / WORST)  # twice as bad if half as many have a signal
    return finding._replace(severity=severity)


def _rise(history: History, limits: HealthLimits, name: str, what: str, fix: str) -> Finding | None:
    """Rise of a fraction since its lowest, if success has not risen since."""
    means, success, size = _means(history, name, limits), _means(history, "success", limits), 2 * limits.window
    if not len(means) or _is_solved(history, limits):
        return None
    low, limit = int(means[:-size].argmin()), getattr(limits, f"{name.removesuffix('_groups')}_rise")
    limit, rise = max(limit, _by_chance(history, name, limits)), float(means[-1] - means[low])
    if rise <= limit or (len(success) == len(means) and _risen(success[-1], success[low])):
        return None
    words = (
        f"{what} rose from {means[low]:.0%} to {means[-1]:.0%}, by more than {limit:.0%}, and success did not: {fix}"
    )
    return Finding(f"{name}_rise", rise, limit, rise / limit, words)


def _length(history: History, limits: HealthLimits) -> Finding | None:
    name = "chosen_per_trajectory"
    now, first = _mean(history, name, limits), _first(history, name, limits)
    success = _mean(history, "success", limits), _first(history, "success", limits)
    if now is None or first is None or min(now, first) < 0 or _risen(*success):
        return None
    times = max(now, 1e-9) / max(first, 1e-9)
    if 1 / limits.drift <= times <= limits.drift:
        return None
    grown, limit = times > 1, first * (limits.drift if times > 1 else 1 / limits.drift)
    words = (
        f"trajectories have {now:.0f} chosen tokens, and had {first:.0f} at first, {'above' if grown else 'below'} "
        f"{limit:.0f}, and success has not risen: "
        + (
            "try an over-long penalty, or fewer new tokens"
            if grown
            else "the policy gives up early; look at its answers"
        )
    )
    return Finding(name, now, limit, max(times, 1 / times) / limits.drift, words)


def _falling_success(history: History, limits: HealthLimits) -> Finding | None:
    rates, lows, highs = (history.get(f"validation/{name}", []) for name in WATCHED["validation"][:3])
    if len(rates) < 2 or len(rates) != len(lows) or len(rates) != len(highs):
        return None
    best = max(range(len(rates)), key=rates.__getitem__)
    fall = rates[best] - rates[-1]
    if fall <= limits.fall or highs[-1] >= lows[best]:
        return None
    words = (
        f"validation success fell from {rates[best]:.2f} to {rates[-1]:.2f}, by more than {limits.fall:g} and than "
        "chance: the best checkpoint is kept; resume from there with a lower learning rate or more KL"
    )
    return Finding("success", fall, limits.fall, fall / limits.fall, words)


def _falling_training(history: History, limits: HealthLimits) -> Finding | None:
    """Fall of training success from its best, if there are no two validations to compare."""
    means, size = _means(history, "success", limits), 2 * limits.window
    if not len(means) or len(history.get("validation/success", [])) > 1:
        return None
    best = float(means[:-size].max())
    fall = best - float(means[-1])
    limit = max(min(limits.fall, best / 2), _by_chance(history, "success", limits))
    if fall <= limit:
        return None
    words = (
        f"training success fell from {best:.2f} to {means[-1]:.2f}, by more than {limit:.2f} and than chance: resume "
        "from an earlier checkpoint with a lower learning rate or more KL, and validate to know the best one"
    )
    return Finding("training_success", fall, limit, fall / limit, words)


def _gap(history: History, limits: HealthLimits) -> Finding | None:
    """Growth of the gap between reward and held-out check: by validations if they have it, else by windows."""
    gaps = history.get("validation/gap", [])
    first, now = (gaps[0], gaps[-1]) if gaps else (_first(history, "gap", limits), _mean(history, "gap", limits))
    if first is None or now is None or now - first <= limits.gap:
        return None
    words = (
        f"the gap between the reward and its held-out check has grown from {first:+.2f} to {now:+.2f}, by more than "
        f"{limits.gap:g}: the policy may be hacking its reward, which can no longer be taken for success"
    )
    return Finding("gap", now - first, limits.gap, (now - first) / limits.gap, words)


CHECKS: tuple[Check, ...] = (
    *(_low_entropy, _falling_entropy, _falling_information),
    partial(
        _above,
        name="repeated_text",
        what="the fraction of repeated text",
        fix="actions run in circles; try more KL, a lower learning rate, or fewer new tokens per action",
    ),
    partial(
        _above,
        name="repeated_actions",
        what="the fraction of repeated actions",
        fix="the policy takes the same action again; look at trajectories/, and try to stop repetitions or fewer turns",
    ),
    *(_ratio, _sampler, _clip_fraction, _dead_groups),
    partial(
        _rise,
        name="zero_signal_groups",
        what="groups with equal rewards",
        fix="there is less to learn from; try a lower learning rate with an entropy bonus, or more samples per task",
    ),
    partial(
        _rise,
        name="tool_errors",
        what="turns that end in an error",
        fix="look at trajectories; try a lower learning rate, less of an entropy bonus, more KL, or an earlier "
        "checkpoint",
    ),
    *(_length, _falling_success, _falling_training, _gap),
)
