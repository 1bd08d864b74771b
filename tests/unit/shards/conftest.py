"""An extraction to try things on, and the hashes of one that nothing happened to."""

import pytest
from extract_cases import Case


@pytest.fixture
def case(tmp_path):
    return Case(tmp_path / "run")


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """Hashes of the run that nothing happened to."""
    whole = Case(tmp_path_factory.mktemp("unbroken"))
    whole.extract()
    return whole.hashes()
