"""Settings of a run on self-verification, and the parts that they build.

The model's starting weights are frozen as the judge. The reward of an answer is the judge's P("Yes"); whether the
answer is right is found by a matcher, which the training never sees, and recorded as `correct`.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import flowgrpo as fg
from experiments import domains, self_verify_tasks
from experiments.hosted_setup import Draw, HostedSetup, draw_from, make_engine, make_residency
from experiments.members import base_of
from experiments.planner_setup import PLANNER, check_planner, frozen, load_start, make_planner
from flowgrpo import loop
from flowgrpo.agent.question import question
from flowgrpo.contracts import Reward, Scored
from flowgrpo.effects import no_effects
from flowgrpo.files import make_folder
from flowgrpo.learner.folder import START
from flowgrpo.learner.state import make_optimizer
from flowgrpo.models.hf import Model, check_model
from flowgrpo.report.progress import Progress
from flowgrpo.rewards.answer import answer
from flowgrpo.rewards.judge import ask_alone, make_next_logp, verifier_probability
from flowgrpo.rewards.prompts import LENGTHS
from flowgrpo.rewards.shaping import CHECK, second_check
from flowgrpo.rollout.records import Played
from flowgrpo.sandbox import Sandbox
from flowgrpo.task_files import parse_fields, read_tasks
from flowgrpo.types import BadInput

BRIEF = 'Answer the question. Put the final answer last, after "Answer:".'  # what a given model is told
SHORT = 32  # tokens that hold a prompt of the small model's judge
COMMON: dict[str, Any] = PLANNER | {
    "seed": 0,
    "samples": 8,
    "temperature": 1.0,
    "clip_high": 0.28,
    "control": "none",
    "rendering": "fresh",
    "recorded": 2,  # groups of an update whose trajectories are written down
    "turn_seconds": 60.0,
    "group_seconds": 600.0,
    "test_tasks": 400,
}
OFFLINE = COMMON | {
    "updates": 40,
    "queries": 16,
    "learning_rate": 3e-4,
    "beta": 0.001,
    "max_tokens": 4,
    "context_tokens": 32,
    "slots": 32,
    "chunk": 32,
    "steps": 4,
    "micro_rows": 32,
    "validation_tasks": 256,
    "right": 0.45,  # of the answers that the small model imitates
    "overlooked": 0.15,  # of the wrong answers that its judge is shown: called right
    "doubted": 0.05,  # of the right ones: called wrong
    "warm_tasks": 10000,
    "warm_steps": 400,
    "warm_rows": 48,
    "warm_rate": 3e-3,
}
GIVEN = COMMON | {
    "updates": 100,
    "queries": 32,
    "learning_rate": 1e-6,
    "beta": 0.001,
    "max_tokens": 512,
    "context_tokens": 2048,
    "slots": 32,
    "chunk": 64,
    "steps": 16,
    "micro_rows": 1,
    "validation_tasks": 128,
    "dtype": "bfloat16",
    "remat": True,
}


def settings_of(model: str | None, tasks: str | None, **chosen: Any) -> dict[str, Any]:
    """The preset, offline or for a given model, with what was chosen in its place; `None` is no choice."""
    if tasks is not None and model is None:
        raise BadInput("--tasks needs --model: the small model that is made here can answer its own questions only")
    preset: dict[str, Any] = (OFFLINE if model is None else GIVEN) | {"model": model, "tasks": tasks}
    unknown = sorted(set(chosen) - {*preset, "fields", "domain"})
    if unknown:
        raise BadInput(f"{unknown[0]!r} is no setting of this run; they are {', '.join(preset)}")
    settings: dict[str, Any] = preset | {name: value for name, value in chosen.items() if value is not None}
    if settings["max_tokens"] >= settings["context_tokens"]:
        raise BadInput(
            f"--max_tokens={settings['max_tokens']} leaves no room for a question: give less than "
            f"{settings['context_tokens']}"
        )
    if settings["temperature"] <= 0:
        raise BadInput(f"--temperature={settings['temperature']} samples the same answer always: give more than 0")
    return settings


@contextmanager
def open_setup(
    settings: Mapping[str, Any], folder: Path, *, begin: Callable[[], None] = lambda: None
) -> Iterator[HostedSetup]:
    """The parts that these settings describe; engine and sandbox live as long as the block.

    `begin` is called when everything that is named was found, and before anything is written.
    """
    check_planner(settings)
    with ExitStack() as stack:
        if settings["model"] is not None:
            check_model(settings["model"])
        draw, check = _tasks_and_check(settings, stack)
        begin()
        if settings["model"] is None:
            _make_start(settings, folder)
        start = load_start(settings["model"] or folder / START, settings)
        planner, model = make_planner(start, settings), frozen(start, settings)
        residency = stack.enter_context(make_residency(settings, folder))
        residency.hold("judge", model.params)
        served = start._replace(policy=planner.served, params=planner.serve(jax.tree.map(jnp.copy, planner.params)))
        instructions = BRIEF if settings["tasks"] is not None else ""
        env = question(model.text, max_tokens=settings["max_tokens"], instructions=instructions)
        yield HostedSetup(
            name="self_verify",
            settings=settings,
            folder=folder,
            model=start,
            planner=planner,
            env=env,
            exam_env=env,
            engine=stack.enter_context(make_engine(served, settings)),
            do=no_effects,
            residency=residency,
            reward=judged(model, check, lambda: residency["judge"]),
            tasks=draw,
            algorithm=fg.flow_grpo(beta=settings["beta"], clip_high=settings["clip_high"]),
            optimizer=make_optimizer(learning_rate=settings["learning_rate"], base=base_of(settings["optimizer"])),
            sizes=loop.Settings(
                **{name: settings[name] for name in ("queries", "samples", "temperature", "micro_rows")},
                compute_dtype=planner.compute_dtype,
            ),
            warm_start=lambda _tell: jax.tree.map(jnp.copy, planner.params),
            story=lambda _, played: story(played),
            solved=is_right,
        )


def judged(model: Model, check: Reward, params: Any) -> Reward:
    """P("Yes") under these parameters, or those that they give, with what the matcher says beside it."""
    next_logp = make_next_logp(model.policy, params, lengths=(SHORT, *LENGTHS), pad_id=model.text.pad_id)
    return second_check(verifier_probability(model.text, next_logp, ask=ask_alone), check)


def is_right(scored: Scored) -> bool:
    """Whether the matcher found the answer right, whatever the judge said."""
    return scored.parts.get(CHECK, 0.0) >= 1 - 1e-6


def story(played: Played) -> str:
    """A question with its answer and both verdicts."""
    scored = played.scored
    said = "none" if scored is None or scored.value is None else f"{scored.value:.2f}"
    verdict = "right" if played.trajectory.correct else f"wrong, should be {' or '.join(played.task.answers)}"
    return f"    {played.task.query}\n    > {played.output}\n    P(Yes) {said}, {verdict}"


def _make_start(settings: Mapping[str, Any], folder: Path) -> None:
    """The start of an offline run in its folder, unless it is there."""
    progress = Progress(settings["warm_steps"])
    make_folder(folder)
    self_verify_tasks.make_start(
        folder / START, settings, lambda step, loss: progress.show("warm start", step, {"loss": loss})
    )
    progress.end()


# Tasks --------------------------------------------------------------------------------------------------


def _tasks_and_check(settings: Mapping[str, Any], stack: ExitStack) -> tuple[Draw, Reward]:
    """`tasks(split, first, count)`, and the matcher that finds out whether an answer is right."""
    seed = settings["seed"]
    if settings["tasks"] is None:
        return lambda split, first, count: self_verify_tasks.make_tasks(seed, split, first, count), answer()
    fields = parse_fields(settings.get("fields", []))
    read = read_tasks(settings["tasks"], fields=fields, domain=settings.get("domain"))
    for task in read:
        if not task.answers:
            raise BadInput(f"{read.source}: task {task.id!r} has no answer, so what is right is not known: give it one")
    return draw_from(read, seed), _check({task.domain for task in read}, stack)


def _check(names: set[str], stack: ExitStack) -> Reward:
    """The matcher of each domain that has one of its own, and the plain one for others."""
    if not names & set(domains.DOMAINS):
        return answer()
    sandbox = stack.enter_context(Sandbox(preload=domains.preload(names)))
    return domains.route(domains.Means(sandbox=sandbox), default="answer")
