"""`GroupedLinear` against a `Linear` for each group, and the same state, casts and gradients."""

import copy
import io

import pytest

torch = pytest.importorskip("torch")

import fp8core.torch  # noqa: E402 - after the skip
from fp8core.errors import CheckpointError, DTypeError, LayoutError, ScaleError, ShapeError  # noqa: E402
from fp8core.torch import GroupedLinear  # noqa: E402
from fp8core.torch.gradients import GROUPED_GRADIENT  # noqa: E402
from pytorch.layers import grouped_and_single  # noqa: E402

GROUPS, N, K = 4, 136, 272
ENDS = torch.tensor([3, 3, 10, 11], dtype=torch.int32)
"""A group without rows; one row of 12 is in no group."""
KINDS = [("channel", False), ("channel", True), ("block", False)]


def weights(dtype=torch.float32):
    values = torch.randn(GROUPS, N, K, generator=torch.Generator().manual_seed(1))
    return (values * torch.tensor([0.1, 1, 5, 0.5])[:, None, None]).to(dtype)


def made(scheme="channel", static=False, dtype=torch.float32):
    return grouped_and_single(weights(dtype), scheme, static)


def rows(dtype=torch.float32, count=12):
    x = torch.randn(count, K, generator=torch.Generator().manual_seed(2))
    return (x * torch.linspace(0.1, 3, count)[:, None]).to(dtype)


def by_layers(layers, x):
    begin, results = 0, []
    for layer, end in zip(layers, ENDS.tolist(), strict=True):
        results.append(layer(x[begin:end]))
        begin = end
    return torch.cat(results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("scheme", "static"), KINDS)
def test_each_group_is_a_layer(scheme, static, dtype):
    grouped, layers = made(scheme, static, dtype)
    for at, layer in enumerate(layers):
        assert torch.equal(grouped.weight[at].view(torch.uint8), layer.weight.view(torch.uint8))
        assert torch.equal(grouped.weight_scale[at], layer.weight_scale)
        assert torch.equal(grouped.dequantized(torch.float32, at), layer.dequantized(torch.float32))
    x = rows(dtype)
    found, wanted = grouped(x, ENDS)[: ENDS[-1]], by_layers(layers, x)
    assert found.dtype == dtype
    torch.testing.assert_close(found, wanted, rtol={torch.float32: 1e-5}.get(dtype, 1e-2), atol=1e-4)
    q = grouped.quantized(x, ENDS)
    assert torch.equal(grouped(q, ENDS)[: ENDS[-1]], found)


@pytest.mark.parametrize("scheme", ["channel", "block"])
def test_a_weight_of_any_strides_and_format(scheme):
    wide = weights()
    strided = torch.nn.Parameter(wide.mT.contiguous().mT)
    wanted, found = (GroupedLinear.from_weight(x, scheme=scheme, weight_dtype="float8_e5m2") for x in (wide, strided))
    assert found.weight.dtype == torch.float8_e5m2
    assert torch.equal(found.weight.view(torch.uint8), wanted.weight.view(torch.uint8))
    assert torch.equal(found.weight_scale, wanted.weight_scale)
    values = torch.stack([found.dequantized(torch.float32, at) for at in range(GROUPS)])
    torch.testing.assert_close(values, wide, rtol=0.125, atol=1e-2)


@pytest.mark.parametrize(("scheme", "static"), KINDS)
def test_gradients_are_those_of_the_layers(scheme, static):
    grouped, layers = made(scheme, static)
    results = []
    for call in (lambda x: grouped(x, ENDS)[: ENDS[-1]], lambda x: by_layers(layers, x)):
        x = rows().requires_grad_()
        y = call(x)
        (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
        results.append(x.grad)
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
    assert not results[0][ENDS[-1] :].any()


@pytest.mark.parametrize(("scheme", "static"), KINDS)
def test_results_of_another_dtype_than_the_input(scheme, static):
    grouped, _ = made(scheme, static, torch.float16)
    x = rows(torch.bfloat16).requires_grad_()
    wide = x.detach().float().requires_grad_()
    end, wanted, found = ENDS[-1], grouped(wide, ENDS), grouped(x, ENDS, torch.float32)
    assert torch.equal(found[:end], wanted[:end])
    q = grouped.quantized(x.detach(), ENDS)
    assert torch.equal(grouped(q, ENDS, "float32")[:end], wanted[:end])
    assert grouped(q, ENDS).dtype == torch.float16
    found.sum().backward(), wanted.sum().backward()
    assert torch.equal(x.grad, wide.grad.to(x.dtype))


def test_gradients_are_of_the_weight_that_was_multiplied():
    grouped, _ = made()
    wanted = copy.deepcopy(grouped)
    x = rows().requires_grad_()
    y = grouped(x, ENDS)
    grouped.weight = torch.nn.Parameter(
        torch.zeros_like(grouped.weight.view(torch.uint8)).view(torch.float8_e4m3fn), False
    )
    y[:3].sum().backward()
    row = wanted.dequantized(torch.float32, 0).sum(0)
    torch.testing.assert_close(x.grad[:3], row.expand(3, K), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_gradients_are_those_of_the_layers(dtype):
    grouped, layers = made(dtype=dtype)
    results = []
    for call in (lambda x: grouped(x, ENDS)[: ENDS[-1]], lambda x: by_layers(layers, x)):
        x = rows(dtype).requires_grad_()
        (first,) = torch.autograd.grad(call(x).float().square().sum(), x, create_graph=True)
        first[: ENDS[-1]].float().square().sum().backward()
        results.append(x.grad)
    torch.testing.assert_close(
        *results, rtol={torch.float32: 1e-4}.get(dtype, 3e-2), atol=float(results[1].abs().max()) * 1e-4
    )


def test_a_tangent_is_refused_not_lost():
    grouped, _ = made()
    with torch.autograd.forward_ad.dual_level():
        with pytest.raises(LayoutError, match="input needs to be without a tangent of forward-mode derivatives"):
            grouped(torch.autograd.forward_ad.make_dual(rows(), rows()), ENDS)
        assert grouped(rows(), ENDS).shape == (12, N), "other inputs are taken"


def test_a_state_is_saved_loaded_copied_and_pickled():
    grouped, _ = made("channel", static=True)
    x = rows()
    wanted = grouped(x, ENDS)[: ENDS[-1]]
    assert {name: tuple(value.shape) for name, value in grouped.state_dict().items()} == {
        "weight": (GROUPS, N, K), "weight_scale": (GROUPS, N, 1), "input_scale": (GROUPS,)
    }  # fmt: skip
    empty = GroupedLinear(GROUPS, K, N, static=True)
    assert not empty(x, ENDS)[: ENDS[-1]].any()
    empty.load_state_dict(grouped.state_dict())
    file = io.BytesIO()
    torch.save(grouped, file)
    file.seek(0)
    for other in (empty, copy.deepcopy(grouped), copy.copy(grouped), torch.load(file, weights_only=False)):
        assert torch.equal(other(x, ENDS)[: ENDS[-1]], wanted)
    assert not any(parameter.requires_grad for parameter in grouped.parameters())


def test_casts_change_inputs_but_no_codes_and_scales():
    grouped, _ = made(dtype=torch.bfloat16)
    before = {name: value.clone() for name, value in grouped.state_dict().items()}
    half = copy.deepcopy(grouped).half()
    assert (grouped.compute_dtype, half.compute_dtype) == (torch.bfloat16, torch.float16)
    assert all(torch.equal(value.view(torch.uint8), before[name].view(torch.uint8))
               for name, value in half.state_dict().items())  # fmt: skip
    with torch.autocast("cpu", torch.bfloat16):
        assert grouped(rows(), ENDS).dtype == torch.bfloat16


def test_codes_give_the_dtype_of_the_layers_or_of_autocast():
    grouped, _ = made(dtype=torch.float16)
    q = grouped.quantized(rows(torch.float16), ENDS)
    assert grouped(q, ENDS).dtype == torch.float16
    with torch.autocast("cpu", torch.bfloat16):
        assert grouped(q, ENDS).dtype == torch.bfloat16


def test_the_product_is_told_how_to_sum(monkeypatch):
    told = []
    product = fp8core.torch.grouped.grouped_scaled_mm_nt
    monkeypatch.setattr(
        fp8core.torch.grouped,
        "grouped_scaled_mm_nt",
        lambda *operands, use_fast_accum, **options: (told.append(use_fast_accum), product(*operands, **options))[1],
    )
    for accurate in (False, True):
        GroupedLinear.from_weight(weights(), use_fast_accum=not accurate)(rows(), ENDS)
    assert told == [True, False]


def test_a_weight_that_changes_is_read_at_the_next_call():
    grouped, _ = made()
    x = rows()
    before = grouped(x, ENDS)[:3].clone()
    grouped.weight_scale.data[0] *= 2
    torch.testing.assert_close(grouped(x, ENDS)[:3], 2 * before)
    grouped.weight.data = torch.zeros_like(grouped.weight.view(torch.uint8)).view(torch.float8_e4m3fn)
    assert not grouped(x, ENDS)[:3].any()


@pytest.mark.parametrize(("scheme", "static"), KINDS)
def test_compiled_without_a_graph_break(scheme, static):
    grouped, _ = made(scheme, static)
    compiled = torch.compile(grouped, fullgraph=True, backend="aot_eager")
    x, end = rows(), int(ENDS[-1])
    with torch.no_grad():
        assert torch.equal(compiled(x, ENDS)[:end], grouped(x, ENDS)[:end])
        assert torch.equal(compiled(x[:7], ENDS)[:7], grouped(x[:7], ENDS)[:7])


@pytest.mark.parametrize(("scheme", "static"), KINDS)
def test_compiled_gradients_without_a_graph_break(scheme, static):
    grouped, _ = made(scheme, static)

    def twice(x, offs):
        """Two graphs of autograd functions."""
        return grouped(torch.nn.functional.pad(grouped(x, offs), (0, K - N)), offs)

    torch._dynamo.reset()
    compiled = torch.compile(twice, fullgraph=True, dynamic=True, backend="aot_eager")
    for count in (12, 7):
        grads = []
        for layers in (compiled, twice):
            x = rows(count=count).requires_grad_()
            end = min(count, int(ENDS[-1]))
            y = layers(x, ENDS)[:end]
            (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
            grads.append(x.grad)
        assert torch.equal(*grads)


def test_opcheck_of_the_gradient():
    grouped, _ = made()
    arguments = torch.randn(12, N), ENDS, grouped.weight, grouped.weight_scale, list(grouped.weight_group_shape)
    tests = "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"
    assert torch.library.opcheck(GROUPED_GRADIENT, arguments, test_utils=tests) == dict.fromkeys(tests, "SUCCESS")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("scheme", ["channel", "block"])
def test_torch_s_default_dtype_is_that_of_no_scale(scheme, dtype):
    wide, x, wanted = weights(), rows(), made(scheme)[0]
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        found = GroupedLinear.from_weight(wide, scheme=scheme)
        assert torch.equal(found.weight_scale, wanted.weight_scale)
        assert torch.equal(found(x, ENDS)[: ENDS[-1]], wanted(x, ENDS)[: ENDS[-1]])
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize(("scheme", "static"), KINDS)
def test_an_input_of_any_strides(scheme, static):
    grouped, _ = made(scheme, static)
    x = rows()
    wanted = grouped(x, ENDS)[: ENDS[-1]]
    wide = torch.zeros(12, 2 * K)
    wide[:, ::2] = x
    for same in (x.T.contiguous().T, wide[:, ::2], torch.cat([x, x], 1)[:, :K]):
        assert torch.equal(grouped(same, ENDS)[: ENDS[-1]], wanted)
        graded = grouped(same.detach().requires_grad_(), ENDS)
        assert torch.equal(graded[: ENDS[-1]], wanted)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(("scheme", "static"), KINDS)
def test_exported_for_any_number_of_rows(scheme, static, strict, tmp_path):
    grouped, _ = made(scheme, static)
    x, count = rows(), torch.export.Dim("count", min=2, max=4096)
    program = torch.export.export(grouped, (x, ENDS), dynamic_shapes=({0: count}, None), strict=strict)
    torch.export.save(program, tmp_path / "grouped.pt2")
    call = torch.export.load(tmp_path / "grouped.pt2").module()
    for some in (12, 4, 2):
        found, wanted = (layer(x[:some], ENDS)[: ENDS[-1]] for layer in (call, grouped))
        assert torch.equal(found, wanted)


@pytest.mark.parametrize(("scheme", "static"), KINDS)
@pytest.mark.parametrize("ends", [[5, 3, 8, 11], [5, 0, 0, 99], [0, 11, 2, 1]])
def test_an_end_before_an_earlier_one_is_of_a_group_without_rows(ends, scheme, static):
    grouped, _ = made(scheme, static)
    offs = torch.tensor(ends, dtype=torch.int32)
    found, wanted = (grouped(rows(), one)[:11] for one in (offs, offs.cummax(0).values))
    assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: GroupedLinear(2, 32, 32, scheme="tensor"), ScaleError, "scheme needs channel or block, got tensor"),
        (lambda: GroupedLinear(2, 32, 32, scheme="row"), CheckpointError, "scheme needs"),
        (lambda: GroupedLinear(2, 32, 32, scheme="block", static=True), ScaleError, "static needs the scheme channel"),
        (lambda: GroupedLinear(-1, 32, 32), ShapeError, "groups needs"),
        (lambda: GroupedLinear(2, -1, 32), ShapeError, "in_features needs"),
        (lambda: GroupedLinear(2, 32, 1.5), ShapeError, "out_features needs"),
        (lambda: GroupedLinear(2, 32, 32, static="no"), DTypeError, "static needs True or False"),
        (lambda: GroupedLinear(2, 32, 32, use_fast_accum="no"), DTypeError, "use_fast_accum needs True or False"),
        (lambda: GroupedLinear(2, 32, 32, dtype="half"), DTypeError, "dtype needs"),
        (lambda: GroupedLinear(2, 32, 32, weight_dtype="int8"), DTypeError, "weight_dtype needs"),
        (lambda: GroupedLinear.from_weight(torch.ones(4, 4)), ShapeError, r"weight needs three axes \[groups, n, k\]"),
        (lambda: made()[0](rows(), ENDS, "int8"), DTypeError, "out_dtype needs"),
        (lambda: GroupedLinear.from_weight(weights().numpy()), DTypeError, "weight needs a torch.Tensor, got ndarray"),
        (lambda: made()[0](rows()[None], ENDS), ShapeError, r"input needs two axes \[rows, k\], got shape \(1, 1"),
        (lambda: made()[0](rows()[0, 0], ENDS), ShapeError, r"input needs two axes \[rows, k\], got shape \(\)"),
        (lambda: made()[0](rows().to_sparse(), ENDS), LayoutError, "x needs a strided tensor .* got torch.sparse_coo"),
        (lambda: made()[0](rows().requires_grad_(), ENDS.tolist()), DTypeError, "offs needs a torch.Tensor, got list"),
        (lambda: made()[0](rows().to(torch.float8_e4m3fn), ENDS), DTypeError, "without its scale"),
        (lambda: made()[0](rows().tolist(), ENDS), DTypeError, "input needs a torch.Tensor or a Quantized, got list"),
        (lambda: made(static=True)[0].quantized(rows()), DTypeError, "offs needs a tensor, as each group has an input"),
        (lambda: fp8core.torch.dequantize_model_(torch.nn.Sequential(made()[0])), LayoutError, "the grouped layers 0"),
        (lambda: fp8core.torch.quantization_config(torch.nn.Sequential(made()[0])), LayoutError, "grouped layers 0"),
    ],
)  # fmt: skip
def test_what_is_refused(make, error, match):
    with pytest.raises(error, match=match):
        make()


@pytest.mark.parametrize(("scheme", "static"), KINDS)
@pytest.mark.parametrize(
    ("offs", "error", "match"),
    [
        (ENDS.long(), DTypeError, "offs needs int32, got int64"),
        (ENDS.to(torch.uint16), DTypeError, "offs needs .*int32, got .*uint16"),
        (ENDS.tolist(), DTypeError, "offs needs a torch.Tensor, got list"),
        (ENDS.numpy(), DTypeError, "offs needs a torch.Tensor, got ndarray"),
        (None, DTypeError, "offs needs a torch.Tensor, got NoneType"),
        (ENDS[0], ShapeError, r"offs needs shape \(4,\), where each group of rows ends, got \(\)"),
        (ENDS[None], ShapeError, r"offs needs shape \(4,\), where each group of rows ends, got \(1, 4\)"),
        (ENDS[1:], ShapeError, r"offs needs shape \(4,\), where each group of rows ends, got \(3,\)"),
        (ENDS.repeat_interleave(2)[::2], LayoutError, r"offs needs contiguous memory, got shape \(4,\)"),
    ],
)
def test_ends_that_are_refused(scheme, static, offs, error, match):
    with pytest.raises(error, match=match):
        made(scheme, static)[0](rows(), offs)


@pytest.mark.parametrize(("scheme", "static"), KINDS)
def test_rows_without_groups_are_not_computed(scheme, static):
    assert GroupedLinear(0, K, N, scheme=scheme, static=static)(rows(), ENDS[:0]).shape == (12, N)
