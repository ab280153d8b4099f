"""Every kernel by the front end of hipRTC itself, with the headers that it includes unasked: needs ROCm 7 and no GPU.

No package with it was found on PyPI or in Debian 12, so these tests run where ROCm is installed. `test_compile` compiles
the same requests with clang alone.
"""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from kernels.test_compile import uses
from support import compilers
from support.compilers import CompileError, HipRtc
from support.plans import OPERATIONS
from support.targets import TARGETS

HIP = [target for target in TARGETS if target.platform == "hip"]


@pytest.fixture(scope="module")
def hiprtc():
    found = compilers.hiprtc()
    if found is None:
        pytest.skip("needs libhiprtc.so.7 of ROCm 7 or later")
    return found


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("target", HIP, ids=lambda target: f"gfx{target.arch:x}")
def test_every_kernel_compiles_without_a_word(hiprtc, target, operation):
    assert hiprtc.version >= (7, 0)
    for request in uses(target, operation):
        assert hiprtc.compile(request).startswith(b"\x7fELF"), request.entry


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory):
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    made = tmp_path_factory.mktemp("hiprtc") / "libhiprtc_stub.so"
    source = Path(__file__).parents[1] / "support" / "hiprtc_stub.c"
    subprocess.run([compiler, "-Wall", "-Wno-format-truncation", "-shared", "-fPIC", source, "-o", made], check=True)
    return ctypes.CDLL(str(made))


def test_what_hiprtc_says_is_read(stand_in):
    """The same calls against a stand-in with its ABI."""
    hiprtc = HipRtc(stand_in)
    assert hiprtc.version == (7, 1)
    request = next(iter(uses(HIP[0], next(iter(OPERATIONS)))))
    assert hiprtc.compile(request).decode().split(" ")[1:] == [option[:64] for option in request.options]
    for word, status in (("WARN", 0), ("ERROR", 6)):
        with pytest.raises(CompileError, match=rf"hipRTC, \w+ .*status {status}\n\w+: of something"):
            hiprtc.compile(request._replace(text=word))
    assert stand_in.stub_alive() == 0
