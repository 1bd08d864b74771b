"""Who answers at a port, and what a URL may be."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from eyas.engines.sglang.client import Client, is_url

KEY = "0123456789abcdef"


class Handler(BaseHTTPRequestHandler):
    """SGLang with ``--api-key KEY``: health is for everybody, everything else wants the key."""

    key = KEY

    def do_GET(self) -> None:
        known = not self.key or self.path == "/health" or self.headers.get("Authorization") == f"Bearer {self.key}"
        self.send_response(200 if known else 401)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        return


class Open(Handler):
    """A server that asks nobody for a key."""

    key = ""


class Others(Handler):
    """Another run's server: it has its own key."""

    key = "fedcba9876543210"


@pytest.fixture
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), request.param)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("url", "key", "ours"),
    [(Handler, KEY, True), (Open, KEY, False), (Others, KEY, False), (Open, "", True), (Handler, "", True)],
    indirect=["url"],
)
def test_a_server_is_ours_if_it_wants_our_key(url: str, key: str, ours: bool) -> None:
    """Without a key of ours (a server that somebody else started), health is all that is asked."""
    assert Client(url, key, lambda *_: None).is_healthy() is ours


def test_nobody_there_is_not_healthy() -> None:
    assert not Client("http://127.0.0.1:9", KEY, lambda *_: None).is_healthy()


@pytest.mark.parametrize("text", ["http://127.0.0.1:30000", "https://host/prefix", "http://[::1]:30000", "http://h"])
def test_urls(text: str) -> None:
    assert is_url(text)


@pytest.mark.parametrize("text", ["", "127.0.0.1:30000", "http://", "http://h:port", "http://h:70000", "ftp://h"])
def test_no_urls(text: str) -> None:
    assert not is_url(text)
