"""Layers of one input as one product: whose weights are moved behind each other, and what is computed then."""

import copy
import gc
from itertools import pairwise

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402 - after the skip
from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402

import fp8core  # noqa: E402
from fp8core.torch import Linear, compile_options, quantize_model_  # noqa: E402
from fp8core.torch.adjacent import ADJACENT, are_adjacent  # noqa: E402
from fp8core.torch.joining import LINEAR_JOINED, join_  # noqa: E402
from pytorch.tensors import bits, wide  # noqa: E402

K, WIDTH = 256, 1024


class Holder(nn.Module):
    """Layers of the given extents (n, k), called with slices of one input."""

    def __init__(self, *extents, scheme="channel", bias=(), input_scale=None):
        super().__init__()
        for at, (n, k) in enumerate(extents):
            linear = nn.Linear(k, n, at in bias, dtype=torch.bfloat16)
            with torch.no_grad():
                linear.weight.copy_(wide(n, k, seed=at) / k**0.5)
            self.add_module(f"l{at}", Linear.from_linear(linear, scheme=scheme, input_scale=input_scale))

    def forward(self, x):
        return [layer(x[..., : layer.in_features]) for layer in self.children()]


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize(
    ("holder", "joined"),
    [
        (lambda: Holder((256, K), (64, K), (64, K)), [("l0", "l1", "l2")]),
        (lambda: Holder((64, K), (64, 128), (32, K), (64, 128)), [("l0", "l2"), ("l1", "l3")]),
        (lambda: Holder((64, K), (64, K), (64, K), bias=(1,)), [("l0", "l2")]),
        (lambda: Holder((256, 1024), (128, 1024), (64, 1024), scheme="block"), [("l0", "l1", "l2")]),
        (lambda: Holder((128, 1024), (64, 1024), (128, 1024), scheme="block"), [("l0", "l1")]),
        (lambda: Holder((128, K), (128, K), scheme="block"), []),
        (lambda: Holder((1, 1024), (64, 1024), scheme="block"), []),
        (lambda: Holder((5, K), (64, K), (64, K)), [("l1", "l2")]),
        (lambda: Holder((8, K + 2), (64, K + 2)), []),
        (lambda: Holder(*[(64, K)] * 6), [("l0", "l1", "l2", "l3"), ("l4", "l5")]),
        (lambda: Holder((64, K)), []),
        (lambda: Holder((128, K), (128, K), scheme="tensor"), []),
        (lambda: Holder((64, K), (64, K), input_scale=0.03), []),
        (lambda: Holder((0, K), (64, K), (64, K)), [("l1", "l2")]),
        (lambda: Holder((64, K), (64, K)).to("meta"), []),
    ],
    ids=[
        "qkv",
        "extents",
        "bias",
        "blocks",
        "half-blocks",
        "few-blocks",
        "one row",
        "odd",
        "odd codes",
        "many",
        "one",
        "tensor",
        "static",
        "no rows",
        "meta",
    ],
)
def test_only_layers_that_one_product_can_replace_are_joined(holder, joined):
    model = holder()
    kept = {} if model.l0.weight.is_meta else {name: bits(x) for name, x in model.state_dict().items()}
    assert sorted(join_(model)) == joined
    for names in joined:
        layers = [model.get_submodule(name) for name in names]
        for one, other in pairwise(layers):
            assert other.weight.data_ptr() == one.weight.data_ptr() + one.weight.nbytes
            assert other.weight_scale.data_ptr() == one.weight_scale.data_ptr() + one.weight_scale.nbytes
    if kept:
        assert {name: bits(x) for name, x in model.state_dict().items()} == kept


def test_layers_go_on_and_moving_twice_moves_once():
    model, x = Holder((128, K), (64, K)), wide(3, K)
    before = bits(model(x))
    join_(model)
    assert bits(model(x)) == before
    places = [layer.weight.data_ptr() for layer in model.children()]
    assert join_(model) == (("l0", "l1"),)
    assert [layer.weight.data_ptr() for layer in model.children()] == places
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert bits(copy.deepcopy(model)(x)) == before
    for name in ("weight", "weight_scale"):
        setattr(model.l1, name, nn.Parameter(getattr(model.l1, name).clone(), requires_grad=False))
        assert join_(model) == (("l0", "l1"),)
        assert are_adjacent([getattr(layer, name) for layer in model.children()])
        assert bits(model(x)) == before


def test_a_weight_that_another_module_holds_stays():
    model = Holder((128, K), (64, K), (64, K))
    model.other = nn.Module()
    model.other.weight = model.l1.weight
    assert join_(model) == (("l0", "l2"),)
    assert model.other.weight is model.l1.weight


@pytest.mark.parametrize("name", ["weight_scale", "bias"])
def test_parameters_that_are_computed_stay(name):
    """In place of the parameter there is a module with what it is computed from."""
    model = Holder((128, K), (64, K), (64, K), bias=(1,) if name == "bias" else ())
    nn.utils.parametrize.register_parametrization(model.l1, name, nn.Identity())
    assert join_(model) == (("l0", "l2"),)
    assert nn.utils.parametrize.is_parametrized(model.l1, name)


@pytest.mark.parametrize("name", ["weight", "weight_scale"])
def test_parameters_of_other_classes_stay(name):
    """As those that FSDP shards."""

    class Sharded(torch.Tensor):
        pass

    model = Holder((128, K), (64, K), (64, K))
    own = getattr(model.l1, name).detach().as_subclass(Sharded)
    setattr(model.l1, name, nn.Parameter(own, requires_grad=False))
    assert join_(model) == (("l0", "l2"),)
    assert type(getattr(model.l1, name).data) is Sharded


@pytest.mark.parametrize("other", [{"weight_dtype": "float8_e5m2"}, {"scheme": "block"}], ids=str)
def test_layers_of_other_formats_or_scales_stay(other):
    model, x = Holder((128, 1024), (128, 1024), (64, 1024)), wide(3, 1024)
    model.l1 = Linear.from_linear(nn.Linear(1024, 128, bias=False), **other)
    before = bits(model(x))
    assert join_(model) == (("l0", "l2"),)
    assert bits(model(x)) == before


def test_a_weight_with_padded_rows_stays():
    model = Holder((128, K), (64, K), (64, K))
    padded = torch.empty(64, K + 16, dtype=torch.uint8).view(model.l1.weight.dtype)[:, :K]
    model.l1.weight = nn.Parameter(padded, requires_grad=False)
    assert join_(model) == (("l0", "l2"),)
    assert model.l1.weight.data_ptr() == padded.data_ptr()


def arguments(layers, x):
    options = [1, -1] if layers[0].scheme == "channel" else [1, 128]
    group = list(layers[0].weight_group_shape)
    return (
        x,
        [one.weight for one in layers],
        [one.weight_scale for one in layers],
        options,
        None,
        None,
        True,
        False,
        None,
        group,
    )


@pytest.mark.parametrize("scheme", ["channel", "block"])
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("shape", [(K,), (1, K), (5, K), (2, 3, K)], ids=str)
def test_the_operator_gives_the_bits_of_the_layers_wherever_their_memory_is(shape, apart, scheme):
    model, x = Holder((128, K), (256, K), scheme=scheme), wide(*shape)
    if not apart:
        join_(model)
    layers = list(model.children())
    made = LINEAR_JOINED(*arguments(layers, x))
    assert bits(made) == bits(torch.cat([layer(x) for layer in layers], -1))
    layers[1].weight_scale.mul_(2)  # in place: what is kept of the memory is not of its values
    assert bits(LINEAR_JOINED(*arguments(layers, x))) == bits(torch.cat([layer(x) for layer in layers], -1))
    for name in ("weight", "weight_scale"):  # each alone elsewhere
        setattr(layers[1], name, nn.Parameter(getattr(layers[1], name).clone(), requires_grad=False))
        assert bits(LINEAR_JOINED(*arguments(layers, x))) == bits(torch.cat([layer(x) for layer in layers], -1))
        if not apart:
            join_(model)
    for layer in layers:
        layer.weight = nn.Parameter(layer.weight.detach().view(torch.uint8).clone().view(layer.weight.dtype), False)
    assert bits(LINEAR_JOINED(*arguments(layers, x))) == bits(torch.cat([layer(x) for layer in layers], -1))


def test_results_of_the_operator_never_require_gradients():
    """As those of calls do not: the operator has none."""
    model, x = Holder((128, K), (256, K)), wide(3, K).requires_grad_()
    assert not LINEAR_JOINED(*arguments(list(model.children()), x)).requires_grad


def test_the_operator_reads_the_same_memory_as_the_weights_do():
    model, x = Holder((128, K), (128, K)), wide(3, K)
    join_(model)
    layers = list(model.children())
    LINEAR_JOINED(*arguments(layers, x))
    for layer in layers:  # the same addresses
        layer.weight.data = layer.weight.data.view(torch.float8_e5m2)
    assert bits(LINEAR_JOINED(*arguments(layers, x))) == bits(torch.cat([layer(x) for layer in layers], -1))
    codes = layers[0].weight.data.view(-1)
    for at, layer in enumerate(layers):  # as many rows, which are shorter
        layer.weight.data = codes[at * 64 * K : (at + 1) * 64 * K].view(128, K // 2)
    shorter = wide(3, K // 2)
    made = LINEAR_JOINED(*arguments(layers, shorter))
    apart = [fp8core.linear(shorter, layer.weight, layer.weight_scale) for layer in layers]
    assert bits(made) == bits(torch.cat(apart, -1))


def test_memory_of_joined_weights_goes_with_the_model():
    model, x = Holder((128, K), (64, K)), wide(3, K)
    join_(model)
    gc.collect()  # models of other tests
    layers, before = list(model.children()), len(ADJACENT)
    LINEAR_JOINED(*arguments(layers, x))
    memory = StorageWeakRef(layers[0].weight.untyped_storage())
    assert len(ADJACENT) == before + 2
    model._apply(torch.Tensor.clone)  # as any move: the parameters stay, and their memory is new
    assert len(ADJACENT) == before
    assert memory.expired()
    LINEAR_JOINED(*arguments(layers, x))
    join_(model)
    LINEAR_JOINED(*arguments(layers, x))
    assert len(ADJACENT) == before + 2
    del model, layers
    gc.collect()
    assert len(ADJACENT) == before


def test_the_joined_operator_passes_opcheck():
    layers = list(Holder((128, K), (64, K)).children())
    tests = "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"
    done = torch.library.opcheck(LINEAR_JOINED, arguments(layers, wide(5, K)), test_utils=tests)
    assert done == dict.fromkeys(tests, "SUCCESS")


class Attention(nn.Module):
    """Layers of one input whose results go different ways, in another order than they are made."""

    def __init__(self, scheme):
        super().__init__()
        self.layers = Holder((256, WIDTH), (128, WIDTH), (128, WIDTH), scheme=scheme)
        self.o = Holder((WIDTH, 256), scheme=scheme)

    def forward(self, x):
        x = nn.functional.rms_norm(x, (WIDTH,))
        q, k, v = self.layers(x)
        q = nn.functional.silu(q).view(*x.shape[:-1], 2, 128).transpose(0, 1).reshape(*x.shape[:-1], 256)
        (y,) = self.o(q + torch.cat((torch.tanh(v) * k, k), -1))
        return y


@pytest.mark.parametrize(
    ("way", "scheme"), [("joined", "channel"), ("joined", "block"), ("moved", "channel"), ("dynamic", "channel")]
)
def test_a_compiled_model_has_one_product(way, scheme):
    from torch._inductor.utils import run_and_get_code

    torch._dynamo.reset()
    model, x = Attention(scheme), wide(2, WIDTH)
    with torch.no_grad():
        plain = torch.compile(model, fullgraph=True)(x)
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True, dynamic=way == "dynamic", options=compile_options(model))
        found, (code,) = run_and_get_code(compiled, x)
        assert torch.equal(found, plain)
        assert code.count("linear_joined.default(") == code.count("fp8core.linear.default(") == 1
        if way == "moved":
            model._apply(torch.Tensor.clone)  # as any move
            assert not are_adjacent([layer.weight for layer in model.layers.children()])
            assert torch.equal(compiled(x), plain)
        assert (plain - model(x)).norm() < 0.05 * plain.norm()


def test_layers_that_differ_have_products_of_their_own():
    from torch._inductor.utils import run_and_get_code

    torch._dynamo.reset()
    model = Holder((128, K), (64, K), bias=(1,))
    model.l2 = Holder((64, K), scheme="block").l0
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, options=compile_options(model))
        found, (code,) = run_and_get_code(compiled, wide(3, K))
        assert bits(found) == bits(model(wide(3, K)))
    assert "linear_joined" not in code


class Functions(nn.Module):
    """Calls of `linear` with arrays that do not say their groups: a scale per channel, and one of another shape."""

    def __init__(self, rows, k, group):
        super().__init__()
        self.codes, self.scales = nn.ParameterList(), nn.ParameterList()
        for n, by, shape in ((128, (1, -1), (128, 1)), (rows, group, (-1, 1))):
            q = fp8core.quantize(wide(n, k, seed=n), group_shape=by)
            self.codes.append(nn.Parameter(q.data, requires_grad=False))
            self.scales.append(nn.Parameter(q.scale.reshape(shape), requires_grad=False))

    def forward(self, x):
        return [fp8core.linear(x, *pair) for pair in zip(self.codes, self.scales, strict=True)]


@pytest.mark.parametrize(("rows", "k", "group"), [(64, K, (-1, -1)), (256, 128, (128, 128))], ids=["tensor", "block"])
def test_functions_with_scales_of_different_kinds_have_products_of_their_own(rows, k, group):
    """Joined, their scales would be no scale of the joined weight: compiling raised ShapeError."""
    torch._dynamo.reset()
    model, x = Functions(rows, k, group), wide(3, k)
    with torch.no_grad():
        assert bits(torch.compile(model, fullgraph=True, options=compile_options(model))(x)) == bits(model(x))


def test_a_model_quantized_whole():
    model = nn.Sequential(nn.Linear(K, 64, bias=False, dtype=torch.bfloat16), nn.Linear(K, 64, bias=False))
    quantize_model_(model)
    assert join_(model) == (("0", "1"),)


def test_a_state_has_storages_of_its_own_over_the_same_memory(tmp_path):
    """Others tell tensors apart by their storages: accelerate kept the first of those joined, safetensors refused."""
    save_model = pytest.importorskip("safetensors.torch").save_model
    load_model = pytest.importorskip("safetensors.torch").load_model
    model, x = Holder((128, K), (64, K), (5, K)), wide(3, K)
    before = bits(model(x))
    assert join_(model)
    state = model.state_dict()
    for name, tensor in state.items():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes, name
        assert tensor.data_ptr() == model.get_parameter(name).data_ptr(), name
    torch.save(model.l1.state_dict(), tmp_path / "one.pt")
    assert (tmp_path / "one.pt").stat().st_size < 128 * K
    save_model(model, tmp_path / "model.safetensors")
    again = Holder((128, K), (64, K), (5, K))
    for parameter in again.parameters():
        parameter.view(torch.uint8).zero_()
    load_model(again, tmp_path / "model.safetensors")
    assert bits(again(x)) == before
    del model
    gc.collect()
    again.load_state_dict(state, assign=True)  # the memory lasts as long as the state
    assert bits(again(x)) == before


def test_a_state_taken_in_inference_mode_is_good_outside_of_it():
    model = Holder((128, K), (64, K))
    assert join_(model)
    with torch.inference_mode():
        state = model.state_dict()
    assert not any(x.is_inference() for x in state.values())
    model.load_state_dict(state, assign=True)
    model.l1.weight_scale.fill_(2)
    assert model.l1.weight_scale.eq(2).all()


def test_accelerate_saves_all_layers(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    safetensors = pytest.importorskip("safetensors.torch")
    model = Holder((128, K), (64, K))
    assert join_(model)
    accelerate.Accelerator(cpu=True).save_model(model, tmp_path)
    saved = safetensors.load_file(tmp_path / "model.safetensors")
    assert {name: bits(x) for name, x in saved.items()} == {name: bits(x) for name, x in model.state_dict().items()}
