"""A Quantized knows its groups: every function that takes codes and scales takes it, and nothing is guessed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fp8core
from fp8core import GROUP_128, PER_TENSOR, PER_TOKEN
from soak.arena import Arena
from soak.nonsense import NONSENSE
from soak.product_cases import bounded
from soak.strategies import examples, fp8, groups, layouts, numbers, same, seeds, shapes, wide
from soak.test_fuzz import ENGINES, engine_of
from soak.verdicts import check_words, refusal_of
from support import reference


@pytest.mark.parametrize("engine_name", ENGINES)
def test_what_was_quantized_is_dequantized_by_its_own_groups(engine_name):
    engine = engine_of(engine_name)

    @examples(100)
    @given(st.data())
    def run(data):
        arena = Arena(engine_name)
        shape, dtype, group = data.draw(shapes(2, 2)), data.draw(fp8), data.draw(groups)
        x = numbers(shape, data.draw(wide), "ordinary", data.draw(seeds))
        place = arena.put(x, data.draw(layouts))
        arena.seal()
        q = fp8core.quantize(arena.array(place), dtype=dtype, group_shape=group)
        assert tuple(q.group_shape) == tuple(group)
        want = reference.quantize(x, dtype, group)
        exact = reference.dequantize(want.codes, dtype, want.scale, group).reshape(shape)
        for back in (q.dequantize(), fp8core.dequantize(q)):
            same(np.ascontiguousarray(engine.numpy(back)), exact, "result")

    run()


@pytest.mark.parametrize("label", NONSENSE["group or none"])
def test_a_pair_has_no_nonsense_for_groups(label):
    q = fp8core.quantize(numbers((4, 64), "float32", "ordinary", 1))
    wrong = NONSENSE["group or none"][label](None)
    for call in (lambda: fp8core.Quantized(*q, wrong), lambda: fp8core.dequantize(q, group_shape=wrong)):
        _, error = refusal_of(call)
        check_words(error, ("group_shape",))


def test_inputs_that_have_their_codes_take_no_bound():
    q = fp8core.quantize(numbers((4, 64), "float32", "ordinary", 1))
    _, error = refusal_of(lambda: fp8core.linear(q, q, scale_ub=1.0))
    check_words(error, ("scale_ub",))


@pytest.mark.parametrize("engine_name", ENGINES)
@pytest.mark.parametrize("group", [PER_TENSOR, PER_TOKEN, GROUP_128], ids=str)
def test_a_linear_layer_takes_what_was_quantized(group, engine_name):
    engine = engine_of(engine_name)

    @examples(30)
    @given(st.data())
    def run(data):
        m, n, k = (
            data.draw(st.integers(0, 5)),
            data.draw(st.sampled_from((3, 16, 100))),
            data.draw(st.sampled_from((1, 64, 300))),
        )
        of_weight = {PER_TENSOR: PER_TENSOR, PER_TOKEN: (1, -1), GROUP_128: (128, 128)}[group]
        x, w = (numbers(shape, "bfloat16", "ordinary", data.draw(seeds)) for shape in ((m, k), (n, k)))
        q = fp8core.quantize(engine.array(x), group_shape=group)
        weight = fp8core.quantize(engine.array(w), group_shape=of_weight)
        layer = fp8core.Fp8Linear(weight.data, weight.scale, group_shape=group)
        a, b = (reference.quantize(v, group_shape=g) for v, g in ((x, group), (w, of_weight)))
        a = reference.dequantize(a.codes, "float8_e4m3fn", a.scale, group).reshape(m, k).astype(np.float64)
        b = reference.dequantize(b.codes, "float8_e4m3fn", b.scale, of_weight).astype(np.float64)
        for y in (fp8core.linear(q, weight.data, weight.scale), layer(q), layer(q)):
            got = np.ascontiguousarray(engine.numpy(y))
            assert got.shape == (m, n)
            bounded(got, a @ b.T, np.abs(a) @ np.abs(b).T, "bfloat16")

    run()
