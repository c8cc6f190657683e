"""The family once more, in plain Python loops over ragged lists: slow, and easy to hold against the papers.

Nothing here uses the package's formulas. A trajectory is a dict with `group`, `outcome`, `correct`, `valid`,
`cut` and `turns`; a turn is a dict with `anchor`, `reward` and, per chosen token, lists `logp` (the current
policy), `frozen` (the same numbers where a formula stops the gradient), `old`, `mu`, `ref`, `entropy`,
`value` (current), `value_old`. Python floats throughout.
"""

import math
from collections import defaultdict

import numpy as np


def ragged(case) -> list[dict]:
    """The case as nested lists of chosen tokens."""
    trajectories = case.trajectories
    fields = {
        "logp": case.logp,
        "frozen": case.logp,
        "old": trajectories.logp_old,
        "mu": trajectories.logp_sampled,
        "ref": trajectories.logp_ref,
        "entropy": case.entropy,
        "value": case.value,
        "value_old": trajectories.value,
    }
    out = []
    for i in range(len(trajectories.outcome)):
        turns = []
        for t in np.flatnonzero(trajectories.turns[i]):
            slots = np.flatnonzero(trajectories.chosen[i, t]).tolist()
            turn = {name: x[i, t, slots].tolist() for name, x in fields.items()}
            turn["reward"] = float(trajectories.reward[i, t]) if trajectories.by_turn[i] else None
            turns.append(turn | {"slots": slots, "anchor": int(trajectories.anchor[i, t])})
        member = {name: getattr(trajectories, name)[i].item() for name in ("group", "outcome", "correct", "last_value")}
        status = int(trajectories.status[i])
        out.append(member | {"valid": status <= 4, "cut": status in {1, 2}, "turns": turns})
    return out


# Statistics -------------------------------------------------------------------------------------------


def mean(xs):
    return sum(xs) / len(xs)


def deviation(xs):
    return math.sqrt(sum((x - mean(xs)) ** 2 for x in xs) / (len(xs) - 1))


def zscores(xs, eps=1e-6):
    if max(xs) == min(xs):
        return [0.0] * len(xs)
    return [(x - mean(xs)) / (deviation(xs) + eps) for x in xs]


def centred(xs):
    return [x - mean(xs) if max(xs) != min(xs) else 0.0 for x in xs]


def others(xs):
    if max(xs) == min(xs):
        return [0.0] * len(xs)
    return [x - (sum(xs) - x) / (len(xs) - 1) for x in xs]


def by_group(members):
    groups = defaultdict(list)
    for member in members:
        groups[member["group"]].append(member)
    return list(groups.values())


def over_groups(members, normalize, value=lambda m: m["outcome"]):
    """{id(trajectory): advantage}, normalised over each group."""
    out = {}
    for group in by_group(members):
        out |= zip(map(id, group), normalize([value(m) for m in group]), strict=True)
    return out


def mean_over_groups(members, value):
    """Mean over queries of the mean over their trajectories."""
    return mean([mean([value(m) for m in group]) for group in by_group(members)])


# Shared parts -----------------------------------------------------------------------------------------


def taking_part(trajectories, *, mixed=False):
    members = [m for m in trajectories if m["valid"]]
    if not mixed:
        return members
    return [m for group in by_group(members) if 0 < sum(m["correct"] for m in group) < len(group) for m in group]


def count(member):
    return sum(len(turn["slots"]) for turn in member["turns"])


def overlong(member, limit, buffer):
    return clip((count(member) - (limit - buffer)) / buffer, 0.0, 1.0)


def kl(kind, logp, ref):
    d = ref - logp
    return {"k1": -d, "k2": d * d / 2, "k3": math.exp(d) - d - 1}[kind]


def clip(x, low, high):
    return min(max(x, low), high)


def clipped(ratio, adv, low, high, dual=None):
    value = min(ratio * adv, clip(ratio, 1 - low, 1 + high) * adv)
    return max(value, dual * adv) if dual is not None and adv < 0 else value


def tokens(members):
    """Every chosen token: (trajectory, turn, number of the turn, index in the turn)."""
    return [(m, turn, t, j) for m in members for t, turn in enumerate(m["turns"]) for j in range(len(turn["slots"]))]


def returns_to_go(rewards, gamma):
    out, later = [], 0.0
    for reward in reversed(rewards):
        later = reward + gamma * later
        out.append(later)
    return out[::-1]


def payments(member, value):
    """What each turn was paid; what the outcome holds beyond it falls to the last turn."""
    paid = [turn["reward"] or 0.0 for turn in member["turns"]]
    paid[-1] += value - sum(paid)
    return paid


def token_term(turn, j, adv, *, low=0.2, high=0.2, dual=None, beta=0.0, kind="k3"):
    ratio = math.exp(turn["logp"][j] - turn["old"][j])
    penalty = beta * kl(kind, turn["logp"][j], turn["ref"][j]) if beta else 0.0
    return clipped(ratio, adv, low, high, dual) - penalty


def token_mean(members, adv_of, **settings):
    every = tokens(members)
    return -mean([token_term(turn, j, adv_of(m, t, j), **settings) for m, turn, t, j in every]) if every else 0.0


# Members ----------------------------------------------------------------------------------------------


def flow_grpo(trajectories):
    """Query, then trajectory, then turn, then token: the equation of the paper, mean inside mean."""
    members = taking_part(trajectories)
    adv = over_groups(members, zscores)

    def of_turn(turn, m):
        return mean([token_term(turn, j, adv[id(m)], beta=0.05) for j in range(len(turn["slots"]))])

    return -mean_over_groups(members, lambda m: mean([of_turn(turn, m) for turn in m["turns"] if turn["slots"]]))


def flow_grpo_released(trajectories):
    members = taking_part(trajectories)
    adv = {}
    for group in by_group(members):
        rows = [(m, t) for m in group for t in range(len(m["turns"]))]
        for (m, t), z in zip(rows, zscores([m["outcome"] for m, _ in rows]), strict=True):
            adv[id(m), t] = z
    return token_mean(members, lambda m, t, _: adv[id(m), t], low=0.2, high=0.3, dual=3.0, beta=0.05)


def grpo(trajectories):
    members = taking_part(trajectories)
    adv = over_groups(members, zscores)
    return -mean_over_groups(
        members, lambda m: mean([token_term(turn, j, adv[id(m)], beta=0.04) for _, turn, _, j in tokens([m])])
    )


def dr_grpo(trajectories, max_tokens=20):
    members = taking_part(trajectories)
    adv = over_groups(members, centred)
    total = sum(token_term(turn, j, adv[id(m)]) for m, turn, _, j in tokens(members))
    return -total / (len(members) * max_tokens)


def dapo(trajectories):
    members = taking_part(trajectories, mixed=True)
    adv = over_groups(members, zscores, lambda m: m["outcome"] - overlong(m, 20, 10))
    return token_mean(members, lambda m, *_: adv[id(m)], low=0.2, high=0.28)


def gspo(trajectories):
    members = taking_part(trajectories)
    adv = over_groups(members, zscores)
    per_query = []
    for group in by_group(members):
        actions = [(m, turn) for m in group for turn in m["turns"] if turn["slots"]]
        ratios = [math.exp(mean([a - b for a, b in zip(t["logp"], t["old"], strict=True)])) for _, t in actions]
        terms = [clipped(ratio, adv[id(m)], 0.1, 0.1) for (m, _), ratio in zip(actions, ratios, strict=True)]
        per_query.append(mean(terms))
    return -mean(per_query)


def cispo(trajectories):
    members = taking_part(trajectories)
    adv = over_groups(members, zscores)
    terms = [
        clip(math.exp(turn["frozen"][j] - turn["old"][j]), 0.0, 1.2) * adv[id(m)] * turn["logp"][j]
        for m, turn, _, j in tokens(members)
    ]
    return -mean(terms)


def rloo(trajectories):
    members = taking_part(trajectories)

    def paid(m):
        return m["outcome"] - sum(0.05 * kl("k1", t["old"][j], t["ref"][j]) for _, t, _, j in tokens([m]))

    adv = over_groups(members, others, paid)
    return -mean_over_groups(
        members, lambda m: sum(math.exp(t["logp"][j] - t["old"][j]) * adv[id(m)] for _, t, _, j in tokens([m]))
    )


def whitened_returns(members, *, baseline, price):
    values = {}
    base = over_groups(members, centred)
    for m in members:
        to_go = returns_to_go(payments(m, m["outcome"]), 1.0)
        later = returns_to_go([price * kl("k1", t["old"][j], t["ref"][j]) for _, t, _, j in tokens([m])], 1.0)
        shift = base[id(m)] - m["outcome"] if baseline else 0.0
        for (_, _, t, j), cost in zip(tokens([m]), later, strict=True):
            values[id(m), t, j] = to_go[t] + shift - cost
    return dict(zip(values, zscores(list(values.values())), strict=True))


def reinforce_pp(trajectories):
    members = taking_part(trajectories)
    adv = whitened_returns(members, baseline=False, price=0.05)
    return token_mean(members, lambda m, t, j: adv[id(m), t, j])


def reinforce_pp_baseline(trajectories):
    members = taking_part(trajectories)
    adv = whitened_returns(members, baseline=True, price=0.0)
    return token_mean(members, lambda m, t, j: adv[id(m), t, j], beta=0.05, kind="k2")


def gigpo(trajectories, omega=1.0, gamma=0.95):
    members = taking_part(trajectories)
    episode = over_groups(members, zscores)
    states = defaultdict(list)
    for m in members:
        for t, value in enumerate(returns_to_go(payments(m, m["outcome"]), gamma)):
            states[m["group"], m["turns"][t]["anchor"]].append((m, t, value))
    step = {}
    for rows in states.values():
        for (m, t, _), z in zip(rows, zscores([value for *_, value in rows]), strict=True):
            step[id(m), t] = z
    return token_mean(members, lambda m, t, _: episode[id(m)] + omega * step[id(m), t], beta=0.01)


def kimi(trajectories, tau=0.5):
    members = taking_part(trajectories)
    adv = over_groups(members, centred)

    def gain(m):
        logp = sum(turn["logp"][j] for _, turn, _, j in tokens([m]))
        drift = sum(turn["logp"][j] - turn["old"][j] for _, turn, _, j in tokens([m]))
        return adv[id(m)] * logp - tau / 2 * drift**2

    return -mean_over_groups(members, gain)


def gae(rewards, values, last_value, gamma, lam):
    adv, out, after = 0.0, [], last_value
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        adv = reward + gamma * after - value + gamma * lam * adv
        out.append(adv)
        after = value
    return out[::-1]


def ppo(trajectories, *, gamma=1.0, lam=0.95, beta=0.001, turns=False):
    members = taking_part(trajectories)
    adv, target = {}, {}
    for m in members:
        paid, last = payments(m, m["outcome"]), m["last_value"] if m["cut"] else 0.0
        price = [[beta * kl("k1", t["old"][j], t["ref"][j]) for j in range(len(t["slots"]))] for t in m["turns"]]
        if turns:
            values = [turn["value_old"][0] for turn in m["turns"]]
            steps = gae([p - sum(c) for p, c in zip(paid, price, strict=True)], values, last, gamma, lam)
            for _, _, t, j in tokens([m]):
                adv[id(m), t, j], target[id(m), t, j] = steps[t], steps[t] + values[t]
            continue
        values = [turn["value_old"][j] for _, turn, _, j in tokens([m])]
        rewards = [-price[t][j] + (paid[t] if j == len(turn["slots"]) - 1 else 0.0) for _, turn, t, j in tokens([m])]
        steps = gae(rewards, values, last, gamma, lam)
        for (_, _, t, j), step, value in zip(tokens([m]), steps, values, strict=True):
            adv[id(m), t, j], target[id(m), t, j] = step, step + value
    adv = dict(zip(adv, zscores(list(adv.values())), strict=True))
    policy = token_mean(members, lambda m, t, j: adv[id(m), t, j])
    squares = []
    for m, turn, t, j in tokens(members):
        value, old, goal = turn["value"][j], turn["value_old"][j], target[id(m), t, j]
        near = old + clip(value - old, -0.2, 0.2)
        squares.append(0.5 * max((value - goal) ** 2, (near - goal) ** 2))
    return policy + 0.5 * mean(squares)


def ppo_turns(trajectories):
    return ppo(trajectories, gamma=0.9, turns=True)


def dpo(trajectories, beta=0.1):
    losses = []
    for group in by_group(taking_part(trajectories)):
        best = max(group, key=lambda m: m["outcome"])
        worst = min(group, key=lambda m: m["outcome"])
        if best["outcome"] > worst["outcome"]:
            gains = [sum(t["logp"][j] - t["ref"][j] for _, t, _, j in tokens([m])) for m in (best, worst)]
            losses.append(math.log1p(math.exp(-beta * (gains[0] - gains[1]))))
    return mean(losses) if losses else 0.0
