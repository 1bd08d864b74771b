"""What DVC's files name, spelling by spelling: the room's answer is what ``dvc gc`` keeps, or a reason not to run it."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.errors import StoreError
from eyas.generations.listing import read_situation
from eyas.generations.snapshot import parse_snapshot
from states_repository import StatesRepository, md5

A, B, C = b"first", b"second", b"third"


@pytest.fixture
def repository(tmp_path) -> StatesRepository:
    made = StatesRepository(tmp_path / "r")
    for data in (A, B, C):
        made.put(data)
    return made


def write(repository: StatesRepository, path: str, text: str) -> None:
    (repository.root / path).parent.mkdir(parents=True, exist_ok=True)
    named = textwrap.dedent(text).replace("<A>", md5(A)).replace("<B>", md5(B)).replace("<C>", md5(C))
    (repository.root / path).write_text(named)


def kept(repository: StatesRepository, *, may_refuse: bool = False) -> set[bytes]:
    """Which of the three contents are in use, for the room; the real DVC must say the same."""
    found = read_situation(repository.root)
    unused = {found.cache.path(name) for name in found.cache.objects if name not in found.kept.names}
    if may_refuse and found.kept.problems:
        return set()
    assert found.kept.problems == ()
    assert unused == repository.gc_would_remove()
    return {data for data in (A, B, C) if md5(data) in found.kept.names}


LOCK = """
    schema: '2.0'
    stages:
      s:
        cmd: x
        outs:
        - {path: a, hash: md5, md5: <A>, size: 5}
        - {path: b, hash: md5, md5: <B>, size: 6}
"""


@pytest.mark.parametrize(
    ("outs", "expected"),
    [
        ("outs: [a, b]", {A, B}),
        ("outs: [a]", {A}),
        ("outs: [{a: {cache: false}}, b]", {B}),
        ("metrics: [a]\n        plots: [{b: {x: i, cache: false}}]", {A}),
        ("metrics: [{a: {cache: false}}]\n        plots: [b]", {B}),
        ("outs: [{a: {persist: true, desc: d, remote: r}}]", {A}),
        ("outs: ['${where}']", {A}),
        ("outs: [{'${where}': {cache: false}}, b]", {B}),
        ("outs: ['${nested.name}']", {B}),
        ('outs: [a, "b"]  # a remark', {A, B}),
    ],
)
def test_outputs_as_they_are_spelt(repository, outs, expected):
    write(repository, "params.yaml", "where: a\nnested: {name: b}\n")
    write(repository, "dvc.yaml", f"stages:\n      s:\n        cmd: x\n        {outs}\n".replace("\n      ", "\n  "))
    write(repository, "dvc.lock", LOCK)
    write(
        repository,
        ".dvc/config",
        (repository.root / ".dvc/config").read_text() + "['remote \"r\"']\n    url = /tmp/none\n",
    )
    assert kept(repository) == expected


@pytest.mark.parametrize(
    "name", ["no", "on", "Yes", "OFF", "12:30", "~x", "1e3x", "a b", "ä", "#x", "null1", "0o17", "y"]
)
def test_names_that_older_yaml_takes_for_something_else(repository, name):
    from dvc.utils.serialize import dumps_yaml

    lock = {"path": name, "hash": "md5", "md5": md5(A), "size": 5}
    write(repository, "dvc.yaml", dumps_yaml({"stages": {"s": {"cmd": "x", "outs": [name]}}}))
    write(repository, "dvc.lock", dumps_yaml({"schema": "2.0", "stages": {"s": {"cmd": "x", "outs": [lock]}}}))
    assert kept(repository) == {A}


@given(st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"], exclude_characters="/\\{}$"), min_size=1))
def test_any_name_survives_dvcs_own_yaml(name):
    from dvc.utils.serialize import dumps_yaml

    lock = {"path": name, "hash": "md5", "md5": md5(A), "size": 5}
    files = {
        "dvc.yaml": dumps_yaml({"stages": {"s": {"cmd": "x", "outs": [name]}}}).encode(),
        "dvc.lock": dumps_yaml({"schema": "2.0", "stages": {"s": {"cmd": "x", "outs": [lock]}}}).encode(),
    }
    (stage,) = parse_snapshot(files)
    assert [out.name for out in stage.outs] == [md5(A)]


@given(st.binary(max_size=200), st.sampled_from(["dvc.yaml", "dvc.lock", "x.dvc"]))
def test_no_bytes_end_in_anything_but_a_store_error(data, path):
    files = {"dvc.yaml": b"stages:\n  s:\n    cmd: x\n    outs: [a]\n", path: data}
    try:
        parse_snapshot(files)
    except StoreError as error:
        assert path in error.message or "dvc.lock" in error.message


_SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
_TREES = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["stages", "s", "outs", "deps", "params", "path", "md5", "foreach", "do", "matrix",
                                       "wdir", "cache", "metrics", "plots", "meta", "repo", "size", "nfiles"]), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@given(_TREES, _TREES, _TREES)
def test_no_structure_ends_in_anything_but_a_store_error(spec, lock, single):
    import yaml

    files = {"dvc.yaml": {"stages": {"s": spec}}, "dvc.lock": {"stages": {"s": lock}}, "x.dvc": {"outs": single}}
    for chosen in (files, {"dvc.yaml": spec, "dvc.lock": lock, "x.dvc": single}):
        try:
            parse_snapshot({path: yaml.safe_dump(value).encode() for path, value in chosen.items()})
        except StoreError as error:
            assert any(path in error.message for path in files)


def test_items_of_foreach_and_matrix(repository):
    write(repository, "dvc.yaml", """
        stages:
          each: {foreach: [1, true, 2.5], do: {cmd: x, outs: ["e-${item}"]}}
          grid: {matrix: {m: [u, v], n: [1]}, cmd: x, outs: ["g-${item.m}-${item.n}"]}
          maps: {foreach: [{k: 1}], do: {cmd: x, outs: ["m-${item.k}"]}}
    """)  # fmt: skip
    write(repository, "dvc.lock", """
        schema: '2.0'
        stages:
          each@true: {cmd: x, outs: [{path: e-true, hash: md5, md5: <A>, size: 5}]}
          each@3: {cmd: x, outs: [{path: e-3, hash: md5, md5: <B>, size: 6}]}
          grid@v-1: {cmd: x, outs: [{path: g-v-1, hash: md5, md5: <B>, size: 6}]}
          grid@w-1: {cmd: x, outs: [{path: g-w-1, hash: md5, md5: <C>, size: 5}]}
          maps@0: {cmd: x, outs: [{path: m-1, hash: md5, md5: <A>, size: 5}]}
    """)  # fmt: skip
    assert kept(repository) == {A, B}


def test_a_stage_of_a_folder_with_its_own_working_directory(repository):
    write(repository, "in/dvc.yaml", "stages:\n  s: {cmd: x, wdir: ../elsewhere, outs: [a, b]}\n")
    write(repository, "in/dvc.lock", LOCK)
    assert kept(repository) == {A, B}
    (workspace,) = [r for r in read_situation(repository.root).revisions if r.kind == "workspace"]
    assert [out.path for out in workspace.stages[0].outs] == ["elsewhere/a", "elsewhere/b"]


def test_a_lock_without_its_pipeline_names_nothing(repository):
    write(repository, "dvc.lock", LOCK)
    write(repository, "c.dvc", "outs: [{path: c, hash: md5, md5: <C>, size: 5}]\n")
    assert kept(repository) == {C}


# ── files that DVC does not look at ───────────────────────────────────────────────────────────


def single(repository: StatesRepository, path: str, data: bytes) -> None:
    out = f"{Path(path).stem}-out"
    write(repository, path, f"outs: [{{path: {out}, hash: md5, md5: {md5(data)}, size: {len(data)}}}]\n")


@pytest.mark.parametrize("is_committed", [False, True])
@pytest.mark.parametrize(
    "where", ["untracked", "gitignored", "ignored-but-tracked", "dvcignored", "inside an output", "nested"]
)
def test_files_that_dvc_does_not_look_at(repository, where, is_committed):
    single(repository, "a.dvc", A)
    if where == "untracked":
        repository.commit()
        single(repository, "b.dvc", B)
    elif where == "gitignored":
        single(repository, "b.dvc", B)
        (repository.root / ".gitignore").write_text("b.dvc\n")
    elif where == "ignored-but-tracked":
        single(repository, "b.dvc", B)
        (repository.root / ".gitignore").write_text("b.dvc\n")
        repository.git("add", "-f", "b.dvc")
    elif where == "dvcignored":
        single(repository, "old/b.dvc", B)
        (repository.root / ".dvcignore").write_text("old/\n")
    elif where == "inside an output":
        single(repository, "a-out/b.dvc", B)
    else:
        single(repository, "other/b.dvc", B)
        (repository.root / "other/.dvc").mkdir()
        (repository.root / "other/.dvc/config").write_text("")
    if is_committed:
        repository.commit()
    assert A in kept(repository, may_refuse=True) or where in ("dvcignored", "inside an output", "nested")


def test_an_output_that_its_remote_versions(repository):
    """``files:`` in place of a hash: DVC keeps those files' objects."""
    write(repository, "x.dvc", """
        outs:
        - path: x
          remote: r
          files:
          - {relpath: a, md5: <A>, size: 5, cloud: {r: {version_id: v}}}
    """)  # fmt: skip
    write(
        repository,
        ".dvc/config",
        (repository.root / ".dvc/config").read_text() + "['remote \"r\"']\n    url = /tmp/none\n",
    )
    found = read_situation(repository.root)
    is_kept = repository.object_path(md5(A)) not in repository.gc_would_remove()
    assert (md5(A) in found.kept.names) == is_kept or found.kept.problems


def test_dvc_add_of_files_and_folders(repository):
    from dvc.repo import Repo

    (repository.root / "folder/deep").mkdir(parents=True)
    (repository.root / "folder/deep/one").write_bytes(b"1")
    (repository.root / "alone").write_bytes(b"2")
    with Repo(os.fspath(repository.root)) as repo:
        repo.add([os.fspath(repository.root / "folder"), os.fspath(repository.root / "alone")])
    found = read_situation(repository.root)
    assert {md5(b"1"), md5(b"2")} < found.kept.names
    assert len(found.kept.names) == 3, "and the folder's list"
    assert kept(repository) == set()
