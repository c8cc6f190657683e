"""A trajectory as text: prompts, words, calls, observations, verdicts and the answer, each where it belongs."""

import numpy as np
from agent_cases import SCHEMAS, agent_text, make_system, plan, play, run_tools

from flowgrpo.agent import roles
from flowgrpo.agent.transcript import show_transcript
from flowgrpo.contracts import Result
from flowgrpo.data.tool_calls import signature
from flowgrpo.types import Turn

TEXT = agent_text()
PLAIN = roles.planner(instructions="Plan.", describe=signature)


def turns_of(played):
    pairs = [(list(said.tokens), sampled) for said, sampled in zip(played.said, played.sampled, strict=False)]
    return [
        Turn(np.array(given + said), np.arange(len(given + said)) >= len(given), np.zeros(len(given + said)))
        for given, said in pairs
    ]


def test_an_episode_is_shown_turn_by_turn():
    env = make_system(TEXT, schemas=SCHEMAS, planner=PLAIN)
    played = play(env, TEXT, [plan("echo", "hi"), "nonsense", plan("answer", "5")])
    shown = show_transcript(TEXT, played.states[-1], turns_of(played), prompt=60).splitlines()
    prompts = [i for i, line in enumerate(shown) if line.startswith("  prompt")]
    assert len(prompts) == 3
    without = [line for line in shown if not line.startswith((" " * 12 + "Q", "  prompt"))]
    assert without[:3] == ["task      t", "query     what is 2 + 3?", "turn 1"]
    for block in (
        ["  planner   Tool: echo", "            Context: hi<|im_end|>", "  call      echo(hi)", "  seen      heard hi"],
        ["  seen      heard hi", "turn 2"],
        ["  planner   nonsense<|im_end|>", '  error     there is no line "Tool: name"', "turn 3"],
        ["  planner   Tool: answer", "            Context: 5<|im_end|>", "output    5", "ended     FINISHED"],
    ):
        text = "\n".join(shown)
        assert "\n".join(block) in text
    assert f"{len(played.said[0].tokens)} tokens: <|im_start|>" in shown[prompts[0]]


def test_a_transcript_of_a_state_alone():
    words = {"analyst": "add them", "verifier": "perhaps"}

    def call_tool(call):
        return run_tools(call) if call.kind == "tool" else Result(words[call.name])

    env = make_system(TEXT, schemas=SCHEMAS, turns=1, analyst=roles.analyst(), verifier=roles.verifier())
    played = play(env, TEXT, [plan("echo", "down")], call_tool)
    assert show_transcript(TEXT, played.states[0]).endswith("analysis  add them\nended     not yet")
    assert show_transcript(TEXT, played.states[-1]).endswith(
        "turn 1\nended     TOOL_FAILURE (echo: the server is down)"
    )
    played = play(env, TEXT, [plan("echo", "hi")], call_tool)
    assert "lapse     verifier: no line begins with STOP or CONTINUE" in show_transcript(TEXT, played.states[-1])
    for words["verifier"], verdict in (("STOP", "stop"), ("CONTINUE: not yet", "continue: not yet")):
        played = play(env, TEXT, [plan("add", '{"a": 1, "b": 2}')], call_tool)
        block = f'  call      add({{"a": 1, "b": 2}})\n  seen      3\n  verdict   {verdict}\n'
        assert block in show_transcript(TEXT, played.states[-1])


def test_long_entries_are_cut():
    env = make_system(TEXT, schemas=SCHEMAS, planner=PLAIN, max_tokens=100)
    played = play(env, TEXT, [plan("echo", "hi"), plan("answer", "5")], lambda _: Result("x" * 10**6))
    assert len(show_transcript(TEXT, played.states[-1], turns_of(played), prompt=100)) < 4000
