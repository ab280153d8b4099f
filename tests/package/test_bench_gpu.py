"""The benchmarks' own measuring on a GPU: calls are captured and replayed, a layer is checked and timed."""

import pytest

pytestmark = pytest.mark.gpu

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("name", ["quantize tensor 1x256", "rms_norm_quant, residual 64x256", "Fp8Linear 16x384x256"])
def test_public_calls_are_captured_and_replayed(name):
    from bench.served import Served

    served = Served()
    assert served.gpu
    names = [call.name for call in served.list_of("gpu", short=True)]
    for case in (i for i, found in enumerate(names) if found.startswith(name)):
        assert served.prepare("gpu", case, short=True)["calls"] >= 64
        assert served.answer({"do": "time", "rounds": 2})["ms"] > 0
        assert served.answer({"do": "drop"}) == {}


def test_a_small_decoder_layer_is_right_and_timed(monkeypatch):
    from types import SimpleNamespace

    from bench import layer

    sizes = {"qkv": (384, 256), "o": (256, 256), "gate_up": (1024, 256), "down": (256, 512)}
    for name, value in {"HIDDEN": 256, "QKV": 384, "MLP": 512, "SIZES": sizes}.items():
        monkeypatch.setattr(layer, name, value)
    record = layer.measure(3, SimpleNamespace(vllm=None))
    assert record["wrong"] == {}
    assert set(record["us"]) == {"preallocated", "plain"}
