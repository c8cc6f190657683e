"""Access to a gateway: host names, origins, content types, tokens, and connections that send nothing."""

import contextlib
import socket
import time

import httpx
import pytest
from gateway_cases import post

import flowgrpo as fg
from flowgrpo.gateway import auth
from flowgrpo.gateway.auth import AccessPolicy
from flowgrpo.gateway.server import Gateway
from flowgrpo.gateway.wire import ChatResponse

ASK = {"messages": [{"role": "user", "content": "what is two"}]}
PAGE = "http://localhost:3000"


async def complete(_request):
    return [ChatResponse(content="4", finish_reason="stop", tokens=(1,), prompt=(1,))]


async def update_weights(_body):
    return {"version": 7}


@pytest.fixture(scope="module")
def root():
    with Gateway(
        model="tiny",
        decode=str,
        complete=complete,
        update_weights=update_weights,
        access=AccessPolicy(origins=(PAGE,), hosts=("box.local",)),
    ) as gateway:
        yield gateway.url.removesuffix("/v1")


@pytest.mark.parametrize("path", ["/weights", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"content-type": "application/json; charset=utf-8"}, 200),
        ({"host": "localhost:8000"}, 200),
        ({"host": "[::1]:8000"}, 200),
        ({"host": "box.local"}, 200),
        ({"origin": PAGE}, 200),
        ({"host": "evil.example:8000"}, 403),  # DNS rebinding
        ({"host": "localhost.evil.example"}, 403),
        ({"host": "127.0.0.1@evil.example"}, 403),
        ({"host": ""}, 403),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),  # a sandboxed frame
        ({"origin": f"{PAGE}.evil.example"}, 403),
        ({"origin": "\xff"}, 403),
        ({"content-type": "text/plain"}, 415),  # pages may send it without a preflight
        ({"content-type": "application/x-www-form-urlencoded", "referer": PAGE}, 415),
        ({"content-type": "application/x-www-form-urlencoded", "sec-fetch-site": "cross-site"}, 415),
        ({"content-type": "multipart/form-data; boundary=x"}, 415),
    ],
)
def test_foreign_pages_and_host_names_are_refused(root, path, headers, status):
    raw = {name: value.encode("latin-1") for name, value in headers.items()}
    actual, body = post(root + path, ASK, headers=raw)
    assert actual == status, body
    if status != 200:
        assert "\n" not in body["error"]["message"]


def test_only_programs_may_label_any_body_a_form(root):
    headers = {"content-type": "application/x-www-form-urlencoded"}  # curl -d, urllib
    assert post(f"{root}/v1/chat/completions", ASK, headers=headers)[0] == 200
    assert post(f"{root}/weights", ASK, headers=headers)[0] == 415


def test_an_allowed_origin_passes_its_preflight(root):
    asks = {"origin": PAGE, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    preflight = httpx.options(f"{root}/v1/chat/completions", headers=asks)
    assert (preflight.status_code, preflight.headers["access-control-allow-headers"]) == (204, "authorization")
    posted = httpx.post(f"{root}/v1/chat/completions", json=ASK, headers={"origin": PAGE})
    for response in (preflight, posted):
        assert response.headers["access-control-allow-origin"] == PAGE
    other = httpx.options(f"{root}/v1/chat/completions", headers=asks | {"origin": "http://evil.example"})
    assert (other.status_code, "access-control-allow-origin" in other.headers) == (403, False)


def bearer(token: str, scheme: str = "Bearer") -> dict[str, str]:
    return {"authorization": f"{scheme} {token}"}


@pytest.mark.parametrize("admin_token", ["master", None])
def test_clients_and_administrators_have_different_tokens(admin_token):
    with Gateway(
        model="tiny",
        decode=str,
        complete=complete,
        update_weights=update_weights,
        access=AccessPolicy(token="guest", admin_token=admin_token),
    ) as gateway:
        root = gateway.url.removesuffix("/v1")
        for headers in ({}, bearer("gues"), bearer("guestt"), bearer("guest", "Basic"), {"authorization": "guest"}):
            assert post(f"{gateway.url}/chat/completions", ASK, headers=headers)[0] == 401
        for headers in (bearer("guest"), bearer("guest", "bearer"), bearer(" guest")):
            assert post(f"{gateway.url}/chat/completions", ASK, headers=headers)[0] == 200
        assert post(f"{root}/weights", {}, headers=bearer("guest"))[0] == 403
        assert httpx.get(f"{root}/health", headers=bearer("guest")).json() == {"status": "ok"}
        status = 401 if admin_token is None else 200
        for path in ("/weights", "/v1/chat/completions"):
            assert post(root + path, ASK, headers=bearer("master"))[0] == status
        if admin_token:
            assert httpx.get(f"{root}/health", headers=bearer("master")).json()["sessions"] == 0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"token": ""}, "token is empty"),
        ({"admin_token": "  "}, "admin_token is empty"),
        ({"token": "a b"}, "token is no word"),
        ({"token": "ä"}, "token is no word"),
        ({"host": "0.0.0.0"}, r"host=0\.0\.0\.0 can be reached from other machines: set a token"),
        ({"host": "0.0.0.0", "admin_token": "a"}, "set a token"),
        ({"origins": ("localhost:3000",)}, "origin 'localhost:3000' must be a scheme and a host"),
        ({"origins": ("http://a/b",)}, "must be a scheme and a host"),
    ],
)
def test_bad_tokens_hosts_and_origins_are_refused(settings, words):
    with pytest.raises(fg.BadInput, match=words):
        AccessPolicy(**settings)


def is_closed(client: socket.socket, seconds: float) -> bool:
    client.settimeout(seconds)
    try:
        return client.recv(1000) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def test_connections_that_send_no_request_are_closed(monkeypatch):
    """Silent ones, and those that send a byte now and then, of a first request or of a later one."""
    monkeypatch.setattr(auth, "HEAD_SECONDS", 0.4)
    whole = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with Gateway(model="tiny", decode=str, complete=complete) as gateway:
        address = (gateway.host, gateway.port)
        silent, slow, later = (socket.create_connection(address, timeout=20) for _ in range(3))
        later.sendall(whole)
        assert b"200" in later.recv(1000)
        start, sent = time.monotonic(), 0
        with contextlib.suppress(ConnectionError):
            while time.monotonic() - start < 3:
                for client in (slow, later):
                    client.sendall(b"GET /"[sent : sent + 1] or b"a")
                sent += 1
                time.sleep(0.05)
        assert sent < 40
        assert is_closed(silent, 10)
        assert is_closed(slow, 10)
        assert is_closed(later, 10)
        for client in (silent, slow, later):
            client.close()
        assert httpx.get(f"{gateway.url}/models").status_code == 200


def test_new_connections_close_idle_ones(monkeypatch):
    monkeypatch.setattr(auth, "MAX_CONNECTIONS", 8)
    with Gateway(model="tiny", decode=str, complete=complete) as gateway, httpx.Client() as browser:
        crowd = [socket.create_connection((gateway.host, gateway.port), timeout=20) for _ in range(40)]
        assert browser.get(f"{gateway.url}/models").status_code == 200
        assert is_closed(crowd[0], 10)
        assert not is_closed(crowd[-1], 0.1)
        for client in crowd:
            client.close()
