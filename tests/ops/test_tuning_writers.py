"""Files of tunings that several processes write, that a writer was killed in, or whose disk is full; and shapes to tune."""

import errno
import fcntl
import multiprocessing
import os
import signal
import stat
from pathlib import Path

import numpy as np
import pytest

import fp8core
from fp8core import tuning
from fp8core.core.explaining import ArraySpec
from fp8core.errors import DTypeError, Fp8Error, ScaleError, ShapeError, TuningError, UnsupportedProblemError
from fp8core.kernels.gemm.table import SCALED_MM
from fp8core.problem import BLOCK_128, GROUP_128
from fp8core.runtime import device
from fp8core.runtime.locks import try_lock
from fp8core.tuning import files, save_tunings, timed, tune_shapes
from fp8core.tuning.measuring import product_of
from fp8core.tuning.shapes import layer_product, tuned
from support.blaslt_fixtures import built  # noqa: F401
from support.blaslt_tools import problem
from support.tuning_stub import PROBLEM, saying, stub  # noqa: F401
from support.tunings import SECOND, written


def add_many(path, lines):
    found = [tuning.Tuning.from_json(line) for line in lines]
    for one in found:
        save_tunings(path, [one])


def test_processes_that_write_at_the_same_time_lose_nothing(stub, tmp_path):
    path, lines = tmp_path / "x", [timed(PROBLEM._replace(m=100 + i), SECOND).to_json() for i in range(60)]
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=add_many, args=(path, lines[i::3])) for i in range(3)]
    for writer in writers:
        writer.start()
    read = 0
    while any(writer.is_alive() for writer in writers):
        if path.exists():
            contents = files._read(path)  # whole at any time
            assert not contents.damaged
            assert len(contents.tunings) >= read
            read = len(contents.tunings)
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0] * 3
    assert sorted(path.read_text().splitlines()) == sorted(lines)
    assert {one.name for one in tmp_path.iterdir()} == {"x", "x.lock"}


def test_a_lock_is_no_link_to_another_file_and_is_closed(stub, tmp_path):
    path, found = tmp_path / "x", timed(PROBLEM, SECOND)
    before = len(list(Path("/proc/self/fd").iterdir()))
    save_tunings(path, [found])
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    (tmp_path / "x.lock").unlink()
    (tmp_path / "x.lock").symlink_to(tmp_path / "of another user")
    with pytest.raises(OSError, match=r"x\.lock"):
        save_tunings(path, [found])
    assert not (tmp_path / "of another user").exists()


@pytest.mark.filterwarnings("ignore:.*fork")  # JAX and Python 3.12 warn of any fork beside threads
def test_a_child_that_is_forked_meanwhile_does_not_keep_the_lock(stub, tmp_path, monkeypatch):
    """A thread may fork workers, which live for hours, while another thread saves."""
    write, (waiting, done), children = files._write, os.pipe(), []

    def forking(*arguments):
        child = os.fork()
        if not child:
            os.close(done)
            os.read(waiting, 1)  # until the test has ended
            os._exit(0)
        children.append(child)
        write(*arguments)

    monkeypatch.setattr(files, "_write", forking)
    path = tmp_path / "x"
    save_tunings(path, [timed(PROBLEM, SECOND)])
    other = os.open(tmp_path / "x.lock", os.O_RDWR)
    try:
        assert try_lock(other)
    finally:
        os.close(other)
        os.close(done)
        for child in children:
            os.waitpid(child, 0)
    assert len(children) == 1


def test_a_file_system_without_locks_is_written_to(stub, tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    one, others = timed(PROBLEM, SECOND), tmp_path / f".x.{16 * '0'}"
    others.touch()  # of a process that is about to write, too
    save_tunings(tmp_path / "x", [one])
    assert (tmp_path / "x").read_text() == f"{one.to_json()}\n"
    assert others.exists()


@pytest.mark.parametrize("call", [fcntl.LOCK_EX, fcntl.LOCK_UN], ids=["lock", "unlock"])
def test_a_lock_that_fails_for_another_reason_is_an_error(stub, tmp_path, monkeypatch, call):
    flock = fcntl.flock

    def fails(handle, operation):
        if operation == call:
            raise OSError(errno.EIO, "Input/output error")
        flock(handle, operation)

    monkeypatch.setattr(fcntl, "flock", fails)
    with pytest.raises(OSError, match="Input/output error"):
        save_tunings(tmp_path / "x", [timed(PROBLEM, SECOND)])
    assert (tmp_path / "x").exists() == (call == fcntl.LOCK_UN)


def killed_while_writing(path, line, step):
    """Save a tuning, and be killed before or behind the step that shows it to readers."""
    replace_ = Path.replace

    def killed(self, target):
        if step == "behind":
            replace_(self, target)
        os.kill(os.getpid(), signal.SIGKILL)

    Path.replace = killed
    save_tunings(path, [tuning.Tuning.from_json(line)])


@pytest.mark.parametrize(("step", "lines"), [("before", 3), ("behind", 4)])
def test_a_writer_that_is_killed_leaves_a_whole_file_and_no_lock(stub, tmp_path, step, lines):
    path = tmp_path / "x"
    found, new = written(path), timed(PROBLEM._replace(m=200), SECOND)
    writer = multiprocessing.get_context("spawn").Process(target=killed_while_writing, args=(path, new.to_json(), step))
    writer.start()
    writer.join()
    assert writer.exitcode == -signal.SIGKILL
    contents = files._read(path)
    assert (len(contents.tunings), contents.damaged) == (lines, 0)
    left = {one.name for one in tmp_path.iterdir()} - {"x", "x.lock"}
    assert len(left) == (step == "before")
    of_others = {".x.y", ".x.bad", f".y.{16 * '0'}"}
    for name in of_others:
        (tmp_path / name).touch()
    save_tunings(path, [new])  # does not wait for the one that is gone, and takes away what it left
    assert path.read_text().splitlines() == [one.to_json() for one in (*found, new)]
    assert {one.name for one in tmp_path.iterdir()} == {"x", "x.lock", *of_others}


@pytest.mark.parametrize("step", ["open", "fsync", "replace"])
def test_a_write_that_fails_leaves_the_file_as_it_was(stub, monkeypatch, tmp_path, step):
    path = tmp_path / "x"
    written(path)
    before = path.read_bytes()

    def fail(*_):
        raise OSError(28, "No space left on device")

    opened = os.open
    fails = {
        "open": (os, "open", lambda path, *how, **at: fail() if ".x." in str(path) else opened(path, *how, **at)),
        "fsync": (os, "fsync", fail),
        "replace": (Path, "replace", fail),
    }
    monkeypatch.setattr(*fails[step])
    with pytest.raises(OSError, match="No space left") as refused:
        save_tunings(path, [timed(PROBLEM, saying(1.0))])
    assert refused.value.filename == str(path)
    assert path.read_bytes() == before
    assert {one.name for one in tmp_path.iterdir()} == {"x", "x.lock"}


def test_a_link_stays_a_link_and_a_file_can_be_shared(stub, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "real")
    written(link)
    assert link.is_symlink()
    assert (tmp_path / "real").is_file()
    mask = os.umask(0o022)
    os.umask(mask)
    for name in ("real", "real.lock"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o666 & ~mask


def test_shapes_are_the_products_of_layers(stub):
    spec = ArraySpec((64, 8192), "float8_e4m3fn"), ArraySpec((64, 1), "float32")
    weight = fp8core.Quantized(*spec, (1, -1))
    asked = fp8core.explain(fp8core.linear, ArraySpec((300, 8192), "bfloat16"), weight, target=0)
    product = layer_product((300, 64, 8192), "channel", "bfloat16")
    assert product == product_of(asked.problem)._replace(prefetch_weight=True)
    block = layer_product((300, 256, 8192), "block", "float16", bias=True)
    assert (block.scale_a, block.scale_b, block.bias, block.out) == ("group", "block", "float16", "float16")
    tensor = layer_product((1, 256, 8192), "tensor", "bfloat16")
    assert (tensor.scale_a, tensor.scale_b, tensor.alignment) == ("tensor", "tensor", 16)
    assert tuple(reversed(tuning.shapes.SCHEMES["block"])) == (BLOCK_128, GROUP_128)


def test_each_of_several_shapes_is_tuned_once_and_told(stub, monkeypatch):
    monkeypatch.setattr(tuning.shapes, "refuse_captures", lambda: None)
    told = []
    products = [layer_product((m, 512, 1024), "channel", "bfloat16") for m in (96, 97, 96)]
    found = tuned(products, lambda *args: told.append(args), SECOND)
    assert [one.m for one in found] == [96, 97]
    assert told == [(found[0], 1, 2), (found[1], 2, 2)]
    assert SCALED_MM.choice(products[1]) == ("cublaslt", 1)


@pytest.mark.parametrize(
    "shape", [(1, 2), (1, 2, 3, 4), (0, 16, 16), (1.5, 16, 16), (-1, 16, 16), 5, None, "123", np.array(5)]
)
def test_what_is_no_shape_is_refused(shape):
    with pytest.raises(ShapeError, match=r"shapes needs triples \(m, n, k\) of numbers from 1, got "):
        tune_shapes([shape])


@pytest.mark.parametrize("shapes", [5, None, 10**20, np.array(5)], ids=repr)
def test_what_holds_no_shapes_is_refused(shapes):
    with pytest.raises(ShapeError, match=r"shapes needs triples \(m, n, k\) of numbers from 1, got "):
        tune_shapes(shapes)


def test_extents_may_be_numbers_of_numpy():
    counted = layer_product(np.array([96, 512, 1024]), "channel", "bfloat16")
    assert counted == layer_product((96, 512, 1024), "channel", "bfloat16")
    assert [type(extent) for extent in (counted.m, counted.n, counted.k)] == [int] * 3


@pytest.mark.parametrize("scheme", ["static", "", None, ["block"]])
def test_another_scheme_is_refused(scheme):
    with pytest.raises(ScaleError, match="scheme needs one of channel, tensor, block, got "):
        tune_shapes([(1, 16, 16)], scheme=scheme)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "uint8", "float64", None])
def test_another_dtype_is_refused(dtype):
    with pytest.raises(DTypeError, match=r"^dtype needs one of float32, float16, bfloat16, .*, got "):
        tune_shapes([(1, 16, 16)], dtype=dtype)


def test_without_a_gpu_there_is_nothing_to_choose_from(monkeypatch):
    monkeypatch.setattr(device, "count", lambda: 0)
    with pytest.raises(UnsupportedProblemError, match="tune needs a GPU, whose kernels it times, got the host"):
        tune_shapes([(1, 16, 16)])


def test_a_gpu_of_another_machine_is_refused_before_anything_is_planned(monkeypatch):
    monkeypatch.setattr(device, "count", lambda: 0)
    monkeypatch.setattr(SCALED_MM, "planned", lambda *_: pytest.fail("a kernel was planned"))
    with pytest.raises(UnsupportedProblemError, match=r"tune needs a GPU of this machine, .*, got sm_89, which is not"):
        tune_shapes([(1, 16, 16)], device="sm_89")


def test_a_capture_is_refused(stub, monkeypatch):
    stub.captured.add(5)
    monkeypatch.setattr(
        tuning.measuring.device.cupy().cuda, "get_current_stream", lambda: type("S", (), {"ptr": 5}), raising=False
    )
    with pytest.raises(TuningError, match="needs streams that are not being captured"):
        tuned([PROBLEM], None, SECOND)
    assert issubclass(TuningError, Fp8Error)
    assert problem(m=96) == PROBLEM
