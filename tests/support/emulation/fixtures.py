"""Pytest fixtures of the emulator; test modules import those that they use."""

from collections.abc import Iterator

import pytest

from fp8core.runtime import jit
from support.emulation import COMPILER, Emulator, Schedule
from support.kept import kept_folder


@pytest.fixture(scope="session")
def emulation_session(request: pytest.FixtureRequest) -> Emulator:
    """Return the emulator of the session; pytest's cache keeps its compiled libraries under hashes of their text."""
    if COMPILER is None:
        pytest.skip("the emulation of kernels needs g++, which is not installed")
    return Emulator(kept_folder(request, "emulation"))


@pytest.fixture
def emulator(emulation_session: Emulator, monkeypatch: pytest.MonkeyPatch) -> Iterator[Emulator]:
    """Return the emulator, which replaces `jit.prepare` during the test."""
    monkeypatch.setattr(jit, "prepare", emulation_session.prepare)
    emulation_session.flush_subnormals = None
    emulation_session.schedule = Schedule()
    emulation_session.reads_need_fences = True
    emulation_session.launches.clear()
    return emulation_session
