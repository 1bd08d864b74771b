"""Extraction on a Ray cluster: a driver hands out shards, workers host engines and make them."""
