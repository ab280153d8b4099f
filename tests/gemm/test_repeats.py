"""Products that run again and again, over shared memory that is filled before: the same bits each time."""

from contextlib import nullcontext
from itertools import cycle
from types import SimpleNamespace

import pytest

from bench import repeats
from bench.odd_cases import MODES, Product
from fp8core.kernels.gemm.table import SCALED_MM
from fp8core.runtime import device
from support.targets import on

EXTENTS = [(1, 4400, 11360), (12, 2100, 11361), (40, 4400, 11360), (120, 2100, 11361), (300, 1100, 11360)]


def test_our_own_kernels_run_that_take_a_product():
    found = list(repeats.kernels(Product(5, 4400, 11360, "group", "group", address=1).problem(on(90))))
    assert found[0] == "sm90_decode_unaligned"
    assert "generic_mma" in found
    assert not any(name.startswith("cublaslt") for name in found)


def test_results_are_counted_and_compared_with_the_most_frequent_one(monkeypatch):
    stream, filled = object(), []
    runtime = SimpleNamespace(deviceSynchronize=lambda: None)
    cuda = SimpleNamespace(Stream=lambda non_blocking: stream, runtime=runtime)
    plan = SimpleNamespace(scratch_bytes=0)
    row = SimpleNamespace(plan=lambda p: plan)
    came = cycle([b"\1\0\2\0", b"\1\0\3\0", b"\1\0\2\0", b"\7\0\3\0", b"\1\0\2\0"])
    monkeypatch.setattr(repeats.device, "cupy", lambda: SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(repeats.device, "on", nullcontext)
    monkeypatch.setattr(repeats.timing, "Operands", lambda p, scratch_bytes: None)
    monkeypatch.setattr(SCALED_MM, "kernel", lambda name: row)
    monkeypatch.setattr(repeats, "fill", lambda on, word: filled.append((on, word)))
    monkeypatch.setattr(repeats, "_result", lambda *_: next(came))
    found = repeats.repeats(Product(1, 2, 3, "row", "row").problem(on(90)), "any", 10)
    assert found == ([6, 2, 2], [1, 2])
    assert filled == [(stream, word) for word in (*repeats.WORDS * 3, repeats.WORDS[0])]


def test_a_shape_that_is_none_is_refused(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["repeats", "--shapes", "1x2x3", "4x5"])
    with pytest.raises(SystemExit):
        repeats.main()
    assert "a shape is MxNxK, got 4x5" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("address", [16, 1])
@pytest.mark.parametrize("scales", [*dict.fromkeys(MODES)], ids="-".join)
@pytest.mark.parametrize("extents", EXTENTS)
def test_a_product_has_its_bits_over_any_shared_memory(extents, scales, address):
    p = Product(*extents, *scales, out="float32", address=address).problem(device.target(0))
    names = list(repeats.kernels(p))
    assert names
    for name in names:
        assert repeats.repeats(p, name, 60).counts == [60], name
