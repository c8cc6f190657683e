"""The warm start of a pretrained planner: imitation of experts, of its own right answers, or of another model's.

    none        nothing: worked examples in the prompt are enough for many a model
    expert      the steps that tasks carry, carried out with the real tools
    own         its own right answers: sampled, judged, and imitated if right (rejection sampling)
    a model     the right answers of another model, encoded again by the planner's tokenizer

Sampled trajectories are written to `trajectories/warm_start.jsonl`, slice by slice, so a run that was killed resumes
with the same demonstrations. `check_format_followed` raises if a planner does not follow the form of its actions.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import jax

from flowgrpo.agent.action_forms import ActionForm
from flowgrpo.agent.examples import scripted_actions
from flowgrpo.contracts import HostEnv
from flowgrpo.data.tokenizer import ChatTokenizer
from flowgrpo.data.tool_calls import Schema
from flowgrpo.learner.imitation import packed_imitation
from flowgrpo.learner.state import adamw
from flowgrpo.models.hf import load_model
from flowgrpo.recipes.agent_config import Config
from flowgrpo.recipes.offline_start import imitation_warm_start
from flowgrpo.rollout.demonstrations import action_texts, demonstrate, imitate_recorded
from flowgrpo.rollout.records import RecordedTrajectory, from_json
from flowgrpo.training.language_model import (
    HostedSetup,
    compile_engines,
    make_engine,
    record_effects,
    roll_out_tasks,
    write_trajectories,
)
from flowgrpo.training.settings import WarmStartSection
from flowgrpo.training.warm_start import WarmStart, no_warm_start
from flowgrpo.types import BadInput, Trajectory

SAMPLED = "trajectories/warm_start.jsonl"  # in the folder of a run
FIRST_TASK = 1 << 20  # number of the first demonstrated task, so that an endless source gives updates other tasks
QUOTED = 3  # actions in a message
WAVES = 2  # slice size, in trajectories that fill all slots
HELD_OUT = 10  # one task of this many is for validation
VALIDATIONS = 4  # number of validations
PATIENCE = 3  # validations without progress


def make_warm_start(
    setup: HostedSetup, config: Config, make_env: Callable[..., HostEnv], form: ActionForm, schemas: Sequence[Schema]
) -> WarmStart:
    """The imitation that a run's settings ask for.

    What was sampled with examples in the prompt is imitated in the run's environment, which may leave them out.

    Args:
        make_env: `make_env(tokenizer, turns=...)`, the environment with examples in its prompt.
        form: form of the actions.
        schemas: of the tools.
    """
    env, tokenizer = setup.env, setup.model.tokenizer
    if config.warm_start.warm_start == "none":
        return no_warm_start(setup.planner.params)
    if config.warm_start.warm_start == "expert":
        tasks = setup.tasks("train", FIRST_TASK, config.warm_start.demonstrations)
        solved = [task for task in tasks if {"steps", "final"} <= task.metadata.keys()]
        if 0 < len(solved) < len(tasks):
            logging.getLogger(__name__).warning(
                f"{len(tasks) - len(solved)} of {len(tasks)} tasks have no fields steps and final, which say how a "
                "task is solved, and are not demonstrated"
            )
        expert = partial(scripted_actions, form=form, schemas=schemas)
        demonstrations = demonstrate(env, solved or tasks, expert, tokenizer=tokenizer, call_tool=setup.call_tool)
        return imitate_demonstrations(setup, demonstrations, config.warm_start)
    if config.warm_start.warm_start == "own":
        setup.engine.update_weights(setup.planner.to_engine(setup.planner.params), 0)
        answers = _right_answers(setup._replace(env=make_env(tokenizer, turns=config.rollout.turns)), config)
        actions = [[turn.tokens[turn.chosen].tolist() for turn in trajectory.turns] for trajectory in answers]
    else:  # the other model may have another tokenizer: its actions are encoded again by the planner's
        teacher = load_model(config.warm_start.warm_start, dtype=config.model.dtype)
        with make_engine(teacher, config) as engine:
            sampling = setup._replace(
                engine=engine, env=make_env(teacher.tokenizer, turns=config.rollout.turns), model=teacher
            )
            answers = _right_answers(compile_engines(sampling), config)
        actions = [action_texts(trajectory, teacher.tokenizer, tokenizer) for trajectory in answers]
    demonstrations = [
        imitate_recorded(env, tokenizer, trajectory, own_actions, group=trajectory.group)
        for trajectory, own_actions in zip(answers, actions, strict=True)
    ]
    return imitate_demonstrations(setup, demonstrations, config.warm_start)


def _right_answers(setup: HostedSetup, config: Config) -> list[RecordedTrajectory]:
    """Right trajectories of the setup's engine, only those without an error if there are any."""
    sampled = _sample(setup._replace(config=config.replace(temperature=config.warm_start.warm_temperature)), config)
    right = [trajectory for trajectory in sampled if trajectory.correct]
    if not right:
        raise BadInput(
            f"--warm_start={config.warm_start.warm_start}: none of {len(sampled)} trajectories came to a right answer, "
            f"so there is nothing to imitate; it said {quote_actions(sampled, setup.model.tokenizer)}. Give "
            "--examples, more --demonstrations or easier --tasks, or take --warm_start=expert where tasks have steps"
        )
    return [trajectory for trajectory in right if not any(trajectory.errors)] or right


def _sample(setup: HostedSetup, config: Config) -> list[RecordedTrajectory]:
    """Sample each demonstrated task `samples` times; written after every slice of tasks, to be resumed there."""
    path, slice_size = setup.folder / SAMPLED, max(WAVES * config.devices.slots // config.rollout.samples, 1)
    sampled = [from_json(line) for line in path.read_text().splitlines()] if path.exists() else []
    while (first := len(sampled) // config.rollout.samples) < config.warm_start.demonstrations:
        tasks = setup.tasks("train", FIRST_TASK + first, min(slice_size, config.warm_start.demonstrations - first))
        key = jax.random.fold_in(jax.random.key(config.run.seed), first)
        stage = f"warm start, tasks {first + 1} to {first + len(tasks)} of {config.warm_start.demonstrations}"
        with record_effects(setup, f"warm-start-{first}"):
            result = roll_out_tasks(setup, setup.env, tasks, key, samples=config.rollout.samples, stage=stage)
        sampled += [replace(trajectory, group=first + trajectory.group) for trajectory in result.trajectories]
        write_trajectories(path, sampled)
    return sampled


def format_compliance(trajectories: Sequence[RecordedTrajectory]) -> dict[str, float]:
    """Fraction of actions that could be parsed, and led to a call or to the answer; {} if there is no action."""
    actions = [
        (error, tool)
        for trajectory in trajectories
        for error, tool in zip(trajectory.errors, trajectory.tools, strict=True)
    ]
    if not actions:
        return {}
    return {"format_compliance": sum(not error or bool(tool) for error, tool in actions) / len(actions)}


def check_format_followed(trajectories: Sequence[RecordedTrajectory], *, text: ChatTokenizer, config: Config) -> None:
    """Raise `BadInput` if not one action of the first rollout could be parsed: nothing can be learned from it."""
    compliance = format_compliance(trajectories).get("format_compliance")
    if compliance is None or compliance > 0:
        return
    if config.agent.examples == "none":
        fixes = ["--examples=tasks or a file of worked examples"]
    else:
        fixes = ["--nodrop_examples" if config.agent.drop_examples else "more --examples"]
    fixes += ["--warm_start=expert or a model that can"] if config.warm_start.warm_start == "none" else []
    fixes += [f"another form of --actions than {config.agent.actions}", "a larger --max_tokens", "a larger model"]
    count = sum(len(trajectory.turns) for trajectory in trajectories)
    raise BadInput(
        f"{config.model.model} wrote none of the {count} actions of the first rollout in the form of "
        f"--actions={config.agent.actions}; it said {quote_actions(trajectories, text)}. Try {', '.join(fixes)}"
    )


def quote_actions(trajectories: Sequence[RecordedTrajectory], tokenizer: ChatTokenizer) -> str:
    """The first actions of some trajectories, quoted for a message."""
    turns = [trajectory.turns[0] for trajectory in trajectories if trajectory.turns]
    return "; ".join(repr(tokenizer.decode_action(turn.tokens[turn.chosen])[0])[:120] for turn in turns[:QUOTED])


def imitate_demonstrations(
    setup: HostedSetup, demonstrations: Sequence[Trajectory], settings: WarmStartSection
) -> WarmStart:
    """The imitation of demonstrations by a planner; those of one task in ten are for validation."""
    config, planner = setup.config, setup.planner
    splits: dict[str, list[Trajectory]] = {"train": [], "validation": []}
    tasks = sorted({demonstration.group for demonstration in demonstrations})
    held_out = set(tasks[::HELD_OUT])
    for demonstration in demonstrations:
        splits["validation" if demonstration.group in held_out else "train"].append(demonstration)
    if not splits["train"]:
        raise BadInput(f"there are demonstrations of {len(tasks)} tasks: give more by --demonstrations, two at least")
    shares = planner.policy.hidden_tree is not None  # rows that are trees contain a common prefix once
    rows = {
        name: packed_imitation(split, row_length=config.rollout.context_tokens, use_trees=shares)
        for name, split in splits.items()
    }
    return imitation_warm_start(
        rows,
        setup.model._replace(policy=planner.policy, params=planner.params),
        settings,
        seed=config.run.seed,
        patience=PATIENCE,
        optimizer=adamw(settings.warm_rate, warmup_steps=5, decay_steps=settings.warm_steps),
        trainable=planner.trainable,
        every=max(settings.warm_steps // VALIDATIONS, 1),
        micro_rows=config.learner.micro_rows,
    )
