"""The real worker around an engine that is none: answers at once, writes a request's file one step later, as vLLM does.

Run as the worker is run. Faults are asked for by token ids: a prompt that holds one has its fault, ``_ONCE`` only the
first time (a marker file in ``EYAS_DOUBLE_DIR`` remembers). Stream n at row t, channel d is ``ids[t] + 1000 n + d``.
"""

import array
import os
import signal
import sys
import threading
import time
import types
from pathlib import Path

from eyas.engines.vllm import files, worker

DIE_ONCE, DIE, HANG_ONCE, LATE, FULL_ONCE, FULL, FLIP_ONCE, SHORT_ONCE, FOREIGN_ONCE, ABORT_ONCE, NEVER, REFUSE = range(
    300, 312
)
ONCE = {DIE_ONCE, HANG_ONCE, FULL_ONCE, FLIP_ONCE, SHORT_ONCE, FOREIGN_ONCE, ABORT_ONCE}
NUM_STREAMS, WIDTH = 3, 96
sys.modules["vllm"] = types.SimpleNamespace(SamplingParams=types.SimpleNamespace)
sys.modules["vllm.exceptions"] = types.SimpleNamespace(VLLMClientError=type("VLLMClientError", (Exception,), {}))


class Engine:
    def __init__(self, args):
        if args["max_num_seqs"] == 13:
            raise RuntimeError("thirteen is no number of sequences")
        length, scheduler = args["max_model_len"], types.SimpleNamespace(has_requests=self.has_requests)
        self.model_config = types.SimpleNamespace(get_vocab_size=lambda: 320, max_model_len=length)
        self.vllm_config = types.SimpleNamespace(device_config=types.SimpleNamespace(device_type="cpu"))
        self.engine_core = types.SimpleNamespace(engine_core=types.SimpleNamespace(scheduler=scheduler))
        self.waiting, self.unwritten = [], []

    def has_requests(self):
        return bool(self.waiting or self.unwritten)

    def add_request(self, name, prompt, params):
        if REFUSE in prompt["prompt_token_ids"]:
            raise sys.modules["vllm.exceptions"].VLLMClientError("no such prompt, please")
        self.waiting.append((name, prompt["prompt_token_ids"], params))

    def step(self):
        for ids, path in self.unwritten:
            self._write(ids, path)
        self.unwritten.clear()
        if not self.waiting:
            return []
        name, ids, params = self.waiting.pop(0)
        if self._has(ids, DIE) or self._has(ids, DIE_ONCE):
            os.kill(os.getpid(), signal.SIGKILL)
        if self._has(ids, HANG_ONCE):
            time.sleep(1000)
        if params.extra_args:
            self.unwritten.append((ids, Path(params.extra_args["kv_transfer_params"]["hidden_states_path"])))
        finish = "abort" if self._has(ids, ABORT_ONCE) else "length"
        answer = types.SimpleNamespace(token_ids=ids[: params.max_tokens], finish_reason=finish)
        return [types.SimpleNamespace(finished=True, request_id=name, outputs=[answer])]

    def _has(self, ids, fault):
        if fault not in ids:
            return False
        marker = Path(os.environ["EYAS_DOUBLE_DIR"], str(fault))
        if fault in ONCE and marker.exists():
            return False
        marker.touch()
        return True

    def _write(self, ids, path):
        if self._has(ids, NEVER):
            return
        if self._has(ids, FULL) or self._has(ids, FULL_ONCE):
            files.write_failure(path, "OSError: no space left")
        elif self._has(ids, LATE):
            threading.Timer(0.3, write_states, (path, ids)).start()
        elif self._has(ids, SHORT_ONCE):
            write_states(path, ids[1:])
        elif self._has(ids, FOREIGN_ONCE):
            write_states(path, [*ids[:-1], 7])
        elif self._has(ids, FLIP_ONCE):
            aside = path.parent / "aside" / path.name  # it has its name only when it is damaged: we are read at once
            aside.parent.mkdir()
            write_states(aside, ids)
            with aside.open("r+b") as file:
                file.seek(-900, os.SEEK_END)
                file.write(b"\x55")
            os.replace(aside, path)
        else:
            write_states(path, ids)


def write_states(path, ids):
    values = array.array("f", (i + 1000 * n + d for i in ids for n in range(NUM_STREAMS) for d in range(WIDTH)))
    shape = (len(ids), NUM_STREAMS, WIDTH)
    files.write(path, "F32", shape, memoryview(values).cast("B"), memoryview(array.array("i", ids)).cast("B"))


if __name__ == "__main__":
    worker.start_engine = Engine
    worker.main()
