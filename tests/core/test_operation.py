"""The one call path: what a cached call may serve, and what is refused before anything is written."""

import gc
import tracemalloc
from threading import Thread
from weakref import WeakSet

import numpy as np
import pytest

import fp8core
from fp8core import PER_TENSOR
from fp8core.core import calls, operation
from fp8core.core.calls import Described, NewArray, Planned
from fp8core.core.explaining import explanation_of
from fp8core.core.operation import Operation
from fp8core.ops import all_close
from fp8core.ops.linear import LINEAR_CALLS
from support.engines import fresh, fresh_fp8, fresh_scale

torch = pytest.importorskip("torch")


class Recorder:
    """An operation on x and out that notes what was described and launched."""

    def __init__(self) -> None:
        self.described, self.launched = [], []
        self.run = Operation(("x", "out"), self.describe)

    def describe(self, operands, options):
        self.described.append((operands, options))
        results = {1: NewArray(operands[0].shape, operands[0].dtype)}
        return Described(results, lambda: Planned(lambda *arguments: self.launched.append(arguments)), lambda: "said")


def at(offset, count=8):
    """Return fp32 numbers at an address that ``offset`` bytes follow one divisible by 64."""
    raw = torch.zeros(64 + 4 * count + 64, dtype=torch.uint8)
    start = -raw.data_ptr() % 64 + offset
    return raw[start : start + 4 * count].view(torch.float32)


def test_each_alignment_of_each_operand_is_a_call_of_its_own():
    recorder = Recorder()
    pairs = [(0, 0), (8, 0), (0, 8), (8, 8), (16, 0), (0, 16), (4, 16), (16, 4)]
    for _ in range(3):
        for one, two in pairs:
            recorder.run((at(one), at(two)), None)
    seen = [tuple(spec.alignment for spec in operands) for operands, _ in recorder.described]
    assert seen == [(min(one or 32, 32), min(two or 32, 32)) for one, two in [(a & -a, b & -b) for a, b in pairs]]


def test_a_framework_may_be_imported_while_another_thread_makes_a_call(monkeypatch):
    """The import of its sub-package adds a stand-in, as a first array of JAX does."""

    def imported(kind, found):
        kind["later"] = lambda *_: None
        return found

    first = {"first": lambda *_: imported(Operation.stand_ins, None)}
    monkeypatch.setattr(Operation, "stand_ins", first)
    monkeypatch.setattr(all_close, "READING", {"first": lambda flag: imported(all_close.READING, None)})
    assert fp8core.all_close_1d(np.ones(3, np.float32))
    assert len(Operation.stand_ins) == len(all_close.READING) == 2


def test_operations_may_be_made_while_another_thread_drops_the_calls_of_all(monkeypatch):
    """The import of fp8core.w8a8 makes some."""
    one, made = Operation(("x",), None), []
    importing = Thread(target=lambda: made.append(Operation(("x",), None)))

    class Interrupted(WeakSet):
        def __iter__(self):
            for item in super().__iter__():
                importing.start()
                importing.join(0.2)
                yield item

    one.cache.by_specs["key"] = "call"
    monkeypatch.setattr(operation, "_ALL", Interrupted([one]))
    operation.forget()
    importing.join(30)
    assert len(one) == 0
    assert len(operation._ALL) == 2


def test_a_plan_sees_no_address_and_a_launch_sees_those_of_its_call():
    recorder = Recorder()
    for _ in range(3):
        x, out = at(0), at(0)
        recorder.run((x, out), None)
        assert recorder.launched[-1] == (0, x.data_ptr(), out.data_ptr())
    assert len(recorder.described) == 1
    assert not any(isinstance(field, int) and field > 1 << 20 for spec in recorder.described[0][0] for field in spec)


def test_options_that_cannot_be_hashed_are_described_each_time():
    recorder = Recorder()
    for _ in range(2):
        recorder.run((at(0), None), [1])
    assert len(recorder.described) == 2
    assert len(recorder.launched) == 2


def test_a_failed_description_or_launch_leaves_nothing_behind():
    def describe(operands, options):
        if options == "describe":
            raise fp8core.ShapeError("x needs another shape, got this one")

        def launch(*arguments):
            if options == "launch":
                raise fp8core.BackendError("launching failed")

        return Described({1: NewArray((8,), "float32")}, lambda: Planned(launch), lambda: "said")

    run = Operation(("x", "out"), describe)
    for fault, error in (("describe", fp8core.ShapeError), ("launch", fp8core.BackendError)):
        for _ in range(3):
            with pytest.raises(error):
                run((at(0), None), fault)
            assert run((at(0), None), "neither")[0][1].shape == (8,)


def test_a_stream_that_may_not_wait_for_an_operand_is_refused_before_memory_is_allocated(monkeypatch):
    recorder, allocated = Recorder(), []
    recorder.run((at(0), None), None)
    (call,) = recorder.run.cache.by_specs.values()
    monkeypatch.setattr(call, "new", ((1, allocated.append),))

    def captured(*_):
        raise fp8core.DeviceError("stream needs to be the captured one")

    monkeypatch.setattr(operation.interop, "order_before", captured)
    with pytest.raises(fp8core.DeviceError):
        recorder.run((at(0), None), None, 7)
    assert not allocated


def test_a_call_that_fails_after_its_first_launch_keeps_its_operands(monkeypatch):
    recorder, kept = Recorder(), []
    monkeypatch.setattr(operation.interop, "order_after", lambda stream, views, explicit: kept.append(len(views)))

    def fails(*_):
        raise fp8core.BackendError("the second launch failed")

    monkeypatch.setattr(calls.Call, "run", fails)
    with pytest.raises(fp8core.BackendError):
        recorder.run((at(0), at(0)), None, 7)
    assert kept == [2]


def test_the_error_of_a_launch_is_raised_even_if_the_streams_cannot_be_ordered_after_it(monkeypatch):
    """As in a capture that the launch has ended: CuPy then raises an error where it is asked about the stream."""
    recorder = Recorder()

    def fails(error):
        def fail(*_):
            raise error

        return fail

    monkeypatch.setattr(operation.interop, "order_after", fails(RuntimeError("the capture has ended")))
    monkeypatch.setattr(calls.Call, "run", fails(fp8core.BackendError("launching failed")))
    with pytest.raises(fp8core.BackendError, match="launching failed"):
        recorder.run((at(0), at(0)), None, 7)


def test_an_explained_call_is_neither_planned_nor_made():
    recorder = Recorder()
    assert explanation_of(lambda x, stream=None: recorder.run((x, None), None, stream), at(0)) == "said"
    assert not recorder.launched
    assert len(recorder.run) == 0


def test_what_is_written_in_place_has_a_new_version():
    x = torch.from_numpy(fresh((4, 64), "float32"))
    out = fp8core.quantize(x)
    for _ in range(3):
        versions = out.data._version, out.scale._version, x._version
        fp8core.quantize(x, out=(out.data, out.scale))
        assert out.data._version > versions[0]
        assert out.scale._version > versions[1]
        assert x._version == versions[2]
    residual, weight = torch.randn(4, 64), torch.ones(64)
    saved = residual.clone().requires_grad_()
    product = saved * residual  # saves residual for the gradient
    fp8core.rms_norm_quant(x, weight, 1e-6, residual=residual)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


@pytest.mark.parametrize("number", [0.5, np.float32(0.5), np.float64(0.5)])
def test_a_number_is_taken_where_one_scale_is_meant(number):
    x, one = fresh((4, 64), "float32"), np.array([0.5], np.float32)
    want = fp8core.quantize(x, scale=one)
    got = fp8core.quantize(x, scale=number)
    assert got.group_shape == PER_TENSOR
    np.testing.assert_array_equal(got.scale, one)
    np.testing.assert_array_equal(got.data.view(np.uint8), want.data.view(np.uint8))
    np.testing.assert_array_equal(fp8core.dequantize(want.data, number), fp8core.dequantize(want.data, one))
    a, weight = fresh_fp8((4, 64)), fresh_fp8((8, 64), salt=1)
    np.testing.assert_array_equal(
        fp8core.scaled_mm_nt(a, weight, number, number), fp8core.scaled_mm_nt(a, weight, one, one)
    )
    np.testing.assert_array_equal(fp8core.linear(x, weight, number), fp8core.linear(x, weight, one))


@pytest.mark.parametrize("number", [True, "0.5", 1j, [0.5]])
def test_what_is_no_number_is_refused_as_a_scale(number):
    with pytest.raises(fp8core.DTypeError, match="scale"):
        fp8core.quantize(fresh((4, 64)), scale=number)


def test_layers_of_one_shape_share_their_calls_and_memory_stays_bounded(monkeypatch):
    monkeypatch.setattr(calls, "CALLS_KEPT", 64)
    LINEAR_CALLS.forget()
    weight, scale = torch.from_numpy(fresh((16, 32), "float32")), None
    del scale
    layers = [fp8core.Fp8Linear.from_weight(weight) for _ in range(20)]
    inputs = [torch.ones(m, 32) for m in range(1, 8)]
    for layer in layers:
        for x in inputs:
            layer(x)
    assert len(LINEAR_CALLS) <= 2 * len(inputs)
    gc.collect()
    tracemalloc.start()
    for m in range(1, 400):
        layers[m % 20](torch.ones(m, 32))
    assert len(LINEAR_CALLS) <= 64
    gc.collect()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 8 << 20


def test_refused_calls_leave_no_more_than_is_kept_of_others(monkeypatch):
    def describe(operands, options):
        raise fp8core.ShapeError("x needs another shape, got this one")

    monkeypatch.setattr(calls, "CALLS_KEPT", 16)
    run = Operation(("x", "out"), describe)
    for count in range(1, 100):
        with pytest.raises(fp8core.ShapeError):
            run((at(0, count), None), None)
        assert len(run.cache) <= 17
        assert len(run.cache._by_number) <= 17
        assert not run.cache.shortcuts


@pytest.mark.parametrize("of", ["options", "shapes without a signature"])
def test_a_cache_is_emptied_however_its_calls_differ(of, monkeypatch):
    monkeypatch.setattr(calls, "CALLS_KEPT", 16)
    recorder = Recorder()
    for count in range(1, 60):
        x = np.ones(count, np.float32) if of != "options" else at(0)
        for _ in range(2):
            recorder.run((x, None), count if of == "options" else None)
        assert len(recorder.run) <= 18


def test_scales_of_one_call_are_not_those_of_another():
    a, weight = torch.from_numpy(fresh_fp8((4, 64)).view(np.uint8)).view(torch.float8_e4m3fn), None
    del weight
    for value in (0.5, 2.0, 0.5):
        scale = torch.from_numpy(fresh_scale((1,))) * 0 + value
        assert torch.equal(fp8core.dequantize(a, scale), a.float() * value)
