"""An assignment to `Fp8Linear` amid calls and assignments of other threads."""

import sys
import threading
from contextlib import contextmanager

import numpy as np

import fp8core
from fp8core import BLOCK_128, GROUP_128, Fp8Linear
from fp8core.ops import layer as layer_module
from support.engines import fresh


@contextmanager
def at_each_line_of_a_layer(do):
    """Call ``do`` before each line of the layer's module that this thread comes to; nothing is traced within."""

    def trace(frame, event, _):
        if frame.f_code.co_filename != layer_module.__file__:
            return None
        if event == "line":
            do()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def test_a_call_of_another_thread_amid_an_assignment_is_one_of_the_layer_before_or_after():
    """Here at each line of it: groups, arrays and history change together."""
    x = fresh((3, 256))
    weights = [fp8core.quantize(fresh((256, 256)), group_shape=group) for group in (GROUP_128, BLOCK_128)]
    wants = [Fp8Linear(weight, group_shape=GROUP_128)(x) for weight in weights]
    layer, seen = Fp8Linear(weights[0], group_shape=GROUP_128), []
    with at_each_line_of_a_layer(lambda: seen.append(layer(x))):
        layer.weight = weights[1]
    seen.append(layer(x))
    which = [next(i for i, want in enumerate(wants) if np.array_equal(y, want)) for y in seen]
    assert which == sorted(which)
    assert which[0] == 0
    assert which[-1] == 1


def test_threads_that_assign_two_arrays_of_a_layer_lose_none():
    """Here at each line of one assignment in turn: the other one must be kept, before it or after it."""
    weights = [fp8core.quantize(fresh((8, 256))) for _ in range(2)]
    bias, lines = np.ones(8, np.float32), 1
    while True:
        layer, left = Fp8Linear(weights[0], bias=np.zeros(8, np.float32)), lines
        other = threading.Thread(target=setattr, args=(layer, "bias", bias))

        def amid(other=other):
            nonlocal left
            left -= 1
            if not left:
                other.start()
                other.join(0.1)  # or until the assignment has ended, if it waits for that

        with at_each_line_of_a_layer(amid):
            layer.weight = weights[1]
        if left > 0:  # the assignment has no more lines
            break
        other.join()
        assert layer.weight is weights[1].data
        assert layer.weight_scale is weights[1].scale
        assert layer.bias is bias
        lines += 1
    assert lines > 3
