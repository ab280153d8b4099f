"""`fp8core tune`: what it takes, what it tells on a terminal and in a log, and what its file has when it was stopped."""

import re

import ml_dtypes
import numpy as np
import pytest
from rich.console import Console

from fp8core import timing
from fp8core.checkpoint import quantize_checkpoint, tune_checkpoint
from fp8core.checkpoint.shapes.linear import LayerShape, layers_of
from fp8core.checkpoint.shapes.tuning import products_of
from fp8core.cli import terminal, tune
from fp8core.errors import CheckpointError, ScaleError, ShapeError
from fp8core.kernels.gemm.table import SCALED_MM
from fp8core.tuning import load_tunings, measuring, shapes
from fp8core.tuning.files import load_named
from ops.test_tuning import stub  # noqa: F401
from support.blaslt_fixtures import built  # noqa: F401
from support.checkpoints import model, normal, write
from support.command_line import rows, runner


@pytest.fixture
def fp8core_(capsys, monkeypatch, stub, tmp_path):
    """The command line on a machine with two H200, on which the second candidate is always the fastest."""
    monkeypatch.setattr(measuring, "refuse_captures", lambda *_: None)
    monkeypatch.setattr(shapes, "refuse_captures", lambda *_: None)
    monkeypatch.setenv("FP8CORE_TUNINGS", str(tmp_path / "tunings"))
    monkeypatch.setattr(SCALED_MM, "before", load_named)

    def times(p, launches):
        return [9.0, 4.5] + [20.0] * (len(launches) - 2)

    monkeypatch.setattr(timing, "times", times)
    return runner(capsys, monkeypatch)


def test_shapes_are_tuned_told_and_kept(fp8core_, tmp_path):
    out = tmp_path / "out.jsonl"
    code, said, log = fp8core_("tune", "--shapes", "96,97x512x1024", "--shapes", "96x512x2048", "--out", out)
    assert code == 0, log
    assert re.findall(r"(\d/\d \d+x512x\d+): (.*)", log) == [
        ("1/3 96x512x1024", "cublaslt algorithm 1: 4.50 us, 100.0% gained"),
        ("2/3 97x512x1024", "cublaslt algorithm 1: 4.50 us, 100.0% gained"),
        ("3/3 96x512x2048", "cublaslt algorithm 1: 4.50 us, 100.0% gained"),
    ]
    assert f"3 products tuned, saved in {out}\n" in said
    assert rows(said)[0] == ["96x512x1024", "row x row", "cublaslt", "9.00", "cublaslt algorithm 1", "4.50", "100.0%"]
    assert [(one.m, one.n, one.k) for one in load_tunings(out)] == [(96, 512, 1024), (97, 512, 1024), (96, 512, 2048)]


def test_a_product_that_no_candidate_could_compute_is_shown(fp8core_, monkeypatch):
    monkeypatch.setattr(timing, "times", lambda _, launches: [float("inf")] * len(launches))
    code, said, log = fp8core_("tune", "--shapes", "96x512x1024")
    assert (code, "1/1 96x512x1024: cublaslt: inf us" in log) == (0, True), log
    assert rows(said)[0] == ["96x512x1024", "row x row", "cublaslt", "inf", "cublaslt", "inf", "0.0%"]


def test_a_default_that_could_not_run_is_shown_as_such(fp8core_, monkeypatch):
    monkeypatch.setattr(timing, "times", lambda _, launches: [float("inf"), 9.0, 4.5] + [9.0] * (len(launches) - 3))
    _, said, log = fp8core_("tune", "--shapes", "96x512x1024")
    assert "1/1 96x512x1024: cublaslt_relayout: 4.50 us, inf% gained" in log
    assert rows(said)[0] == ["96x512x1024", "row x row", "cublaslt", "inf", "cublaslt_relayout", "4.50", "inf%"]


def test_what_the_file_has_is_not_tuned_again(fp8core_, tmp_path):
    arguments = "tune", "--shapes", "96,97x512x1024"
    assert fp8core_(*arguments)[0] == 0
    code, said, log = fp8core_(*arguments, "--shapes", "98x512x1024")
    assert (code, "1/1 98x512x1024" in log) == (0, True)
    assert f"{tmp_path}/tunings has 2 products already: --again retunes them\n" in said
    code, said, log = fp8core_(*arguments, "--again")
    assert (code, "2/2 97x512x1024" in log, "already" in said) == (0, True, False)


def test_the_layers_of_a_model_are_tuned_for_each_number_of_rows(fp8core_, tmp_path):
    tensors = {
        "a.weight": normal(64, 128),
        "a.bias": normal(64),
        "b.weight": normal(64, 128),
        "c.weight": normal(64, 128),
    }
    write(tmp_path / "in.safetensors", tensors)
    code, said, log = fp8core_("tune", tmp_path / "in.safetensors", "--rows", "70,80", "--scheme", "tensor")
    assert code == 0, log
    assert f"{tmp_path}/in.safetensors: 3 weights of 2 shapes, 2 numbers of rows each\n" in said
    found = load_tunings()
    assert [(one.m, one.n, one.k, one._problem.bias) for one in found] == [
        (70, 64, 128, "bfloat16"),
        (80, 64, 128, "bfloat16"),
        (70, 64, 128, ""),
        (80, 64, 128, ""),
    ]
    assert {one.scales for one in found} == {("tensor", "tensor")}


@pytest.mark.parametrize(
    ("out", "said"),
    [("thesis", "which holds something else"), ("folder", "it is a directory"), ("thesis/x", "Not a directory")],
)
def test_where_the_file_cannot_be_written_nothing_is_timed(fp8core_, monkeypatch, tmp_path, out, said):
    monkeypatch.setattr(timing, "times", None)
    (tmp_path / "thesis").write_text("of three years")
    (tmp_path / "folder").mkdir()
    code, _, log = fp8core_("tune", "--shapes", "96x512x1024", "--out", tmp_path / out)
    assert (code, said in log) == (1, True), log
    assert (tmp_path / "thesis").read_text() == "of three years"
    assert {one.name for one in tmp_path.rglob("*")} == {"thesis", "folder"}  # and no lock


def test_an_interrupt_keeps_what_is_done(fp8core_, monkeypatch, tmp_path):
    done = []

    def times(p, launches):
        done.append(p)
        if len(done) == 3:
            raise KeyboardInterrupt
        return [1.0] * len(launches)

    monkeypatch.setattr(timing, "times", times)
    with pytest.raises(KeyboardInterrupt):
        tune.tune(None, ["70,71,72,73x512x1024"], None, "channel", "bfloat16", tmp_path / "x", again=False)
    assert [one.m for one in load_tunings(tmp_path / "x")] == [70, 71]


def test_what_is_done_is_saved_from_time_to_time(fp8core_, monkeypatch, tmp_path):
    monkeypatch.setattr(tune, "SAVED_AFTER", 0.0)
    had, out = [], tmp_path / "x"

    def times(p, launches):
        had.append(len(out.read_text().splitlines()) if out.exists() else 0)
        return [1.0] * len(launches)

    monkeypatch.setattr(timing, "times", times)
    assert fp8core_("tune", "--shapes", "70,71,72x512x1024", "--out", out)[0] == 0
    assert had == [0, 1, 2]  # all that a run has lost if it is killed now is what it is timing
    assert [one.m for one in load_tunings(out)] == [70, 71, 72]


def test_a_checkpoint_is_tuned_from_python_as_well(fp8core_, monkeypatch, tmp_path):
    monkeypatch.delenv("FP8CORE_TUNINGS")
    write(tmp_path / "in.safetensors", model())
    quantize_checkpoint(tmp_path / "in.safetensors", tmp_path / "out.safetensors", scheme="tensor")
    told = []
    found = tune_checkpoint(tmp_path / "out.safetensors", (70, 80), progress=lambda *args: told.append(args))
    layers = layers_of(tmp_path / "out.safetensors")
    assert [(one.m, one.n, one.k) for one in found] == [(m, layer.n, layer.k) for layer in layers for m in (70, 80)]
    assert {one.scales for one in found} == {("tensor", "tensor")}  # as it is scaled, not as it might have been
    assert [(tuning, done, total) for tuning, done, total in told] == [
        (one, i, len(found)) for i, one in enumerate(found, 1)
    ]


def test_a_terminal_has_a_bar(fp8core_, monkeypatch):
    watched = Console(stderr=True, force_terminal=True, width=120)
    for module in (tune, terminal):
        monkeypatch.setattr(module, "errors", watched)
    code, _, log = fp8core_("tune", "--shapes", "96x512x1024")
    assert code == 0
    assert "tuning" in log
    assert "1/1 96x512x1024:" not in log


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "needs a model or --shapes, got neither"),
        (("--shapes", "1x2"), "needs m x n x k as in 1,16x4096x4096, got '1x2'"),
        (("--shapes", "0x2x2"), "needs numbers from 1 to 2**31 - 1, separated by commas, got '0'"),
        (("--shapes", "1x2147483648x2"), "separated by commas, got '2147483648'"),
        (("--shapes", f"{'9' * 5000}x2x2"), "separated by commas, got '999"),
        (("--shapes", "1x2x2", "--rows", "9" * 5000), "separated by commas, got '999"),
        (("--shapes", "1x2x2", "--rows", "16"), "'--rows': needs MODEL, as --shapes have numbers of rows, got none"),
        (("--shapes", "ax2x2"), "got 'a'"),
    ],
)
def test_what_cannot_be_meant_is_refused(fp8core_, arguments, said):
    code, _, err = fp8core_("tune", *arguments)
    assert code == 2
    assert said in re.sub(r"[│\s]+", " ", err)


def test_without_a_gpu_it_says_so_alone(fp8core_, monkeypatch, tmp_path):
    from fp8core.runtime import device

    monkeypatch.setattr(device, "count", lambda: 0)
    monkeypatch.setattr(device, "why_none", lambda: "no driver")
    write(tmp_path / "in.safetensors", model())
    code, said, err = fp8core_("tune", tmp_path / "in.safetensors")
    assert (code, said, err) == (1, "", "error: tune needs a GPU, whose kernels it times, got none: no driver\n")
    assert not SCALED_MM._tuned


@pytest.mark.parametrize("scheme", ["channel", "tensor", "block"])
def test_layers_are_those_that_are_quantized_and_then_those_that_were(tmp_path, scheme):
    write(tmp_path / "in.safetensors", model())
    wide = layers_of(tmp_path / "in.safetensors", scheme)
    assert {layer.scheme for layer in wide} == {scheme}
    quantize_checkpoint(tmp_path / "in.safetensors", tmp_path / "out.safetensors", scheme=scheme)
    assert layers_of(tmp_path / "out.safetensors") == wide


@pytest.mark.parametrize("scheme", ["static", "mxfp8", "rows", None])
def test_a_scheme_that_products_lack_is_refused(tmp_path, scheme):
    write(tmp_path / "in.safetensors", model())
    quantize_checkpoint(tmp_path / "in.safetensors", tmp_path / "fp8.safetensors")
    for name in ("in", "fp8"):
        with pytest.raises(ScaleError, match="scheme needs one of channel, tensor, block, got "):
            tune_checkpoint(tmp_path / f"{name}.safetensors", scheme=scheme)


def test_layers_of_other_makes_and_of_none(tmp_path):
    e4m3 = np.zeros((256, 256), ml_dtypes.float8_e4m3fn)
    for more in ({}, {"x.activation_scale": np.ones((), np.float32)}):  # which products by blocks do not have
        write(tmp_path / "a.safetensors", {"x.weight": e4m3, "x.weight_scale_inv": np.ones((2, 2), np.float32), **more})
        assert layers_of(tmp_path / "a.safetensors") == {LayerShape(256, 256, "block"): ["x.weight"]}
    write(tmp_path / "b.safetensors", {"x.weight": e4m3, "x.weight_scale": np.ones((3, 2), np.float32)})
    with pytest.raises(
        CheckpointError, match=r"x\.weight_scale of b\.safetensors needs a shape and dtype that fit a granularity"
    ):
        layers_of(tmp_path / "b.safetensors")
    write(tmp_path / "c.safetensors", {"x.weight": e4m3})
    with pytest.raises(CheckpointError, match=r"x\.weight of c\.safetensors needs a scale, got none"):
        layers_of(tmp_path / "c.safetensors")
    write(tmp_path / "d.safetensors", {"norm": normal(4)})
    with pytest.raises(CheckpointError, match=r"has no linear layer$"):
        layers_of(tmp_path / "d.safetensors")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="holds no safetensors file"):
        layers_of(tmp_path / "empty")


def test_layers_have_the_format_and_the_static_scale_of_the_file(tmp_path):
    codes, one = np.zeros((256, 128), ml_dtypes.float8_e5m2), np.ones(1, np.float32)
    layers = {"a.weight": codes, "a.weight_scale": one, "a.input_scale": one, "b.weight": codes, "b.weight_scale": one}
    write(tmp_path / "a.safetensors", layers)
    dynamic = LayerShape(256, 128, "tensor", weight_dtype="float8_e5m2")
    found = layers_of(tmp_path / "a.safetensors")
    assert found == {dynamic._replace(static=True): ["a.weight"], dynamic: ["b.weight"]}
    write(
        tmp_path / "b.safetensors",
        {"a.weight": codes, "a.weight_scale": np.ones((256, 1), np.float32), "a.input_scale": one},
    )
    (product,) = products_of(layers_of(tmp_path / "b.safetensors"), [16], "bfloat16", device="sm_90")
    assert (product.scale_a, product.scale_b) == ("tensor", "row")


@pytest.mark.parametrize("count", [16, None, "16", [0], [-1], [1 << 31], [1.5], [None], np.array(16)], ids=repr)
def test_rows_of_a_checkpoint_are_whole_numbers(tmp_path, count):
    write(tmp_path / "in.safetensors", model())
    with pytest.raises(ShapeError, match=r"rows needs whole numbers from 1 to 2\*\*31 - 1, got "):
        tune_checkpoint(tmp_path / "in.safetensors", count)
