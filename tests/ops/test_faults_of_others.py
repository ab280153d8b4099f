"""Cases that went wrong elsewhere (spec, section 7) and have no better place, each by its name.

The others are where their operation is tested: sliced inputs, shapes of scales, bias, padding rows, odd shapes and
special values in test_quantize.py, test_quantize_values.py, test_product.py and test_product_shapes.py; shards, marks and
reloads in test_weights.py.
"""

import threading

import ml_dtypes
import numpy as np
import pytest

import fp8core
from fp8core import BLOCK_128, GROUP_128, PER_TENSOR, PER_TOKEN
from support import reference
from support.engines import BOTH, assert_same_bytes, engines, fresh, fresh_fp8, fresh_scale


@engines(*BOTH)
def test_m_1_with_a_per_token_scale_and_channels_is_not_taken_for_per_tensor(engine):
    a, weight = fresh_fp8((1, 256)), fresh_fp8((48, 256))
    token, channels = fresh_scale((1, 1)), fresh_scale((1, 48))
    exact = reference.scaled_mm(a.astype(np.float32), weight.astype(np.float32).T, token, channels)
    for shape in ((1, 1), (1,)):
        got = fp8core.scaled_mm(
            engine.array(a), engine.array(weight).T, engine.array(token.reshape(shape)), engine.array(channels)
        )
        assert reference.relative_error(engine.numpy(got), exact) <= 3e-3


@engines(*BOTH)
def test_the_fnuz_maximum_is_224_not_240(engine):
    x = np.array([[-240.0, 224.0, 1000.0, 232.0]], np.float32)
    q = fp8core.quantize(
        engine.array(x), dtype="float8_e4m3fnuz", group_shape=PER_TENSOR, scale=engine.array(np.ones(1, np.float32))
    )
    back = reference.decode(engine.codes(q.data), "float8_e4m3fnuz")
    np.testing.assert_array_equal(back, [[-224.0, 224.0, 224.0, 224.0]])
    dynamic = fp8core.quantize(engine.array(x), dtype="float8_e4m3fnuz", group_shape=PER_TENSOR)
    assert engine.numpy(dynamic.scale)[0] == np.float32(1000) / np.float32(224)


@engines(*BOTH)
def test_fnuz_conversion_of_a_weight_per_channel_keeps_its_values(engine):
    weight, scale = fresh_fp8((6, 64)), fresh_scale((6, 1))
    new, new_scale, _ = fp8core.normalize_e4m3fn_to_e4m3fnuz(engine.array(weight), engine.array(scale))
    before = fp8core.dequantize(engine.array(weight), engine.array(scale))
    after = fp8core.dequantize(new, new_scale)
    np.testing.assert_array_equal(engine.numpy(after), engine.numpy(before))


@engines(*BOTH)
@pytest.mark.parametrize("group_shape", [PER_TENSOR, PER_TOKEN, GROUP_128, BLOCK_128], ids=str)
def test_more_than_65535_rows(engine, group_shape):
    x = fresh((65_539, 128))
    got = fp8core.quantize(engine.array(x), group_shape=group_shape)
    for rows in (slice(0, 128), slice(65_408, 65_539)):
        if group_shape == PER_TENSOR:
            want = reference.quantize(x[rows], group_shape=(-1, -1), scale=engine.numpy(got.scale))
            assert engine.numpy(got.scale)[0] == np.abs(x.astype(np.float32)).max() / np.float32(448)
        else:
            want = reference.quantize(x[rows], group_shape=tuple(group_shape))
        assert_same_bytes(engine.codes(got.data)[rows], want.codes)


@engines(*BOTH)
def test_a_product_of_more_than_65535_rows(engine):
    m = 65_537
    a, weight, token = fresh_fp8((m, 32)), fresh_fp8((16, 32)), fresh_scale((m, 1))
    got = engine.numpy(
        fp8core.scaled_mm(engine.array(a), engine.array(weight).T, engine.array(token), engine.array(fresh_scale((1,))))
    )
    exact = reference.scaled_mm(a.astype(np.float32), weight.astype(np.float32).T, token, fresh_scale((1,)))
    assert reference.relative_error(got, exact) <= 3e-3
    assert reference.relative_error(got[-3:], exact[-3:]) <= 6e-3


@engines("numpy", "torch-cpu", "torch-cuda")
@pytest.mark.parametrize("group_shape", [PER_TENSOR, PER_TOKEN, GROUP_128, BLOCK_128], ids=str)
@pytest.mark.parametrize("offset", [1, 2, 8])
def test_output_misaligned_while_the_input_is_aligned(engine, group_shape, offset):
    x = fresh((9, 256))
    memory = engine.array(np.full(9 * 256 + 64, 0x55, np.uint8).view(ml_dtypes.float8_e4m3fn))
    out = memory[offset : offset + 9 * 256].reshape(9, 256)
    got = fp8core.quantize(engine.array(x), group_shape=group_shape, out=out)
    want = reference.quantize(x, group_shape=tuple(group_shape))
    assert_same_bytes(engine.codes(got.data), want.codes)
    codes = engine.codes(memory)
    assert (codes[:offset] == 0x55).all()
    assert (codes[offset + 9 * 256 :] == 0x55).all()


@engines("numpy", "torch-cpu", "torch-cuda")
@pytest.mark.parametrize("m", [3, 80])
def test_a_product_with_misaligned_operands(engine, m):
    n, k = 128, 256
    a, weight, token = fresh_fp8((m, k)), fresh_fp8((n, k)), fresh_scale((m, 1))
    exact = reference.scaled_mm(a.astype(np.float32), weight.astype(np.float32).T, token, 1.0)
    memory = engine.array(np.concatenate([np.zeros(1, a.dtype), a.reshape(-1)]))
    out = engine.array(np.zeros(m * n + 1, np.float32))[1:].reshape(m, n)
    fp8core.scaled_mm(
        memory[1:].reshape(m, k),
        engine.array(weight).T,
        engine.array(token),
        engine.array(np.ones(1, np.float32)),
        out=out,
        out_dtype="float32",
    )
    assert reference.relative_error(engine.numpy(out), exact) <= 3e-3


@engines("torch-cpu", "torch-cuda")
def test_tensors_that_require_grad(engine):
    x = engine.array(fresh((4, 128))).requires_grad_()
    weight = engine.torch.nn.Parameter(engine.array(fresh((64, 128))))
    layer = fp8core.Fp8Linear.from_weight(weight)
    y = layer(x)
    assert not y.requires_grad
    q = fp8core.quantize(x)
    assert_same_bytes(engine.codes(q.data), reference.quantize(fresh((4, 128))).codes)


@engines("numpy", "torch-cpu", "cupy", "torch-cuda")
def test_two_threads_share_one_prepared_linear(engine):
    layer = fp8core.Fp8Linear.from_weight(engine.array(fresh((256, 512), spread=1)))
    inputs = [engine.array(fresh((m, 512), spread=1)) for m in (1, 2, 17, 64)]
    want = [engine.numpy(layer(x)).view(np.uint16) for x in inputs]
    wrong: list[str] = []

    def work(index: int) -> None:
        try:
            for turn in range(40):
                at = (index + turn) % len(inputs)
                if not np.array_equal(engine.numpy(layer(inputs[at])).view(np.uint16), want[at]):
                    wrong.append(f"thread {index}, turn {turn}")
        except Exception as error:
            wrong.append(repr(error))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_grown_table_starts_anew(monkeypatch):
    from fp8core.core import calls
    from fp8core.kernels.gemm.table import SCALED_MM
    from fp8core.table import table

    monkeypatch.setattr(table, "PLANS_KEPT", 4)
    monkeypatch.setattr(calls, "CALLS_KEPT", 4)
    weight = fresh_fp8((8, 32))
    for m in range(1, 12):
        got = fp8core.scaled_mm(fresh_fp8((m, 32)), weight.T, fresh_scale((1,)), fresh_scale((1,)))
        assert got.shape == (m, 8)
    assert len(SCALED_MM) <= 4
