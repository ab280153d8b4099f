"""Which library is found and what it answers: of a recording one, and of the real cuBLASLt without a GPU."""

import ctypes
import re
import threading
from pathlib import Path

import pytest

from fp8core.errors import BackendError
from fp8core.kernels.gemm.blaslt import descriptors as blaslt_product
from fp8core.kernels.gemm.blaslt import library, query
from fp8core.kernels.gemm.blaslt.dialects import CUBLASLT, DIALECTS, HIPBLASLT, SCALE_MODES, WIDTHS
from fp8core.kernels.gemm.blaslt.library import Handle, Library
from fp8core.kernels.gemm.blaslt.mapping import product
from fp8core.kernels.gemm.blaslt.places import candidates
from fp8core.runtime import device
from gemm.test_blaslt import CUDA
from support.blaslt_fixtures import built, hip_stub, stub  # noqa: F401
from support.blaslt_launches import AMAX, BIAS, OUT_SCALE, SCALE_A, SCALE_B
from support.blaslt_tools import forget, problem
from support.targets import H200


def test_no_offer_is_an_answer(stub):
    stub.offers(0)
    answer = query.refusal(product(problem("row")))
    said = "offers no algorithm for m=64 n=256 k=4096 to bfloat16 with scales OUTER_VEC and OUTER_VEC"
    assert answer == f"cuBLASLt ({stub.path}) {said}"


def test_old_version_is_an_answer_only_where_it_matters(stub):
    stub.version(120805)
    assert query.refusal(product(problem())) is None
    answer = query.refusal(product(problem("group x block")))
    assert answer == f"cuBLASLt ({stub.path}) has version 120805; BLK128x128 needs 120900"
    assert not stub.lines("Create")[1:]


def test_the_heuristic_is_queried_once(stub):
    for _ in range(3):
        query.refusal(product(problem()))
    assert len(stub.lines("MatmulAlgoGetHeuristic")) == 2  # with a workspace and without


def test_device_that_is_not_here_is_told_before_a_library_is_loaded(stub, monkeypatch):
    loaded = []
    monkeypatch.setattr(
        "fp8core.kernels.gemm.blaslt.library.candidates", lambda dialect: iter(loaded.append(dialect) or [])
    )
    far = query.refusal(product(problem(target=H200._replace(device=7))))
    assert far == "its library cannot be queried: this machine has no device 7"
    other = query.refusal(product(problem(target=H200._replace(arch=100))))
    assert other == "its library cannot be queried: device 0 here is sm_90 (device 0)"
    assert not loaded


def test_missing_library_is_an_answer(monkeypatch, stub):
    monkeypatch.setattr(
        "fp8core.kernels.gemm.blaslt.library.candidates", lambda dialect: iter(["/nowhere/libcublasLt.so.13"])
    )
    forget()
    answer = query.refusal(product(problem()))
    assert answer.startswith("cuBLASLt cannot be loaded from /nowhere/libcublasLt.so.13: ")


def test_library_without_a_function_is_refused():
    with pytest.raises(BackendError, match=r"cuBLASLt cannot be loaded from libc\.so\.6: .*cublasLtCreate"):
        Library(CUBLASLT, "libc.so.6")


def test_wheel_is_found_below_a_folder_of_the_path(tmp_path, monkeypatch):
    folder = tmp_path / "nvidia" / "cublas" / "lib"
    folder.mkdir(parents=True)
    (folder / "libcublasLt.so.12").touch()
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    found = list(candidates(CUBLASLT))
    assert str(folder / "libcublasLt.so.12") in found
    assert found[-2:] == ["libcublasLt.so.13", "libcublasLt.so.12"]


def test_library_that_the_process_has_loaded_comes_first(stub, monkeypatch):
    monkeypatch.undo()
    dialect = CUBLASLT._replace(sonames=("libm.so.6", "libcublasLt.so.13"))
    assert next(candidates(dialect)) == "libm.so.6"


def test_every_attribute_has_a_width():
    for dialect in DIALECTS.values():
        assert {*dialect.attributes, *dialect.preferences} <= WIDTHS.keys()
        assert dialect.statuses[0].endswith("_SUCCESS")


# ---- the real cuBLASLt: loads and makes descriptors without a GPU


@pytest.fixture(scope="module")
def real():
    forget()
    found = library.find("cuda")
    if isinstance(found, str):
        pytest.skip(found)
    yield found
    forget()


def test_real_library_tells_its_version(real):
    assert real.version >= 120000


def test_real_library_names_its_statuses(real):
    name = real.function("GetStatusName")
    name.argtypes, name.restype = (ctypes.c_int,), ctypes.c_char_p
    for status in range(20):
        theirs = name(status).decode()
        assert CUBLASLT.statuses.get(status, "unrecognized status") == theirs


@pytest.mark.parametrize("case", CUDA)
def test_real_library_takes_the_descriptors(real, case):
    p, want = CUDA[case]
    operation = blaslt_product.Operation(real, product(p))
    operation.point((SCALE_A, SCALE_B, BIAS, OUT_SCALE, AMAX))
    get = real.function("MatmulDescGetAttribute")
    get.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    for number, (width, value) in want.items():
        data, written = ctypes.c_uint64(0), ctypes.c_size_t()
        status = get(operation.handle, number, ctypes.byref(data), width, ctypes.byref(written))
        assert (status, written.value, data.value) == (0, width, value), number
    layouts = blaslt_product.Layouts(real, product(p))
    get = real.function("MatrixLayoutGetAttribute")
    get.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    for layout, dtype, want_shape in (
        (layouts.weight, 28, (p.k, p.n, p.ldb)),
        (layouts.tokens, 28, (p.k, p.m, p.lda)),
        (layouts.out, CUBLASLT.types[p.out], (p.n, p.m, p.ldo)),
    ):
        got = []
        for number, width in ((0, 4), (2, 8), (3, 8), (4, 8)):
            data, written = ctypes.c_uint64(0), ctypes.c_size_t()
            assert get(layout.handle, number, ctypes.byref(data), width, ctypes.byref(written)) == 0
            got.append(data.value)
        assert got == [dtype, *want_shape]


def test_real_library_refuses_a_wrong_width(real):
    operation = Handle(real, "MatmulDesc", 68, 0, subject="a test")
    data = ctypes.c_uint64(1)
    status = real.function("MatmulDescSetAttribute")(operation.handle, 25, ctypes.addressof(data), 4)
    assert real.status_name(status) == "CUBLAS_STATUS_INVALID_VALUE (7)"


def test_real_library_without_a_gpu_says_so(real, monkeypatch):
    if device.count():
        pytest.skip("there is a GPU")
    monkeypatch.setattr(device, "on", lambda ordinal: threading.Lock())
    with pytest.raises(BackendError, match=r"cublasLtCreate: CUBLAS_STATUS_NOT_INITIALIZED \(1\) for device 0"):
        real.handles.of_device(0)


def header() -> str:
    """Return cublasLt.h of a wheel, or nothing."""
    paths = (Path(found).parents[1] / "include" / "cublasLt.h" for found in candidates(CUBLASLT) if "/" in found)
    return next((path.read_text() for path in paths if path.is_file()), "")


@pytest.mark.parametrize("table", ["attributes", "preferences", "modes"])
def test_numbers_are_those_of_the_header(table):
    text = header()
    if not text:
        pytest.skip("no wheel with cublasLt.h")
    names, prefix, suffix = {
        "attributes": (CUBLASLT.attributes, "CUBLASLT_MATMUL_DESC_", ""),
        "preferences": (CUBLASLT.preferences, "CUBLASLT_MATMUL_PREF_", ""),
        "modes": (SCALE_MODES, "CUBLASLT_MATMUL_MATRIX_SCALE_", "_32F"),
    }[table]
    for name, number in names.items():
        assert re.search(rf"\b{prefix}{name}{suffix} = (\d+),", text)[1] == str(number), name


def test_hipblaslt_shares_what_it_shares():
    assert HIPBLASLT.types["float8_e4m3fnuz"] == 1000
    assert {name for name in CUBLASLT.attributes if name not in HIPBLASLT.attributes} == {"FAST_ACCUM"}
