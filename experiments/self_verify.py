"""A model is paid for what it believes of its own answers, and you see beside it whether they are right.

    python -m experiments.self_verify
    python -m experiments.self_verify --updates=200 --workdir=runs/long
    python -m experiments.self_verify --model=PATH --tasks=train.jsonl

    question -> answer -> "Is it a correct answer?" -> P("Yes") of the frozen starting model -> Flow-GRPO

No answer key takes part in the training. A matcher that holds it is asked beside the judge, and decides about nothing:
the plot shows mean P("Yes") and the true accuracy on the same axes. While both rise, the model learns from its own
judgement. Where P("Yes") rises and the truth does not, the judge is hacked; a line says so in the terminal.

Without --model a small model is made and runs offline on any CPU: it imitates answers of which 45 % are right, and
verdicts on answers of which most are. With --model its own starting weights are the judge, and --tasks the questions.

Expected offline: within 40 updates the true accuracy rises from 35 to 65 or 70 %, P("Yes") from 50 to 80 %, and the gap
stays. The judge was only ever shown answers that stand in the question. So a run that goes on with --updates=60 finds
that it believes a large number that was never named: P("Yes") passes 90 %, the true accuracy falls back to 50 %, and
the warning comes.

At the end the table compares the start and the last update, which is what a run without an answer key would have, on
questions that training never meets. The work directory holds `metrics.jsonl`, `timings.jsonl`, `curves.png`,
`result.json`, `checkpoints/`, `trajectories/` and, offline, the model in `start/`. The same command goes on where a run
was stopped.
"""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
from absl import flags

from experiments import common, loggers, planner_flags
from experiments.headings import heading
from experiments.hosted_exam import examine
from experiments.hosted_setup import HostedSetup, compile_engines, record
from experiments.hosted_work import exam_key, hosted_work
from experiments.loggers import chosen_loggers
from experiments.self_verify_report import Verified, comparison, draw, figures, sentence
from experiments.self_verify_setup import open_setup, settings_of
from experiments.session import MAY_DIFFER, Session, Tested, Work, one_run
from flowgrpo.learner.folder import begin_anew, check_own

heading("What is run")
_MODEL = flags.DEFINE_string("model", None, "Model folder, or hub id; without one, a small model is made.")
_TASKS = flags.DEFINE_string("tasks", None, "Task file (.jsonl, .parquet) or reasoning_gym:NAME, with --model.")
_FIELDS = flags.DEFINE_list("fields", [], "Names of fields in the task file, such as query=question,answers=gold.")
_DOMAIN = flags.DEFINE_string("domain", None, "The domain of tasks that name none.")
_SEED = flags.DEFINE_integer("seed", 0, "Seed of everything.")
heading("Sizes")
_UPDATES = flags.DEFINE_integer("updates", None, "Updates of the reinforcement phase.", lower_bound=0)
_QUERIES = flags.DEFINE_integer("queries", None, "Questions of an update.", lower_bound=1)
_SAMPLES = flags.DEFINE_integer("samples", None, "Answers to a question.", lower_bound=2)
_MAX_TOKENS = flags.DEFINE_integer("max_tokens", None, "Tokens of an answer.", lower_bound=1)
_TEST = flags.DEFINE_integer("test_tasks", None, "Test questions of the final table.", lower_bound=1)
heading("Learning")
_RATE = flags.DEFINE_float("learning_rate", None, "Of the reinforcement phase.", lower_bound=0.0)
_BETA = flags.DEFINE_float("beta", None, "Weight of the KL to the start; at 0 it is not measured.", lower_bound=0.0)
heading("Sampling")
_TEMPERATURE = flags.DEFINE_float("temperature", None, "Of the answers.", lower_bound=0.0)
heading("Files and resuming")
_WORKDIR = flags.DEFINE_string("workdir", None, "Where results lie; runs/self_verify-SEED by default.")
_RESUME = flags.DEFINE_bool("resume", True, "Go on with what is in the work directory; --noresume begins anew.")
_EVERY = flags.DEFINE_integer("checkpoint_every", 10, "Updates between validations and checkpoints.", lower_bound=1)
flags.adopt_module_key_flags(planner_flags)
flags.adopt_module_key_flags(loggers)


def read_flags() -> dict[str, Any]:
    """The run's settings: the preset, with what the flags say."""
    chosen = {
        "updates": _UPDATES.value,
        "seed": _SEED.value,
        "queries": _QUERIES.value,
        "samples": _SAMPLES.value,
        "learning_rate": _RATE.value,
        "beta": _BETA.value,
        "temperature": _TEMPERATURE.value,
        "max_tokens": _MAX_TOKENS.value,
        "test_tasks": _TEST.value,
        "fields": _FIELDS.value or None,
        "domain": _DOMAIN.value,
        **planner_flags.planner_choices(),
    }
    return settings_of(_MODEL.value, _TASKS.value, **chosen) | {"devices": jax.device_count()}


# The stages ---------------------------------------------------------------------------------------------


def self_verify_work(setup: HostedSetup) -> Work:
    """The stages of a run on a host environment; what is examined is the judge, too."""
    work = hosted_work(setup)
    setup = setup._replace(progress=work.progress)
    return work._replace(
        examine=partial(_examine, setup, exam_key(setup, "validation")),
        test=partial(_test, setup, exam_key(setup, "test")),
    )


def _examine(setup: HostedSetup, key: jax.Array, params) -> Verified:
    """The figures on validation questions, said aloud; `report.health` warns where the gap has grown."""
    played = examine(setup, params, key, "validation", tasks=setup.settings["validation_tasks"]).played
    found = figures(played)
    assert setup.progress is not None
    setup.progress.say(sentence(found))
    return found


def _test(setup: HostedSetup, key: jax.Array, params: Sequence[Any]) -> Tested:
    """The table of the start, the last update, and that which validated best, where it is another."""
    start, best = params
    session = Session(hosted_work(setup), setup.folder)
    at, chosen = session.checkpoints.latest(), session.checkpoints.best()
    assert at is not None  # the end was saved
    stages = {"start": start, "last update": session.params_at(at)}
    if chosen != at:
        stages |= {f"update {chosen}, best": best}
    count = setup.settings["test_tasks"]
    played = {name: examine(setup, one, key, "test", tasks=count).played for name, one in stages.items()}
    for when, own in zip(("before", "after"), played.values(), strict=False):
        record(setup.folder / "trajectories" / f"test-{when}.jsonl", own)
    found = {name: figures(own) for name, own in played.items()}
    before, after = list(found.values())[:2]
    more = {
        f"{name}_{when}": getattr(one, field)
        for when, one in (("before", before), ("after", after), ("best", list(found.values())[-1]))
        for name, field in (
            ("reward", "outcome"),
            ("gap", "gap"),
            ("judge_right", "judge_right"),
            ("calibration_error", "calibration_error"),
        )
    }
    more |= {"success_best": list(found.values())[-1].success}
    words = [comparison(found), "", *_stories(setup, played["start"], played["last update"])]
    return Tested([before, after], "\n".join(words), more)


def _stories(setup: HostedSetup, before, after) -> list[str]:
    """One question whose answer became right, and one that pleases the judge and is wrong, where there are such."""
    pairs = list(zip(before, after, strict=True))
    learned = [pair for pair in pairs if pair[1].trajectory.correct and not pair[0].trajectory.correct]
    fooled = [one for one in after if not one.trajectory.correct and (one.trajectory.outcome or 0.0) >= 0.5]
    told = (
        [f"before:\n{setup.story(setup.env, learned[0][0])}\nafter:\n{setup.story(setup.env, learned[0][1])}"]
        if learned
        else []
    )
    return [*told, *(f"the judge is wrong:\n{setup.story(setup.env, one)}" for one in fooled[:1])]


def main() -> None:
    """Train, and draw both curves."""
    settings, logged = read_flags(), chosen_loggers()
    folder = Path(_WORKDIR.value or f"runs/self_verify-{_SEED.value}")
    if _RESUME.value:
        check_own(folder, settings, may_differ=MAY_DIFFER)  # before a model to start with is made there
    begin = (lambda: None) if _RESUME.value else partial(begin_anew, folder)
    with open_setup(settings, folder, begin=begin) as setup:
        result = one_run(self_verify_work(compile_engines(setup)), folder, every=_EVERY.value, loggers=logged)
    draw(folder, title="P(Yes) of the frozen start as the reward")
    print(json.dumps(result))


if __name__ == "__main__":
    common.run(main)
