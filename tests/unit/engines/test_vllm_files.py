"""The files through which vLLM's states come, and the final norm that its engine applies."""

import array
import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from eyas.contracts import FinalNorm
from eyas.engines.vllm import files
from eyas.engines.vllm.final_norm import apply_final_norm


@given(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=9), st.binary(min_size=1, max_size=1), st.data())
def test_a_file_is_read_back_or_refused(tmp_path_factory, ids, value, data):
    """Case 29: whatever byte is changed, and wherever it is cut."""
    path = tmp_path_factory.mktemp("f") / "r1.safetensors"
    states = array.array("f", range(len(ids) * 6))
    files.write(
        path, "F32", (len(ids), 2, 3), memoryview(states).cast("B"), memoryview(array.array("i", ids)).cast("B")
    )
    assert load_file(path)["token_ids"].tolist() == ids
    found = files.read(path)
    assert (found.num_rows, found.num_streams, found.width) == (len(ids), 2, 3)
    assert bytes(found.states) == states.tobytes()
    assert bytes(found.ids) == array.array("i", ids).tobytes()
    whole = path.read_bytes()
    body = 8 + int.from_bytes(whole[:8], "little")
    at = data.draw(st.integers(body, len(whole) - 1))
    path.write_bytes(whole[:at])
    with pytest.raises(files.FileError):
        files.read(path)
    path.write_bytes(whole[:at] + value + whole[at + 1 :])
    if value != whole[at : at + 1]:
        with pytest.raises(files.FileError):
            files.read(path)
    path.with_name("r2.safetensors").write_bytes(whole)
    with pytest.raises(files.FileError, match="of request r1"):
        files.read(path.with_name("r2.safetensors"))


@pytest.mark.parametrize("key", [b'"request"', b'"crc32"', b'"shape"', b'"__metadata__"'])
def test_a_header_that_lacks_a_fact_is_a_damaged_file(tmp_path, key):
    path = files.path_of(tmp_path, "r1")
    states, ids = torch.ones(3, 2, 4, dtype=torch.bfloat16), torch.arange(3, dtype=torch.int32)
    views = [memoryview(t.view(torch.uint8).numpy().reshape(-1)) for t in (states, ids)]
    files.write(path, "BF16", (3, 2, 4), *views)
    path.write_bytes(path.read_bytes().replace(key, b'"' + b"x" * (len(key) - 2) + b'"'))
    with pytest.raises(files.FileError, match="damaged header"):
        files.read(path)


def test_a_full_disk_leaves_no_half_file(tmp_path, monkeypatch):
    path = tmp_path / "r.safetensors"
    real, written = os.write, []

    def write(fd, data):
        written.append(1)
        if len(written) > 1:
            raise OSError(28, "No space left on device")
        return real(fd, data)

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(OSError, match="No space"):
        files.write(path, "F32", (1, 1, 1), memoryview(b"abcd"), memoryview(b"abcd"))
    assert not list(tmp_path.iterdir())
    files.write_failure(path, "full")
    assert files.failure(path) == "full"
    files.remove(path)
    assert files.failure(path) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("module", "offset"), [(LlamaRMSNorm, 0.0), (GemmaRMSNorm, 1.0)])
def test_the_final_norm_is_the_targets_own_to_the_bit(module, offset, dtype):
    """Case 41."""
    norm = module(64, eps=1e-5).to(dtype)
    torch.manual_seed(0)
    with torch.no_grad():
        norm.weight.add_(torch.randn(64))
        last_TD = (torch.randn(50, 64) * torch.logspace(-2, 3, 64)).to(dtype)
        facts = FinalNorm(kind="rms_norm", eps=1e-5, weight_offset=offset, num_zero_scales=0)
        assert torch.equal(apply_final_norm(last_TD, norm.weight, facts), norm(last_TD))
