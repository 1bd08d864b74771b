"""The account of ``eyas budget`` for people and for machines: the same figures twice."""

from __future__ import annotations

from typing import Any

from eyas import console
from eyas.canonical import to_plain
from eyas.console import human_bytes
from eyas.generations.working import working_values
from eyas.ops.budget import Account
from eyas.plan.remedies import missing, remedies, remedies_text, with_gc, with_retired


def account_values(account: Account) -> dict[str, Any]:
    """The account as plain values."""
    found, planned = account.budget, account.planned
    return {
        "identity": planned.identity,
        "num_samples": found.need.num_samples,
        "num_tokens": found.need.num_tokens,
        "tokens_per_sample": to_plain(planned.lengths),
        "stream_bytes": planned.streams,
        "payload_bytes": found.need.payload_bytes,
        "rows_payload_bytes": found.need.rows_payload_bytes,
        "codec": found.need.codec,
        "ratio": found.ratio.value,
        "ratio_source": found.ratio.source,
        "stored_bytes": found.total_bytes,
        "copies": found.copies,
        "peak_bytes": found.peak_bytes,
        "done_bytes": found.done.num_bytes,
        "num_done_shards": found.done.num_shards,
        "num_shards": found.need.num_shards,
        "needed_bytes": found.needed_bytes,
        "volume_bytes": account.volume.total_bytes,
        "used_bytes": account.volume.used_bytes,
        "free_bytes": found.free_bytes,
        "reserve_bytes": found.reserve_bytes,
        "num_needed_files": found.num_needed_files,
        "num_free_files": found.free_files,
        "reclaimable_bytes": found.reclaim.free_now_bytes,
        "retirable_bytes": found.reclaim.retirable_bytes,
        "retirable": to_plain(found.reclaim.retirable),
        "reclaim_problem": found.reclaim.problem,
        "working": working_values(account.working),
        "fits": found.fits,
        "headroom_bytes": found.headroom_bytes,
        "gap_bytes": found.gap_bytes,
        "fits_after_gc": with_gc(found).fits,
        "fits_after_retiring": with_retired(found).fits,
        "samples_that_fit": found.num_samples_that_fit,
        "options": to_plain(remedies(found, account.other_volumes)),
        **_stream_values(account),
    }


def _stream_values(account: Account) -> dict[str, Any]:
    if account.stream is None:
        return {}
    from eyas.ops.stream_budget import stream_values

    return {"stream": stream_values(account.stream)}


def account_text(account: Account) -> str:
    """The table, and what would close the gap if there is one."""
    rows = [*_capture_rows(account), *_volume_rows(account), ("verdict", _verdict(account))]
    text = console.table(rows)
    if account.stream is not None:
        from eyas.ops.stream_budget import stream_text  # reads tokens: nothing that a stored capture needs

        text = (
            f"the part that is stored (train.source is stream):\n{text}\n\nthe stream:\n{stream_text(account.stream)}"
        )
    ways = remedies(account.budget, account.other_volumes)
    return f"{text}\n\nwhat would close the gap, each alone:\n{remedies_text(ways)}" if ways else text


def _capture_rows(account: Account) -> list[tuple[str, str]]:
    found, planned = account.budget, account.planned
    need, lengths = found.need, planned.lengths
    left_out = need.payload_bytes - need.rows_payload_bytes
    rows = "" if not left_out else f"; {human_bytes(left_out)} of rows that no training reads are left out"
    return [
        ("samples", f"{need.num_samples:,} in {need.num_shards:,} shards"),
        ("tokens", f"{need.num_tokens:,}"),
        (
            "tokens per sample",
            f"average {lengths.mean:,.1f}, min {lengths.min:,}, max {lengths.max:,}, median {lengths.median:,.1f}",
        ),
        *((f"stream {name}", _bytes(num_bytes)) for name, num_bytes in planned.streams.items()),
        ("before the codec", f"{_bytes(need.payload_bytes)}{rows}"),
        (
            "after the codec",
            f"{_bytes(found.total_bytes)} with {need.codec}, ids, masks and headers included "
            f"(x {found.ratio.value:.4f}: {found.ratio.source})",
        ),
        ("done already", f"{_bytes(found.done.num_bytes)} in {found.done.num_shards:,} shards"),
        ("still needed", f"{_bytes(found.needed_bytes)}{_copies(account)}"),
    ]


def _copies(account: Account) -> str:
    found = account.budget
    if found.copies == 1:
        return ""
    return f": the shards lie there {found.copies} times, DVC's cache.type is {','.join(found.cache_types)}"


def _volume_rows(account: Account) -> list[tuple[str, str]]:
    found, here = account.budget, account.volume
    files = "no limit" if found.free_files is None else f"{found.free_files:,} can be made"
    return [
        ("volume", f"{human_bytes(here.total_bytes)}, {human_bytes(here.used_bytes)} used"),
        ("free", f"{_bytes(found.free_bytes)} for an ordinary user"),
        ("reserve", f"{_bytes(found.reserve_bytes)} (extract.reserve_bytes)"),
        ("files", f"{found.num_needed_files:,} to be made at most, folders and journals included; {files}"),
        *((one["path"], f"{_bytes(one['disk_bytes'])}: {one['note']}") for one in working_values(account.working)),
        ("gc could free", _reclaimable(account)),
        *(
            ("after retiring", f"{_bytes(g.num_bytes)} more: `make retire GEN={g.hash[:8]}` ({g.name})")
            for g in found.reclaim.retirable
        ),
    ]


def _reclaimable(account: Account) -> str:
    reclaim = account.budget.reclaim
    return f"{_bytes(reclaim.free_now_bytes)} now{f' ({reclaim.problem})' if reclaim.problem else ''}"


def _verdict(account: Account) -> str:
    found = account.budget
    if not found.fits:
        return missing(found)
    if found.is_complete:
        return "complete: every shard is there"
    return f"fits: {human_bytes(found.headroom_bytes)} stay free above the reserve"


def _bytes(num_bytes: int) -> str:
    return f"{num_bytes:,} bytes = {human_bytes(num_bytes)}"
