"""`fp8core inspect`, `verify` and `convert`: what they print, and their exit status."""

import json

import pytest
from rich.console import Console

from fp8core.checkpoint.formats.naming import TITLES
from fp8core.cli import terminal
from support.checkpoints import left_in
from support.command_line import (
    fp8core_,  # noqa: F401
    rows,
)

torch = pytest.importorskip("torch")
from safetensors.torch import load_file, save_file  # noqa: E402

from support import checkpoint_formats as written  # noqa: E402
from support.checkpoint_formats import FORMATS, small_state, write_format  # noqa: E402

Q = "model.layers.0.self_attn.q_proj"


@pytest.fixture
def source(tmp_path):
    write_format(written.deepseek, tmp_path / "in")
    return tmp_path / "in"


def damage(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def on_a_terminal(monkeypatch, command):
    monkeypatch.setattr(command, "console", Console(force_terminal=True, width=160, color_system=None))


def test_inspect_prints_a_table_of_layers_and_one_of_the_rest(fp8core_, tmp_path):
    write_format(written.modelopt, tmp_path / "in")
    code, out, err = fp8core_("inspect", tmp_path / "in")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith(f"{tmp_path}/in: ModelOpt, 1 file, 20")
    assert lines[1] == (
        "hf_quant_config.json says: FP8, one scale per tensor, static activations, a KV cache of FP8, "
        "1 pattern of layers that are not quantized"
    )
    layer = "model.layers.*.mlp.down_proj"
    assert rows(out) == [
        ["3", "e4m3fn", "tensor, float32", "static", "180 kB", layer],
        ["2", "F32", "8 bytes", "model.layers.*.self_attn.k_proj.k_scale"],
        ["3", "BF16", "26.6 kB", "model.embed_tokens.weight"],
    ]
    assert lines[-2:] == [
        "2 scales of the KV cache",
        "The headers and the configuration agree; `fp8core verify` also checks the numbers.",
    ]


@pytest.mark.parametrize("writer", FORMATS, ids=lambda writer: writer.__name__)
def test_inspect_names_every_format(fp8core_, tmp_path, writer):
    write_format(writer, tmp_path / "in")
    code, out, err = fp8core_("inspect", tmp_path / "in")
    name, granularity, kind = FORMATS[writer]
    assert (code, err) == (0, "")
    assert out.splitlines()[0].startswith(f"{tmp_path}/in: {TITLES[name]}, 1 file, ")
    count, codes, scales, *_ = rows(out)[0]
    assert (count, codes) == ("3", "e4m3fn")
    assert scales.startswith(granularity)
    assert scales.endswith(f", {kind}")


def test_inspect_tells_faults_and_reads_no_numbers(fp8core_, source):
    damage(source, lambda tensors: tensors.pop(f"{Q}.weight_scale_inv"))
    code, out, err = fp8core_("inspect", source)
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == f"scale missing: {Q}.weight of model.safetensors needs a scale, got none"


def test_inspect_of_an_unquantized_file_claims_nothing(fp8core_, tmp_path):
    save_file(small_state(), tmp_path / "a.safetensors")
    code, out, _ = fp8core_("inspect", tmp_path / "a.safetensors")
    assert code == 0
    assert out.splitlines()[0] == f"{tmp_path}/a.safetensors: not quantized, 1 file, 387 kB"
    assert "agree" not in out
    assert "says" not in out


def test_inspect_names_the_shape_of_blocks_not_that_of_channels(fp8core_, tmp_path):
    write_format(written.ct_block, tmp_path / "a")
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    channel = written.compressed({"strategy": "channel"}, {"strategy": "token", "dynamic": True})
    config["quantization_config"]["config_groups"]["group_1"] = channel["config_groups"]["group_0"]
    (tmp_path / "a" / "config.json").write_text(json.dumps(config))
    said = fp8core_("inspect", tmp_path / "a")[1].splitlines()[1]
    assert said.startswith("config.json says: float-quantized, one scale per block of 128x128 or channel, ")


def test_inspect_of_a_file_names_the_configuration_beside_it(fp8core_, tmp_path):
    save_file(small_state(), tmp_path / "a.safetensors")
    assert fp8core_("quantize", tmp_path / "a.safetensors", tmp_path / "b.safetensors")[0] == 0
    (tmp_path / "config.json").write_text("{}")
    lines = fp8core_("inspect", tmp_path / "b.safetensors")[1].splitlines()
    assert lines[1].startswith("b.config.json says: float-quantized, one scale per channel, ")
    assert lines[-1].startswith("The headers and the configuration agree; ")
    (tmp_path / "b.config.json").replace(tmp_path / "elsewhere.json")
    lines = fp8core_("inspect", tmp_path / "b.safetensors")[1].splitlines()
    assert lines[1].startswith("No configuration: names ")
    assert lines[-1] == "The headers show no fault; `fp8core verify` also checks the numbers."


def test_inspect_json_is_one_object(fp8core_, source):
    code, out, err = fp8core_("inspect", source, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert (found["format"], found["claim"]["group_shape"], found["layers"][0]["number"]) == ("fp8", [128, 128], 3)
    assert not found["faults"]


def test_verify_has_status_0_without_faults_and_1_with_them(fp8core_, source):
    code, out, err = fp8core_("verify", source)
    assert (code, out, err) == (0, f"{source}: no fault in 3 FP8 layers (fp8)\n", "")
    damage(source, lambda tensors: tensors[f"{Q}.weight"].view(torch.uint8)[3].fill_(0x7F))
    code, out, err = fp8core_("verify", source)
    assert (code, err) == (1, "")
    assert out.splitlines() == [
        f"NaN code\t{Q}.weight\t{Q}.weight needs numbers, but 200 codes are NaN",
        f"{source}: 1 fault in 3 FP8 layers (fp8)",
    ]


def test_verify_refuses_what_has_nothing_to_verify(fp8core_, tmp_path):
    path = tmp_path / "a.safetensors"
    weight = torch.ones(64, 64)
    save_file({"up.weight": weight}, path)
    for more in ((), ("--against", path)):
        code, out, err = fp8core_("verify", path, *more)
        assert (code, out) == (1, "")
        assert err == f"error: {path} needs FP8 weights to be verified, got none: quantize makes them\n"
    save_file({"up.weight": weight, "up.weight_scale": torch.ones(64, 1)}, path)
    code, out, err = fp8core_("verify", path)
    assert (code, err) == (1, "")
    assert out.splitlines()[-1] == f"{path}: 1 fault in 0 FP8 layers (unquantized)"


def test_verify_looks_at_scales_of_caches_beside_weights_that_are_not_fp8(fp8core_, tmp_path):
    path = tmp_path / "a.safetensors"
    names = [f"model.layers.0.self_attn.{part}" for part in ("k_scale", "v_scale")]
    for scale, status, said in ((0.5, 0, "no fault"), (-1.0, 1, "2 faults")):
        save_file({"up.weight": torch.ones(64, 64), **{name: torch.full((1,), scale) for name in names}}, path)
        code, out, err = fp8core_("verify", path)
        assert (code, err) == (status, "")
        where = "2 scales of the KV cache and no FP8 layer (unquantized)"
        assert out.splitlines()[-1] == f"{path}: {said} in {where}"


def test_verify_on_a_terminal_prints_a_table(capsys, monkeypatch, source):
    from fp8core.cli import verify

    damage(source, lambda tensors: tensors.pop(f"{Q}.weight_scale_inv"))
    on_a_terminal(monkeypatch, verify)
    with pytest.raises(verify.typer.Exit) as left:
        verify.verify(source)
    assert left.value.exit_code == 1
    assert rows(capsys.readouterr().out) == [
        ["scale missing", f"{Q}.weight of model.safetensors needs a scale, got none"]
    ]


def test_verify_against_the_original_says_how_far_it_is(fp8core_, tmp_path, source):
    save_file(small_state(), tmp_path / "bf16.safetensors")
    code, out, _ = fp8core_("verify", source, "--against", tmp_path / "bf16.safetensors")
    assert code == 0
    assert out.startswith(f"Relative to {tmp_path}/bf16.safetensors, FP8 weights differ by 2.6")


def test_convert_counts_one_weight_as_one(fp8core_, tmp_path):
    save_file({"layers.0.up_proj.weight": torch.randn(64, 64)}, tmp_path / "a.safetensors")
    assert fp8core_("quantize", tmp_path / "a.safetensors", tmp_path / "b.safetensors", "--scheme", "tensor")[0] == 0
    _, out, _ = fp8core_("convert", tmp_path / "b.safetensors", tmp_path / "c.safetensors", "--to", "channel")
    assert "\n1 FP8 weight keeps its codes and values.\n" in out


def test_convert_says_what_it_did(fp8core_, tmp_path, source):
    code, out, err = fp8core_("convert", source, tmp_path / "block", "--to", "block")
    assert (code, err) == (0, "")
    assert "\n3 FP8 weights keep their codes and values.\n" in out
    assert out.endswith(f"{tmp_path}/block/config.json has the quantization_config.\n")
    code, out, err = fp8core_("convert", source, tmp_path / "out")
    assert (code, err) == (0, "")
    assert "3 FP8 weights became bfloat16: float32(code) * scale, rounded once.\n" in out
    code, out, err = fp8core_(
        "convert", source / "model.safetensors", tmp_path / "comfy.safetensors", "--to", "comfyui", "--lossy"
    )
    assert (code, err) == (0, "")
    assert "3 FP8 weights requantized: the added error is 2." in out
    assert out.endswith("The file itself describes its quantization.\n")


def test_convert_refuses_what_loses_and_lists_it(fp8core_, tmp_path, source):
    arguments = "convert", source, tmp_path / "out", "--to", "channel"
    code, out, err = fp8core_(*arguments)
    assert (code, out) == (1, "")
    assert err == (
        "error: converting model.layers.0.mlp.down_proj.weight needs lossy (--lossy), as it has to be requantized: "
        "one scale per block of 128x128 becomes one per channel (2 more weights: see --dry-run or plan_conversion)\n"
    )
    code, out, err = fp8core_(*arguments, "--dry-run")
    assert (code, err) == (1, "")
    assert f"requantized\t{Q}.weight\tone scale per block of 128x128 becomes one per channel\n" in out
    assert out.endswith("3 FP8 weights: 3 need --lossy: nothing would be written\n")
    code, out, _ = fp8core_(*arguments, "--dry-run", "--lossy")
    assert code == 0
    assert "bytes become" in out
    assert left_in(tmp_path) == ["in"]


def test_a_dry_run_on_a_terminal_is_a_table(capsys, monkeypatch, source):
    from fp8core.cli import convert

    on_a_terminal(monkeypatch, convert)
    with pytest.raises(convert.typer.Exit):
        convert.convert(source, to="tensor", dry_run=True)
    cells = rows(capsys.readouterr().out)
    assert [row[1:] for row in cells] == [
        ["1", "requantized: one scale per block of 128x128 becomes one per tensor"]
    ] * 3
    assert cells[2][0] == "model.layers.*.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--fn", "--fnuz"], "Invalid value for '--fnuz': needs one of --fn and --fnuz, got both"),
        (["--to", "deepseek", "--block", f"{'9' * 5000}x128"], "'--block': needs two numbers up to 2**31 - 1 such as"),
        (["--to", "bfloat16"], "Invalid value for '--to': "),
        ([], "Invalid value for 'TARGET': needs a file or folder to write, or --dry-run, got none"),
    ],
)
def test_arguments_that_cannot_be_meant_have_status_2(fp8core_, tmp_path, source, arguments, said):
    target = [tmp_path / "out"] if arguments else []
    code, _, err = fp8core_("convert", source, *target, *arguments)
    assert code == 2
    assert said in " ".join(err.replace("│", " ").split())


def test_progress_becomes_lines_in_a_log(fp8core_, monkeypatch, tmp_path, source):
    monkeypatch.setattr(terminal, "LINE_EVERY", 1)
    _, _, err = fp8core_("convert", source, tmp_path / "out")
    lines = err.splitlines()
    assert 3 <= len(lines) <= 10
    assert all(line.startswith("converting: ") and "% of " in line for line in lines)
    _, _, err = fp8core_("verify", source)
    assert [line.split(":")[0] for line in err.splitlines()] == ["verifying"] * 3


@pytest.mark.parametrize(
    ("nbytes", "shown"),
    [(0, "0 bytes"), (999, "999 bytes"), (1000, "1 kB"), (999_499, "999 kB"), (999_600, "1 MB"), (6.71e11, "671 GB")],
)
def test_sizes_are_short(nbytes, shown):
    assert terminal.size(int(nbytes)) == shown
