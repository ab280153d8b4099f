"""Scales of static quantization from runs of a model: the largest magnitudes, and percentiles."""

import math

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402 - after the skip

import fp8core  # noqa: E402
from fp8core.errors import ScaleError  # noqa: E402
from fp8core.torch import calibrate, quantize_model_  # noqa: E402
from pytorch.models import model, tokens  # noqa: E402
from pytorch.tensors import bits, wide  # noqa: E402


def test_static_scales_from_runs():
    made = model()
    seen = {}

    def keep(name):
        def hook(_layer, args):
            seen.setdefault(name, []).append(args[0].abs().max().item())

        return hook

    hooks = [
        made.first.up.register_forward_pre_hook(keep("first.up")),
        made.second.down.register_forward_pre_hook(keep("second.down")),
    ]
    batches = [tokens(1), (tokens(2),), {"tokens": tokens(3)}]
    with torch.no_grad():
        for batch in (tokens(1), tokens(2), tokens(3)):
            made(batch)
    for hook in hooks:
        hook.remove()

    scales = calibrate(made, batches)
    assert set(scales) == {"first.up", "first.down", "second.up", "second.down"}  # `unused` saw nothing
    for name, largest in seen.items():
        assert scales[name] == max(largest) / 448
    assert not any(module._forward_pre_hooks for module in made.modules())

    layer = made.first.up
    report = quantize_model_(made, input_scales=scales)
    assert report.quantized == ("first.up", "first.down", "second.up", "second.down", "unused")
    assert made.unused.input_scale is None
    x = wide(5, 64, dtype=torch.float32)
    q = fp8core.quantize(layer.weight)
    assert bits(made.first.up(x)) == bits(
        fp8core.linear(x, q, bias=layer.bias.detach(), input_scale=scales["first.up"], group_shape=fp8core.PER_TENSOR)
    )


@pytest.mark.parametrize("percentile", [1e-9, 50, 99, 99.9, 100])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_percentile_is_the_magnitude_that_so_many_do_not_exceed(percentile, dtype):
    made = nn.Sequential(nn.Linear(64, 8, dtype=dtype))
    batches = [wide(rows, 64, dtype=dtype, seed=rows) * rows for rows in (3, 17, 1)]
    batches.insert(1, batches[0][:0])  # an expert that gets no token
    found = calibrate(made, batches, method="percentile", percentile=percentile)["0"] * 448
    ordered = sorted(abs(x) for batch in batches for x in batch.flatten().tolist())
    exact = ordered[max(math.ceil(len(ordered) * percentile / 100), 1) - 1]
    assert exact <= found <= exact * (1 + 2**-7)
    if dtype is torch.bfloat16:
        assert found == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize(("percentile", "outliers"), [(99.9, 41), (99.99, 4), (0.1, 40959)])
def test_a_percentile_leaves_out_as_many_as_its_decimal_says(percentile, outliers):
    x = torch.ones(41000)
    x[:outliers] = 64
    made = torch.nn.Sequential(torch.nn.Linear(41, 1))
    found = calibrate(made, [x.view(1000, 41)], method="percentile", percentile=percentile)
    assert found == {"0": 1 / 448}


def test_percentiles_of_zeros_and_of_nothing_are_left_out():
    made = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    assert calibrate(made[:1], [torch.zeros(4, 8)], method="percentile") == {}
    assert calibrate(made, [], method="percentile") == {}
    assert calibrate(made, [torch.zeros(0, 8)], method="percentile") == {}
    mostly = torch.zeros(1000, 8)
    mostly[0, 0] = 5
    assert calibrate(made[:1], [mostly], method="percentile", percentile=99) == {}
    assert calibrate(made[:1], [mostly], method="percentile", percentile=100) == {"0": 5 / 448}


def test_inputs_too_small_for_a_scale_are_left_out():
    """1e-44 / 448 is below half of float32's least number."""
    made = nn.Sequential(nn.Linear(8, 8))
    found = calibrate(made, [torch.full((1, 8), 1e-44)])
    assert found == {}
    quantize_model_(made, input_scales=found)
    least = calibrate(nn.Sequential(nn.Linear(8, 8)), [torch.full((1, 8), 1e-42)])
    quantize_model_(nn.Sequential(nn.Linear(8, 8)), input_scales=least)
    assert least.keys() == {"0"}


@pytest.mark.parametrize("bits_of", [0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0x7F800000, 0xFF800000], ids=hex)
def test_percentiles_do_not_hide_what_is_not_finite(bits_of):
    """NaNs of all payloads (GPUs make 0x7fffffff), and infinities, in one batch of two."""
    made = nn.Sequential(nn.Linear(8, 8))
    x = torch.ones(1000, 8)
    x.view(torch.int32)[3, 4] = bits_of - (bits_of >> 31 << 32)
    with pytest.raises(ScaleError, match=r"calibrate needs finite inputs, got (nan|inf) in 0"):
        calibrate(made, [x, x[:3]], method="percentile", percentile=50)


def test_the_largest_magnitude_may_be_negative_and_a_batch_empty():
    made = nn.Sequential(nn.Linear(8, 8))
    x = torch.ones(2, 8)
    x[1, 3] = -4
    assert calibrate(made, [x, x[:0], x / 2]) == {"0": 4 / 448}


def test_a_model_runs_without_gradients_takes_a_list_as_one_argument_and_may_give_inputs_by_name():
    class ByName(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Linear(8, 8)

        def forward(self, pair):
            assert not torch.is_grad_enabled()
            first, second = pair
            return self.up(input=first + second)

    assert calibrate(ByName(), [[torch.ones(2, 8), torch.ones(8)]]) == {"up": 2 / 448}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"method": "mean"}, "method needs one of max, percentile, got 'mean'"),
        ({"percentile": 99.9}, "percentile needs method='percentile', got method='max'"),
        ({"method": "percentile", "percentile": 0}, "percentile needs a number above 0 and at most 100, got 0"),
        ({"method": "percentile", "percentile": 100.1}, "got 100.1"),
        ({"method": "percentile", "percentile": "99"}, "percentile needs a number above 0 and at most 100, got '99'"),
    ],
)
def test_methods_of_calibration_that_are_none(options, words):
    with pytest.raises(ScaleError, match=words):
        calibrate(nn.Sequential(nn.Linear(8, 8)), [torch.ones(1, 8)], **options)


@pytest.mark.parametrize("batches", [None, 5, len, "one text", b"12"], ids=repr)
def test_what_holds_no_batches_is_refused(batches):
    got = type(batches).__name__
    with pytest.raises(ScaleError, match=f"^batches needs an iterable of batches, got {got}$"):
        calibrate(nn.Sequential(nn.Linear(4, 4)), batches)


def test_a_dataset_is_taken():
    class Batches(torch.utils.data.Dataset):
        def __getitem__(self, at):
            return [torch.full((1, 4), 448.0)][at]

    assert calibrate(nn.Sequential(nn.Linear(4, 4)), Batches()) == {"0": 1.0}


def test_one_batch_of_keyword_arguments_is_no_list_of_batches():
    with pytest.raises(ScaleError, match="batches needs an iterable of batches, got a mapping, which is one batch"):
        calibrate(nn.Sequential(nn.Linear(8, 8)), {"input": torch.ones(1, 8)})


@pytest.mark.parametrize("method", ["max", "percentile"])
def test_torch_s_default_device_does_not_matter(method):
    made, x = nn.Sequential(nn.Linear(8, 8)), wide(3, 8, dtype=torch.float32)
    wanted = calibrate(made, [x], method=method)
    with torch.device("meta"):
        assert calibrate(made, [x], method=method) == wanted


def test_a_compiled_model_that_has_run_is_calibrated_like_any_other():
    torch._dynamo.reset()
    made, x = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8)), torch.randn(5, 32)
    wanted = calibrate(made, [x])
    assert wanted.keys() == {"0", "2"}
    compiled = torch.compile(made, backend="eager")
    with torch.no_grad():
        compiled(x)
    assert calibrate(compiled, [x]) == {f"_orig_mod.{name}": scale for name, scale in wanted.items()}
    made.compile(backend="eager")
    with torch.no_grad():
        made(x)
    assert calibrate(made, [x]) == wanted


def test_calibrating_goes_away_when_the_model_fails():
    made = model()
    with pytest.raises(TypeError):
        calibrate(made, [(1, 2, 3)])
    assert not any(module._forward_pre_hooks for module in made.modules())


def test_inputs_that_are_not_finite_are_named():
    made = nn.Sequential(nn.Linear(8, 8))
    with pytest.raises(ScaleError, match="calibrate needs finite inputs, got nan in 0"):
        calibrate(made, [torch.full((1, 8), float("nan")), torch.ones(1, 8)])
