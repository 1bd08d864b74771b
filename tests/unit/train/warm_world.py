"""A drafter in every form a run can start from, and ways to change its files."""

import dataclasses
import json

import torch
import train_world as world
from safetensors.torch import load_file, save_file

from eyas.drafter.foreign import content_hash
from eyas.tokens.draft_vocab import DraftVocab
from eyas.train.run import new_drafter, target_ends

FORMS = {"eyas": "drafter", "sglang": "export/sglang", "speculators": "export/vllm"}


def inputs_from(place, form, drafter=None, **changes):
    changes = {"warm_start": form, "warm_start_sha256": content_hash(place / form)} | changes
    return world.make_inputs(place, drafter=drafter, **changes)


def start(inputs):
    return new_drafter(inputs, target_ends(inputs), DraftVocab.read(inputs.vocab_folder))


def write_vocab(place, ids):
    t2d = torch.zeros(world.V, dtype=torch.bool)
    t2d[ids] = True
    (place / "vocab").mkdir(exist_ok=True)
    DraftVocab(d2t_W=torch.tensor(sorted(ids)) - torch.arange(len(ids)), t2d_V=t2d).write(place / "vocab")


def edit_config(folder, **changes):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for key, value in changes.items():
        *outer, last = key.split("__")
        part = config
        for name in outer:
            part = part[name]
        part[last] = value
        if value is KeyError:
            del part[last]
    path.write_text(json.dumps(config))


def edit_tensors(folder, edit):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file({name: t.contiguous() for name, t in tensors.items()}, path)


def with_layers(inputs, num_layers, model_type="llama", boundaries=(1, 2, 3)):
    identity = dataclasses.replace(inputs.identity, num_layers=num_layers, model_type=model_type)
    capture = dataclasses.replace(inputs.manifest.capture, boundaries=boundaries)
    manifest = dataclasses.replace(inputs.manifest, capture=capture)
    return dataclasses.replace(inputs, identity=identity, manifest=manifest)
