"""Tunings in files, without a GPU: written by several processes, damaged, of other machines, and read at first use."""

import os
import re
import socket
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from fp8core import tuning
from fp8core.errors import TuningError
from fp8core.kernels.gemm.table import SCALED_MM
from fp8core.runtime import device
from fp8core.target import HOST
from fp8core.tuning import files, load_tunings, save_tunings, timed
from fp8core.tuning.files import FILE_VARIABLE, load_named
from support.blaslt_fixtures import built  # noqa: F401
from support.targets import H200
from support.tuning_stub import PROBLEM, saying, stub  # noqa: F401
from support.tunings import SECOND, forget_all, written


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch, tmp_path):
    monkeypatch.delenv(FILE_VARIABLE, raising=False)
    monkeypatch.setattr("platformdirs.user_data_path", lambda *_, **__: tmp_path / "data")


def test_what_was_tuned_is_what_another_process_runs(stub, monkeypatch, tmp_path):
    found = [timed(PROBLEM._replace(m=m), SECOND) for m in (96, 97)]
    for one in found:
        one.apply()
    path = save_tunings(tmp_path / "new" / "folder" / "tunings.jsonl")
    assert path.read_text().splitlines() == [one.to_json() for one in found]
    forget_all(monkeypatch)
    assert SCALED_MM.choice(PROBLEM) == ("cublaslt", 0)
    assert load_tunings(path) == tuple(found)
    for target in (H200, H200._replace(device=1)):
        for prefetch_weight in (False, True):
            p = PROBLEM._replace(target=target, prefetch_weight=prefetch_weight)
            assert SCALED_MM.choice(p) == ("cublaslt", 1)
            assert SCALED_MM.choice(p._replace(m=98)) == ("cublaslt", 0)
    reasons = {verdict.kernel: verdict.reason for verdict in SCALED_MM.explain(PROBLEM).verdicts}
    assert reasons["cublaslt"] == "tuned, algorithm 1"
    assert save_tunings(tmp_path / "again.jsonl").read_text() == path.read_text()  # what was loaded is saved, too


def test_a_plan_that_was_made_before_is_made_anew(stub, tmp_path):
    before = SCALED_MM.plan(tuple(PROBLEM))
    load_tunings(save_tunings(tmp_path / "x", [timed(PROBLEM, SECOND)]))
    assert SCALED_MM.plan(tuple(PROBLEM)) is not before


def test_nothing_is_asked_of_a_library_until_a_product_is_met(stub, tmp_path):
    written(tmp_path / "x", 5)
    tuning.machine(H200)
    stub.reset()
    tuning.values.library.find.cache_clear()
    load_tunings(tmp_path / "x")
    assert not stub.lines("MatmulAlgoGetHeuristic")


def test_a_new_tuning_replaces_that_of_the_same_product_and_no_other(stub, tmp_path):
    path = tmp_path / "x"
    old = written(path)
    foreign = replace(old[0], machine=old[0].machine._replace(gpu="another"))
    new = timed(PROBLEM._replace(m=97, prefetch_weight=True), saying(1.0))
    save_tunings(path, [new, foreign])
    assert path.read_text().splitlines() == [one.to_json() for one in (old[0], new, old[2], foreign)]


@pytest.mark.parametrize(
    ("damage", "lines"),
    [
        (lambda text: text[:-9], 1),
        (lambda text: text.replace('"m": 97', '"m": 98'), 1),
        (lambda text: "garbage\n" + text, 1),
        (lambda text: text + "[" * 100_000, 1),
        (lambda text: text.replace('"chosen"', '"taken"'), 3),
        (lambda text: "\udcff\n" + text + "[]\n\n{}\nnull\n7\n", 5),
        (lambda text: "\udcff" * 100, 1),
    ],
)
def test_damaged_lines_are_one_warning_and_never_a_choice(stub, monkeypatch, tmp_path, damage, lines):
    path = tmp_path / "x"
    found = written(path)
    forget_all(monkeypatch)
    path.write_bytes(damage(path.read_text()).encode(errors="surrogateescape"))
    with pytest.warns(RuntimeWarning, match=rf"tunings in {path} are not used: {lines} lines? damaged") as caught:
        loaded = load_tunings(path)
    assert len(caught) == 1
    assert str(caught[0].message).startswith("some ") == bool(loaded)
    assert all(one in found for one in loaded)
    for m in (96, 97, 98):
        assert SCALED_MM.choice(PROBLEM._replace(m=m)) == ("cublaslt", int(any(one.m == m for one in loaded)))


def test_damaged_lines_are_gone_after_the_next_save(stub, tmp_path):
    path = tmp_path / "x"
    found = written(path)
    path.write_text(path.read_text() + "garbage\n")
    with pytest.warns(RuntimeWarning, match=f"removed 1 line of {path} that held no tuning"):
        save_tunings(path, [])
    assert path.read_text().splitlines() == [one.to_json() for one in found]


def test_a_file_without_lines_is_no_warning(stub, tmp_path):
    (tmp_path / "x").touch()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_tunings(tmp_path / "x") == ()


def test_a_file_that_is_too_large_is_not_read(stub, monkeypatch, tmp_path):
    path = tmp_path / "x"
    written(path)
    monkeypatch.setattr(files, "LARGEST", path.stat().st_size)
    assert len(load_tunings(path)) == 3
    monkeypatch.setattr(files, "LARGEST", path.stat().st_size - 1)
    with pytest.raises(OSError, match=f"more than .* bytes: '{path}'"):
        load_tunings(path)


@pytest.mark.parametrize("text", ["a thesis\n", "[]", "\0" * 9])
def test_a_file_of_something_else_is_never_written(stub, tmp_path, text):
    path = tmp_path / "x"
    path.write_text(text)
    for write in (lambda: save_tunings(path, []), lambda: files.check_writable(path)):
        with pytest.raises(
            TuningError, match=f"path needs a file of tunings, or a new file, got {path}, which holds something"
        ):
            write()
    assert path.read_text() == text


@pytest.mark.parametrize("wrong", [1, None, "text"], ids=str)
def test_what_is_no_tuning_is_refused_before_a_folder_is_made(stub, tmp_path, wrong):
    path = tmp_path / "new" / "x"
    with pytest.raises(TypeError, match=f"tunings needs objects of the class Tuning, got .*{type(wrong).__name__}"):
        save_tunings(path, [*written(tmp_path / "y"), wrong])
    assert not path.parent.exists()


def test_arguments_of_other_types_are_refused_by_name_before_a_folder_is_made(stub, monkeypatch, tmp_path):
    one = timed(PROBLEM, SECOND)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    for wrong in (one, 1, 2.5):
        with pytest.raises(TypeError, match=rf"^tunings needs an iterable of tunings, got .*{type(wrong).__name__}$"):
            save_tunings(tmp_path / "new" / "x", wrong)
    for wrong in ([one], one, 1, b"x"):
        for call in (save_tunings, load_tunings):
            with pytest.raises(TypeError, match=rf"^path needs a str or an os.PathLike, got .*{type(wrong).__name__}$"):
                call(wrong)
    assert not [*tmp_path.iterdir()]


def test_a_file_without_a_whole_line_is_still_one_of_tunings(stub, tmp_path):
    found = written(tmp_path / "y")
    path = tmp_path / "x"
    path.write_text(found[0].to_json()[:-9])
    with pytest.warns(RuntimeWarning, match=f"removed 1 line of {path} that held no tuning"):
        save_tunings(path, found)
    assert path.read_text() == (tmp_path / "y").read_text()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"gpu": "NVIDIA H100"}, "3 lines for another GPU NVIDIA H100 (here NVIDIA H200)"),
        ({"driver": 12080}, "3 lines for another driver 12080 (here 13000)"),
        ({"library": 1}, "3 lines for another BLAS library 1 (here 130100)"),
        ({"fp8core": "0.0.1", "sources": "f"}, "3 lines for another fp8core 0.0.1 (here "),
    ],
)
def test_a_file_of_another_machine_is_one_warning_and_no_choice(stub, monkeypatch, tmp_path, change, said):
    path = tmp_path / "x"
    found = written(path)
    save_tunings(tmp_path / "foreign", [replace(one, machine=one.machine._replace(**change)) for one in found])
    forget_all(monkeypatch)
    with pytest.warns(RuntimeWarning, match=re.escape(said)) as caught:
        assert load_tunings(tmp_path / "foreign") == ()
    assert len(caught) == 1
    assert SCALED_MM.choice(PROBLEM) == ("cublaslt", 0)
    save_tunings(tmp_path / "foreign", found)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of a file for several machines nobody is told
        assert load_tunings(tmp_path / "foreign") == tuple(found)


def test_an_algorithm_that_is_not_offered_any_more_is_one_warning(stub, monkeypatch, tmp_path):
    found = timed(PROBLEM, SECOND)
    path = save_tunings(tmp_path / "x", [replace(found, chosen=found.chosen._replace(name="0123"))])
    forget_all(monkeypatch)
    load_tunings(path)
    with pytest.warns(
        RuntimeWarning, match="the tuned kernel is not available here, cublaslt algorithm 0123"
    ) as caught:
        assert [SCALED_MM.choice(PROBLEM) for _ in range(2)] == [("cublaslt", 0)] * 2
    assert len(caught) == 1


def test_without_a_gpu_a_file_is_one_warning(stub, monkeypatch, tmp_path):
    written(tmp_path / "x")
    monkeypatch.setattr(device, "count", lambda: 0)
    monkeypatch.setattr(device, "why_none", lambda: "no driver")
    with pytest.warns(RuntimeWarning, match="3 lines for a GPU, but there is none: no driver"):
        assert load_tunings(tmp_path / "x") == ()


def test_the_file_is_the_given_or_the_named_one_or_in_the_data_folder(stub, monkeypatch, tmp_path):
    assert load_tunings() == ()  # there is none, and none was named
    assert save_tunings() == tmp_path / "data" / "tunings.jsonl"
    monkeypatch.setenv(FILE_VARIABLE, str(tmp_path / "named"))
    with pytest.raises(FileNotFoundError):
        load_tunings()
    assert save_tunings() == tmp_path / "named"
    with pytest.raises(FileNotFoundError):
        load_tunings(tmp_path / "no")
    with pytest.raises(IsADirectoryError):
        load_tunings(tmp_path)


def test_without_a_home_folder_nothing_is_there_and_nothing_is_written(stub, monkeypatch, tmp_path):
    def absent(*_, **__):
        raise RuntimeError("could not determine the home directory")

    monkeypatch.setattr("platformdirs.user_data_path", absent)
    monkeypatch.chdir(tmp_path)
    assert load_tunings() == ()
    with pytest.raises(FileNotFoundError, match=r"HOME is not set.*: '~/\.local/share/fp8core/tunings\.jsonl'"):
        save_tunings()
    for named in ("~/t.jsonl", "~root/t.jsonl"):
        with pytest.raises(FileNotFoundError, match=f"was not expanded: '{named}'"):
            save_tunings(named)
    assert not list(tmp_path.iterdir())


def test_a_folder_named_like_a_home_is_not_read(stub, monkeypatch, tmp_path):
    """It is in the current folder, which may be anybody's."""
    path = tmp_path / "~" / ".local" / "share" / "fp8core" / "tunings.jsonl"
    written(path)
    forget_all(monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("platformdirs.user_data_path", lambda *_, **__: Path("~/.local/share/fp8core"))
    assert load_tunings() == ()
    named = str(path.relative_to(tmp_path))
    with pytest.raises(FileNotFoundError, match=rf"was not expanded: '{re.escape(named)}'"):
        load_tunings(named)
    monkeypatch.setenv(FILE_VARIABLE, "~no such user/t.jsonl")
    monkeypatch.setattr(SCALED_MM, "before", load_named)
    with pytest.warns(RuntimeWarning, match=f"which {FILE_VARIABLE} names, are not used: ~ stands for no folder"):
        assert SCALED_MM.choice(PROBLEM) == ("cublaslt", 0)
    assert len(load_tunings(path)) == 3


def test_a_tilde_in_the_variable_is_the_home_folder(stub, monkeypatch, tmp_path):
    written(tmp_path / "t.jsonl")
    forget_all(monkeypatch)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(FILE_VARIABLE, "~/t.jsonl")
    assert len(load_tunings()) == 3


def test_a_variable_that_is_empty_names_no_file(stub, monkeypatch):
    monkeypatch.setenv(FILE_VARIABLE, "")
    assert load_tunings() == ()


def test_a_named_file_is_read_before_the_first_choice_and_never_again(stub, monkeypatch, tmp_path):
    path = tmp_path / "x"
    written(path)
    forget_all(monkeypatch)
    monkeypatch.setenv(FILE_VARIABLE, str(path))
    monkeypatch.setattr(SCALED_MM, "before", load_named)
    assert SCALED_MM.choice(PROBLEM) == ("cublaslt", 1)
    path.unlink()
    assert SCALED_MM.choice(PROBLEM._replace(m=97)) == ("cublaslt", 1)
    assert SCALED_MM.choice(PROBLEM._replace(m=999)) == ("cublaslt", 0)


def test_a_named_file_is_not_read_for_products_on_the_host(stub, monkeypatch, tmp_path):
    """It would ask the driver for devices, after which a forked child cannot use them."""
    path = tmp_path / "x"
    written(path)
    forget_all(monkeypatch)
    monkeypatch.setenv(FILE_VARIABLE, str(path))
    monkeypatch.setattr(SCALED_MM, "before", load_named)
    with monkeypatch.context() as asking:
        asking.setattr(device, "count", lambda: pytest.fail("the driver was asked"))
        SCALED_MM.choice(PROBLEM._replace(target=HOST))
    assert SCALED_MM.choice(PROBLEM) == ("cublaslt", 1)


def test_a_named_file_that_is_missing_is_one_warning(stub, monkeypatch, tmp_path):
    monkeypatch.setenv(FILE_VARIABLE, str(tmp_path / "no"))
    monkeypatch.setattr(SCALED_MM, "before", load_named)
    with pytest.warns(RuntimeWarning, match=f"which {FILE_VARIABLE} names, are not used: No such file") as caught:
        assert [SCALED_MM.choice(PROBLEM._replace(m=m)) for m in (96, 97)] == [("cublaslt", 0)] * 2
    assert len(caught) == 1


def test_where_warnings_are_errors_a_named_file_fails_the_first_call_alone(stub, monkeypatch, tmp_path):
    path, found = tmp_path / "x", written(tmp_path / "x")
    path.write_text(f"{path.read_text()}damaged\n")
    forget_all(monkeypatch)
    monkeypatch.setenv(FILE_VARIABLE, str(path))
    monkeypatch.setattr(SCALED_MM, "before", load_named)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match="1 line damaged"):
            SCALED_MM.choice(PROBLEM)
        assert SCALED_MM.choice(PROBLEM) == ("cublaslt", 1)
    assert list(tuning.values.APPLIED.values()) == list(found)


@pytest.mark.parametrize("kind", ["FIFO", "directory", "device", "socket"])
def test_a_named_file_that_is_no_regular_file_is_one_warning(stub, monkeypatch, tmp_path, kind):
    path = tmp_path / "x"
    if kind == "FIFO":
        os.mkfifo(path)  # without a writer: reading would wait forever
    elif kind == "directory":
        path.mkdir()
    elif kind == "device":
        path = Path("/dev/zero")
    else:
        monkeypatch.chdir(tmp_path)  # the path of a socket is short
        socket.socket(socket.AF_UNIX).bind("x")
    monkeypatch.setenv(FILE_VARIABLE, str(path))
    monkeypatch.setattr(SCALED_MM, "before", load_named)
    with pytest.warns(RuntimeWarning, match=f"which {FILE_VARIABLE} names, are not used: ") as caught:
        assert [SCALED_MM.choice(PROBLEM._replace(m=m)) for m in (96, 97)] == [("cublaslt", 0)] * 2
    assert len(caught) == 1
    if kind != "socket":  # a socket cannot even be opened
        assert str(caught[0].message).endswith(f"it is a {kind}")
    with pytest.raises(OSError, match=str(path)):
        load_tunings()
    with pytest.raises(OSError, match=str(path)):
        save_tunings()
    assert not path.with_name(f"{path.name}.lock").exists()


def test_the_table_asks_for_the_named_file():
    assert SCALED_MM.before in (None, load_named)
