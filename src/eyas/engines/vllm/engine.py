"""The vllm engine: a real vLLM captures, through its own hidden-states method and a connector of ours.

    tokens ─▶ dispatcher ─▶ worker process: vLLM, continuous batching ─▶ connector ─▶ file in shared memory
                                                                                          │ verified, removed
    CapturedSample ◀── final norm on the last stream ◀── streams picked by boundary ◀─────┘

The worker lives in vLLM's interpreter and in a process group of its own; it is restarted when it dies or hangs, and
what it had finished is not asked of it again. How many bytes lie in shared memory is bounded by admission.

Letters: T tokens of the sample, N streams vLLM gives, A aux streams, D target hidden size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from eyas import config, console
from eyas.contracts import EngineFacts, TargetIdentity, TokenSample
from eyas.conversations.generation import Generated, GenerateRequest
from eyas.engines.base import CapturedSample, OnWait, nobody
from eyas.engines.checks import check_sample
from eyas.engines.generate import check_request
from eyas.engines.vllm import files, preflight
from eyas.engines.vllm.dispatch import Dispatcher, Flight, Job
from eyas.engines.vllm.final_norm import apply_final_norm
from eyas.engines.vllm.process import Worker
from eyas.engines.vllm.shared_memory import Folder, budget
from eyas.errors import CaptureError, ConfigError, ServerError
from eyas.plan.interpreter import VLLM_VARIABLE
from eyas.target.load import TensorFiles

COMMAND = ("-m", "eyas.engines.vllm.worker")
LISTEN_S = 1.0
FLYING_PER_SEQUENCE = 2
"""Requests with the worker for each place in its batch: its queue never runs dry."""
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
VALUE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


class VllmEngine:
    """Captures, or with no boundaries generates, with vLLM in a process of its own.

    Args:
        target: Identity of the target; its RMSNorm is applied to the last stream.
        folder: The target's files.
        boundaries: Aux boundaries, in stored order; empty for generation.
        dtype: Dtype of the weights while running.
        device: A torch device; which one vLLM uses is decided by its build.
        trust_remote_code: Let vLLM run the repository's own model code.
        options: See ``preflight.OPTIONS``.
        on_wait: Called while the worker is waited for.

    Raises:
        ConfigError: An option is unknown or out of range.
    """

    def __init__(
        self,
        target: TargetIdentity,
        folder: Path,
        boundaries: Sequence[int],
        *,
        dtype: str,
        device: str = "cpu",
        trust_remote_code: bool = False,
        options: Mapping[str, Any] | None = None,
        on_wait: OnWait = nobody,
    ) -> None:
        self._target, self._folder, self._boundaries = target, folder, tuple(boundaries)
        self._dtype, self._device, self._trust_remote_code = dtype, device, trust_remote_code
        if dtype not in VALUE_BYTES:
            raise ConfigError(f"target.dtype: {dtype!r}, expected one of {', '.join(VALUE_BYTES)} for engine vllm")
        self._options, self._on_wait = preflight.checked_options(options or {}), on_wait
        self._ids: tuple[int, ...] = ()
        self._states: Folder | None = None
        self._dispatcher: Dispatcher | None = None
        self._announced: tuple[TokenSample, ...] = ()
        self._python, self._context, self._longest = "", target.max_position_embeddings, 0

    def open(self) -> None:
        """Check what can be checked, start the worker and wait until it is ready.

        Raises:
            EyasError: vLLM is missing, of another version, or does not start.
        """
        self.close()
        self._python, _ = preflight.check_versions()
        if self._boundaries:
            self._ids = preflight.check_target(self._target, self._boundaries)
            self._norm_D = TensorFiles(self._folder).read("final_norm")
        preflight.more_arguments()
        self._patience_s = float(config.watchdog_s())
        self._states = Folder()
        max_flying = FLYING_PER_SEQUENCE * self._options["max_num_seqs"]
        self._dispatcher = Dispatcher(
            self._start_worker, self._states.path, max_flying, self._patience_s, self._on_wait
        )
        try:
            self._dispatcher.worker = self._start_worker()
            if self._ids:
                self._work_ahead()
        except BaseException:
            self.close()
            raise

    def describe(self) -> EngineFacts:
        """Kernels on a CPU give the same bytes for the same sample when nothing shares its batch."""
        versions = preflight.vllm_versions()
        alone = self._options["max_num_seqs"] == 1 and self._options["tensor_parallel_size"] == 1
        return EngineFacts(
            name="vllm",
            version=", ".join(f"{name} {version}" for name, version in versions.items()),
            options={**self._options, "dtype": self._dtype},
            deterministic=self._device == "cpu" and alone,
        )

    def announce(self, samples: Sequence[TokenSample]) -> None:
        """Samples that will be captured, in order: once open, vLLM works ahead as far as shared memory is free."""
        self._announced = tuple(samples)
        if self._dispatcher is not None:
            self._work_ahead()

    def _work_ahead(self) -> None:
        self._make_room(sample for sample in self._announced if len(sample.input_ids) < self._context)
        announced = self._announced
        jobs = (self._job(sample) for sample in announced if self._reason(sample) is None)
        self._running().announce(jobs, [sample.sample_id for sample in announced])

    def capture(self, batch: Sequence[TokenSample]) -> Iterator[CapturedSample]:
        """States of every sample of a batch, each as soon as it is whole.

        Raises:
            CaptureError: A sample cannot be run, or failed three times; the others of the batch were yielded before.
            ServerError: vLLM does not stay up, or shared memory is too small.
        """
        dispatcher = self._running()
        if not self._ids:
            raise ServerError("the engine was opened without boundaries, for generation", "name extract.boundaries")
        errors = [error for sample in batch if (error := self._reason(sample)) is not None]
        wanted = {sample.sample_id: sample for sample in batch if self._reason(sample) is None}
        self._make_room(wanted.values())
        dispatcher.want(self._job(sample) for sample in wanted.values())
        wait_s = 0.0
        while wanted:
            dispatcher.turn(wait_s)
            wait_s = LISTEN_S
            for sample in list(wanted.values()):
                taken = dispatcher.take(sample.sample_id)
                if isinstance(taken, str):
                    errors.append(CaptureError(f"sample {sample.sample_id}: {taken}"))
                    del wanted[sample.sample_id]
                elif taken is not None and (captured := self._read(taken, sample)) is not None:
                    del wanted[sample.sample_id]
                    yield captured
                    wait_s = 0.0
                    dispatcher.turn(wait_s)  # there is room again: whoever encodes meanwhile must not let vLLM run dry
        if errors:
            raise errors[0]

    def generate(self, requests: Sequence[GenerateRequest]) -> Iterator[Generated]:
        """Continuations, each as soon as it ends.

        Raises:
            CaptureError: A request cannot be run (then none was), or failed three times.
            ServerError: vLLM does not stay up.
        """
        dispatcher = self._running()
        for request in requests:
            check_request(request, self._target.vocab_size, self._context)
        waiting = {request.request_id: request for request in requests}
        dispatcher.want(Job(request.request_id, self._message(request)) for request in requests)
        while waiting:
            for name in list(waiting):
                taken = dispatcher.take(name)
                if isinstance(taken, str):
                    raise CaptureError(f"request {name}: {taken}")
                if taken is not None and taken.answer is not None:
                    del waiting[name]
                    answer = taken.answer
                    yield Generated(request_id=name, ids=tuple(answer["ids"]), finish=answer["finish"])
            if waiting:
                dispatcher.turn(LISTEN_S)

    def close(self) -> None:
        """End the worker and free shared memory; safe to call twice."""
        if self._dispatcher is not None:
            if self._dispatcher.worker is not None:
                self._dispatcher.worker.log.unlink(missing_ok=True)
            self._dispatcher.close()
            self._dispatcher = None
        if self._states is not None:
            self._states.remove()
            self._states = None

    def _running(self) -> Dispatcher:
        assert self._dispatcher is not None, "engine is not open"
        return self._dispatcher

    def _start_worker(self) -> Worker:
        assert self._states is not None
        settings = {"engine": self._engine_args(), "folder": str(self._states.path)}
        worker = Worker([self._python, *COMMAND], settings, self._patience_s, self._on_wait)
        console.log(f"vllm: starts {self._python}, log in {worker.log}")
        ready = worker.start()
        expected = {"vocab_size": self._target.vocab_size, "device": self._device.partition(":")[0]}
        for name, value in expected.items():
            if ready[name] != value:
                worker.kill()
                raise ServerError(
                    f"vLLM's {name} is {ready[name]!r}, expected {value!r}",
                    f"{VLLM_VARIABLE} names a python whose vLLM is built for target.device",
                )
        self._context = min(self._context, ready["model_len"])
        return worker

    def _engine_args(self) -> dict[str, Any]:
        capture: dict[str, Any] = {}
        if self._ids:
            ids = {"eagle_aux_hidden_state_layer_ids": list(self._ids)}
            draft = {"draft_model_config": {"hf_config": ids}, "num_speculative_tokens": 1}
            capture["speculative_config"] = {"method": "extract_hidden_states", **draft}
            capture["kv_transfer_config"] = {
                "kv_connector": "EyasConnector",
                "kv_connector_module_path": "eyas.engines.vllm.connector",
                "kv_role": "kv_producer",
                # Only this process sends requests, and its paths are its own; a file that has its name is whole.
                "kv_connector_extra_config": {"allow_custom_save_path": True, "use_synchronization_lock": False},
            }
        return {
            "model": str(self._folder.absolute()),
            "skip_tokenizer_init": True,
            "dtype": self._dtype,
            "max_model_len": self._target.max_position_embeddings,
            "trust_remote_code": self._trust_remote_code,
            "enforce_eager": True,
            "enable_prefix_caching": False,
            "disable_log_stats": True,
            **{name: value for name, value in self._options.items() if value is not None},
            **capture,
            **preflight.more_arguments(),
        }

    def _reason(self, sample: TokenSample) -> CaptureError | None:
        """Why a sample cannot be run; vLLM needs room for one new token."""
        try:
            check_sample(sample, self._target.vocab_size, self._context - 1)
        except CaptureError as error:
            return error
        return None

    def _num_bytes(self, num_tokens: int) -> int:
        return files.file_bytes(num_tokens, len(self._ids), self._target.hidden_size, VALUE_BYTES[self._dtype])

    def _make_room(self, samples: Iterable[TokenSample]) -> None:
        assert self._states is not None
        longest = max((len(sample.input_ids) for sample in samples), default=0)
        if longest > self._longest:
            self._longest = longest
            self._running().budget_bytes = budget(self._num_bytes(longest), self._states.free_bytes())

    def _job(self, sample: TokenSample) -> Job:
        ids = [int(i) for i in sample.input_ids]
        return Job(sample.sample_id, {"ids": ids, "max_new_tokens": 1}, self._num_bytes(len(ids)))

    def _message(self, request: GenerateRequest) -> dict[str, Any]:
        return {
            "ids": [int(i) for i in request.prompt_ids],
            "max_new_tokens": request.max_new_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "seed": request.seed,
            "stop": list(self._target.eos_token_ids),
        }

    def _read(self, flight: Flight, sample: TokenSample) -> CapturedSample | None:
        """What a file holds, if it is this sample's; else None, and the sample is captured once more."""
        assert flight.path is not None
        try:
            captured = self._sample_of(files.read(flight.path), sample)
        except (files.FileError, OSError) as fault:
            self._running().refuse(flight, str(fault))
            return None
        finally:
            files.remove(flight.path)
        return captured

    def _sample_of(self, found: files.StatesFile, sample: TokenSample) -> CapturedSample:
        expected = (len(sample.input_ids), len(self._ids), self._target.hidden_size)
        shape = (found.num_rows, found.num_streams, found.width)
        if shape != expected:
            raise files.FileError(f"states of shape {shape} came, expected {expected} (tokens, streams, hidden)")
        ids_T = torch.frombuffer(found.ids, dtype=torch.int32).clone()
        if ids_T.tolist() != list(sample.input_ids):
            raise files.FileError("the token ids of its states are not its own")
        states_TND = torch.frombuffer(found.states, dtype=DTYPES[found.dtype]).view(shape)
        places = [self._ids.index(boundary) for boundary in self._boundaries]
        last_TD = apply_final_norm(states_TND[:, -1], self._norm_D, self._target.final_norm)
        return CapturedSample(
            sample_id=sample.sample_id,
            input_ids_T=ids_T,
            aux_TAD=states_TND[:, places].to(torch.bfloat16),
            last_TD=last_TD.to(torch.bfloat16),
        )
