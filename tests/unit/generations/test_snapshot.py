"""What DVC's files name, spelling by spelling: the room's answer is what ``dvc gc`` keeps, or a reason not to run it."""

from __future__ import annotations

import contextlib
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


def kept(repository: StatesRepository, *, may_be_more: bool = False) -> set[bytes]:
    """Which of the three contents are in use, for the room; the real DVC must say the same.

    Where the room may keep more than DVC does, ``eyas gc`` compares both and refuses: nothing is lost by it.
    """
    found = read_situation(repository.root)
    unused = {found.cache.path(name) for name in found.cache.objects if name not in found.kept.names}
    assert found.kept.problems == ()
    removed = repository.gc_would_remove()
    assert unused <= removed if may_be_more else unused == removed
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
        ("outs: ['${where}', b]", {A, B}),
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


@pytest.mark.parametrize("path", ["${dir}/a", "x-${dir}", "${dir}"])
def test_a_templated_output_stands_for_all_that_it_could_be(repository, path):
    write(repository, "params.yaml", "dir: d\n")
    real = path.replace("${dir}", "d")
    write(repository, "dvc.yaml", f"stages:\n  s: {{cmd: x, outs: ['{path}']}}\n")
    outs = f"[{{path: {real}, hash: md5, md5: <A>, size: 5}}, {{path: other, hash: md5, md5: <B>, size: 6}}]"
    write(repository, "dvc.lock", f"schema: '2.0'\nstages:\n  s: {{cmd: x, outs: {outs}}}\n")
    assert kept(repository, may_be_more=path == "${dir}") == ({A, B} if path == "${dir}" else {A})


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
    with contextlib.suppress(StoreError):
        parse_snapshot(files)


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
        with contextlib.suppress(StoreError):
            parse_snapshot({path: yaml.safe_dump(value).encode() for path, value in chosen.items()})


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


def test_a_file_that_git_does_not_know_yet_counts(repository):
    single(repository, "a.dvc", A)
    repository.commit()
    single(repository, "deep/b.dvc", B)
    assert kept(repository) == {A, B}


def test_a_file_that_git_ignores_does_not_count(repository):
    single(repository, "a.dvc", A)
    single(repository, "b.dvc", B)
    (repository.root / ".gitignore").write_text("b.dvc\n")
    assert kept(repository) == {A}


@pytest.mark.parametrize("is_committed", [False, True])
@pytest.mark.parametrize("where", ["ignored but tracked", "dvcignored", "inside an output", "a project of its own"])
def test_what_dvc_passes_over_is_never_less_kept_than_by_dvc(repository, where, is_committed):
    single(repository, "a.dvc", A)
    if where == "ignored but tracked":
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
    assert kept(repository, may_be_more=True) == {A, B}


def test_a_folder_pattern_that_hides_files_from_dvc_alone(repository):
    """For git ``/adopted/*/`` spares ``adopted/x.dvc``; DVC reads it otherwise, and would delete what that names."""
    single(repository, "adopted/a.dvc", A)
    (repository.root / ".gitignore").write_text("/adopted/*/\n")
    assert kept(repository, may_be_more=True) == {A}
    assert repository.object_path(md5(A)) in repository.gc_would_remove()


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
