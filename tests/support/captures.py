"""Streams that are captured, in the place of the driver's."""

import pytest

from fp8core.runtime import capture, device


@pytest.fixture
def captures(monkeypatch):
    """Streams that are captured, by their number."""
    found = {}
    monkeypatch.setattr(device, "capturing", lambda stream: stream in found)
    monkeypatch.setattr(capture, "info", lambda stream: capture.Capture(found[stream], 0) if stream in found else None)
    return found
