"""What XLA calls: programs, their texts and frames, and how failures come back."""

import ctypes
import struct

import numpy as np
import pytest

jax = pytest.importorskip("jax")
jnp = jax.numpy

import fp8core  # noqa: E402 - after the skip
import fp8core.jax  # noqa: E402
from fp8core import PER_CHANNEL  # noqa: E402
from fp8core.core import operation  # noqa: E402
from fp8core.jax import frames, handler, programs  # noqa: E402
from jax_ffi.cases import BF16, K, cpu, same, weight, wide  # noqa: E402, F401
from support.threads import in_time  # noqa: E402

OPTIONS = "float8_e4m3fn", (1, -1), False, float("inf"), "float32", "k", 1e-10, None
"""Of a call of quantize."""


def test_a_failure_of_a_handler_arrives_with_its_words(monkeypatch):
    function = jax.jit(lambda x: fp8core.quantize(x).data)
    x = wide(9, K)
    wanted = function(x)

    def fails(self, stream, addresses):
        raise MemoryError("planted")

    with monkeypatch.context() as patched:
        patched.setattr(programs.Prepared, "__call__", fails)
        with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="MemoryError: planted"):
            jax.block_until_ready(function(x))
    assert same(function(x), wanted)


def test_a_text_says_all_of_a_problem():
    problem = programs.Problem(
        "quantize",
        (programs.Placed("bfloat16", (4, None), (1, 0)), None, None, None),
        OPTIONS,
    )
    assert programs.parse(problem.text(12).encode()) == (problem, 12)
    assert not problem.fixed
    assert problem.with_shapes([(4, 8)]).fixed
    with pytest.raises(fp8core.BackendError, match="another release"):
        programs.parse(b'[99,"quantize",[],[],0,0]')


def test_programs_that_are_traced_after_tuning_are_planned_anew(monkeypatch):
    x = wide(11, K)
    wanted = fp8core.quantize(x).data
    function = jax.jit(lambda x: fp8core.quantize(x).data)
    assert same(function(x), wanted)
    texts = len(handler.ALL["cpu"].ready)
    operation.forget()
    assert same(function(x), wanted)
    assert len(handler.ALL["cpu"].ready) == texts
    assert same(fp8core.quantize(jnp.asarray(x)).data, wanted)
    assert len(handler.ALL["cpu"].ready) == texts + 1


def test_a_frame_of_another_version_is_refused():
    frame = ctypes.create_string_buffer(struct.pack("Q32xQ32xQ32xQ40x", 168, 40, 40, 56))
    with pytest.raises(fp8core.BackendError, match=r"got \(168, 40, 40, 56\)"):
        frames.check(ctypes.addressof(frame))
    metadata = ctypes.create_string_buffer(48)
    extension = ctypes.create_string_buffer(struct.pack("Qi4xQQ", 32, 1, 0, ctypes.addressof(metadata)))
    for version, wanted in (((0, 7), (0, 7, 1)), ((1, 0), (0, 0, 0))):
        metadata.raw = bytes(48)
        api = ctypes.create_string_buffer(struct.pack("32xii", *version))
        assert frames.answered(ctypes.addressof(extension), ctypes.addressof(api), frames.COMMAND_BUFFERS)
        assert struct.unpack_from("24xiiI", metadata.raw) == wanted


def test_an_error_of_xla_is_given_back_while_what_says_so_is_there():
    function = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
    others, taken = [], []

    @function
    def no_stream(arguments):
        return 0xABC

    @function
    def destroy(arguments):
        others.extend(ctypes.create_string_buffer(b"\xff" * size) for size in range(8, 64) for _ in range(50))
        taken.append(struct.unpack("QQQ", ctypes.string_at(arguments, 24)))
        return 0

    api = ctypes.create_string_buffer(256)
    for at, one in ((64, destroy), (80, no_stream)):
        struct.pack_into("Q", api, at, ctypes.cast(one, ctypes.c_void_p).value)
    with pytest.raises(fp8core.BackendError, match="XLA needs to know the stream"):
        frames.stream(ctypes.addressof(api), 0x1000)
    assert taken == [(24, 0, 0xABC)]


def test_options_become_plain():
    class Many(int):
        pass

    given = (np.float32(0.5), Many(3), jnp.float8_e4m3fn, np.dtype(BF16), [1, (2.0, None)], True, "k")
    plain = programs.plain(given)
    assert plain == (0.5, 3, "float8_e4m3fn", "bfloat16", (1, (2.0, None)), True, "k")
    assert [type(x) for x in plain] == [float, int, str, str, tuple, bool, str]


def test_a_program_with_too_little_scratch_is_refused():
    w = weight()
    x = wide(33, K)
    placed = [programs.Placed(str(a.dtype), a.shape, (1, 0)) for a in (x, *w)]
    options = (tuple(PER_CHANNEL), None, None, True, False, None, None)
    problem = programs.Problem("linear", (*placed, None, None, None, None), options)
    platform = handler.ALL["cpu"]
    with pytest.raises(fp8core.BackendError, match=r"needs \d+ bytes of scratch on host, got 1: .* other tunings"):
        platform.prepared(problem.text(1).encode(), 0)
    text, scratch = platform.plan(problem)
    assert scratch >= 33 * K
    assert platform.prepared(text.encode(), 0).scratch_bytes == scratch


def test_a_destructor_amid_a_plan_may_need_the_same(monkeypatch):
    """A collection of garbage may begin anywhere, and end in a call of the library."""
    placed = programs.Placed("float32", (21, K), (1, 0))
    problem = programs.Problem("quantize", (placed, None, None, None), OPTIONS)
    platform, plan, found = handler.Platform("cpu"), programs.Prepared, []

    def amid(*given):
        if not found:
            found.append(None)
            found[0] = platform.prepared(problem.text(0).encode(), 0)
        return plan(*given)

    monkeypatch.setattr(handler, "Prepared", amid)
    in_time(lambda: found.append(platform.prepared(problem.text(0).encode(), 0)))
    assert len(found) == 2
    assert found[0] is found[1] is platform.prepared(problem.text(0).encode(), 0)
