"""The run on an agent of one's own: as a command and as a function, how it goes on, and everything that opens it."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway.test_agents import PROGRAM
from gateway_cases import CONTEXT, MAX_TOKENS, talkative, tiny_folder

import flowgrpo as fg
from flowgrpo.recipes import own_agent, own_env
from flowgrpo.recipes.own_agent import preset
from flowgrpo.rollout.records import from_json
from flowgrpo.training import language_model
from tests.experiments.conftest import last_line, metrics, result

SIZES = {
    "queries": 2,
    "samples": 2,
    "validation_tasks": 4,
    "test_tasks": 4,
    "slots": 8,
    "prefill_chunk": 16,
    "decode_steps": 4,
}
SIZES |= {"max_tokens": MAX_TOKENS, "context_tokens": CONTEXT, "turns": 4, "eval_turns": 4, "mini_batches": 1}
SMALL: dict[str, Any] = {
    **SIZES,
    "dtype": "float32",
    "remat": False,
    "updates": 2,
    "temperature": 1.0,
    "learning_rate": 1e-3,
}


def flags(**settings) -> list[str]:
    chosen = {**SMALL, **settings}
    named = {name: value for name, value in chosen.items() if not isinstance(value, bool)}
    switches = [f"--{name}" if value else f"--no{name}" for name, value in chosen.items() if isinstance(value, bool)]
    return [*switches, *(f"--{name}={value}" for name, value in named.items())]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("tasks") / "tasks.jsonl"
    lines = [{"id": f"t{i}", "query": f"what is {i} plus two", "answers": [str(i + 2)]} for i in range(60)]
    path.write_text("".join(json.dumps(line | {"domain": "answer"}) + "\n" for line in lines))
    return path


def length(_task: fg.Task, output: str) -> fg.RewardResult:
    """Pays short answers: a reward that differs within groups."""
    return fg.RewardResult(max(0.0, 1 - len(output) / 60))


def train(folder: Path, tasks: Path, **settings) -> dict:
    return fg.recipes.own_agent.train_agent(
        talkative, tasks, length, model=tiny_folder(), folder=folder, every=1, **{**SMALL, **settings}
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory, tasks) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "whole"
    train(folder, tasks)
    return folder


@pytest.mark.slow
def test_one_call_trains_a_function_and_writes_a_run(whole):
    found, trained = result(whole), metrics(whole, "train")
    assert (found["updates"], found["env"], found["algorithm"]) == (2, "agent of your own", "flow_grpo")
    assert len(trained) == 2
    assert all(line["tokens_trained"] > 0 for line in trained)
    assert any(line["grad_norm"] > 0 for line in trained)
    assert [(line["contexts"], line["rewrites"]) for line in trained] == [(1, 0)] * 2
    lines = (whole / "trajectories" / "000001.jsonl").read_text().splitlines()
    played = [from_json(line) for line in lines]
    assert [len(one.turns) for one in played] == [3] * 2
    assert all(one.log[0].call.kind == "agent" for one in played)
    assert "answers" not in json.dumps(dict(played[0].log[0].call.arguments))  # an agent is not told them


@pytest.mark.slow
def test_S1_a_stopped_run_resumes_exactly(whole, tmp_path, tasks):
    train(tmp_path / "run", tasks, updates=1)
    train(tmp_path / "run", tasks)
    assert result(tmp_path / "run")["params_sha256"] == result(whole)["params_sha256"]
    assert metrics(tmp_path / "run", "train") == metrics(whole, "train")


@pytest.mark.slow
def test_a_program_is_trained_by_a_command_which_others_open(command, tmp_path, tasks):
    script, folder = tmp_path / "agent.py", tmp_path / "run"
    script.write_text(PROGRAM)
    how = [f"--model={tiny_folder()}", f"--tasks={tasks}", f"--agent={sys.executable} {script}", f"--workdir={folder}"]
    looked = command("train_agent", *how, *flags(), "--dry_run").stdout
    assert looked.count("\nreward    ") == 2
    assert "[2] action" in looked
    done = command("train_agent", *how, *flags(updates=1), "--checkpoint_every=1")
    assert last_line(done)["updates"] == 1
    assert f"{len(list((folder / 'trajectories').iterdir()))}" != "0"
    assert "trajectories of" in command("view", f"--workdir={folder}").stdout
    assert last_line(command("evaluate", f"--workdir={folder}", "--num_tasks=4"))["tasks"] == 4
    command("export", f"--workdir={folder}", f"--out={tmp_path / 'model'}")
    assert fg.load_model(tmp_path / "model").config.v == fg.load_model(tiny_folder()).config.v


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"agent": " "}, "--agent is empty: give a command, or MODULE:FUNCTION"),
        ({"agent": "no_such_program --x"}, "the agent's program 'no_such_program' is not found"),
        ({"agent": "no_module:agent"}, "agent 'no_module:agent' can't be imported"),
        ({"reward": "nothing"}, "reward 'nothing'"),
        ({"silent_seconds": 500.0}, "--turn_seconds=300 must be greater than --silent_seconds=500"),
        ({"tasks": "none.jsonl"}, "none.jsonl"),
        ({"max_tokens": CONTEXT}, "leaves no room for a context"),
    ],
)
def test_bad_settings_get_one_sentence_and_write_nothing(tmp_path, tasks, settings, why):
    folder, chosen = tmp_path / "run", {**SMALL, "tasks": str(tasks), "agent": "true", **settings}
    with pytest.raises(fg.BadInput, match=why) as raised:
        own_agent.RECIPE.train(preset(str(tiny_folder()), **chosen), folder)
    assert "\n" not in str(raised.value)
    assert not (folder / "run.json").exists()


def test_numbers_that_a_reward_would_not_see_are_refused(tmp_path, tasks):
    async def proud(_task, url):
        async with httpx.AsyncClient() as client:
            await client.post(f"{url}/completions", json={"prompt": "what", "max_tokens": 1}, timeout=60)
            posted = await client.post(f"{url.removesuffix('/v1')}/reward", json={"reward": 1.0})
            assert posted.status_code == 400, posted.text
        return 1.0

    with pytest.raises(fg.BadInput, match=r"the agent returned 1\.0, but a reward judges its answer"):
        fg.recipes.own_agent.train_agent(proud, tasks, length, model=tiny_folder(), folder=tmp_path / "run", **SMALL)


def test_there_are_as_many_agents_as_slots(tmp_path, tasks):
    for agents, width in ((None, SMALL["slots"]), (3, 3), (100, 100)):
        config = preset(str(tiny_folder()), **SMALL, tasks=str(tasks), agent="true", concurrent_agents=agents)
        with own_agent.build(config, tmp_path / "run") as setup:
            assert language_model.concurrency_of(setup) == width


def test_an_agent_without_any_outcome_is_refused_with_the_reason(tmp_path, tasks):
    async def broken(_task, _url):
        await asyncio.sleep(0)
        raise KeyError("the key of the user's own server")

    with pytest.raises(fg.BadInput, match="none of 4 trajectories came to an outcome; the first one: the agent ended"):
        fg.recipes.own_agent.train_agent(broken, tasks, length, model=tiny_folder(), folder=tmp_path / "run", **SMALL)


@pytest.mark.slow
def test_an_environment_of_ones_own_is_trained_in(tmp_path, monkeypatch):
    monkeypatch.chdir(Path(__file__).parent.parent)
    config = own_env.preset(str(tiny_folder()), env="trl:external_env_cases:Counter", **{**SMALL, "updates": 1})
    assert own_env.RECIPE.train(config, tmp_path / "run")["updates"] == 1
    with pytest.raises(fg.BadInput, match="must be KIND:SPEC"):
        own_env.preset(str(tiny_folder()), env="chess")
