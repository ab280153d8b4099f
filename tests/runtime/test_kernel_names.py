"""The names of kernels on disk: equal only for kernels that are made from the same, for the same devices."""

from importlib import metadata
from itertools import combinations
from types import SimpleNamespace

import pytest

from fp8core.runtime import compiler, device
from fp8core.target import Target
from support.targets import MI300

H200 = Target("cuda", 90, 0, 132, 32, 232448)
OTHERS = {
    "text": {"text": "other"},
    "options": {"options": ("-O3", "-DA=1")},
    "one option": {"options": ("-O3 -DA=1",)},
    "no options": {"options": ()},
    "architecture": {"target": H200._replace(arch=100)},
    "platform": {"target": H200._replace(platform="hip")},
    "name": {"name": "other"},
    "compiler": {"version": "two"},
}


def name_of(monkeypatch, target=H200, text="text", options=("-O3",), name="fp8core", version="one"):
    monkeypatch.setattr(compiler, "version", lambda: version)
    return compiler.file_name(target, text, options, name)


def test_all_that_a_kernel_depends_on_is_in_its_name(monkeypatch):
    names = {what: name_of(monkeypatch, **other) for what, other in {"nothing": {}, **OTHERS}.items()}
    assert not [pair for pair in combinations(names, 2) if names[pair[0]] == names[pair[1]]]


def test_what_no_kernel_depends_on_is_not(monkeypatch):
    """Another device of the same architecture."""
    alike = H200._replace(device=1, multiprocessors=114, shared_bytes=1)
    assert name_of(monkeypatch, target=alike) == name_of(monkeypatch)


@pytest.mark.parametrize(
    ("cupys", "wheels", "named"),
    [
        (13000, {"": "13.0.1"}, "nvidia-cuda-nvrtc 13.0.1"),
        (12090, {"-cu12": "12.8.93"}, "nvidia-cuda-nvrtc-cu12 12.8.93"),
        (13000, {"": "13.0.1", "-cu12": "12.9.86"}, "nvidia-cuda-nvrtc 13.0.1"),
        (12090, {"": "13.0.1", "-cu12": "12.9.86"}, "nvidia-cuda-nvrtc-cu12 12.9.86"),
        (12090, {"": "13.0.1"}, "cudartc (12, 4)"),
        (13000, {"-cu12": "12.9.86"}, "cudartc (12, 4)"),
        (13000, {}, "cudartc (12, 4)"),
    ],
    ids=str,
)
def test_the_compiler_that_cupy_loads_is_in_the_name_of_a_kernel(monkeypatch, cupys, wheels, named):
    """Not the wheel of another CUDA release, which PyTorch may have installed."""

    def version_of(wheel):
        try:
            return wheels[wheel.removeprefix("nvidia-cuda-nvrtc")]
        except KeyError:
            raise metadata.PackageNotFoundError(wheel) from None

    cuda = SimpleNamespace(
        driver=SimpleNamespace(get_build_version=lambda: cupys), nvrtc=SimpleNamespace(getVersion=lambda: (12, 4))
    )
    monkeypatch.setattr(metadata, "version", version_of)
    monkeypatch.setattr(device, "platform", lambda: "cuda")
    monkeypatch.setattr(device, "cupy", lambda: SimpleNamespace(cuda=cuda))
    assert compiler.version.__wrapped__() == named


def test_options_that_hiprtc_takes_from_the_environment_are_in_the_name_of_a_kernel(monkeypatch):
    """Such as -ffast-math: a kernel that was compiled with it must not serve processes without it."""
    monkeypatch.setattr(compiler, "version", lambda: "one")
    names = {}
    for appended in (None, "", "-ffast-math", "-g"):
        if appended is not None:
            monkeypatch.setenv("HIPRTC_COMPILE_OPTIONS_APPEND", appended)
        names[appended] = [compiler.file_name(target, "text", ("-O3",)) for target in (MI300, H200)]
    on_hip, on_cuda = zip(*names.values(), strict=True)
    assert on_hip[0] == on_hip[1]
    assert len(set(on_hip)) == 3
    assert len(set(on_cuda)) == 1


def test_the_release_of_hip_is_in_the_name_of_a_kernel(monkeypatch):
    """hipRTC does not tell releases apart whose compilers differ."""
    cuda = SimpleNamespace(
        nvrtc=SimpleNamespace(getVersion=lambda: (9, 0)), runtime=SimpleNamespace(runtimeGetVersion=lambda: 70051831)
    )
    monkeypatch.setattr(device, "platform", lambda: "hip")
    monkeypatch.setattr(device, "cupy", lambda: SimpleNamespace(cuda=cuda))
    assert compiler.version.__wrapped__() == "hiprtc (9, 0) of HIP 70051831"
