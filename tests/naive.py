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
    x, out = case.trajectories, []
    fields = {"logp": case.logp, "frozen": case.logp, "entropy": case.entropy, "value": case.value}
    fields |= {"old": x.logp_old, "mu": x.logp_sampled, "ref": x.logp_ref, "value_old": x.value}
    for i, status in enumerate(x.status):
        member = {name: getattr(x, name)[i].item() for name in ("group", "outcome", "correct", "last_value")}
        out.append(member | {"valid": status <= 4, "cut": status in {1, 2}, "turns": []})
        for t in np.flatnonzero(x.turns[i]):
            slots = np.flatnonzero(x.chosen[i, t]).tolist()
            turn = {"slots": slots, "anchor": int(x.anchor[i, t]), "reward": x.reward[i, t].item() * bool(x.by_turn[i])}
            out[-1]["turns"].append(turn | {name: x_ntl[i, t, slots].tolist() for name, x_ntl in fields.items()})
    return out


# Statistics -------------------------------------------------------------------------------------------


def mean(xs):
    return sum(xs) / len(xs)


def zscores(xs, eps=1e-6):
    if max(xs) == min(xs):
        return [0.0] * len(xs)
    deviation = math.sqrt(sum((x - mean(xs)) ** 2 for x in xs) / (len(xs) - 1))
    return [(x - mean(xs)) / (deviation + eps) for x in xs]


def centred(xs):
    return [x - mean(xs) if max(xs) != min(xs) else 0.0 for x in xs]


def others(xs):
    return [x - (sum(xs) - x) / (len(xs) - 1) if max(xs) != min(xs) else 0.0 for x in xs]


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


def taking_part(trajectories):
    return [m for m in trajectories if m["valid"]]


def credited(trajectories, normalize=zscores):
    members = taking_part(trajectories)
    return members, over_groups(members, normalize)


def tokens(members):
    """Every chosen token: (trajectory, turn, number of the turn, index in the turn)."""
    return [(m, turn, t, j) for m in members for t, turn in enumerate(m["turns"]) for j in range(len(turn["slots"]))]


def kl(kind, turn, j, logp="old"):
    d = turn["ref"][j] - turn[logp][j]
    return {"k1": -d, "k2": d * d / 2, "k3": math.exp(d) - d - 1}[kind]


def clip(x, low, high):
    return min(max(x, low), high)


def clipped(ratio, adv, low, high, dual=None):
    value = min(ratio * adv, clip(ratio, 1 - low, 1 + high) * adv)
    return max(value, dual * adv) if dual is not None and adv < 0 else value


def token_term(turn, j, adv, *, low=0.2, high=0.2, dual=None, beta=0.0, kind="k3"):
    ratio = math.exp(turn["logp"][j] - turn["old"][j])
    return clipped(ratio, adv, low, high, dual) - beta * kl(kind, turn, j, "logp")


def token_mean(members, adv_of, **settings):
    chosen_tokens = tokens(members)
    return (
        -mean([token_term(turn, j, adv_of(m, t, j), **settings) for m, turn, t, j in chosen_tokens])
        if chosen_tokens
        else 0.0
    )


def returns_to_go(rewards, gamma):
    out, later = [], 0.0
    for reward in reversed(rewards):
        later = reward + gamma * later
        out.append(later)
    return out[::-1]


def turn_rewards(member):
    """Reward of each turn; the rest of the outcome is the last turn's."""
    rewards = [turn["reward"] for turn in member["turns"]]
    rewards[-1] += member["outcome"] - sum(rewards)
    return rewards


# Members ----------------------------------------------------------------------------------------------


def flow_grpo(trajectories):
    """Query, then trajectory, then turn, then token: the equation of the paper, mean inside mean."""
    members, adv = credited(trajectories)

    def of_turn(turn, m):
        return mean([token_term(turn, j, adv[id(m)], beta=0.05) for j in range(len(turn["slots"]))])

    return -mean_over_groups(members, lambda m: mean([of_turn(turn, m) for turn in m["turns"] if turn["slots"]]))


def flow_grpo_released(trajectories):
    members, adv = taking_part(trajectories), {}
    for group in by_group(members):
        rows = [(m, t) for m in group for t in range(len(m["turns"]))]
        adv |= {(id(m), t): z for (m, t), z in zip(rows, zscores([m["outcome"] for m, _ in rows]), strict=True)}
    return token_mean(members, lambda m, t, _: adv[id(m), t], low=0.2, high=0.3, dual=3.0, beta=0.05)


def grpo(trajectories):
    members, adv = credited(trajectories)
    return -mean_over_groups(
        members, lambda m: mean([token_term(turn, j, adv[id(m)], beta=0.04) for _, turn, _, j in tokens([m])])
    )


def dr_grpo(trajectories, max_tokens=20):
    members, adv = credited(trajectories, centred)
    total = sum(token_term(turn, j, adv[id(m)]) for m, turn, _, j in tokens(members))
    return -total / (len(members) * max_tokens)


def dapo(trajectories, limit=20, buffer=10):
    groups = by_group(taking_part(trajectories))
    members = [m for group in groups if 0 < sum(m["correct"] for m in group) < len(group) for m in group]
    over = {id(m): clip((len(tokens([m])) - (limit - buffer)) / buffer, 0.0, 1.0) for m in members}
    adv = over_groups(members, zscores, lambda m: m["outcome"] - over[id(m)])
    return token_mean(members, lambda m, *_: adv[id(m)], low=0.2, high=0.28)


def gspo(trajectories):
    (members, adv), per_query = credited(trajectories), []
    for group in by_group(members):
        actions = [(m, turn) for m in group for turn in m["turns"] if turn["slots"]]
        ratios = [math.exp(mean([a - b for a, b in zip(t["logp"], t["old"], strict=True)])) for _, t in actions]
        terms = [clipped(ratio, adv[id(m)], 0.1, 0.1) for (m, _), ratio in zip(actions, ratios, strict=True)]
        per_query.append(mean(terms))
    return -mean(per_query)


def cispo(trajectories):
    members, adv = credited(trajectories)

    chosen_tokens = tokens(members)
    ratios = [clip(math.exp(turn["frozen"][j] - turn["old"][j]), 0.0, 1.2) for _, turn, _, j in chosen_tokens]
    return -mean(
        [ratio * adv[id(m)] * turn["logp"][j] for ratio, (m, turn, _, j) in zip(ratios, chosen_tokens, strict=True)]
    )


def rloo(trajectories):
    members = taking_part(trajectories)
    adv = over_groups(
        members, others, lambda m: m["outcome"] - 0.05 * sum(kl("k1", t, j) for _, t, _, j in tokens([m]))
    )
    return -mean_over_groups(
        members, lambda m: sum(math.exp(t["logp"][j] - t["old"][j]) * adv[id(m)] for _, t, _, j in tokens([m]))
    )


def reinforce_pp(trajectories, *, baseline=False, price=0.05, **settings):
    members, values = taking_part(trajectories), {}
    base = over_groups(members, centred)
    for m in members:
        to_go = returns_to_go(turn_rewards(m), 1.0)
        later = returns_to_go([price * kl("k1", t, j) for _, t, _, j in tokens([m])], 1.0)
        shift = base[id(m)] - m["outcome"] if baseline else 0.0
        for (_, _, t, j), cost in zip(tokens([m]), later, strict=True):
            values[id(m), t, j] = to_go[t] + shift - cost
    adv = dict(zip(values, zscores(list(values.values())), strict=True))
    return token_mean(members, lambda m, t, j: adv[id(m), t, j], **settings)


def reinforce_pp_baseline(trajectories):
    return reinforce_pp(trajectories, baseline=True, price=0.0, beta=0.05, kind="k2")


def gigpo(trajectories, omega=1.0, gamma=0.95):
    (members, episode), states, step = credited(trajectories), defaultdict(list), {}
    for m in members:
        for t, value in enumerate(returns_to_go(turn_rewards(m), gamma)):
            states[m["group"], m["turns"][t]["anchor"]].append((m, t, value))
    for rows in states.values():
        step |= {(id(m), t): z for (m, t, _), z in zip(rows, zscores([value for *_, value in rows]), strict=True)}
    return token_mean(members, lambda m, t, _: episode[id(m)] + omega * step[id(m), t], beta=0.01)


def mt_grpo(trajectories, lam=0.5):
    (members, adv), final = (taking_part(trajectories), {}), {}
    for group in by_group(members):
        reward_of = {id(m): turn_rewards(m) for m in group}
        final |= zip(map(id, group), zscores([reward_of[id(m)][-1] for m in group]), strict=True)
        steps = defaultdict(dict)  # by turn: {trajectory: z-score of its reward, unless the turn is its last}
        for t in range(max(len(m["turns"]) for m in group)):
            onward = [m for m in group if t < len(m["turns"]) - 1]
            if onward:
                scores = zscores([reward_of[id(m)][t] for m in onward])
                steps[t] = dict(zip(map(id, onward), scores, strict=True))
        for m in group:
            last = len(m["turns"]) - 1
            for t in range(last + 1):
                later = sum(steps[k][id(m)] for k in range(t, last))
                adv[id(m), t] = later + (1.0 if t == last else lam) * final[id(m)]
    return token_mean(members, lambda m, t, _: adv[id(m), t], beta=0.04)


def trloo(trajectories, gamma=0.9):
    members, adv = taking_part(trajectories), {}
    for group in by_group(members):
        to_go = {id(m): returns_to_go(turn_rewards(m), gamma) for m in group}
        for t in range(max(len(m["turns"]) for m in group)):
            there = [m for m in group if t < len(m["turns"])]
            values = [to_go[id(m)][t] for m in there]
            alone = len(there) == 1
            adv |= {(id(m), t): z for m, z in zip(there, [0.0] if alone else others(values), strict=True)}
    return token_mean(members, lambda m, t, _: adv[id(m), t])


def kimi(trajectories, tau=0.5):
    members, adv = credited(trajectories, centred)

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
    """GAE over tokens or, with `turns`, over turns, whose value is that before their first token."""
    members, adv, target = taking_part(trajectories), {}, {}
    for m in members:
        reward, places = turn_rewards(m), [(t, j) for _, _, t, j in tokens([m])]
        price = {(t, j): beta * kl("k1", m["turns"][t], j) for t, j in places}
        steps = {t: (t, 0) for t, _ in places} if turns else {place: place for place in places}
        values = [m["turns"][t]["value_old"][j] for t, j in steps.values()]
        if turns:
            rewards = [reward[t] - sum(price[place] for place in places if place[0] == t) for t in steps]
        else:
            ends = {t: (t, j) for t, j in places}
            rewards = [reward[place[0]] * (ends[place[0]] == place) - price[place] for place in places]
        estimates = dict(zip(steps, gae(rewards, values, m["last_value"] * m["cut"], gamma, lam), strict=True))
        value_of = dict(zip(steps, values, strict=True))
        for place in places:
            step = place[0] if turns else place
            adv[id(m), *place], target[id(m), *place] = estimates[step], estimates[step] + value_of[step]
    white = dict(zip(adv, zscores(list(adv.values())), strict=True))
    squares = []
    for m, turn, t, j in tokens(members):
        value, old, goal = turn["value"][j], turn["value_old"][j], target[id(m), t, j]
        near = old + clip(value - old, -0.2, 0.2)
        squares.append(0.5 * max((value - goal) ** 2, (near - goal) ** 2))
    return token_mean(members, lambda m, t, j: white[id(m), t, j]) + 0.5 * mean(squares)


def ppo_turns(trajectories):
    return ppo(trajectories, gamma=0.9, turns=True)


def dpo(trajectories, beta=0.1):
    losses = []
    for group in by_group(taking_part(trajectories)):
        best, worst = (choose(group, key=lambda m: m["outcome"]) for choose in (max, min))
        if best["outcome"] > worst["outcome"]:
            gains = [sum(t["logp"][j] - t["ref"][j] for _, t, _, j in tokens([m])) for m in (best, worst)]
            losses.append(math.log1p(math.exp(-beta * (gains[0] - gains[1]))))
    return mean(losses) if losses else 0.0


def opd(trajectories, outcome=0.5, dead_only=False):
    """The teacher's log-ratio of each token, in a mean over queries, trajectories, turns and tokens."""
    members, adv = credited(trajectories)
    dead = {id(m): len({n["outcome"] for n in group}) == 1 for group in by_group(members) for m in group}

    def gain(m, turn, j):
        taught = turn["ref"][j] - turn["old"][j] if dead[id(m)] or not dead_only else 0.0
        return math.exp(turn["logp"][j] - turn["old"][j]) * (taught + outcome * adv[id(m)])

    def of_turn(m, turn):
        return mean([gain(m, turn, j) for j in range(len(turn["slots"]))])

    return -mean_over_groups(members, lambda m: mean([of_turn(m, turn) for turn in m["turns"] if turn["slots"]]))


def opd_dead_only(trajectories):
    return opd(trajectories, dead_only=True)
