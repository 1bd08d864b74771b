"""A tiny target, draft vocab and set of states in memory, the same in every process.

python train_world.py FOLDER STEPS    trains in FOLDER (the process that the crash tests kill)
"""

import dataclasses
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from eyas import console
from eyas.config.schema import DrafterConfig, TrainConfig
from eyas.contracts import (
    CaptureIdentity,
    EngineFacts,
    FileDigest,
    FinalNorm,
    ShardManifest,
    StoredSample,
    TargetIdentity,
    TokenSample,
)
from eyas.plan.build import build_plan
from eyas.shards.codecs import make_codec
from eyas.shards.encode import Encoder
from eyas.shards.reader import ShardReader, StoredStates
from eyas.shards.writer import ShardAssembly
from eyas.tokens.draft_vocab import DraftVocab
from eyas.train.distributed import World
from eyas.train.run import Inputs, train

V, W, D, A = 60, 24, 16, 3


class MemoryReader:
    """Random but fixed states: prompts of 3 tokens, answers of 6 to 20."""

    def __init__(self, num_samples=24, mask_value=1):
        generator = torch.Generator().manual_seed(7)
        self.states = {}
        for i in range(num_samples):
            T = 9 + int(torch.randint(0, 15, (), generator=generator))
            sample = StoredSample(
                sample_id=f"{i:016x}",
                num_tokens=T,
                conversation_id=f"c{i}",
                source="s",
                split="held_out" if i % 6 == 5 else "train",
                variant="greedy",
            )
            mask = torch.full((T,), mask_value, dtype=torch.uint8)
            mask[:3] = 0
            self.states[sample.sample_id] = StoredStates(
                sample=sample,
                input_ids_T=torch.randint(0, V, (T,), generator=generator, dtype=torch.int32),
                loss_mask_T=mask,
                aux_TAD=(torch.randn(T, A, D, generator=generator) * torch.tensor([1.0, 3.0, 9.0])[:, None]).bfloat16(),
                last_TD=torch.randn(T, D, generator=generator).bfloat16() * 3,
                num_aux_rows=T,
                has_last_T=torch.ones(T, dtype=torch.bool),
            )

    @property
    def samples(self):
        return tuple(s.sample for s in self.states.values())

    def shard_of(self, sample_id):
        return "000/shard-00000.safetensors"

    def read(self, sample_id):
        return self.states[sample_id]


def make_target(folder):
    generator = torch.Generator().manual_seed(1)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        "model.embed_tokens.weight": torch.randn(V, D, generator=generator).bfloat16(),
        "model.norm.weight": 1 + 0.1 * torch.randn(D, generator=generator),
    }
    save_file(tensors, folder / "model.safetensors")
    config = {
        "hidden_size": D,
        "intermediate_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 1000.0},
    }
    (folder / "config.json").write_text(json.dumps(config))


def make_identity(weight_offset=0.0):
    return TargetIdentity(
        source="directory:",
        revision="0",
        files=(FileDigest(path="model.safetensors", size_bytes=1, sha256="0"),),
        architecture="LlamaForCausalLM",
        model_type="llama",
        num_layers=4,
        hidden_size=D,
        vocab_size=V,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        dtype="bfloat16",
        final_norm=FinalNorm(kind="rms_norm", eps=1e-5, weight_offset=weight_offset, num_zero_scales=0),
        eos_token_ids=(2,),
        tokenizer_sha256="0",
        chat_template_sha256="0",
    )


def make_manifest(identity):
    capture = CaptureIdentity(
        target=identity.digest,
        tokens="t",
        boundaries=(1, 2, 3),
        final_hidden="post_norm",
        dtype="bfloat16",
        codec="raw",
        engine="fake",
        engine_version="1",
        engine_options={},
        image="",
        shard_bytes=1,
        batch_tokens=1,
        revision=1,
    )
    return ShardManifest(
        identity=capture.digest,
        capture=capture,
        engine=EngineFacts(name="fake", version="1", options={}, deterministic=True),
        hidden_size=D,
        num_planned_samples=24,
        num_planned_tokens=1,
        num_stored_samples=24,
        num_stored_tokens=1,
        stored_bytes=1,
        shards=(),
    )


def write_shards(folder, reader, codec, last_rows, shard_bytes=8000):
    """The states of a reader in real shards, a few samples each."""
    tokens = {
        sample_id: TokenSample(
            sample_id=sample_id,
            conversation_id=states.sample.conversation_id,
            source=states.sample.source,
            split=states.sample.split,
            variant=states.sample.variant,
            input_ids=tuple(states.input_ids_T.tolist()),
            loss_mask=tuple(states.loss_mask_T.tolist()),
        )
        for sample_id, states in reader.states.items()
    }
    manifest = make_manifest(make_identity())
    capture = dataclasses.replace(manifest.capture, codec=codec, last_rows=last_rows, shard_bytes=shard_bytes)
    plan = build_plan([(sample_id, len(s.input_ids)) for sample_id, s in tokens.items()], capture, D)
    entries = []
    with Encoder(make_codec(codec)) as encoder:
        for planned in plan.shards:
            assembly = ShardAssembly(planned, capture, D, tokens, encoder)
            for sample in planned.samples:
                states = reader.states[sample.sample_id]
                assembly.add(sample.sample_id, states.input_ids_T, states.aux_TAD, states.last_TD)
            entries.append(assembly.write(folder).entry)
    manifest = dataclasses.replace(
        manifest,
        identity=capture.digest,
        capture=capture,
        num_planned_samples=plan.num_samples,
        num_planned_tokens=plan.num_tokens,
        num_stored_samples=plan.num_samples,
        num_stored_tokens=plan.num_tokens,
        stored_bytes=sum(entry.size_bytes for entry in entries),
        shards=tuple(entries),
    )
    return ShardReader(folder, manifest)


def make_config(**changes):
    values = {
        "num_steps": 12,
        "ttt_steps": 3,
        "curriculum": [0.3, 0.6],
        "batch_tokens": 40,
        "warmup_steps": 2,
        "checkpoint_every": 4,
        "log_every": 3,
        "optimizer": "adamw",
        "lr": 1e-2,
        "dtype": "float32",
    }
    return TrainConfig(**{**values, **changes})


def make_inputs(folder, reader=None, drafter=None, **changes):
    make_target(folder / "target")
    vocab = folder / "vocab"
    if not vocab.exists():
        t2d = torch.zeros(V, dtype=torch.bool)
        t2d[torch.arange(W) * 2] = True
        DraftVocab(d2t_W=torch.arange(W), t2d_V=t2d).write(vocab)
    identity = make_identity()
    return Inputs(
        identity=identity,
        target_folder=folder / "target",
        vocab_folder=vocab,
        manifest=make_manifest(identity),
        reader=reader or MemoryReader(),
        drafter_config=drafter or DrafterConfig(),
        config=make_config(**changes),
    )


def run(folder, inputs, world=None):
    alone = World(0, 1, torch.device(inputs.config.device))
    return train(inputs, folder / "runs", folder / "drafter", folder / "metrics", world or alone)


def result_bytes(folder):
    """Every published byte: drafter and metrics."""
    paths = sorted(p for part in ("drafter", "metrics") for p in (folder / part).rglob("*") if p.is_file())
    return {str(p.relative_to(folder)): p.read_bytes() for p in paths}


if __name__ == "__main__":
    place = Path(sys.argv[1])

    def main(_):
        run(place, make_inputs(place, num_steps=int(sys.argv[2]), checkpoint_every=5))

    print("ready", flush=True)
    console.run_main(main)
