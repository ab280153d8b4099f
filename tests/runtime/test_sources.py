"""Device sources become one text each: every header once, lines kept, clear errors."""

import subprocess
import sys
from pathlib import Path

import pytest

from fp8core.errors import BackendError
from fp8core.runtime import sources


@pytest.fixture
def tree(tmp_path: Path):
    def write(**files: str) -> Path:
        for name, text in files.items():
            path = tmp_path / name.replace("__", "/").replace("_cuh", ".cuh").replace("_cu", ".cu")
            path.parent.mkdir(exist_ok=True, parents=True)
            path.write_text(text)
        return tmp_path

    return write


def test_a_header_comes_once_and_lines_are_kept(tree):
    base = tree(
        src__a_cu='#include "b.cuh"\n#include "c/d.cuh"\nint a;\n',
        src__b_cuh="#pragma once\nint b;\n",
        src__c__d_cuh='#include "../b.cuh"\nint d;\n',
    )
    assert sources.flatten_file(base, "src/a.cu").splitlines() == [
        '#line 1 "src/a.cu"',
        '#line 1 "src/b.cuh"',
        "",
        "int b;",
        '#line 2 "src/a.cu"',
        '#line 1 "src/c/d.cuh"',
        '#line 2 "src/c/d.cuh"',
        "int d;",
        '#line 3 "src/a.cu"',
        "int a;",
    ]


def test_a_system_header_is_left_alone(tree):
    assert "#include <stdint.h>\n" in sources.flatten_file(tree(a_cu="#include <stdint.h>\n"), "a.cu")


def test_a_missing_header_is_named_with_what_led_to_it(tree):
    with pytest.raises(BackendError, match=r"src/a\.cu -> src/gone\.cuh"):
        sources.flatten_file(tree(src__a_cu='#include "gone.cuh"\n'), "src/a.cu")


def test_a_circle_is_an_error(tree):
    base = tree(a_cu='#include "b.cuh"\n', b_cuh='#include "c.cuh"\n', c_cuh='#include "b.cuh"\n')
    with pytest.raises(BackendError, match=r"circle: a\.cu -> b\.cuh -> c\.cuh -> b\.cuh"):
        sources.flatten_file(base, "a.cu")


def test_a_header_outside_is_refused(tree):
    base = tree(src__a_cu='#include "../b.cuh"\n', b_cuh="int b;\n")
    with pytest.raises(BackendError, match="outside"):
        sources.flatten_file(base / "src", "a.cu")


@pytest.mark.parametrize("platform", ["cuda", "hip"])
def test_every_source_flattens(platform):
    found = sources.names(platform)
    assert found
    for name in found:
        text = sources.flatten(platform, name)
        assert '#include "' not in text
        assert sources.flatten(platform, name) is text


def test_an_unknown_source_is_named():
    with pytest.raises(BackendError, match=r"cuda_src/nothing\.cu"):
        sources.flatten("cuda", "nothing")


def test_a_hip_source_holds_no_word_of_cuda():
    for name in sources.names("hip"):
        text = sources.flatten("hip", name)
        for header in ("platform", "conversions"):
            assert f'#line 1 "cuda_src/{header}.cuh"' not in text, f"hip_src/{name}.hip inlines a CUDA platform header"


def test_the_digest_is_stable_between_processes():
    code = "from fp8core.runtime import sources; print(sources.digest())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert other == sources.digest()
