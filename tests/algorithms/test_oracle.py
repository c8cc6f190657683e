"""The family against code that this project did not write: TRL's trainers.

TRL's methods run unbound on a stub that hands out our log-probabilities, from generation (masks, advantages,
normaliser, importance correction: all TRL's) to loss. What TRL gets is float64, so that a difference is our rounding.
"""

from collections import defaultdict
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from family_cases import INVALID, Case, batch_of, make_case

import flowgrpo as fg
from flowgrpo.batching import place

pytestmark = pytest.mark.oracle

TOLERANCE = 1e-5  # relative to the largest number
TRL_EPS = 1e-4  # what TRL adds to a deviation
SEEDS = range(2)


@pytest.fixture(scope="module")
def oracle():
    """PyTorch and TRL, imported here: collecting this file needs neither."""
    import torch
    from trl.rewards import get_soft_overlong_punishment
    from trl.trainer.dpo_trainer import DPOTrainer
    from trl.trainer.grpo_trainer import GRPOTrainer
    from trl.trainer.rloo_trainer import RLOOTrainer

    kinds = {"dpo": DPOTrainer, "grpo": GRPOTrainer, "rloo": RLOOTrainer}
    return SimpleNamespace(torch=torch, overlong=get_soft_overlong_punishment, **kinds)


def check(found: list[tuple], expected: list[tuple]) -> None:
    """Hold each part of the results (loss, gradient) to the tolerance, over all cases together."""
    for part, columns in enumerate(zip(zip(*found, strict=True), zip(*expected, strict=True), strict=True)):
        found_m, expected_m = (np.concatenate([np.asarray(x, np.float64).ravel() for x in one]) for one in columns)
        scale = np.abs(expected_m).max()
        assert scale > 0, f"nothing to compare in part {part}"
        np.testing.assert_allclose(found_m, expected_m, rtol=0, atol=TOLERANCE * scale, err_msg=f"part {part}")


# Ours ---------------------------------------------------------------------------------------------------------


def ours(algorithm: fg.Algorithm, case: Case) -> tuple:
    """(loss, gradient by logp_ntl, and by entropy_ntl where it has a part) of this package, packed."""
    batch = batch_of(algorithm, case.trajectories)

    def loss(logp_ntl, entropy_ntl):
        return algorithm.loss(fg.contracts.Scores(place(logp_ntl, batch), place(entropy_ntl, batch)), batch)[0]

    value, gradients = jax.value_and_grad(loss, argnums=(0, 1))(jnp.asarray(case.logp), jnp.asarray(case.entropy))
    return value, *gradients[: 1 + ("entropy" in algorithm.needs)]


def appending_case(seed: int, **settings) -> Case:
    """A case whose trajectories are all valid and append, sorted by group, as TRL wants them."""
    case = make_case(seed, invalid=0.0, **settings)
    order_n = np.argsort(case.trajectories.group, kind="stable")
    case = jax.tree.map(lambda x_n: x_n[order_n], case)
    return case._replace(trajectories=case.trajectories.replace(starts_context=None))


# TRL's, on a stub ---------------------------------------------------------------------------------------------


class Off(SimpleNamespace):
    """Has what it is given; every other switch that is asked of it is off."""

    def __getattr__(self, name):
        return None


def leaf(oracle, x_ntl):
    """A tensor that a gradient is wanted of."""
    return oracle.torch.tensor(x_ntl, dtype=oracle.torch.float64, requires_grad=True)


def completions(oracle, x_ntl, mask_ntl):
    """Each trajectory's values under the mask, end to end, padded on the right -> x_rs."""
    x_ntl, mask_ntl = oracle.torch.as_tensor(x_ntl), oracle.torch.as_tensor(mask_ntl)
    x_ntl = x_ntl.double() if x_ntl.is_floating_point() else x_ntl
    rows = [x_tl[mask_tl] for x_tl, mask_tl in zip(x_ntl, mask_ntl, strict=True)]
    return oracle.torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def filled(trajectories: fg.Trajectories) -> np.ndarray:
    return np.arange(trajectories.tokens.shape[2]) < trajectories.length[:, :, None]


def ragged(x_ntl, mask_ntl) -> list[list]:
    return [x_tl[mask_tl].tolist() for x_tl, mask_tl in zip(x_ntl, mask_ntl, strict=True)]


def scores_by_model(oracle, case: Case, logp_ntl, entropy_ntl, mask_ntl):
    """Make the function that a trainer asks for log-probabilities: `model.name` says which model's are looked up."""
    given = {"policy": logp_ntl, "old": case.trajectories.logp_old, "reference": case.trajectories.logp_ref}
    scored = {name: completions(oracle, x_ntl, mask_ntl) for name, x_ntl in given.items()}
    entropy_rs = completions(oracle, entropy_ntl, mask_ntl)
    return lambda model, *_, **__: (scored[model.name], entropy_rs, None)


def stub(oracle, **settings) -> Off:
    """A trainer in one process on the CPU, with these settings."""
    same = {"gather": lambda x: x, "gather_for_metrics": lambda x: x, "reduce": lambda x, **_: x}
    one = Off(device=oracle.torch.device("cpu"), process_index=0, num_processes=1, **same)
    made = Off(accelerator=one, _metrics={"train": defaultdict(list)}, **settings)
    made.args = made
    return made


def trainer(oracle, reward_n, group_n, generated: tuple, **settings) -> Off:
    """The stub of a GRPO or RLOO trainer that has generated this and was paid these rewards, NaN for none."""
    torch = oracle.torch
    fields = {
        "model": Off(name="old", training=True),
        "ref_model": Off(name="reference"),
        "num_generations": int((np.asarray(group_n) == group_n[0]).sum()),
        "_generate": lambda *_: generated,
        "_calculate_rewards": lambda *_: torch.tensor(reward_n, dtype=torch.float64)[:, None],
        "reward_weights": torch.ones(1, dtype=torch.float64),
        "reward_func_names": ["reward"],
        "scale_rewards": "group",
        "multi_objective_aggregation": "sum_then_normalize",
        "importance_sampling_level": "token",
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "beta": 0.0,
        "top_entropy_quantile": 1.0,
        "num_iterations": 2,  # so that the trainer scores logp_old
        "steps_per_generation": 1,
        "gradient_accumulation_steps": 1,
        "current_gradient_accumulation_steps": 1,
        "_tokenizer": Off(pad_token_id=0),
        "_logs": {name: [] for name in ("prompt", "completion", "advantages")} | {"rewards": defaultdict(list)},
        "_pending_extra_logs": {},
        "_pending_metrics": {},
    }
    return stub(oracle, **fields | settings)


def generated_batch(kind, made: Off) -> dict:
    """Run this kind of trainer between generation and loss -> masks, advantages, normaliser, correction."""
    return kind._generate_and_score_completions(made, [{"prompt": "?"}] * len(made._generate()[0]))


def differentiated(loss, *leaves) -> tuple:
    """(loss, gradient by each leaf that has a part in it)."""
    loss.backward()
    return loss.detach(), *(x.grad for x in leaves if x.grad is not None)


def trl_grpo(oracle, case: Case, **settings) -> tuple:
    """TRL's GRPO family on whole trajectories, what the policy did not choose being `tool_mask`'s."""
    trajectories, mask_ntl = case.trajectories, filled(case.trajectories)
    leaves = leaf(oracle, case.logp), leaf(oracle, case.entropy)
    given = trajectories.tokens, trajectories.chosen.astype(int), trajectories.logp_sampled
    tokens, own, sampled = (ragged(x_ntl, mask_ntl) for x_ntl in given)
    num = len(tokens)
    generated = ([[1]] * num, tokens, own, [""] * num, sampled, {}, None, None)
    made = trainer(oracle, trajectories.outcome, trajectories.group, generated, **settings)
    made._get_per_token_logps_and_entropies = scores_by_model(oracle, case, *leaves, mask_ntl)
    loss = oracle.grpo._compute_loss(made, Off(name="policy"), generated_batch(oracle.grpo, made))
    return differentiated(loss, *leaves)


# GRPO, Dr. GRPO, DAPO, CISPO, GSPO ----------------------------------------------------------------------------


def corrected(mode: str, low: float | None = None) -> dict:
    """TRL's correction for a sampler that is not the trainer, capped at 1.2."""
    switch = "vllm_importance_sampling"
    bounds = {f"{switch}_clip_max": 1.2, f"{switch}_clip_min": low}
    return {"use_vllm": True, f"{switch}_correction": True, f"{switch}_mode": mode, **bounds}


AS_GRPO = {"loss_type": "grpo"}
AS_DR_GRPO = {"loss_type": "dr_grpo", "scale_rewards": "none", "max_completion_length": 20}
AS_DAPO = {"loss_type": "dapo", "epsilon_high": 0.28}
AS_CISPO = {"loss_type": "cispo", "epsilon_high": 1.2}
AS_GSPO = {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.1, "epsilon_high": 0.1}
KL, WEIGHTED_KL = {"beta": 0.05}, {"beta": 0.05, "kl_weighted": True}
AS_WEIGHTED_KL = {"beta": 0.05, "use_bias_correction_kl": True}
ENTROPY, AS_ENTROPY = {"entropy_bonus": 0.02}, {"_entropy_bonus_enabled": True, "entropy_coef": 0.02}

# The members, with their deviation's eps as TRL has it.
grpo = partial(fg.grpo, eps=TRL_EPS, beta=0.0)
dr_grpo = partial(fg.algorithms.dr_grpo, max_tokens=20)
dapo = partial(fg.algorithms.dapo, dynamic_sampling=False, eps=TRL_EPS)  # TRL filters no groups
cispo = partial(fg.algorithms.cispo, clip_low=1.0, clip_high=0.2, eps=TRL_EPS)  # TRL bounds the ratio, and only above
gspo = partial(fg.algorithms.gspo, clip_low=0.1, clip_high=0.1, eps=TRL_EPS)

# Each with the settings that make TRL's trainer the same one. A sequence is a turn's action here and the whole
# completion there: the same where there is one turn.
CAPPED, CUT = (fg.algorithms.Correction(1.2, "sequence", mask=mask) for mask in (False, True))
BY_SEQUENCE = {
    "gspo": (gspo(), AS_GSPO),
    "gspo, KL": (gspo(**KL), AS_GSPO | KL),
    "grpo, sequence correction": (grpo(correction=CAPPED), AS_GRPO | corrected("sequence_truncate")),
    "grpo, sequence mask": (grpo(correction=CUT), AS_GRPO | corrected("sequence_mask")),
}
BY_TOKEN = {
    "grpo": (grpo(), AS_GRPO),
    "grpo, weighted KL": (grpo(**WEIGHTED_KL), AS_GRPO | AS_WEIGHTED_KL),
    "grpo, dual clip": (grpo(dual_clip=1.3), AS_GRPO | {"delta": 1.3}),
    "dr_grpo, KL": (dr_grpo(**KL), AS_DR_GRPO | KL),
    "dapo": (dapo(), AS_DAPO),
    "dapo, token correction": (dapo(correction=fg.algorithms.Correction(1.2)), AS_DAPO | corrected("token_truncate")),
    "dapo, token mask": (dapo(correction=fg.algorithms.Correction(1.2, mask=True)), AS_DAPO | corrected("token_mask")),
    **{
        f"dapo, token {mode} on both sides": (
            dapo(correction=fg.algorithms.Correction(1.2, mask=mode == "mask", low=0.9)),
            AS_DAPO | corrected(f"token_{mode}", 0.9),
        )
        for mode in ("truncate", "mask")
    },
    "cispo, KL": (cispo(**KL), AS_CISPO | KL),
    # TRL's bonus is a mean over tokens whatever the loss type; ours has the member's weights, so only dapo's is equal.
    "dapo, entropy": (dapo(**ENTROPY), AS_DAPO | AS_ENTROPY),
}
CASES = [(turns, *pair) for turns, pairs in ((1, BY_SEQUENCE), (3, BY_TOKEN)) for pair in pairs.values()]


@pytest.mark.parametrize(("turns", "algorithm", "settings"), CASES, ids=[*BY_SEQUENCE, *BY_TOKEN])
def test_group_relative_members_equal_trl(oracle, turns, algorithm, settings):
    cases = [appending_case(seed, turns=turns) for seed in SEEDS]
    check([ours(algorithm, case) for case in cases], [trl_grpo(oracle, case, **settings) for case in cases])


# Advantages and shaping ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("normalize", "kind", "settings"),
    [
        (partial(fg.group_zscore, eps=TRL_EPS), "grpo", {"scale_rewards": "group"}),
        (fg.algorithms.group_center, "grpo", {"scale_rewards": "none"}),
        (fg.algorithms.leave_one_out, "rloo", {}),
    ],
)
def test_advantages_equal_trl(oracle, normalize, kind, settings):
    """With outcomes that are missing (NaN there), a group of one valid trajectory, and a constant group."""
    rng, group_n = np.random.default_rng(0), np.repeat(np.arange(20), 8)
    outcome_n, valid_n = rng.normal(size=160).astype(np.float32), rng.random(160) < 0.7
    valid_n[:8], outcome_n[8:16] = np.arange(8) == 3, 0.25
    ids, text = [[1]] * 160, [""] * 160
    generated = {"grpo": (ids, ids, None, text, None, {}, None, None), "rloo": (ids, ids, text)}[kind]
    made = trainer(oracle, np.where(valid_n, outcome_n, np.nan), group_n, generated, **settings)
    zeros_rs = oracle.torch.zeros(160, 1, dtype=oracle.torch.float64)
    made._get_per_token_logps_and_entropies = lambda *_, **__: (zeros_rs, zeros_rs, None)
    expected_n = generated_batch(getattr(oracle, kind), made)["advantages"]
    check([(normalize(outcome_n, group_n, valid_n),)], [(expected_n,)])


@pytest.mark.parametrize(("max_tokens", "buffer"), [(20, 10), (20, 20), (7, 1)])
def test_overlong_penalty_equals_trl(oracle, max_tokens, buffer):
    length_n = np.arange(max_tokens + buffer)
    expected_n = oracle.overlong(max_tokens, buffer)([[1] * int(length) for length in length_n])
    check([(fg.algorithms.overlong_penalty(length_n, fg.algorithms.Overlong(max_tokens, buffer)),)], [(expected_n,)])


# DPO ----------------------------------------------------------------------------------------------------------


def trl_dpo(oracle, case: Case, beta: float) -> tuple:
    """TRL's DPO on each group's best and worst trajectory, after one token of a prompt; winners come first."""
    trajectories, logp_ntl = case.trajectories, leaf(oracle, case.logp)
    valid_n, group_n, paid_n = ~np.isin(trajectories.status, INVALID), trajectories.group, trajectories.outcome
    groups = [np.flatnonzero(valid_n & (group_n == group)) for group in np.unique(group_n[valid_n])]
    mixed = [members for members in groups if np.ptp(paid_n[members]) > 0]
    index = [members[best(paid_n[members])] for best in (np.argmax, np.argmin) for members in mixed]
    fields = trajectories.tokens, trajectories.chosen.astype(int), logp_ntl, trajectories.logp_ref
    tokens_rs, own_rs, logp_rs, ref_rs = (completions(oracle, x, filled(trajectories))[index] for x in fields)
    prompt_r1 = oracle.torch.zeros(len(index), 1, dtype=oracle.torch.long)
    ids_rs, mask_rs = (
        oracle.torch.cat([first, x], 1) for first, x in ((prompt_r1 + 1, tokens_rs), (prompt_r1, own_rs))
    )
    inputs = {"input_ids": ids_rs, "attention_mask": oracle.torch.ones_like(ids_rs), "completion_mask": mask_rs}

    def outputs(logp_rs, *, labels, **_):
        """Imitate the output of a model with a fused head: 0 where a token is no label."""
        own_rs, zeros_rs = labels[:, 1:] != -100, oracle.torch.zeros_like(logp_rs)
        logp_rs = oracle.torch.where(own_rs, logp_rs, zeros_rs)
        return Off(log_probs=logp_rs, entropy=zeros_rs, mean_logits=zeros_rs, is_top1=own_rs)

    settings = {"loss_types": ["sigmoid"], "loss_weights": [1.0], "f_divergence_type": "reverse_kl", "beta": beta}
    models = {"model": Off(training=True), "ref_model": partial(outputs, ref_rs)}
    made = stub(oracle, **models, **settings, _total_train_tokens=0, _tp_size=1)
    return differentiated(oracle.dpo._compute_loss(made, partial(outputs, logp_rs), inputs, False), logp_ntl)


def test_dpo_equals_trl(oracle):
    cases = [make_case(seed, groups=5) for seed in SEEDS]
    check([ours(fg.dpo(beta=0.5), case) for case in cases], [trl_dpo(oracle, case, 0.5) for case in cases])
