"""The stages of a run on a pure environment, for a `Session`: what `quickstart` and `evaluate` are made of."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from textwrap import indent
from typing import Any

import jax
import numpy as np

import flowgrpo as fg
from experiments import setups
from experiments.hosted_setup import record
from experiments.plays import right_tool_share
from experiments.session import Tested, Work, blank_like
from experiments.session_files import report, train_line
from flowgrpo import loop
from flowgrpo.envs.env import PAD, in_words, story
from flowgrpo.evaluate import Evaluation, evaluate
from flowgrpo.learner.critic import acting, with_critic
from flowgrpo.rollout import exam
from flowgrpo.rollout.compiled import Rollout
from flowgrpo.rollout.records import Played
from flowgrpo.rollout.shown import records_of

VALIDATION_TASKS = 256
RECORDED = 200  # test trajectories that are written


def pure_work(setup: setups.Setup, *, test_tasks: int = 1000, folder: Path | None = None) -> Work:
    """Warm start by imitation, iterations in three programs, examinations on fresh tasks.

    The first test trajectories are written to the `folder`, where one is given.
    """
    keys = setups.seed_keys(setup.settings["seed"])
    play = jax.jit(make_exam(setup, "validation", VALIDATION_TASKS))
    return Work(
        name=setup.env.name,
        algorithm=setup.algorithm.name,
        settings=setup.settings,
        optimizer=setup.optimizer,
        key=keys["run"],
        place=setup.place,
        blank=partial(blank_like, partial(_init, setup), keys["start"]),
        warm_start=partial(_warm_start, setup, keys),
        make_step=partial(make_step, setup, keys),
        line=partial(train_line, tools=setup.env.tools),
        examine=lambda params: judge(play(params, keys["validation"]), setup.env),
        test=partial(_test, setup, keys["test"], test_tasks, folder),
    )


def make_exam(setup: setups.Setup, split: str, tasks: int, samples: int = 1):
    """`exam(params, key) -> Rollout`, to be jitted; of an actor and its critic, the actor plays."""
    sizes = {"tasks": tasks, "samples": samples, "temperature": setup.settings["temperature"]}
    return partial(_examine, exam=exam.make_exam(setup.env, setup.policy, split, **sizes, mesh=setup.mesh))


def _examine(params, key: jax.Array, *, exam) -> Rollout:
    return exam(acting(params), key)


def play_test(setup: setups.Setup, params: Sequence[Any], key: jax.Array, *, tasks: int, samples: int = 1):
    """How each of these parameters does on the same test tasks: a `Rollout` each."""
    play = jax.jit(make_exam(setup, "test", tasks, samples))
    return [play(one, key) for one in params]


def make_step(setup: setups.Setup, keys):
    """`step(run) -> (run, metrics)`: an iteration, or as much imitation again where that is the control."""
    if setup.settings["control"] == "supervised":
        return setups.imitation_step(setup, keys["demonstrations"])
    return loop.three_programs(setup.iteration, setup.env, setup.algorithm, setup.sizes)


def _warm_start(setup: setups.Setup, keys, tell) -> Any:
    """Imitate demonstrations until the validation loss is lowest."""
    params = jax.jit(setup.policy.init)(keys["start"])
    warm = setups.warm_start(setup, params, keys["demonstrations"], tell)
    return with_critic(setup.critic, keys["start"], warm)


def _init(setup: setups.Setup, key: jax.Array) -> Any:
    """Parameters of the shapes that are trained."""
    return with_critic(setup.critic, key, setup.policy.init(key))


def _test(setup: setups.Setup, key: jax.Array, tasks: int, folder: Path | None, params: Sequence[Any]) -> Tested:
    env, play = setup.env, make_exam(setup, "test", tasks)
    answered = jax.jit(partial(_play_with_gold, play=play, env=env, count=tasks))
    rollouts, gold = zip(*(answered(one, key) for one in params), strict=True)
    if folder is not None:
        for when, rollout, answers in zip(("before", "after"), rollouts, gold, strict=True):
            record(folder / "trajectories" / f"test-{when}.jsonl", first_records(rollout, env, answers))
    before, after = figures = [judge(rollout, env) for rollout in rollouts]
    words = "\n".join([report(before, after), "", *stories(rollouts, env)])
    return Tested(figures, words, {"right_tool_before": before.right_tool, "right_tool_after": after.right_tool})


def _play_with_gold(params, key: jax.Array, *, play, env: fg.Env, count: int):
    """How the parameters do on the test tasks, with the gold answers of these where their environment has some."""
    gold = None if env.answer is None else jax.vmap(env.answer)(exam.examined(env, key, count, "test"))
    return play(params, key), gold


# What was played ----------------------------------------------------------------------------------------


def judge(rollout: Rollout, env: fg.Env, *, samples: int = 1, ks: Sequence[int] = (1,)) -> Evaluation:
    """The figures of so many trajectories a task."""
    played = jax.device_get(rollout)
    trajectories = played.trajectories
    turns_nt = np.asarray(trajectories.turns)
    errors_n = (played.error & turns_nt).sum(axis=1)
    columns = (trajectories.correct, turns_nt.sum(axis=1), errors_n, played.tool)
    grouped = (np.asarray(x).reshape(-1, samples, *np.shape(x)[1:]) for x in columns)
    return replace(evaluate(*grouped, tools=env.tools, ks=ks), right_tool=right_tool_share(env, played))


def first_records(rollout: Rollout, env: fg.Env, gold: tuple[Any, Any] | None) -> list[Played]:
    """The first trajectories; a task is asked by what its environment says first, and is judged there.

    `gold` has the answers, (tokens_nl, length_n), where there are some.
    """
    few = jax.tree.map(lambda x: x[:RECORDED], jax.device_get(rollout))
    given = few.trajectories
    asked = (
        np.where(chosen, PAD, tokens) for tokens, chosen in zip(given.tokens[:, 0], given.chosen[:, 0], strict=True)
    )
    answers = [] if gold is None else [(in_words(env, *one),) for one in zip(*jax.device_get(gold), strict=True)]
    tasks = [
        fg.Task(f"{env.name}-{n}", in_words(env, tokens), answers[n] if answers else (), env.name)
        for n, tokens in enumerate(asked)
    ]
    return records_of(few, tasks, env.tools)


def stories(rollouts: Sequence[Rollout], env: fg.Env) -> list[str]:
    """One task that was failed before and solved after, if there is one, in words."""
    right = [np.asarray(rollout.trajectories.correct) for rollout in rollouts]
    index = int(np.argmax(~right[0] & right[1]))
    names = ("before", "after")
    told = [indent(story(env, rollout.trajectories, index), " " * 4) for rollout in rollouts]
    return [f"{name}:\n{words}" for name, words in zip(names, told, strict=True)]
