"""DVC's settings as DVC itself reads them; a damaged file is named and never quoted."""

import pytest
from dvc.config import Config

from eyas.config import dvc
from eyas.errors import ConfigError

ODD = {
    "keys in capitals": "[CACHE]\nDIR = /x\n",
    "comments": "# a\n[cache]\n# b\ndir = /x # c\n",
    "a quoted hash": '[cache]\ndir = "/x #1"\n',
    "a semicolon": "[cache]\ndir = /x ; y\n",
}


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("DVC_GLOBAL_CONFIG_DIR", str(tmp_path / "none"))
    (tmp_path / ".dvc").mkdir()
    return tmp_path


@pytest.mark.parametrize("text", ODD.values(), ids=ODD)
def test_odd_settings_are_read_as_dvc_reads_them(root, text):
    (root / ".dvc/config").write_text(text)
    theirs = Config(str(root / ".dvc"), validate=False).load_one("repo")["cache"]
    assert dvc.settings(root, "cache") == {key: str(value) for key, value in theirs.items()}


@pytest.mark.parametrize(
    "data",
    [
        b"s3cret\n",
        b"[cache\nkey = s3cret\n",
        b"[cache]\ns3cret\n",
        b"\xef\xbb\xbf[cache]\nkey = s3cret\n",
        b"\xff\xfes3cret",
    ],
)
def test_a_file_that_holds_no_settings_is_named(root, data):
    (root / ".dvc/config.local").write_bytes(data)
    with pytest.raises(ConfigError, match=r"config\.local.*: no settings of DVC's") as caught:
        dvc.settings(root, "cache")
    assert "s3cret" not in str(caught.value)


def test_a_file_that_this_user_may_not_read_is_named(root):
    """As DVC, which ends there too; a folder in the file's place stands for it, for root may read any file."""
    (root / ".dvc/config").mkdir()
    with pytest.raises(ConfigError, match=r"/\.dvc/config: settings of DVC's that cannot be read: Is a directory"):
        dvc.settings(root, "cache")
