"""DVC's settings as DVC itself reads them; a damaged file is named and never quoted."""

import pytest
from dvc.config import Config
from dvc.config import ConfigError as DvcConfigError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eyas.config import dvc
from eyas.errors import ConfigError

ODD = {
    "keys in capitals": "[CACHE]\nDIR = /x\n",
    "comments": "# a\n[cache]\n# b\ndir = /x # c\n",
    "a quoted hash": '[cache]\ndir = "/x #1"\n',
    "a semicolon": "[cache]\ndir = /x ; y\n",
    "several lines": '[cache]\ndir = """/x"""\n',
    "a list": "[cache]\ntype = reflink, hardlink\n",
    "an indented key": "[cache]\n  dir = /x\n    shared = group\n",
    "spaces in the title": "[ cache ] # c\ndir = /x\n",
    "other line ends": "[cache]\r\ndir = /x\r\n",
}

TITLES = [
    "[cache]",
    "[ CACHE ]",
    "['cache'] # c",
    "[[cache]]",
    """['remote "a"']""",
    '[remote "A b"]',
    """['remote "x#y"']""",
    "[x",
]
KEYS = ["dir", "URL", "a b", '"url"', "# key", "\tkey", "é", ""]
PARTS = ["/x", "a,b", " ", "#c", '"', "'", '"""', "'''", "=", ":", ";", "%(url)s", "$HOME", "\\", "[x]", "\n", "\n  "]
values = st.lists(st.sampled_from(PARTS), max_size=4).map("".join)
quoted = st.builds("{0}{1}{0}".format, st.sampled_from(['"', "'", '"""', "'''"]), values)
lines = st.one_of(
    st.builds("{}{}{}".format, st.sampled_from(KEYS), st.sampled_from(["=", " = ", ": "]), st.one_of(values, quoted)),
    st.sampled_from([*TITLES, "", "# c", "; c", "key"]),
)
texts = st.builds(
    lambda first, title, end, rest: first + end.join([title, *rest]),
    st.sampled_from(["", "", "", "\ufeff"]),
    st.sampled_from(TITLES),
    st.sampled_from(["\n", "\r\n", "\r"]),
    st.lists(lines, max_size=5),
)
"""Files of settings, of which about half are damaged."""


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("DVC_GLOBAL_CONFIG_DIR", str(tmp_path / "none"))
    (tmp_path / ".dvc").mkdir()
    return tmp_path


@pytest.mark.parametrize("text", ODD.values(), ids=ODD)
def test_odd_settings_are_read_as_dvc_reads_them(root, text):
    (root / ".dvc/config").write_text(text)
    theirs = Config(str(root / ".dvc"), validate=False).load_one("repo")["cache"]
    assert dvc.settings(root, "cache") == {key: as_text(value) for key, value in theirs.items()}


@settings(
    max_examples=300, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(texts)
def test_any_file_is_read_as_dvc_reads_it_or_refused_as_dvc_refuses_it(root, text):
    path = root / ".dvc/config"
    path.write_bytes(text.encode())
    try:
        found = Config.load_file(str(path))
    except (DvcConfigError, SyntaxError):  # configobj's own, where a value names another one, is not caught by DVC
        with pytest.raises(ConfigError, match="no settings of DVC's"):
            list(dvc.sections(path))
        return
    theirs = {f'remote "{name}"': values for name, values in found.pop("remote", {}).items()} | found
    flat = {
        title: values for title, values in theirs.items() if isinstance(values, dict) and title not in ("machine", "db")
    }
    assert dict(dvc.sections(path)) == {
        title: {key: as_text(value) for key, value in values.items() if not isinstance(value, dict)}
        for title, values in flat.items()
    }


def as_text(value: str | list[str]) -> str:
    return ",".join(value) if isinstance(value, list) else value


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
