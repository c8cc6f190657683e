"""Examinations of a run on a host environment: parameters flow in, figures and the table before / after flow out."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from experiments.hosted_setup import HostedSetup, domains_of, kept, play, record, valid
from experiments.session import Tested
from experiments.session_files import report
from flowgrpo.evaluate import Evaluation, evaluate
from flowgrpo.rollout.hosted import Hosted
from flowgrpo.rollout.records import Played
from flowgrpo.types import BadInput


def examine(
    setup: HostedSetup, params, key: jax.Array, split: str, *, tasks: int, samples: int = 1, first: int = 0
) -> Hosted:
    """Play so many tasks of a split with these parameters, from the `first` on, `samples` times each."""
    setup.engine.swap(setup.planner.serve(params), 0)
    return play(setup, setup.exam_env, setup.tasks(split, first, tasks), key, samples=samples, stage=split)


def judge(played: Sequence[Played], tools: Sequence[str], *, samples: int = 1, ks: Sequence[int] = (1,)) -> Evaluation:
    """The figures of so many trajectories a task; raises where none of them could be judged."""
    if not valid(played):
        why = played[0].reason or (played[0].scored and played[0].scored.reason) or "no reason was given"
        raise BadInput(f"none of {len(played)} trajectories came to an outcome; the first one: {why}")
    turns = max(len(one.tools) for one in played)
    number = {name: index for index, name in enumerate(tools)}
    calls = [[number.get(tool, -1) for tool in one.tools] + [-1] * (turns - len(one.tools)) for one in played]
    columns = (
        [one.trajectory.correct for one in played],
        [len(one.errors) for one in played],
        [sum(one.errors) for one in played],
        calls,
        [one.trajectory.outcome is not None for one in played],
    )
    correct, turned, errors, tool, judged = (np.array(x).reshape(-1, samples, *np.shape(x)[1:]) for x in columns)
    return evaluate(correct, turned, errors, tool, valid_gn=judged, tools=tools, ks=ks)


def validate(setup: HostedSetup, key: jax.Array, params) -> Evaluation:
    with kept(setup, "validation"):
        played = examine(setup, params, key, "validation", tasks=setup.settings["validation_tasks"]).played
        return judge(played, setup.env.tools)


def test(setup: HostedSetup, key: jax.Array, params: Sequence[Any]) -> Tested:
    tasks = setup.settings["test_tasks"]
    played = []
    for when, one in zip(("before", "after"), params, strict=True):
        with kept(setup, f"test-{when}"):
            played.append(examine(setup, one, key, "test", tasks=tasks).played)
            judge(played[-1], setup.env.tools)  # which raises where nothing could be judged
        record(setup.folder / "trajectories" / f"test-{when}.jsonl", played[-1])
    return compare_before_after(setup, played)


def compare_before_after(
    setup: HostedSetup, played: Sequence[Sequence[Played]], *, samples: int = 1, ks: Sequence[int] = (1,)
) -> Tested:
    """The table before / after, by domain, and one task that was failed before and solved after."""
    tools = setup.env.tools
    before, after = figures = [judge(own, tools, samples=samples, ks=ks) for own in played]
    parts = [domains_of(own) for own in played]
    judged = [name for name in parts[0] if all(valid(part[name]) for part in parts)]
    by = {name: [judge(part[name], tools, samples=samples) for part in parts] for name in judged}
    more = {
        f"{field}_{when}": {name: getattr(both[i], source) for name, both in by.items()}
        for i, when in enumerate(("before", "after"))
        for field, source in (("success_by_domain", "success"), ("tool_error_by_domain", "tool_errors"))
    }
    missing = [f"{name}: nothing could be judged" for name in parts[0] if name not in judged]
    words = [report(before, after), "", domain_table(by), *missing, "", *_stories(setup, played)]
    return Tested(figures, "\n".join(words), more)


def domain_table(by: Mapping[str, Sequence[Evaluation]]) -> str:
    """Success, tool errors, turns and tools of each domain, before -> after."""
    lines = [f"{'domain':16}{'success':>18}{'tool errors':>18}{'turns':>16}   calls"]
    for name, (one, two) in by.items():
        mix = ", ".join(
            f"{tool} {one.tools[tool]:.0%} -> {share:.0%}"
            for tool, share in (two.tools or {}).items()
            if one.tools and max(share, one.tools[tool]) > 0
        )
        success, errors = (
            f"{a:.1%} -> {b:.1%}" for a, b in ((one.success, two.success), (one.tool_errors, two.tool_errors))
        )
        lines.append(f"{name:16}{success:>18}{errors:>18}{f'{one.turns:.2f} -> {two.turns:.2f}':>16}   {mix}")
    return "\n".join(lines)


def _stories(setup: HostedSetup, played: Sequence[Sequence[Played]]) -> list[str]:
    before, after = ([one.trajectory.correct for one in own] for own in played)
    index = int(np.argmax(~np.array(before) & np.array(after)))
    return [
        f"{when}:\n{setup.story(setup.exam_env, own[index])}"
        for when, own in zip(("before", "after"), played, strict=True)
    ]
