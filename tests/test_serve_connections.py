"""Connections of the server: heads that never end, uploads that are refused, hosts of other names."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

uvicorn = pytest.importorskip("uvicorn", reason="uvicorn is not installed: pip install 'attendless[serve]'")

from starlette.requests import Request  # noqa: E402
from starlette.responses import PlainTextResponse  # noqa: E402
from uvicorn.protocols.http.h11_impl import H11Protocol  # noqa: E402

from attendless.serve import connection  # noqa: E402
from attendless.serve.hosts import KnownHosts, is_known  # noqa: E402
from attendless.serve.intake import Refused, read_body  # noqa: E402

MOST = 100_000


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Reads a body as the server does; refuses what is larger than `MOST` and, at /full, everything."""
    try:
        if scope["path"] == "/full":
            raise Refused(503, "full")
        found = await read_body(Request(scope, receive), MOST) if scope["method"] == "POST" else b""
        response = PlainTextResponse(str(len(found)))
    except Refused as error:
        response = PlainTextResponse(error.reason, error.status, {"Connection": "close"})
    await response(scope, receive, send)


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    before, connection.TO_SEND_HEAD = connection.TO_SEND_HEAD, 0.5
    listening = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_level="critical", lifespan="off", http=connection.limited(H11Protocol))
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    yield listening.getsockname()[1]
    server.should_exit = True
    thread.join()
    connection.TO_SEND_HEAD = before


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=20)


def everything(sock: socket.socket) -> bytes:
    found = b""
    while part := sock.recv(65536):
        found += part
    return found


@pytest.mark.parametrize("sent", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Slow: "])
def test_half_a_head_is_not_waited_for(port: int, sent: bytes) -> None:
    with connect(port) as sock:
        sock.sendall(sent)
        found = everything(sock)
    assert found.startswith(b"HTTP/1.1 408 ")
    assert "did not arrive within 0.5 seconds" in json.loads(found.partition(b"\r\n\r\n")[2])["error"]


def test_a_head_that_trickles_in_is_not_waited_for(port: int) -> None:
    began = time.monotonic()
    with connect(port) as sock, contextlib.suppress(ConnectionError):
        while time.monotonic() - began < 20:
            sock.sendall(b"X")
            time.sleep(0.05)
    assert time.monotonic() - began < 5


def test_requests_one_after_the_other(port: int) -> None:
    """The timer of the head does not end a connection in use, but the second head has to arrive too."""
    request = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with connect(port) as sock:
        for _ in range(6):
            sock.sendall(request)
            found = b""
            while not found.endswith(b"\r\n\r\n0"):
                found += sock.recv(65536)
            assert found.startswith(b"HTTP/1.1 200 ")
            time.sleep(0.15)
        sock.sendall(request[:20])
        assert everything(sock).startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize(("path", "status"), [("/", b"413"), ("/full", b"503")])
@pytest.mark.parametrize("size", [11_000_000, 60_000_000])
def test_an_upload_that_is_refused_is_told_why(port: int, path: str, status: bytes, size: int) -> None:
    """All of it is sent before the answer is read, as simple clients do: the connection is not reset."""
    with connect(port) as sock:
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {size}\r\n\r\n"
        sock.sendall(head.encode())
        for _ in range(size // 1_000_000):
            sock.sendall(bytes(1_000_000))
        assert everything(sock).startswith(b"HTTP/1.1 " + status)


def test_an_upload_without_end_is_cut_off(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "TO_READ", 0.3)
    began = time.monotonic()
    with connect(port) as sock, contextlib.suppress(ConnectionError):
        sock.sendall(b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        while time.monotonic() - began < 20:
            sock.sendall(b"10000\r\n" + bytes(0x10000) + b"\r\n")
    assert time.monotonic() - began < 10


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:8000", "127.0.0.1:8000", "[::1]:80", "10.1.2.3", "", "mine:80"]
)
def test_own_names_are_known(host: str) -> None:
    assert is_known(host, {"mine"})


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "[x", "mine.org"])
def test_names_of_others_are_not(host: str) -> None:
    assert not is_known(host, {"mine"})
    assert is_known(host, {"*"})


def test_a_request_for_another_host_is_refused() -> None:
    from starlette.testclient import TestClient

    client = TestClient(KnownHosts(app, ["Mine"]), base_url="http://mine")
    assert client.get("/").status_code == 200
    refused = client.get("/", headers={"Host": "evil.example:8000"})
    assert refused.status_code == 403
    assert "'evil.example:8000' is not a name of this server" in refused.json()["error"]
    assert "--allow-host" in refused.json()["error"]
