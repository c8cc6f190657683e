"""lookup in words: worked episodes over a small knowledge base, its limits, its tasks, its demonstrations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import run_module
from env_cases import ENVS, at, batched, keys, play, played, player, repeated, row, talk, talks, tasks_of, to_numpy

import flowgrpo as fg
from flowgrpo.envs.env import SPLITS, format_trajectory
from flowgrpo.envs.lookup import FIRST_TOOL, LookupTask, World, calls_right_tool
from flowgrpo.envs.play import transcript
from flowgrpo.learner.imitation import act_by_oracle, demonstrate
from flowgrpo.recipes.pure import episode_metrics

ENV = ENVS["lookup"]
WORLD = World(entities=8)  # ada bo cy dee eli fay gus hal
LYING, SILENT = fg.lookup(entities=8, lies=1.0), fg.lookup(entities=8, lies=0.0)

# Relations go round the tools: registry friend and doctor, archive boss and tenant, gazette mentor, directory rival.
RIGHT = {"friend": "registry", "doctor": "registry", "boss": "archive", "tenant": "archive"}
RIGHT |= {"mentor": "gazette", "rival": "directory"}


def question(start: str, *relations: str) -> LookupTask:
    """Everybody's relation number r is the person 1 + r places further on: ada's friend is bo, her boss is cy."""
    facts = (np.arange(8)[:, None] + 1 + np.arange(6)[None, :]) % 8
    chain = [LYING.vocabulary.index(relation) - WORLD.first_relation for relation in relations]
    start_index = np.int32(LYING.vocabulary.index(start) - WORLD.first_entity)
    chain_h = np.array([*chain, 0][:3], np.int32)
    return LookupTask(facts.astype(np.int32), start_index, chain_h, np.int32(len(chain)), np.int32(0))


FRIENDS_BOSS = question("ada", "friend", "boss")


# Worked episodes ----------------------------------------------------------------------------------------


def test_an_episode_that_succeeds_and_a_longer_one_that_does_not():
    found = talk(LYING, FRIENDS_BOSS, "registry friend ada", "archive boss bo", "answer dee")
    assert found.said == ["ada friend boss ?", "bo", "dee", ""]
    assert found.best[:3] == ["registry friend ada <end>", "archive boss bo <end>", "answer dee <end>"]
    assert [(float(now.reward), bool(now.done)) for now in found.steps] == [(0.0, False), (0.0, False), (1.0, True)]
    assert [int(now.tool) for now in found.steps] == [0, 1, -1]
    assert not any(now.error for now in found.steps)
    task, lines = question("ada", "friend", "boss", "mentor"), ("archive boss bo", "gazette mentor dee", "answer hal")
    found = talk(LYING, task, "registry friend ada", *lines)
    assert found.said == ["ada friend boss mentor ?", "bo", "dee", "gus", ""]
    last = found.steps[-1]
    assert (bool(last.done), bool(last.correct), float(last.reward)) == (True, False, 0.0)


@pytest.mark.parametrize("env", [LYING, SILENT], ids=["lying", "silent"])
def test_only_the_right_tool_knows_a_relation(env):
    """Asked of each tool in turn: the others say `none` where they don't lie, and never the fact where they do."""
    calls = [(tool, relation) for tool in env.tools for relation in RIGHT]
    for (tool, relation), found in zip(
        calls, talks(env, FRIENDS_BOSS, *([f"{tool} {relation} ada"] for tool, relation in calls)), strict=True
    ):
        fact, heard = (
            env.vocabulary[WORLD.first_entity + 1 + list(env.vocabulary).index(relation) - WORLD.first_relation],
            found.said[1],
        )
        assert (heard == fact) == (tool == RIGHT[relation])
        assert (heard == "none") == (tool != RIGHT[relation] and env is SILENT)
        assert heard != "ada"
        assert (env.tools[found.steps[0].tool], bool(found.steps[0].error)) == (tool, False)


@pytest.mark.slow
def test_a_lie_is_the_same_when_asked_again_and_differs_between_keys():
    """Half of the wrong tools say a wrong entity, by the key of the trajectory; asking twice tells nothing."""
    env = fg.lookup(entities=8)
    here, call = batched(env), repeated(row(env, "gazette friend ada <end>"))
    state, _ = here.reset(keys(0), repeated(FRIENDS_BOSS))
    state, first = here.step(state, *call)
    _, second = here.step(state, *call)
    heard = [env.vocabulary[token] for token in np.asarray(first.observation.tokens)[:, 0]]
    np.testing.assert_array_equal(first.observation.tokens, second.observation.tokens)
    assert 0.46 < np.mean([word == "none" for word in heard]) < 0.54
    assert set(heard) == {"none", "cy", "dee", "eli", "fay", "gus", "hal"}


def test_a_lie_leads_away_and_the_oracle_back():
    """Following a lie is no progress; the oracle asks for the first fact that isn't known."""
    found = talk(LYING, FRIENDS_BOSS, "gazette friend ada")
    assert found.state.hop == 0
    assert LYING.vocabulary[found.state.believed_entity + WORLD.first_entity] == found.said[1]
    assert found.best == ["registry friend ada <end>"] * 2


MALFORMED = [
    "",
    "registry",
    "registry friend ada",
    "registry friend ada ada",
    "friend registry ada <end>",
    "registry ada friend <end>",
    "registry friend friend <end>",
    "registry friend <end>",
    "answer <end>",
    "answer friend <end>",
    "answer ada ada <end>",
    "answer dee",
    "ada <end>",
    "none <end>",
    "? friend ada <end>",
]


def test_a_malformed_action_costs_its_turn_and_nothing_else():
    for found in talks(LYING, FRIENDS_BOSS, *([line] for line in MALFORMED), end=""):
        (now,) = found.steps
        assert (found.said[1], bool(now.error), int(now.tool), bool(now.done)) == ("error", True, -1, False)
        assert found.state.turn == 1
        assert found.anchors[1] == found.anchors[0]


def test_tokens_after_the_end_are_not_read():
    """An answer takes three tokens, whatever lies in the fourth slot."""
    here, (tokens, length) = batched(LYING), row(LYING, "answer dee <end>")
    state, _ = here.reset(keys(0), repeated(FRIENDS_BOSS))
    tokens[3] = 5
    assert here.step(state, *repeated((tokens, np.int32(length))))[1].correct.all()


@pytest.mark.parametrize(("relations", "limit"), [(("friend", "boss"), 4), (("friend", "boss", "rival"), 6)])
def test_two_turns_a_hop(relations, limit):
    """The last turn ends the episode without a word; an answer in it still counts."""
    wait, right = ["gazette friend ada"] * (limit + 1), "answer dee" if limit == 4 else "answer hal"
    found, solved = talks(SILENT, question("ada", *relations), wait, [*wait[: limit - 1], right])
    assert [bool(now.done) for now in found.steps] == [False] * (limit - 1) + [True, True]
    assert found.said[1:] == ["none"] * (limit - 1) + ["", ""]
    assert not any(now.correct for now in found.steps)
    assert solved.steps[-1].correct


def test_anchors_depend_on_progress_not_on_turn_or_key():
    wait, right, lie = "directory friend ada", "registry friend ada", "gazette friend ada"
    late, early = (found.anchors for found in talks(SILENT, FRIENDS_BOSS, [wait, right], [right]))
    assert late[0] == late[1] == early[0] == talk(SILENT, FRIENDS_BOSS, seed=1).anchors[0]
    assert late[2] == early[1] != early[0]
    assert talk(LYING, FRIENDS_BOSS, lie).anchors[1] != talk(LYING, FRIENDS_BOSS, right).anchors[1]
    assert talk(SILENT, FRIENDS_BOSS.replace(identity=np.int32(1))).anchors[0] != early[0]


# Tasks --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_splits_partition_all_chains_and_training_has_every_pair():
    """168, 42 and 42 of 252; every relation at every place, and every pair of successive ones, occurs in training."""
    found = {}
    for split in SPLITS:
        tasks = [to_numpy(batched(ENV).make_task(keys(seed), split)) for seed in range(4)]
        found[split] = {
            tuple(chain[:hops]) for one in tasks for chain, hops in zip(one.chain.tolist(), one.hops, strict=True)
        }
    assert {split: len(held) for split, held in found.items()} == {"train": 168, "validation": 42, "test": 42}
    assert len(set.union(*found.values())) == 252
    for held in found.values():
        assert {(len(c), place, c[place]) for c in held for place in range(len(c))} == {
            (size, place, relation) for size in (2, 3) for place in range(size) for relation in range(6)
        }
    pairs = {(place, chain[place : place + 2]) for chain in found["train"] for place in range(len(chain) - 1)}
    assert len(pairs) == 2 * 36


def test_tasks_do_not_reveal_their_facts():
    """It is drawn for each task, nobody is his own relation, and every other entity is as likely."""
    tasks = to_numpy(tasks_of(ENV))
    away = np.bincount(((tasks.facts - np.arange(16)[:, None]) % 16).ravel(), minlength=16) / tasks.facts.size
    assert away[0] == 0
    np.testing.assert_allclose(away[1:], 1 / 15, atol=0.005)
    assert (tasks.facts[1:] != tasks.facts[:-1]).any(axis=(1, 2)).all()
    assert 0.45 < np.mean(tasks.hops == 2) < 0.55


@pytest.mark.slow
def test_other_sizes():
    """More than there are names for; one hop; the oracle still solves it."""
    env = fg.lookup(entities=20, relations=9, tools=6, hops=(1, 4))
    assert env.vocabulary[-1] == "entity19"
    assert (env.tools[-1], env.sizes) == ("tool5", fg.Sizes(prompt=6, observation=1, action=4, turns=8))
    plays = played(env, "oracle")
    assert plays.state.correct.all()
    assert set(plays.task.hops.tolist()) == {1, 2, 3, 4}


# Players ------------------------------------------------------------------------------------------------


def test_demonstrations_choose_tools_nearly_at_chance():
    """In most groups of eight trials of a task, some fail and some succeed: groups have a signal."""
    plays = play(
        ENV, player(ENV, "demonstrations"), jax.tree.map(lambda x: jnp.repeat(x[::8], 8, axis=0), tasks_of(ENV))
    )
    found = episode_metrics(ENV, plays)
    assert 12 <= found["success"] <= 25
    assert 25 < found["right tool"] <= 1.5 * 25
    assert {2, 3, 4, 5, 6} <= set(plays.live.sum(axis=1).tolist())
    wins = plays.state.correct.reshape(-1, 8).sum(axis=1)
    assert np.mean((wins > 0) & (wins < 8)) > 0.6


@pytest.mark.slow
def test_demonstrations_that_are_told_the_right_tools_take_them():
    """Half of the tasks begin with a hint, and are the tasks of a world without hints otherwise."""
    env = fg.lookup(hints=0.5, slips=0.0)
    plays, plain = played(env, "demonstrations"), tasks_of(ENV)
    hinted = np.asarray(plays.task.hinted)
    assert 0.4 < hinted.mean() < 0.6
    np.testing.assert_array_equal(plays.task.facts, plain.facts)
    assert plays.state.correct[hinted].all()
    assert plays.state.correct[~hinted].mean() < 0.3
    first = [WORLD.vocabulary[token] for token in np.asarray(plays.prompt.tokens)[np.argmax(hinted)]]
    assert set(first[:2]) <= set(WORLD.vocabulary[FIRST_TOOL : FIRST_TOOL + 4])


def test_a_hop_is_rewarded_once():
    """The oracle is paid for each hop and for the answer; who asks the same again is paid once."""
    env = fg.lookup(hop_reward=0.25)
    plays = play(env, player(env, "oracle"), tasks_of(ENV))
    paid = np.asarray(plays.step.reward).sum(axis=1)
    np.testing.assert_allclose(paid, 1.0 + 0.25 * np.asarray(plays.task.hops))
    assert env.by_turn


@pytest.mark.slow
def test_the_right_tool_is_what_makes_a_demonstration_succeed():
    """Demonstrations that know the tools mostly succeed: almost all that is left to learn is which tool."""
    env = fg.lookup(skill=1.0)
    assert 0.7 < played(env, "demonstrations").state.correct.mean() < 0.9


def test_calls_right_tool_depends_on_the_relation():
    lines = ["archive boss hal <end>", "registry boss hal <end>", "archive boss hal", "answer hal <end>"]
    right = [bool(calls_right_tool(*map(jnp.asarray, row(LYING, line)), world=WORLD)) for line in lines]
    assert right == [True, False, False, False]


@pytest.mark.slow
def test_the_experiment_prints_its_table_and_episodes():
    done = run_module("experiments.environments", "--environments=lookup", "--episodes=50", "--show=1")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("lookup       oracle          success 100.0")
    assert lines[1].endswith(" ?")
    assert "    reward 1" in lines
    done = run_module("experiments.environments", "--environments=loop")
    assert done.returncode != 0
    assert "choose from lookup" in done.stderr + done.stdout


def test_a_transcript_is_in_words():
    plays = played(ENV, "oracle")
    first, *lines = transcript(ENV, plays, 0).splitlines()
    assert first.endswith(" ?")
    assert len(lines) == plays.live[0].sum() + 1
    assert lines[-1] == "    reward 1"
    assert all(line.startswith("    ") and "<end>" in line for line in lines[:-1])


@pytest.mark.slow
def test_a_trajectory_is_formatted_by_turn():
    """Of an oracle's trajectory: what was said before the arrow, what was chosen after it, and how it ended."""
    tasks = at(repeated(FRIENDS_BOSS), slice(1))
    plays = demonstrate(SILENT, tasks, keys(0)[:1], act=act_by_oracle(SILENT))
    assert [line.split(" > ") for line in format_trajectory(SILENT, plays, 0).splitlines()] == [
        ["ada friend boss ?".ljust(30), "registry friend ada <end>"],
        ["bo".ljust(30), "archive boss bo <end>"],
        ["dee".ljust(30), "answer dee <end>"],
        ["solved"],
    ]
