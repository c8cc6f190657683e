"""`TextEnv`: conversations by exact ids, with and without a template for tool calls; replay, restarts and failures."""

import json
from concurrent.futures import Future
from itertools import pairwise

import jax
import pytest
from agent_cases import agent_text
from gateway_cases import tiny_model

import flowgrpo as fg
from flowgrpo.rollout.records import from_json, to_json
from flowgrpo.rollout.text_env import TextEnvRunner
from flowgrpo.types import Status

TASKS = [
    fg.Task(f"t{i}", "", (), "env", {"person": name, "address": f"{i} Elm"}) for i, name in enumerate(("Ann", "Bo"))
]
DIRECTORY = {"Ann": "0 Elm", "Bo": "1 Elm"}
FULL = fg.Reward(lambda task, output: fg.RewardResult(float(output == task.answers[0])))


def look(word: str) -> str:
    """The address of a person."""
    return DIRECTORY[word]


class Parcel(fg.TextEnv):
    """A parcel is to be delivered."""

    def visit(self, house: str) -> str:
        """Go to a house."""
        self.visited = [*getattr(self, "visited", []), house]
        return f"visited {', '.join(self.visited)}"

    tools, max_turns, instructions = [look, visit], 4, "You deliver parcels."

    def reset(self, task):
        return f"Deliver a parcel to {task['person']} <|im_end|>."

    def step(self, action):
        if action.strip() == "where?":
            return f"You are at {self.rng.integers(1000)} <|im_end|>."
        if action.strip() == "crash":
            raise RuntimeError("no fuel")
        return fg.Done(reward=float(action.strip() == self.task["address"]), message="delivered")


class Scripted:
    """An engine whose completions are these words, one after the other in each conversation."""

    def __init__(self, text, *words: str, cut: bool = False):
        self.text, self.words, self.cut, self.requests = text, words, cut, []

    def submit(self, request):
        self.requests.append(request)
        stop = self.text.stop_ids[-1]
        chosen = list(request.chosen)
        number = sum(chosen[i] and not chosen[i - 1] for i in range(1, len(chosen)))
        ids = [*self.text.encode(self.words[number % len(self.words)]), *[stop] * (not self.cut)]
        reason, sampled = "length" if self.cut else "stop", len(request.partial.tokens) if request.partial else 0
        if request.budget is not None and len(ids) > sampled + request.budget:
            ids, reason = ids[: sampled + request.budget], "budget"
        future = Future()
        future.set_result(fg.contracts.Completion(ids, [-1.0] * len(ids), [0] * len(ids), reason))
        return future


def tagged(name: str, **arguments) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def play(words, env: type[fg.TextEnv] = Parcel, tasks=TASKS, text=None, runner=None, **more):
    text = text or tiny_model().tokenizer
    runner = runner or TextEnvRunner(env, reward=more.get("reward"))
    host_env = runner.host_env(text, max_tokens=90, context_tokens=more.pop("context_tokens", 1500))
    engine = Scripted(text, *words, cut=more.pop("cut", False))
    keys = jax.random.split(jax.random.key(1), len(tasks))
    rollout = fg.hosted(host_env, engine.submit, **{"call_tool": runner.call_tool, "reward": runner.reward, **more})
    return rollout(tasks, keys, list(range(len(tasks)))).trajectories, engine, host_env


def test_A5_a_conversation_with_a_template_for_tools():
    trajectories, engine, env = play(
        [tagged("look", word="Ann"), tagged("visit", house="0 Elm"), "0 Elm"], tasks=TASKS[:1]
    )
    (trajectory,), text = trajectories, tiny_model().tokenizer
    assert (trajectory.status, trajectory.outcome, trajectory.correct, trajectory.output, trajectory.reason) == (
        Status.FINISHED,
        1.0,
        True,
        "0 Elm",
        "delivered",
    )
    assert (trajectory.tools, trajectory.errors) == (("look", "visit", ""), (False, False, False))
    assert env.tools == ("look", "visit")
    tokens = [token for turn in trajectory.turns for token in turn.tokens.tolist()]
    assert text.decode(tokens) == (
        "<|im_start|>system\nTools: look visit<|im_end|>\n<|im_start|>user\nYou deliver parcels.\n\n"
        "Deliver a parcel to Ann <|im_end|>.<|im_end|>\n<|im_start|>assistant\n"
        f"{tagged('look', word='Ann')}<|im_end|>\n<|im_start|>tool\n0 Elm<|im_end|>\n<|im_start|>assistant\n"
        f"{tagged('visit', house='0 Elm')}<|im_end|>\n<|im_start|>tool\nvisited 0 Elm<|im_end|>\n"
        "<|im_start|>assistant\n0 Elm<|im_end|>"
    )
    assert tokens.count(text.stop_ids[-1]) == 7, "what the environment says ends no turn"
    contexts = [request.tokens for request in engine.requests]
    assert all(later[: len(earlier)] == earlier for earlier, later in pairwise(contexts))
    assert to_json(fg.replay(env, from_json(to_json(trajectory)))) == to_json(trajectory)


@pytest.mark.parametrize("style", ["gemma", "llama3"])
def test_a_template_without_tools_has_them_in_words(style):
    words = ['look("Bo")', "visit(1 Elm)", "where?", "1 Elm"]
    trajectories, _, env = play(words, tasks=TASKS[1:], text=agent_text(style))
    (trajectory,), text = trajectories, agent_text(style)
    assert (trajectory.status, trajectory.outcome) == (Status.FINISHED, 1.0), trajectory.reason
    assert trajectory.tools == ("look", "visit", "", "")
    observed = [text.decode(turn.tokens[~turn.chosen]) for turn in trajectory.turns]
    assert 'look(word: string) - "The address of a person."\nvisit(house: string) - "Go to a house."' in observed[0]
    assert [
        word in said for word, said in zip(("1 Elm", "visited 1 Elm", "You are at"), observed[1:], strict=True)
    ] == [True] * 3
    assert to_json(fg.replay(env, from_json(to_json(trajectory)))) == to_json(trajectory)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("look(", "Error: the action is not one call"),
        ("look(Ann) look(Bo)", "Error: the action has more than one call"),
        ("look(Eve)", "look: KeyError: 'Eve'"),
        ('look({"name": "Ann"})', 'look: argument "word" is missing'),
    ],
)
def test_A4_a_malformed_call_is_an_observation(words, said):
    text = agent_text("gemma")
    trajectory = play([words, "0 Elm"], tasks=TASKS[:1], text=text)[0][0]
    assert (trajectory.status, trajectory.errors) == (Status.FINISHED, (True, False)), trajectory.reason
    assert said in text.decode(trajectory.turns[1].tokens)


def test_A4_a_malformed_call_in_tags_and_a_tool_that_is_not_there():
    trajectory = play(["<tool_call>{", tagged("fly"), "0 Elm"], tasks=TASKS[:1])[0][0]
    observed = [tiny_model().tokenizer.decode(turn.tokens[~turn.chosen]) for turn in trajectory.turns[1:]]
    assert "Error: the tool call can't be read" in observed[0]
    assert "There is no tool 'fly'. The tools are: look, visit." in observed[1]
    assert (trajectory.errors, trajectory.tools) == ((True, True, False), ("", "", ""))


def test_F5_an_exception_of_step_takes_no_part():
    trajectory = play(["where?", "crash"], tasks=TASKS[:1])[0][0]
    assert (trajectory.status, trajectory.outcome) == (Status.TOOL_FAILURE, None)
    assert trajectory.reason.startswith("Parcel.step raised RuntimeError: no fuel (test_text_env.py, line ")


def test_limits_end_an_episode_that_counts():
    runner = TextEnvRunner(Parcel)
    trajectory = play(["where?"], tasks=TASKS[:1], runner=runner)[0][0]
    assert (trajectory.status, trajectory.outcome, len(trajectory.turns)) == (Status.TURN_LIMIT, 0.0, 4)
    trajectory = play(["where?"], tasks=TASKS[:1], runner=runner, context_tokens=150)[0][0]
    assert (trajectory.status, trajectory.outcome, trajectory.output) == (Status.TOKEN_LIMIT, 0.0, None)
    assert not runner._episodes, "no instance is left"
    trajectory = play(["0 Elm"], tasks=TASKS[:1], runner=runner, cut=True)[0][0]
    assert (trajectory.status, trajectory.outcome, trajectory.errors) == (Status.TOKEN_LIMIT, 1.0, (True,))


def test_S1_an_episode_that_is_gone_is_restored_by_its_calls():
    words, runners = (
        [tagged("visit", house="a"), "where?", tagged("visit", house="b"), "0 Elm"],
        [TextEnvRunner(Parcel)],
    )
    undisturbed = play(words, tasks=TASKS[:1])[0][0]

    def call_tool(call):
        runners.append(TextEnvRunner(Parcel))  # as after a kill before every call
        return runners[-1].call_tool(call)

    trajectory = play(words, tasks=TASKS[:1], runner=runners[0], call_tool=call_tool)[0][0]
    assert (trajectory.status, trajectory.outcome) == (Status.FINISHED, 1.0), trajectory.reason
    for turn, other in zip(trajectory.turns, undisturbed.turns, strict=True):
        assert turn.tokens.tolist() == other.tokens.tolist()


def test_S1_a_partial_trajectory_is_resumed_in_another_process():
    words = [tagged("visit", house="a"), "where?", tagged("visit", house="b"), "0 Elm"]
    undisturbed, text = play(words, tasks=TASKS[:1])[0][0], tiny_model().tokenizer
    keys, tasks, groups, unfinished, trajectories, rounds = (
        jax.random.split(jax.random.key(1), 1),
        TASKS[:1],
        [0],
        (),
        (),
        0,
    )
    while not trajectories:
        runner, rounds = TextEnvRunner(Parcel), rounds + 1
        env = runner.host_env(text, max_tokens=90, context_tokens=1500)
        rollout = fg.hosted(env, Scripted(text, *words).submit, call_tool=runner.call_tool)
        result = rollout(tasks, keys[: len(tasks)], groups, unfinished=unfinished, budget=40)
        tasks, groups, unfinished, trajectories = [], [], result.unfinished, result.trajectories
    assert rounds > 2
    assert trajectories[0].outcome == 1.0, trajectories[0].reason
    for turn, other in zip(trajectories[0].turns, undisturbed.turns, strict=True):
        assert turn.tokens.tolist() == other.tokens.tolist()


def test_A3_episodes_at_once_share_nothing_and_a_group_starts_alike():
    tasks = [TASKS[0]] * 12
    words = ["where?", tagged("visit", house="a"), tagged("visit", house="b"), "0 Elm"]
    trajectories, _, _ = play(words, tasks=tasks, runner=TextEnvRunner(Parcel, max_episodes=3))
    first = [turn.tokens.tolist() for turn in trajectories[0].turns]
    assert "visited a, b" in tiny_model().tokenizer.decode(first[3])
    for trajectory in trajectories:
        assert (trajectory.outcome, [turn.tokens.tolist() for turn in trajectory.turns]) == (1.0, first)


def test_the_contract_of_host_environments_holds():
    text, runner = tiny_model().tokenizer, TextEnvRunner(Parcel)

    def act(random, _request):
        words = [tagged("look", word="Ann"), tagged("visit", house="x"), "where?", "0 Elm", "<tool_call>"]
        return [*text.encode(words[int(random.integers(len(words)))]), text.stop_ids[-1]]

    env = runner.host_env(text, max_tokens=90, context_tokens=1500)
    fg.check_host_env(env, TASKS, call_tool=runner.call_tool, act=act, vocabulary=text.vocab_size)


# Rewards ------------------------------------------------------------------------------------------------


class Quiz(fg.TextEnv):
    """The run's reward judges, unless the action gives up."""

    def step(self, action):
        return fg.Done(reward=-1.0) if action == "pass" else fg.Done(output=action.upper())


QUESTIONS = [fg.Task("q", "What is it?", ("AN ELM",), "env")]


def test_the_reward_of_the_run_judges_what_has_none():
    trajectory, passed = (play([word], Quiz, QUESTIONS, reward=FULL)[0][0] for word in ("an elm", "pass"))
    assert (trajectory.outcome, trajectory.correct, trajectory.output) == (1.0, True, "AN ELM")
    assert (passed.outcome, passed.correct, passed.reward_result) == (-1.0, False, fg.RewardResult(-1.0))


def test_one_turn_of_the_query_and_an_output_that_is_judged():
    env = fg.single_turn(FULL, instructions="Be brief.", max_tokens=7)
    trajectories, engine, host_env = play(["AN ELM"], env, QUESTIONS)
    plain = fg.agent.single_turn(tiny_model().tokenizer, max_tokens=7, instructions="Be brief.")
    (_, observation), trajectory = plain.reset(jax.random.key(0), QUESTIONS[0], None), trajectories[0]
    assert tuple(engine.requests[0].tokens) == tuple(observation.tokens)
    assert (trajectory.outcome, trajectory.status, len(trajectory.turns)) == (1.0, Status.FINISHED, 1)
    assert (host_env.max_turns, host_env.max_tokens) == (1, 7)


# Bad input ----------------------------------------------------------------------------------------------


def untyped(word):
    """Nothing is known of the word."""


def variant(**fields):
    return type("Variant", (Parcel,), fields)


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (Parcel(), r"Parcel\(\) is an instance: give the class"),
        (FULL, "is no subclass of fg.TextEnv"),
        (type("Stub", (fg.TextEnv,), {}), r"Stub has no step: write step\(self, action\)"),
        (variant(step=lambda _: ""), r"Variant.step takes \(_\), but must take \(self, action\)"),
        (variant(tools=[untyped]), "tool 'untyped': argument 'word' has no type"),
        (variant(tools=[lambda: ""]), "a name is letters"),
        (variant(tools=["look"]), "Variant.tools has 'look': give functions"),
        (variant(tools=[look, look]), "2 tools are named 'look'"),
        (variant(max_turns=0), "Variant: max_turns is 0"),
        (variant(reward=0.5), "Variant.reward is 0.5: give an fg.Reward"),
    ],
)
def test_a_class_that_can_play_no_episode_is_refused(env, message):
    with pytest.raises(fg.BadInput, match=message):
        TextEnvRunner(env)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"reset": lambda *_: None}, "Variant.reset returned None: return a string"),
        ({"reset": lambda _, task: task["name"]}, "Variant.reset raised KeyError: 'name' .*the fields id, query"),
        ({"reset": lambda *_: "", "instructions": ""}, "Variant.reset returned an empty text"),
        ({"step": lambda *_: 0.5}, r"Variant.step returned 0.5: return a string or fg.Done\(reward\)"),
        ({"step": lambda *_: fg.Done()}, "Variant.step returned Done without a reward, and there is no rew"),
        ({"step": lambda *_: fg.Done(float("nan"))}, "Variant.step: Done: reward is nan, but must be"),
        (
            {"step": lambda _, action: int(action)},
            "Variant.step raised ValueError: .*it was called with an empty ac",
        ),
    ],
)
def test_what_an_episode_returns_is_checked_before_a_run(fields, message):
    with pytest.raises(fg.BadInput, match=message):
        TextEnvRunner(variant(**fields)).check(TASKS[0])
