"""The vllm engine around a double of vLLM: what a fault leaves is a whole sample or a named one, never a wrong row."""

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
import vllm_double as double
from safetensors.torch import load_file

from eyas.contracts import TokenSample
from eyas.conversations.generation import GenerateRequest
from eyas.engines.base import nobody
from eyas.engines.registry import make_engine
from eyas.engines.vllm import dispatch, engine, files, preflight, process, shared_memory, worker
from eyas.errors import CaptureError, ServerError

BOUNDARIES = (1, 2, 4)


def sample(name, ids):
    return TokenSample(
        sample_id=name,
        conversation_id="c",
        source="x",
        split="train",
        variant="given",
        input_ids=tuple(ids),
        loss_mask=(1,) * len(ids),
    )


@pytest.fixture(autouse=True)
def doubled(monkeypatch, tmp_path):
    """The double in vLLM's place, shared memory and logs of the test's own, no pauses."""
    monkeypatch.chdir(tmp_path)
    memory = Path("/dev/shm") / f"eyas-test-{os.getpid()}"
    memory.mkdir(exist_ok=True)
    monkeypatch.setattr(shared_memory, "ROOT", memory)
    monkeypatch.setattr(dispatch, "FIRST_BACKOFF_S", 0.01)
    monkeypatch.setattr(dispatch, "MAX_BACKOFF_S", 0.02)
    monkeypatch.setattr(engine, "COMMAND", (double.__file__,))
    monkeypatch.setattr(preflight, "check_versions", lambda: (sys.executable, {}))
    monkeypatch.setattr(preflight, "vllm_versions", lambda: {"vllm": "0.32.0", "torch": "2.13.0"})
    monkeypatch.setenv("EYAS_DOUBLE_DIR", str(tmp_path))
    yield
    left = list(memory.iterdir())
    for folder in left:
        shared_memory.shutil.rmtree(folder)
    memory.rmdir()
    assert not left, "shared memory was not given back"


@pytest.fixture
def opened(identity, folders):
    """Opens engines and closes them."""
    with contextlib.ExitStack() as stack:

        def make(boundaries=BOUNDARIES, on_wait=nobody, **options):
            made = make_engine(
                "vllm",
                target=identity,
                folder=folders["llama"],
                boundaries=boundaries,
                dtype="float32",
                options=options,
                on_wait=on_wait,
            )
            stack.callback(made.close)
            made.open()
            return made

        yield make


def expected_aux(ids):
    row_T = torch.tensor(ids)[:, None, None]
    # vLLM is asked for 1, 2 and 4 (the last layer's output, which is the last stream too): three streams
    stream_A = 1000 * torch.arange(3)[None, :, None]
    return (row_T + stream_A + torch.arange(double.WIDTH)).to(torch.bfloat16)


def check_all(captured, samples):
    assert sorted(got.sample_id for got in captured) == sorted(s.sample_id for s in samples)
    by_id = {got.sample_id: got for got in captured}
    for each in samples:
        got = by_id[each.sample_id]
        assert got.input_ids_T.tolist() == list(each.input_ids)
        assert torch.equal(got.aux_TAD, expected_aux(each.input_ids))
        assert got.last_TD.shape == (len(each.input_ids), double.WIDTH)


SAMPLES = [sample(f"s{n}", range(3, 3 + n)) for n in (1, 40, 17, 200, 5)]


def test_streams_come_by_boundary_and_the_last_one_normed(opened, folders):
    """Case 46: result i belongs to sample i, whatever the order; also the last request's, which vLLM writes late."""
    captured = list(opened().capture(SAMPLES))
    check_all(captured, SAMPLES)
    weight_D = load_file(folders["llama"] / "model.safetensors")["model.norm.weight"]
    for got in captured:
        raw_TD = (got.input_ids_T[:, None] + 2000 + torch.arange(double.WIDTH)).float()
        normed_TD = raw_TD / (raw_TD.pow(2).mean(1, keepdim=True) + 1e-6).sqrt() * weight_D
        torch.testing.assert_close(got.last_TD.float(), normed_TD, rtol=2**-8, atol=0)


def test_a_prompt_that_cannot_run_takes_no_other_with_it(opened):
    """Case 53: too long by one for vLLM, empty, out of the vocab: named, and the rest of the list is there."""
    made = opened()
    bad = [sample("long", [5] * 256), sample("below", [4, -1]), sample("beyond", [320])]
    captured = []
    with pytest.raises(CaptureError, match="sample long: 256 tokens, expected 1 to 255"):
        captured.extend(made.capture([SAMPLES[0], *bad, SAMPLES[1]]))
    check_all(captured, SAMPLES[:2])
    for each, reason in zip(bad[1:], ("-1 to 4", "320 to 320"), strict=True):
        with pytest.raises(CaptureError, match=f"sample {each.sample_id}: token ids {reason}"):
            list(made.capture([each]))
    check_all(list(made.capture([sample("longest", [5] * 255)])), [sample("longest", [5] * 255)])


def test_the_worker_refuses_what_comes_past_the_checks(opened, monkeypatch):
    made = opened()
    monkeypatch.setattr(engine, "check_sample", lambda *_: None)
    for ids, reason in (
        ([], "0 tokens, expected 1 to 255"),
        ([9, 400], "token ids 9 to 400, expected 0 to 319"),
        ([9, double.REFUSE], "no such prompt"),
    ):
        with pytest.raises(CaptureError, match=f"sample bad: vLLM refuses it: {reason}"):
            list(made.capture([sample("bad", ids)]))
    check_all(list(made.capture(SAMPLES)), SAMPLES)


@pytest.mark.parametrize(
    "fault",
    [double.DIE_ONCE, double.FULL_ONCE, double.FLIP_ONCE, double.SHORT_ONCE, double.FOREIGN_ONCE, double.ABORT_ONCE,
     double.LATE],
)  # fmt: skip
def test_a_passing_fault_leaves_no_trace(opened, fault, capsys):
    """Cases 28, 31, 33: died, disk full, a flipped bit, a missing row, a foreign id, an abort, a file after the answer."""
    faulty = [*SAMPLES[:3], sample("faulty", [9, fault, 11, 12, 13]), *SAMPLES[3:]]
    check_all(list(opened().capture(faulty)), faulty)
    assert ("once more" in capsys.readouterr().err) == (fault != double.LATE)


@pytest.mark.parametrize(("fault", "reason"), [(double.FULL, "could not be written: OSError: no space"),
                                               (double.DIE, "killed by SIGKILL")])  # fmt: skip
def test_a_lasting_fault_is_named_and_takes_no_other_sample(opened, fault, reason):
    made, captured = opened(), []
    with pytest.raises(CaptureError, match=f"sample faulty: .*{reason}.*tried 3 times"):
        captured.extend(made.capture([sample("faulty", [9, fault]), *SAMPLES]))
    check_all(captured, SAMPLES)
    check_all(list(made.capture(SAMPLES)), SAMPLES)


@pytest.mark.parametrize("fault", [double.HANG_ONCE, double.NEVER])
def test_the_watchdog_ends_a_wait(opened, fault, monkeypatch):
    """Case 54: an engine that does not move, and a file that never comes."""
    monkeypatch.setenv("EYAS_WATCHDOG_S", "1")
    made, faulty = opened(), sample("faulty", [9, fault])
    begin_s = time.monotonic()
    if fault == double.NEVER:
        with pytest.raises(CaptureError, match="its states did not come for 1 s; tried 3 times"):
            list(made.capture([faulty]))
    else:
        check_all(list(made.capture([faulty])), [faulty])
    assert time.monotonic() - begin_s < 8


def test_whoever_watches_this_process_learns_that_it_waits_for_vllm(opened, monkeypatch):
    """While a worker starts, while it works, and through the pause before another."""
    told = []
    monkeypatch.setattr(dispatch, "FIRST_BACKOFF_S", 3.0)
    monkeypatch.setattr(dispatch, "MAX_BACKOFF_S", 3.0)
    made = opened(on_wait=lambda: told.append(time.monotonic()))
    assert told
    faulty = sample("faulty", [9, double.DIE_ONCE])
    told.clear()
    check_all(list(made.capture([faulty, *SAMPLES])), [faulty, *SAMPLES])
    assert told[-1] - told[0] > 3
    assert max(later - earlier for earlier, later in itertools.pairwise(told)) < 2


def test_a_frozen_worker_is_replaced(opened, monkeypatch):
    monkeypatch.setenv("EYAS_WATCHDOG_S", "1")
    made = opened()
    pid = made._dispatcher.worker.pid
    os.kill(pid, signal.SIGSTOP)
    check_all(list(made.capture(SAMPLES)), SAMPLES)
    assert not Path(f"/proc/{pid}").exists()


def test_a_worker_that_never_stays_up_ends_the_run(opened, monkeypatch):
    monkeypatch.setattr(dispatch, "MAX_FAULTS", 100)
    with pytest.raises(ServerError, match=r"6 times without one finished request.*SIGKILL"):
        list(opened().capture([sample("faulty", [9, double.DIE])]))


@pytest.mark.parametrize(("num_failures", "ends"), [(2, False), (9, True)])
def test_a_new_worker_that_does_not_come_up_is_tried_again(opened, monkeypatch, num_failures, ends):
    """Memory that the dead one held may come free late; a first start that fails is told at once (next test)."""
    made, start, calls = opened(), process.Worker.start, []

    def failing(worker):
        calls.append(worker)
        if len(calls) <= num_failures:
            raise ServerError("vLLM did not start: no memory", "less log")
        return start(worker)

    monkeypatch.setattr(process.Worker, "start", failing)
    os.kill(made._dispatcher.worker.pid, signal.SIGKILL)
    if ends:
        with pytest.raises(ServerError, match="6 times without one finished request, at last: vLLM did not start"):
            list(made.capture(SAMPLES))
    else:
        check_all(list(made.capture(SAMPLES)), SAMPLES)
        assert len(calls) == num_failures + 1


def test_a_worker_that_does_not_start_shows_its_last_lines(opened):
    with pytest.raises(ServerError, match=r"(?s)did not start: RuntimeError: thirteen.*raise RuntimeError"):
        opened(max_num_seqs=13)


SCRIPT = """
    import sys
    sys.path[:0] = {path!r}
    from pathlib import Path
    from eyas.engines.vllm import files, process, shared_memory
    shared_memory.ROOT = Path({root!r})
    folder = shared_memory.Folder()
    settings = {{"engine": {{"max_num_seqs": 2, "max_model_len": 256}}, "folder": str(folder.path)}}
    worker = process.Worker([sys.executable, {double!r}], settings, 60.0)
    worker.start()
    for name, ids in {requests!r}:
        path = str(files.path_of(folder.path, name))
        worker.send({{"submit": name, "ids": ids, "max_new_tokens": 1, "path": path}})
    while len(list(folder.path.glob("*.safetensors"))) < {num_written}:
        pass
    print(worker.pid, flush=True)
    worker.receive(60)
    sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("requests", "num_written"),
    [([("a", [9] * 9), ("b", [9, double.HANG_ONCE])], 0), ([(f"n{n}", [9]) for n in range(2000)], 200)],
    ids=["hanging", "answering"],
)
def test_no_orphan_writes_on_when_we_are_killed(requests, num_written):
    """Nor leaves anything, also where the thread that answers finds nobody there while the other one still removes."""
    root = shared_memory.ROOT
    script = textwrap.dedent(SCRIPT).format(
        path=[*sys.path], root=str(root), double=double.__file__, requests=requests, num_written=num_written
    )
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        pid = int(child.stdout.readline())
        assert list(root.iterdir())
        child.kill()
    deadline_s = time.monotonic() + 60
    while is_running(pid):
        assert time.monotonic() < deadline_s, "the worker lives on"
        time.sleep(0.02)
    assert not list(root.iterdir()), "the worker removes what nobody will read"


EARLY = """
    import os, pathlib, signal, socket, subprocess, sys
    ours, theirs = socket.socketpair()
    ours.sendall(b'{{"engine": {{}}, "folder": "{folder}"}}\\n')
    command = [sys.executable, {worker!r}, str(theirs.fileno())]
    print(subprocess.Popen(command, pass_fds=[theirs.fileno()], start_new_session=True).pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_worker_whose_parent_is_killed_before_it_listens_leaves_nothing_either(tmp_path):
    """What it was told lies in its socket already, the place of the states with it."""
    folder = tmp_path / "states"
    folder.mkdir()
    script = textwrap.dedent(EARLY).format(folder=folder, worker=worker.__file__)
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, check=False)
    deadline_s = time.monotonic() + 60
    while is_running(int(done.stdout)):
        assert time.monotonic() < deadline_s, "the worker lives on"
        time.sleep(0.02)
    assert not list(tmp_path.iterdir())


def is_running(pid: int) -> bool:
    """One that has ended may stay in the list for as long as whoever took it over does not ask for it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_folders_of_dead_owners_go_and_those_of_living_ones_stay(monkeypatch):
    monkeypatch.setattr(shared_memory, "YOUNG_S", -1)
    alive = shared_memory.Folder()
    dead = shared_memory.ROOT / (shared_memory.PREFIX + "dead")
    dead.mkdir()
    (dead / "owner").touch()
    (dead / "00000001.safetensors").write_bytes(b"x" * 1000)
    shared_memory.sweep()
    assert [folder.name for folder in shared_memory.ROOT.iterdir()] == [alive.path.name]
    alive.remove()


def test_shared_memory_is_bounded_and_work_goes_ahead(opened, monkeypatch):
    """Case 39: bytes in flight never exceed the bound, and what is announced is there before it is asked for."""
    samples = [sample(f"n{i}", [3 + i % 50] * (20 + 7 * (i % 9))) for i in range(40)]
    made = opened()
    longest = files.file_bytes(76, 3, double.WIDTH, 4)
    monkeypatch.setenv("EYAS_SHM_BYTES", str(5 * longest))
    made.announce(samples)
    folder, largest, captured = made._states.path, 0, []
    for begin in range(0, 40, 4):
        for got in made.capture(samples[begin : begin + 4]):
            captured.append(got)
            # what vLLM's files take now; the worker may write on meanwhile, so each look is a fair one
            largest = max(largest, sum(path.stat().st_size for path in folder.glob("*.safetensors")))
        if begin == 0:
            time.sleep(0.3)
            assert len(list(folder.glob("*.safetensors"))) > 0
    check_all(captured, samples)
    assert 0 < largest <= 5 * longest


def test_answers_come_from_the_same_process(opened):
    made = opened(boundaries=())
    requests = [
        GenerateRequest(request_id=f"r{n}", prompt_ids=(5, 6, n), max_new_tokens=2, temperature=0.0, top_p=1.0, seed=0)
        for n in range(7, 12)
    ]
    answers = {got.request_id: got for got in made.generate(requests)}
    assert {name: got.ids for name, got in answers.items()} == {f"r{n}": (5, 6) for n in range(7, 12)}
    with pytest.raises(CaptureError, match="the target's context is 256"):
        list(made.generate([*requests, GenerateRequest(request_id="x", prompt_ids=(1,) * 255, max_new_tokens=2,
                                                       temperature=0.0, top_p=1.0, seed=0)]))  # fmt: skip


def test_what_it_says_of_itself(identity, folders):
    def facts(**options):
        return make_engine(
            "vllm", target=identity, folder=folders["llama"], boundaries=(1,), dtype="bfloat16", options=options
        ).describe()

    assert facts().version == "vllm 0.32.0, torch 2.13.0"
    assert facts().options["max_num_batched_tokens"] == 8192  # case 58: the chunk is in the manifest
    assert not facts().deterministic
    assert facts(max_num_seqs=1).deterministic


def test_the_other_interpreter_sees_this_package_and_nothing_else_of_ours(opened):
    opened()
    assert [path.name for path in (process.HOME / "python").iterdir()] == ["eyas"]
