"""A product of hipBLASLt, launched on streams of the stub, and the handle of each launch."""

from fp8core.kernels.gemm.blaslt.mapping import product
from support.blaslt_tools import FIRST_RUN, problem
from support.targets import MI300

OURS = product(problem(target=MI300))
ONE, TWO, THREE = 0x7000, 0x8000, 0x9000
"""Streams."""


def multiply(launch, stream):
    launch(stream, *range(1000, 3000, 1000), 0, 0, 0, 5000, 0, 0, 9000)


def launches(stub):
    """Return (handle, stream) of each product, except first runs."""
    lines = (
        dict(part.split("=", 1) for part in line.split() if "=" in part) | {"h": line.split()[1]}
        for line in stub.lines("Matmul")
    )
    return [(line["h"], int(line["stream"])) for line in lines if int(line["stream"]) != FIRST_RUN]
