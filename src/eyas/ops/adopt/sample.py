"""What an adopted folder holds: its layout by its files' names, the rest by opening some of them.

Letters: T tokens of a sample, A aux streams, D target hidden size.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from eyas import config, console, fs
from eyas.contracts import FinalHidden, TargetIdentity
from eyas.errors import DataError, StoreError
from eyas.ops.adopt.source import OTHER, FoundFolder
from eyas.shards.layouts import registry, specforge, speculators, speculators_v1
from eyas.shards.layouts.base import LayoutSample, LayoutSource, sample_problem
from eyas.shards.layouts.norms import NormReading, final_scale, read_norm
from eyas.shards.layouts.scan import TORCH_SUFFIXES
from eyas.shards.layouts.torch_files import zip_problem
from eyas.target import store
from eyas.target.load import TensorFiles

OPENED_FILES = 24
"""Spread over the folder, the first and the last among them."""
TARGET = Path("models/target.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """What some files of a folder say about all of them."""

    layout: str
    num_samples: int
    num_tokens: int
    tokens_from: str
    """``counted`` where the layout lists lengths, ``estimated`` from the files' sizes otherwise."""
    dtype: str
    hidden_size: int
    num_aux: int
    boundaries: tuple[int, ...]
    """Empty where nothing in the folder says them."""
    final_hidden: FinalHidden | None
    """As the layout prescribes or the states show; None when neither tells."""
    norm_reading: str
    num_opened: int
    problems: tuple[str, ...]
    """Of opened files: damaged, short, not finite; then whatever does not fit the target."""


def detect(found: FoundFolder) -> str:
    """Layout of a folder, by the names of its files.

    Raises:
        DataError: None that is known, or two.
    """
    names = [file.path for file in found.files]
    kinds = {
        speculators_v1.NAME: any(speculators_v1.FILE_NAME.fullmatch(name) for name in names),
        speculators.NAME: any(_is_speculators(name) for name in names) and "dataset_info.json" in names,
        specforge.NAME: any(specforge.FILE_NAME.fullmatch(Path(name).name) for name in names),
    }
    layouts = [name for name, is_there in kinds.items() if is_there]
    if len(layouts) == 1:
        return layouts[0]
    expected = ", ".join(f"{name} ({example})" for name, example in registry.EXAMPLES.items())
    what = f"files of {' and '.join(layouts)}" if layouts else f"no layout that is known, the first file is {names[0]}"
    raise DataError(
        f"{found.path}: {what}; expected {expected}",
        f"give the folder above or below (DIR=), say FORMAT={'|'.join(layouts or registry.FORMATS)}, or take "
        f"FORMAT={OTHER}: hashed and kept under DVC, but nothing can be trained from it",
    )


def _is_speculators(name: str) -> bool:
    folder, _, file = name.rpartition("/")
    return folder == speculators.STATES_FOLDER and bool(speculators.FILE_NAME.fullmatch(file))


def sample_folder(root: Path, found: FoundFolder, layout: str) -> Sampled:
    """Open some files of a folder, compare what they hold with the target where it is at hand.

    Raises:
        DataError: Not one file of that layout can be opened.
    """
    target = fs.read_record(TargetIdentity, root / TARGET) if (root / TARGET).is_file() else None
    source, problems = _open(layout, found.path, target)
    sizes = {file.path: file.size_bytes for file in found.files}
    picked = _spread([path for path in source.paths if path in sizes], OPENED_FILES)
    good: list[tuple[str, LayoutSample]] = []
    for path in picked:
        problem, sample = _open_file(source, found.path, path, target)
        if problem:
            problems.append(f"{path}: {problem}")
        if sample is not None:
            good.append((path, sample))
    if not good:
        raise DataError(
            f"{found.path}: none of {len(picked)} files can be read as {layout}: {problems[-1] if problems else 'none'}",
            f"take the right FORMAT, or FORMAT={OTHER}: hashed and kept under DVC, but nothing can be trained from it",
        )
    missing = [path for path in source.paths if path not in sizes]
    if missing:
        problems.append(f"{len(missing):,} files are missing that the layout lists: {missing[0]}")
    _, first = good[0]
    reading = _read_norm(root, target, [sample for _, sample in good])
    num_tokens, tokens_from = _count_tokens(found, source, good)
    record = registry.read_export_record(found.path)
    said = record.facts.final_hidden if record else source.final_hidden
    if reading is not None and said is not None and reading.verdict not in (None, said):
        problems.append(f"last should be {said}, but the states are {reading.verdict}: {reading.text}")
    return Sampled(
        layout=layout,
        num_samples=len(source.paths),
        num_tokens=num_tokens,
        tokens_from=tokens_from,
        dtype=str(first.aux_TAD.dtype).removeprefix("torch."),
        hidden_size=first.last_TD.shape[-1],
        num_aux=first.aux_TAD.shape[1],
        boundaries=tuple(source.boundaries or (record.facts.boundaries if record else ())),
        final_hidden=said or (reading.verdict if reading else None),
        norm_reading=reading.text if reading else "",
        num_opened=len(picked),
        problems=tuple(problems),
    )


def _open(layout: str, folder: Path, target: TargetIdentity | None) -> tuple[LayoutSource, list[str]]:
    """The layout's reader; layers of another target are a finding, not an obstacle: such states are often retired."""
    named = _layers_by_config(folder)
    expected = target.num_layers if target else named
    try:
        return registry.open_source(layout, folder, expected or 0), []
    except DataError as error:
        if layout != speculators_v1.NAME or named in (None, expected):
            raise
        return registry.open_source(layout, folder, named or 0), [f"another target? {error.message}"]


def _layers_by_config(folder: Path) -> int | None:
    """How many layers the target of a ``data_config.json`` has, if its last layer id is the last layer's."""
    try:
        return int(fs.read_json(folder / speculators_v1.CONFIG_NAME)["hidden_states"]["layer_ids"][-1]) + 1
    except (StoreError, KeyError, TypeError, ValueError, IndexError):
        return None


def _spread(paths: Sequence[str], count: int) -> list[str]:
    if len(paths) <= count:
        return list(paths)
    return [paths[round(i * (len(paths) - 1) / (count - 1))] for i in range(count)]


def _open_file(
    source: LayoutSource, folder: Path, path: str, target: TargetIdentity | None
) -> tuple[str | None, LayoutSample | None]:
    """What is wrong with a file, and what it holds as far as it can be read."""
    problem = zip_problem(folder / path) if Path(path).suffix in TORCH_SUFFIXES else None
    if problem:
        return problem, None
    try:
        sample = source.read(path)
    except DataError as error:
        return error.message, None
    hidden_size = target.hidden_size if target else sample.last_TD.shape[-1]
    vocab_size = target.vocab_size if target else 1 << 31
    return sample_problem(sample, sample.aux_TAD.shape[1], hidden_size, vocab_size), sample


def _count_tokens(
    found: FoundFolder, source: LayoutSource, good: Sequence[tuple[str, LayoutSample]]
) -> tuple[int, str]:
    """Tokens of all samples: as listed, or by the share of the bytes that was opened."""
    lengths = found.path / speculators_v1.LENGTHS_NAME
    if source.name == speculators_v1.NAME and lengths.is_file():
        try:
            return sum(int(count) for count in json.loads(lengths.read_bytes()).values()), "counted"
        except (ValueError, AttributeError, TypeError):
            console.log(f"adopt: {lengths} is damaged; tokens are estimated")
    if isinstance(source, speculators.SpeculatorsSource):
        return source.num_tokens, "counted"
    sizes = {file.path: file.size_bytes for file in found.files}
    opened_tokens = sum(len(sample.input_ids_T) for _, sample in good)
    num_bytes = sum(sizes.get(path, 0) for path in source.paths)
    return round(num_bytes * opened_tokens / sum(sizes[path] for path, _ in good)), "estimated"


def _read_norm(root: Path, target: TargetIdentity | None, samples: Sequence[LayoutSample]) -> NormReading | None:
    """Both readings of the last states; None unless the target's weights are at hand and fit. Nothing is fetched."""
    if target is None or target.final_norm.kind != "rms_norm":
        return None
    fitting = [sample for sample in samples if sample.last_TD.shape[-1] == target.hidden_size]
    fitting = [sample for sample in fitting if int(sample.input_ids_T.max()) < target.vocab_size]
    params = config.load(root / config.PARAMS_PATH)
    if not fitting or store.damage(params.target, target) is not None:
        return None
    tensors = TensorFiles(store.target_dir(target))
    head_VD = tensors.read("head" if tensors.has("head") else "embedding")
    return read_norm(fitting, final_scale(target.final_norm, tensors.read("final_norm")), head_VD)
