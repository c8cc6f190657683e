"""The studies that ship: each is a function whose docstring has its question and the expected result.

    STUDIES["credit"]()  ->  Study(question, baseline, arms, changes, worlds)

All arms of a study start from the same planners, seed by seed, are trained on as many trajectories unless the arm says
otherwise, and are evaluated on the same tasks. Expectations were written before the runs; the results, over 16 seeds
each, are in `docs/studies/`. A study of your own is a function like these, which `experiments.compare
--study=MODULE:FUNCTION` runs.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from flowgrpo.algorithms import aggregation as weights
from flowgrpo.algorithms.advantage import group_center, group_zscore, leave_one_out, row_group_advantage
from flowgrpo.algorithms.aggregation import Aggregation
from flowgrpo.algorithms.compose import Advantage, compose
from flowgrpo.algorithms.distillation import opd, sdpo
from flowgrpo.algorithms.loss import clip_surrogate
from flowgrpo.algorithms.options import Correction, Options
from flowgrpo.algorithms.policy_gradient import outcome_advantage
from flowgrpo.contracts import Algorithm
from flowgrpo.files import import_named
from flowgrpo.models.quantised import KINDS
from flowgrpo.recipes.study import SMALL, Arm, Study
from flowgrpo.types import BadInput

from . import study_arms

CLIP_LOW, CLIP_HIGH = 0.2, 0.28
NO_CLIP = (1.0, 1e9)  # bounds that no ratio reaches
EASY: dict[str, Mapping[str, Any]] = {"lookup": {"hops": (2, 2)}}
SINGLE: dict[str, Any] = {"mini_batches": 1, "learning_rate": 1e-3}  # one gradient step per update
SEVERAL: dict[str, Any] = {"mini_batches": 4, "learning_rate": 5e-4}  # gradient steps per update, so that ratios move


def chosen_arms(study: Study, names: Sequence[str] | None) -> Study:
    """The study with only these arms and its baseline; all arms for None."""
    if not names:
        return study
    unknown = [name for name in names if name not in study.arms]
    if unknown:
        raise BadInput(f"--arms: {unknown[0]!r} is no arm of this study; they are {', '.join(study.arms)}")
    return study._replace(arms={name: arm for name, arm in study.arms.items() if name in (*names, study.baseline)})


def member(
    advantage: Advantage,
    weigh: Aggregation = weights.flow_weights,
    *,
    clip: tuple[float, float] = (CLIP_LOW, CLIP_HIGH),
    **options: Any,
) -> Algorithm:
    """An algorithm of these parts, and otherwise those of Flow-GRPO; `options` are fields of `Options`."""
    low, high = clip
    surrogate = partial(clip_surrogate, clip_low=low, clip_high=high)
    return compose(
        "studied",
        advantage=advantage,
        weights=weigh,
        surrogate=surrogate,
        options=Options(**options),
        clip=clip,
    )


OUTCOME = outcome_advantage(group_zscore)
CENTRED = outcome_advantage(group_center)


def _weighed(weigh: Aggregation) -> Arm:
    return Arm(algorithm=partial(member, OUTCOME, weigh))


def _clipped(low: float, high: float, beta: float = 0.0) -> Arm:
    return Arm(algorithm=partial(member, OUTCOME, clip=(low, high), beta=beta))


# The studies ------------------------------------------------------------------------------------------


def credit() -> Study:
    """Compare ways to credit an outcome: to all turns, the last one, by turn index, by state, by a critic.

    Expected: the broadcast learns, credit for the last turn alone doesn't, and pay for answered calls is hacked. A
    critic and several steps an update are better; credit by state (GiGPO) and by leave-one-out at the same turn (TRLOO)
    can't be told from the broadcast. With a reward for each hop, statistics by turn index (MT-GRPO) are biased by when
    a trajectory stops, and TRLOO is not. The planted bias, which charges for each turn beyond the group's mean, loses.
    """
    critic = {"critic": "own", "critic_rate": 1e-3, "gamma": 1.0, "lam": 0.95, "clip_high": 0.2}
    paid = {"hop_reward": 0.25}
    return Study(
        "Who gets the credit for an outcome?",
        "broadcast",
        {
            "broadcast": Arm(),
            "broadcast, 4 steps": Arm(changes=SEVERAL),
            "last turn only": Arm(changes={"control": "last_turn"}),
            "per-turn heuristic": Arm(
                algorithm=partial(member, study_arms.reward_zscore), program=study_arms.reward_answered_calls
            ),
            "by the turn's place": Arm(algorithm=partial(member, study_arms.turn_index_zscore)),
            "TRLOO": Arm(changes={"algorithm": "trloo"}),
            "GiGPO": Arm(changes={"algorithm": "gigpo"}),
            "critic (PPO), 4 steps": Arm(changes={"algorithm": "ppo", **SEVERAL, **critic}),
            "planted: a charge by turn": Arm(
                algorithm=partial(member, partial(study_arms.penalise_turns, charge=-0.5))
            ),
            "hops paid, broadcast": Arm(env=paid),
            "hops paid, MT-GRPO": Arm(changes={"algorithm": "mt_grpo", "beta": 0.0}, env=paid),
            "hops paid, TRLOO": Arm(changes={"algorithm": "trloo"}, env=paid),
        },
    )


def statistics() -> Study:
    """Group statistics over trajectories against statistics over turn rows, in which long trajectories count more (F9).

    Expected: with unequal numbers of turns the rows' mean is biased, and the difference in success is small where
    groups are mixed; `released` has the token mean and the clip of AgentFlow's code, too. Without the deviation, groups
    with few winners or losers weigh less: slower, at the same rate.
    """
    return Study(
        "Which statistics of a group?",
        "trajectories",
        {
            "trajectories": Arm(),
            "without deviation": Arm(algorithm=partial(member, CENTRED)),
            "leave one out": Arm(algorithm=partial(member, outcome_advantage(leave_one_out))),
            "rows": Arm(algorithm=partial(member, outcome_advantage(group_zscore, over=row_group_advantage))),
            "released": Arm(changes={"algorithm": "flow_grpo_released"}),
        },
    )


def aggregation() -> Study:
    """Aggregate tokens by trajectory, turn and token; over all tokens; by sequence; by action; over a constant length.

    Expected: alike within the intervals where trajectories have similar lengths, as they have here.
    """
    return Study(
        "How do tokens add up?",
        "trajectory, turn, token",
        {
            "trajectory, turn, token": _weighed(weights.flow_weights),
            "sequence mean": _weighed(weights.sequence_mean),
            "action mean": _weighed(weights.action_mean),
            "token mean": _weighed(weights.token_mean),
            "constant length": _weighed(partial(weights.constant_length, max_tokens=16)),
        },
    )


def clip() -> Study:
    """Clip widths, with four steps an update so that ratios move.

    Expected: a higher upper bound is at least as good, a tight one slower.
    """
    arms = {
        "0.2 / 0.28": _clipped(0.2, 0.28),
        "0.2 / 0.2": _clipped(0.2, 0.2),
        "0.05 / 0.05": _clipped(0.05, 0.05),
        "no clip": _clipped(*NO_CLIP),
    }
    return Study("How much may a step change?", "0.2 / 0.28", arms, SMALL | SEVERAL)


def kl() -> Study:
    """Pay KL to the warm start in the reward or in the loss, by three estimators.

    Four steps an update make ratios move. Expected: every term costs success, since the warm start is what has to be
    left. k1 in the reward and k2 in the loss have the gradient of the KL, k3 in the loss has another one far from the
    reference, and a weight by the ratio makes little difference where ratios stay near one. The last arm was added when
    k1 in the reward had lost: in groups of equal outcomes a z-score brings KL alone to unit size, and without it not.
    """
    kinds: dict[str, dict[str, Any]] = {
        "none": {},
        "k1 in the reward": {"kl_in": "reward", "kl": "k1"},
        "k2 in the loss": {"kl": "k2"},
        "k3 in the loss": {"kl": "k3"},
        "k2, weighted": {"kl": "k2", "kl_weighted": True},
        "k3, weighted": {"kl": "k3", "kl_weighted": True},
    }
    arms = {
        name: Arm(algorithm=partial(member, OUTCOME, **({"beta": 0.03} if options else {}), **options))
        for name, options in kinds.items()
    }
    arms["k1 in the reward, no deviation"] = Arm(
        algorithm=partial(member, CENTRED, beta=0.03, **kinds["k1 in the reward"])
    )
    return Study("Where is KL paid?", "none", arms, SMALL | SEVERAL)


def group_size() -> Study:
    """Vary the trajectories of a query, at as many trajectories an update and at as many queries.

    Expected: groups of 2 say little about most queries; at equal trajectories, from 8 on more of a group costs queries
    and gains nothing; at equal queries more is better, for its price.
    """
    queries, samples = SMALL["queries"], SMALL["samples"]
    total = queries * samples
    equal = {
        f"{size} of {total // size}": Arm(changes={"samples": size, "queries": total // size})
        for size in (2, 4, 8, 16, 32, 64)
    }
    more = {f"{size} of {queries}": Arm(changes={"samples": size}) for size in (2, 4, 16, 32)}
    return Study("How large is a group?", f"{samples} of {queries}", equal | more)


COLLAPSING: dict[str, Any] = {"updates": 160, "learning_rate": 1.5e-3, "mini_batches": 4}


def collapse() -> Study:
    """Learn too fast, so that policies collapse: with an entropy bonus throughout, in the first half, in the second.

    Expected: without a bonus entropy is gone before success falls, and what the first action says of its task falls
    with it; an early bonus keeps both, a late one comes too late. The table of warnings says which comes first. The arm
    of a fifth of the bonus was added when the whole one had done harm.
    """
    half = COLLAPSING["updates"] // 2
    bonus = partial(study_arms.scheduled_bonus, bonus=0.02)
    return Study(
        "What comes before a collapse, and when does a bonus help?",
        "no bonus",
        {
            "no bonus": Arm(program=partial(study_arms.scheduled_bonus, bonus=0.0)),
            "bonus": Arm(program=bonus),
            "a fifth of the bonus": Arm(program=partial(study_arms.scheduled_bonus, bonus=0.004)),
            "bonus, first half": Arm(program=partial(bonus, last=half - 1)),
            "bonus, second half": Arm(program=partial(bonus, first=half)),
        },
        SMALL | COLLAPSING,
    )


def optimizer() -> Study:
    """AdamW against Muon's orthogonal steps (Jordan et al., 2024) for the planner's matrices, at three rates each.

    Expected: a policy gradient is noisy and of low rank, so steps that weigh its directions alike learn faster at a
    rate that suits them, or amplify noise; the papers on Muon report pretraining, and this is open.
    """
    arms = {
        f"{name} {rate:g}": Arm(changes={"optimizer": kind, "learning_rate": rate})
        for name, kind in (("AdamW", "adamw"), ("Muon", "muon"))
        for rate in (5e-4, 1e-3, 2e-3)
    }
    return Study("AdamW or Muon for a policy gradient?", "AdamW 0.001", arms)


def turns() -> Study:
    """Turns in training against turns allowed in evaluation: `1 -> 2` is trained with one a hop, evaluated with two.

    Expected: with one turn a hop there is none for the answer, so nothing is learned; a planner that was trained with
    two answers in time whatever is allowed, and one that was trained with three uses more of them.
    """
    arms = {
        f"{train} -> {evaluate}": Arm(env={"turns_per_hop": train}, eval_env={"turns_per_hop": evaluate})
        for train, evaluate in ((2, 2), (2, 3), (3, 2), (3, 3), (1, 2))
    }
    return Study("Do turns in training carry over to evaluation?", "2 -> 2", arms)


def stale() -> Study:
    """Data of parameters that are 1 to 8 updates old: uncorrected, capped, masked (IcePop), capped by whole actions.

    Expected: a few updates cost little; at 8 the uncorrected arm learns slower, and corrections help where the weights
    still overlap. The arms without a clip and those with four gradient steps were added when all corrections had lost:
    where there is one step, a clip that is measured from the trainer's own scores cuts nothing.
    """
    corrections: dict[str, Correction | None] = {
        "": None,
        ", capped": Correction(2.0),
        ", masked": Correction(5.0, mask=True, low=0.5),
        ", by action": Correction(2.0, "sequence"),
    }

    def late(lag: int, changes: Mapping[str, Any] = {}, **options: Any) -> Arm:
        sampler = partial(study_arms.stale_sampler, lag=lag)
        return Arm(algorithm=partial(member, OUTCOME, **options), program=sampler, changes=changes)

    arms: dict[str, Arm] = {"on policy": Arm(algorithm=partial(member, OUTCOME))}
    for lag in (1, 2, 4, 8):
        arms |= {f"{lag} late{name}": late(lag, correction=correction) for name, correction in corrections.items()}
        if lag > 1:
            arms[f"{lag} late, no clip"] = late(lag, clip=NO_CLIP)
    arms["4 steps, on policy"] = Arm(algorithm=partial(member, OUTCOME), changes=SEVERAL)
    for lag in (1, 4):
        for name in ("", ", capped", ", masked"):
            arms[f"4 steps, {lag} late{name}"] = late(lag, SEVERAL, correction=corrections[name])
    return Study("What do stale data cost?", "on policy", arms)


def quantised_sampler() -> Study:
    """Data of a sampler whose layers are quantised, with and without min(pi_old / mu, 2) on each token.

    In each pair of arms the trainer scores `logp_old` again in full precision; without the correction nothing says that
    tokens came from another distribution. Expected: with int8 all arms end alike, as its logits are within 3 % of their
    spread; with nf4, within 30 %, going without costs success, and the correction wins it back.
    """
    corrected = Correction(cap=2.0)
    arms: dict[str, Arm] = {"full precision": Arm(algorithm=partial(member, OUTCOME))}
    for kind in KINDS:
        sampler = partial(study_arms.quantised_rollouts, kind=kind)
        arms[f"{kind}, corrected"] = Arm(algorithm=partial(member, OUTCOME, correction=corrected), program=sampler)
        arms[kind] = Arm(algorithm=_rescored, program=sampler)
    return Study("What does a quantised sampler cost?", "full precision", arms, changes=SMALL | SINGLE, worlds=EASY)


def _rescored() -> Algorithm:
    """Flow-GRPO, with the trainer's scores in place of the sampler's log-probabilities."""
    algorithm = member(OUTCOME)
    return algorithm._replace(needs=algorithm.needs | {"logp_old"})


def imitation() -> Study:
    """Supervised imitation of a stronger planner, and its word on what the planner itself does, against Flow-GRPO.

    All see as many trajectories an update. Expected: imitation comes to its teacher's success and no further: the warm
    start's own demonstrations change nothing, a teacher who knows the right tool half of the time is matched, and only
    a perfect one leads as far as Flow-GRPO gets from one number a trajectory. On-policy distillation (OPD) comes as far
    as its teacher, sooner; in groups that have no signal it helps Flow-GRPO at the start. The paper reports harm from a
    stronger planner whose words the student can't fill; here words are few, and there is none.
    """
    return Study(
        "Imitate a stronger planner, or learn from outcomes?",
        "Flow-GRPO",
        {
            "Flow-GRPO": Arm(),
            "imitates its own": Arm(program=study_arms.imitate_teacher),
            "imitates a stronger": Arm(program=partial(study_arms.imitate_teacher, skill=0.5)),
            "imitates an oracle": Arm(program=partial(study_arms.imitate_teacher, oracle=True)),
            "OPD from a stronger": _distilled(0.0, skill=0.5),
            "OPD from an oracle's pupil": _distilled(0.0, oracle=True),
            "Flow-GRPO + OPD where dead": _distilled(1.0, dead_only=True, skill=0.5),
        },
    )


def hindsight() -> Study:
    """Learn from oneself in hindsight (SDPO), told which tools were right, against Flow-GRPO and against both together.

    All planners imitated demonstrations half of which begin with such a hint, so that they can read one; questions in
    training and evaluations have none. Expected: what the hinted planner knows is distilled within few updates, since
    every token is judged separately; it can't be better than that planner, and Flow-GRPO continues from there. A
    teacher who is the policy of the update ("moving") unlearns to read hints, and both lose: this was seen in a first
    run of the study, all of whose teachers moved, and a frozen one was added for that.
    """

    def arm(**how: Any) -> Arm:
        return Arm(env={"hints": 0.0}, eval_env={"hints": 0.0}, **how)

    def taught(outcome: float, **how: Any) -> Arm:
        return arm(algorithm=partial(sdpo, outcome=outcome, **how))

    return Study(
        "What does a planner learn from itself in hindsight?",
        "Flow-GRPO",
        {
            "Flow-GRPO": arm(),
            "SDPO": taught(0.0),
            "SDPO, moving": taught(0.0, reference_every=1),
            "Flow-GRPO + SDPO": taught(1.0),
            "Flow-GRPO + SDPO, moving": taught(1.0, reference_every=1),
            "Flow-GRPO + SDPO where dead": taught(1.0, dead_only=True),
        },
        worlds={"lookup_hard": {"hints": 0.5}},
    )


def _distilled(outcome: float, *, dead_only: bool = False, **teacher: Any) -> Arm:
    algorithm = partial(opd, outcome=outcome, dead_only=dead_only)
    return Arm(algorithm=algorithm, program=partial(study_arms.distil_teacher, **teacher))


STUDIES: dict[str, Callable[[], Study]] = {
    "credit": credit,
    "statistics": statistics,
    "aggregation": aggregation,
    "clip": clip,
    "kl": kl,
    "group_size": group_size,
    "collapse": collapse,
    "optimizer": optimizer,
    "turns": turns,
    "stale": stale,
    "quantised_sampler": quantised_sampler,
    "imitation": imitation,
    "hindsight": hindsight,
}


def find_study(name: str) -> Callable[[], Study]:
    """The study of that name, or the function MODULE:FUNCTION of yours, which returns one."""
    if name in STUDIES:
        return STUDIES[name]
    if ":" not in name:
        raise BadInput(f"--study={name} is unknown; choose from {', '.join(STUDIES)}, or MODULE:FUNCTION")
    make: Callable[[], Study] = import_named(name, "study")
    study: object = make() if callable(make) else make
    if not isinstance(study, Study):
        raise BadInput(f"--study={name} gave {study!r:.80}, which is no fg.recipes.study.Study: return one")
    return make
