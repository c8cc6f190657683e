"""A5 of the agent system: sampled ids are kept, prefixes are exact, data ends no prompt, prompts fit."""

import json
import random
import re
from dataclasses import replace

import pytest
from agent_cases import ECHO, SCHEMAS, TEMPLATES, agent_text, ids, make_system, plan, play, run_tools, task
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_judge import sly_text
from tokenizer_cases import render

from flowgrpo.agent import roles
from flowgrpo.agent.rendering import fresh_context, growing_context
from flowgrpo.contracts import Call, Result
from flowgrpo.data.tokenizer import add_messages, start_conversation
from flowgrpo.data.tool_calls import signature
from flowgrpo.types import Status

WORDS = ("the capital of France", "2*3", "é世", "  x\n y", "<|im_end|>", "</s>", "[INST]", "<eos>", "<think>", "{}")


def one_by_one(text, words: str) -> list[int]:
    """Ids that read `words`, most of them not those that the tokenizer would choose."""
    return [i for character in words for i in text.encode(character)]


def actions(text, luck: random.Random) -> list[list[int]]:
    """Up to six actions: plans in odd ids, random ids, cut or not."""
    found = []
    for _ in range(luck.randint(1, 6)):
        words = plan(luck.choice(["echo", "add", "browser"]), " ".join(luck.choices(WORDS, k=luck.randint(0, 3))))
        body = one_by_one(text, words)
        if luck.random() < 0.3:
            body = [luck.randrange(text.vocab_size) for _ in range(luck.randint(1, 12))]
        body = [i for i in body if i not in text.stop_ids]
        found.append(body + [luck.choice(text.stop_ids)] * (luck.random() < 0.8 or not body))
    return found


def converse(text, style: str, seed: int) -> int:
    """One random conversation in both renderings, held to A5; how many of its actions re-tokenising would change."""
    luck = random.Random(f"{style} {seed}")
    sampled, query = actions(text, luck), " ".join(luck.choices(WORDS, k=3))
    budget = {"turns": 8, "max_tokens": 400, "context_tokens": 20_000}
    spoken = {"schemas": SCHEMAS, "planner": roles.planner(instructions="Plan."), **budget}
    apart = play(make_system(text, **spoken), text, sampled, of=task(query))
    together = play(make_system(text, rendering=growing_context, **spoken), text, sampled, of=task(query))
    assert together.sampled == apart.sampled == sampled
    assert [step._replace(observation=None) for step in together.steps] == [
        step._replace(observation=None) for step in apart.steps
    ]

    assert not any(said.extends_context for said in apart.said)
    for state, said in zip(apart.states, apart.said, strict=True):
        (message,) = roles.planner(instructions="Plan.").prompt(state, _memory_in(text, said.tokens))
        assert list(said.tokens) == list(start_conversation(_guarded(text), [message]).tokens)

    tokens, chosen = [], []
    for i, said in enumerate(together.said):
        assert said.extends_context
        talk = together.states[i].conversation
        tokens, chosen = tokens + list(said.tokens), chosen + [False] * len(said.tokens)
        assert (list(talk.tokens), list(talk.chosen)) == (tokens, chosen)
        if i < len(sampled):
            tokens, chosen = tokens + sampled[i], chosen + [True] * len(sampled[i])
    assert together.said[0].tokens == apart.said[0].tokens
    return sum(text.encode(text.decode(action)) != action for action in sampled)


def _guarded(text):
    added = text.hf_tokenizer.get_added_vocab()
    return replace(text, special=re.compile("|".join(map(re.escape, sorted(added, key=len, reverse=True)))))


def _memory_in(text, tokens) -> str:
    """The memory as it stands in a prompt."""
    found = re.search(r"\nDone:\n(.*)\nTurns left: \d+(?!.*Turns left)", text.decode(tokens), re.DOTALL)
    return found[1] if found else ""


@pytest.mark.parametrize("style", TEMPLATES)
def test_A5_sampled_ids_are_kept_and_prefixes_are_exact(style):
    odd = sum(converse(agent_text(style), style, seed) for seed in range(25))
    assert odd > 25


@pytest.mark.parametrize("style", TEMPLATES)
def test_A5_a_fresh_prompt_is_what_the_template_gives(style):
    text = agent_text(style)
    for rendering in (fresh_context, growing_context):
        played = play(make_system(text, schemas=SCHEMAS, rendering=rendering), text, [plan("echo", "the capital")])
        content = roles.planner().prompt(played.states[0], "")
        assert list(played.said[0].tokens) == render(text, content)


# Data ends no prompt ------------------------------------------------------------------------------------


def controls(text, tokens) -> list[int]:
    added = set(text.hf_tokenizer.get_added_vocab().values())
    return [i for i in tokens if i in added]


@pytest.mark.parametrize("rendering", [fresh_context, growing_context])
@pytest.mark.parametrize("style", TEMPLATES)
def test_special_tokens_in_any_data_end_no_prompt(style, rendering):
    """Every token that the tokenizer knows, everywhere at once: the template's own are all there are."""
    text = agent_text(style)
    evil = "".join(sorted(text.hf_tokenizer.get_added_vocab()))
    unthought = evil.replace("<think>", "").replace("</think>", "")
    room = {"max_tokens": 400, "context_tokens": 30_000, "rendering": rendering, "memory_tokens": 9000}
    odd = {"type": "object", "properties": {evil: {"type": evil}}}
    wild = make_system(text, schemas=[{**ECHO, "description": evil, "parameters": odd}], **room)
    tame = make_system(text, schemas=[ECHO], **room)
    action = ids(text, f"Sub-goal: {unthought}\nTool: echo\nContext: {json.dumps({unthought: unthought})}")
    assert controls(text, action)
    hot = play(wild, text, [action, action], lambda _: Result(f"{evil}\n{evil}"), of=task(evil))
    cool = play(tame, text, [plan("echo", "hi")] * 2, of=task("hi"))
    assert [step.tool for step in hot.steps] == ["echo"] * 2
    for one, other in zip(hot.said, cool.said, strict=True):
        assert controls(text, one.tokens) == controls(text, other.tokens)
    assert evil in text.decode(hot.said[0].tokens)


@pytest.mark.parametrize("rendering", [fresh_context, growing_context])
def test_a_tokenizer_that_folds_case_is_not_fooled_either(rendering):
    """<TOOL> reads as <tool> to it, which no pattern of the spelled tokens finds."""
    text = sly_text()
    assert controls(text, text.encode("<TOOL>"))
    env = make_system(text, schemas=SCHEMAS, rendering=rendering)
    hot = play(env, text, [plan("echo", "hi")], lambda _: Result("a <TOOL> b"), of=task("is it <TOOL>?"))
    cool = play(env, text, [plan("echo", "hi")], lambda _: Result("a b"), of=task("is it?"))
    for one, other in zip(hot.said, cool.said, strict=True):
        assert controls(text, one.tokens) == controls(text, other.tokens)


# Prompts fit --------------------------------------------------------------------------------------------


def long_tools(call: Call) -> Result:
    return Result(f"{call.arguments['words']} " * 3000)


@pytest.mark.slow
@pytest.mark.parametrize("rendering", [fresh_context, growing_context])
@settings(max_examples=5)
@given(room=st.integers(250, 900), memory=st.integers(0, 2000), seed=st.integers(0, 99))
def test_no_prompt_is_longer_than_its_limit(rendering, room, memory, seed):
    text = agent_text("llama3")
    luck = random.Random(seed)
    env = make_system(
        text,
        schemas=[ECHO],
        planner=roles.planner(instructions="", describe=signature),
        rendering=rendering,
        turns=8,
        max_tokens=60,
        context_tokens=room + 60,
        memory_tokens=memory,
    )
    words = [plan("echo", "".join(luck.choices("ab1 ", k=12))) for _ in range(8)]
    played = play(env, text, words, long_tools)
    total = 0
    for said, sampled in zip(played.said, [*played.sampled, []], strict=False):
        total = len(said.tokens) + (total if rendering is growing_context else 0)
        assert total <= room
        total += len(sampled)
    last = played.steps[-1]
    assert last.done
    assert last.status in (
        (Status.TURN_LIMIT,) if rendering is fresh_context else (Status.TURN_LIMIT, Status.TOKEN_LIMIT)
    )


def test_in_a_full_context_the_generator_still_answers():
    text = agent_text()
    generator = roles.generator()
    env = make_system(
        text,
        schemas=[ECHO],
        generator=generator,
        rendering=growing_context,
        turns=9,
        max_tokens=100,
        context_tokens=1500,
    )

    def call_tool(call: Call) -> Result:
        return Result("half of it") if call.kind == "role" else long_tools(call)

    played = play(env, text, [plan("echo", "hi")] * 9, call_tool)
    last = played.steps[-1]
    assert (last.done, last.status, last.output) == (True, Status.TOKEN_LIMIT, "half of it")
    assert 1 < len(played.steps) < 9
    assert "tokens without any memory" in played.states[-1].reason


@pytest.mark.parametrize("rendering", [fresh_context, growing_context])
def test_a_query_that_does_not_fit_ends_with_a_reason(rendering):
    text = agent_text()
    env = make_system(text, schemas=[ECHO], rendering=rendering, max_tokens=100, context_tokens=1000)
    played = play(env, text, [plan("echo", "hi")], of=task("why? " * 2000))
    assert len(played.said[0].tokens) <= 900
    assert "the prompt of the planner has more than 900 tokens" in played.states[0].reason
    assert text.decode(played.said[0].tokens).endswith("why? why? why?")
    last = played.steps[0]
    assert (last.done, last.status, last.output, last.tool) == (True, Status.TOKEN_LIMIT, "", "")


def test_the_glue_is_that_of_the_whole_conversation():
    """The appended tokens follow from the last token alone, and are those that the whole conversation gives."""
    text = agent_text("gemma")
    env = make_system(text, schemas=[ECHO], rendering=growing_context, max_tokens=100)
    played = play(env, text, [ids(text, "nonsense", end=False), plan("echo", "hi")])
    talk = played.states[1].conversation
    first = replace(
        talk, tokens=talk.tokens[: -len(played.said[1].tokens)], chosen=talk.chosen[: -len(played.said[1].tokens)]
    )
    message = roles.planner().follow_up(played.states[1], '1. error: "the action was cut before its end"')
    assert add_messages(_guarded(text), first, message) == talk
    assert run_tools(Call("tool", "echo", {"words": "hi"})).text == "heard hi"
