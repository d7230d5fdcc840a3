"""What these jobs sleep passes on the clock that their lanes are read from, and takes no time."""

import integration_jobs
import pytest


@pytest.fixture(autouse=True)
def _clock(fake_clock, monkeypatch, request):
    for module in (integration_jobs, request.module):
        monkeypatch.setattr(module, "time", fake_clock)
