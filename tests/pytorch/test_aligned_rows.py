"""Weights of odd k: rows at multiples of 16 bytes, kept through all that a module goes through, in no file.

On the CPU codes are packed; here its devices are treated as those of a GPU are.
"""

import copy
import pickle

import pytest

torch = pytest.importorskip("torch")

from functorch.compile import make_boxed_func  # noqa: E402 - after the skip
from torch import nn  # noqa: E402
from torch._dynamo.backends.common import aot_autograd  # noqa: E402

import fp8core  # noqa: E402
from fp8core.errors import LayoutError  # noqa: E402
from fp8core.torch import GroupedLinear, Linear, aligned, quantize_model_  # noqa: E402
from fp8core.torch.compiling import join_by_input  # noqa: E402
from fp8core.torch.joining import LINEAR, LINEAR_JOINED, join_  # noqa: E402
from pytorch.tensors import bits, saved, wide  # noqa: E402

N, K = 24, 250
schemes = pytest.mark.parametrize("scheme", ["channel", "tensor", "block"])


def original(k=K):
    made = nn.Linear(k, N, dtype=torch.bfloat16)
    with torch.no_grad():
        made.weight.copy_(wide(N, k, seed=1))
        made.bias.copy_(wide(N, seed=4))
    return made


@pytest.fixture
def packed():
    """Return what makes a layer without gaps, as it is on the CPU."""
    made = {scheme: Linear.from_linear(original(), scheme=scheme) for scheme in ("channel", "tensor", "block")}
    assert all(layer.weight.is_contiguous() for layer in made.values())
    return made


@pytest.fixture
def gaps(packed, monkeypatch):
    """Let the CPU be a device with gaps; return layers without."""
    monkeypatch.setattr(aligned, "PACKED_ON", ("meta",))
    return packed


def with_gaps(layer):
    return layer.weight.shape == (N, K) and layer.weight.stride() == (256, 1) and type(layer.weight) is nn.Parameter


def from_empty(layer):
    made = Linear(K, N, scheme=layer.scheme, dtype=torch.bfloat16, device="meta").to_empty(device="cpu")
    made.load_state_dict(layer.state_dict())
    return made


def from_state(layer, assign):
    made = Linear(K, N, scheme=layer.scheme, dtype=torch.bfloat16)
    made.load_state_dict({name: x.clone() for name, x in layer.state_dict().items()}, assign=assign)
    return made


WAYS = {
    "from_linear": lambda layer: Linear.from_linear(original(), scheme=layer.scheme),
    "in inference mode": lambda layer: torch.inference_mode()(Linear.from_linear)(original(), scheme=layer.scheme),
    "loaded": lambda layer: from_state(layer, False),
    "assigned": lambda layer: from_state(layer, True),
    "assigned in inference mode": lambda layer: torch.inference_mode()(from_state)(layer, True),
    "emptied": from_empty,
    "moved": lambda layer: layer.to("cpu"),
    "cast": lambda layer: layer.half().bfloat16(),
    "deepcopy": copy.deepcopy,
    "pickle": lambda layer: pickle.loads(pickle.dumps(layer)),
    "torch.save": saved,
    "twice": lambda layer: copy.deepcopy(copy.deepcopy(layer)),
}


@pytest.mark.parametrize("way", WAYS)
@schemes
def test_rows_are_aligned_and_bits_stay(gaps, scheme, way):
    before, x = gaps[scheme], wide(5, K)
    wanted, state = bits(before(x)), bits(list(before.state_dict().values()))
    layer = WAYS[way](before)
    assert with_gaps(layer)
    assert bits(layer(x)) == wanted
    assert bits(list(layer.state_dict().values())) == state
    with torch.inference_mode():
        assert bits(layer.to_linear().weight) == bits(before.to_linear().weight)


@schemes
def test_a_state_is_packed_and_loads_where_rows_are(gaps, scheme):
    safetensors = pytest.importorskip("safetensors.torch")
    layer, x = Linear.from_linear(original(), scheme=scheme), wide(5, K)
    state = layer.state_dict()
    assert all(tensor.is_contiguous() for tensor in state.values())
    assert state["bias"].data_ptr() == layer.bias.data_ptr()
    assert layer.state_dict(keep_vars=True)["weight"] is layer.weight
    for made in (gaps[scheme], Linear.from_linear(original(), scheme=scheme)):
        made.weight.view(torch.uint8).zero_()
        made.load_state_dict(safetensors.load(safetensors.save(state)))
        assert bits(made(x)) == bits(layer(x))
    even = Linear.from_linear(original(256))
    assert even.state_dict()["weight"].data_ptr() == even.weight.data_ptr()


def test_a_parameter_that_two_layers_share_stays_one(gaps):
    first = gaps["channel"]
    second = Linear.from_linear(original())
    second.weight = first.weight
    both = nn.ModuleList([first, second]).to("cpu")
    assert both[0].weight is both[1].weight
    assert with_gaps(both[0])
    assert bits(both[1](wide(5, K))) == bits(both[0](wide(5, K)))


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
def test_a_parameter_that_two_layers_share_is_one_in_copies(gaps, way):
    first = gaps["channel"]
    second = Linear.from_linear(original())
    second.weight, second.weight_scale = first.weight, first.weight_scale
    both, held = nn.ModuleList([first, second]), []
    for _ in range(2):  # the second time after the weight has moved to other memory, while somebody holds a state
        made = WAYS[way](both)
        assert made[0].weight is made[1].weight
        assert made[0].weight is not first.weight
        assert made[0].weight_scale is made[1].weight_scale
        assert with_gaps(made[0])
        with torch.no_grad():
            made[0].weight.view(torch.uint8).zero_()
        assert bits(made[1](wide(5, K))) == bits(made[1].bias.expand(5, N).contiguous())
        assert first(wide(5, K)).any()
        held.append(first.__getstate__())
        first.weight.data = Linear.from_linear(original()).weight.data.clone(memory_format=torch.preserve_format)
        both.to("cpu")


def test_a_deep_copy_keeps_a_weight_that_another_module_holds():
    layer, holder = Linear.from_linear(original()), nn.Module()
    holder.weight = layer.weight
    made = copy.deepcopy(nn.ModuleList([layer, holder]))
    assert made[0].weight is made[1].weight
    assert made[0].weight is not layer.weight


def test_a_shallow_copy_shares_its_parameters():
    layer, x = Linear.from_linear(original()), wide(5, K)
    made = copy.copy(layer)
    assert made.weight is layer.weight
    assert bits(made(x)) == bits(layer(x))
    made.weight = Linear.from_linear(original()).weight
    assert made.weight is not layer.weight


@schemes
def test_what_is_written_in_place_is_seen(gaps, scheme):
    layer, x = Linear.from_linear(original(), scheme=scheme), wide(5, K)
    assert layer(x).any()
    with torch.no_grad():
        layer.weight.view(torch.uint8).zero_()
    assert bits(layer(x)) == bits(layer.bias.expand(5, N).contiguous())


@schemes
def test_compiled_and_differentiated(gaps, scheme):
    torch._dynamo.reset()
    layer = Linear.from_linear(original(), scheme=scheme)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x, twin, grad = wide(5, K).requires_grad_(), wide(5, K).requires_grad_(), wide(5, N, seed=9)
    assert bits(compiled(x)) == bits(gaps[scheme](twin))
    compiled(x).backward(grad)
    gaps[scheme](twin).backward(grad)
    assert bits(x.grad) == bits(twin.grad)


def exported(layer):
    rows = torch.export.Dim("rows", min=2, max=4096)
    return torch.export.export(nn.Sequential(layer), (wide(5, K),), dynamic_shapes=({0: rows},))


def test_layers_are_exported_where_rows_are_packed(gaps, tmp_path):
    """Files of torch.export have no room for gaps where weights are copied to the CPU to be saved."""
    layer = Linear.from_linear(original())
    said = r"weight needs rows without gaps in torch\.export, .* for k = 250"
    with pytest.raises(LayoutError, match=said):
        exported(layer)
    with pytest.raises(Exception, match=said):
        torch.export.export(nn.Sequential(layer), (wide(5, K),), strict=True)
    torch._dynamo.reset()
    with torch.inference_mode():
        assert bits(torch.compile(layer, fullgraph=True, backend="eager")(wide(7, K))) == bits(layer(wide(7, K)))
    program = exported(gaps["channel"])
    torch.export.save(program, tmp_path / "layer.pt2")
    for one in (program, torch.export.load(tmp_path / "layer.pt2")):
        assert bits(one.module()(wide(7, K))) == bits(layer(wide(7, K)))


def test_grouped_layers_are_exported_where_rows_are_packed(monkeypatch):
    wide_weights, offs = torch.stack([original().weight.detach()] * 2), torch.tensor([2, 5], dtype=torch.int32)
    without = GroupedLinear.from_weight(wide_weights)
    monkeypatch.setattr(aligned, "PACKED_ON", ("meta",))
    layer = GroupedLinear.from_weight(wide_weights)
    assert layer.weight.stride() == (N * 256, 256, 1)
    assert bits(layer(wide(5, K), offs)) == bits(without(wide(5, K), offs))
    with pytest.raises(LayoutError, match=r"weight needs rows without gaps in torch\.export, .* for k = 250"):
        torch.export.export(layer, (wide(5, K), offs))


def test_such_layers_are_not_joined(gaps):
    model = nn.Sequential(*(nn.Linear(k, 64, bias=False) for k in (K, K, 256, 256))).bfloat16()
    quantize_model_(model)
    assert join_(model) == (("2", "3"),)
    assert model[0].weight.stride() == (256, 1)
    operators = []

    def compiler(module, inputs):
        join_by_input(module.graph)
        operators.extend(node.target for node in module.graph.nodes if node.target in (LINEAR, LINEAR_JOINED))
        module.recompile()
        return make_boxed_func(module.forward)

    def call(x):
        y = x[:, :K]
        return model[0](y), model[2](x), model[1](y), model[3](x)

    with torch.no_grad():
        got = torch.compile(call, fullgraph=True, backend=aot_autograd(fw_compiler=compiler))(wide(5, 256))
        assert bits(got) == bits(call(wide(5, 256)))
    assert sorted(map(str, operators)) == sorted(map(str, (LINEAR, LINEAR, LINEAR_JOINED)))


def test_sharded_and_empty_weights_are_left_alone(gaps):
    class Other(torch.Tensor):
        pass

    weight = nn.Parameter(gaps["channel"].weight.detach().as_subclass(Other), requires_grad=False)
    aligned.align_rows_(weight)
    assert weight.stride() == (K, 1)
    assert Linear(K, 0).weight.shape == (0, K)
    assert Linear(0, N).weight.shape == (N, 0)
    assert Linear(K, N, device="meta").weight.is_contiguous()


@pytest.mark.gpu
@schemes
def test_a_gpu_has_gaps_and_the_bits_of_an_array_s_layer(scheme):
    packed = Linear.from_linear(original(), scheme=scheme)
    here = Linear.from_linear(original().cuda(), scheme=scheme)
    x = wide(5, K).cuda()
    weight, bias = (parameter.detach() for parameter in original().cuda().parameters())
    groups = {"weight_group_shape": here.weight_group_shape, "group_shape": here.group_shape}
    wanted = bits(fp8core.Fp8Linear.from_weight(weight, bias=bias, **groups)(x).cpu())
    for layer in (here, copy.deepcopy(packed).cuda(), copy.deepcopy(here), from_state(packed, False).cuda()):
        assert with_gaps(layer)
        assert bits(layer(x).cpu()) == wanted
        assert all(tensor.is_contiguous() for tensor in layer.state_dict().values())
        assert bits(list(layer.cpu().state_dict().values())) == bits(list(packed.state_dict().values()))
        assert layer.weight.is_contiguous()
