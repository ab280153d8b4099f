"""The module: its bits, and what survives casting, moving, copying, saving and loading."""

import copy
import pickle
import threading
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402 - after the skip
from torch.utils.weak import WeakIdKeyDictionary  # noqa: E402

import fp8core  # noqa: E402
from fp8core.errors import CheckpointError, DTypeError, LayoutError, ScaleError  # noqa: E402
from fp8core.problem import PER_TENSOR  # noqa: E402
from fp8core.torch import Linear, frozen  # noqa: E402
from pytorch.layers import INPUT_GROUPS, WEIGHT_GROUPS, expected, kinds, original, quantized  # noqa: E402
from pytorch.tensors import K, N, bits, saved, wide  # noqa: E402


@pytest.mark.parametrize("turn", range(2))
def test_a_test_draws_its_own_numbers_whatever_was_drawn_before(turn):
    """As the suite sees to: else workers that share it would draw others with each run."""
    assert torch.equal(torch.randn(5), torch.randn(5, generator=torch.Generator().manual_seed(0)))


@kinds
@pytest.mark.parametrize("bias", [True, False])
def test_the_bits_of_the_functions(scheme, input_scale, bias):
    layer = quantized(scheme, input_scale, bias=bias)
    for x in (wide(5, K), wide(2, 3, K), wide(K)):
        assert bits(layer(x)) == bits(expected(scheme, input_scale, x, bias))
    assert isinstance(layer, nn.Linear)
    assert not any(parameter.requires_grad for parameter in layer.parameters())


@kinds
def test_the_state_is_that_of_compressed_tensors(scheme, input_scale):
    layer = quantized(scheme, input_scale, n=192)
    shapes = {"channel": (192, 1), "tensor": (1,), "block": (2, 2)}
    wanted = {"weight": (192, K), "weight_scale": shapes[scheme], "bias": (192,)}
    if input_scale is not None:
        wanted["input_scale"] = (1,)
    state = layer.state_dict()
    assert {name: tuple(x.shape) for name, x in state.items()} == wanted
    assert state["weight"].dtype == torch.float8_e4m3fn
    assert all(x.dtype == torch.float32 for name, x in state.items() if name.endswith("scale"))


@pytest.mark.parametrize(
    "strided",
    [lambda x: x.transpose(0, 2).contiguous().transpose(0, 2), lambda x: torch.cat([x, x], 1)[:, : x.shape[1]]],
    ids=["transposed", "rows apart"],
)
@pytest.mark.parametrize("grad", [False, True])
def test_an_input_may_lie_in_any_way(strided, grad):
    layer = Linear.from_linear(nn.Linear(64, 32))
    x = torch.randn(3, 4, 64)
    wanted, lying = layer(x), strided(x)[...].detach().requires_grad_(grad)
    assert not lying.is_contiguous()
    assert torch.equal(layer(lying), wanted)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(lying), wanted)
    if grad:
        layer(lying).sum().backward()
        assert lying.grad.shape == x.shape


def test_a_producer_s_result_is_taken_as_it_is():
    layer = quantized("channel", None)
    q = fp8core.quantize(wide(5, K))
    assert bits(layer(q)) == bits(layer(wide(5, K)))


def test_layers_of_one_shape_share_a_graph():
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    counter = CompileCounter()
    for _ in range(4):
        layer = quantized("channel", None)
        torch.compile(layer, fullgraph=True, backend=counter)(wide(5, K))
    assert counter.frame_count == 1


CASTS = {
    "half": lambda layer: layer.half(),
    "bfloat16": lambda layer: layer.bfloat16(),
    "float": lambda layer: layer.float(),
    "to": lambda layer: layer.to(torch.float16),
    "to_device": lambda layer: layer.to("cpu", torch.float16),
    "type": lambda layer: layer.type(torch.float16),
    "share_memory": lambda layer: layer.share_memory(),
    "there_and_back": lambda layer: layer.half().float().bfloat16(),
}
DTYPES = {"float": torch.float32, **dict.fromkeys(("half", "to", "to_device", "type"), torch.float16)}


@pytest.mark.parametrize("cast", CASTS)
@kinds
def test_casts_leave_codes_and_scales(scheme, input_scale, cast):
    layer = quantized(scheme, input_scale)
    layer(wide(5, K))
    kept = {name: bits(x) for name, x in layer.state_dict().items() if name != "bias"}
    layer = CASTS[cast](layer)
    assert {name: bits(x) for name, x in layer.state_dict().items() if name != "bias"} == kept
    assert layer.bias.dtype == layer.compute_dtype == DTYPES.get(cast, torch.bfloat16)
    x = wide(5, K).to(layer.bias.dtype)
    y = layer(x)
    assert y.dtype == layer.bias.dtype
    q = fp8core.quantize(original().weight, group_shape=WEIGHT_GROUPS[scheme])
    group = INPUT_GROUPS[scheme] if input_scale is None else PER_TENSOR
    assert bits(y) == bits(fp8core.linear(x, q, bias=layer.bias, input_scale=input_scale, group_shape=group))


@pytest.mark.parametrize("sparse", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr])
def test_inputs_that_are_not_strided_are_refused_in_words(sparse):
    with pytest.raises(LayoutError, match="x needs a strided tensor"):
        Linear.from_linear(nn.Linear(K, N))(sparse(torch.ones(2, K)))


@pytest.mark.parametrize(("bias", "dtype"), [(True, torch.float16), (False, torch.bfloat16)])
def test_a_pickle_of_layers_that_did_not_keep_their_dtype(bias, dtype):
    """They took it for that of the bias, else for bfloat16."""
    layer = Linear.from_linear(nn.Linear(K, N, bias, dtype=dtype))
    del layer.__dict__["compute_dtype"]
    again = pickle.loads(pickle.dumps(layer))
    assert again.compute_dtype == dtype
    assert again.to_linear().weight.dtype == dtype
    assert again.half().compute_dtype == torch.float16


@pytest.mark.parametrize("copied", [copy.deepcopy, saved, lambda layer: pickle.loads(pickle.dumps(layer))])
@kinds
def test_copies_are_equal_and_their_own(scheme, input_scale, copied):
    layer = quantized(scheme, input_scale)
    x = wide(5, K)
    y = layer(x)
    other = copied(layer)
    other_y = other(x)
    assert bits(other_y) == bits(y)
    layer.weight.view(torch.uint8).zero_()
    assert bits(other(x)) == bits(other_y)
    assert bits(layer(x)) != bits(y)


@kinds
def test_a_shallow_copy_shares_parameters_until_one_is_replaced(scheme, input_scale):
    layer, x = quantized(scheme, input_scale), wide(5, K)
    y = layer(x)
    other = copy.copy(layer)
    assert other.weight is layer.weight
    other.bias = nn.Parameter(torch.ones_like(layer.bias), requires_grad=False)
    other.use_fast_accum = False
    assert bits(layer(x)) == bits(y) != bits(other(x))
    assert layer.use_fast_accum


def test_a_pickle_has_the_memory_that_a_weight_has_by_then():
    layer = Linear.from_linear(nn.Linear(K, N))
    before = layer.__getstate__()["_parameters"]["weight"]
    assert layer.__getstate__()["_parameters"]["weight"] is before
    layer.weight.data = torch.zeros_like(before).view(layer.weight.dtype)
    assert not layer.__getstate__()["_parameters"]["weight"].any()


def test_a_weight_is_one_in_pickles_of_several_threads(monkeypatch):
    """While one looks for a weight's bytes, another begins; it has got some, or waits for the first, before that ends."""
    layer, found, there = Linear.from_linear(nn.Linear(K, N)), [], threading.Event()

    def pickled():
        found.append(layer.__getstate__()["_parameters"]["weight"])
        there.set()

    meanwhile = threading.Thread(target=pickled, daemon=True)

    class Bytes(WeakIdKeyDictionary):
        def get(self, *args):
            got = super().get(*args)
            if not meanwhile.ident:
                meanwhile.start()
                assert there.wait(30)
            return got

    class Held:
        lock = threading.RLock()

        def __enter__(self):
            if not self.lock.acquire(blocking=False):
                there.set()
                self.lock.acquire()

        def __exit__(self, *_):
            self.lock.release()

    monkeypatch.setattr(frozen, "_BYTES", Bytes())
    monkeypatch.setattr(frozen, "_LOCK", SimpleNamespace(held=Held()), raising=False)
    first = layer.__getstate__()["_parameters"]["weight"]
    meanwhile.join(30)
    assert found[0] is first


@pytest.mark.parametrize("assign", [False, True])
@kinds
def test_a_state_is_loaded_after_a_call(scheme, input_scale, assign):
    layer, x = quantized(scheme, input_scale), wide(5, K)
    blank = Linear(K, N, scheme=scheme, static=input_scale is not None, dtype=torch.bfloat16)
    assert not blank(x).any()  # zeros until a state is loaded
    state = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    blank.load_state_dict(state, assign=assign)
    assert bits(blank(x)) == bits(layer(x))
    assert not any(parameter.requires_grad for parameter in blank.parameters())


@kinds
def test_from_the_meta_device(scheme, input_scale):
    layer, x = quantized(scheme, input_scale), wide(5, K)
    with torch.device("meta"):
        empty = Linear(K, N, scheme=scheme, static=input_scale is not None, dtype=torch.bfloat16)
    assert empty.weight.is_meta
    filled = empty.to_empty(device="cpu")
    assert filled.weight.dtype == torch.float8_e4m3fn
    filled.load_state_dict(layer.state_dict())
    assert bits(filled(x)) == bits(layer(x))
    of_meta = Linear.from_linear(original().to("meta"), scheme=scheme, input_scale=input_scale)
    of_meta.load_state_dict(layer.state_dict(), assign=True)
    assert bits(of_meta(x)) == bits(layer(x))


def test_scales_as_other_programs_store_them():
    layer, x = quantized("tensor", 0.03125), wide(5, K)
    state = layer.state_dict()
    layer.weight_scale.fill_(0.015625)
    y = layer(x)
    state["weight_scale"] = torch.tensor(0.015625, dtype=torch.bfloat16)
    state["input_scale"] = torch.tensor(0.03125)
    for assign in (False, True):
        blank = Linear(K, N, scheme="tensor", static=True, dtype=torch.bfloat16)
        blank.load_state_dict(state, assign=assign)
        assert blank.weight_scale.dtype == torch.float32
        assert bits(blank(x)) == bits(y)


def test_a_weight_that_is_not_fp8_is_refused():
    layer = quantized("channel", None)
    before = bits(layer.weight)
    with pytest.raises(RuntimeError, match=r"weight needs torch.float8_e4m3fn, got torch.bfloat16: load before"):
        layer.load_state_dict(original().state_dict(), strict=False)
    assert bits(layer.weight) == before


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"scheme": "row"}, CheckpointError, "scheme needs one of"),
        ({"scheme": ["row"]}, CheckpointError, "scheme needs one of"),
        ({"scheme": "block", "static": True}, ScaleError, "static needs the scheme channel or tensor"),
        ({"weight_dtype": torch.float16}, DTypeError, "weight_dtype needs one of"),
    ],
)
def test_arguments_that_no_layer_takes_are_refused(options, error, words):
    with pytest.raises(error, match=words):
        Linear(K, N, **options)
    with pytest.raises(DTypeError, match="weight needs an array of float32, float16, bfloat16"):
        Linear.from_linear(nn.Linear(4, 4, dtype=torch.float64))
    with pytest.raises(DTypeError, match=r"linear needs a torch.nn.Linear, got Conv1d"):
        Linear.from_linear(nn.Conv1d(4, 4, 1))


@kinds
def test_symbolic_traces_are_refused_and_have_layers_as_leaves(scheme, input_scale):
    class Tracer(torch.fx.Tracer):
        def is_leaf_module(self, module, name):
            return isinstance(module, Linear) or super().is_leaf_module(module, name)

    model, x = nn.Sequential(quantized(scheme, input_scale), nn.ReLU()), wide(5, K)
    with pytest.raises(DTypeError, match=r"got a Proxy of torch\.fx, .* a Tracer whose is_leaf_module is true of"):
        torch.fx.symbolic_trace(model)
    assert bits(torch.fx.GraphModule(model, Tracer().trace(model))(x)) == bits(model(x))


@pytest.mark.parametrize("weight_dtype", ["float8_e5m2", torch.float8_e4m3fnuz])
def test_other_formats(weight_dtype):
    layer = Linear.from_linear(original(), weight_dtype=weight_dtype)
    q = fp8core.quantize(original().weight, dtype=weight_dtype)
    x = wide(5, K)
    assert bits(layer(x)) == bits(fp8core.linear(x, q, bias=original().bias.detach()))


def test_to_linear_is_the_way_back():
    layer = quantized("block", None)
    back = layer.to_linear()
    assert type(back) is nn.Linear
    assert torch.equal(back.weight, layer.dequantized(torch.bfloat16))
    assert torch.equal(back.bias, original().bias)
    assert back.weight.requires_grad


def test_the_representation_says_extents_scheme_and_format():
    assert repr(quantized("tensor", 0.03)) == (
        "Linear(in_features=256, out_features=64, bias=True, scheme=tensor, weight=float8_e4m3fn, static)"
    )
