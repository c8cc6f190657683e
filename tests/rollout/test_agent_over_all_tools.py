"""The agent system over every kind of tool in hosted rollouts: calculator, Python, search, and an MCP server."""

import re
import sys
import textwrap
from concurrent.futures import Future

import jax
import numpy as np
import pytest
from agent_cases import agent_text, make_system, plan

import flowgrpo as fg
from flowgrpo.contracts import Completion, RewardResult
from flowgrpo.data.tokenizer import ChatTokenizer
from flowgrpo.rollout.hosted import hosted
from flowgrpo.rollout.records import from_json, to_json
from flowgrpo.rollout.replay import replay
from flowgrpo.sandbox import Sandbox
from flowgrpo.tools.calculator import calculator
from flowgrpo.tools.mcp import Stdio, mcp_tools
from flowgrpo.tools.python import python
from flowgrpo.tools.search import read_corpus, search
from flowgrpo.tools.toolset import toolset

pytest.importorskip("mcp")

SERVER = '''
from mcp.server.mcpserver import MCPServer

server = MCPServer("shop", log_level="ERROR")

@server.tool()
def price(item: str) -> str:
    """The price of an item."""
    return {"bell": "17 crowns"}[item]

server.run()
'''
TURNS = (
    plan("calculator", "17 * 3"),
    plan("python", "print(sum(range(10)))"),
    plan("search", "Halden"),
    plan("price", "bell"),
    plan("answer", "51"),
)


def scripted(text: ChatTokenizer):
    """An engine's `submit` that says the lines of `TURNS`, by the turns that are left."""

    def submit(request) -> Future:
        left = int(re.findall(r"Turns left: (\d)", text.decode(request.tokens))[-1])
        tokens = [*text.encode(TURNS[len(TURNS) - left]), text.stop_ids[-1]]
        future = Future()
        future.set_result(Completion(tokens, [-0.5] * len(tokens), [0] * len(tokens), "stop"))
        return future

    return submit


@pytest.mark.slow
@pytest.mark.parametrize("rendering", [fg.agent.fresh_context, fg.agent.growing_context])
def test_one_agent_calls_all_tools_and_its_record_replays_without(tmp_path, rendering):
    (tmp_path / "server.py").write_text(textwrap.dedent(SERVER))
    (tmp_path / "corpus.txt").write_text("Halden is a town that makes glass.\n\nOrsk is a town that makes bells.\n")
    text = agent_text()
    tasks = [fg.Task(str(n), "What do three bells cost?", ("51",), "prices") for n in range(4)]
    with (
        Sandbox() as sandbox,
        mcp_tools(Stdio(sys.executable, [str(tmp_path / "server.py")])) as server,
        toolset([calculator(), python(sandbox), search(read_corpus(tmp_path / "corpus.txt")), *server.tools]) as tools,
    ):
        make = {"schemas": tools.schemas, "turns": 5, "max_tokens": 200, "context_tokens": 6000, "rendering": rendering}
        env = make_system(text, **make)
        reward = fg.Reward(lambda task, output: RewardResult(float(output == task.answers[0])))
        rollout = hosted(env, scripted(text), call_tool=tools.call_tool, reward=reward, turn_deadline=60.0)
        played = rollout(tasks, jax.random.split(jax.random.key(0), 4), [0, 0, 1, 1]).trajectories
    for one in played:
        assert one.tools == ("calculator", "python", "search", "price", "")
        assert not any(one.errors)
        seen = [effect.result.text for effect in one.log]
        assert seen[:2] == ["51", "45"]
        assert "glass" in seen[2]
        assert seen[3] == "17 crowns"
        assert (one.output, one.outcome, one.correct) == ("51", 1.0, True)
        again = replay(env, from_json(to_json(one)))
        for turn, other in zip(one.turns, again.turns, strict=True):
            np.testing.assert_array_equal(turn.tokens, other.tokens)
        assert again.log == one.log
