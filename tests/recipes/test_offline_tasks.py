"""The offline tasks: their splits, their solutions, and their demonstrations."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from flowgrpo.agent import roles
from flowgrpo.agent.rendering import growing_context
from flowgrpo.agent.system import AgentLimits, AgentRoles, agent_system
from flowgrpo.data.tokenizer import load_tokenizer
from flowgrpo.data.tool_calls import signature
from flowgrpo.models.hf import load_model
from flowgrpo.recipes import registry
from flowgrpo.recipes.agent_config import Config, preset
from flowgrpo.recipes.offline_start import (
    COPYING_SHAPE,
    MADE_WITH,
    ScriptFlaws,
    demonstrate_script,
    script,
    shuffled_batches,
    write_model,
    write_start_model,
    write_start_settings,
)
from flowgrpo.recipes.offline_tasks import DOMAINS, MAKERS, SPLITS, combinations, make_tasks, passages
from flowgrpo.rollout.demonstrations import play_actions
from flowgrpo.sandbox import Sandbox
from flowgrpo.tools.calculator import calculator
from flowgrpo.tools.python import python
from flowgrpo.tools.search import Corpus, Document, search
from flowgrpo.tools.toolset import toolset
from flowgrpo.training.config import setting_infos
from flowgrpo.types import BadInput

FLAWLESS = ScriptFlaws(0, 0, 0, 0, 0, 0, 0)
MISREADS = replace(FLAWLESS, misread=1)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """(tokenizer, environment, tool runner, reward) with the real tools."""
    folder = tmp_path_factory.mktemp("start")
    write_model(folder, [task.query for task in make_tasks(0, 0, 100, "train")], seed=0)
    text = load_tokenizer(folder)
    documents = [
        Document(passage["title"], passage["text"], "corpus", n, False) for n, passage in enumerate(passages(), 1)
    ]
    with Sandbox(workers=2, preload=registry.modules_to_preload(DOMAINS)) as sandbox:
        tools = [calculator(), python(sandbox, pure=True), search(Corpus(tuple(documents)), top=1)]
        with toolset(tools) as tools:
            env = agent_system(
                text,
                schemas=tools.schemas,
                roles=AgentRoles(planner=roles.planner(instructions="Go.", describe=signature)),
                limits=AgentLimits(turns=5, max_tokens=200, context_tokens=2000),
                rendering=growing_context,
            )
            yield (
                text,
                env,
                tools.call_tool,
                registry.route_by_domain(registry.RewardContext(sandbox=sandbox), default="answer"),
            )


def test_a_task_depends_on_seed_index_and_split_alone():
    some, others = make_tasks(3, 0, 24, "train"), make_tasks(3, 8, 8, "train")
    assert some[8:16] == others
    assert make_tasks(4, 0, 8, "train") != some[:8]
    assert make_tasks(3, 0, 8, "test") != some[:8]
    assert len({task.id for task in some}) == 24
    assert [task.domain for task in some[:4]] == list(DOMAINS)


@pytest.mark.parametrize("domain", MAKERS)
def test_no_combination_is_in_two_splits_and_every_split_has_some(domain):
    splits = [combinations(domain, split) for split in SPLITS]
    assert min(map(len, splits)) >= 3
    pool = [combination for split in splits for combination in split]
    assert len(set(pool)) == len(pool)


def test_parts_of_every_test_combination_of_mathematics_occur_in_training():
    for i in range(3):
        trained = {combination[i] for combination in combinations("mathematics", "train")}
        assert {combination[i] for combination in combinations("mathematics", "test")} <= trained


@pytest.mark.parametrize(("changes", "word"), [({"split": "dev"}, "split"), ({"domains": ("chess",)}, "chess")])
def test_unknown_splits_and_domains_are_refused(changes, word):
    with pytest.raises(BadInput, match=word):
        make_tasks(**({"seed": 0, "start": 0, "count": 1, "split": "train"} | changes))


def run_script(world, tasks, flaws):
    """(trajectories of the script with these flaws, their answers, values of their reward)."""
    text, env, call_tool, reward = world
    records = [
        play_actions(env, text, call_tool, task, script(task, np.random.default_rng(0), flaws)) for task in tasks
    ]
    last = [record.turns[-1] for record in records]
    outputs = [text.decode(turn.tokens[turn.chosen][:-1]).split("Context: ", 1)[1] for turn in last]
    return records, outputs, [scored.value for scored in reward.score_all(tasks, outputs)]


@pytest.mark.slow
@pytest.mark.parametrize("split", SPLITS)
def test_the_script_without_flaws_solves_every_task(world, split):
    tasks = make_tasks(11, 0, 40, split)
    records, _, values = run_script(world, tasks, FLAWLESS)
    assert values == [1.0] * len(tasks)
    assert [len(record.turns) for record in records] == [len(task.metadata["steps"]) + 1 for task in tasks]


@pytest.mark.slow
def test_a_misread_query_is_answered_with_what_the_tools_returned(world):
    """Demonstrations must show copying, so the answer must be in an observation."""
    text, _, _, _ = world
    tasks = [task for task in make_tasks(11, 0, 80, "train") if task.domain != "drawing"]
    records, outputs, values = run_script(world, tasks, MISREADS)
    finals = [task.metadata["misread"][1] for task in tasks]
    assert outputs == finals
    solved = [value == 1.0 for value in values]
    assert solved == [task.metadata["final"] == final for task, final in zip(tasks, finals, strict=True)]
    assert sum(solved) < len(tasks) / 10
    for record, output in zip(records, outputs, strict=True):
        context = text.decode(record.turns[-1].tokens[~record.turns[-1].chosen])
        assert output.split()[-1] in context


@pytest.mark.slow
def test_a_task_cannot_be_answered_without_its_tools(world):
    """The query does not contain the answer; only drawings are answered at once, and are left out here."""
    reward = world[3]
    tasks = [task for task in make_tasks(5, 0, 80, "test") if task.metadata["steps"]]
    guessed = reward.score_all(tasks, [task.query for task in tasks])
    assert sum(scored.value == 1.0 for scored in guessed) == 0


@pytest.mark.slow
def test_demonstrations_have_flaws_and_exact_ids(world):
    text, env, call_tool, _ = world
    tasks = make_tasks(1, 0, 60, "train")
    records = demonstrate_script(env, text, tasks, call_tool, seed=0)
    repeated = demonstrate_script(env, text, tasks[:7], call_tool, seed=0, workers=1)
    for record, other in zip(records[:7], repeated, strict=True):
        assert [turn.tokens.tolist() for turn in record.turns] == [turn.tokens.tolist() for turn in other.turns]
    actions = [text.decode(turn.tokens[turn.chosen]) for record in records for turn in record.turns]
    right = [context for task in tasks for _, context in task.metadata["steps"]]
    assert all(words.endswith("<|im_end|>") for words in actions)
    assert 0.3 < np.mean([any(context in words for context in right) for words in actions]) < 0.9


def test_shuffled_batches_visit_every_row_once_per_epoch():
    import flowgrpo as fg

    turn = fg.Turn(np.arange(1, 5), np.array([False, False, True, True]), np.zeros(4, np.float32))
    records = [fg.Trajectory([turn], 1.0, group) for group in range(12)]
    rows = fg.pack(records, np.zeros((12, 1), np.float32), np.ones((12, 1), np.float32), row_length=4)
    order = shuffled_batches(rows, 4, seed=0)
    visited = np.concatenate([next(order).trajectory[:, 0] for _ in range(3)])
    assert sorted(visited.tolist()) == list(range(12))
    assert jax.tree.leaves(next(order))[0].shape == (4, 4)


def test_a_start_model_of_other_settings_is_refused_and_not_rewritten(tmp_path):
    def never(*_args, **_kwargs):
        raise AssertionError("an existing start model was written again")

    config = preset()
    folder = tmp_path / "start"
    folder.mkdir()
    with pytest.raises(BadInput, match=r"made_with\.json can't be read"):
        write_start_model(folder, never, never, config)
    write_start_settings(folder, {name: config.settings()[name] for name in MADE_WITH})
    write_start_model(folder, never, never, config.replace(updates=7))
    with pytest.raises(BadInput, match="was made otherwise: seed: there 0, here 1; turns: there 4, here 5"):
        write_start_model(folder, never, never, config.replace(seed=1, turns=5))


def test_the_copying_shape_has_a_window_in_its_first_layer_only(tmp_path):
    write_model(tmp_path / "start", ["Add 31 to 58."], seed=0, shape=COPYING_SHAPE)
    assert load_model(tmp_path / "start").config.windows == (4, None, None)


def test_an_action_without_room_for_a_context_is_refused_by_its_flag():
    with pytest.raises(BadInput, match=r"^--max_tokens=4000 leaves no room .* --context_tokens=256, which holds both$"):
        preset(max_tokens=4000)
    assert set(MADE_WITH) <= set(setting_infos(Config))
