"""Machines of which the vendors' libraries are recording ones, compiled once a run."""

import pytest

from support.blaslt_tools import H200, MI300, Stub, build, forget, pretend


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("blaslt")
    return {platform: Stub(build(folder, platform)) for platform in ("cuda", "hip")}


@pytest.fixture
def stub(built, monkeypatch):
    """Two H200 with cuBLASLt."""
    pretend(monkeypatch, built["cuda"], (H200, H200._replace(device=1)))
    yield built["cuda"]
    forget()


@pytest.fixture
def hip_stub(built, monkeypatch):
    """An MI300 with hipBLASLt."""
    pretend(monkeypatch, built["hip"], (MI300,))
    yield built["hip"]
    forget()
