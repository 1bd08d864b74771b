"""A drafter from adopted and from imported states, through the real dvc and the pipeline's own stages."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
import yaml
from adopt_cases import REPOSITORY, adopt_other, eyas, is_clean, make_folder, make_repository, ok

sys.path.append(str(Path(__file__).parents[1] / "target"))

from tiny_targets import HEADS, HIDDEN, INTERMEDIATE, KV_HEADS, VOCAB, write_tokenizer

from eyas import fs
from eyas.contracts import ShardManifest
from eyas.errors import DataError, StoreError
from eyas.ops.exchange.stage import ImportOptions, import_stage, write_pipeline
from eyas.ops.exchange.train_from import train_from
from eyas.shards.layouts.torch_files import save_tensors
from eyas.shards.reader import ShardReader
from eyas.stages.common import runs_folder

NUM_LAYERS = 4
SETTINGS = {
    "draft_vocab_size": 64, "num_steps": 3, "batch_tokens": 64, "ttt_steps": 2, "decode_prompts": 2, "max_new_tokens": 8,
    "num_bootstrap": 20, "checkpoint_every": 3, "log_every": 1, "held_out_share": 0.25, "reserve_bytes": 0, "chain_length": 2,
    "warmup_steps": 1, "curriculum": "[]", "shard_bytes": 65536,
}  # fmt: skip


def write_target(folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, num_hidden_layers=NUM_LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, max_position_embeddings=128,
        eos_token_id=2, bos_token_id=1, torch_dtype="bfloat16",
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    write_tokenizer(folder)


def write_peer(folder: Path, num_samples: int = 16) -> Path:
    """SpecForge's files with states that were normed and say nothing."""
    generator = torch.Generator().manual_seed(0)
    folder.mkdir()
    for index in range(num_samples):
        length = 20 + index
        last_TD = torch.randn(length, HIDDEN, generator=generator)
        last_TD /= last_TD.square().mean(dim=1, keepdim=True).sqrt()
        mask_T = torch.zeros(length).long()
        mask_T[8:] = 1
        sample = {
            "input_ids": torch.randint(3, VOCAB, (length,), generator=generator),
            "loss_mask": mask_T,
            "hidden_state": last_TD.bfloat16()[None],
            "aux_hidden_state": torch.randn(1, length, 3 * HIDDEN, generator=generator).bfloat16(),
        }
        with (folder / f"data_{index}.ckpt").open("wb") as handle:
            save_tensors(sample, handle)
    return folder


def make_project(root: Path, target: Path) -> Path:
    make_repository(root)
    shutil.copy(REPOSITORY / "dvc.yaml", root)
    text = (root / "params.yaml").read_text()
    head, tail = text.split("\ndata:\n")
    head = re.sub(r"source: .*", "source: directory", head)
    head = re.sub(r"location: .*", f"location: {target}", head)
    head = re.sub(r"(revision|member): .*", r"\1: ''", head)
    for key, value in (("num_layers", NUM_LAYERS), ("hidden_size", HIDDEN), ("vocab_size", VOCAB)):
        head = re.sub(rf"{key}: .*", f"{key}: {value}", head)
    for key, value in SETTINGS.items():
        tail = re.sub(rf"(?m)^  {key}:.*(\n  - .*)*$", f"  {key}: {value}", tail)
    (root / "params.yaml").write_text(f"{head}\ndata:\n{tail}")
    return root


@pytest.mark.slow
def test_a_drafter_from_an_adopted_folder_and_from_an_imported_one(tmp_path: Path) -> None:
    write_target(tmp_path / "target")
    root, peer = make_project(tmp_path / "project", tmp_path / "target"), write_peer(tmp_path / "peer")
    ok(root, "dvc", "repro", "-q", "fetch")
    done = eyas(root, "adopt", "--dir", str(peer), "--engine", "sglang", "--json")
    assert json.loads(done.stdout)["layout"] == "specforge", done.stderr
    done = eyas(root, "train-from", "peer")
    assert (done.returncode, "BOUNDARIES" in done.stderr) == (2, True)
    done = eyas(root, "train-from", "peer", "--boundaries", "1,2,3", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "imports/peer becomes a second full set beside adopted/peer" in done.stderr
    said = json.loads(done.stdout)
    assert said["tau"] == fs.read_json(root / "imports/peer/reports/acceptance.json")["tau"]
    assert said["uncommitted"] == [f"imports/peer/{file}" for file in ("dvc.lock", "dvc.yaml", "import.json")]
    assert (root / said["paths"]["drafter"]).is_dir()
    check_trained(root, "peer")
    again = eyas(root, "train-from", "peer")
    assert "Running stage" not in again.stdout + again.stderr
    assert re.search(r"(?m)^tau +\d", again.stdout)
    assert is_clean(root, "imports/peer/dvc.yaml:train")

    # The same files, imported by hand: the same set, and nothing is imported a second time.
    words = ["--format", "specforge", "--from", str(peer), "--to", "imports/by_hand", "--boundaries", "1,2,3"]
    assert eyas(root, "import-states", *words).returncode == 0
    done = eyas(root, "train-from", "by_hand")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "import-states" not in done.stdout + done.stderr
    check_trained(root, "by_hand")
    locks = [yaml.safe_load((root / f"imports/{name}/dvc.lock").read_text()) for name in ("peer", "by_hand")]
    assert hashes(locks[0], "peer") == hashes(locks[1], "by_hand")

    # Out again in another layout.
    done = eyas(root, "export-states", "--from", "imports/peer", "--format", "speculators", "--to", "out", "--json")
    assert done.returncode == 0, done.stderr
    assert len(list((root / "out/hidden_states").iterdir())) == 16
    assert {path.stem for path in (root / "reports/runs").iterdir()} == {"fetch"}


@pytest.mark.slow
def test_what_was_imported_outlives_its_source_and_a_failed_import_leaves_nothing(tmp_path: Path) -> None:
    write_target(tmp_path / "target")
    root, peer = make_project(tmp_path / "project", tmp_path / "target"), write_peer(tmp_path / "peer")
    ok(root, "dvc", "repro", "-q", "fetch")
    commit(root, "target")
    assert eyas(root, "adopt", "--dir", str(peer), "--engine", "sglang", "--name", "old").returncode == 0
    commit(root, "adopt")

    # The stage itself fails, after everything that can be told before was right.
    done = eyas(root, "train-from", "old", "--boundaries", "1,2,3", "--final-hidden", "post_norm", "--json")
    assert done.returncode == 0, done.stderr
    commit(root, "train")
    before = snapshot(root / "imports/old")
    damaged = copy_with_nan(peer, tmp_path / "damaged")
    assert eyas(root, "adopt", "--dir", str(damaged), "--engine", "sglang", "--name", "again").returncode == 0
    done = eyas(root, "train-from", "again", "--boundaries", "1,2,3")
    assert (done.returncode, "MAX_FAILED=1" in done.stderr) == (2, True), done.stderr
    assert not (root / "imports/again").exists()
    (root / "adopted/again.dvc").unlink()

    # Another option for a good set, and it fails: the set is there again, with what was said of it before.
    done = eyas(root, "train-from", "old", "--boundaries", "1,2")
    assert (done.returncode, "hold 3 aux streams" in done.stderr) == (2, True), done.stderr
    params = (root / "params.yaml").read_text()
    (root / "params.yaml").write_text(params.replace("reserve_bytes: 0", "reserve_bytes: 900000000000000"))
    done = eyas(root, "train-from", "old", "--boundaries", "1,2,4")
    assert (done.returncode, "second full set" in done.stderr) == (2, True), done.stderr
    (root / "params.yaml").write_text(params)
    (tmp_path / "target").rename(tmp_path / "away")
    done = eyas(root, "train-from", "old", "--boundaries", "1,2,4")
    assert (done.returncode, "the import of old failed" in done.stderr) == (2, True), done.stderr
    (tmp_path / "away").rename(tmp_path / "target")
    assert snapshot(root / "imports/old") == before

    # Its source goes.
    assert eyas(root, "retire", "old").returncode == 0
    commit(root, "retire")
    plan = json.loads(eyas(root, "gc-plan", "--json").stdout)
    assert eyas(root, "gc", "--confirm", plan["plan_id"]).returncode == 0
    assert not (root / "adopted/old").exists()
    done = eyas(root, "train-from", "old")
    assert done.returncode == 0, done.stderr
    assert re.search(r"adopted/old was deleted by gc on \d{4}-\d\d-\d\d; imports/old is whole", done.stderr)
    assert "Running stage" not in done.stderr
    assert snapshot(root / "imports/old") == before
    assert ok(root, "git", "status", "--porcelain") == ""
    assert is_clean(root, "imports/old/dvc.yaml")

    # And then the set.
    shutil.rmtree(root / "imports/old/hidden_states")
    shutil.rmtree(root / ".dvc/cache/files/md5")
    done = eyas(root, "train-from", "old")
    assert (done.returncode, "imports/old is not whole" in done.stderr) == (2, True), done.stderr
    assert (root / "imports/old/tokens/index.json").is_file()
    assert (root / "imports/old/import.json").is_file()


def commit(root: Path, message: str) -> None:
    ok(root, "git", "add", "-A")
    ok(root, "git", "commit", "-qm", message)


def copy_with_nan(peer: Path, folder: Path) -> Path:
    data = torch.load(peer / "data_3.ckpt", weights_only=True)
    shutil.copytree(peer, folder)
    (folder / "data_3.ckpt").unlink()
    data["aux_hidden_state"][0, 4, 7] = float("nan")
    with (folder / "data_3.ckpt").open("wb") as handle:
        save_tensors(data, handle)
    return folder


def snapshot(folder: Path) -> dict[str, bytes]:
    kept = [path for path in sorted(folder.rglob("*")) if path.is_file() and ".eyas" not in path.parts]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in kept if "runs" not in path.parts}


def check_trained(root: Path, name: str) -> None:
    home = root / "imports" / name
    assert fs.read_json(home / "reports/acceptance.json")["tau"] >= 1
    assert (home / "export/sglang/model.safetensors").is_file()
    assert {p.stem for p in (home / "reports/runs").iterdir()} == {"train", "evaluate", "export"}
    manifest = fs.read_record(ShardManifest, home / "hidden_states.json")
    splits = [sample.split for sample in ShardReader(home / "hidden_states", manifest).samples]
    assert (splits.count("held_out"), len(splits)) == (4, 16)
    assert ok(root, "git", "status", "--porcelain", "-uall", "--", "imports").count(f"imports/{name}/") == 3
    ok(root, "git", "add", "-A")
    assert ok(root, "git", "ls-files", f"imports/{name}").split() == [
        f"imports/{name}/{file}" for file in ("dvc.lock", "dvc.yaml", "import.json")
    ]
    ok(root, "git", "reset", "-q")


def hashes(lock: dict, name: str) -> dict[str, str]:
    return {
        out["path"].removeprefix(f"imports/{name}/"): out["md5"] for stage in lock["stages"].values() for out in stage["outs"]
        if "/reports/" not in out["path"]
    }  # fmt: skip


# ── without running a stage ───────────────────────────────────────────────────────────────────


def test_the_stages_are_the_pipelines_own_with_other_paths(tmp_path: Path) -> None:
    root = make_repository(tmp_path / "r")
    shutil.copy(REPOSITORY / "dvc.yaml", root)
    out = root / "imports/x"
    write_pipeline(root, "specforge", Path("/far/away dir"), out, ImportOptions(boundaries=(1, 2), max_failed=3))
    stages = yaml.safe_load((out / "dvc.yaml").read_text())["stages"]
    assert list(stages) == ["import", "draft_vocab", "train", "evaluate", "export"]
    own = yaml.safe_load((REPOSITORY / "dvc.yaml").read_text())["stages"]
    for name in ("train", "evaluate", "export"):
        text = json.dumps({key: value for key, value in stages[name].items() if key != "wdir"})
        for moved, here in (
            ("imports/x/draft_vocab", "data/draft_vocab"), ("imports/x/hidden_states", "data/hidden_states"),
            ("imports/x/drafter", "models/drafter"), ("imports/x/export", "models/export"), ("imports/x/reports", "reports"),
        ):  # fmt: skip
            text = text.replace(moved, here)
        assert json.loads(text) == own[name]
    assert stages["import"]["cmd"].endswith(
        "--format specforge --from '/far/away dir' --to imports/x --boundaries 1,2 --max-failed 3"
    )
    assert (stages["import"]["frozen"], stages["import"]["deps"]) == (True, ["models/target.json"])
    listed = ok(root, "dvc", "stage", "list", "--name-only", "imports/x/dvc.yaml").split()
    assert [line.rpartition(":")[2] for line in listed] == list(stages)


@pytest.mark.parametrize("out", ["elsewhere/x", "imports", "imports/x/deep", "../imports/x"])
def test_a_set_that_lies_elsewhere_gets_no_stages(tmp_path: Path, out: str) -> None:
    root = make_repository(tmp_path / "r")
    shutil.copy(REPOSITORY / "dvc.yaml", root)
    write_pipeline(root, "specforge", Path("x"), root / out, ImportOptions())
    assert [path.name for path in tmp_path.rglob("dvc.yaml")] == ["dvc.yaml"]


def test_an_adopted_import_depends_on_its_files() -> None:
    stage = import_stage("specforge", "adopted/x", "x", ImportOptions(final_hidden="pre_norm"))
    assert (stage["deps"], "frozen" in stage) == (["models/target.json", "adopted/x"], False)
    assert "--final-hidden pre_norm" in stage["cmd"]


def test_what_cannot_be_trained_from_is_refused(tmp_path: Path) -> None:
    root = make_repository(tmp_path / "r")
    adopt_other(root, make_folder(tmp_path / "old"))
    with pytest.raises(StoreError, match="adopted as other"):
        train_from(root, "old", ImportOptions(boundaries=(1,)))
    path = root / "adopted/old.dvc"
    path.write_text(path.read_text().replace("layout: other", "layout: specforge"))
    with pytest.raises(DataError, match="which layers"):
        train_from(root, "old", ImportOptions())
    with pytest.raises(StoreError, match="is no generation"):
        train_from(root, "nothing", ImportOptions())


def test_a_set_of_another_folder_under_the_same_name_is_not_taken_for_it(tmp_path: Path) -> None:
    root = make_repository(tmp_path / "r")
    shutil.copy(REPOSITORY / "dvc.yaml", root)
    adopt_other(root, make_folder(tmp_path / "old"))
    write_pipeline(root, "specforge", Path("/elsewhere"), root / "imports/old", ImportOptions(boundaries=(1, 2)))
    text = (root / "imports/old/dvc.yaml").read_text()
    for options in (ImportOptions(), ImportOptions(boundaries=(1, 2))):
        with pytest.raises(StoreError, match=r"imported by hand and is not of adopted/old: .*--from /elsewhere"):
            train_from(root, "old", options)
    assert (root / "imports/old/dvc.yaml").read_text() == text


def test_run_records_of_an_imported_set_lie_with_it() -> None:
    assert runs_folder([Path("imports/x/drafter")]) == Path("imports/x/reports/runs")
    for path in ("models/drafter", "imports/x", "data/imports/x/y"):
        assert runs_folder([Path(path)]) == Path("reports/runs")
    assert runs_folder([]) == Path("reports/runs")
