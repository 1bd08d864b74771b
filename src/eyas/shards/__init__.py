"""The room shards."""
