"""One process for all scripts."""

import pytest
from curing import Scripts


@pytest.fixture(scope="session")
def scripts():
    running = Scripts()
    yield running
    running.end()
