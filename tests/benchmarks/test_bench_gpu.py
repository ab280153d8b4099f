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


def test_the_short_benchmark_has_the_time_of_a_call_and_of_its_kernels():
    from fp8core import bench

    case = next(bench.cases(16, 256))
    timing = bench.timed(case, 0.02)
    assert timing.call > 0
    assert timing.gpu > 0
    assert case.kernel == "tensorwise"


def test_a_small_decoder_layer_is_right_and_timed(monkeypatch):
    from types import SimpleNamespace

    from bench import decoder, layer

    small = {"tokens": decoder.Model(256, 384, 256, 512), "blocks": decoder.Model(256, 384, 640, 512, blocks=True)}
    monkeypatch.setattr(layer, "MODELS", small)
    for name, model in small.items():
        weights = [decoder.Weights(model, wide=True) for _ in range(2)]
        record = layer.measure(name, 3, weights, SimpleNamespace(vllm=None))
        assert record["wrong"] == {}
        assert set(record["us"]) == {"preallocated", "plain", "torch"}
