"""The recipe of self-verification: a model's reward is its own frozen start, asked whether an answer is correct.

    result = RECIPE.train(preset(updates=40), "runs/self")

The outcome of an answer is the judge's P("Yes"). A matcher, which training never sees, finds out whether the answer is
right, which is recorded as `correct`. The gap is mean P("Yes") minus the true accuracy: if training raises the outcome
and not the accuracy, it grows, and `report.health` warns that the judge is being hacked. `evaluate_answers`,
`comparison_table` and `draw_curves` show both side by side.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flowgrpo.agent.single_turn import single_turn
from flowgrpo.algorithms.policy_gradient import flow_grpo
from flowgrpo.contracts import Reward, RewardResult
from flowgrpo.data.task_files import parse_fields, read_tasks
from flowgrpo.evaluation.metrics import Evaluation
from flowgrpo.learner.loss_scale import optimizer_for
from flowgrpo.learner.state import adamw
from flowgrpo.models.hf import Model, check_model
from flowgrpo.recipes import registry, self_verify_tasks
from flowgrpo.recipes.planner_reader import TEXT
from flowgrpo.recipes.recipe import NO_OBJECTS, Objects, Recipe
from flowgrpo.recipes.registry import make_base_optimizer
from flowgrpo.recipes.self_verify_tasks import Config
from flowgrpo.recipes.self_verify_tasks import preset as preset
from flowgrpo.report.metrics import METRICS, read_metrics
from flowgrpo.report.plots import COLOURS, CURVES, curve, label_updates, save_figure
from flowgrpo.rewards.answers.match import answer
from flowgrpo.rewards.combine import SECOND_CHECK, second_check
from flowgrpo.rewards.judge import PADDED_LENGTHS, ask_without_gold, make_next_logp, verifier_probability
from flowgrpo.rollout.effects import no_effects
from flowgrpo.rollout.records import RecordedTrajectory
from flowgrpo.sandbox import Sandbox
from flowgrpo.training.hosted_training import HostedTrainable, eval_key, hosted_trainable
from flowgrpo.training.language_model import (
    Draw,
    HostedSetup,
    draw_from,
    evaluate_trajectories,
    make_engine,
    make_offloader,
    roll_out_split,
    sizes_of,
    write_trajectories,
)
from flowgrpo.training.planner import check_planner, frozen_start, load_start, make_planner, template_of
from flowgrpo.training.run_dir import START
from flowgrpo.training.session import Session, TestReport, Validation, validation_of
from flowgrpo.training.warm_start import no_warm_start
from flowgrpo.types import BadInput, Params

NAME = "self_verify"
INSTRUCTIONS = 'Answer the question. Put the final answer last, after "Answer:".'  # of a given model
SHORT_PROMPT = 32  # tokens that hold a prompt of the small model's judge


@contextmanager
def build(
    config: Config, folder: Path, *, objects: Objects = NO_OBJECTS, on_ready: Callable[[], object] | None = None
) -> Iterator[HostedSetup]:
    """The parts that these settings describe; engine and sandbox are closed with the block.

    `on_ready` is called when everything that the settings name was found, before anything is written.
    """
    objects.check(NAME)
    check_planner(config.model, config.devices)
    with ExitStack() as stack:
        if config.model.model is not None:
            check_model(config.model.model, template_of(config.model))
        draw, matcher = _tasks_and_matcher(config, stack)
        if on_ready is not None:
            on_ready()
        if config.model.model is None:
            self_verify_tasks.make_start_model(folder, config)
        start = load_start(config.model.model or folder / START, config.model)
        planner, judge = (
            make_planner(start, config.model, config.devices, seed=config.run.seed),
            frozen_start(start, config.model),
        )
        offloader = stack.enter_context(make_offloader(config.devices, folder))
        offloader.put("judge", judge.params)
        # Copied, since the engine, the judge and the update must not share arrays that one of them gives up.
        engine_params = planner.to_engine(jax.tree.map(jnp.copy, planner.params))
        for_engine = start._replace(policy=planner.engine_policy, params=engine_params)
        instructions = INSTRUCTIONS if config.tasks.tasks is not None else ""
        env = single_turn(judge.tokenizer, max_tokens=config.rollout.max_tokens, instructions=instructions)
        yield HostedSetup(
            name="self_verify",
            config=config,
            folder=folder,
            model=start,
            planner=planner,
            env=env,
            eval_env=env,
            engine=stack.enter_context(make_engine(for_engine, config)),
            call_tool=no_effects,
            offloader=offloader,
            reward=yes_probability(judge, matcher, lambda: offloader["judge"]),
            tasks=draw,
            algorithm=flow_grpo(beta=config.learner.beta, clip_high=config.learner.clip_high),
            optimizer=optimizer_for(
                config.model.dtype,
                adamw(config.learner.learning_rate, base=make_base_optimizer(config.learner.optimizer)),
            ),
            sizes=sizes_of(config.rollout, config.learner, planner),
            warm_start=lambda _: no_warm_start(jax.tree.map(jnp.copy, planner.params)),
            format_trajectory=lambda _, trajectory: format_verdict(trajectory),
            is_solved=is_right,
        )


def yes_probability(model: Model, matcher: Reward, params: Any) -> Reward:
    """P("Yes") under these parameters, or those that they return, with the matcher's result as a second check."""
    next_logp = make_next_logp(model.policy, params, lengths=(SHORT_PROMPT, *PADDED_LENGTHS))
    return second_check(verifier_probability(model.tokenizer, next_logp, ask=ask_without_gold), matcher)


def is_right(result: RewardResult) -> bool:
    """Whether the matcher found the answer right, whatever the judge said."""
    return result.parts.get(SECOND_CHECK, 0.0) >= 1 - 1e-6


def format_verdict(trajectory: RecordedTrajectory) -> str:
    """A question with its answer, the judge's P("Yes") and the matcher's verdict."""
    result = trajectory.reward_result
    yes = "none" if result is None or result.value is None else f"{result.value:.2f}"
    verdict = "right" if trajectory.correct else f"wrong, should be {' or '.join(trajectory.task.answers)}"
    return f"    {trajectory.task.query}\n    > {trajectory.output}\n    P(Yes) {yes}, {verdict}"


def _tasks_and_matcher(config: Config, stack: ExitStack) -> tuple[Draw, Reward]:
    """`draw(split, first, count)`, and the matcher, which is that of each domain, or else the plain one."""
    seed = config.run.seed
    if config.tasks.tasks is None:
        return lambda split, first, count: self_verify_tasks.make_questions(seed, split, first, count), answer()
    tasks = read_tasks(config.tasks.tasks, fields=parse_fields(list(config.tasks.fields)), domain=config.tasks.domain)
    for task in tasks:
        if not task.answers:
            raise BadInput(f"{tasks.source}: task {task.id!r} has no answer to compare with: give it one")
    domains = {task.domain for task in tasks}
    if not domains & set(registry.DOMAINS):
        return draw_from(tasks, seed), answer()
    sandbox = stack.enter_context(Sandbox(preload=registry.modules_to_preload(domains)))
    return draw_from(tasks, seed), registry.route_by_domain(registry.RewardContext(sandbox=sandbox), default="answer")


# Evaluation ---------------------------------------------------------------------------------------------

BINS = 10  # of P("Yes"), for its calibration


@dataclass(frozen=True, kw_only=True)
class JudgedEvaluation(Evaluation):
    """An evaluation by the matcher, with the judge's on the same answers."""

    outcome: float  # mean P("Yes")
    gap: float  # outcome minus the accuracy of the same answers
    judge_right: float  # fraction of right verdicts, where P("Yes") >= 1/2 is Yes
    calibration_error: float  # expected, over ten bins of P("Yes")


def evaluate_answers(trajectories: Sequence[RecordedTrajectory]) -> JudgedEvaluation:
    """Evaluate one answer to each question, over the answers that the judge has judged."""
    judged = [trajectory for trajectory in trajectories if trajectory.outcome is not None]
    if not judged:
        results = [trajectory.reward_result for trajectory in trajectories]
        reason = next((result.reason for result in results if result is not None), "none was asked for")
        raise BadInput(
            f"the judge has judged none of {len(trajectories)} answers ({reason}): give a model that says Yes or No"
        )
    yes_n = np.array([trajectory.outcome for trajectory in judged], np.float64)
    right_n = np.array([trajectory.correct for trajectory in judged])
    return JudgedEvaluation(
        **vars(evaluate_trajectories(trajectories, ())),
        outcome=float(yes_n.mean()),
        gap=float(yes_n.mean() - right_n.mean()),
        judge_right=float(((yes_n >= 0.5) == right_n).mean()),
        calibration_error=calibration_error(yes_n, right_n),
    )


def calibration_error(yes_n: np.ndarray, right_n: np.ndarray) -> float:
    """Expected calibration error (Guo et al., 2017): |P("Yes") - accuracy| in bins of equal width, by their size."""
    bin_n = np.minimum((yes_n * BINS).astype(int), BINS - 1)
    gaps = [abs(yes_n[bin_n == i].sum() - right_n[bin_n == i].sum()) for i in range(BINS)]
    return float(sum(gaps) / len(yes_n))


def comparison_table(evaluations: Mapping[str, JudgedEvaluation]) -> str:
    """A table with a column for each evaluation, by name."""
    rows: dict[str, Callable[[JudgedEvaluation], str]] = {
        "true accuracy": lambda x: f"{x.success:.1%} ({x.success_low:.1%} to {x.success_high:.1%})",
        'P("Yes")': lambda x: f"{x.outcome:.1%}",
        "gap": lambda x: f"{x.gap:+.1%}",
        "judge is right": lambda x: f"{x.judge_right:.1%}",
        "calibration error": lambda x: f"{x.calibration_error:.1%}",
        "cut or empty answers": lambda x: f"{x.tool_errors:.1%}",
        "not judged": lambda x: str(x.invalid),
    }
    lines = [f"{'test questions':24}" + "".join(f"{name:>28}" for name in evaluations)]
    lines += [f"{row:24}" + "".join(f"{cell(x):>28}" for x in evaluations.values()) for row, cell in rows.items()]
    return "\n".join(lines)


def validation_line(evaluation: JudgedEvaluation) -> str:
    """One line for a validation."""
    return (
        f'validation: P("Yes") {evaluation.outcome:.2f}  true accuracy {evaluation.success:.2f}  '
        f"gap {evaluation.gap:+.2f}"
    )


def draw_curves(folder: Path, *, title: str = "") -> Path:
    """Write `curves.png`: mean P("Yes") and true accuracy on the same axes, the KL to the start below."""
    from matplotlib.figure import Figure  # imported late, since it is slow

    lines = list(read_metrics(folder / METRICS))
    if not any(line.get("phase") == "validation" for line in lines):
        raise BadInput(f"{folder / METRICS} has no validation yet: continue the run")
    kl = curve(lines, "train", "kl")
    panels = 2 if kl[0] else 1
    figure = Figure(figsize=(7.5, 3.6 + 1.8 * (panels - 1)), layout="constrained")
    ratios = [2, 1][:panels]
    axes = figure.subplots(panels, 1, sharex=True, squeeze=False, height_ratios=ratios)[:, 0]

    # Training as thin lines, validations with markers; the area by which the outcome exceeds the accuracy is filled.
    for index, (name, label, marker) in enumerate((("outcome", 'P("Yes")', "s"), ("success", "true accuracy", "o"))):
        colour = COLOURS[1 - index]
        axes[0].plot(*curve(lines, "train", name), color=colour, alpha=0.4, linewidth=1)
        dashes = "--" if name == "outcome" else "-"
        axes[0].plot(*curve(lines, "validation", name), dashes, color=colour, marker=marker, ms=4, label=label)
    validations = [line for line in lines if line.get("phase") == "validation" and line.get("outcome") is not None]
    update, outcome, accuracy = ([line[name] for line in validations] for name in ("update", "outcome", "success"))
    axes[0].fill_between(
        update,
        accuracy,
        outcome,
        where=[a > b for a, b in zip(outcome, accuracy, strict=True)],
        interpolate=True,
        color=COLOURS[4],
        alpha=0.25,
        lw=0,
        label="outcome above accuracy",
    )
    axes[0].set(ylim=(-0.02, 1.02), ylabel="fraction of answers", title=title)
    if panels == 2:
        axes[1].plot(*kl, color=COLOURS[6])
        axes[1].set(ylabel="KL to the start")
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    label_updates(axes[-1])
    path = folder / CURVES
    save_figure(figure, path)
    return path


# Training ---------------------------------------------------------------------------------------------


class SelfVerifyTrainable(HostedTrainable):
    """The stages of a run on a host environment, where evaluations compare judge and matcher."""

    def validate(self, params: Params) -> Validation:
        """Evaluate answers to the validation questions; `report.health` warns if the gap has grown."""
        setup = self.setup
        key, tasks = eval_key(setup, "validation"), setup.config.evaluation.validation_tasks
        evaluation = evaluate_answers(roll_out_split(setup, params, key, "validation", tasks=tasks).trajectories)
        self.progress.log(validation_line(evaluation))
        return validation_of(evaluation)

    def finish(self, session: Session, minutes: float) -> dict[str, Any]:
        """Test the start, the last update, and the best one if it is another."""
        last, best = session.checkpoints.latest(), session.checkpoints.best()
        assert last is not None  # the last update was saved
        stages = {
            "start": (session.start_params, 0),
            "last update": (session.params_at(last), int(session.state.learner.version)),
        }
        if best != last:
            stages |= {f"update {best}, best": (session.best_params()[1], session.best_version())}
        setup, key = self.setup, eval_key(self.setup, "test")
        count = setup.config.evaluation.test_tasks
        rollouts = {
            name: roll_out_split(setup, params, key, "test", tasks=count, version=version).trajectories
            for name, (params, version) in stages.items()
        }
        for when, trajectories in zip(("before", "after"), rollouts.values(), strict=False):
            write_trajectories(setup.folder / "trajectories" / f"test-{when}.jsonl", trajectories)
        evaluations = {name: evaluate_answers(trajectories) for name, trajectories in rollouts.items()}
        before, after = list(evaluations.values())[:2]
        best_evaluation = list(evaluations.values())[-1]
        results = {
            f"{name}_{when}": getattr(evaluation, field)
            for when, evaluation in (("before", before), ("after", after), ("best", best_evaluation))
            for name, field in (
                ("reward", "outcome"),
                ("gap", "gap"),
                ("judge_right", "judge_right"),
                ("calibration_error", "calibration_error"),
            )
        }
        results["success_best"] = best_evaluation.success
        examples = self._format_examples(rollouts["start"], rollouts["last update"])
        text = "\n".join([comparison_table(evaluations), "", *examples])
        return session.finish(minutes, TestReport([before, after], text, results))

    def _format_examples(self, before: Sequence[RecordedTrajectory], after: Sequence[RecordedTrajectory]) -> list[str]:
        """A question whose answer became right, and a wrong answer that the judge accepts, if there are such."""
        write = partial(self.setup.format_trajectory, self.setup.env)
        pairs = zip(before, after, strict=True)
        learned = [(old, new) for old, new in pairs if new.correct and not old.correct]
        fooled = [answer for answer in after if not answer.correct and (answer.outcome or 0.0) >= 0.5]
        return [
            *(f"before:\n{write(old)}\nafter:\n{write(new)}" for old, new in learned[:1]),
            *(f"the judge is wrong:\n{write(answer)}" for answer in fooled[:1]),
        ]


RECIPE = Recipe(
    name=NAME,
    command="self_verify",
    Config=Config,
    preset=preset,
    build=build,
    make_trainable=hosted_trainable(NAME, SelfVerifyTrainable),
    planner=TEXT,
)
