"""MXFP8, written by convert and by quantize: exact from powers of two, read by compressed-tensors' own code."""

import json

import pytest

from fp8core.checkpoint import (
    convert_checkpoint,
    open_checkpoint,
    plan_checkpoint,
    plan_conversion,
    quantize_checkpoint,
    verify_checkpoint,
)
from fp8core.errors import CheckpointError

torch = pytest.importorskip("torch")
from safetensors.torch import load_file, save_file  # noqa: E402

from support import checkpoint_formats as written  # noqa: E402
from support.checkpoint_formats import small_state, write_format  # noqa: E402

TARGETS = "mxfp8", "modelopt-mxfp8"
Q = "model.layers.0.self_attn.q_proj"


def state():
    """Weights whose k is a multiple of 32, in blocks that are not whole."""
    return small_state(300, 224)


def expanded(tensors, name):
    """What an MXFP8 weight stands for, from the bytes of the file."""
    scale = tensors[f"{name}_scale"]
    assert scale.dtype == torch.uint8
    return tensors[name].float() * torch.exp2(scale.float() - 127).repeat_interleave(32, 1)


@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize("writer", [written.deepseek_powers, written.deepseek_v4, written.mxfp8, written.ct_mxfp8])
def test_powers_of_two_keep_their_codes(tmp_path, writer, to):
    out = write_format(writer, tmp_path / "in", state())
    done = convert_checkpoint(tmp_path / "in", tmp_path / "out", to=to)
    assert not done.lossy
    found = load_file(tmp_path / "out" / "model.safetensors")
    for name, wide in out.expected.items():
        assert torch.equal(found[name].view(torch.uint8), out.tensors[name].view(torch.uint8))
        assert found[f"{name}_scale"].shape == (300, 7)
        assert torch.equal(expanded(found, name), wide)
    opened = open_checkpoint(tmp_path / "out")
    assert opened.format == ("compressed-tensors" if to == "mxfp8" else "modelopt")
    assert {layer.group_shape for layer in opened.layers.values()} == {(1, 32)}
    assert not verify_checkpoint(tmp_path / "out").faults


@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize("writer", [written.deepseek, written.ct_channel, written.ct_static, written.ct_block])
def test_other_scales_are_made_anew_and_cost_what_a_second_rounding_costs(tmp_path, writer, to):
    out = write_format(writer, tmp_path / "in", state())
    with pytest.raises(CheckpointError, match="scales become powers of two"):
        convert_checkpoint(tmp_path / "in", tmp_path / "out", to=to)
    done = convert_checkpoint(tmp_path / "in", tmp_path / "out", to=to, lossy=True)
    found = load_file(tmp_path / "out" / "model.safetensors")
    for name, wide in out.expected.items():
        error = float((expanded(found, name) - wide).norm() / wide.norm())
        assert error == pytest.approx(done.errors[name], rel=1e-4)
        assert 0 < error < 0.04
    assert not any("input_scale" in name for name in found)
    assert not verify_checkpoint(tmp_path / "out").faults


@pytest.mark.parametrize("writer", [written.mxfp8, written.ct_mxfp8, written.modelopt_mxfp8])
def test_formats_keep_mxfp8(tmp_path, writer):
    write_format(writer, tmp_path / "in", state())
    for to, format_name in (("compressed-tensors", "compressed-tensors"), ("modelopt", "modelopt")):
        assert not convert_checkpoint(tmp_path / "in", tmp_path / to, to=to).lossy
        assert open_checkpoint(tmp_path / to).format == format_name


def test_what_readers_read_in_the_configuration(tmp_path):
    write_format(written.deepseek_powers, tmp_path / "in", state())
    convert_checkpoint(tmp_path / "in", tmp_path / "ct", to="mxfp8")
    convert_checkpoint(tmp_path / "in", tmp_path / "mo", to="modelopt-mxfp8")
    config = json.loads((tmp_path / "ct" / "config.json").read_text())["quantization_config"]
    assert config["format"] == "mxfp8-quantized"
    group = config["config_groups"]["group_0"]
    for part, dynamic in (("weights", False), ("input_activations", True)):
        assert group[part] == {
            "num_bits": 8, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32,
            "scale_dtype": "torch.uint8", "dynamic": dynamic,
        }  # fmt: skip
    said = json.loads((tmp_path / "mo" / "hf_quant_config.json").read_text())["quantization"]
    assert said["quant_algo"] == "MXFP8"


def test_compressed_tensors_reads_what_is_written(tmp_path):
    compressors = pytest.importorskip("compressed_tensors.compressors")
    schemes = pytest.importorskip("compressed_tensors.quantization")
    if not hasattr(compressors, "MXFP8QuantizationCompressor"):
        pytest.skip("this compressed-tensors has no MXFP8")
    out = write_format(written.deepseek_powers, tmp_path / "in", state())
    convert_checkpoint(tmp_path / "in", tmp_path / "out", to="mxfp8")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    scheme = schemes.QuantizationScheme(**config["config_groups"]["group_0"])
    assert compressors.MXFP8QuantizationCompressor.can_compress(torch.nn.Linear, scheme)
    found = load_file(tmp_path / "out" / "model.safetensors")
    for name, wide in out.expected.items():
        given = {"weight": found[name], "weight_scale": found[f"{name}_scale"]}
        read = compressors.MXFP8QuantizationCompressor.decompress(given, scheme)["weight"]
        assert torch.equal(read.float(), wide.to(read.dtype).float())


def test_quantize_makes_it_of_unquantized_weights(tmp_path):
    (tmp_path / "in").mkdir()
    tensors = state()
    save_file(tensors, tmp_path / "in" / "model.safetensors")
    (tmp_path / "in" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    summary = quantize_checkpoint(tmp_path / "in", tmp_path / "out", scheme="mxfp8")
    assert summary.quantization_config["format"] == "mxfp8-quantized"
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert len(summary.quantized) == 3
    for name in summary.quantized:
        wide = tensors[name].float()
        error = (expanded(found, name) - wide).norm() / wide.norm()
        assert 0 < error < 0.03
        largest = found[name].float().reshape(300, 7, 32).abs().amax(2)
        assert ((largest >= 224) & (largest <= 448)).all()  # the least power of two that does
    assert not verify_checkpoint(tmp_path / "out", against=tmp_path / "in").faults


def test_shapes_and_options_that_mxfp8_lacks_are_refused(tmp_path):
    write_format(written.deepseek_powers, tmp_path / "in")  # k of 200
    with pytest.raises(CheckpointError, match=r"_proj.weight needs k that is a multiple of 32 for mxfp8, got 200"):
        convert_checkpoint(tmp_path / "in", tmp_path / "out", to="mxfp8", lossy=True)
    for options, words in (
        ({"scales": "ue8m0"}, "scales needs to be left out, or ue8m0_bytes, for mxfp8"),
        ({"e4m3": "fnuz"}, r"e4m3 needs fn \(--fn\) for mxfp8"),
    ):
        with pytest.raises(CheckpointError, match=words):
            convert_checkpoint(tmp_path / "in", tmp_path / "out", to="mxfp8", **options)
    save_file({"up.weight": torch.ones(64, 40)}, tmp_path / "odd.safetensors")
    (verdict,) = plan_checkpoint(tmp_path / "odd.safetensors", scheme="mxfp8").verdicts
    assert verdict.reason == "scheme mxfp8 needs k in multiples of 32, got 40"
    save_file({"up.weight": torch.full((64, 64), float("inf"))}, tmp_path / "inf.safetensors")
    with pytest.raises(CheckpointError, match="needs finite values"):
        quantize_checkpoint(tmp_path / "inf.safetensors", tmp_path / "out.safetensors", scheme="mxfp8")


def test_scales_that_no_byte_stands_for_are_not_rounded_away(tmp_path):
    codes = torch.ones(64, 64).to(torch.float8_e4m3fn)
    tensors = {"up.weight": codes, "up.weight_scale": torch.tensor(2.0**-140)}
    save_file(tensors, tmp_path / "in.safetensors")
    with pytest.raises(CheckpointError, match=r"scales below 2\*\*-127 have no exponent byte"):
        convert_checkpoint(tmp_path / "in.safetensors", tmp_path / "out.safetensors", to="mxfp8")
    assert not plan_conversion(tmp_path / "in.safetensors", to="channel", scales="ue8m0").lossy
