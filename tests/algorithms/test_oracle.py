"""The family against code that this project did not write: TRL's trainers, and PyTorch's autograd.

TRL's methods run unbound on a stub that hands out our log-probabilities, from generation (masks, advantages,
normaliser, importance correction: all TRL's) to loss. What TRL gets is float64, so that a difference is our
rounding. Run with `-m oracle -n 0 -s` for the table of largest relative errors.
"""

import json
from collections import defaultdict
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import INVALID, Case, batch_of, make_case

import flowgrpo as fg
from experiments.offline_model import write_model
from flowgrpo.learner.update import make_score
from flowgrpo.learner.written import preference_rows, read_preferences, tokens_of

pytestmark = pytest.mark.oracle

TOLERANCE = 1e-5
TRL_EPS = 1e-4  # what TRL adds to a deviation
SEEDS = range(4)
ERRORS: dict[str, dict[str, float]] = defaultdict(dict)


@pytest.fixture(scope="module")
def oracle():
    """PyTorch and TRL, imported here: collecting this file needs neither."""
    import torch
    from trl.rewards import get_soft_overlong_punishment
    from trl.trainer.dpo_trainer import DPOTrainer
    from trl.trainer.grpo_trainer import GRPOTrainer
    from trl.trainer.rloo_trainer import RLOOTrainer

    return SimpleNamespace(
        torch=torch, dpo=DPOTrainer, grpo=GRPOTrainer, rloo=RLOOTrainer, overlong=get_soft_overlong_punishment
    )


@pytest.fixture(scope="module", autouse=True)
def table():
    """One line per comparison after the last of them."""
    yield
    print()
    for name, errors in ERRORS.items():
        print(f"{name}: " + ", ".join(f"{part} {error:.1e}" for part, error in errors.items()))


def check(name: str, found: list[tuple], expected: list[tuple], parts: tuple[str, ...] = ("loss", "gradient")) -> None:
    """Record max |found - expected| / max |expected| of each part over all results, and hold it to the tolerance."""
    for i, part in enumerate(parts):
        found_m, expected_m = (_joined([result[i] for result in results]) for results in (found, expected))
        scale = np.abs(expected_m).max()
        assert scale > 0, f"{name}: nothing to compare in {part}"
        ERRORS[name][part] = float(np.abs(found_m - expected_m).max() / scale)
    too_far = {part: error for part, error in ERRORS[name].items() if not error <= TOLERANCE}
    assert not too_far, f"{name} differs, relative to its largest value: {too_far}"


def _joined(arrays: list) -> np.ndarray:
    return np.concatenate([np.asarray(x, np.float64).ravel() for x in arrays])


# Ours ---------------------------------------------------------------------------------------------------------


def ours(algorithm: fg.Algorithm, case: Case) -> tuple:
    """(loss, gradient by logp_ntl, gradient by entropy_ntl) of this package, packed."""
    batch = batch_of(algorithm, case.trajectories)

    def loss(logp_ntl, entropy_ntl):
        return algorithm.loss(fg.Scores(fg.place(logp_ntl, batch), fg.place(entropy_ntl, batch)), batch)[0]

    value, gradients = jax.value_and_grad(loss, argnums=(0, 1))(jnp.asarray(case.logp), jnp.asarray(case.entropy))
    return value, *gradients


def appending_case(seed: int, **settings) -> Case:
    """A case whose trajectories all append, sorted by group, as TRL wants them; all valid unless told otherwise."""
    case = make_case(seed, **{"invalid": 0.0, **settings})
    order_n = np.argsort(case.trajectories.group, kind="stable")
    case = jax.tree.map(lambda x_n: x_n[order_n], case)
    return case._replace(trajectories=case.trajectories.replace(appends=np.ones(len(order_n), bool)))


def valid_of(trajectories: fg.Trajectories) -> np.ndarray:
    return ~np.isin(trajectories.status, INVALID)


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
    """What a trainer asks for log-probabilities: `model` is the name of who is scored."""
    given = {"policy": logp_ntl, "old": case.trajectories.logp_old, "reference": case.trajectories.logp_ref}
    scored = {name: completions(oracle, x_ntl, mask_ntl) for name, x_ntl in given.items()}
    entropy_rs = completions(oracle, entropy_ntl, mask_ntl)
    return lambda model, *_, **__: (scored[model.name], entropy_rs, None)


def accelerator(oracle) -> Off:
    """One process, on the CPU."""
    return Off(
        device=oracle.torch.device("cpu"),
        process_index=0,
        num_processes=1,
        gather=lambda x: x,
        gather_for_metrics=lambda x: x,
        reduce=lambda x, **_: x,
    )


def trainer(oracle, reward_n, group_n, generated: tuple, **settings) -> Off:
    """The stub of a GRPO or RLOO trainer that has generated this and was paid these rewards, NaN for none."""
    torch = oracle.torch
    fields = {
        "accelerator": accelerator(oracle),
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
        "_metrics": {"train": defaultdict(list)},
        "_logs": {name: [] for name in ("prompt", "completion", "advantages")} | {"rewards": defaultdict(list)},
        "_pending_extra_logs": {},
        "_pending_metrics": {},
    }
    stub = Off(**fields | settings)
    stub.args = stub
    return stub


def generated_batch(kind, stub: Off) -> dict:
    """What this kind of trainer hands from generation to loss: masks, advantages, normaliser, correction."""
    return kind._generate_and_score_completions(stub, [{"prompt": "?"}] * len(stub._generate()[0]))


def trl_loss(oracle, kind, stub: Off, *leaves) -> tuple:
    """(loss, gradient by each leaf) of TRL, from generation to loss."""
    loss = kind._compute_loss(stub, Off(name="policy"), generated_batch(kind, stub))
    loss.backward()
    return loss.detach(), *(oracle.torch.zeros_like(x) if x.grad is None else x.grad for x in leaves)


def trl_grpo(oracle, case: Case, **settings) -> tuple:
    """TRL's GRPO family on whole trajectories, what the policy did not choose being `tool_mask`'s."""
    trajectories, mask_ntl = case.trajectories, filled(case.trajectories)
    logp_ntl, entropy_ntl = leaf(oracle, case.logp), leaf(oracle, case.entropy)
    tokens, own, sampled = (
        ragged(x_ntl, mask_ntl) for x_ntl in (trajectories.tokens, trajectories.chosen, trajectories.logp_sampled)
    )
    num = len(tokens)
    generated = ([[1]] * num, tokens, [[int(x) for x in row] for row in own], [""] * num, sampled, {}, None, None)
    stub = trainer(oracle, trajectories.outcome, trajectories.group, generated, **settings)
    stub._get_per_token_logps_and_entropies = scores_by_model(oracle, case, logp_ntl, entropy_ntl, mask_ntl)
    return trl_loss(oracle, oracle.grpo, stub, logp_ntl, entropy_ntl)


# GRPO, Dr. GRPO, DAPO, CISPO, GSPO ----------------------------------------------------------------------------


def corrected(mode: str) -> dict:
    """TRL's correction for a sampler that is not the trainer, capped at 1.2."""
    return {
        "use_vllm": True,
        "vllm_importance_sampling_correction": True,
        "vllm_importance_sampling_mode": mode,
        "vllm_importance_sampling_clip_max": 1.2,
    }


AS_GRPO = {"loss_type": "grpo"}
AS_DR_GRPO = {"loss_type": "dr_grpo", "scale_rewards": "none", "max_completion_length": 20}
AS_DAPO = {"loss_type": "dapo", "epsilon_high": 0.28}
AS_CISPO = {"loss_type": "cispo", "epsilon_high": 1.2}
AS_GSPO = {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.1, "epsilon_high": 0.1}
KL, WEIGHTED_KL = {"beta": 0.05}, {"beta": 0.05, "kl_weighted": True}
AS_WEIGHTED_KL = {"beta": 0.05, "use_bias_correction_kl": True}
ENTROPY, AS_ENTROPY = {"entropy_bonus": 0.02}, {"_entropy_bonus_enabled": True, "entropy_coef": 0.02}

# The members, with their deviation's eps as TRL has it.
grpo = partial(fg.grpo, eps=TRL_EPS)
dr_grpo = partial(fg.dr_grpo, max_tokens=20)
dapo = partial(fg.dapo, dynamic_sampling=False, eps=TRL_EPS)  # TRL filters no groups
cispo = partial(fg.cispo, clip_low=1.0, clip_high=0.2, eps=TRL_EPS)  # TRL bounds the ratio itself, and only above
gspo = partial(fg.gspo, clip_low=0.1, clip_high=0.1, eps=TRL_EPS)

# Each with the settings that make TRL's trainer the same one.
BY_TOKEN = {
    "grpo": (grpo(beta=0.0), AS_GRPO),
    "grpo, KL": (grpo(**KL), AS_GRPO | KL),
    "grpo, weighted KL": (grpo(**WEIGHTED_KL), AS_GRPO | AS_WEIGHTED_KL),
    "grpo, dual clip": (grpo(beta=0.0, dual_clip=1.3), AS_GRPO | {"delta": 1.3}),
    "dr_grpo": (dr_grpo(), AS_DR_GRPO),
    "dr_grpo, KL": (dr_grpo(**KL), AS_DR_GRPO | KL),
    "dr_grpo, weighted KL": (dr_grpo(**WEIGHTED_KL), AS_DR_GRPO | AS_WEIGHTED_KL),
    "dapo": (dapo(), AS_DAPO),
    "dapo, KL": (dapo(**KL), AS_DAPO | KL),
    "dapo, weighted KL": (dapo(**WEIGHTED_KL), AS_DAPO | AS_WEIGHTED_KL),
    "dapo, token correction": (dapo(correction=fg.Correction(1.2)), AS_DAPO | corrected("token_truncate")),
    "dapo, token mask": (dapo(correction=fg.Correction(1.2, mask=True)), AS_DAPO | corrected("token_mask")),
    "cispo": (cispo(), AS_CISPO),
    "cispo, KL": (cispo(**KL), AS_CISPO | KL),
    "cispo, weighted KL": (cispo(**WEIGHTED_KL), AS_CISPO | AS_WEIGHTED_KL),
    # TRL's bonus is a mean over tokens whatever the loss type; ours has the member's weights, so only these are equal.
    "dapo, entropy": (dapo(**ENTROPY), AS_DAPO | AS_ENTROPY),
    "cispo, entropy": (cispo(**ENTROPY), AS_CISPO | AS_ENTROPY),
}

# A sequence is a turn's action here and the whole completion there: the same where there is one turn.
BY_SEQUENCE = {
    "gspo": (gspo(), AS_GSPO),
    "gspo, KL": (gspo(**KL), AS_GSPO | KL),
    "grpo, sequence correction": (
        grpo(beta=0.0, correction=fg.Correction(1.2, "sequence")),
        AS_GRPO | corrected("sequence_truncate"),
    ),
    "grpo, sequence mask": (
        grpo(beta=0.0, correction=fg.Correction(1.2, "sequence", mask=True)),
        AS_GRPO | corrected("sequence_mask"),
    ),
}

PAIRS = BY_TOKEN | BY_SEQUENCE
CASES = [(name, turns) for turns, pairs in ((1, PAIRS), (3, BY_TOKEN)) for name in pairs]


@pytest.mark.parametrize(("name", "turns"), CASES)
def test_group_relative_members_equal_trl(oracle, name, turns):
    algorithm, settings = PAIRS[name]
    cases = [appending_case(seed, turns=turns) for seed in SEEDS]
    found = [ours(algorithm, case) for case in cases]
    expected = [trl_grpo(oracle, case, **settings) for case in cases]
    parts = ("loss", "gradient", "entropy gradient") if "entropy" in algorithm.needs else ("loss", "gradient")
    check(f"{name} ({'one turn' if turns == 1 else 'turns'})", found, expected, parts)


# RLOO ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beta", [0.0, 0.05])
def test_rloo_gradient_equals_trl_on_policy(oracle, beta):
    """Only the gradient, and only at rho = 1: TRL's ratio is the trajectory's, ours is the token's."""
    found, expected = [], []
    for seed in SEEDS:
        case = appending_case(seed)
        case = case._replace(trajectories=case.trajectories.replace(logp_old=case.logp))
        found.append(ours(fg.rloo(beta=beta, kl_in="reward"), case)[1:])
        expected.append(trl_rloo(oracle, case, beta)[1:])
    check(f"rloo on policy (turns, beta {beta:g})", found, expected, ("gradient",))


def trl_rloo(oracle, case: Case, beta: float) -> tuple:
    """TRL's RLOO, which knows no `tool_mask`, on the tokens that the policy chose."""
    trajectories, mask_ntl = case.trajectories, case.trajectories.chosen
    logp_ntl = leaf(oracle, case.logp)
    tokens = ragged(trajectories.tokens, mask_ntl)
    generated = ([[1]] * len(tokens), tokens, [""] * len(tokens))
    stub = trainer(oracle, trajectories.outcome, trajectories.group, generated, beta=beta)
    stub._get_per_token_logps_and_entropies = scores_by_model(oracle, case, logp_ntl, case.entropy, mask_ntl)
    return trl_loss(oracle, oracle.rloo, stub, logp_ntl)


# Advantages and shaping ---------------------------------------------------------------------------------------


ADVANTAGES = {
    "group_zscore": (partial(fg.group_zscore, eps=TRL_EPS), "grpo", {"scale_rewards": "group"}),
    "group_center": (fg.group_center, "grpo", {"scale_rewards": "none"}),
    "leave_one_out": (fg.leave_one_out, "rloo", {}),
}


@pytest.mark.parametrize("name", ADVANTAGES)
def test_advantages_equal_trl(oracle, name):
    """With outcomes that are missing, a group of one valid trajectory, and a constant group."""
    normalize, kind, settings = ADVANTAGES[name]
    found, expected = [], []
    for seed in SEEDS:
        rng = np.random.default_rng(seed)
        outcome_n, group_n = rng.normal(size=40).astype(np.float32), np.repeat(np.arange(5), 8)
        valid_n = rng.random(40) < 0.7
        valid_n[:8], outcome_n[8:16] = np.arange(8) == 3, 0.25
        found.append((normalize(outcome_n, group_n, valid_n),))
        expected.append((trl_advantage(oracle, kind, np.where(valid_n, outcome_n, np.nan), group_n, **settings),))
    check(name, found, expected, ("value",))


def trl_advantage(oracle, kind: str, reward_n, group_n, **settings):
    """What TRL makes of these rewards; NaN is a completion that could not be scored."""
    num = len(reward_n)
    ids, text = [[1]] * num, [""] * num
    generated = {"grpo": (ids, ids, None, text, None, {}, None, None), "rloo": (ids, ids, text)}[kind]
    stub = trainer(oracle, reward_n, group_n, generated, **settings)
    zeros_rs = oracle.torch.zeros(num, 1, dtype=oracle.torch.float64)
    stub._get_per_token_logps_and_entropies = lambda *_, **__: (zeros_rs, zeros_rs, None)
    return generated_batch(getattr(oracle, kind), stub)["advantages"]


@pytest.mark.parametrize(("max_tokens", "buffer"), [(20, 10), (20, 20), (7, 1), (100, 30)])
def test_overlong_penalty_equals_trl(oracle, max_tokens, buffer):
    length_n = np.arange(max_tokens + buffer)
    found_n = fg.overlong_penalty(length_n, fg.Overlong(max_tokens, buffer))
    expected_n = oracle.overlong(max_tokens, buffer)([[1] * int(length) for length in length_n])
    check(f"overlong_penalty ({max_tokens}, {buffer})", [(found_n,)], [(expected_n,)], ("value",))


# DPO ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beta", [0.1, 2.0])
def test_dpo_equals_trl(oracle, beta):
    cases = [make_case(seed, groups=5) for seed in SEEDS]
    found = [ours(fg.dpo(beta=beta), case) for case in cases]
    expected = [trl_dpo(oracle, case, beta) for case in cases]
    check(f"dpo (beta {beta:g})", found, expected)


def trl_dpo(oracle, case: Case, beta: float) -> tuple:
    """TRL's DPO on each group's best and worst trajectory, after one token of a prompt."""
    torch, trajectories = oracle.torch, case.trajectories
    logp_ntl = leaf(oracle, case.logp)
    index = np.concatenate(best_and_worst(trajectories))
    rows = partial(completions, oracle, mask_ntl=filled(trajectories))
    own_rs, logp_rs, logp_ref_rs = rows(trajectories.chosen), rows(logp_ntl), rows(trajectories.logp_ref)
    prompt_r1 = torch.zeros(len(index), 1, dtype=torch.long)
    ids_rs = torch.cat([prompt_r1 + 1, rows(trajectories.tokens)[index].long()], dim=1)
    mask_rs = torch.cat([prompt_r1, own_rs[index].long()], dim=1)
    stub = Off(
        accelerator=accelerator(oracle),
        model=Off(training=True),
        ref_model=partial(fused_outputs, oracle, logp_ref_rs[index]),
        beta=beta,
        loss_types=["sigmoid"],
        loss_weights=[1.0],
        f_divergence_type="reverse_kl",
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
        args=Off(),
    )
    inputs = {"input_ids": ids_rs, "attention_mask": torch.ones_like(ids_rs), "completion_mask": mask_rs}
    loss = oracle.dpo._compute_loss(stub, partial(fused_outputs, oracle, logp_rs[index]), inputs, False)
    loss.backward()
    return loss.detach(), logp_ntl.grad


PREFERENCES = [
    {"prompt": "3 + 4 = ?", "chosen": "The sum is 7.", "rejected": "It may be 8."},
    {"prompt": "20 + 5 = ?", "chosen": "25", "rejected": "The sum is 205, or it may be 26."},
    {
        "prompt": [{"role": "user", "content": "1 + 2 + 3 = ?"}],
        "chosen": [
            {"role": "assistant", "content": "1 + 2 = 3"},
            {"role": "user", "content": "and then?"},
            {"role": "assistant", "content": "3 + 3 = 6"},
        ],
        "rejected": "It may be 7.",
    },
]


def test_dpo_from_a_preference_file_equals_trl_on_the_model_of_transformers(oracle, tmp_path):
    """From the file to the gradient of the weights: a policy and a reference, with pairs of one turn and of several."""
    for seed, name in enumerate(("policy", "reference")):
        write_model(tmp_path / name, [json.dumps(PREFERENCES)], seed=seed)
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in PREFERENCES))
    policy, reference = (fg.load_model(tmp_path / name) for name in ("policy", "reference"))
    pairs = read_preferences(tmp_path / "pairs.jsonl", policy.text)
    batch, algorithm, score = preference_rows(pairs, row_length=128), fg.dpo(beta=0.5), make_score(policy.policy)
    batch = batch.replace(logp_ref=score(reference.params, batch).logp)

    def loss(params):
        return algorithm.loss(score(params, batch), batch)[0]

    value, gradient = jax.jit(jax.value_and_grad(loss))(policy.params)
    expected = trl_dpo_of_models(oracle, tmp_path, [side for sides in zip(*pairs, strict=True) for side in sides])
    check("dpo from a file", [(value, gradient["embed"])], [expected])


def trl_dpo_of_models(oracle, folder, records) -> tuple:
    """(loss, gradient by embedding) of TRL's DPO over the models of these folders; what was chosen comes first."""
    from transformers import AutoModelForCausalLM

    torch = oracle.torch
    models = [AutoModelForCausalLM.from_pretrained(folder / name).double() for name in ("policy", "reference")]
    longest = max(tokens_of(record) for record in records)
    ids_rs, own_rs, real_rs = (np.zeros((len(records), longest), np.int64) for _ in range(3))
    for r, record in enumerate(records):
        size = tokens_of(record)
        ids_rs[r, :size] = np.concatenate([turn.tokens for turn in record.turns])
        own_rs[r, :size] = np.concatenate([turn.chosen for turn in record.turns])
        real_rs[r, :size] = 1
    inputs = {"input_ids": ids_rs, "attention_mask": real_rs, "completion_mask": own_rs}
    stub = Off(
        accelerator=accelerator(oracle),
        model=Off(training=True),
        ref_model=partial(outputs_of_model, oracle, models[1]),
        beta=0.5,
        loss_types=["sigmoid"],
        loss_weights=[1.0],
        f_divergence_type="reverse_kl",
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
        args=Off(),
    )
    tensors = {name: torch.tensor(x_rs) for name, x_rs in inputs.items()}
    loss = oracle.dpo._compute_loss(stub, partial(outputs_of_model, oracle, models[0]), tensors, False)
    loss.backward()
    return loss.detach(), models[0].get_input_embeddings().weight.grad


def outputs_of_model(oracle, model, *, input_ids, attention_mask, **more):
    """What a model with a fused head returns, from the logits of one without."""
    logits_rsv = model(input_ids=input_ids, attention_mask=attention_mask).logits[:, :-1]
    logp_rs = logits_rsv.log_softmax(-1).gather(-1, input_ids[:, 1:, None])[..., 0]
    return fused_outputs(oracle, logp_rs, **more)


def fused_outputs(oracle, logp_rs, *, labels, **_):
    """What a model with a fused head returns: nothing where a token is no label."""
    own_rs = labels[:, 1:] != -100
    zeros_rs = oracle.torch.zeros_like(logp_rs)
    logp_rs = oracle.torch.where(own_rs, logp_rs, zeros_rs)
    return Off(log_probs=logp_rs, entropy=zeros_rs, mean_logits=zeros_rs, is_top1=own_rs)


def best_and_worst(trajectories: fg.Trajectories) -> tuple[list, list]:
    """The pairs of the groups whose valid outcomes differ."""
    best, worst = [], []
    for group in np.unique(trajectories.group):
        members = np.flatnonzero((trajectories.group == group) & valid_of(trajectories))
        outcomes = trajectories.outcome[members]
        if len(members) and outcomes.max() > outcomes.min():
            best.append(members[outcomes.argmax()])
            worst.append(members[outcomes.argmin()])
    return best, worst


# Flow-GRPO, in PyTorch ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("beta", [0.0, 0.05])
def test_flow_grpo_equals_nested_means_in_torch(oracle, beta):
    cases = [make_case(seed, groups=4, turns=5, invalid=0.25) for seed in SEEDS]
    found = [ours(fg.flow_grpo(clip_low=0.2, clip_high=0.28, beta=beta), case) for case in cases]
    expected = []
    for case in cases:
        logp_ntl = leaf(oracle, case.logp)
        loss = -flow_objective(oracle.torch, case, logp_ntl, low=0.2, high=0.28, beta=beta)
        loss.backward()
        expected.append((loss.detach(), logp_ntl.grad))
    check(f"flow_grpo (turns, beta {beta:g})", found, expected)


def flow_objective(torch, case: Case, logp_ntl, *, low, high, beta):
    """`1/Q sum_q 1/G sum_i 1/T_i sum_t 1/|a| sum_j [min(rho A, clip(rho) A) - beta k3]`, as it is written."""
    trajectories = case.trajectories
    old_ntl, ref_ntl = (torch.tensor(x, dtype=torch.float64) for x in (trajectories.logp_old, trajectories.logp_ref))
    queries = []
    for group in np.unique(trajectories.group[valid_of(trajectories)]):
        members = np.flatnonzero((trajectories.group == group) & valid_of(trajectories))
        outcome_g = torch.tensor(trajectories.outcome[members], dtype=torch.float64)
        std = outcome_g.std() if len(members) > 1 else 0.0
        adv_g = (outcome_g - outcome_g.mean()) / (std + 1e-6)
        by_trajectory = []
        for i, adv in zip(members, adv_g, strict=True):
            by_turn = []
            for t in np.flatnonzero(trajectories.turns[i]):
                own_l = torch.as_tensor(trajectories.chosen[i, t])
                logp, old, ref = (x_ntl[i, t][own_l] for x_ntl in (logp_ntl, old_ntl, ref_ntl))
                rho = (logp - old).exp()
                gain = torch.minimum(rho * adv, rho.clamp(1 - low, 1 + high) * adv)
                k3 = (ref - logp).exp() - (ref - logp) - 1
                by_turn.append((gain - beta * k3).mean())
            by_trajectory.append(torch.stack(by_turn).mean())
        queries.append(torch.stack(by_trajectory).mean())
    return torch.stack(queries).mean()
