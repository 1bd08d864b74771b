"""The bench of the trainer's input path, on the CPU at a size that says nothing of speed."""

import argparse

import pytest

from eyas.ops.bench.train_feed import measure


@pytest.mark.parametrize("codec", ["raw", "blosc2"])
def test_every_token_of_the_store_is_fed_and_its_bytes_are_counted(tmp_path, codec):
    args = argparse.Namespace(
        hidden=64, aux=3, tokens=200, doc=50, ttt=2, steps=0, batch_tokens=128, vocab=400, share=0.5, codec=codec,
        device="cpu", folder=tmp_path,
    )  # fmt: skip
    figures = measure(tmp_path, args)
    # documents of 45, 48, 52 and 55 tokens; every run but the first epoch's takes each of them four times
    assert figures["tokens"] == 200
    assert figures["steps"] == 4 * figures["packs_per_epoch"]
    assert figures["runs"]["cold"]["tokens"] == 4 * figures["runs"]["cold_first_epoch"]["tokens"] == 4 * 200
    assert figures["runs"]["input_alone_warm"]["tokens"] == figures["runs"]["warm"]["tokens"]
    # half of the tokens are masked: all aux rows but a document's last few, about half of the last rows
    assert 200 * 3.3 < figures["raw_bytes"] / (64 * 2) < 200 * 3.6
    assert figures["bound"] in ("disk", "decoding", "device")
