"""Fixtures for machines with recording libraries in place of cuBLASLt and hipBLASLt, compiled once per run."""

import pytest

from support.blaslt_tools import Stub, build, forget, pretend
from support.targets import H200, MI300


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("blaslt")
    return {platform: Stub(build(folder, platform)) for platform in ("cuda", "hip")}


@pytest.fixture
def stub(built, monkeypatch):
    """Pretend that there are two H200 with cuBLASLt."""
    pretend(monkeypatch, built["cuda"], (H200, H200._replace(device=1)))
    yield built["cuda"]
    forget()


@pytest.fixture
def hip_stub(built, monkeypatch):
    """Pretend that there is an MI300 with hipBLASLt."""
    pretend(monkeypatch, built["hip"], (MI300,))
    yield built["hip"]
    forget()
