"""lookup in words: worked episodes over a small knowledge base, its limits, its splits, its demonstrations."""

from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import run_module

import flowgrpo as fg
from experiments.plays import draw_tasks, tabulate
from flowgrpo.envs.env import in_words, story
from flowgrpo.envs.lookup import Task, World, is_right
from flowgrpo.envs.play import PLAYERS, Play, play_many, transcript
from flowgrpo.learner.warmstart import act_by_oracle, demonstrate

ROOT = Path(__file__).parent.parent.parent
WORLD = World(entities=8)  # ada bo cy dee eli fay gus hal
LYING, SILENT = fg.lookup(entities=8, lies=1.0), fg.lookup(entities=8, lies=0.0)
STEPS = {env: jax.jit(env.step) for env in (LYING, SILENT)}

# Relations go round the tools: registry friend and doctor, archive boss and tenant, gazette mentor, directory rival.
RIGHT = {"friend": "registry", "doctor": "registry", "boss": "archive", "tenant": "archive"}
RIGHT |= {"mentor": "gazette", "rival": "directory"}


def index(word: str, env: fg.Env = LYING) -> int:
    return env.words.index(word)


def tokens_of(line: str) -> tuple:
    """A line of words as an action: four slots, and how many are used."""
    ids = [index(word) for word in line.split()]
    return jnp.asarray([*ids, 0, 0, 0, 0][:4], jnp.int32), jnp.int32(len(ids))


def question(start: str, *relations: str) -> Task:
    """Everybody's relation number r is the person 1 + r places further on: ada's friend is bo, her boss is cy."""
    facts = (jnp.arange(8)[:, None] + 1 + jnp.arange(6)[None, :]) % 8
    chain = [index(relation) - WORLD.first_relation for relation in relations]
    start_index = jnp.int32(index(start) - WORLD.first_entity)
    return Task(facts, start_index, jnp.asarray([*chain, 0][:3], jnp.int32), jnp.int32(len(chain)), jnp.int32(0))


def run(env: fg.Env, task: Task, *lines: str, seed: int = 0) -> tuple:
    """What was said, and the steps and states, when these lines are played."""
    state, prompt = env.reset(jax.random.key(seed), task)
    said, steps, states = [in_words(env, *prompt)], [], [state]
    for line in lines:
        state, now = STEPS[env](state, *tokens_of(line))
        said.append(in_words(env, *now.observation))
        steps.append(now)
        states.append(state)
    return said, steps, states


# Worked episodes ----------------------------------------------------------------------------------------


def test_an_episode_that_succeeds():
    lines = ["registry friend ada <end>", "archive boss bo <end>", "answer dee <end>"]
    said, steps, _ = run(LYING, question("ada", "friend", "boss"), *lines)
    assert said == ["ada friend boss ?", "bo", "dee", ""]
    assert [bool(now.done) for now in steps] == [False, False, True]
    assert [float(now.reward) for now in steps] == [0.0, 0.0, 1.0]
    assert [int(now.tool) for now in steps] == [0, 1, -1]
    assert not any(now.error for now in steps)


def test_three_hops_and_a_wrong_answer():
    lines = ["registry friend ada <end>", "archive boss bo <end>", "gazette mentor dee <end>", "answer hal <end>"]
    said, steps, _ = run(LYING, question("ada", "friend", "boss", "mentor"), *lines)
    assert said == ["ada friend boss mentor ?", "bo", "dee", "gus", ""]
    assert (bool(steps[-1].done), bool(steps[-1].correct), float(steps[-1].reward)) == (True, False, 0.0)


@pytest.mark.parametrize(("relation", "right"), RIGHT.items())
def test_only_the_right_tool_knows_a_relation(relation, right):
    """Asked of each tool in turn: the others say `none` where they don't lie, and never the fact where they do."""
    fact = LYING.words[WORLD.first_entity + 1 + index(relation) - WORLD.first_relation]
    for tool in LYING.tools:
        for env in (LYING, SILENT):
            said, steps, _ = run(env, question("ada", relation, relation), f"{tool} {relation} ada <end>")
            heard = said[1]
            assert (heard == fact) == (tool == right)
            assert (heard == "none") == (tool != right and env is SILENT)
            assert heard != "ada"
            assert (int(steps[0].tool), bool(steps[0].error)) == (LYING.tools.index(tool), False)


def test_a_lie_is_the_same_when_asked_again_and_differs_between_keys():
    """Half of the wrong tools say a wrong entity, by the key of the trajectory; asking twice tells nothing."""
    env = fg.lookup(entities=8)
    task, call = question("ada", "friend", "boss"), tokens_of("gazette friend ada <end>")

    @jax.jit
    @jax.vmap
    def ask_twice(key):
        state, _ = env.reset(key, task)
        state, first = env.step(state, *call)
        return first.observation.tokens[0], env.step(state, *call)[1].observation.tokens[0]

    first, second = map(np.asarray, ask_twice(jax.random.split(jax.random.key(0), 2000)))
    np.testing.assert_array_equal(first, second)
    assert 0.46 < np.mean(first == index("none")) < 0.54
    lies = set(first.tolist()) - {index("none")}
    assert lies == {index(name) for name in ("cy", "dee", "eli", "fay", "gus", "hal")}


def test_a_lie_leads_away_and_the_oracle_back():
    """Following a lie is no progress; the oracle asks for the first fact that isn't known."""
    task = question("ada", "friend", "boss")
    said, _, states = run(LYING, task, "gazette friend ada <end>")
    assert int(states[1].hop) == 0
    assert LYING.words[int(states[1].told) + WORLD.first_entity] == said[1]
    assert in_words(LYING, *LYING.oracle(states[1])) == "registry friend ada <end>"
    _, _, states = run(LYING, task, "registry friend ada <end>")
    assert in_words(LYING, *LYING.oracle(states[1])) == "archive boss bo <end>"
    assert in_words(
        LYING, *LYING.oracle(run(LYING, task, "registry friend ada <end>", "archive boss bo <end>")[2][2])
    ) == ("answer dee <end>")


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


@pytest.mark.parametrize("line", MALFORMED)
def test_a_malformed_action_costs_its_turn_and_nothing_else(line):
    said, steps, states = run(LYING, question("ada", "friend", "boss"), line)
    assert said[1] == "error"
    assert (bool(steps[0].error), int(steps[0].tool), bool(steps[0].done)) == (True, -1, False)
    assert int(states[1].turn) == 1
    assert LYING.anchor(states[1]) == LYING.anchor(states[0])


def test_what_follows_the_end_is_not_read():
    """An answer takes three tokens, whatever lies in the fourth slot."""
    state, _ = LYING.reset(jax.random.key(0), question("ada", "friend", "boss"))
    tokens, length = tokens_of("answer dee <end>")
    _, now = STEPS[LYING](state, tokens.at[3].set(5), length)
    assert now.correct


@pytest.mark.parametrize(("relations", "limit"), [(("friend", "boss"), 4), (("friend", "boss", "rival"), 6)])
def test_two_turns_a_hop(relations, limit):
    """The last turn ends the episode without a word; an answer in it still counts."""
    task = question("ada", *relations)
    said, steps, _ = run(SILENT, task, *["gazette friend ada <end>"] * (limit + 1))
    assert [bool(now.done) for now in steps] == [False] * (limit - 1) + [True, True]
    assert said[1:] == ["none"] * (limit - 1) + ["", ""]
    assert not any(now.correct for now in steps)
    answer = "answer dee <end>" if limit == 4 else "answer hal <end>"
    assert run(SILENT, task, *["gazette friend ada <end>"] * (limit - 1), answer)[1][-1].correct


def test_anchors_tell_progress_apart_and_not_the_turn_or_the_key():
    task = question("ada", "friend", "boss")
    wait, right, lie = "directory friend ada <end>", "registry friend ada <end>", "gazette friend ada <end>"
    anchors = [
        [int(SILENT.anchor(state)) for state in run(SILENT, task, *lines)[2]] for lines in ([wait, right], [right])
    ]
    assert anchors[0][0] == anchors[0][1] == anchors[1][0]
    assert anchors[0][2] == anchors[1][1] != anchors[1][0]
    assert LYING.anchor(run(LYING, task, lie)[2][1]) != LYING.anchor(run(LYING, task, right)[2][1])
    other = run(SILENT, task.replace(identity=jnp.int32(1)))[2][0]
    assert SILENT.anchor(other) != anchors[0][0]


# Tasks --------------------------------------------------------------------------------------------------


@cache
def tasks_of(split: str) -> Task:
    return draw_tasks(fg.lookup(), split, count=5000)


def chains(split: str) -> set[tuple[int, ...]]:
    tasks = tasks_of(split)
    return {
        tuple(chain[:hops])
        for chain, hops in zip(np.asarray(tasks.chain).tolist(), np.asarray(tasks.hops), strict=True)
    }


@pytest.mark.slow
def test_the_splits_deal_all_chains_and_training_covers_every_part():
    """168, 42 and 42 of 252; every relation at every place, and every pair of successive ones, occurs in training."""
    found = {split: chains(split) for split in ("train", "validation", "test")}
    assert {split: len(held) for split, held in found.items()} == {"train": 168, "validation": 42, "test": 42}
    assert len(set.union(*found.values())) == 252
    for held in found.values():
        assert {(len(c), place, c[place]) for c in held for place in range(len(c))} == {
            (size, place, relation) for size in (2, 3) for place in range(size) for relation in range(6)
        }
    pairs = {(place, chain[place : place + 2]) for chain in found["train"] for place in range(len(chain) - 1)}
    assert len(pairs) == 2 * 36


@pytest.mark.slow
def test_a_knowledge_base_says_nothing_without_a_tool():
    """It is drawn anew for each task and split, nobody is his own relation, and every other entity is as likely."""
    tasks = tasks_of("train")
    facts = np.asarray(tasks.facts)
    assert (facts != np.arange(16)[:, None]).all()
    away = np.bincount(((facts - np.arange(16)[:, None]) % 16).ravel(), minlength=16) / facts.size
    assert away[0] == 0
    np.testing.assert_allclose(away[1:], 1 / 15, atol=0.003)
    assert (facts != np.asarray(tasks_of("test").facts)).any(axis=(1, 2)).all()
    assert 0.45 < np.mean(np.asarray(tasks.hops) == 2) < 0.55


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"tools": 1}, "tools is 1, but must be at least 2"),
        ({"entities": 2}, "entities is 2"),
        ({"relations": 2}, "relations is 2"),
        ({"hops": (3, 2)}, "hops is"),
        ({"lies": 1.5}, "lies is 1.5, but must lie between 0 and 1"),
    ],
)
def test_settings_out_of_range_are_refused(settings, said):
    with pytest.raises(fg.BadInput, match=said):
        fg.lookup(**settings)


@pytest.mark.slow
def test_other_sizes():
    """More than there are names for; one hop; the oracle still solves it."""
    env = fg.lookup(entities=20, relations=9, tools=6, hops=(1, 4))
    assert env.words[-1] == "entity19"
    assert (env.tools[-1], env.sizes) == ("tool5", fg.Sizes(prompt=6, observation=1, action=4, turns=8))
    plays = play_many(env, PLAYERS["oracle"], draw_tasks(env, "train", count=64))
    assert plays.state.correct.all()
    assert set(np.asarray(plays.task.hops).tolist()) == {1, 2, 3, 4}


# Players ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def demonstrations() -> Play:
    """Eight demonstrations of each of 625 tasks."""
    tasks = jax.tree.map(lambda leaf: jnp.repeat(leaf[:625], 8, axis=0), tasks_of("train"))
    return play_many(fg.lookup(), PLAYERS["demonstrations"], tasks)


@pytest.mark.slow
def test_demonstrations_are_well_formed_and_choose_tools_nearly_at_chance(demonstrations):
    found = tabulate(fg.lookup(), demonstrations)
    assert 12 <= found["success"] <= 25
    assert found["errors"] == 0
    assert 25 < found["right tool"] <= 1.5 * 25
    assert {2, 3, 4, 5, 6} <= set(np.asarray(demonstrations.live).sum(axis=1).tolist())


@pytest.mark.slow
def test_groups_of_eight_mostly_differ_in_outcome(demonstrations):
    """What group statistics need: the same task under eight keys is mostly neither lost nor won by all."""
    wins = np.asarray(demonstrations.state.correct).reshape(-1, 8).sum(axis=1)
    assert np.mean((wins > 0) & (wins < 8)) > 0.6


@pytest.mark.slow
def test_the_right_tool_is_what_makes_a_demonstration_succeed():
    """The same demonstrations with knowledge of the tools: almost all that is left to learn is which tool."""
    env = fg.lookup(skill=1.0)
    plays = play_many(env, PLAYERS["demonstrations"], jax.tree.map(lambda leaf: leaf[:1000], tasks_of("train")))
    assert 0.7 < np.mean(plays.state.correct) < 0.9


def test_is_right_looks_at_the_relation_that_is_asked_for():
    right = partial(is_right, world=WORLD)
    assert right(*tokens_of("archive boss hal <end>"))
    assert not right(*tokens_of("registry boss hal <end>"))
    assert not right(*tokens_of("archive boss hal"))
    assert not right(*tokens_of("answer hal <end>"))


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


def test_a_transcript_is_in_words(demonstrations):
    line = transcript(fg.lookup(), demonstrations, 0).splitlines()
    assert line[0].split()[-1] == "?"
    assert all(row.startswith("    ") for row in line[1:])


@pytest.mark.slow
def test_a_story_says_who_said_what():
    """Of an oracle's trajectory: what was said before the arrow, what was chosen after it, and how it ended."""
    tasks = jax.tree.map(lambda leaf: leaf[None], question("ada", "friend", "boss"))
    played = demonstrate(SILENT, tasks, jax.random.split(jax.random.key(0), 1), act=act_by_oracle(SILENT))
    assert [line.split(" > ") for line in story(SILENT, played, 0).splitlines()] == [
        ["ada friend boss ?".ljust(30), "registry friend ada <end>"],
        ["bo".ljust(30), "archive boss bo <end>"],
        ["dee".ljust(30), "answer dee <end>"],
        ["solved"],
    ]
