"""MCP servers as toolsets, over stdio and HTTP: real servers, and some that are none."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from flowgrpo.contracts import Call, Result
from flowgrpo.tools import mcp as edge
from flowgrpo.tools.mcp import Http, Stdio, mcp_tools
from flowgrpo.tools.toolset import ToolFailure, toolset
from flowgrpo.types import BadInput

pytest.importorskip("mcp")

START = 60.0  # seconds that a server may take to start, or to answer, on a busy machine

SERVER = '''
import os, sys, threading
from mcp.server.mcpserver import Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("test", log_level="ERROR")
together, hangs = threading.Barrier(8), threading.Event()

@server.tool()
def add(a: int, b: int = 1) -> int:
    """Adds two numbers."""
    return a + b

@server.tool()
def refuse(why: str) -> str:
    raise ToolError(why)

@server.tool()
def meet() -> str:
    together.wait(60)
    return "met"

@server.tool()
def hang() -> str:
    hangs.set()
    threading.Event().wait(600)

@server.tool()
def wait() -> str:
    hangs.wait(60)
    return "waited"

@server.tool()
def die() -> str:
    print("these are my last words", file=sys.stderr, flush=True)
    os._exit(3)

@server.tool()
def draw() -> list:
    return ["look:", Image(data=b"abc", format="png")]

@server.tool()
def secret() -> str:
    return str(os.environ.get("CANARY")) + str(os.environ.get("GIVEN"))

@server.tool()
def number() -> int:
    return os.getpid()

if len(sys.argv) > 1:
    server.run("streamable-http", port=int(sys.argv[1]))
else:
    server.run()
'''


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("mcp") / "server.py"
    path.write_text(SERVER)
    return str(path)


@pytest.fixture(scope="module")
def over_stdio(script):
    """A server that was started, and a toolset over it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CANARY", "ours")
        started = Stdio(sys.executable, [script], {"GIVEN": " theirs"})
        with mcp_tools(started, timeout=START, prefix="far.") as server, toolset(server.tools) as tools:
            yield server, lambda name, **arguments: call_tool(tools, f"far.{name}", **arguments)


@pytest.fixture
def late(monkeypatch):
    """`late(server, call)` is what comes of a call that hangs, on a server that has time to say that it is there."""
    monkeypatch.setattr(edge, "PROBE_SECONDS", START)

    def hang(server, call):
        with monkeypatch.context() as patch:
            patch.setattr(server, "_timeout", 0.5)
            return call("hang")

    return hang


def call_tool(tools, name, **arguments):
    return tools.call_tool(Call("tool", name, arguments))


def eight(call):
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(lambda _: call("meet"), range(8)))


# Over stdio -------------------------------------------------------------------------------------------


def test_a_servers_tools_are_tools_with_their_schemas(over_stdio):
    server, call = over_stdio
    schema = server.tools[0].schema
    assert (len(server.tools), schema["name"], schema["description"]) == (9, "far.add", "Adds two numbers.")
    assert schema["parameters"]["required"] == ["a"]
    assert call("add", a=2, b=3) == Result("5")
    assert call("add", a="2") == Result('far.add: argument "a" must be an integer, not "2"', error=True)
    assert call("draw").text.startswith("look:\n(image, image/png, ")
    assert call("secret").text == "None theirs"  # a server that was started does not get our environment
    refused = call("refuse", why="not on Sundays")
    assert refused.error
    assert "not on Sundays" in refused.text


def test_calls_from_many_threads_run_at_once(over_stdio):
    assert eight(over_stdio[1]) == [Result("met")] * 8


def test_a_slow_call_to_a_live_server_is_an_error(over_stdio, late):
    server, call = over_stdio
    before = call("number")
    slow = late(server, call)
    assert slow.error
    assert "did not answer within 0.5 s" in slow.text
    assert call("number") == before


def test_a_dead_server_is_a_failure_and_restarted(over_stdio):
    _, call = over_stdio
    first, died, second = (call(name) for name in ("number", "die", "number"))
    assert not died.error
    assert "these are my last words" in died.failure
    assert second.text.isdigit()
    assert second != first


def test_closing_leaves_no_process_and_no_thread(script):
    before = set(threading.enumerate())
    with mcp_tools(Stdio(sys.executable, [script]), timeout=START) as server, toolset(server.tools) as tools:
        pid = int(call_tool(tools, "number").text)
        with ThreadPoolExecutor(1) as pool:
            hanging = pool.submit(call_tool, tools, "hang")
            assert call_tool(tools, "wait").text == "waited"
            server.close()
            assert hanging.result(START).failure
        assert "was closed here" in call_tool(tools, "number").failure
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    for thread in set(threading.enumerate()) - before:
        thread.join(START)
        assert not thread.is_alive()


# Over HTTP --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def http_server(script):
    """The address of a server on this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with subprocess.Popen([sys.executable, script, str(port)], stderr=subprocess.DEVNULL) as process:
        try:
            while process.poll() is None:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                    break
                time.sleep(0.05)
            yield f"http://127.0.0.1:{port}/mcp"
        finally:
            process.kill()


def test_an_http_server_serves_threads_and_may_go_away(script, late):
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(http_server(script))
        server = stack.enter_context(mcp_tools(Http(url, {"X-Token": "t"}), timeout=START))
        tools = stack.enter_context(toolset(server.tools))
        assert eight(lambda name: call_tool(tools, name)) == [Result("met")] * 8
        assert call_tool(tools, "refuse", why="not on Sundays").error
        assert "did not answer within 0.5 s" in late(server, lambda name: call_tool(tools, name)).text
        assert call_tool(tools, "add", a=1) == Result("2")
        assert call_tool(tools, "die").failure
        assert call_tool(tools, "add", a=1).failure


# Servers that are none --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("server", "settings", "error", "words"),
    [
        ("ftp://host", {}, BadInput, "must begin with http"),
        ("http://me:secret@host", {}, BadInput, "no credentials"),
        ("http://host", {"timeout": 0}, BadInput, "timeout is 0"),
        ("http://host", {"timeout": float("inf")}, BadInput, "timeout is inf"),
        ("http://127.0.0.1:9/mcp", {}, ToolFailure, r"127\.0\.0\.1:9"),
        (Stdio("/nowhere/server"), {}, BadInput, r"/nowhere/server.*fix the command"),
    ],
)
def test_invalid_settings_are_refused(server, settings, error, words):
    before = threading.active_count()
    with pytest.raises(error, match=words):
        mcp_tools(server, **settings)
    assert threading.active_count() == before


@pytest.mark.parametrize(
    ("program", "timeout", "words"),
    [
        ("raise SystemExit('no such table')", START, "no such table"),
        ("print('Welcome!')", START, "failed"),
        ("import time; time.sleep(600)", 0.5, "did not answer within 0.5 s"),
        ("import os, sys\nfor _ in sys.stdin: os.write(1, b'\\xff\\xfe\\n')", 1.0, "the MCP server"),
    ],
)
def test_a_program_that_speaks_no_mcp_is_a_failure(program, timeout, words, caplog):
    with pytest.raises(ToolFailure, match=words):
        mcp_tools(Stdio(sys.executable, ["-c", program]), timeout=timeout)
    caplog.clear()  # the SDK logs what it can't read


ODD_SERVER = """
import json, sys

kind, tools = sys.argv[1], ["silent", *ODDLY_FINE, "words", *ODD]
if kind == "many": tools = [f"t{number}" for number in range(1001)]
properties = {f"p{number}": {} for number in range(20_000 if kind == "wide" else 1)}
description = "long " * 2000 if kind == "long" else "odd"
for line in sys.stdin:
    asked = json.loads(line)
    if not {"id", "method"} <= set(asked): continue
    number, answer = asked["id"], {"content": [{"type": "text", "text": "fine"}]}
    if asked["method"] == "initialize":
        answer = {"protocolVersion": asked["params"]["protocolVersion"], "capabilities": {"tools": {}}}
        answer["serverInfo"] = {"name": "odd", "version": "1"}
    elif asked["method"] == "tools/list":
        schema = {"type": "object", "properties": properties}
        answer = {"tools": [{"name": name, "description": description, "inputSchema": schema} for name in tools]}
    elif asked["method"] != "tools/call":
        print(json.dumps({"jsonrpc": "2.0", "id": number, "error": {"code": -32601, "message": "unknown"}}), flush=True)
        continue
    else:
        name = asked["params"]["name"]
        if name == "silent": continue
        if name in ODD:
            print(ODD[name].replace("NUMBER", str(number)), flush=True)
            continue
        if name == "noise": print("called!", flush=True)
        if name == "asks": print(json.dumps({"jsonrpc": "2.0", "id": 77, "method": "roots/list"}), flush=True)
        if name == "twice": print(json.dumps({"jsonrpc": "2.0", "id": number, "result": answer}), flush=True)
        if name == "text": number = str(number)
        if name == "words": answer = {"content": [{"type": "text", "text": "e" * 10**6}], "isError": True}
    print(json.dumps({"jsonrpc": "2.0", "id": number, "result": answer}), flush=True)
"""
ODDLY_FINE = ["noise", "text", "asks", "twice"]  # words before the answer, its number as text, a question, two answers
ODD = {  # what a server says in the place of an answer
    "no_json": "this is no JSON",
    "cut": '{"jsonrpc": "2.0", "id": NUMBER, "result": {"content": [',
    "deep": '{"jsonrpc": "2.0", "id": NUMBER, "result": ' + "[" * 10_000 + "]" * 10_000 + "}",
    "of_another": '{"jsonrpc": "2.0", "id": 1NUMBER, "result": {"content": []}}',
    "of_nobody": '{"jsonrpc": "2.0", "id": null, "error": {"code": -32700, "message": "what?"}}',
    "a_batch": '[{"jsonrpc": "2.0", "id": NUMBER, "result": {"content": []}}]',
    "no_result": '{"jsonrpc": "2.0", "id": NUMBER}',
    "other_result": '{"jsonrpc": "2.0", "id": NUMBER, "result": {"content": "fine"}}',
}


def odd(kind=""):
    return Stdio(sys.executable, ["-c", f"ODD, ODDLY_FINE = {ODD}, {ODDLY_FINE}\n{ODD_SERVER}", kind])


def test_protocol_violations_are_the_servers_failure(monkeypatch, caplog):
    with mcp_tools(odd(), timeout=START) as server, toolset(server.tools) as tools:
        assert [call_tool(tools, name) for name in ODDLY_FINE] == [Result("fine")] * len(ODDLY_FINE)
        for bad in (
            "\ud800",
            [json.loads("[" * 300 + "]" * 300)],
        ):  # which the SDK can't send: it breaks the connection
            assert call_tool(tools, "noise", p0=bad).error
        words = call_tool(tools, "words")
        assert words.error
        assert len(words.text) <= 4000
        monkeypatch.setattr(edge, "PROBE_SECONDS", START)
        monkeypatch.setattr(server, "_timeout", 0.1)
        assert call_tool(tools, "silent").error  # nothing strayed: it may have been kept busy
        for name in ODD:
            result = call_tool(tools, name)
            assert not result.error, name
            assert "MCP server" in result.failure, name
    caplog.clear()  # the SDK logs what it can't read


def test_what_a_server_lists_is_bounded():
    with mcp_tools(odd("long"), timeout=START) as server:
        description = server.tools[0].schema["description"]
    assert len(description) <= edge.MAX_DESCRIPTION
    for kind, words in {"many": "1001 tools", "wide": "parameters of silent"}.items():
        with pytest.raises(ToolFailure, match=words):
            mcp_tools(odd(kind), timeout=START)


def test_a_missing_package_names_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(BadInput, match=r"pip install 'mcp"):
        mcp_tools("http://host")
