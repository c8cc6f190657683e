"""The recipe of self-verification: a model is paid by its own frozen start, asked whether its answer is correct.

    result = train(preset(updates=40), "runs/self")

The reward of an answer is the judge's P("Yes"). Whether the answer is right is found by a matcher, which training never
sees, and recorded as `correct`. The gap is mean P("Yes") less the true accuracy: where training raises the reward and
leaves the truth behind it grows, and `report.health` warns that the judge is being hacked. `figures`, `comparison` and
`draw_curves` show both side by side.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import flowgrpo as fg
from flowgrpo.agent.single_turn import question
from flowgrpo.contracts import Reward, Scored
from flowgrpo.data.task_files import parse_fields, read_tasks
from flowgrpo.evaluation.metrics import Evaluation
from flowgrpo.learner.loss_scale import optimizer_for
from flowgrpo.learner.state import make_optimizer
from flowgrpo.models.hf import Model, check_model
from flowgrpo.recipes import registry, self_verify_tasks
from flowgrpo.recipes.hosted import (
    Draw,
    HostedSetup,
    do_nothing,
    draw_from,
    examine,
    make_engine,
    make_residency,
    played_metrics,
    record,
    sizes_of,
)
from flowgrpo.recipes.hosted_training import HostedWork, exam_key, train_hosted
from flowgrpo.recipes.planner import check_planner, frozen, load_start, make_planner, template_of
from flowgrpo.recipes.registry import base_of
from flowgrpo.recipes.self_verify_tasks import Config
from flowgrpo.recipes.self_verify_tasks import preset as preset
from flowgrpo.report.metrics import METRICS, read_metrics
from flowgrpo.report.plots import COLOURS, CURVES, curve, over_updates, save
from flowgrpo.rewards.answers.match import answer
from flowgrpo.rewards.combine import CHECK, second_check
from flowgrpo.rewards.judge import LENGTHS, ask_alone, make_next_logp, verifier_probability
from flowgrpo.rollout.effects import no_effects
from flowgrpo.rollout.records import Played
from flowgrpo.run.run_dir import START
from flowgrpo.run.session import Session, Tested, Validation, validation_of
from flowgrpo.run.time_budget import ENDLESS, TimeBudget
from flowgrpo.run.warm_start import no_warm_start
from flowgrpo.sandbox import Sandbox
from flowgrpo.types import BadInput

NAME = "self_verify"
BRIEF = 'Answer the question. Put the final answer last, after "Answer:".'  # what a given model is told
SHORT = 32  # tokens that hold a prompt of the small model's judge


@contextmanager
def open(config: Config, folder: Path, *, begin: Callable[[], object] = do_nothing) -> Iterator[HostedSetup]:
    """The parts that these settings describe; engine and sandbox live as long as the block.

    `begin` is called when everything that is named was found, and before anything is written.
    """
    check_planner(config)
    with ExitStack() as stack:
        if config.model is not None:
            check_model(config.model, template_of(config))
        draw, check = _tasks_and_check(config, stack)
        begin()
        if config.model is None:
            self_verify_tasks.make_start(folder, config)
        start = load_start(config.model or folder / START, config)
        planner, model = make_planner(start, config), frozen(start, config)
        residency = stack.enter_context(make_residency(config, folder))
        residency.hold("judge", model.params)
        served = start._replace(policy=planner.served, params=planner.serve(jax.tree.map(jnp.copy, planner.params)))
        instructions = BRIEF if config.tasks is not None else ""
        env = question(model.text, max_tokens=config.max_tokens, instructions=instructions)
        yield HostedSetup(
            name="self_verify",
            config=config,
            folder=folder,
            model=start,
            planner=planner,
            env=env,
            exam_env=env,
            engine=stack.enter_context(make_engine(served, config)),
            do=no_effects,
            residency=residency,
            reward=yes_probability(model, check, lambda: residency["judge"]),
            tasks=draw,
            algorithm=fg.flow_grpo(beta=config.beta, clip_high=config.clip_high),
            optimizer=optimizer_for(
                config.dtype, make_optimizer(learning_rate=config.learning_rate, base=base_of(config.optimizer))
            ),
            sizes=sizes_of(config, planner),
            warm_start=lambda _: no_warm_start(jax.tree.map(jnp.copy, planner.params)),
            story=lambda _, played: verdict_story(played),
            solved=is_right,
        )


def yes_probability(model: Model, check: Reward, params: Any) -> Reward:
    """P("Yes") under these parameters, or those that they give, with what the matcher says beside it."""
    next_logp = make_next_logp(model.policy, params, lengths=(SHORT, *LENGTHS))
    return second_check(verifier_probability(model.text, next_logp, ask=ask_alone), check)


def is_right(scored: Scored) -> bool:
    """Say whether the matcher found the answer right, whatever the judge said."""
    return scored.parts.get(CHECK, 0.0) >= 1 - 1e-6


def verdict_story(played: Played) -> str:
    """A question with its answer and both verdicts."""
    scored = played.scored
    said = "none" if scored is None or scored.value is None else f"{scored.value:.2f}"
    verdict = "right" if played.correct else f"wrong, should be {' or '.join(played.task.answers)}"
    return f"    {played.task.query}\n    > {played.output}\n    P(Yes) {said}, {verdict}"


# Tasks --------------------------------------------------------------------------------------------------


def _tasks_and_check(config: Config, stack: ExitStack) -> tuple[Draw, Reward]:
    """`tasks(split, first, count)`, and the matcher that finds out whether an answer is right."""
    seed = config.seed
    if config.tasks is None:
        return lambda split, first, count: self_verify_tasks.make_questions(seed, split, first, count), answer()
    fields = parse_fields(list(config.fields))
    read = read_tasks(config.tasks, fields=fields, domain=config.domain)
    for task in read:
        if not task.answers:
            raise BadInput(f"{read.source}: task {task.id!r} has no answer, so what is right is not known: give it one")
    return draw_from(read, seed), _check({task.domain for task in read}, stack)


def _check(names: set[str], stack: ExitStack) -> Reward:
    """The matcher of each domain that has one of its own, and the plain one for others."""
    if not names & set(registry.DOMAINS):
        return answer()
    sandbox = stack.enter_context(Sandbox(preload=registry.preload(names)))
    return registry.route(registry.Means(sandbox=sandbox), default="answer")


BINS = 10  # of P("Yes"), for its calibration
Line = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Verified(Evaluation):
    """An evaluation by what is right, with what the judge said of the same answers."""

    outcome: float  # mean P("Yes")
    gap: float  # of that to the share of the same answers that is right
    judge_right: float  # share of verdicts that are right, where 1/2 and above is Yes
    calibration_error: float  # expected, over ten bins of P("Yes")


def figures(played: Sequence[Played]) -> Verified:
    """The figures of one answer to each question, over the answers that the judge has judged."""
    valid = [one for one in played if one.outcome is not None]
    if not valid:
        why = next((one.scored.reason for one in played if one.scored is not None), "none was asked for")
        raise BadInput(f"the judge has judged none of {len(played)} answers ({why}): give a model that says Yes or No")
    plain = played_metrics(played, ())
    yes_n = np.array([one.outcome for one in valid], np.float64)
    right_n = np.array([one.correct for one in valid])
    return Verified(
        **vars(plain),
        outcome=float(yes_n.mean()),
        gap=float(yes_n.mean() - right_n.mean()),
        judge_right=float(((yes_n >= 0.5) == right_n).mean()),
        calibration_error=calibration_error(yes_n, right_n),
    )


def calibration_error(yes_n: np.ndarray, right_n: np.ndarray) -> float:
    """Say how far P("Yes") lies from the share that is right, within bins of equal width, weighed by their size."""
    bin_n = np.minimum((yes_n * BINS).astype(int), BINS - 1)
    gaps = [abs(yes_n[bin_n == i].sum() - right_n[bin_n == i].sum()) for i in range(BINS)]
    return float(sum(gaps) / len(yes_n))


# In words -----------------------------------------------------------------------------------------------


def comparison(by_name: Mapping[str, Verified]) -> str:
    """A column for each, a row for each figure."""
    rows = {
        "true accuracy": lambda x: f"{x.success:.1%} ({x.success_low:.1%} to {x.success_high:.1%})",
        'P("Yes")': lambda x: f"{x.outcome:.1%}",
        "gap": lambda x: f"{x.gap:+.1%}",
        "judge is right": lambda x: f"{x.judge_right:.1%}",
        "calibration error": lambda x: f"{x.calibration_error:.1%}",
        "cut or empty answers": lambda x: f"{x.tool_errors:.1%}",
        "not judged": lambda x: str(x.invalid),
    }
    head = f"{'test questions':24}" + "".join(f"{name:>28}" for name in by_name)
    return "\n".join(
        [head, *(f"{row:24}" + "".join(f"{of(x):>28}" for x in by_name.values()) for row, of in rows.items())]
    )


def validation_line(verified: Verified) -> str:
    """One line for a validation."""
    return f'validation: P("Yes") {verified.outcome:.2f}  true accuracy {verified.success:.2f}  gap {verified.gap:+.2f}'


# The plot -----------------------------------------------------------------------------------------------


def draw_curves(folder: Path, *, title: str = "") -> Path:
    """Write `curves.png`: mean P("Yes") and true accuracy on the same axes, the KL to the start below."""
    from matplotlib.figure import Figure  # here, because it is heavy

    lines = list(read_metrics(folder / METRICS))
    if not any(line.get("phase") == "validation" for line in lines):
        raise BadInput(f"{folder / METRICS} has no validation yet: let the run go on")
    kl = curve(lines, "train", "kl")
    panels = 2 if kl[0] else 1
    figure = Figure(figsize=(7.5, 3.6 + 1.8 * (panels - 1)), layout="constrained")
    ratios = [2, 1][:panels]
    axes = figure.subplots(panels, 1, sharex=True, squeeze=False, height_ratios=ratios)[:, 0]
    _draw_pair(axes[0], lines)
    axes[0].set(ylim=(-0.02, 1.02), ylabel="share of answers", title=title)
    if panels == 2:
        axes[1].plot(*kl, color=COLOURS[6])
        axes[1].set(ylabel="KL to the start")
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    over_updates(axes[-1])
    path = folder / CURVES
    save(figure, path)
    return path


def _draw_pair(axis: Any, lines: Sequence[Line]) -> None:
    """Training as thin lines, validations as marked ones; what the reward is above the truth is filled."""
    for index, (name, label, marker) in enumerate((("outcome", 'P("Yes")', "s"), ("success", "true accuracy", "o"))):
        colour = COLOURS[1 - index]
        axis.plot(*curve(lines, "train", name), color=colour, alpha=0.4, linewidth=1)
        dashes = "--" if name == "outcome" else "-"
        axis.plot(*curve(lines, "validation", name), dashes, color=colour, marker=marker, ms=4, label=label)
    both = [line for line in lines if line.get("phase") == "validation" and line.get("outcome") is not None]
    update, reward, right = ([line[name] for line in both] for name in ("update", "outcome", "success"))
    above = [a > b for a, b in zip(reward, right, strict=True)]
    axis.fill_between(
        update, right, reward, where=above, interpolate=True, color=COLOURS[4], alpha=0.25, lw=0, label="reward above"
    )


# The stages -------------------------------------------------------------------------------------------


class SelfVerifyWork(HostedWork):
    """The stages of a run on a host environment; what is examined is the judge, too."""

    evaluates = False

    def examine(self, params: Any) -> Validation:
        """The figures on validation questions, said aloud; `report.health` warns where the gap has grown."""
        setup = self.setup
        key, tasks = exam_key(setup, "validation"), setup.config.validation_tasks
        found = figures(examine(setup, params, key, "validation", tasks=tasks).played)
        self.progress.say(validation_line(found))
        return validation_of(found)

    def finish(self, session: Session, minutes: float) -> dict[str, Any]:
        """Test the start, the last update, and that which validated best, where it is another."""
        at, chosen = session.checkpoints.latest(), session.checkpoints.best()
        assert at is not None  # the end was saved
        stages = {"start": (session.start, 0), "last update": (session.params_at(at), int(session.run.learner.version))}
        if chosen != at:
            stages |= {f"update {chosen}, best": (session.best_params()[1], session.best_version())}
        setup, key = self.setup, exam_key(self.setup, "test")
        count = setup.config.test_tasks
        played = {
            name: examine(setup, params, key, "test", tasks=count, version=version).played
            for name, (params, version) in stages.items()
        }
        for when, own in zip(("before", "after"), played.values(), strict=False):
            record(setup.folder / "trajectories" / f"test-{when}.jsonl", own)
        found = {name: figures(own) for name, own in played.items()}
        before, after = list(found.values())[:2]
        best = list(found.values())[-1]
        more = {
            f"{name}_{when}": getattr(one, field)
            for when, one in (("before", before), ("after", after), ("best", best))
            for name, field in (
                ("reward", "outcome"),
                ("gap", "gap"),
                ("judge_right", "judge_right"),
                ("calibration_error", "calibration_error"),
            )
        }
        words = [comparison(found), "", *_stories(setup, played["start"], played["last update"])]
        tested = Tested([before, after], "\n".join(words), more | {"success_best": best.success})
        return session.finish(minutes, tested)


def _stories(setup: HostedSetup, before, after) -> list[str]:
    """One question whose answer became right, and one that pleases the judge and is wrong, where there are such."""
    pairs = list(zip(before, after, strict=True))
    learned = [pair for pair in pairs if pair[1].correct and not pair[0].correct]
    fooled = [one for one in after if not one.correct and (one.outcome or 0.0) >= 0.5]
    told = (
        [f"before:\n{setup.story(setup.env, learned[0][0])}\nafter:\n{setup.story(setup.env, learned[0][1])}"]
        if learned
        else []
    )
    return [*told, *(f"the judge is wrong:\n{setup.story(setup.env, one)}" for one in fooled[:1])]


def train(
    config: Config,
    folder: str | Path,
    *,
    every: int = 10,
    resume: bool = True,
    loggers: Sequence[str] = (),
    budget: TimeBudget = ENDLESS,
) -> dict[str, Any]:
    """Train in a folder, or go on there -> the result; a validation and a checkpoint come `every` so many updates."""
    how: dict[str, Any] = {"every": every, "resume": resume, "loggers": loggers, "budget": budget}
    return train_hosted(open, SelfVerifyWork, NAME, config, folder, **how)
