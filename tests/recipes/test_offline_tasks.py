"""The offline tasks: their splits, what solves them, and what the demonstrations of them are like."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from flowgrpo.agent import roles
from flowgrpo.agent.rendering import appending
from flowgrpo.agent.system import agent_system
from flowgrpo.agent.tool_arguments import signature
from flowgrpo.data.tokenizer import load_text
from flowgrpo.models.hf import load_model
from flowgrpo.recipes import registry
from flowgrpo.recipes.agent_config import Config, preset
from flowgrpo.recipes.offline_start import (
    COPYING,
    MADE_WITH,
    ScriptFlaws,
    demonstrate_script,
    note_made,
    script,
    shuffled_batches,
    write_model,
    write_start,
)
from flowgrpo.recipes.offline_tasks import DOMAINS, MAKERS, SPLITS, combinations, make_tasks, passages
from flowgrpo.rollout.demonstrations import play_actions
from flowgrpo.run.config import setting_infos
from flowgrpo.sandbox import Sandbox
from flowgrpo.tools.calculator import calculator
from flowgrpo.tools.python import python
from flowgrpo.tools.search import Corpus, Document, search
from flowgrpo.tools.toolset import toolset
from flowgrpo.types import BadInput

FLAWLESS = ScriptFlaws(0, 0, 0, 0, 0, 0, 0)
MISREADS = replace(FLAWLESS, misread=1)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """(text, environment, do, reward) over the real tools."""
    folder = tmp_path_factory.mktemp("start")
    write_model(folder, [task.query for task in make_tasks(0, 0, 100, "train")], seed=0)
    text = load_text(folder)
    documents = [Document(one["title"], one["text"], "corpus", n, False) for n, one in enumerate(passages(), 1)]
    with Sandbox(workers=2, preload=registry.preload(DOMAINS)) as sandbox:
        tools = [calculator(), python(sandbox, pure=True), search(Corpus(tuple(documents)), top=1)]
        with toolset(tools) as tools:
            env = agent_system(
                text,
                schemas=tools.schemas,
                planner=roles.planner(instructions="Go.", describe=signature),
                turns=5,
                max_tokens=200,
                context_tokens=2000,
                rendering=appending,
            )
            yield text, env, tools.do, registry.route(registry.Means(sandbox=sandbox), default="answer")


def test_a_task_depends_on_seed_place_and_split_alone():
    some, others = make_tasks(3, 0, 24, "train"), make_tasks(3, 8, 8, "train")
    assert some[8:16] == others
    assert make_tasks(4, 0, 8, "train") != some[:8]
    assert make_tasks(3, 0, 8, "test") != some[:8]
    assert len({task.id for task in some}) == 24
    assert [task.domain for task in some[:4]] == list(DOMAINS)


@pytest.mark.parametrize("domain", MAKERS)
def test_no_combination_is_in_two_splits_and_every_split_has_some(domain):
    dealt = [combinations(domain, split) for split in SPLITS]
    assert min(map(len, dealt)) >= 3
    every = [one for part in dealt for one in part]
    assert len(set(every)) == len(every)


def test_parts_of_every_test_combination_of_mathematics_occur_in_training():
    for place in range(3):
        trained = {one[place] for one in combinations("mathematics", "train")}
        assert {one[place] for one in combinations("mathematics", "test")} <= trained


@pytest.mark.parametrize(("given", "said"), [({"split": "dev"}, "split"), ({"domains": ("chess",)}, "chess")])
def test_what_is_unknown_is_refused(given, said):
    with pytest.raises(BadInput, match=said):
        make_tasks(**({"seed": 0, "start": 0, "count": 1, "split": "train"} | given))


def played(world, tasks, flaws):
    """(trajectories of the script with these slips, their answers, what they are paid)."""
    text, env, do, reward = world
    records = [play_actions(env, text, do, task, script(task, np.random.default_rng(0), flaws)) for task in tasks]
    last = [record.turns[-1] for record in records]
    outputs = [text.decode(turn.tokens[turn.chosen][:-1]).split("Context: ", 1)[1] for turn in last]
    return records, outputs, [scored.value for scored in reward.many(tasks, outputs)]


@pytest.mark.slow
@pytest.mark.parametrize("split", SPLITS)
def test_the_script_without_slips_solves_every_task_with_the_real_tools(world, split):
    tasks = make_tasks(11, 0, 40, split)
    records, _, values = played(world, tasks, FLAWLESS)
    assert values == [1.0] * len(tasks)
    assert [len(record.turns) for record in records] == [len(task.metadata["steps"]) + 1 for task in tasks]


@pytest.mark.slow
def test_who_misreads_a_query_answers_what_the_tools_said_and_is_wrong(world):
    """An answer that no tool has said could not be copied from one, which is what demonstrations have to show."""
    text, _, _, _ = world
    tasks = [task for task in make_tasks(11, 0, 80, "train") if task.domain != "drawing"]
    records, outputs, values = played(world, tasks, MISREADS)
    finals = [task.metadata["misread"][1] for task in tasks]
    assert outputs == finals
    solved = [value == 1.0 for value in values]
    assert solved == [task.metadata["final"] == final for task, final in zip(tasks, finals, strict=True)]
    assert sum(solved) < len(tasks) / 10
    for record, output in zip(records, outputs, strict=True):
        heard = text.decode(record.turns[-1].tokens[~record.turns[-1].chosen])
        assert output.split()[-1] in heard


@pytest.mark.slow
def test_a_task_cannot_be_answered_without_its_tools(world):
    """The query does not contain the answer; only drawings are answered at once, and are left out here."""
    reward = world[3]
    tasks = [task for task in make_tasks(5, 0, 80, "test") if task.metadata["steps"]]
    guessed = reward.many(tasks, [task.query for task in tasks])
    assert sum(scored.value == 1.0 for scored in guessed) == 0


@pytest.mark.slow
def test_demonstrations_slip_and_say_what_they_are_in_exact_ids(world):
    text, env, do, _ = world
    tasks = make_tasks(1, 0, 60, "train")
    records = demonstrate_script(env, text, tasks, do, seed=0)
    again = demonstrate_script(env, text, tasks[:7], do, seed=0, workers=1)
    for one, other in zip(records[:7], again, strict=True):
        assert [turn.tokens.tolist() for turn in one.turns] == [turn.tokens.tolist() for turn in other.turns]
    spoken = [text.decode(turn.tokens[turn.chosen]) for record in records for turn in record.turns]
    right = [context for task in tasks for _, context in task.metadata["steps"]]
    assert all(words.endswith("<|im_end|>") for words in spoken)
    assert 0.3 < np.mean([any(context in words for context in right) for words in spoken]) < 0.9


def test_shuffled_batches_visit_every_row_before_any_comes_again():
    import flowgrpo as fg

    turn = fg.Turn(np.arange(1, 5), np.array([False, False, True, True]), np.zeros(4, np.float32))
    records = [fg.Trajectory([turn], 1.0, group) for group in range(12)]
    rows = fg.pack(records, np.zeros((12, 1), np.float32), np.ones((12, 1), np.float32), row_length=4)
    order = shuffled_batches(rows, 4, seed=0)
    seen = np.concatenate([next(order).trajectory[:, 0] for _ in range(3)])
    assert sorted(seen.tolist()) == list(range(12))
    assert jax.tree.leaves(next(order))[0].shape == (4, 4)


def test_a_start_that_other_settings_made_is_refused_and_nothing_is_made_anew(tmp_path):
    def never(*_given, **_settings):
        raise AssertionError("a start that is there was made again")

    config = Config()
    folder = tmp_path / "start"
    folder.mkdir()
    with pytest.raises(BadInput, match=r"made_with\.json can't be read"):
        write_start(folder, never, never, config)
    note_made(folder, {name: config.to_json()[name] for name in MADE_WITH})
    write_start(folder, never, never, replace(config, updates=7))
    with pytest.raises(BadInput, match="was made otherwise: seed: there 0, here 1; turns: there 4, here 5"):
        write_start(folder, never, never, replace(config, seed=1, turns=5))


def test_the_model_that_is_to_copy_comes_back_with_a_window_in_its_first_layer_only(tmp_path):
    write_model(tmp_path / "start", ["Add 31 to 58."], seed=0, shape=COPYING)
    assert load_model(tmp_path / "start").config.windows == (4, None, None)


def test_an_action_that_leaves_no_room_for_a_context_is_refused_by_its_flag():
    with pytest.raises(BadInput, match=r"^--max_tokens=4000 leaves no room .* --context_tokens=256, which holds both$"):
        preset(max_tokens=4000)
    assert set(MADE_WITH) <= set(setting_infos(Config))
