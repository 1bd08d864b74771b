"""What a run's record says of the machine and of the environment."""

from eyas import config


def test_variables_by_which_engines_run_otherwise_are_kept_and_no_secret(monkeypatch):
    kept = {"NCCL_P2P_LEVEL": "SYS", "SGLANG_USE_CPU_ENGINE": "1", "CUDA_VISIBLE_DEVICES": "1", "EYAS_SGLANG_ARGS": "x"}
    address = {"EYAS_SGLANG_URL": "http://me:s3cret@gpu.example:30000"}
    secret = {"EYAS_SGLANG_API_KEY": "k", "HF_TOKEN": "t", "VLLM_API_KEY": "k", "NCCL_SECRET": "s"}
    for name, value in (kept | secret | address | {"HOME": "/root"}).items():
        monkeypatch.setenv(name, value)
    found = config.settings()
    assert found.items() >= kept.items()
    assert found["EYAS_SGLANG_URL"] == "http://gpu.example:30000"
    assert not found.keys() & (secret.keys() | {"HOME"})
    assert list(found) == sorted(found)
