"""The row "sm89_decode" on a device against float64: Hopper runs the instruction as others of its own."""

import pytest

from fp8core.dtypes import ITEMSIZE
from fp8core.kernels.gemm.mma.decode import plan_decode
from fp8core.runtime import device
from support.sm90_products import MODES, Case

pytestmark = pytest.mark.gpu


class OnDevice(Case):
    """A product with fresh operands whose kernel is this one, whatever the table would take."""

    def run(self, stream=None, plan=None):
        """Return the result's storage, poisoned before."""
        assert plan is None
        cp = self.cp
        storage = cp.full((self.m, self.ldo * ITEMSIZE[self.out_name]), 0xFF, cp.uint8)
        at = cp.cuda.get_current_stream() if stream is None else stream
        places = (self.a.data.ptr, self.b.data.ptr, *(scale.data.ptr for scale in self.scales))
        bias = self.bias.data.ptr if self.bias is not None else 0
        plan_decode(self.problem)(at.ptr, *places, bias, storage.data.ptr, 0, 0, 0)
        return storage


@pytest.fixture(autouse=True)
def able():
    """Skip where the device's compiler has no FP8 mma.sync."""
    target = device.target(device.current())
    if target.platform != "cuda" or target.arch < 89:
        pytest.skip(f"FP8 mma.sync needs sm_89 or later, got {target}")


@pytest.mark.parametrize("modes", MODES, ids="-".join)
@pytest.mark.parametrize("m", [1, 2, 7, 8, 9, 16, 17, 31, 33, 64])
def test_rows_and_modes(m, modes):
    OnDevice(m, 1000 + 8 * m, 1024 + 16 * m, modes, gap=16 * (m % 3), seed=m).check()


@pytest.mark.parametrize("n", [1, 7, 17, 63, 129, 8193, 40000])
@pytest.mark.parametrize("k", [16, 128, 144, 1008, 3072])
def test_ragged_shapes(n, k):
    for m, out, modes in ((5, "float32", ("row", "row")), (40, "bfloat16", ("group", "block"))):
        OnDevice(m, n, k, modes, out=out, seed=n + k).check()


@pytest.mark.parametrize("out", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("bias", ["", "bfloat16", "float16", "float32"])
@pytest.mark.parametrize(("a", "b"), [("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e4m3", "e5m2")])
def test_any_dtype_of_operands_bias_and_result(out, bias, a, b):
    modes = ("group", "block") if bias == "float32" else ("row", "row")
    size = 1e-3 if out == "float16" else 1.0
    OnDevice(17, 520, 640, modes, a=a, b=b, out=out, bias=bias, size=size, seed=3).check()


@pytest.mark.parametrize("span", [1e-23, 1e23])
@pytest.mark.parametrize("modes", [("row", "row"), ("group", "block")], ids="-".join)
def test_extreme_scales(span, modes):
    OnDevice(6, 640, 1024, modes, span=span, seed=5).check()


@pytest.mark.parametrize("modes", [("row", "row"), ("group", "block")], ids="-".join)
@pytest.mark.parametrize(("n", "k"), [(2112, 7168), (28672, 1024)])
def test_a_row_has_its_bits_whatever_the_batch(n, k, modes):
    case = OnDevice(200, n, k, modes, invariant=True, seed=2)
    full = case.run()
    case.check()
    for m in (1, 8, 9, 16, 31, 64, 65):
        case.problem, case.m = case.problem._replace(m=m), m
        assert bool((case.run() == full[:m]).all()), m


@pytest.mark.parametrize(("m", "n", "k"), [(1, 4096, 4096), (64, 28672, 1024)])
def test_equal_bits_on_every_run(m, n, k):
    case = OnDevice(m, n, k, seed=7)
    first = case.run()
    assert all(bool((case.run() == first).all()) for _ in range(200))
