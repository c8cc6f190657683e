"""MCP servers as toolsets, over stdio and HTTP: real servers, and some that are none."""

import contextlib
import os
import socket
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from flowgrpo.contracts import Call, Result
from flowgrpo.tools.mcp import Http, Stdio, mcp_tools
from flowgrpo.tools.mcp_link import GRACE
from flowgrpo.tools.toolset import ToolFailure, toolset
from flowgrpo.types import BadInput

pytest.importorskip("mcp")

SLACK = 2.0  # seconds that an answer may come after its deadline on a busy machine
START = 30.0  # seconds that a server of the SDK may take to start on a busy machine

SERVER = '''
import os, sys, time
from mcp.server.mcpserver import Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("test", log_level="ERROR")

@server.tool()
def add(a: int, b: int = 1) -> int:
    """Adds two numbers."""
    return a + b

@server.tool()
def refuse(why: str) -> str:
    """Refuses."""
    raise ToolError(why)

@server.tool()
def crash() -> str:
    """Raises."""
    raise KeyError("inside")

@server.tool()
def nap(seconds: float) -> str:
    """Sleeps."""
    time.sleep(seconds)
    return "slept"

@server.tool()
def die() -> str:
    """Ends the server."""
    print("these are my last words", file=sys.stderr, flush=True)
    os._exit(3)

@server.tool()
def draw() -> list:
    """Gives a picture."""
    return ["look:", Image(data=b"abc", format="png")]

@server.tool()
def flood(count: int) -> str:
    """Gives much text."""
    return "x" * count

@server.tool()
def secret() -> str:
    """Gives an environment variable."""
    return str(os.environ.get("CANARY")) + str(os.environ.get("GIVEN"))

@server.tool()
def number() -> int:
    """The number of the server's process."""
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
    """A toolset over a server that was started for it."""
    os.environ["CANARY"] = "ours"
    try:
        started = Stdio(sys.executable, [script], {"GIVEN": " theirs"})
        with mcp_tools(started, seconds=START) as server, toolset(server.tools) as tools:
            yield tools
    finally:
        del os.environ["CANARY"]


@contextlib.contextmanager
def http_server(script):
    """The address of a server on this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with subprocess.Popen([sys.executable, script, str(port)], stderr=subprocess.DEVNULL) as process:
        try:
            until = time.monotonic() + START
            while time.monotonic() < until:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                    break
                time.sleep(0.05)
            yield f"http://127.0.0.1:{port}/mcp"
        finally:
            process.kill()


def do(tools, name, **arguments):
    return tools.do(Call("tool", name, arguments))


def child(program):
    return Stdio(sys.executable, ["-c", textwrap.dedent(program)])


def running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rsplit(")", 1)[1].split()[0] != "Z"


# Over stdio -------------------------------------------------------------------------------------------


def test_a_servers_tools_are_tools_with_their_schemas(over_stdio):
    names = [schema["name"] for schema in over_stdio.schemas]
    assert names == ["add", "refuse", "crash", "nap", "die", "draw", "flood", "secret", "number"]
    assert over_stdio.schemas[0]["description"] == "Adds two numbers."
    assert over_stdio.schemas[0]["parameters"]["required"] == ["a"]
    assert do(over_stdio, "add", a=2, b=3) == Result("5")
    assert do(over_stdio, "add", a=2) == Result("3")


def test_arguments_are_checked_before_they_are_sent(over_stdio):
    assert do(over_stdio, "add", a="2") == Result('add: argument "a" must be an integer, not "2"', error=True)
    assert do(over_stdio, "add").error
    assert "unknown" in do(over_stdio, "add", a=1, c=1).text


def test_an_error_that_the_server_reports_is_an_observation(over_stdio):
    refused = do(over_stdio, "refuse", why="not on Sundays")
    assert refused.error
    assert "not on Sundays" in refused.text
    assert do(over_stdio, "crash").error
    assert do(over_stdio, "add", a=1).text == "2"


def test_content_that_is_no_text_is_described(over_stdio):
    assert do(over_stdio, "draw").text.startswith("look:\n(image, image/png, ")


def test_much_text_is_bounded(over_stdio):
    assert len(do(over_stdio, "flood", count=3_000_000).text) <= 4000


def test_a_started_server_does_not_get_our_environment(over_stdio):
    assert do(over_stdio, "secret").text == "None theirs"


def test_calls_from_many_threads_run_at_once(over_stdio):
    began, results = time.monotonic(), []
    threads = [threading.Thread(target=lambda: results.append(do(over_stdio, "nap", seconds=0.4))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [Result("slept")] * 8
    assert time.monotonic() - began < 8 * 0.4


def test_a_server_that_dies_is_a_failure_and_the_next_call_starts_another(over_stdio):
    first = do(over_stdio, "number")
    died = do(over_stdio, "die")
    assert not died.error
    assert "these are my last words" in died.failure
    second = do(over_stdio, "number")
    assert second.text.isdigit()
    assert second != first


@pytest.mark.slow
def test_a_slow_call_is_an_error_at_its_deadline_while_the_server_answers_others(script):
    with mcp_tools(Stdio(sys.executable, [script]), seconds=START, prefix="far.") as server:
        server._seconds = 1.0  # the start may take longer
        with toolset(server.tools) as tools:
            began, results = time.monotonic(), []
            slow = threading.Thread(target=lambda: results.append(do(tools, "far.nap", seconds=60)))
            slow.start()
            time.sleep(0.2)
            assert do(tools, "far.add", a=1) == Result("2")
            slow.join()
            assert time.monotonic() - began < 1.0 + SLACK
            assert results[0].error
            assert results[0].text.endswith("did not answer within 1 s")
            assert do(tools, "far.add", a=2) == Result("3")


@pytest.mark.slow
def test_closing_leaves_no_process_and_no_thread(script):
    before = threading.active_count()
    with mcp_tools(Stdio(sys.executable, [script]), seconds=START) as server, toolset(server.tools) as tools:
        pid = int(do(tools, "number").text)
        assert running(pid)
        results = []
        late = threading.Thread(target=lambda: results.append(do(tools, "nap", seconds=60)))
        late.start()
        time.sleep(0.3)
        began = time.monotonic()
        server.close()
        late.join()
        assert time.monotonic() - began < 2 * GRACE
        assert results[0].failure
        assert "was closed here" in do(tools, "number").failure
        server.close()
    assert not running(pid)
    until = time.monotonic() + SLACK
    while threading.active_count() > before and time.monotonic() < until:
        time.sleep(0.02)
    assert threading.active_count() == before


# Servers that are none --------------------------------------------------------------------------------


def test_a_command_that_is_not_there_is_bad_input():
    before = threading.active_count()
    with pytest.raises(BadInput, match=r"/nowhere/server.*mend the command"):
        mcp_tools(Stdio("/nowhere/server"))
    assert threading.active_count() == before


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("raise SystemExit('no such table')", "no such table"),
        ("print('Welcome!')", "failed"),
        ("import sys\nfor line in sys.stdin: print('{\"jsonrpc\": 7}', flush=True)", "did not answer within 1 s"),
        ("import time; time.sleep(60)", "did not answer within 1 s"),
        (
            "import sys\nfor line in sys.stdin: sys.stdout.buffer.write(b'\\xff\\xfe\\n'); sys.stdout.flush()",
            "MCP server",
        ),
    ],
)
@pytest.mark.slow
def test_a_program_that_speaks_no_mcp_is_a_failure_in_time(program, words, caplog):
    began = time.monotonic()
    with pytest.raises(ToolFailure, match=words):
        mcp_tools(child(program), seconds=1.0)
    assert time.monotonic() - began < 1.0 + 2 * GRACE
    caplog.clear()  # the SDK logs what it can't read


def test_an_address_without_a_server_is_a_failure():
    with pytest.raises(ToolFailure, match=r"127\.0\.0\.1:9"):
        mcp_tools("http://127.0.0.1:9/mcp", seconds=5.0)


@pytest.mark.parametrize(
    ("server", "settings", "words"),
    [
        ("ftp://host", {}, "must begin with http"),
        ("http://me:secret@host", {}, "no credentials"),
        ("http://host", {"seconds": 0}, "seconds is 0"),
        ("http://host", {"seconds": float("inf")}, "seconds is inf"),
    ],
)
def test_settings_that_can_not_work_are_refused(server, settings, words):
    with pytest.raises(BadInput, match=words):
        mcp_tools(server, **settings)


def test_a_missing_package_names_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(BadInput, match=r"flowgrpo\[mcp\]"):
        mcp_tools("http://host")


# Over HTTP --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_server_over_http_is_called_from_many_threads(script):
    with http_server(script) as url, mcp_tools(url, seconds=START) as server, toolset(server.tools) as tools:
        assert do(tools, "add", a=2, b=3) == Result("5")
        assert do(tools, "refuse", why="not on Sundays").error
        results = []
        threads = [threading.Thread(target=lambda a=a: results.append(do(tools, "add", a=a).text)) for a in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(map(int, results)) == list(range(1, 17))


@pytest.mark.slow
def test_a_server_over_http_that_goes_away_is_a_failure_in_time(script):
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(http_server(script))
        server = stack.enter_context(mcp_tools(Http(url, {"X-Token": "t"}), seconds=START))
        server._seconds = 2.0
        with toolset(server.tools) as tools:
            late = do(tools, "nap", seconds=60)
            assert "did not answer within 2 s" in late.text
            assert do(tools, "add", a=1) == Result("2")
            gone = do(tools, "die")
            assert gone.failure
            began = time.monotonic()
            assert do(tools, "add", a=1).failure
            assert time.monotonic() - began < 2.0 + GRACE + SLACK
