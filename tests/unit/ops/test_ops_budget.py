"""``eyas budget``: the facts it gathers, the table and the JSON, and how fast it does so."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from budget_world import ROOT, TOKEN_BYTES, World
from hypothesis import given
from hypothesis import strategies as st

from eyas import config, fs
from eyas.canonical import canonical_json
from eyas.errors import ConfigError, EyasError, PlanError, StoreError
from eyas.ops import budget as room
from eyas.ops.budget import Account, Lengths, Planned, examine
from eyas.ops.budget_text import account_text, account_values
from eyas.plan import volume as volumes
from eyas.plan.budget import Budget, Done, Need, Ratio, Reclaim, Retirable
from eyas.plan.cache import cache_object
from eyas.plan.volume import Volume, mounts, others, volume

KEYS = {
    "payload_bytes", "stored_bytes", "free_bytes", "reserve_bytes", "done_bytes", "reclaimable_bytes", "fits",
    "fits_after_gc", "samples_that_fit", "retirable_bytes", "ratio", "ratio_source", "needed_bytes", "gap_bytes", "options",
}  # fmt: skip


@pytest.fixture(scope="module")
def loads():
    """``config.load`` by the text of the file: composing takes half a second."""
    load, known = config.load, {}

    def by_text(path: Path):
        text = path.read_bytes()
        if text not in known:
            known[text] = load(path)
        return known[text]

    return by_text


@pytest.fixture
def world(tmp_path, monkeypatch, loads):
    monkeypatch.setattr(config, "load", loads)
    return World(tmp_path)


def run(root: Path, *arguments: str, code: str = "") -> subprocess.CompletedProcess[str]:
    command = ["-c", code] if code else ["-m", "eyas.cli", "budget", *arguments]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}/src"}
    return subprocess.run([sys.executable, *command], cwd=root, env=environment, capture_output=True, text=True)


# ── figures ───────────────────────────────────────────────────────────────────────────────────


def test_figures_of_a_small_plan(world):
    """106 tokens of 128 bytes; lossless at the documented ratio, since nothing is stored yet."""
    values = account_values(examine(world.root))
    assert values.keys() >= KEYS
    assert values["payload_bytes"] == 106 * 128 == 13_568
    assert values["stream_bytes"] == {"b1": 106 * 32, "b2": 106 * 32, "b3": 106 * 32, "last": 106 * 32}
    assert values["tokens_per_sample"] == {"mean": 10.6, "min": 2, "max": 30, "median": 7.5}


def test_figures_agree_with_the_commands_of_the_system(world):
    """Size, used and free as ``df`` prints them for an ordinary user; files as ``df -i``."""
    values = account_values(examine(world.root))
    printed = subprocess.run(
        ["df", "-B1", "--output=size,used,avail,itotal,iavail", world.root], capture_output=True, text=True, check=True
    )
    size, used, free, num_files, free_files = map(int, printed.stdout.splitlines()[1].split())
    assert values["volume_bytes"] == size
    assert values["used_bytes"] == pytest.approx(used, abs=200_000_000)
    assert values["free_bytes"] == pytest.approx(free, abs=200_000_000)
    if num_files:
        assert values["num_free_files"] == pytest.approx(free_files, abs=50_000)


def test_trained_rows_are_counted_stream_by_stream(world):
    world.set(last_rows="trained", codec="raw")
    world.plan()
    values = account_values(examine(world.root))
    assert values["stream_bytes"] == {"b1": 50 * 32, "b2": 50 * 32, "b3": 50 * 32, "last": 40 * 32}
    assert (values["payload_bytes"], values["rows_payload_bytes"]) == (106 * 128, 190 * 32)
    assert (values["ratio"], values["ratio_source"]) == (1.0, "exact")
    assert "of rows that no training reads are left out" in account_text(examine(world.root))


def test_what_lies_in_the_spool_is_done_and_tells_the_ratio(world):
    entries = world.write_spool(2)
    values = account_values(examine(world.root))
    assert (values["done_bytes"], values["num_done_shards"]) == (sum(e["size_bytes"] for e in entries), 2)
    assert values["ratio"] == pytest.approx(0.5)
    assert values["ratio_source"] == "measured on 2 shards of this capture"
    assert values["needed_bytes"] == values["stored_bytes"] - values["done_bytes"]


@pytest.mark.parametrize("fault", ["torn", "garbage", "missing", "cut", "other"])
def test_what_the_spool_cannot_vouch_for_is_not_done(world, fault):
    """A torn or foreign journal line, a file that is missing, cut or not planned."""
    entries = world.write_spool(2)
    spool = world.root / ".eyas/spool" / world.capture.digest
    journal, last = spool / "journal.jsonl", spool / "states" / entries[1]["path"]
    text = journal.read_text()
    if fault == "torn":
        journal.write_text(text[:-30])
    elif fault == "garbage":
        journal.write_text(text.splitlines()[0] + '\n[]\n{"shard": {"path": 1, "entry": {"size_bytes": "x"}}}\n\0')
    elif fault == "other":
        journal.write_text(text.replace("shard-00001", "shard-00099"))
    elif fault == "missing":
        last.unlink()
    else:
        last.write_bytes(last.read_bytes()[:-1])
    assert account_values(examine(world.root))["num_done_shards"] == 1


def test_a_published_capture_is_complete(world):
    """Nothing is needed any more, on a volume that could not hold it again."""
    entries = world.write_shards(world.root / "data/hidden_states", 99)
    fs.write_record(world.root / "data/hidden_states.json", world.manifest(entries))
    world.set(reserve_bytes=10**18)
    account = examine(world.root)
    assert account.budget.is_complete
    assert account.budget.needed_bytes == 0
    assert account_values(account)["stored_bytes"] == sum(e["size_bytes"] for e in entries)
    assert "complete" in account_text(account)


@pytest.mark.parametrize(
    ("changes", "rows", "is_like"),
    [
        ({"tokens": "9" * 64}, "all", True),
        ({"engine": "hf"}, "all", False),
        ({"revision": 1}, "all", False),
        ({"target": "9" * 64}, "all", False),
        ({"codec": "int8"}, "all", False),
        ({"boundaries": [1, 2, 4]}, "all", False),
        ({"last_rows": "trained"}, "all", False),
        ({"tokens": "9" * 64}, "trained", False),
        ({"batch_tokens": 9}, "trained", True),
    ],
)
@pytest.mark.parametrize("place", ["workspace", "cache"])
def test_the_ratio_of_an_earlier_capture_of_the_same_streams(world, changes, rows, is_like, place):
    """Published, or deleted by DVC before a run and still in its cache; other streams tell nothing."""
    world.set(last_rows=rows)
    world.plan()
    entries = world.write_shards(world.root / "elsewhere", 3)
    manifest = world.manifest(entries, **changes)
    if place == "workspace":
        fs.write_record(world.root / "data/hidden_states.json", manifest)
    else:
        outs = [{"path": "data/hidden_states.json", "md5": "ab" * 16}]
        (world.root / "dvc.lock").write_text(json.dumps({"stages": {"extract": {"outs": outs}}}))
        fs.write_record(cache_object(world.root, "ab" * 16), manifest)
    values = account_values(examine(world.root))
    assert values["done_bytes"] == 0
    if is_like:
        # Half of every row's bytes are stored; of the rows that training reads that is a larger share.
        rows_bytes = 106 * 128 if rows == "all" else 50 * 32 * 3 + 40 * 32
        assert values["ratio"] == pytest.approx(0.5 * 106 * 128 / rows_bytes)
        assert values["ratio_source"] == f"measured on 3 shards of {'e' * 16}"
    else:
        assert (values["ratio"], values["ratio_source"]) == (0.69, "its documented default, not measured")


# ── table and JSON ────────────────────────────────────────────────────────────────────────────


@st.composite
def accounts(draw) -> Account:
    sizes = st.integers(0, 10**14)
    num_tokens, payload = draw(st.integers(1, 10**9)), draw(st.integers(1, 10**14))
    need = Need(
        num_samples=draw(st.integers(1, 10**6)), num_tokens=num_tokens, num_shards=draw(st.integers(1, 10**5)),
        payload_bytes=payload, trained_payload_bytes=payload // 2 + 1, token_bytes=5 * num_tokens,
        codec=draw(st.sampled_from(["raw", "blosc2", "int8"])), last_rows=draw(st.sampled_from(["all", "trained"])),
    )  # fmt: skip
    free = draw(sizes)
    found = Budget(
        need=need, ratio=Ratio(0.5, "somewhere"), free_bytes=free, reserve_bytes=draw(sizes),
        done=Done(num_shards=draw(st.integers(0, need.num_shards)), num_bytes=draw(sizes)),
        cache_types=draw(st.sampled_from([(), ("copy",)])), free_files=draw(st.none() | sizes),
        reclaim=Reclaim(draw(sizes), (Retirable("cd" * 16, "old", draw(sizes)),), draw(st.sampled_from(["", "no git"]))),
    )  # fmt: skip
    planned = Planned(
        identity="a" * 64, capture={}, need=need, lengths=Lengths(mean=1.0, min=1, max=1, median=1.0),
        streams={"b2": draw(sizes), "last": draw(sizes)}, paths=frozenset(),
    )  # fmt: skip
    here = Volume(path="/", total_bytes=2 * free, used_bytes=free, free_bytes=free, free_files=None)
    return Account(planned=planned, volume=here, other_volumes=(), budget=found)


@given(accounts())
def test_table_and_json_say_the_same(account):
    values = json.loads(canonical_json(account_values(account)))
    text = account_text(account)
    rows = dict(re.findall(r"^(.+?)  +(\S.*)$", text, re.MULTILINE))

    def said(name: str) -> int:
        return int(re.match(r"[\d,]+", rows[name])[0].replace(",", ""))

    table = {
        "before the codec": "payload_bytes", "after the codec": "stored_bytes", "done already": "done_bytes",
        "still needed": "needed_bytes", "free": "free_bytes", "reserve": "reserve_bytes",
        "gc could free": "reclaimable_bytes", "after retiring": "retirable_bytes", "samples": "num_samples",
        "files": "num_needed_files",
    }  # fmt: skip
    assert {key: said(name) for name, key in table.items()} == {key: values[key] for key in table.values()}
    assert {name: said(f"stream {name}") for name in values["stream_bytes"]} == values["stream_bytes"]
    assert values["fits"] == rows["verdict"].startswith(("fits", "complete")) == (not values["options"])
    if not values["fits"]:
        assert f"{values['samples_that_fit']:,} of {values['num_samples']:,} samples would" in rows["verdict"]
    for option in values["options"]:
        judged = "enough" if option["closes_gap"] else "not enough"
        pattern = rf"^{option['name']} +{re.escape(option['figure'])} +{judged} +{re.escape(option['how'])}$"
        assert re.search(pattern, text, re.MULTILINE)


def test_a_capture_that_does_not_fit_lists_ways_out_and_ends_well(world):
    """Case 18: a figure for each way; the command itself succeeds, it was only asked."""
    world.set(reserve_bytes=10**18)
    done = run(world.root)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"^verdict +does not fit, 0 of 10 samples would; [\d,.]+ GB lack$", done.stdout, re.MULTILINE)
    names = re.findall(
        r"^(gc|retire|hardlink|trained_rows|int8|fewer_samples|other_volume)  ", done.stdout, re.MULTILINE
    )
    assert names == ["gc", "trained_rows", "int8", "fewer_samples", "other_volume"]
    values = json.loads(run(world.root, "--json").stdout)
    assert [option["name"] for option in values["options"]] == names
    assert (values["fits"], values["fits_after_gc"], values["samples_that_fit"]) == (False, False, 0)


# ── refusals ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("path", [room.PLAN, room.TARGET, room.TOKENS_INDEX])
def test_without_a_plan_or_what_it_is_made_from_there_is_no_budget(world, path):
    (world.root / path).unlink()
    with pytest.raises(PlanError, match=f"{path} is missing") as caught:
        examine(world.root)
    assert caught.value.hint.startswith("`make plan`")


def test_an_error_ends_the_command_with_code_2_and_a_hint(world):
    (world.root / room.PLAN).unlink()
    done = run(world.root)
    assert (done.returncode, done.stdout) == (2, "")
    assert "hint: `make plan`" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("change", "field"),
    [({"codec": "int8"}, "codec blosc2, now int8"), ({"revision": 9}, "revision 3, now 9"), ({}, "tokens ffff")],
)
def test_a_plan_of_other_parameters_or_tokens_is_named(world, change, field):
    """Case 35: the identities are compared, and what differs is shown."""
    world.set(**change)
    if not change:
        world.write_index("0" * 64)
    with pytest.raises(PlanError, match=field) as caught:
        examine(world.root)
    assert caught.value.hint.startswith("`make plan`")


@pytest.mark.parametrize(
    "text", ["[]", "{}", '{"identity": 1}', "null", "{", '{"shards": [{}], "identity": "IDENTITY", "num_tokens": 1}']
)
def test_a_plan_that_is_none_is_an_error_of_the_user(world, text):
    (world.root / room.PLAN).write_text(text.replace("IDENTITY", world.capture.digest))
    with pytest.raises(EyasError):
        examine(world.root)


@pytest.mark.parametrize("text", ["[]", "{}", "null", "{", '{"capture": 1}', '{"identity": "x", "capture": {}}'])
def test_a_manifest_that_is_none_is_an_error_of_the_user(world, text):
    """But for one of other states, which is only passed over."""
    (world.root / "data/hidden_states.json").write_text(text)
    with pytest.raises(StoreError, match=r"hidden_states\.json is no"):
        examine(world.root)


def test_a_plan_whose_counts_are_not_its_samples_is_refused(world):
    plan = fs.read_json(world.root / room.PLAN)
    fs.write_record(world.root / room.PLAN, plan | {"num_tokens": 107})
    with pytest.raises(PlanError, match="10 samples of 106 tokens listed, 10 of 107 said"):
        examine(world.root)


def test_wrong_parameters_are_named(world):
    world.set(reserve_bytes=-1)
    with pytest.raises(ConfigError, match=r"extract\.reserve_bytes"):
        examine(world.root)


# ── other volumes ─────────────────────────────────────────────────────────────────────────────


def test_mounts_are_those_that_findmnt_lists():
    printed = subprocess.run(["findmnt", "-rn", "-o", "TARGET"], capture_output=True, text=True)
    if printed.returncode:
        pytest.skip("no findmnt here")
    assert {mount.point for mount in mounts()} == set(printed.stdout.encode().decode("unicode_escape").splitlines())


def test_only_real_writable_volumes_are_proposed(tmp_path, monkeypatch):
    """No memory, no view of the kernel, nothing read-only, no single file, no volume twice, not the own one."""
    shm = Path("/dev/shm")
    if not shm.is_dir() or shm.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("no second volume here")
    (tmp_path / "file").touch()
    rows = [
        "1 1 8:1 / /dev/shm rw,relatime shared:1 - ext4 /dev/sdb1 rw",
        "2 1 8:1 / /dev/shm rw,relatime - ext4 /dev/sdb1 rw",
        f"3 1 8:2 / {tmp_path} rw - ext4 /dev/sda1 rw",
        "4 1 0:4 / /dev/shm rw - tmpfs tmpfs rw",
        "5 1 0:5 / /dev/shm ro,relatime - ext4 /dev/sdc1 rw",
        "6 1 0:6 / /dev/shm rw,relatime - xfs /dev/sdd1 ro",
        "7 1 7:0 / /dev/shm rw - squashfs /dev/loop0 rw",
        f"8 1 8:3 / {tmp_path}/gone rw - nfs server:/a rw",
        "9 1 8:4 / /proc/version rw - ext4 /dev/sde1 rw",
    ]
    (tmp_path / "mountinfo").write_text("\n".join(rows) + "\n")
    monkeypatch.setattr(volumes, "MOUNTS", tmp_path / "mountinfo")
    assert [found.path for found in others(tmp_path)] == ["/dev/shm"]
    assert others(tmp_path)[0].free_bytes == pytest.approx(volume(shm).free_bytes, abs=50_000_000)
    (tmp_path / "mountinfo").write_text("1 1 0:9 / /dev/shm rw - ceph 10.0.0.1:/a\\040b rw\n")
    assert [(m.source, m.holds_data) for m in mounts()] == [("10.0.0.1:/a b", True)]
    assert [found.path for found in others(tmp_path)] == ["/dev/shm"]


# ── speed ─────────────────────────────────────────────────────────────────────────────────────


def test_nothing_heavy_is_imported(world):
    code = (
        "import sys; sys.argv = ['eyas', 'budget', '--json']\n"
        "from eyas import cli\n"
        "try:\n    cli.main()\nexcept SystemExit as end:\n    assert not end.code\n"
        "print(sorted({'torch', 'dvc', 'dvc_data', 'numpy', 'pyarrow', 'transformers'} & set(sys.modules)))"
    )
    world.set(reserve_bytes=10**18)
    done = run(world.root, code=code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def test_600_000_samples_take_seconds(world):
    """They are parsed, not rebuilt; the limit leaves room for a busy machine."""
    sample = {"sample_id": "0" * 16, "num_tokens": 500}
    num_shards, per_shard = 600, 1_000
    shards = [
        {"path": f"000/shard-{i:05d}.safetensors", "payload_bytes": 1, "batches": [[sample] * 8] * (per_shard // 8)}
        for i in range(num_shards)
    ]
    plan = fs.read_json(world.root / room.PLAN) | {
        "num_samples": 600_000, "num_tokens": 300_000_000, "payload_bytes": 300_000_000 * TOKEN_BYTES, "shards": shards
    }  # fmt: skip
    (world.root / room.PLAN).write_text(json.dumps(plan))
    start_s = time.perf_counter()
    done = run(world.root, "--json")
    took_s = time.perf_counter() - start_s
    values = json.loads(done.stdout)
    assert (values["num_samples"], values["tokens_per_sample"]["median"]) == (600_000, 500.0)
    assert took_s < 8


def test_two_accounts_of_one_world_are_equal(world):
    first, second = (dataclasses.replace(examine(world.root).budget, free_bytes=0, free_files=0) for _ in range(2))
    assert first == second
