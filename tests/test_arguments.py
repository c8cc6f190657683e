"""Constructors refuse an argument that can't be, where it is made and in one sentence that names it."""

from functools import partial
from math import inf, nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_learner import BIGRAMS

import flowgrpo as fg
from flowgrpo.envs.arithmetic import Flaws
from flowgrpo.training.run_dir import check_run
from flowgrpo.training.stages import IterationSettings, make_update_stages

NO_NUMBERS = (nan, inf, -inf, True, "3", [1])
TASKS = fg.data.Tasks((fg.Task("a", "q", ("1",), "d"),))
RATE = fg.adamw(0.1)
TURN: dict[str, Any] = {"tokens": [5, 6], "chosen": [False, True], "logp_sampled": [0.0, -1.0]}


def say(word: str) -> str:
    """Says a word.

    word: any
    """
    return word


def share_tasks(**shares):
    return fg.data.split_tasks(TASKS, {"rest": 0.5, **shares})


POSITIVE, COUNT = (-1.0, 0), (-1, 0, 1.5)  # what must be above 0; what must be a whole number from 1
SHARE, LEAST_0 = (-0.1, 1.1), (-1e-9,)
NUMBERS = {  # constructor -> what is wrong of each argument beside what is no number at all
    partial(fg.adamw, learning_rate=0.1): dict.fromkeys(("learning_rate", "weight_decay"), LEAST_0)
    | {"clip_norm": POSITIVE, "final_fraction": SHARE, "warmup_steps": (-1, 0.5), "decay_steps": COUNT},
    IterationSettings: dict.fromkeys(
        ("queries", "samples", "oversample", "mini_batches", "epochs", "min_decode_batch"), COUNT
    )
    | {"micro_rows": COUNT, "temperature": POSITIVE},
    fg.learner.UpdateSettings: dict.fromkeys(("micro_rows", "epochs", "mini_batches", "chunk"), COUNT)
    | {"temperature": POSITIVE},
    partial(fg.Turn, **TURN): {"reward": ()},
    partial(fg.Sizes, prompt=1, observation=1, turns=1): {"action": COUNT},
    partial(fg.Sizes(1, 1, 1, 1)._replace): {"turns": COUNT},
    fg.algorithms.Correction: {"cap": POSITIVE},
    partial(fg.algorithms.Overlong, max_tokens=9): {"buffer": (0, 10, 1.5)},
    fg.flow_grpo: {"beta": LEAST_0, "entropy_bonus": LEAST_0, "clip_high": LEAST_0, "clip_low": (-0.1, 1.5)}
    | {"dual_clip": (1.0,), "reference_every": COUNT},
    fg.ppo: {"gamma": SHARE, "lam": SHARE, "value_clip": POSITIVE, "value_coefficient": LEAST_0},
    fg.algorithms.gigpo: {"gamma": SHARE, "omega": LEAST_0},
    fg.algorithms.reinforce_pp: {"gamma": SHARE},
    fg.algorithms.dr_grpo: {"max_tokens": COUNT},
    fg.algorithms.cispo: {"clip_high": LEAST_0},
    fg.algorithms.kimi: {"tau": LEAST_0},
    fg.algorithms.mt_grpo: {"lam": LEAST_0, "clip_high": LEAST_0},
    fg.algorithms.trloo: {"gamma": SHARE},
    fg.algorithms.sdpo: {"outcome": LEAST_0},
    fg.algorithms.opd: {"outcome": LEAST_0, "entropy_bonus": LEAST_0},
    fg.dpo: {"beta": POSITIVE, "entropy_bonus": LEAST_0},
    fg.lookup: dict.fromkeys(("lies", "skill", "slips", "hop_reward", "hints"), SHARE)
    | {"entities": (2, 3.5), "relations": (2,), "tools": (1,), "turns_per_hop": COUNT}
    | {"hops": (3, (2,), (3, 2), (0, 1), (1, 2.5), (nan, 3))},
    fg.arithmetic: {"base": (1, 2.5), "turns": (8,)},
    Flaws: {"swap": SHARE, "order": ((0.1, 0.1), (0.1, 0.1, 0.1, nan))},
    fg.maze: {"width": (1, 2.5), "turns": (11,), "slip": SHARE},
    fg.sandbox.Limits: {"seconds": POSITIVE, "memory": POSITIVE},
    fg.models.LoraConfig: {"rank": COUNT, "alpha": POSITIVE},
    partial(fg.tool, say): {"timeout": POSITIVE},
    partial(fg.tools.toolset, [fg.tool(say)]): {"timeout": POSITIVE, "concurrency": COUNT, "cache_size": COUNT},
    partial(fg.generate.remote, "http://localhost", "m"): {"timeout": POSITIVE, "retries": (-1,), "concurrency": COUNT},
    partial(fg.agent.endpoint_role, None): {"max_tokens": COUNT, "temperature": LEAST_0, "deadline": POSITIVE},
    partial(fg.agent.frozen_role, None, None): {"max_tokens": COUNT, "prompt_tokens": COUNT, "top_k": COUNT}
    | {"temperature": POSITIVE, "deadline": POSITIVE},
    partial(fg.agent.single_turn, None): {"max_tokens": COUNT},
    fg.generate.EngineSettings: {"max_recorded_top_k": (-1, 65), "slots": COUNT, "chunk": COUNT},
    partial(fg.data.batch_at, TASKS, 0, 0): {"size": COUNT},
    share_tasks: {"train": SHARE},
}


def name_of(make) -> str:
    return getattr(make, "func", make).__name__


@pytest.mark.parametrize("make", NUMBERS, ids=name_of)
def test_numbers_out_of_range_are_named(make):
    for name, out_of_range in NUMBERS[make].items():
        for value in (*NO_NUMBERS, *out_of_range):
            with pytest.raises(fg.BadInput) as refused:
                make(**{name: value})
            said = str(refused.value)
            assert name in said, (name, value)
            assert "\n" not in said


SENTENCES: dict[str, Any] = {
    "lookup has no option hop; it takes entities, relations, tools, hops,": lambda: fg.lookup(hop=2),
    "RewardResult: the value is nan; give a finite number, or None": lambda: fg.RewardResult(nan),
    "RewardResult: the value is inf": lambda: fg.RewardResult(1.0)._replace(value=inf),
    "RewardResult: the value is '1'": lambda: fg.RewardResult("1"),
    "a reward returned 1.0, which is no fg.RewardResult: return": lambda: fg.Reward(lambda *_: 1.0).score_all(
        [None], [""]
    ),
    "a reward returned True, which is no fg.RewardResult": lambda: fg.Reward(len, lambda *_: [True]).score_all([], []),
    "the lengths disagree: tokens 1, chosen 2, logp_sampled 2": lambda: fg.Turn(**TURN | {"tokens": [5]}),
    "the lengths disagree: tokens 2, chosen 1, logp_sampled 2": lambda: fg.Turn(**TURN | {"chosen": [True]}),
    "the lengths disagree: tokens 2, chosen 2, logp_sampled 0": lambda: fg.Turn(**TURN | {"logp_sampled": []}),
    "logp_sampled 2, version 3;": lambda: fg.Turn(**TURN, version=np.arange(3)),
    "the answers of 'a' are '42'; give a tuple: ('42',)": lambda: fg.Task("a", "q", "42", "d"),
    "learning_rate is nan: give a finite number": lambda: check_run(Path("nowhere"), "pure", {"learning_rate": nan}),
}


@pytest.mark.parametrize("said", SENTENCES)
def test_wrong_arguments_raise_one_sentence(said):
    with pytest.raises(fg.BadInput) as refused:
        SENTENCES[said]()
    assert said in str(refused.value)


def test_F4_groups_of_one_are_refused_if_they_have_no_signal():
    settings = IterationSettings(samples=1)
    with pytest.raises(
        fg.BadInput, match=r"flow_grpo learns nothing from groups of one: IterationSettings.samples is 1, set it"
    ):
        make_update_stages(BIGRAMS, fg.flow_grpo(), RATE, settings, banned=())
    make_update_stages(BIGRAMS, fg.algorithms.reinforce_pp(), RATE, settings, banned=())  # its baseline is the batch's
