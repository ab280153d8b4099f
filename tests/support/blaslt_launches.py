"""Launches of a product by a recording library, and the addresses of their operands."""

from fp8core.kernels.gemm.blaslt import matmul
from support.targets import H200, MI300

TARGETS = {"cuda": H200, "hip": MI300}


# The addresses of a launch, in the order of its arguments.
STREAM, A, B, SCALE_A, SCALE_B, BIAS, OUT, OUT_SCALE, AMAX, SCRATCH = range(1000, 11000, 1000)
ARGUMENTS = (STREAM, A, B, SCALE_A, SCALE_B, BIAS, OUT, OUT_SCALE, AMAX, SCRATCH)


def launched(stub, made, *, bias=0, out_scale=0, amax=0, scaled=True, choice=0):
    launch = matmul.plan(made, choice)
    scales = (SCALE_A, SCALE_B) if scaled else (0, 0)
    launch(STREAM, A, B, *scales, bias, OUT, out_scale, amax, SCRATCH)
    return launch, stub.lines("Matmul")[-1]
