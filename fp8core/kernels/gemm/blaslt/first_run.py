"""The first run of a hipBLASLt product, when it is planned: the library loads a kernel's code at its first launch.

Within a capture, loading code could invalidate the capture. The library may also refuse to run an algorithm that it has
offered, which the first run reveals.
"""

from typing import Any, Final

from fp8core.dtypes import ITEMSIZE
from fp8core.kernels.encodings import ceil_div, round_up, scratch_part
from fp8core.kernels.gemm.args import Matmul
from fp8core.kernels.gemm.blaslt.descriptors import Product
from fp8core.problem import BLOCK
from fp8core.runtime import capture, device
from fp8core.runtime.limits import SCRATCH_ALIGNMENT

MOST_BYTES: Final = 4 << 30
"""A product of more bytes is not run beforehand: its first launch loads its code."""


def sizes(product: Product, scratch_bytes: int) -> tuple[int, int, int]:
    """Return the bytes of one area that serves as every input, of the result, and of the scratch."""
    blocks = ceil_div(product.k, BLOCK)
    scales = 4 * max(product.m, product.n) * max(blocks, 1)
    inputs = max(product.n * product.ldb, product.m * product.lda, scales)
    return inputs, product.m * product.ldo * ITEMSIZE[product.out], scratch_bytes


def run(product: Product, launch: Matmul, known: dict[int, int], handle: int, under_way: list[Any]) -> None:
    """Run a product once, on memory and a stream of its own, and wait for it.

    Args:
        product: the product to run, on any values.
        launch: the call; it looks up the handle of its stream in ``known``.
        known: maps that stream to ``handle`` during the run.
        handle: the handle of the device, which one thread uses at a time.
        under_way: the streams of first runs with this handle that the same thread has begun: a garbage collection
            within one may plan another product. The run waits for them, as two streams must not use a handle at once.

    Raises:
        BackendError: the library does not run the algorithm that it has offered.
    """
    inputs, result, scratch = map(scratch_part, sizes(product, launch.scratch_bytes))
    if inputs + result + scratch > MOST_BYTES:
        return
    cuda = device.cupy().cuda
    with device.on(product.target.device), capture.relaxed():
        pool, stream = cuda.MemoryPool(), cuda.Stream(non_blocking=True)
        try:
            memory = pool.malloc(inputs + result + scratch + SCRATCH_ALIGNMENT)
        except cuda.memory.OutOfMemoryError:  # the product itself can still run, in the caller's memory
            return
        at = round_up(int(memory.ptr), SCRATCH_ALIGNMENT)
        optional = (product.bias, product.out_scale, product.amax)
        bias, out_scale, amax = (at if given else 0 for given in optional)
        scales = (0, 0) if product.scales == "unit" else (at, at)
        known[stream.ptr] = handle
        for earlier in under_way:
            earlier.synchronize()
        under_way.append(stream)
        try:
            launch(stream.ptr, at, at, *scales, bias, at + inputs, out_scale, amax, at + inputs + result)
        finally:
            stream.synchronize()
            under_way.remove(stream)
            del known[stream.ptr], memory
            pool.free_all_blocks()
