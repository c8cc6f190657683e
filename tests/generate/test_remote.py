"""Remote generation against scripted servers on loopback: order, retries, deadlines that hold, failures that speak."""

import concurrent.futures
import contextlib
import json
import math
import socket
import ssl
import subprocess
import threading
import time
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from flowgrpo.generate.remote import first_token, remote
from flowgrpo.generate.wire import RemoteFailure, TextCompletion, TextRequest, TokenLogprob
from flowgrpo.types import BadInput

SLACK = 5.0  # seconds that an answer may come after its deadline on a busy machine; what stalls does so for longer
MANY = 30.0  # seconds after which a wait is a failure
KEY = "sk-test-0123456789"


class Handler(BaseHTTPRequestHandler):
    """Hands every request to the script of its server."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def setup(self):
        super().setup()
        self.server.connections += 1

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.seen.append((self.path, dict(self.headers), body))
            turn = len(self.server.seen) - 1
        self.server.script(self, body, turn)

    def log_message(self, *_):
        pass

    def reply(self, answer, status=200, **headers):
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, script):
        super().__init__(("127.0.0.1", 0), Handler)
        self.script, self.seen, self.connections = script, [], 0
        self.lock, self.over = threading.Lock(), threading.Event()

    def handle_error(self, *_):
        pass  # clients that hang up are what is tested

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"


@pytest.fixture
def serve():
    """`serve(script)` starts a server that calls `script(handler, body, number of the request)`."""
    with contextlib.ExitStack() as stack:

        def start(script, context=None):
            server = stack.enter_context(Server(script))
            if context is not None:
                server.socket = context.wrap_socket(server.socket, server_side=True)
            thread = threading.Thread(target=server.serve_forever, args=(0.02,))
            thread.start()
            for last in (thread.join, server.shutdown, server.over.set):
                stack.callback(last)
            return server

        yield start


@pytest.fixture
def client():
    """`client(server or url, ...)` is a Remote that is closed at the end; quick to try again."""
    with contextlib.ExitStack() as stack:

        def connect(server, **settings):
            url = server if isinstance(server, str) else server.url
            return stack.enter_context(remote(url, "judge", **{"backoff": 0.02, "timeout": 5.0, **settings}))

        yield connect


def chat(text, finish_reason="stop", **more):
    return {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": finish_reason, **more}]}


def ask(text, **settings):
    return TextRequest([{"role": "user", "content": text}], **settings)


def echo(handler, body, _turn):
    """Answers with the words it was asked."""
    if "prompt" in body:
        handler.reply({"choices": [{"text": body["prompt"] + "!", "finish_reason": "length"}]})
    else:
        handler.reply(chat(body["messages"][-1]["content"]))


def always(answer, status=200, **headers):
    return lambda handler, _body, _turn: handler.reply(answer, status, **headers)


def first_then(first, then):
    """A script whose first request goes to `first` and all others to `then`."""
    return lambda handler, body, turn: (first if turn == 0 else then)(handler, body, turn)


def stall(handler, _body, _turn):
    """Never answers."""
    handler.server.over.wait(MANY)


def drip(handler, _body, _turn):
    """Sends its head at once, and a byte of the body every 50 ms."""
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
    while not handler.server.over.wait(0.05):
        handler.wfile.write(b" ")


def drip_head(handler, _body, _turn):
    """A byte of a header that never ends every 50 ms."""
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nX-Long: ")
    while not handler.server.over.wait(0.05):
        handler.wfile.write(b"x")


def raw(data):
    """Sends these bytes, and hangs up."""

    def script(handler, _body, _turn):
        handler.wfile.write(data)
        handler.close_connection = True

    return script


def one(client, request=None):
    return client.generate([request or ask("hello")])[0]


def seconds(function):
    """What `function` returns, and how long that took."""
    start = time.monotonic()
    return function(), time.monotonic() - start


# Answers ----------------------------------------------------------------------------------------------


def test_a_chat_and_a_prompt_say_what_they_ask_for(serve, client):
    server = serve(echo)
    settings = {"max_tokens": 7, "temperature": 0.5, "top_p": 0.9, "seed": 3}
    requests = [ask("hello", stop=["\n"], **settings), TextRequest(prompt="once", stop="\n", **settings)]
    answers = client(server, concurrency=1).generate(requests)
    assert answers == [TextCompletion("hello", "stop"), TextCompletion("once!", "length")]
    (chat_path, _, chat_body), (prompt_path, _, prompt_body) = server.seen
    assert (chat_path, prompt_path) == ("/v1/chat/completions", "/v1/completions")
    shared = {"model": "judge", "stop": ["\n"], **settings}
    assert chat_body == {"messages": [{"role": "user", "content": "hello"}], **shared}
    assert prompt_body == {"prompt": "once", **shared}


@pytest.mark.parametrize(("path", "target"), [("", "/v1"), ("/", "/v1"), ("/v1/", "/v1"), ("/a/v2", "/a/v2")])
def test_the_path_of_the_url_is_kept_and_is_v1_where_there_is_none(serve, client, path, target):
    server = serve(echo)
    assert one(client(server.url + path)).text == "hello"
    assert server.seen[0][0] == f"{target}/chat/completions"


def test_200_requests_through_8_connections_keep_their_order(serve, client):
    busy, most = set(), []

    def script(handler, body, turn):
        busy.add(turn)
        most.append(len(busy))
        time.sleep(0.001 * (turn % 5))  # later ones overtake
        busy.discard(turn)
        echo(handler, body, turn)

    server = serve(script)
    answers = client(server, concurrency=8).generate([ask(str(i)) for i in range(200)])
    assert [answer.text for answer in answers] == [str(i) for i in range(200)]
    assert server.connections <= 8
    assert 1 < max(most) <= 8


def test_a_connection_is_kept_and_replaced_when_the_server_left_it(serve, client):
    server = serve(echo)
    judge = client(server, concurrency=1, retries=0)
    judge.generate([ask(str(i)) for i in range(5)])
    assert server.connections == 1

    def leave(handler, body, turn):
        echo(handler, body, turn)
        handler.close_connection = True  # without having said so

    server.script = leave
    assert [one(judge).text for _ in range(3)] == ["hello"] * 3
    assert server.connections == 3


# Log-probabilities ------------------------------------------------------------------------------------

TOP = [
    {"token": "Yes", "logprob": math.log(0.5)},
    {"token": "No", "logprob": math.log(0.25)},
    {"token": "Yes", "logprob": math.log(0.125), "bytes": [0]},  # prints the same
]
SCORED = {"content": [{"token": "Yes", "logprob": math.log(0.5), "top_logprobs": TOP}]}


def test_first_token_logprobs_asks_for_one_token_and_adds_what_prints_the_same(serve, client):
    server = serve(always(chat("Yes", "length", logprobs=SCORED)))
    found = client(server).first_token_logprobs([{"role": "user", "content": "Right?"}], 3)
    assert {token: math.exp(logp) for token, logp in found.items()} == pytest.approx({"Yes": 0.625, "No": 0.25})
    asked = server.seen[0][2]
    assert (asked["logprobs"], asked["top_logprobs"], asked["max_tokens"], asked["temperature"]) == (True, 3, 1, 1.0)


def test_a_prompt_reports_logprobs_too(serve, client):
    table = {"tokens": ["a", "b"], "token_logprobs": [-1, -2.5], "top_logprobs": [{"a": -1}, {"c": -0.5, "b": -2.5}]}
    server = serve(always({"choices": [{"text": "ab", "finish_reason": "stop", "logprobs": table}]}))
    answer = one(client(server), TextRequest(prompt="x", top_logprobs=2))
    assert answer.logprobs == (TokenLogprob("a", -1.0, {"a": -1.0}), TokenLogprob("b", -2.5, {"c": -0.5, "b": -2.5}))
    assert server.seen[0][2]["logprobs"] == 2
    assert first_token(answer) == {"a": -1.0}


@pytest.mark.parametrize(
    "logprobs",
    [None, {}, {"content": None}, {"content": [{"token": "Yes", "logprob": -1}]}]
    + [{"content": [{"token": "Yes", "logprob": bad, "top_logprobs": []}]} for bad in (None, "x", True, math.nan)],
)
def test_logprobs_that_were_asked_for_and_are_not_there_are_an_error(serve, client, logprobs):
    judge = client(serve(always(chat("Yes", logprobs=logprobs))))
    answer = one(judge, ask("Right?", top_logprobs=2))
    assert (answer.text, answer.finish_reason) == ("", "error")
    assert "logprob" in answer.error
    with pytest.raises(RemoteFailure, match="logprob"):
        judge.first_token_logprobs([], 2)


def test_a_judge_without_a_first_token_or_within_no_time_raises(serve, client):
    judge = client(serve(first_then(always(chat("", logprobs={"content": []})), stall)))
    with pytest.raises(RemoteFailure, match="no first token"):
        judge.first_token_logprobs([], 2)
    with pytest.raises(RemoteFailure, match="deadline") as failure:
        judge.first_token_logprobs([], 2, deadline=0.05)
    assert failure.value.reason == "timeout"


# Trying again -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [429, 500, 503])
def test_what_passes_is_tried_again(serve, client, status):
    server = serve(first_then(always({"error": {"message": "busy"}}, status), echo))
    assert one(client(server)) == TextCompletion("hello", "stop")
    assert len(server.seen) == 2
    assert server.connections == 1


def test_retry_after_is_honoured_in_seconds_and_as_a_date(serve, client):
    server = serve(first_then(always(b"", 429, Retry_After="1"), echo))
    answer, took = seconds(lambda: one(client(server)))
    assert (answer.text, took > 0.95) == ("hello", True)
    server = serve(first_then(always(b"", 429, Retry_After=formatdate(time.time() + 2, usegmt=True)), echo))
    answer, took = seconds(lambda: one(client(server)))
    assert (answer.text, took > 0.7) == ("hello", True)


def test_a_wait_that_the_deadline_forbids_is_not_begun(serve, client):
    judge = client(serve(always(b"busy", 429, Retry_After="60")))
    answer, took = seconds(lambda: one(judge, ask("hello", deadline=MANY)))
    assert (answer.finish_reason, took < SLACK) == ("error", True)
    assert "HTTP 429" in answer.error
    assert "60 s" in answer.error


@pytest.mark.parametrize("header", ["soon", "-5", "nan", "Wed, 99 Foo"])
def test_a_retry_after_that_is_none_is_no_matter(serve, client, header):
    assert one(client(serve(first_then(always(b"", 429, Retry_After=header), echo)))).text == "hello"


def test_always_500_ends_with_what_the_server_said(serve, client):
    server = serve(always({"error": {"message": "out of memory"}}, 500))
    answer = one(client(server, retries=2))
    assert (answer.text, answer.finish_reason, len(server.seen)) == ("", "error", 3)
    assert "HTTP 500" in answer.error
    assert "out of memory" in answer.error
    assert "attempt 3 of 3" in answer.error
    assert server.url in answer.error


@pytest.mark.parametrize("status", [301, 400, 401, 404, 422])
def test_what_does_not_pass_is_not_tried_again(serve, client, status):
    server = serve(always({"message": "unknown model"}, status))
    answer = one(client(server))
    assert (answer.finish_reason, len(server.seen)) == ("error", 1)
    assert f"HTTP {status}" in answer.error
    assert "unknown model" in answer.error


def test_a_refused_connection_is_an_error(client):
    with socket.socket() as taken:  # bound, but nobody listens
        taken.bind(("127.0.0.1", 0))
        answer = one(client(f"http://127.0.0.1:{taken.getsockname()[1]}", retries=1))
    assert answer.finish_reason == "error"
    assert "ConnectionRefusedError" in answer.error
    assert "attempt 2 of 2" in answer.error


def test_a_truncated_body_is_tried_again(serve, client):
    cut = raw(b'HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"choices": [')
    assert one(client(serve(first_then(cut, echo)))).text == "hello"
    answer = one(client(serve(cut), retries=1))
    assert answer.finish_reason == "error"
    assert "IncompleteRead" in answer.error


# Deadlines --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", [stall, drip, drip_head, always(b"", 503)])
def test_a_deadline_holds_whatever_the_server_does(serve, client, script):
    """S3: over silence, dripping bodies and heads, and every retry."""
    server = serve(script)
    judge = client(server, retries=1000)
    answer, took = seconds(lambda: one(judge, ask("hello", deadline=0.4)))
    assert (answer.text, answer.finish_reason) == ("", "timeout")
    assert 0.35 < took < 0.4 + SLACK
    assert "deadline of 0.4 s" in answer.error
    server.script = echo
    assert one(judge).text == "hello"  # the worker is free again


def test_a_deadline_holds_in_the_queue(serve, client):
    server = serve(stall)
    judge = client(server, concurrency=1)
    first = judge.submit(ask("first"))
    while not server.seen:  # the clock sleeps until the attempt's end
        time.sleep(0.005)
    answers, took = seconds(lambda: judge.generate([ask(str(i), deadline=0.2) for i in range(20)]))
    assert {answer.finish_reason for answer in answers} == {"timeout"}
    assert all("queued" in answer.error for answer in answers)
    assert took < 0.2 + SLACK
    assert not first.done()


@pytest.mark.parametrize("deadline", [0.0, -1.0, -math.inf])
def test_a_deadline_that_has_passed_is_a_timeout(serve, client, deadline):
    answer = one(client(serve(stall)), ask("hello", deadline=deadline))
    assert answer.finish_reason == "timeout"


@pytest.mark.parametrize("script", [stall, drip])
def test_the_timeout_bounds_each_attempt(serve, client, script):
    judge = client(serve(first_then(script, echo)), timeout=0.2)
    answer, took = seconds(lambda: one(judge))
    assert (answer.text, took < 0.3 + SLACK) == ("hello", True)
    server = serve(script)
    answer = one(client(server, timeout=0.1, retries=1))
    assert (answer.finish_reason, len(server.seen)) == ("timeout", 2)
    assert "0.1 s (attempt 2 of 2)" in answer.error


def test_one_slow_answer_does_not_delay_the_others(serve, client):
    server = serve(lambda handler, body, turn: (stall if body["seed"] == 0 else echo)(handler, body, turn))
    answers = client(server, concurrency=2).generate(
        [ask(str(i), seed=i, deadline=MANY if i else 0.5) for i in range(10)]
    )
    assert [answer.finish_reason for answer in answers] == ["timeout"] + ["stop"] * 9


# Answers that are none --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"<html>oops", "not JSON"),
        (b"", "not JSON"),
        (b"\xff\xfe\xfa", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"{}", "no choices"),
        (b"null", "no choices"),
        (b"[1]", "no choices"),
        (b'{"choices": []}', "no choices.0"),
        (b'{"choices": "abc"}', "no choices.0.message"),
        (b'{"choices": [{"message": {}, "finish_reason": "stop"}]}', "no choices.0.message.content"),
        (json.dumps(chat(None)).encode(), "content of the answer is null, where a str is needed"),
        (json.dumps(chat(["a"])).encode(), "where a str is needed"),
        (b'{"choices": [{"message": {"content": "a"}}]}', "no choices.0.finish_reason"),
        (json.dumps(chat("", "content_filter")).encode(), "content_filter"),
        (b'{"error": {"message": "no such model"}}', "no such model"),
        (b'{"error": "no such model"}', "no such model"),
    ],
)
def test_an_answer_that_is_none_is_one_clear_sentence(serve, client, body, said):
    server = serve(always(body))
    answer = one(client(server))
    assert (answer.text, answer.finish_reason, len(server.seen)) == ("", "error", 1)
    assert said in answer.error
    assert "\n" not in answer.error
    assert len(answer.error) <= 500


@pytest.mark.parametrize("sized", [True, False])
def test_a_huge_body_is_refused_and_the_next_answer_read(serve, client, sized):
    huge = b"HTTP/1.1 200 OK\r\n" + (b"Content-Length: 9000000\r\n" if sized else b"") + b"\r\n" + b" " * 100_000
    judge = client(serve(first_then(raw(huge), echo)), max_bytes=10_000, concurrency=1)
    answer = one(judge)
    assert answer.finish_reason == "error"
    assert "larger than max_bytes=10000" in answer.error
    assert one(judge).text == "hello"


def test_chunks_and_bodies_without_a_length_are_read(serve, client):
    body = json.dumps(chat("hello")).encode()
    chunks = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    server = serve(first_then(raw(chunks), raw(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + body)))
    assert [one(client(server, retries=0)).text for _ in range(2)] == ["hello"] * 2


# The key ----------------------------------------------------------------------------------------------


def test_the_key_is_sent_and_said_nowhere(serve, client, caplog, capfd):
    caplog.set_level(0)

    def refuse(handler, _body, _turn):
        handler.reply({"error": {"message": f"bad key {handler.headers['Authorization']}"}}, 401)

    server = serve(refuse)
    judge = client(server, api_key=KEY)
    answer = one(judge)
    assert server.seen[0][1]["Authorization"] == f"Bearer {KEY}"
    assert "bad key Bearer ***" in answer.error
    with pytest.raises(RemoteFailure) as failure:
        judge.first_token_logprobs([], 1)
    pool = judge.submit.__self__
    said = [repr(judge), repr(pool), repr(pool._settings), repr(answer), repr(failure.value), caplog.text]
    assert not [text for text in [*said, *capfd.readouterr()] if KEY in text]


def test_without_a_key_none_is_sent_and_the_environment_is_not_read(serve, client, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    server = serve(echo)
    assert one(client(server)).text == "hello"
    assert "Authorization" not in server.seen[0][1]


@pytest.mark.parametrize("key", ["", "two words", "line\nbreak", "clé", b"bytes"])
def test_a_key_that_no_header_holds_is_refused_without_repeating_it(key):
    with pytest.raises(BadInput, match="api_key must be") as error:
        remote("http://127.0.0.1:9", "judge", api_key=key)
    assert not key or str(key) not in str(error.value)


# Cancelling and closing -------------------------------------------------------------------------------


def test_cancel_before_the_start_and_under_way(serve, client):
    server = serve(first_then(stall, echo))
    judge = client(server, concurrency=1)
    running, waiting, last = (judge.submit(ask(text)) for text in ("running", "waiting", "last"))
    while not server.seen:
        time.sleep(0.005)
    assert waiting.cancel()
    assert running.cancel()  # cuts the connection, so that the worker is free
    done, _ = concurrent.futures.wait([running, waiting], MANY)
    assert done == {running, waiting}
    assert last.result(MANY).text == "last"
    assert [body["messages"][0]["content"] for _, _, body in server.seen] == ["running", "last"]
    assert not last.cancel()


def test_cancel_ends_the_wait_between_attempts(serve, client):
    server = serve(first_then(always(b"", 503), echo))
    judge = client(server, concurrency=1, backoff=30.0)
    waiting = judge.submit(ask("waiting"))
    while not server.seen:
        time.sleep(0.005)
    time.sleep(0.05)
    assert waiting.cancel()
    assert one(judge, ask("next", deadline=MANY)).text == "next"


@pytest.mark.parametrize("script", [stall, drip, always(b"", 503)])
def test_close_with_requests_in_flight_answers_them_and_ends_its_threads(serve, client, script):
    """S4: nothing hangs and nothing is silently dropped."""
    server, before = serve(script), set(threading.enumerate())
    judge = client(server, concurrency=3, backoff=30.0)
    futures = [judge.submit(ask(str(i))) for i in range(10)]
    while len(server.seen) < 3:
        time.sleep(0.005)
    _, took = seconds(judge.close)
    assert took < SLACK
    answers = [future.result(0) for future in futures]
    assert {(answer.text, answer.finish_reason) for answer in answers} == {("", "cancelled")}
    assert all("closed" in answer.error for answer in answers)
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("remote_")]
    judge.close()  # again is no matter


def test_close_may_be_called_where_an_answer_arrives(serve, client):
    judge, closed = client(serve(echo)), threading.Event()
    judge.submit(ask("hello")).add_done_callback(lambda _: (judge.close(), closed.set()))
    assert closed.wait(MANY)


# TLS --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    """A certificate for 127.0.0.1 and its key, in one file."""
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=loopback"
    make += f" -addext subjectAltName=IP:127.0.0.1 -keyout {path} -out {path.with_suffix('.crt')}"
    try:
        subprocess.run(make.split(), check=True, capture_output=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        pytest.fail("install the command openssl: the TLS tests make a certificate with it")
    path.write_text(path.read_text() + path.with_suffix(".crt").read_text())
    return path


def secure(serve, script, authority):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority)
    return serve(script, context).url.replace("http:", "https:")


def test_https_with_a_private_authority(serve, client, authority):
    url = secure(serve, echo, authority)
    trusted = ssl.create_default_context(cafile=authority)
    judge = client(url, context=trusted, concurrency=2)
    assert [answer.text for answer in judge.generate([ask(str(i)) for i in range(10)])] == [str(i) for i in range(10)]


@pytest.mark.parametrize("script", [stall, drip])
def test_a_deadline_holds_over_https(serve, client, authority, script):
    judge = client(secure(serve, script, authority), context=ssl.create_default_context(cafile=authority))
    answer, took = seconds(lambda: one(judge, ask("hello", deadline=0.3)))
    assert (answer.finish_reason, took < 0.3 + SLACK) == ("timeout", True)


def test_a_stranger_over_https_is_refused_once(serve, client, authority):
    answer, took = seconds(lambda: one(client(secure(serve, echo, authority), backoff=MANY)))
    assert (answer.finish_reason, took < SLACK) == ("error", True)
    assert "SSLCertVerificationError" in answer.error


def test_a_greeting_that_never_comes_is_cut(client):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        judge = client(f"https://127.0.0.1:{silent.getsockname()[1]}")
        answer, took = seconds(lambda: one(judge, ask("hello", deadline=0.2)))
        assert (answer.finish_reason, took < 0.2 + SLACK) == ("timeout", True)
        _, took = seconds(judge.close)
        assert took < SLACK


# Bad input --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("127.0.0.1:8000", "must begin with http:// or https://"),
        ("ftp://127.0.0.1", "must begin with"),
        ("http://", "must name a host"),
        ("http:///v1", "must name a host"),
        ("http://127.0.0.1:port", "is no address"),
        ("http://127.0.0.1:99999", "is no address"),
        ("http://127.0.0.1:0", "must name a host, and a port above 0"),
        ("http://[::1", "is no address"),
        ("http://a..b", "is no address"),
        ("http://127.0.0.1/v1?key=1", "must end with its path"),
        ("http://127.0.0.1/v1\r\nX: y", "printable ASCII"),
        ("http://127.0.0.1/a b", "printable ASCII"),
        ("http://user:secret@127.0.0.1", "without spaces or credentials"),
        (None, "printable ASCII"),
    ],
)
def test_a_url_that_names_no_server_is_refused(url, said):
    with pytest.raises(BadInput, match=said) as error:
        remote(url, "judge")
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    "settings",
    [
        {"model": ""},
        {"timeout": 0},
        {"timeout": math.inf},
        {"timeout": None},
        {"backoff": -1},
        {"retries": -1},
        {"retries": 1.5},
        {"concurrency": 0},
        {"max_bytes": 0},
    ],
)
def test_settings_out_of_range_are_refused(settings):
    name = next(iter(settings))
    with pytest.raises(BadInput, match=f"{name}="):
        remote("http://127.0.0.1:9", **{"model": "judge", **settings})


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (TextRequest(), "give one of them"),
        (TextRequest([], "both"), "give one of them"),
        (TextRequest("hello"), "give one of them"),
        ("hello", "takes a TextRequest, not str"),
        (ask("hello", max_tokens=0), "out of range"),
        (ask("hello", top_p=0), "out of range"),
        (ask("hello", temperature=-1), "out of range"),
        (ask("hello", temperature=math.nan), "must be numbers"),
        (ask("hello", deadline=math.nan), "must be numbers"),
        (ask("hello", max_tokens=None), "must be numbers"),
        (ask({1, 2}), "can't be written as JSON"),
    ],
)
def test_a_request_that_is_wrong_in_itself_raises_before_any_is_sent(serve, client, request_, said):
    server = serve(echo)
    judge = client(server)
    with pytest.raises(BadInput, match=f"request 1: .*{said}"):
        judge.generate([ask("hello"), request_])
    with pytest.raises(BadInput, match=said):
        judge.submit(request_)
    assert not server.seen


def test_what_a_model_wrote_can_be_sent(serve, client):
    odd = "\ud800 lone, \x00 zero, é, 🙂, \u2028"
    assert one(client(serve(echo)), ask(odd)).text == odd
