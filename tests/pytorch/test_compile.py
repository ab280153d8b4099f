"""torch.compile of every public function: one graph, and the bits of eager calls."""

import inspect
from unittest import mock

import pytest

torch = pytest.importorskip("torch")

from torch._dynamo.testing import CompileCounter  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

import fp8core.torch  # noqa: E402 - after the skip
from fp8core import w8a8  # noqa: E402
from fp8core.core.scaling import default_eps  # noqa: E402
from fp8core.runtime import device  # noqa: E402
from fp8core.torch.operators import OVERLOADS  # noqa: E402
from pytorch.cases import CASES, fresh_dynamo  # noqa: E402, F401
from pytorch.tensors import K, bits, weight, wide  # noqa: E402
from support.targets import H200  # noqa: E402

ROWS = 1, 5, 16
ROWS_OF = {None: ROWS, True: ROWS[1:], False: ROWS[1:2]}
"""Numbers of rows by `dynamic`: None compiles a graph for the first alone and one for the others, True one for all that
are not 1, False one for each."""
FUSED = weight((-1, -1))
SQUARE = weight((-1, -1), K)
WITH_FP8_INPUTS = "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"
"""What opcheck can do where an input is FP8: its test of the schema adds inputs up."""


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


def test_no_operator_writes_to_what_may_be_left_out():
    """inductor of torch 2.13 fails where nothing is written by an operator that may, and that has one result."""
    for overload in OVERLOADS.values():
        written = [a for a in overload._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        assert not any(isinstance(a.type, torch.OptionalType) for a in written), overload


def recorded(case):
    """Return the operators that a case runs where torch exports without dynamo, each with copies of its arguments."""
    calls = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func in OVERLOADS.values():
                assert not kwargs
                calls.append((func, tuple(x.clone() if isinstance(x, torch.Tensor) else x for x in args)))
            return func(*args, **(kwargs or {}))

    inputs = case.inputs(5)
    with mock.patch("torch.compiler.is_compiling", return_value=True), Recorder():
        got = case.function(*inputs)
    assert bits(got) == bits(case.function(*case.inputs(5)))
    return calls


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


def test_opcheck_of_every_overload():
    checked = set()
    for case in CASES:
        for overload, arguments in recorded(case):
            if overload in checked:
                continue
            checked.add(overload)
            fp8 = any(isinstance(x, torch.Tensor) and x.itemsize == 1 for x in arguments)
            tests = WITH_FP8_INPUTS if fp8 else ("test_schema", *WITH_FP8_INPUTS)
            done = torch.library.opcheck(overload, arguments, test_utils=tests)
            assert done == dict.fromkeys(tests, "SUCCESS"), (overload, done)
    assert checked == set(OVERLOADS.values())


def test_schemas_say_what_is_written():
    written = {
        name: [a.name for a in overload._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        for name, overload in OVERLOADS.items()
    }
    assert written["quantize", ""] == []
    assert written["quantize", "out_scale"] == ["out", "scale"]
    assert written["rms_norm_quant", "static"] == written["scaled_mm", ""] == []
    assert written["rms_norm_quant", "static_residual"] == ["residual"]
    assert written["scaled_mm_nt", "out_amax"] == ["out", "amax"]
    assert written["grouped_scaled_mm_nt", ""] == []
    assert written["grouped_scaled_mm_nt", "out"] == ["out"]
    assert written["moe_permute", ""] == written["moe_permute", "scale"] == written["moe_unpermute", ""] == []
    assert written["moe_unpermute", "out"] == ["out"]
    assert written["requantize_with_max_scale", "inplace"] == ["weight"]


def test_operators_run_without_the_arguments_that_graphs_of_earlier_releases_lack():
    x, w, flags = wide(5, K), weight((1, -1)), (True, False, None, None)
    a = fp8core.quantize(x)
    operands = a.data, w.data, a.scale, w.scale, None, None
    made = torch.ops.fp8core.scaled_mm_nt(*operands, "bfloat16", *flags)
    assert bits(made) == bits(fp8core.scaled_mm_nt(a, w))
    operands = x, w.data, w.scale, None, None, None
    made = torch.ops.fp8core.linear(*operands, [1, -1], None, None, *flags)
    assert bits(made) == bits(fp8core.linear(x, w))


def test_dynamic_rows_are_compiled_once():
    counter = CompileCounter()
    w = weight((1, -1))
    compiled = torch.compile(lambda x: fp8core.linear(x, w), fullgraph=True, dynamic=True, backend=counter)
    for m in (2, 5, 16, 33, 300):
        x = wide(m, K)
        assert bits(compiled(x)) == bits(fp8core.linear(x, w))
    assert counter.frame_count == 1


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


def test_an_operator_writes_in_place_where_another_operand_is_in_the_same_memory():
    def operands():
        weight = torch.arange(32 * 16, dtype=torch.int32).view(32, 16).to(torch.uint8) % 100
        scales = weight.view(torch.float32)[0, :2]
        scales.copy_(torch.tensor([0.5, 2.0]))
        return weight.view(torch.float8_e4m3fn), scales

    requantize = torch.ops.fp8core.requantize_with_max_scale.inplace
    (weight, scales), (wanted, apart) = operands(), operands()
    requantize(wanted, apart.clone(), [16, 16])
    assert requantize(weight, scales, [16, 16]).item() == 2.0
    assert bits(weight) == bits(wanted) != bits(operands()[0])


def test_an_operator_raises_an_error_of_other_operands_once():
    x, residual = wide(5, K), wide(5, K).requires_grad_()
    norm = torch.ones(K, dtype=x.dtype)
    with pytest.raises(fp8core.LayoutError, match="residual needs a tensor that does not require grad") as caught:
        torch.ops.fp8core.rms_norm_quant.residual(
            x, norm, residual, None, "float8_e4m3fn", [1, -1], None, "float32", "k", default_eps(), 1e-6, False
        )
    assert caught.value.__context__ is None


def test_fake_kernels_describe_calls_on_a_gpu_that_is_not_there(monkeypatch):
    from torch._subclasses.fake_tensor import FakeTensorMode

    asked = []

    def target(ordinal):
        asked.append(ordinal)
        return H200._replace(device=ordinal)

    monkeypatch.setattr(device, "target", target)
    with FakeTensorMode():
        x = torch.empty(3, 5, 256, dtype=torch.bfloat16, device="cuda:1")
        w = torch.empty(64, 256, dtype=torch.float8_e4m3fn, device="cuda:1")
        scales = torch.empty(1, 2, device="cuda:1")
        options = "float8_e4m3fn", [1, 128], None, "float32", "mn", 1e-10, None
        data, scale = torch.ops.fp8core.quantize(x, None, *options)
        assert (data.shape, data.dtype, data.device) == (x.shape, torch.float8_e4m3fn, x.device)
        assert (scale.shape, scale.stride(), scale.device) == ((3, 5, 2), (5, 1, 15), x.device)
        arguments = None, None, None, [1, 128], None, "float16", True, False, None, None
        y = torch.ops.fp8core.linear(x, w, scales, *arguments)
        assert (y.shape, y.dtype, y.device) == ((3, 5, 64), torch.float16, x.device)
        with pytest.raises(fp8core.DeviceError, match="weight needs to be where x is"):
            torch.ops.fp8core.linear(x, torch.empty(64, 256, dtype=torch.float8_e4m3fn), scales, *arguments)
        experts, offs = torch.stack([w, w]), torch.empty(2, dtype=torch.int32, device="cuda:1")
        flat, ones = data.view(15, 256), torch.empty(1, device="cuda:1")
        y = torch.ops.fp8core.grouped_scaled_mm_nt(flat, experts, ones, ones, None, offs, "float32", True, None, None)
        assert (y.shape, y.dtype, y.device) == ((15, 64), torch.float32, x.device)
        with pytest.raises(fp8core.DeviceError, match="offs needs to be where a is"):
            torch.ops.fp8core.grouped_scaled_mm_nt(
                flat, experts, ones, ones, None, offs.cpu(), "float32", True, None, None
            )
    assert set(asked) == {1}


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
