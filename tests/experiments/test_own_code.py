"""A first hour on a model of one's own: the files and commands of `docs/agent.md`, from dry run to transformers."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from agent_cases import SCHEMAS, agent_text, task

from flowgrpo.agent import roles
from flowgrpo.agent.action_forms import PLAN
from flowgrpo.agent.system import AgentRoles, agent_system
from flowgrpo.contracts import Result
from flowgrpo.data.tokenizer import load_tokenizer
from flowgrpo.models.hf import load_model
from flowgrpo.publish.export import read_planner
from flowgrpo.recipes.agent import first_prompt
from flowgrpo.recipes.offline_start import write_tokenizer
from flowgrpo.rollout.records import RecordedTrajectory
from flowgrpo.tools.calculator import calculator
from flowgrpo.training.language_model import evaluate_trajectories
from flowgrpo.types import BadInput, Status
from tests.experiments.conftest import metrics, result

PAGE = (Path(__file__).parent.parent.parent / "docs" / "agent.md").read_text()
SMALL = (
    *("--updates=2", "--queries=2", "--samples=2", "--turns=2", "--eval_turns=3", "--validation_tasks=2"),
    *("--test_tasks=2", "--max_tokens=24", "--context_tokens=400", "--slots=2", "--learning_rate=0.01"),
    # Random weights write no action that can be read: they imitate the steps of the tasks first, long enough that
    # they keep to the form however this machine rounds.
    *("--warm_start=expert", "--warm_steps=200", "--warm_rows=2", "--warm_rate=0.02", "--demonstrations=10"),
    *("--executor=rule", "--verifier=rule", "--analyst=none", "--loggers=none"),
)


def write_llama(folder: Path) -> None:
    """A Llama-shaped checkpoint of transformers, with random weights and a tokenizer that knows the prompts."""
    from transformers import LlamaConfig, LlamaForCausalLM

    prompts = (PLAN, roles.GENERATE, str(calculator().schema), "weather price item city days: string, integer")
    write_tokenizer(folder, prompts * 2, vocab_size=700)
    text = load_tokenizer(folder)
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    ids = {"eos_token_id": text.stop_ids[0], "pad_token_id": text.pad_id, "bos_token_id": None}
    LlamaForCausalLM(LlamaConfig(vocab_size=text.vocab_size, num_key_value_heads=1, **shape, **ids)).save_pretrained(
        folder
    )


def write_world(folder: Path) -> None:
    """The files that the page shows, and a task file as it describes one."""
    for block in re.findall(r"^```python\n(# (\w+\.py)\n.*?)^```$", PAGE, re.DOTALL | re.MULTILINE):
        (folder / block[1]).write_text(block[0])
    (line,) = re.findall(r"A line of the task file is `({.*?})`", PAGE)
    task = json.loads(line)
    tasks = [
        task
        | {"id": str(n), "query": f"What is {n}+1?", "answers": [str(n + 1)]}
        | {"steps": [["calculator", f"{n}+1"]], "final": str(n + 1)}
        for n in range(12)
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))


def commands() -> list[list[str]]:
    """The words of the page's commands from the dry run with one's own code on."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    (block,) = [block for block in blocks if "--mcp" in block]
    return [shlex.split(line)[2:] for line in block.replace("\\\n", " ").splitlines()]


def test_the_first_prompt_is_shown_or_what_ended_the_episode_before_it():
    """A planner that never came to speak has no prompt: an analyst that nobody speaks is told as such."""
    text = agent_text()
    env = agent_system(text, schemas=SCHEMAS, roles=AgentRoles(analyst=roles.analyst()))
    said = [
        first_prompt(env, text, task(), lambda _, one=one: one) for one in (Result("a sum"), Result("", failure="late"))
    ]
    assert said[0].startswith("the first prompt, ")
    assert "> what is 2 + 3?\n" in said[0]
    assert "> a sum\n" in said[0]
    assert said[1].startswith("there is no first prompt")
    assert said[1].endswith("analyst: late")


def test_trajectories_of_which_none_was_judged_say_why():
    empty: dict[str, Any] = {
        "turns": [],
        "group": 0,
        "key": (),
        "sample": 0,
        "tools": (),
        "errors": (),
        "effect_counts": (),
    }
    one = RecordedTrajectory(task=task(), outcome=None, status=Status.ABORTED, reason="reset raised", **empty)
    with pytest.raises(BadInput, match="none of 2 trajectories came to an outcome; the first one: reset raised"):
        evaluate_trajectories([one, one], ("a",))


@pytest.mark.oracle
def test_documented_commands_train_an_own_model_with_own_tool_and_reward(command, tmp_path, monkeypatch):
    import torch
    from transformers import AutoModelForCausalLM

    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent.parent.parent))
    write_world(tmp_path)
    write_llama(tmp_path / "PATH")
    dry, train, export, chat = [(words[0].removeprefix("experiments."), *words[1:]) for words in commands()]
    shown = command(*dry, *SMALL, cwd=tmp_path)
    assert shown.stdout.count("\nreward ") == 2
    assert all(f"\n{name}(" in shown.stdout for name in ("calculator", "weather", "price"))
    assert not (tmp_path / "runs").exists()

    ran = command(*train, *SMALL, cwd=tmp_path)
    run = tmp_path / "runs" / "mine"
    assert [stage in ran.stderr for stage in ("compile 0/", "validation 0/2", "rollout 0/4", "test 0/2")] == [True] * 4
    assert (result(run)["updates"], len(metrics(run, "train"))) == (2, 2)
    assert all(line["invalid"] == 0 for line in metrics(run, "validation"))

    command(*export, cwd=tmp_path)
    written = load_model(tmp_path / "models" / "planner")
    _, trained = read_planner(run, "last")
    _, start = read_planner(run, "start")  # of the reinforcement, after the imitation
    # Where all outputs of every group are alike, nothing is learned from them.
    moved = any(np.abs(np.asarray(trained[name]) - np.asarray(start[name])).max() > 0 for name in start)
    assert moved == any(line["grad_norm"] > 0 for line in metrics(run, "train"))
    given = load_model(tmp_path / "PATH").params
    assert any(np.abs(np.asarray(start[name]) - np.asarray(given[name])).max() > 0 for name in given)
    tokens_rs = np.arange(1, 25).reshape(2, 12)
    with torch.no_grad():
        peer = AutoModelForCausalLM.from_pretrained(tmp_path / "models" / "planner", dtype=torch.float32)
        theirs = peer(torch.tensor(tokens_rs)).logits.numpy()
    ours = jax.jit(written.policy.apply)(written.params, tokens_rs, segments=np.ones_like(tokens_rs))[0]
    assert np.abs(theirs - np.asarray(ours)).max() < 1e-4
    said = command(*chat, "--max_tokens=2", "--context=64", stdin="Hello\n", cwd=tmp_path)
    assert said.returncode == 0
