"""A real S3 server (moto's, over HTTP) that can be told to fail, and a repository whose states go there."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from wsgiref.types import StartResponse, WSGIEnvironment

import boto3
from moto.backends import get_backend
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

KEY, SECRET = "AKIAEYASEYASEYASEYAS", "sEcReTsEcReTsEcReTsEcReTsEcReTsEcReT1234"
BUCKET = "states"


class Faults:
    """Wraps the server: every so often it answers 500, closes early, or flips a byte of what it sends.

    ``hold`` lets so many more requests through; those after them get no answer before ``let_go``, and then a 500.
    """

    def __init__(self, app: Callable[..., Iterable[bytes]]) -> None:
        self._app, self._dice, self._lock = app, random.Random(0), threading.Lock()
        self.share, self.kind, self.num_failed, self.num_requests = 0.0, "500", 0, 0
        self.methods = ("GET", "PUT", "HEAD", "POST")
        self.is_held, self._held, self._num_through = threading.Event(), threading.Event(), -1

    def hold(self, num_through: int) -> None:
        self._num_through = self.num_requests + num_through

    def let_go(self) -> None:
        self._num_through = -1
        self._held.set()

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        with self._lock:
            self.num_requests += 1
            is_held = 0 <= self._num_through < self.num_requests
            fails = environ["REQUEST_METHOD"] in self.methods and self._dice.random() < self.share
            self.num_failed += fails
        if is_held:
            self.is_held.set()
            self._held.wait()
        elif not fails:
            return self._app(environ, start_response)
        if is_held or self.kind == "500":
            start_response("500 Internal Server Error", [("Content-Length", "0")])
            return [b""]
        if self.kind == "cut":
            return self._cut(environ, start_response)
        return self._flipped(environ, start_response)

    def _cut(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterator[bytes]:
        body = b"".join(self._app(environ, start_response))
        yield body[: len(body) // 2]
        raise ConnectionResetError("cut")

    def _flipped(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        body = bytearray(b"".join(self._app(environ, start_response)))
        if body and environ["REQUEST_METHOD"] == "GET":
            body[len(body) // 2] ^= 1
        return [bytes(body)]


class S3Server:
    """The server, its faults, and a client that sees the bucket without them."""

    def __init__(self) -> None:
        self.faults = Faults(DomainDispatcherApplication(create_backend_app))
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._server = make_server("127.0.0.1", 0, self.faults, threaded=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.client = boto3.client(
            "s3", endpoint_url=self.url, aws_access_key_id=KEY, aws_secret_access_key=SECRET, region_name="us-east-1"
        )
        self.client.create_bucket(Bucket=BUCKET)

    def keys(self) -> set[str]:
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET)
        return {one["Key"] for page in pages for one in page.get("Contents", ())}

    def damage(self, key: str) -> None:
        """Another byte in the middle of an object, under its name."""
        body = bytearray(self.client.get_object(Bucket=BUCKET, Key=key)["Body"].read())
        body[len(body) // 2] ^= 1
        self.client.put_object(Bucket=BUCKET, Key=key, Body=bytes(body))

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        get_backend("s3").reset()  # its state is the process's
