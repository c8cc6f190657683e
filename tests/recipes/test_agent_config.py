"""Settings of the agent run: what contradicts itself is one sentence, and a set of tasks brings those that fit it."""

import pytest

from flowgrpo.recipes.agent_config import LARGE, ONE_TURN, PAPER, SMALL, preset
from flowgrpo.training.names import TASK_SETS
from flowgrpo.types import BadInput


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        (
            {"model": "x", "actions": "calls"},
            "--actions=calls makes a conversation of calls and answers: give --rendering=append",
        ),
        (
            {"model": "x", "actions": "tool_calls", "rendering": "fresh"},
            "--actions=tool_calls makes a conversation of calls and answers: give --rendering=append",
        ),
        ({"actions": "prose"}, "--actions=prose is unknown; choose from lines, calls, tool_calls"),
        (
            {"warm_start": "own"},
            "--warm_start=own needs --model: the small model here imitates a script",
        ),
        (
            {"model": "x", "warm_start": "own", "warm_steps": 5},
            "--warm_start=own needs --warm_steps and --demonstrations, of which one is 0",
        ),
        (
            {"model": "x", "tasks": "word_problems", "warm_steps": 0},
            "--warm_start=expert needs --warm_steps and --demonstrations, of which one is 0",
        ),
        (
            {"model": "x", "tasks": "word_problems", "warm_start": "expert", "drop_examples": True},
            "--drop_examples needs a warm start on answers sampled with them: give --warm_start=own, too",
        ),
        (
            {"model": "x", "tasks": "word_problems", "warm_start": "none", "drop_examples": True},
            "--drop_examples needs a warm start on answers sampled with them: give --warm_start=own, too",
        ),
        (
            {"model": "x", "tasks": "train.jsonl", "examples": "tasks"},
            "--examples=tasks needs --tasks=word_problems, two_hop, reverse_text, alphabet_sort, not train.jsonl: "
            "give a file of examples",
        ),
        ({"examples": "tasks"}, "not None: give a file of examples"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(chosen, said):
    with pytest.raises(BadInput) as refused:
        preset(**chosen)
    assert said in str(refused.value)


@pytest.mark.parametrize("name", TASK_SETS)
def test_a_builtin_task_set_brings_small_settings_and_tools(name):
    settings = preset(model="x", tasks=name).settings()
    demonstrated = {"demonstrations": 2048, "warm_steps": 128} if name in ONE_TURN else {"demonstrations": 512}
    expected = SMALL | ONE_TURN.get(name, {}) | demonstrated
    assert {key: settings[key] for key in SMALL} == expected
    assert (settings["tools"], settings["warm_start"], settings["examples"]) == (TASK_SETS[name], "expert", "none")
    assert settings["group_seconds"] == LARGE["group_seconds"]


def test_chosen_settings_win_and_a_task_file_brings_the_papers():
    chosen = preset(model="x", tasks="word_problems", lora_rank=2, actions="lines", tools="python", context_tokens=600)
    assert (chosen.model.lora_rank, chosen.agent.actions, chosen.agent.tools, chosen.rollout.context_tokens) == (
        2,
        "lines",
        "python",
        600,
    )
    paper = preset(model="x", tasks="train.jsonl").settings()
    assert {key: paper[key] for key in PAPER} == PAPER
    assert (paper["actions"], paper["examples"], paper["warm_start"]) == ("lines", "none", "none")


@pytest.mark.parametrize(
    ("warm_start", "examples", "drops"),
    [("own", "tasks", True), ("some/model", "tasks", True), ("none", "tasks", False), ("expert", "none", False)],
)
def test_examples_are_dropped_only_after_a_warm_start_sampled_with_them(warm_start, examples, drops):
    """So that each --warm_start can be given alone."""
    settings = preset(model="x", tasks="word_problems", warm_start=warm_start)
    assert (settings.agent.examples, settings.agent.drop_examples) == (examples, drops)
    assert preset(model="x", tasks="word_problems", warm_start="own", drop_examples=False).agent.drop_examples is False


def test_offline_settings_write_lines_without_examples():
    settings = preset().settings()
    names = ("actions", "examples", "warm_start", "drop_examples")
    assert [settings[name] for name in names] == ["lines", "none", "none", False]


def test_a_packaged_base_model_has_a_template():
    """And another one where the user gives it, or where the model comes with its own."""
    assert preset(model="gemma3").model.chat_template == "lines"
    assert preset(model="gemma3", chat_template="plain").model.chat_template == "plain"
    assert preset(model="smollm2").model.chat_template is None
    assert preset(model="x").model.chat_template is None
