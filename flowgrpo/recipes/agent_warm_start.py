"""What a pretrained planner imitates before reinforcement: experts' demonstrations, or successes, its own or a model's.

    none        nothing: worked examples in the prompt are enough for many a model
    expert      the steps with which tasks say that they are solved, played with the real tools
    own         its own right answers: sampled, judged, and what was right is imitated (rejection sampling)
    a model     the right answers of another model, encoded again by the planner's tokenizer

What is sampled is written to `trajectories/warm_start.jsonl`, slice by slice, so a run that is killed goes on with the
same demonstrations.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import jax

from flowgrpo.agent.action_forms import ActionForm
from flowgrpo.agent.examples import scripted_actions
from flowgrpo.agent.tool_arguments import Schema
from flowgrpo.contracts import HostEnv
from flowgrpo.data.tokenizer import Text
from flowgrpo.learner.imitation import packed_imitation
from flowgrpo.learner.state import make_optimizer
from flowgrpo.models.hf import load_model
from flowgrpo.recipes.agent_config import Config
from flowgrpo.recipes.hosted import HostedSetup, compile_engines, kept, make_engine, play_tasks, record
from flowgrpo.recipes.offline_start import warm_start_on
from flowgrpo.rollout.demonstrations import demonstrate, imitate_played, spoken_actions
from flowgrpo.rollout.records import Played, from_json
from flowgrpo.run.warm_start import WarmStart, no_warm_start
from flowgrpo.types import BadInput, Task, Trajectory

SAMPLED = "trajectories/warm_start.jsonl"  # in the folder of a run
FIRST = 1 << 20  # tasks of training from this one on: others than those of the updates, where tasks never end
SHOWN = 3  # answers in a message
WAVES = 2  # of trajectories that fill all slots, in a slice
HELD_OUT = 10  # the demonstrations of one task of so many are for validation
VALIDATIONS = 4  # over the steps
PATIENCE = 3  # validations that may bring nothing


def make_warm_start(
    setup: HostedSetup, config: Config, make_env: Callable[..., HostEnv], form: ActionForm, schemas: Sequence[Schema]
) -> WarmStart:
    """The imitation that a run's settings ask for; `make_env(text, turns=...)` makes an environment with examples.

    What was sampled in it is imitated in the environment of the run, which may leave them out.
    """
    env, text = setup.env, setup.model.text
    if config.warm_start == "none":
        return no_warm_start(setup.planner.params)
    if config.warm_start == "expert":
        tasks = _solved_tasks(setup.tasks("train", FIRST, config.demonstrations))
        expert = partial(scripted_actions, form=form, schemas=schemas)
        return imitate(setup, demonstrate(env, tasks, expert, text=text, do=setup.do))
    if config.warm_start == "own":
        setup.engine.swap(setup.planner.serve(setup.planner.params), 0)
        successes = _successes(setup._replace(env=make_env(text, turns=config.turns)), config)
        actions = [[turn.tokens[turn.chosen].tolist() for turn in played.turns] for played in successes]
    else:  # a teacher may have another tokenizer: its words are encoded again by the planner's
        teacher = load_model(config.warm_start, dtype=config.dtype)
        with make_engine(teacher, config) as engine:
            sampling = setup._replace(engine=engine, env=make_env(teacher.text, turns=config.turns), model=teacher)
            successes = _successes(compile_engines(sampling), config)
        actions = [spoken_actions(played, teacher.text, text) for played in successes]
    pairs = zip(successes, actions, strict=True)
    return imitate(setup, [imitate_played(env, text, played, said, group=played.group) for played, said in pairs])


def _solved_tasks(tasks: Sequence[Task]) -> Sequence[Task]:
    """The tasks that say how they are solved, or all of them where none does."""
    solved = [task for task in tasks if {"steps", "final"} <= task.metadata.keys()]
    if 0 < len(solved) < len(tasks):
        logging.getLogger(__name__).warning(
            f"{len(tasks) - len(solved)} of {len(tasks)} tasks have no fields steps and final, which say how a task is "
            "solved, and are not demonstrated"
        )
    return solved or tasks


def _successes(setup: HostedSetup, config: Config) -> list[Played]:
    """The right trajectories of a first rollout by the setup's engine, those without an error where there are some."""
    sampled = _sample(setup._replace(config=replace(config, temperature=config.warm_temperature)), config)
    right = [played for played in sampled if played.correct]
    if not right:
        raise BadInput(
            f"--warm_start={config.warm_start}: none of {len(sampled)} trajectories came to a right answer, so there "
            f"is nothing to imitate; it said {quote_actions(sampled, setup.model.text)}. Give --examples, more "
            "--demonstrations or easier --tasks, or take --warm_start=expert where tasks have steps"
        )
    return [played for played in right if not any(played.errors)] or right


def _sample(setup: HostedSetup, config: Config) -> list[Played]:
    """So many trajectories of each demonstrated task, written down after every slice of tasks: a run goes on there."""
    path, size = setup.folder / SAMPLED, max(WAVES * config.slots // config.samples, 1)
    sampled = [from_json(line) for line in path.read_text().splitlines()] if path.exists() else []
    while (first := len(sampled) // config.samples) < config.demonstrations:
        tasks = setup.tasks("train", FIRST + first, min(size, config.demonstrations - first))
        key = jax.random.fold_in(jax.random.key(config.seed), first)
        stage = f"warm start, tasks {first + 1} to {first + len(tasks)} of {config.demonstrations}"
        with kept(setup, f"warm-start-{first}"):
            played = play_tasks(setup, setup.env, tasks, key, samples=config.samples, stage=stage).played
        sampled += [replace(each, group=first + each.group) for each in played]
        record(path, sampled)
    return sampled


def obedience(played: Sequence[Played]) -> dict[str, float]:
    """The share of actions that could be read, and led to a call or to the answer; {} where nobody acted."""
    actions = [(error, tool) for each in played for error, tool in zip(each.errors, each.tools, strict=True)]
    return {"obedience": sum(not error or bool(tool) for error, tool in actions) / len(actions)} if actions else {}


def check_format_followed(played: Sequence[Played], *, text: Text, config: Config) -> None:
    """Raise `BadInput` where not one action of the first rollout could be read: nothing can be learned from it."""
    share = obedience(played).get("obedience")
    if share is None or share > 0:
        return
    if config.examples == "none":
        tries = ["--examples=tasks or a file of worked examples"]
    else:
        tries = ["--nodrop_examples" if config.drop_examples else "more --examples"]
    tries += ["--warm_start=expert or a model that can"] if config.warm_start == "none" else []
    tries += [f"another form of --actions than {config.actions}", "a larger --max_tokens", "a larger model"]
    raise BadInput(
        f"{config.model} wrote none of the {sum(len(each.turns) for each in played)} actions of the first rollout in "
        f"the form of --actions={config.actions}; it said {quote_actions(played, text)}. Try {', '.join(tries)}"
    )


def quote_actions(sampled: Sequence[Played], text: Text) -> str:
    """A few of the first actions, as a message quotes them."""
    acted = [played.turns[0] for played in sampled if played.turns]
    return "; ".join(repr(text.spoken(turn.tokens[turn.chosen])[0])[:120] for turn in acted[:SHOWN])


def imitate(setup: HostedSetup, demonstrations: Sequence[Trajectory]) -> WarmStart:
    """The imitation of demonstrations by a planner, those of one task in ten for validation; prefixes are shared."""
    config, planner = setup.config, setup.planner
    shares = planner.policy.hidden_tree is not None
    parts = {"train": [], "validation": []}
    tasks = sorted({demonstration.group for demonstration in demonstrations})
    held_out = set(tasks[::HELD_OUT])
    for demonstration in demonstrations:
        parts["validation" if demonstration.group in held_out else "train"].append(demonstration)
    if not parts["train"]:
        raise BadInput(f"there are demonstrations of {len(tasks)} tasks: give more by --demonstrations, two at least")
    rows = {
        name: packed_imitation(part, row_length=config.context_tokens, shares=shares) for name, part in parts.items()
    }
    return warm_start_on(
        rows,
        setup.model._replace(policy=planner.policy, params=planner.params),
        config,
        patience=PATIENCE,
        optimizer=make_optimizer(learning_rate=config.warm_rate, warmup_steps=5, decay_steps=config.warm_steps),
        trained=planner.trained,
        every=max(config.warm_steps // VALIDATIONS, 1),
        micro_rows=config.micro_rows,
    )
