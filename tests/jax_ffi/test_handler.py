"""What XLA calls: programs, their texts and frames, and how failures come back."""

import ctypes
import struct
from types import SimpleNamespace

import numpy as np
import pytest

jax = pytest.importorskip("jax")
jnp = jax.numpy

import fp8core  # noqa: E402 - after the skip
import fp8core.jax  # noqa: E402
from fp8core import PER_CHANNEL  # noqa: E402
from fp8core.core import operation  # noqa: E402
from fp8core.jax import frames, handler, programs  # noqa: E402
from fp8core.target import HOST  # noqa: E402
from jax_ffi.cases import BF16, K, N, cpu, same, weight, wide  # noqa: E402, F401
from support.ahead import absent  # noqa: E402
from support.targets import AMPERE, H200  # noqa: E402
from support.threads import in_time  # noqa: E402

OPTIONS = "float8_e4m3fn", (1, -1), False, float("inf"), "float32", "k", 1e-10, None
"""Of a call of quantize."""


@pytest.mark.parametrize(
    ("error", "code"),
    [(MemoryError, "INTERNAL"), (KeyboardInterrupt, "INTERNAL"), (fp8core.ShapeError, "INVALID_ARGUMENT")],
)
def test_a_failure_of_a_handler_arrives_with_its_words(error, code, monkeypatch):
    function = jax.jit(lambda x: fp8core.quantize(x).data)
    x = wide(9, K)
    wanted = function(x)

    def fails(*given):
        raise error("planted")

    for handled, method, run in (
        (programs.Prepared, "__call__", lambda: jax.block_until_ready(function(x))),
        (handler.Platform, "prepared", jax.jit(lambda x: fp8core.quantize(x).scale).lower(x).compile),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(handled, method, fails)
            with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=f"{code}.*{error.__name__}: planted"):
                run()
    assert same(function(x), wanted)


def test_a_text_says_all_of_a_problem():
    problem = programs.Problem(
        "quantize",
        (programs.Placed("bfloat16", (4, None), (1, 0)), None, None, None),
        OPTIONS,
        3,
    )
    assert programs.parse(problem.text(12).encode()) == (problem, 12)
    assert not problem.fixed
    assert problem.with_shapes([(4, 8)]).fixed
    assert not problem._replace(operands=(problem.with_shapes([(4, 8)]).operands[0], *problem.operands)).fixed
    for text in (b'[99,"quantize",[],[],0,0]', b'[1,"a later one",[],[],0,0]'):
        with pytest.raises(fp8core.BackendError, match="another release"):
            programs.parse(text)


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


def of_linear():
    """Return a problem of 33 rows with a weight per channel, and its arrays."""
    w = weight()
    x = wide(33, K)
    placed = [programs.Placed(str(a.dtype), a.shape, (1, 0)) for a in (x, *w)]
    options = (tuple(PER_CHANNEL), None, None, True, False, None, None)
    return programs.Problem("linear", (*placed, None, None, None, None), options), (x, *w)


@pytest.mark.parametrize("target", [absent(H200), absent(AMPERE), HOST], ids=str)
def test_a_launch_gets_addresses_and_announces_what_it_writes(target, monkeypatch):
    call, launched, announced = programs.Prepared(of_linear()[0], target), [], []
    announcement = SimpleNamespace(end=lambda: announced.append("ended"))
    monkeypatch.setattr(programs.prefetch, "WATCHED", SimpleNamespace(starts=[0]))
    monkeypatch.setattr(programs.prefetch, "announce_write", lambda *given: announced.append(given) or announcement)
    x, w, scale, out, scratch = 0x10000, 0x20000, 0x30000, 0x40000, 0x50010
    wanted = [([(out, out + 33 * N * 2)], 7), "ended"] if target.arch == H200.arch else []

    call.launch = lambda *given: launched.append(given)
    call(7, [x, w, scale, out, scratch])
    assert (launched, announced) == ([(7, x, w, scale, 0, 0, 0, out, 0x50100)], wanted)

    call.launch = lambda *given: 1 // 0
    with pytest.raises(ZeroDivisionError):
        call(7, [x, w, scale, out, scratch])
    assert announced == 2 * wanted

    call.launch = lambda *given: launched.append(given[1])
    if target == HOST:
        call(0, [x + 8, w, scale, out, scratch])
        assert launched[1:] == [x + 8]
    else:
        with pytest.raises(fp8core.LayoutError, match="need addresses at multiples of 16"):
            call(7, [x + 8, w, scale, out, scratch])
        assert (len(launched), announced) == (1, 2 * wanted)


def test_a_program_with_too_little_scratch_is_refused():
    problem, arrays = of_linear()
    platform = handler.ALL["cpu"]
    with pytest.raises(fp8core.BackendError, match=r"needs \d+ bytes of scratch on host, got 1: .* other tunings"):
        platform.prepared(problem.text(1).encode(), 0)
    text, scratch = platform.plan(problem)
    assert scratch >= 33 * K
    assert platform.prepared(text.encode(), 0).scratch_bytes == scratch
    rows_are_open = (problem.operands[0]._replace(shape=(None, K)), *problem.operands[1:])
    text = problem._replace(operands=rows_are_open).text(None).encode()
    shapes = tuple(array.shape for array in arrays)
    for spare, got in (((), 0), (((handler.scratch_extent(scratch - 1),),), scratch - 1)):
        with pytest.raises(fp8core.BackendError, match=rf"needs {scratch} bytes of scratch on host, got {got}:"):
            platform.prepared(text, 0, handler.Extents(shapes, ((33, N), *spare)))
    enough = handler.Extents(shapes, ((33, N), (handler.scratch_extent(scratch),)))
    assert platform.prepared(text, 0, enough).scratch_bytes == scratch
    with pytest.raises(
        fp8core.BackendError, match=rf"room for a result of shape \(33, {N}\), got \(32, {N}\): trace it"
    ):
        platform.prepared(text, 0, enough._replace(results=((32, N), *enough.results[1:])))


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
