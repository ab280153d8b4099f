"""Arrays on AMD GPUs, without one: capsules of the real layout, and numbers of streams."""

import numpy as np
import pytest

from fp8core import interop
from fp8core.errors import DeviceError
from fp8core.interop import dlpack, dlpack_capsule, dlpack_exchange
from fp8core.target import Target
from support.rocm import cupy, libraries, rocm  # noqa: F401
from support.targets import MI300


class Tensor:
    """A DLPack exporter on a ROCm device that keeps to the protocol's rules for streams."""

    def __init__(self, kind=dlpack.ROCM, versioned=True):
        self.kind, self.versioned, self.streams = kind, versioned, []
        self.array = np.arange(12, dtype=np.float32).reshape(3, 4)

    def __dlpack_device__(self):
        return self.kind, 1

    def __dlpack__(self, *, stream=None, **options):
        if self.kind == dlpack.ROCM and stream in (1, 2):
            raise ValueError(f"stream {stream} is not allowed on ROCm")
        if options and not self.versioned:
            raise TypeError("max_version")
        self.streams.append(stream)
        capsule = self.array.__dlpack__(**options)
        tensor = dlpack.managed(capsule).tensor
        tensor.device_type, tensor.device_id = self.kind, 1
        return capsule


@pytest.mark.parametrize("versioned", [True, False])
def test_a_rocm_tensor_is_seen_on_its_device(rocm, versioned):
    x = Tensor(versioned=versioned)
    seen = interop.view(x, "x")
    assert (seen.pointer, seen.shape, seen.target.platform, seen.target.device) == (
        x.array.ctypes.data,
        (3, 4),
        "hip",
        1,
    )
    assert x.streams == [0], "the default stream is 0 on ROCm"
    assert interop.stream_of(seen, 0x7000) == 0x7000
    assert x.streams == [0, 0x7000]


def test_pinned_memory_of_rocm_is_the_hosts(rocm):
    x = Tensor(dlpack.ROCM_HOST)
    assert interop.view(x, "x").target.platform == "host"
    assert x.streams == [None]


@pytest.mark.parametrize(("kind", "stream"), [(dlpack.ROCM, -1), (dlpack.CUDA, -1), (dlpack.ROCM_HOST, None)])
def test_no_stream_waits_for_the_question_whether_an_array_is_writable(kind, stream):
    """Without a number the producer orders the default stream, which would end a capture of another stream."""
    x = Tensor(kind)
    interop.check_writable(x, "out")
    assert x.streams == [stream]


def test_streams_by_number_are_rocms(rocm):
    assert dlpack_capsule.in_protocol(0, MI300) == 0
    assert dlpack_capsule.in_protocol(1, MI300) == 0
    assert dlpack_capsule.in_protocol(0x7000, MI300) == 0x7000
    seen = interop.view(Tensor(), "x")
    with pytest.raises(DeviceError, match="per-thread default stream"):
        interop.stream_of(seen, 2)
    cuda = Target("cuda", 90, 0, 132, 32, 0)
    assert [dlpack_capsule.in_protocol(number, cuda) for number in (0, 1, 2, 0x7000)] == [1, 1, 2, 0x7000]


def test_results_of_the_exchange_table_are_on_rocm():
    assert dlpack_exchange._kind(MI300) == dlpack.ROCM == 10
    assert dlpack.ROCM_HOST == 11
