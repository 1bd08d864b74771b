"""An extraction to try things on, and the hashes of one that nothing happened to."""

import pytest
from extract_cases import Case
from ray_threads import ThreadCluster

from eyas.engines.ray import driver


@pytest.fixture
def case(tmp_path):
    return Case(tmp_path / "run")


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """Hashes of the run that nothing happened to."""
    whole = Case(tmp_path_factory.mktemp("unbroken"))
    whole.extract()
    return whole.hashes()


@pytest.fixture
def on_threads(monkeypatch):
    """Clusters of threads; gives those that were made."""
    made: list[ThreadCluster] = []

    class Noted(ThreadCluster):
        def __init__(self):
            super().__init__()
            made.append(self)

    monkeypatch.setattr(driver, "Cluster", Noted)
    Noted.made = made
    return Noted
