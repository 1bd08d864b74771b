"""The account of a manifest: what it lists adds up, each shard once, under names that lie below the states folder."""

from __future__ import annotations

from eyas.contracts import ShardManifest
from eyas.errors import StoreError
from eyas.shards.format import SHARD_PATH

READABLE_MANIFESTS = (1, 2)
CHECKOUT = "`dvc checkout --force data/hidden_states.json` brings back the one that was published"


def check_account(manifest: ShardManifest) -> None:
    """Check that planned = stored + failed, that the sums of the shards agree, and that each is listed once.

    Raises:
        StoreError: The account does not close, a path is none of a shard's, or a later eyas wrote it.
    """
    if manifest.schema_version not in READABLE_MANIFESTS:
        versions = " and ".join(map(str, READABLE_MANIFESTS))
        raise StoreError(
            f"manifest of schema version {manifest.schema_version}, this eyas reads {versions}",
            "use the eyas that wrote it, or extract again",
        )
    listed: set[str] = set()
    for entry in manifest.shards:
        if entry.path in listed or not SHARD_PATH.fullmatch(entry.path):
            what = "twice" if entry.path in listed else "as a shard's path, expected 000/shard-00000.safetensors or so"
            raise StoreError(f"manifest: {entry.path!r} is listed {what}", CHECKOUT)
        listed.add(entry.path)
    digest = manifest.capture_digest
    if manifest.identity != digest:
        raise StoreError(f"manifest identity {manifest.identity}, but its capture has {digest}", "run `make extract`")
    stored = (sum(e.num_samples for e in manifest.shards), sum(e.num_tokens for e in manifest.shards))
    failed = (len(manifest.failed), sum(f.num_tokens for f in manifest.failed))
    claims = {
        "stored (samples, tokens)": ((manifest.num_stored_samples, manifest.num_stored_tokens), stored),
        "planned (samples, tokens)": (
            (manifest.num_planned_samples, manifest.num_planned_tokens),
            (stored[0] + failed[0], stored[1] + failed[1]),
        ),
        "stored bytes": (manifest.stored_bytes, sum(e.size_bytes for e in manifest.shards)),
    }
    for name, (said, found) in claims.items():
        if said != found:
            raise StoreError(f"manifest: {name} {said}, its shards and failures give {found}", "run `make extract`")
