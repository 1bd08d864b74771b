"""A server and its plugin in one small process: it speaks HTTP and the wire protocol and can be told to fail.

States are those of eyas' fake engine. Faults stand in a JSON file (``EYAS_DOUBLE_FAULTS``): each key is a fault, its
value the number of the request that it strikes; a fault strikes once, across restarts, unless the number is negative.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy
import xxhash

from eyas.engines.sglang import wire

HIDDEN, LAYERS, VOCAB, CONTEXT = 16, 6, 1000, 128
parser = argparse.ArgumentParser()
for flag in ("port", "chunked-prefill-size", "max-running-requests"):
    parser.add_argument(f"--{flag}", type=int, default=0)
parser.add_argument("--disable-radix-cache", action="store_true")
parser.add_argument("--config", type=Path)
arguments, _ = parser.parse_known_args()
key = arguments.config.read_text().removeprefix("api-key: ").strip().strip('"')
fault_file = Path(os.environ["EYAS_DOUBLE_FAULTS"])
boundaries = [layer + 1 for layer in json.loads(os.environ.get(wire.LAYERS_VARIABLE, "[]"))]
layout = wire.Layout(len(boundaries), HIDDEN, "bfloat16")
work: queue.Queue = queue.Queue()
flying: set[str] = set()
count = [0]


lock = threading.Lock()
LINGERS_S = 2.5
dying = threading.Event()


def strikes(name: str) -> bool:
    with lock:  # a file that another thread is writing is half a file, and what reads it dies
        faults = json.loads(fault_file.read_text()) if fault_file.exists() else {}
        wanted = faults.get(name)
        if wanted is None or (wanted >= 0 and count[0] < wanted):
            return False
        if wanted >= 0:
            del faults[name]
            fault_file.write_text(json.dumps(faults))
        return True


def states(ids: numpy.ndarray, offset: int, prefix: int) -> numpy.ndarray:
    token = (ids.astype(numpy.int64) + 7 * (prefix + numpy.arange(len(ids))))[:, None]
    values = (token + 3 * numpy.arange(HIDDEN) + offset) % 251 - 125
    return (values.astype(numpy.float32).view(numpy.uint32) >> 16).astype(numpy.uint16)


class Plugin:
    def __init__(self, path: str) -> None:
        self.connection, self.arena, self.nonce = None, None, ""
        self.listening = socket.socket(socket.AF_UNIX)
        self.listening.bind(path)
        self.listening.listen(2)
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self) -> None:
        while True:
            self.connection, _ = self.listening.accept()
            args = {
                "disable_radix_cache": arguments.disable_radix_cache and not strikes("radix"),
                "pp_size": 1,
                "context_len": CONTEXT,
                "max_total_num_tokens": 4096,
            }
            self.say(
                wire.Hello(
                    protocol=wire.PROTOCOL,
                    pid=os.getpid(),
                    sglang="0.5.23",
                    torch="2",
                    device="cpu",
                    model_path="",
                    model_class="Double",
                    hidden_size=HIDDEN + strikes("another model"),
                    num_layers=LAYERS,
                    vocab_size=VOCAB,
                    dtype="bfloat16",
                    boundaries=boundaries,
                    server_args=args,
                )
            )
            for line in self.connection.makefile("rb"):
                message = wire.from_line(line)
                if isinstance(message, wire.Attach):
                    self.arena = numpy.memmap(message.arena, numpy.uint8, "r+")
                    self.nonce = message.nonce
                    self.say(wire.Attached(pinned=False))
                elif isinstance(message, wire.Ping) and not strikes("no pong"):
                    self.say(wire.Pong(number=message.number, num_pieces=0, num_waiting=0))

    def say(self, message: wire.Message) -> None:
        self.connection.sendall(wire.to_line(message))

    def capture(self, rid: str, ids: numpy.ndarray, prefix: int, rows: int) -> None:
        slot = wire.parse_rid(rid)
        if slot is None or slot.nonce != self.nonce:
            return
        part = ids[prefix : prefix + rows]
        if strikes("wrong ids"):
            part = part + 1
        aux = numpy.stack([states(part, 31 * b, prefix) for b in boundaries], axis=1)
        blocks = (aux, states(part, 97, prefix), part.astype(numpy.int32))
        digest = xxhash.xxh3_64()
        for (begin, end), block in zip(layout.ranges(slot.offset, slot.num_tokens, prefix, rows), blocks, strict=True):
            self.arena[begin:end] = numpy.frombuffer(block.tobytes(), numpy.uint8)
            digest.update(block.tobytes())
        checksum = "0" * 16 if strikes("wrong checksum") else digest.hexdigest()
        if strikes("missing piece"):
            return
        piece = wire.Piece(rid=rid, prefix=prefix, rows=rows, xxh3=checksum)
        for _ in range(1 + strikes("repeated piece")):
            self.say(piece)


def prefill() -> None:
    while True:
        body, done = work.get()
        ids, rid = numpy.array(body["input_ids"]), body.get("rid", "")
        count[0] += 1
        if strikes("killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        if strikes("lingers"):  # killed, but its process takes its time to be gone: connections break, new ones too
            dying.set()
            threading.Timer(LINGERS_S, os._exit, [1]).start()
        if dying.is_set():
            done.put(None)
            continue
        if strikes("frozen"):
            os.kill(os.getpid(), signal.SIGSTOP)
        if strikes("hang"):
            time.sleep(1000)
        cached = 3 if strikes("cached") else 0
        chunk = arguments.chunked_prefill_size if arguments.chunked_prefill_size > 0 else len(ids)
        aborted = strikes("aborted")
        for prefix in range(0, len(ids) // (2 if aborted else 1), chunk):
            if plugin is not None:
                plugin.capture(rid, ids, prefix, min(chunk, len(ids) - prefix))
        finish = {"type": "abort", "message": "on request"} if aborted else {"type": "length", "length": 1}
        output = [int(ids[0])]
        wanted = body["sampling_params"]["max_new_tokens"]
        if wanted > 1:
            output, finish = [int(i) % VOCAB for i in ids[:3]] + [2], {"type": "stop", "matched": 2}
        meta = {"prompt_tokens": len(ids), "cached_tokens": cached, "finish_reason": finish}
        done.put((200, {"output_ids": output, "meta_info": meta}))


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        return

    def do_GET(self) -> None:
        if dying.is_set():
            self.hang_up()
        else:
            self.answer(200 if self.path == "/health" or self.is_allowed() else 401, {})

    def is_allowed(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {key}"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        rid, ids = body.get("rid"), body.get("input_ids")
        if dying.is_set():
            self.hang_up()
        elif not self.is_allowed():
            self.answer(401, {"error": "Unauthorized"})
        elif not ids or strikes("unusable"):
            self.answer(400, {"error": {"message": "Either text, input_ids or input_embeds should be provided."}})
        elif len(ids) > CONTEXT - 7:
            self.answer(400, {"error": {"message": f"The input ({len(ids)} tokens) is longer than the context length"}})
        elif rid and rid in flying:
            self.answer(400, {"error": {"message": "Duplicate request ID detected"}})
        elif max(ids) >= VOCAB or min(ids) < 0:
            os._exit(1)  # one wrong id ends the whole server
        elif strikes("dropped"):
            self.hang_up()
        else:
            done: queue.Queue = queue.Queue()
            flying.add(rid)
            work.put((body, done))
            found = done.get()
            flying.discard(rid)
            if found is None:
                self.hang_up()
            else:
                self.answer(*found)

    def hang_up(self) -> None:
        self.connection.shutdown(socket.SHUT_RDWR)
        self.close_connection = True

    def answer(self, status: int, plain: object) -> None:
        text = json.dumps(plain).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


if strikes("never up"):
    time.sleep(1000)
if strikes("broken start"):
    sys.exit("double: no such model")
plugin = Plugin(os.environ[wire.SOCKET_VARIABLE]) if os.environ.get(wire.SOCKET_VARIABLE) else None
threading.Thread(target=prefill, daemon=True).start()
ThreadingHTTPServer.request_queue_size = 300
ThreadingHTTPServer(("127.0.0.1", arguments.port), Handler).serve_forever()
