"""The model card: the head that the hub reads, where the numbers come from, and what is said when there are none."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import yaml
from test_export_write import SHAPE, make_drafter, make_meta, make_target

from eyas.canonical import digest
from eyas.config import ExportConfig
from eyas.contracts import AcceptanceReport, CaptureIdentity, EngineFacts, SetAcceptance, ShardManifest
from eyas.errors import ConfigError
from eyas.export.card import Evidence
from eyas.export.write import export

SET = SetAcceptance(
    tau=2.125,
    tau_low=2.0,
    tau_high=2.25,
    tau_loop_free=2.0,
    alpha=(0.5, 0.25),
    step_accuracy=(0.5, 0.25),
    num_documents=1200,
    num_documents_loop_free=7,
    num_rounds=4000,
    num_emitted=8500,
    loop_share=0.125,
    coverage=0.975,
    oov_share=0.0625,
)


def make_evidence() -> Evidence:
    capture = CaptureIdentity(
        target="t",
        tokens="b" * 64,
        boundaries=(2, 6, 9),
        final_hidden="post_norm",
        dtype="bfloat16",
        codec="blosc2",
        engine="sglang",
        engine_version="0.5.23",
        engine_options={},
        image="",
        shard_bytes=1,
        batch_tokens=1,
        revision=2,
    )
    manifest = ShardManifest(
        identity="a" * 64,
        capture=capture,
        engine=EngineFacts(name="sglang", version="0.5.23", options={}, deterministic=True),
        hidden_size=16,
        num_planned_samples=773,
        num_planned_tokens=102147,
        num_stored_samples=773,
        num_stored_tokens=102147,
        stored_bytes=1,
        shards=(),
    )
    acceptance = AcceptanceReport(
        tau=2.125,
        tau_loop_free=2.0,
        tau_by_set={"chat": 2.125},
        alpha=SET.alpha,
        loop_share=0.125,
        lossless=True,
        num_rounds=4000,
        chain_length=5,
        tau_untrained=1.002,
        sets={"chat": SET},
        decode={},
        drafter="",
        capture_identity="a" * 64,
        seed=0,
        headline_sets=("chat",),
        tau_by_chain={"10": 2.5, "2": 1.75},
        tau_sampled=1.417,
        temperature=0.75,
    )
    return Evidence(manifest=manifest, acceptance=acceptance)


def cards(folder: Path, evidence: Evidence | None = None, **config: str) -> dict[str, tuple[dict, str]]:
    """Server -> (the head as the hub parses it, the text)."""
    target = dataclasses.replace(make_target(), source=config.pop("source", "wheel:a-target==1.0"))
    meta = dataclasses.replace(make_meta(SHAPE), target=target.digest)
    record = export(make_drafter(SHAPE), meta, target, ExportConfig(**config), folder / "export", evidence)
    found = {}
    for server in record.servers:
        _, head, text = (folder / "export" / server / "README.md").read_text().split("---\n", 2)
        found[server] = (yaml.safe_load(head), text)
    return found


def test_a_card_says_what_how_and_how_good(tmp_path: Path) -> None:
    head, text = cards(tmp_path, make_evidence(), target_name="org/chat", target_licence="apache-2.0")["sglang"]
    assert head == {
        "license": "apache-2.0",
        "base_model": "org/chat",
        "pipeline_tag": "text-generation",
        "tags": ["eagle3", "speculative-decoding", "draft-model", "sglang"],
    }
    for said in (
        "| layer ids | [1, 5, 8]: ",
        "| boundaries | [2, 6, 9]: ",
        "773 samples, 102,147 tokens",
        "| hidden states by | sglang (0.5.23), bfloat16, codec blosc2 |",
        f"| capture identity | {'a' * 64} |",
        f"| tokens | {'b' * 64} |",
        "| steps | 10 optimizer steps, 100 trained rows |",
        "| chat | 1,200 | 4,000 | 2.125 | 2.000 to 2.250 | 0.500, 0.250 | 97.5% | 6.2% | 12.5% |",
        "Chain of 5 draft tokens, held-out prompts; tau of the untrained drafter is 1.002.",
        "tau of chat by chain length:\n\n| 2 | 10 |\n|---|---|\n| 1.750 | 2.500 |\n",
        "tau of text of chat that was sampled at temperature 0.75, by the acceptance rule: 1.417.",
        "the bonus token included",
        "Licence of org/chat: apache-2.0.",
        "--model-path org/chat --speculative-algorithm EAGLE3",
    ):
        assert said in text, said


def test_a_card_of_an_imported_drafter_claims_no_states_and_one_conversation_no_interval(tmp_path: Path) -> None:
    evidence = make_evidence()
    alone = dataclasses.replace(SET, tau_low=None, tau_high=None)
    acceptance = dataclasses.replace(evidence.acceptance, sets={"chat": alone}, tau_sampled=None)
    text = cards(tmp_path, Evidence(manifest=None, acceptance=acceptance))["sglang"][1]
    assert "| 2.125 | one conversation |" in text
    assert "It was trained elsewhere: texts held out here may be among what trained it." in text
    assert "trained on |" not in text
    assert "that was sampled at" not in text


def test_each_servers_card_speaks_of_that_server(tmp_path: Path) -> None:
    """Case 23: the same boundaries, each in its server's spelling."""
    found = cards(tmp_path)
    assert "[1, 5, 8]" in found["sglang"][1]
    assert "[1, 5, 8]" not in found["vllm"][1]
    assert "layer ids | [2, 6, 9]" in found["vllm"][1]
    assert '{"method": "eagle3", "model": "DRAFTER", "num_speculative_tokens": 3}' in found["vllm"][1]
    assert found["vllm"][0]["tags"][-1] == "vllm"


def test_a_target_of_the_hub_is_the_base_model_and_a_rare_licence_keeps_its_name(tmp_path: Path) -> None:
    head, text = cards(tmp_path, source="hub:org/model", target_licence="modified-mit")["vllm"]
    assert (head["base_model"], head["license"], head["license_name"]) == ("org/model", "other", "modified-mit")
    assert "vllm serve org/model" in text


def test_what_is_not_known_is_said_to_be_unknown(tmp_path: Path) -> None:
    head, text = cards(tmp_path)["sglang"]
    assert "license" not in head
    assert "base_model" not in head
    assert "Not measured." in text
    assert "The licence of wheel:a-target==1.0 was not named at export." in text


def test_the_checkpoints_digest_is_the_records(tmp_path: Path) -> None:
    text = cards(tmp_path)["sglang"][1]
    meta = dataclasses.replace(make_meta(SHAPE), target=make_target().digest)
    assert f"| checkpoint | {digest(meta)} |" in text


def test_a_licence_is_one_word() -> None:
    with pytest.raises(ConfigError, match=r"export\.target_licence: 'MIT licence'"):
        ExportConfig(target_licence="MIT licence").check()
