"""Remote generation against scripted servers on loopback: order, retries, deadlines that hold, failures that speak."""

import concurrent.futures
import contextlib
import gc
import json
import math
import re
import socket
import ssl
import subprocess
import threading
import time
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from flowgrpo.generate.openai_client import first_token_logprobs, remote
from flowgrpo.generate.openai_wire import RemoteFailure, TextCompletion, TextRequest, TokenLogprob, retry_after
from flowgrpo.types import BadInput

MANY = 60.0  # seconds after which a wait is a failure
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
        with self.server.changed:
            self.server.seen.append((self.path, dict(self.headers), body))
            self.server.changed.notify_all()
            turn = len(self.server.seen) - 1
        self.server.script(self, body, turn)

    def log_message(self, *_):
        pass

    def reply(self, answer, status=200, **headers):
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        for name, value in {**headers, "Content_Length": len(data)}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(data)


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, script):
        super().__init__(("127.0.0.1", 0), Handler)
        self.script, self.seen, self.connections = script, [], 0
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.changed, self.over = threading.Condition(), threading.Event()

    def handle_error(self, *_):
        pass  # clients that hang up are what is tested

    def wait_for(self, count):
        """Until that many requests have come."""
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.seen) >= count, MANY)


@pytest.fixture
def serve():
    """`serve(script)` starts a server that calls `script(handler, body, number of the request)`."""
    with contextlib.ExitStack() as stack:

        def start(script, certificate=None):
            server = stack.enter_context(Server(script))
            if certificate is not None:
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                context.load_cert_chain(certificate)
                server.socket = context.wrap_socket(server.socket, server_side=True)
                server.url = server.url.replace("http:", "https:")
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
            return stack.enter_context(remote(url, "judge", **{"backoff": 0.02, "timeout": MANY, **settings}))

        yield connect


def chat(text, finish_reason="stop", **more):
    return {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": finish_reason, **more}]}


def ask(text, **settings):
    return TextRequest([{"role": "user", "content": text}], **settings)


def one(client, request=None):
    return client.generate([request or ask("hello")])[0]


# Scripts of servers -----------------------------------------------------------------------------------


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


def raw(data, drop=b""):
    """Sends these bytes and hangs up, or goes on with `drop` for ever, 50 ms apart."""

    def script(handler, _body, _turn):
        handler.wfile.write(data)
        while drop and not handler.server.over.wait(0.05):
            handler.wfile.write(drop)
        handler.close_connection = True

    return script


def stall(handler, _body, _turn):
    handler.server.over.wait(MANY)


drip = raw(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n", b" ")
drip_head = raw(b"HTTP/1.1 200 OK\r\nX-Long: ", b"x")


# Answers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "target"), [("", "/v1"), ("/v1/", "/v1"), ("/a/v2", "/a/v2")])
def test_chat_and_prompt_requests_on_the_wire(serve, client, monkeypatch, path, target):
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY", "https_proxy", "OPENAI_API_KEY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    server = serve(echo)
    settings = {"max_tokens": 7, "temperature": 0.5, "top_p": 0.9, "seed": 3}
    odd = "\ud800 lone, \x00 zero, é, 🙂, \u2028"
    requests = [ask(odd, stop=["\n"], **settings), TextRequest(prompt="once", stop="\n", **settings)]
    answers = client(server.url + path, concurrency=1).generate(requests)
    assert answers == [TextCompletion(odd, "stop"), TextCompletion("once!", "length")]
    (chat_path, headers, chat_body), (prompt_path, _, prompt_body) = server.seen
    assert (chat_path, prompt_path) == (f"{target}/chat/completions", f"{target}/completions")
    shared = {"model": "judge", "stop": ["\n"], **settings}
    assert chat_body == {"messages": [{"role": "user", "content": odd}], **shared}
    assert prompt_body == {"prompt": "once", **shared}
    assert "Authorization" not in headers


def test_requests_share_the_connections_and_keep_their_order(serve, client):
    """Eight are under way at once, and the first is answered when all others have come."""
    together, last = threading.Barrier(8), threading.Event()

    def script(handler, body, turn):
        if turn < 8:
            together.wait(MANY)
        if turn == 59:
            last.set()
        if body["seed"] == 0:
            last.wait(MANY)
        echo(handler, body, turn)

    server = serve(script)
    answers = client(server, concurrency=8).generate([ask(str(i), seed=i) for i in range(60)])
    assert [answer.text for answer in answers] == [str(i) for i in range(60)]
    assert server.connections == 8


def test_a_connection_is_reused_and_replaced_when_closed(serve, client):
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


def test_chunks_and_bodies_without_a_length_are_read(serve, client):
    body = json.dumps(chat("hello")).encode()
    chunks = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    server = serve(first_then(raw(chunks), raw(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + body)))
    assert [one(client(server, retries=0)).text for _ in range(2)] == ["hello"] * 2


# Log-probabilities ------------------------------------------------------------------------------------


def test_first_token_logprobs_add_tokens_that_print_the_same(serve, client):
    top = [{"token": token, "logprob": math.log(p)} for token, p in (("Yes", 0.5), ("No", 0.25), ("Yes", 0.125))]
    server = serve(always(chat("Yes", "length", logprobs={"content": [{**top[0], "top_logprobs": top}]})))
    logprobs = client(server).first_token_logprobs([{"role": "user", "content": "Right?"}], 3)
    assert {token: math.exp(logp) for token, logp in logprobs.items()} == pytest.approx({"Yes": 0.625, "No": 0.25})
    asked = server.seen[0][2]
    assert (asked["logprobs"], asked["top_logprobs"], asked["max_tokens"], asked["temperature"]) == (True, 3, 1, 1.0)


def test_a_prompt_reports_logprobs_too(serve, client):
    table = {"tokens": ["a", "b"], "token_logprobs": [-1, -2.5], "top_logprobs": [{"a": -1}, {"c": -0.5, "b": -2.5}]}
    server = serve(always({"choices": [{"text": "ab", "finish_reason": "stop", "logprobs": table}]}))
    answer = one(client(server), TextRequest(prompt="x", top_logprobs=2))
    assert answer.logprobs == (TokenLogprob("a", -1.0, {"a": -1.0}), TokenLogprob("b", -2.5, {"c": -0.5, "b": -2.5}))
    assert server.seen[0][2]["logprobs"] == 2
    assert first_token_logprobs(answer) == {"a": -1.0}


@pytest.mark.parametrize(
    "logprobs",
    [None, {}, {"content": None}, {"content": [{"token": "Yes", "logprob": -1}]}]
    + [{"content": [{"token": "Yes", "logprob": bad, "top_logprobs": []}]} for bad in (None, "x", True, math.nan)],
)
def test_missing_logprobs_are_an_error(serve, client, logprobs):
    answer = one(client(serve(always(chat("Yes", logprobs=logprobs)))), ask("Right?", top_logprobs=2))
    assert (answer.text, answer.finish_reason) == ("", "error")
    assert "logprob" in answer.error


def test_first_token_logprobs_raise_on_failure(serve, client):
    judge = client(serve(first_then(always(chat("", logprobs={"content": []})), stall)))
    with pytest.raises(RemoteFailure, match="no first token"):
        judge.first_token_logprobs([], 2)
    with pytest.raises(RemoteFailure, match="deadline") as failure:
        judge.first_token_logprobs([], 2, deadline=0.05)
    assert failure.value.reason == "timeout"


# Failures ---------------------------------------------------------------------------------------------

CUT = raw(b'HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"choices": [')
OUT = {"error": {"message": "out of memory"}}


def huge(head):
    return raw(b"HTTP/1.1 200 OK\r\n" + head + b"\r\n" + b" " * 300_000)


@pytest.mark.parametrize(
    ("script", "attempts", "words"),
    [
        (CUT, 3, "without sending complete message body"),
        *[(always(OUT, status), 3, f"HTTP {status}.*out of memory.*attempt 3 of 3") for status in (429, 500, 503)],
        *[(always({"message": "no such model"}, s), 1, f"HTTP {s}.*no such model") for s in (301, 400, 404)],
        *[(huge(head), 1, "larger than max_bytes=200000") for head in (b"", b"Content-Length: 9000000\r\n")],
        *[(always(body), 1, "not JSON") for body in (b"<html>oops", b"", b"\xff\xfe\xfa", b"[" * 100_000)],
        *[(always(body), 1, "no choices") for body in (b"{}", b"null", b"[1]")],
        (always({"choices": []}), 1, "no choices.0"),
        (always({"choices": "abc"}), 1, "no choices.0.message"),
        (always({"choices": [{"message": {}, "finish_reason": "stop"}]}), 1, "no choices.0.message.content"),
        (always(chat(None)), 1, "content of the answer is null, where a str is needed"),
        (always({"choices": [{"message": {"content": "a"}}]}), 1, "no choices.0.finish_reason"),
        (always(chat("", "content_filter")), 1, "content_filter"),
        *[(always({"error": error}), 1, "no such model") for error in ("no such model", {"message": "no such model"})],
    ],
)
def test_a_failure_is_one_sentence_after_all_useful_attempts(serve, client, script, attempts, words):
    server = serve(script)
    judge = client(server, retries=2, max_bytes=200_000, concurrency=1)
    answer = one(judge)
    assert (answer.text, answer.finish_reason, len(server.seen)) == ("", "error", attempts)
    assert re.search(words, answer.error)
    assert server.url in answer.error
    assert "\n" not in answer.error
    assert len(answer.error) <= 500
    server.script = echo
    assert one(judge).text == "hello"


@pytest.mark.parametrize("trouble", [CUT] + [always(b"", 429, Retry_After=odd) for odd in ("soon", "-5", "Wed, 99 F")])
def test_transient_failures_are_retried(serve, client, trouble):
    server = serve(first_then(trouble, echo))
    assert (one(client(server)), len(server.seen)) == (TextCompletion("hello", "stop"), 2)


def test_retry_after_is_honoured(serve, client):
    begin = time.monotonic()
    assert one(client(serve(first_then(always(b"", 429, Retry_After="1"), echo)))).text == "hello"
    assert time.monotonic() - begin >= 0.99
    assert 9000 < retry_after(formatdate(time.time() + 10_000, usegmt=True)) <= 10_000


def test_a_wait_beyond_the_deadline_is_not_started(serve, client):
    answer = one(client(serve(always(b"busy", 429, Retry_After="600"))), ask("hello", deadline=MANY))
    assert answer.finish_reason == "error"
    assert "HTTP 429" in answer.error
    assert "600 s" in answer.error


def test_a_refused_connection_is_an_error(client):
    with socket.socket() as taken:  # bound, but nobody listens
        taken.bind(("127.0.0.1", 0))
        answer = one(client(f"http://127.0.0.1:{taken.getsockname()[1]}", retries=1))
    assert answer.finish_reason == "error"
    assert "ConnectionRefusedError" in answer.error
    assert "attempt 2 of 2" in answer.error


# Deadlines --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", [stall, drip, drip_head, always(b"", 503)])
def test_a_deadline_holds_whatever_the_server_does(serve, client, script):
    """S3: over silence, dripping bodies and heads, and every retry."""
    server = serve(script)
    judge = client(server, retries=1000)
    answer = one(judge, ask("hello", deadline=0.3))
    assert (answer.text, answer.finish_reason) == ("", "timeout")
    assert "deadline of 0.3 s" in answer.error
    server.script = echo
    assert one(judge).text == "hello"  # the worker is free again


def test_a_deadline_holds_in_the_queue(serve, client):
    server = serve(stall)
    judge = client(server, concurrency=1)
    first = judge.submit(ask("first"))
    server.wait_for(1)  # the clock sleeps until the attempt's end
    answers = judge.generate([ask(str(i), deadline=d) for i, d in enumerate([0.2, 0.1, 0.0, -math.inf])])
    assert {answer.finish_reason for answer in answers} == {"timeout"}
    assert all("queued" in answer.error for answer in answers)
    assert not first.done()


@pytest.mark.parametrize("script", [stall, drip])
def test_the_timeout_bounds_each_attempt(serve, client, script):
    assert one(client(serve(first_then(script, echo)), timeout=0.3, retries=100)).text == "hello"
    answer = one(client(serve(script), timeout=0.1, retries=1))
    assert answer.finish_reason == "timeout"
    assert "0.1 s (attempt 2 of 2)" in answer.error


# The key ----------------------------------------------------------------------------------------------


def test_the_key_is_sent_and_never_shown(serve, client, caplog, capfd):
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
    shown = [repr(judge), repr(answer), repr(failure.value), caplog.text]
    assert not [text for text in [*shown, *capfd.readouterr()] if KEY in text]


# Cancelling and closing -------------------------------------------------------------------------------


def test_cancel_in_the_queue_and_in_flight(serve, client):
    server = serve(first_then(stall, echo))
    judge = client(server, concurrency=1)
    running, waiting, last = (judge.submit(ask(text)) for text in ("running", "waiting", "last"))
    server.wait_for(1)
    assert waiting.cancel()
    assert running.cancel()  # cuts the connection, so that the worker is free
    done, _ = concurrent.futures.wait([running, waiting], MANY)
    assert done == {running, waiting}
    assert last.result(MANY).text == "last"
    assert [body["messages"][0]["content"] for _, _, body in server.seen] == ["running", "last"]


@pytest.mark.parametrize("script", [stall, drip, always(b"", 503, Retry_After="600")])
def test_close_resolves_requests_in_flight_and_ends_its_threads(serve, client, script):
    """S4: nothing hangs and nothing is silently dropped."""
    server, before = serve(script), set(threading.enumerate())
    judge = client(server, concurrency=3, timeout=1000.0)
    futures = [judge.submit(ask(str(i))) for i in range(10)]
    server.wait_for(3)
    threads = [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("remote_")]
    judge.close()
    answers = [future.result(0) for future in futures]
    assert {(answer.text, answer.finish_reason) for answer in answers} == {("", "cancelled")}
    assert all("closed" in answer.error for answer in answers)
    for thread in threads:
        thread.join(MANY)
    assert not any(thread.is_alive() for thread in threads)
    judge.close()  # again is no matter


def test_close_may_be_called_in_a_callback(serve, client):
    judge, closed = client(serve(echo)), threading.Event()
    judge.submit(ask("hello")).add_done_callback(lambda _: (judge.close(), closed.set()))
    assert closed.wait(MANY)
    assert one(judge).finish_reason == "cancelled"


# TLS --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    """A certificate for 127.0.0.1 and its key, in one file."""
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=loopback"
    make += f" -addext subjectAltName=IP:127.0.0.1 -keyout {path} -out {path.with_suffix('.crt')}"
    subprocess.run(make.split(), check=True, capture_output=True, timeout=MANY)
    path.write_text(path.read_text() + path.with_suffix(".crt").read_text())
    return path


@pytest.mark.parametrize("script", [stall, drip])
def test_https_with_a_private_authority_answers_and_holds_deadlines(serve, client, authority, script):
    server = serve(echo, authority)
    judge = client(server, context=ssl.create_default_context(cafile=authority), concurrency=2)
    assert [answer.text for answer in judge.generate([ask(str(i)) for i in range(10)])] == [str(i) for i in range(10)]
    server.script = script
    assert one(judge, ask("hello", deadline=0.3)).finish_reason == "timeout"


def test_an_untrusted_certificate_is_refused_once(serve, client, authority):
    answer = one(client(serve(echo, authority)))
    assert answer.finish_reason == "error"
    assert "SSLCertVerificationError" in answer.error
    assert "attempt 1 of 4" in answer.error


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_hanging_tls_handshake_times_out(client):
    """The HTTP library leaves the socket of a cancelled greeting to the garbage collector."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        judge = client(f"https://127.0.0.1:{silent.getsockname()[1]}")
        assert one(judge, ask("hello", deadline=0.2)).finish_reason == "timeout"
    judge.close()
    gc.collect()


# Bad input --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        *[({"url": url}, "must begin with http:// or https://") for url in ("127.0.0.1:8000", "ftp://127.0.0.1")],
        *[({"url": url}, "must name a host") for url in ("http://", "http:///v1", "http://127.0.0.1:0")],
        *[({"url": f"http://{at}"}, "is no address") for at in ("127.0.0.1:port", "127.0.0.1:99999", "[::1", "a..b")],
        ({"url": "http://127.0.0.1/v1?key=1"}, "must end with its path"),
        *[({"url": url}, "printable ASCII") for url in ("http://127.0.0.1/v1\r\nX: y", "http://a/a b", None)],
        ({"url": "http://user:secret@127.0.0.1"}, "without spaces or credentials"),
        *[({"api_key": key}, "api_key must be") for key in ("", "secret words", "secret\nline", "secreté", b"secret")],
        *[({name: bad}, f"{name} is {bad}") for name in ("timeout", "max_bytes") for bad in (0, math.inf, None)],
        ({"backoff": -1}, "backoff is -1"),
        ({"model": ""}, "model=''"),
    ],
)
def test_invalid_settings_are_refused_without_showing_the_key(settings, message):
    with pytest.raises(BadInput, match=message) as error:
        remote(**{"url": "http://127.0.0.1:9", "model": "judge", **settings})
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        *[(bad, "give one of them") for bad in (TextRequest(), TextRequest([], "both"), TextRequest("hello"))],
        ("hello", "takes a TextRequest, not str"),
        *[(ask("", **bad), "out of range") for bad in ({"max_tokens": 0}, {"top_p": 0}, {"temperature": -1})],
        (ask("", temperature=math.nan), "must be numbers"),
        (ask("", deadline=math.nan), "must be numbers"),
        (ask("", max_tokens=None), "must be numbers"),
        (ask({1, 2}), "can't be written as JSON"),
    ],
)
def test_an_invalid_request_raises_before_any_is_sent(serve, client, request_, message):
    server = serve(echo)
    judge = client(server)
    with pytest.raises(BadInput, match=f"request 1: .*{message}"):
        judge.generate([ask("hello"), request_])
    with pytest.raises(BadInput, match=message):
        judge.submit(request_)
    assert not server.seen
