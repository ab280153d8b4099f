"""The first run of a hipBLASLt product, when it is planned: the library loads the code of a kernel at its first launch.

Within a capture that could end the capture. And what a library offers it may refuse to run, which is known then.
"""

from typing import Any, Final

from fp8core.kernels.encodings import SCRATCH_ALIGNMENT, round_up, scratch_part
from fp8core.kernels.gemm.args import Matmul
from fp8core.kernels.gemm.blaslt.descriptors import Product
from fp8core.problem import BLOCK, ITEMSIZE
from fp8core.runtime import capture, device

MOST_BYTES: Final = 4 << 30
"""A product of larger operands is not run beforehand: its code is loaded by its first launch."""


def sizes(product: Product, scratch_bytes: int) -> tuple[int, int, int]:
    """Return the bytes of one area that stands for all inputs, of the result and of the scratch."""
    blocks = -(-product.k // BLOCK)
    scales = 4 * max(product.m, product.n) * max(blocks, 1)
    inputs = max(product.n * product.ldb, product.m * product.lda, scales)
    return inputs, product.m * product.ldo * ITEMSIZE[product.out], scratch_bytes


def run(product: Product, launch: Matmul, known: dict[int, int], handle: int, under_way: list[Any]) -> None:
    """Run a product once, on memory and a stream of its own, and wait for it.

    Args:
        product: what is multiplied, of any values.
        launch: the call; it looks up the handle of its stream in ``known``.
        known: takes ``handle`` for that stream meanwhile.
        handle: of the device, which one thread uses at a time.
        under_way: the streams of first runs by this handle that the thread is amid: a collection of garbage within one
            may end in another product. They are waited for, as two streams must not run by a handle at a time.

    Raises:
        BackendError: the library does not run what it offered.
    """
    inputs, result, scratch = map(scratch_part, sizes(product, launch.scratch_bytes))
    if inputs + result + scratch > MOST_BYTES:
        return
    cuda = device.cupy().cuda
    with device.on(product.target.device), capture.relaxed():
        pool, stream = cuda.MemoryPool(), cuda.Stream(non_blocking=True)
        try:
            memory = pool.malloc(inputs + result + scratch + SCRATCH_ALIGNMENT)
        except cuda.memory.OutOfMemoryError:  # the caller has what the product needs, and nothing for a first run
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
