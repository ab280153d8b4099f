"""torch.compile of every public function: one graph, and the bits of eager calls."""

import inspect

import pytest

torch = pytest.importorskip("torch")

from torch._dynamo.testing import CompileCounter  # noqa: E402

import fp8core.torch  # noqa: E402 - after the skip
from fp8core import w8a8  # noqa: E402
from pytorch.cases import CASES, fresh_dynamo  # noqa: E402, F401
from pytorch.tensors import K, bits, weight, wide  # noqa: E402

ROWS = 1, 5, 16
ROWS_OF = {None: ROWS, True: ROWS[1:], False: ROWS[1:2]}
"""Numbers of rows by `dynamic`: None compiles a graph for the first alone and one for the others, True one for all that
are not 1, False one for each."""
FUSED = weight((-1, -1))
SQUARE = weight((-1, -1), K)


@pytest.mark.parametrize("dynamic", [None, True, False], ids=lambda x: f"dynamic={x}")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_one_graph_and_the_bits_of_eager_calls(case, dynamic):
    """By inductor where rows are static: it lowers calls that write in another way than those that do not, while other
    backends run them as they are."""
    backend = "inductor" if dynamic is False else "aot_eager"
    compiled = torch.compile(case.function, fullgraph=True, dynamic=dynamic, backend=backend)
    for m in ROWS_OF[dynamic]:
        eager_inputs, inputs = case.inputs(m), case.inputs(m)
        assert bits(compiled(*inputs)) == bits(case.function(*eager_inputs))
        assert bits(inputs) == bits(eager_inputs), "what was written in place"


WITHOUT_ARRAYS = {
    *("capabilities", "explain", "load_tunings", "save_tunings", "tune", "tune_shapes"),
    *("cutlass_block_fp8_supported", "cutlass_fp8_supported", "cutlass_group_gemm_supported"),
    *("dispatch_w8a8_scaled_mm", "maybe_create_device_identity", "sparse_cutlass_supported"),
}
"""Functions that ask or tell the library: nothing of a model."""


def test_every_public_function_is_tried(monkeypatch):
    called = set()

    def noted(name, function):
        def call(*args, **kwargs):
            called.add(name)
            return function(*args, **kwargs)

        return call

    functions = {(module, name) for module in (fp8core, w8a8) for name in module.__all__ if name not in WITHOUT_ARRAYS}
    functions = {(module, name) for module, name in functions if inspect.isfunction(getattr(module, name))}
    for module, name in functions:
        monkeypatch.setattr(module, name, noted((module, name), getattr(module, name)))
    for case in CASES:
        case.function(*case.inputs(5))
    names_of_vllm(wide(5, K))
    same = {(w8a8, name) for module, name in called if module is fp8core and hasattr(w8a8, name)}
    assert functions == called | same


def test_dynamic_rows_are_compiled_once():
    counter = CompileCounter()
    w = weight((1, -1))
    compiled = torch.compile(lambda x: fp8core.linear(x, w), fullgraph=True, dynamic=True, backend=counter)
    for m in (2, 5, 16, 33, 300):
        x = wide(m, K)
        assert bits(compiled(x)) == bits(fp8core.linear(x, w))
    assert counter.frame_count == 1


def test_a_number_is_beside_x_whatever_torch_s_default_device():
    def quantized(x):
        return fp8core.quantize(x, scale=0.5).data

    x = wide(5, K)
    with torch.device("meta"):
        assert bits(torch.compile(quantized, fullgraph=True, backend="eager")(x)) == bits(quantized(x))


EQUAL, DIFFERENT = torch.full((3,), 0.5), torch.tensor([0.5, 0.5, 1.0])


def test_a_graph_that_chooses_by_all_close():
    """`torch.cond` takes what all_close_1d returns; an if of Python ends the graph, as of any value of a tensor."""

    def chosen(x):
        return torch.cond(fp8core.all_close_1d(x), lambda x: x * 2, lambda x: x * 3, (x,))

    def branch(x):
        return x * 2 if fp8core.all_close_1d(x * 1) else x * 3

    compiled = torch.compile(chosen, fullgraph=True, backend="aot_eager")
    beside = torch.compile(branch, backend="eager")
    for x in (EQUAL, DIFFERENT):
        assert torch.equal(compiled(x), branch(x))
        assert torch.equal(beside(x), branch(x))
    torch._dynamo.reset()
    with pytest.raises(Exception, match="Could not guard on data-dependent expression"):
        torch.compile(branch, fullgraph=True, backend="eager")(EQUAL)


@pytest.mark.parametrize("strict", [False, True])
def test_all_close_is_exported(strict):
    class Check(torch.nn.Module):
        def forward(self, x):
            return fp8core.all_close_1d(x), x + 1

    count = torch.export.Dim("count", min=2, max=64)
    program = torch.export.export(Check(), (EQUAL,), dynamic_shapes=({0: count},), strict=strict).module()
    for x in (EQUAL, DIFFERENT, torch.ones(5)):
        assert program(x)[0] is fp8core.all_close_1d(x)


def test_layers_in_a_graph():
    layer = fp8core.Fp8Linear(weight((1, -1)), bias=wide(64, seed=4))

    def through(x):
        q = fp8core.silu_and_mul_quant(torch.cat((x, x), -1))
        return layer(x * 2) + layer(q)

    compiled = torch.compile(through, fullgraph=True, backend="aot_eager")
    for m in ROWS:
        got = compiled(wide(m, K))
        assert not layer._state.by_group, "a trace changed the layer"
        assert bits(got) == bits(through(wide(m, K)))
        layer._state.by_group.clear()


def test_inductor_gives_the_bits_of_eager_calls_and_copies_no_residual():
    from torch._inductor.utils import run_and_get_code

    norm, w = wide(K, seed=2), weight((1, -1))

    def step(x, y):
        residual = x + y
        q = fp8core.rms_norm_quant(x, norm, 1e-6, residual=residual)
        return fp8core.linear(q, w), residual

    x, y = wide(5, K), wide(5, K, seed=7)
    got, (code,) = run_and_get_code(torch.compile(step, fullgraph=True), x, y)
    assert bits(got) == bits(step(x, y))
    assert "fp8core.rms_norm_quant" in code
    assert "clone" not in code.split("def call")[1]


def normalized_with_a_copy(x):
    h = 2 * x
    residual = h.clone()
    return *fp8core.rms_norm_quant(h, torch.ones(K), 1e-6, residual=residual), residual


def quantized_beside_a_copy(x):
    h = 2 * x
    residual = h.clone()
    return *fp8core.rms_norm_quant(h[1:4], torch.ones(K), 1e-6, residual=residual[1:4]), residual


def multiplied_into_a_copy(x):
    h = 2 * x
    return fp8core.linear(h, SQUARE, out=h.clone())


@pytest.mark.parametrize("function", [normalized_with_a_copy, quantized_beside_a_copy, multiplied_into_a_copy])
def test_inductor_drops_copies_of_what_nothing_else_needs(function):
    """It does not see that the operator that writes to the copy also reads what was copied."""
    x = wide(5, K, dtype=torch.float32)
    assert bits(torch.compile(function, fullgraph=True)(x)) == bits(function(x))


@pytest.mark.parametrize(
    "change",
    [
        lambda w, scales: fp8core.requantize_with_max_scale(w, scales, [16, 16])[1],
        lambda w, scales: fp8core.normalize_e4m3fn_to_e4m3fnuz(w, scales, out=w)[0],
        lambda w, scales: fp8core.normalize_e4m3fn_to_e4m3fnuz(w, scales, scales[:1], out=w)[0],
    ],
    ids=["requantize", "normalize", "normalize_input"],
)
def test_a_graph_returns_what_it_writes_in_place(change):
    weight, scales = wide(32, 16).to(torch.float8_e4m3fn), torch.tensor([0.5, 2.0])
    wanted = change(weight.clone(), scales)
    made = torch.compile(change, backend="eager", fullgraph=True)(weight, scales)
    assert made.data_ptr() == weight.data_ptr()
    assert made.dtype == wanted.dtype
    assert bits(made) == bits(wanted)


def names_of_vllm(x):
    """Calls by the names of vLLM: codes per tensor, padded and per token; products; layers of an input and of FP8."""
    w, scale = FUSED
    codes, of_x = w8a8.scaled_fp8_quant(x * 2)
    padded, of_rows = w8a8.scaled_fp8_quant(x, num_token_padding=20, use_per_token_if_dynamic=True)
    shape = [x.shape[0], w.shape[0]]
    of_mm = {"weight": w.T, "out_dtype": torch.bfloat16, "scale_b": scale, "bias": None}
    of_rocm = of_mm | {"qinput": padded, "scale_a": of_rows, "output_shape": shape, "input_2d": None}
    chosen = w8a8.dispatch_w8a8_scaled_mm(w8a8.cutlass_fp8_supported(), True, False)
    return (
        w8a8.all_close_1d(of_rows[:, 0]),
        chosen(**of_rocm),
        w8a8.rocm_per_tensor_w8a8_scaled_mm(**of_rocm),
        w8a8.torch_per_token_w8a8_scaled_mm(**of_rocm),
        w8a8.torch_channelwise_w8a8_scaled_mm(**of_rocm),
        codes,
        w8a8.cutlass_w8a8_scaled_mm(qinput=padded, scale_a=of_rows, output_shape=shape, **of_mm),
        w8a8.torch_per_tensor_w8a8_scaled_mm(qinput=codes, scale_a=of_x, output_shape=shape, input_2d=None, **of_mm),
        w8a8.Fp8LinearOp().apply(x + 1, w.T, scale) * 2,
        w8a8.Fp8LinearOp(use_per_token_if_dynamic=w8a8.cutlass_fp8_supported()).apply(
            x, w.T, scale, input_scale_ub=1.5
        ),
        w8a8.Fp8LinearOp().apply(codes, w.T, scale, input_scale=of_x),
    )


@pytest.mark.parametrize("dynamic", [None, True], ids=lambda x: f"dynamic={x}")
def test_the_names_of_vllm_in_a_graph(dynamic):
    compiled = torch.compile(names_of_vllm, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for m in ROWS_OF[dynamic]:
        assert bits(compiled(wide(m, K))) == bits(names_of_vllm(wide(m, K)))


@pytest.mark.parametrize("name", ["fp8", "block_fp8", "group_gemm", "sparse"])
def test_what_is_supported_is_a_constant_of_a_graph(name):
    supported = w8a8.sparse_cutlass_supported if name == "sparse" else getattr(w8a8, f"cutlass_{name}_supported")
    compiled = torch.compile(lambda x: x + supported(), fullgraph=True, backend="aot_eager")
    assert compiled(torch.zeros(1)).item() == supported()


@pytest.mark.parametrize("strict", [False, True])
def test_the_names_of_vllm_are_exported(strict):
    class Step(torch.nn.Module):
        def forward(self, x):
            return names_of_vllm(x)

    rows = torch.export.Dim("rows", min=2, max=19)
    program = torch.export.export(Step(), (wide(5, K),), dynamic_shapes=({0: rows},), strict=strict)
    assert bits(program.module()(wide(7, K))) == bits(names_of_vllm(wide(7, K)))


def test_defaults_of_functions_in_several_regions_of_a_dynamic_graph():
    square, norm = weight((1, -1), n=K), torch.ones(K, dtype=torch.bfloat16)

    def region(x):
        q = fp8core.rms_norm_quant(x, norm, 1e-6)
        return fp8core.quantize(fp8core.scaled_mm_nt(q, square)).dequantize().to(x.dtype)

    def run(x):
        for _ in range(2):
            x = torch.utils.checkpoint.checkpoint(region, x, use_reentrant=False)
        return x

    with torch._dynamo.config.patch(specialize_float=True):
        compiled = torch.compile(run, fullgraph=True, dynamic=True, backend="aot_eager")
        for rows in (5, 16):
            assert bits(compiled(wide(rows, K))) == bits(run(wide(rows, K)))
