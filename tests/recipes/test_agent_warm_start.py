"""What a given planner imitates first: experts, its own right answers, or another model's; the check of its form."""

from dataclasses import replace
from itertools import islice

import jax
import numpy as np
import pytest
from agent_cases import agent_text, task
from tiny_planner import planner_folder, scripted_submit, settings

from flowgrpo.agent.action_forms import CALLS
from flowgrpo.agent.examples import scripted_actions
from flowgrpo.recipes import agent, agent_warm_start
from flowgrpo.recipes.agent_config import preset
from flowgrpo.recipes.agent_warm_start import (
    FIRST_TASK,
    SAMPLED,
    check_format_followed,
    format_compliance,
    make_warm_start,
)
from flowgrpo.rollout.records import RecordedTrajectory, from_json
from flowgrpo.training.checkpoints import Checkpoints, params_sha256
from flowgrpo.training.run_files import EXAMPLES
from flowgrpo.training.warm_start import WARM, warm_start
from flowgrpo.types import BadInput, Status, Turn

TEXT = agent_text()


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """The parts of a run with an adapter that imitates experts."""
    folder = tmp_path_factory.mktemp("expert")
    with agent.build(settings(folder, warm_start="expert"), folder / "run") as setup:
        yield setup


@pytest.fixture(scope="module")
def expert(world):
    return world.warm_start(world)


def warm_start_of(setup, folder, speak=None, requests=None, **chosen):
    """The imitation of a setup with other settings, in a folder of its own; `speak` is what its engine says."""
    how = setup.warm_start.keywords
    config = how["config"].replace(**chosen)
    tasks = setup.tasks("train", FIRST_TASK, config.warm_start.demonstrations)
    submit = None if speak is None else scripted_submit(tasks, setup.model.tokenizer, speak, requests)
    return make_warm_start(setup._replace(folder=folder, config=config, submit=submit), **how | {"config": config})


def right(setup):
    """The actions that a task says that it is solved with."""
    schemas = setup.warm_start.keywords["schemas"]
    return lambda task, turn: scripted_actions(task, CALLS, schemas)[turn]


def rows_of(warm, text) -> list[str]:
    """The rows of its batches as text, each once."""
    rows = [np.asarray(row) for batch in islice(warm.batches(0), 20) for row in batch.tokens]
    return sorted({text.decode(row) for row in rows})


# Experts ------------------------------------------------------------------------------------------------


def test_experts_are_imitated_by_the_adapter_alone(world, expert, tmp_path):
    told = []
    found = warm_start(expert, tmp_path, lambda *seen: told.append(seen))
    start = world.planner.params
    assert [count for count, _ in told][:3] == [0, 2, 4]
    assert min(loss for _, loss in told) < told[0][1]
    assert params_sha256(found.base) == params_sha256(start.base)
    assert params_sha256(found.adapter) != params_sha256(start.adapter)
    rows = "".join(rows_of(expert, world.model.tokenizer))
    assert "calculator(" in rows
    assert EXAMPLES in {path.name for path in world.folder.iterdir()}


def test_tasks_without_steps_are_left_out(world, tmp_path, caplog):
    def tasks(split, first, count):
        drawn = list(world.tasks(split, first, count))
        return [replace(drawn[0], metadata={}), *drawn[1:]]

    few = warm_start_of(world._replace(tasks=tasks), tmp_path, demonstrations=6)
    of_all = warm_start_of(world, tmp_path, demonstrations=6)
    assert "1 of 6 tasks have no fields steps and final" in caplog.text
    assert rows_of(few, world.model.tokenizer) != rows_of(of_all, world.model.tokenizer)
    with pytest.raises(BadInput, match="doesn't say how it is solved"):
        warm_start_of(world._replace(tasks=lambda *drawn: tasks(*drawn)[:1]), tmp_path, demonstrations=1)


def test_S1_checkpoints_store_only_the_adapter_and_a_killed_run_resumes_exactly(expert, tmp_path):
    told, heard = [], []
    whole = warm_start(expert, tmp_path / "whole", lambda *seen: told.append(seen))

    def tell(count, loss):
        if count == 4:
            raise KeyboardInterrupt
        heard.append((count, loss))

    with pytest.raises(KeyboardInterrupt):
        warm_start(expert, tmp_path / "parts", tell)
    checkpoints = Checkpoints(tmp_path / "parts" / WARM)
    assert checkpoints.latest() == 2
    saved = [checkpoints.restore_part(2, place) for place in ("state/params", "best")]
    adapter = expert.state.params.adapter
    for part in saved:
        assert jax.tree.map(np.shape, jax.tree.leaves(part)) == jax.tree.map(np.shape, jax.tree.leaves(adapter))
    again = warm_start(expert, tmp_path / "parts", lambda *seen: heard.append(seen))
    assert heard == told
    assert params_sha256(again) == params_sha256(whole)


def test_without_an_imitation_a_run_begins_with_its_parameters(world, tmp_path):
    warm = warm_start_of(world, tmp_path, warm_start="none")
    assert warm.steps == 0
    assert warm.state.params is world.planner.params


def test_one_demonstration_is_too_few(world, tmp_path):
    with pytest.raises(BadInput, match="there are demonstrations of 1 tasks: give more by --demonstrations"):
        warm_start_of(world, tmp_path, demonstrations=1)


# Its own right answers ----------------------------------------------------------------------------------


def test_own_right_answers_are_imitated_without_the_examples(tmp_path):
    """Of 16 trajectories 12 are right, and 8 of these have no error; what was sampled is in a file from then on."""
    with agent.build(settings(tmp_path, warm_start="own", drop_examples=True), tmp_path / "run") as setup:
        text, solve = setup.model.tokenizer, right(setup)

        def speak(task, turn):
            kind = int(task.id.split("-")[-2]) % 4
            if kind == 1 and turn == 0:
                return "answer(0)"
            if kind == 2 and turn == 0:
                return "nonsense"
            return solve(task, turn - (kind == 2))

        warm = warm_start_of(setup, tmp_path, speak)
        sampled = [from_json(line) for line in (tmp_path / SAMPLED).read_text().splitlines()]
        assert [len(sampled), *(sum(found) for found in zip(*map(figures, sampled), strict=True))] == [16, 12, 4]
        assert all("Lucy has 2 cards" in text.decode(one.turns[0].tokens) for one in sampled)
        rows = "".join(rows_of(warm, text))
        assert "calculator(" in rows
        assert [words in rows for words in ("Lucy", "nonsense", "answer(0)")] == [False] * 3
        again = warm_start_of(setup, tmp_path, lambda *_: pytest.fail("the engine is asked again"))
        assert rows_of(again, text) == rows_of(warm, text)


def figures(one) -> tuple[bool, bool]:
    """Whether a trajectory is right, and whether it has errors."""
    return one.correct, any(one.errors)


def test_right_answers_with_errors_are_imitated_where_there_are_no_others(world, tmp_path):
    solve = right(world)

    def speak(task, turn):
        return solve(task, turn - 1) if turn else "nonsense"

    warm = warm_start_of(world, tmp_path, speak, warm_start="own")
    assert "nonsense" in "".join(rows_of(warm, world.model.tokenizer))


def test_a_killed_warm_start_resumes_to_the_same_demonstrations(world, tmp_path):
    """Of 12 tasks the first 8 are a slice; all are sampled at the temperature of the warm start."""
    solve, heard, requests = right(world), [], []
    chosen = {"warm_start": "own", "demonstrations": 12, "warm_temperature": 0.3}

    def speak(task, turn):
        heard.append(task.id)
        return solve(task, turn)

    whole = warm_start_of(world, tmp_path, speak, requests, **chosen)
    assert len(set(heard)) == 12
    assert {request.temperature for request in requests} == {0.3}
    path = tmp_path / SAMPLED
    lines = path.read_text().splitlines(keepends=True)
    assert [from_json(line).group for line in lines] == [number // 2 for number in range(24)]
    path.write_text("".join(lines[:16]))
    first = set(heard)
    heard.clear()
    again = warm_start_of(world, tmp_path, speak, **chosen)
    assert set(heard) == {task.id for task in world.tasks("train", FIRST_TASK + 8, 4)} < first
    assert path.read_text().splitlines(keepends=True)[:16] == lines[:16]
    assert rows_of(again, world.model.tokenizer) == rows_of(whole, world.model.tokenizer)


def test_a_warm_start_without_right_answers_quotes_the_actions(world, tmp_path):
    with pytest.raises(BadInput) as refused:
        warm_start_of(world, tmp_path, lambda task, _: f"answer(no {len(task.query)})", warm_start="own")
    said = str(refused.value)
    assert said.startswith("--warm_start=own: none of 16 trajectories came to a right answer, so there is nothing to ")
    assert "it said 'answer(no " in said
    assert "Give --examples, more --demonstrations or easier --tasks" in said
    assert len((tmp_path / SAMPLED).read_text().splitlines()) == 16


def test_another_models_right_answers_are_encoded_by_the_planners_tokenizer(world, tmp_path, monkeypatch):
    """The other model's tokenizer is another; what it would take to compile its engine is left out."""
    other, compiled = planner_folder(500), []

    def leave_out(setup):
        compiled.append(setup.model.tokenizer.vocab_size)
        return setup

    monkeypatch.setattr(agent_warm_start, "compile_engines", leave_out)
    text, solve = world.model.tokenizer, right(world)
    theirs = agent_warm_start.load_model(other).tokenizer
    assert theirs.encode("calculator(12 + 34)") != text.encode("calculator(12 + 34)")
    tasks = world.tasks("train", FIRST_TASK, world.config.warm_start.demonstrations)
    how = world.warm_start.keywords
    config = how["config"].replace(warm_start=str(other), context_tokens=512)
    setup = world._replace(folder=tmp_path, config=config, submit=scripted_submit(tasks, theirs, solve))
    warm = make_warm_start(setup, **how | {"config": config})
    assert compiled == [theirs.vocab_size]
    batch = next(iter(warm.batches(0)))
    live = {text.decode(tokens[mask]) for tokens, mask in zip(batch.tokens, batch.loss_mask, strict=True)}
    assert all("calculator(" in words and "answer(" in words for words in live)
    assert all(int(tokens.max()) < text.vocab_size for tokens in batch.tokens)


# The form of what was said ------------------------------------------------------------------------------


def played(*words: str, errors=(), tools=()) -> RecordedTrajectory:
    """A trajectory of these actions."""
    turns = []
    for said in words:
        ids = np.array([1, 2, *TEXT.encode(said), TEXT.stop_ids[0]], np.int32)
        turns.append(Turn(ids, np.arange(len(ids)) > 1, np.zeros(len(ids), np.float32)))
    return RecordedTrajectory(
        turns=turns,
        outcome=0.0,
        group=0,
        status=Status.FINISHED,
        task=task(),
        key=(0, 0),
        sample=0,
        tools=tuple(tools),
        errors=tuple(errors),
        effect_counts=(0,) * (len(words) + 1),
    )


def test_format_compliance_is_the_fraction_of_effective_actions():
    """By hand: a call, a refused call, an answer, and three that could not be read: 3 of 6."""
    one = played("a", "b", "c", errors=(False, True, False), tools=("echo", "echo", ""))
    two = played("d", "e", "f", errors=(True,) * 3, tools=("",) * 3)
    assert format_compliance([one, two]) == {"format_compliance": 0.5}
    assert format_compliance([one]) == {"format_compliance": 1.0}
    assert format_compliance([two]) == {"format_compliance": 0.0}
    assert format_compliance([played()]) == format_compliance([]) == {}


def test_a_first_rollout_without_a_parsed_action_names_the_fixes():
    lost = played("I think it is 5", "so 5", errors=(True, True), tools=("", ""))
    config = preset("some/model", tasks="word_problems", examples="none", warm_start="none", drop_examples=False)
    with pytest.raises(BadInput) as refused:
        check_format_followed([lost, lost, played()], text=TEXT, config=config)
    assert str(refused.value) == (
        "some/model wrote none of the 4 actions of the first rollout in the form of --actions=calls; it said "
        "'I think it is 5'; 'I think it is 5'. Try --examples=tasks or a file of worked examples, "
        "--warm_start=expert or a model that can, another form of --actions than calls, a larger --max_tokens, "
        "a larger model"
    )
    config = config.replace(examples="tasks", warm_start="expert")
    with pytest.raises(BadInput, match=r"Try more --examples, another form of --actions than calls, a larger"):
        check_format_followed([lost], text=TEXT, config=config)
    config = config.replace(warm_start="own", drop_examples=True)
    with pytest.raises(BadInput, match=r"Try --nodrop_examples, another form of --actions than calls, a larger"):
        check_format_followed([lost], text=TEXT, config=config)


@pytest.mark.parametrize(
    "rollout",
    [
        [played("nonsense", errors=(True,), tools=("",)), played("echo(a)", errors=(True,), tools=("echo",))],
        [played("nonsense", "answer(5)", errors=(True, False), tools=("", ""))],
        [played()],
        [],
    ],
)
def test_one_parsed_action_or_no_action_at_all_raises_nothing(rollout):
    assert check_format_followed(rollout, text=TEXT, config=preset()) is None
