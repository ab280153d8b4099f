"""Blocks of other sizes, for ranks whose parts begin inside of blocks of 128x128: exact where they lie in the old ones."""

import json

import pytest

from fp8core.checkpoint import convert_checkpoint, open_checkpoint, plan_conversion, verify_checkpoint
from fp8core.errors import CheckpointError

torch = pytest.importorskip("torch")
from safetensors.torch import load_file  # noqa: E402

from support import checkpoint_formats as written  # noqa: E402
from support.checkpoint_formats import small_state, write_format  # noqa: E402
from support.converted import numbers_of  # noqa: E402

RANKS = 4


@pytest.mark.parametrize(("to", "scale"), [("deepseek", "weight_scale_inv"), ("block", "weight_scale")])
@pytest.mark.parametrize("writer", [written.deepseek, written.deepseek_v4, written.ct_block])
def test_every_rank_has_the_scales_of_its_rows(tmp_path, writer, to, scale):
    out = write_format(writer, tmp_path / "in", small_state(352, 200))  # 88 rows a rank
    done = convert_checkpoint(tmp_path / "in", tmp_path / "out", to=to, block_shape=(8, 128))
    assert not done.lossy
    found = load_file(tmp_path / "out" / "model.safetensors")
    for name, wide in out.expected.items():
        codes, scales = found[name], found[name.replace("weight", scale)].float()
        assert torch.equal(codes.view(torch.uint8), out.tensors[name].view(torch.uint8))
        parts = [
            written.values(*one, 8, 128)
            for one in zip(codes.chunk(RANKS), scales.chunk(RANKS), strict=True)  # as a reader divides them
        ]
        assert torch.equal(torch.cat(parts), wide)
    opened = open_checkpoint(tmp_path / "out")
    assert {layer.group_shape for layer in opened.layers.values()} == {(8, 128)}
    assert opened.claim.group_shape == (8, 128)
    assert not verify_checkpoint(tmp_path / "out").faults


def test_blocks_of_fewer_columns_keep_the_codes_and_convert_back(tmp_path):
    out = write_format(written.deepseek, tmp_path / "in", small_state(256, 384))  # 96 columns a rank
    assert not convert_checkpoint(tmp_path / "in", tmp_path / "fine", to="deepseek", block_shape=(128, 32)).lossy
    config = json.loads((tmp_path / "fine" / "config.json").read_text())["quantization_config"]
    assert config["weight_block_size"] == [128, 32]
    found = load_file(tmp_path / "fine" / "model.safetensors")
    for name, wide in out.expected.items():
        scale = found[name.replace("weight", "weight_scale_inv")]
        parts = [written.values(*one, 128, 32) for one in zip(found[name].chunk(4, 1), scale.chunk(4, 1), strict=True)]
        assert torch.equal(torch.cat(parts, 1), wide)
    back = convert_checkpoint(tmp_path / "fine", tmp_path / "back", to="deepseek", block_shape=(128, 128))
    assert not back.lossy
    for name, one in load_file(tmp_path / "back" / "model.safetensors").items():
        assert torch.equal(one, out.tensors[name]), name


@pytest.mark.parametrize("to", ["deepseek", "block"])
@pytest.mark.parametrize("writer", [written.ct_channel, written.ct_mxfp8])
def test_blocks_of_one_row_stay_blocks(tmp_path, writer, to):
    """As their configuration calls them; scales alone would be those of groups."""
    out = write_format(writer, tmp_path / "in", small_state(256, 384))
    assert not convert_checkpoint(tmp_path / "in", tmp_path / "rows", to=to, block_shape=(1, 32)).lossy
    opened = open_checkpoint(tmp_path / "rows")
    assert {(layer.granularity, layer.group_shape) for layer in opened.layers.values()} == {("block", (1, 32))}
    assert opened.claim.group_shape == (1, 32)
    assert not verify_checkpoint(tmp_path / "rows").faults
    for again in ("deepseek", "block", "compressed-tensors"):
        assert not convert_checkpoint(tmp_path / "rows", tmp_path / again, to=again).lossy
        assert {layer.group_shape for layer in open_checkpoint(tmp_path / again).layers.values()} == {(1, 32)}
        found = numbers_of(tmp_path / again)
        assert found.keys() == out.expected.keys()
        assert all(torch.equal(found[name], wide) for name, wide in out.expected.items())


def test_blocks_across_old_ones_are_made_anew(tmp_path):
    write_format(written.deepseek, tmp_path / "in")
    assert len(plan_conversion(tmp_path / "in", to="block", block_shape=(96, 128)).lossy) == 3
    done = convert_checkpoint(tmp_path / "in", tmp_path / "out", to="block", block_shape=(96, 128), lossy=True)
    assert 0 < max(done.errors.values()) < 0.03
    assert not verify_checkpoint(tmp_path / "out").faults


def test_modelopt_which_has_no_word_for_their_size_gets_those_of_128(tmp_path):
    write_format(written.deepseek, tmp_path / "in")
    convert_checkpoint(tmp_path / "in", tmp_path / "fine", to="deepseek", block_shape=(64, 64))
    assert not convert_checkpoint(tmp_path / "fine", tmp_path / "back", to="modelopt").lossy
    convert_checkpoint(tmp_path / "in", tmp_path / "other", to="deepseek", block_shape=(96, 96), lossy=True)
    with pytest.raises(CheckpointError, match="needs lossy"):
        convert_checkpoint(tmp_path / "other", tmp_path / "out", to="modelopt")
    convert_checkpoint(tmp_path / "other", tmp_path / "out", to="modelopt", lossy=True)
    for folder in ("back", "out"):
        assert {layer.group_shape for layer in open_checkpoint(tmp_path / folder).layers.values()} == {(128, 128)}
        assert not verify_checkpoint(tmp_path / folder).faults


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"to": "channel", "block_shape": (32, 128)}, r"block_shape \(--block\) needs to be left out for channel"),
        ({"to": "modelopt", "block_shape": (32, 128)}, r"block_shape \(--block\) needs to be left out for modelopt"),
        ({"to": "block", "block_shape": (0, 128)}, "block_shape needs a pair of whole numbers from 1 to 2"),
        ({"to": "block", "block_shape": (True, 128)}, "block_shape needs a pair of whole numbers from 1 to 2"),
        ({"to": "block", "block_shape": (1, 10**20)}, "block_shape needs a pair of whole numbers from 1 to 2"),
        ({"to": "block", "block_shape": 128}, "block_shape needs a pair of whole numbers from 1 to 2"),
        ({"to": "block", "e4m3": ["fn"]}, r"e4m3 needs one of fn, fnuz, got \['fn'\]"),
    ],
)
def test_block_shapes_that_do_not_fit_are_refused(tmp_path, options, words):
    write_format(written.deepseek, tmp_path / "in")
    with pytest.raises(CheckpointError, match=words):
        plan_conversion(tmp_path / "in", **options)
