"""Fixtures: CuPy that captures streams, and a pretence that streams are captured."""

import pytest

from fp8core.runtime import capture, device


@pytest.fixture
def captures(monkeypatch):
    """Return a dict of the captured streams, stream -> number of its capture, which tests fill."""
    found = {}
    monkeypatch.setattr(device, "capturing", lambda stream: stream in found)
    monkeypatch.setattr(capture, "info", lambda stream: capture.Capture(found[stream], 0) if stream in found else None)
    return found


@pytest.fixture
def cupy():
    """Return CuPy, or skip the test where it does not capture."""
    module = device.cupy()
    if device.platform() == "hip":
        pytest.skip("CuPy does not capture on ROCm")
    return module
