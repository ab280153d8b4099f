"""Compilers of device code that need no device: NVRTC by ctypes, and clang for AMD GPUs."""

import ctypes
import hashlib
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from bisect import bisect_right
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from fp8core.runtime import jit
from fp8core.runtime.jit import Request
from fp8core.target import Target

CLANG = next((found for name in ("clang-22", "clang") if (found := shutil.which(name))), None)


class Binary(NamedTuple):
    """A compiled kernel and its resources."""

    registers: int
    """The registers per thread, of 32 bits each (on AMD the vector registers)."""
    stack: int
    """The bytes of local memory per thread: spills, and arrays that are indexed at run time."""
    shared: int
    """Static shared memory of a block, in bytes."""
    code: bytes
    """A cubin, or AMD assembly."""


class CompileError(Exception):
    """The messages of the compiler for a source that it refused or warned of."""


@cache
def missing(platform: str) -> str | None:
    """Return why the compiler of a platform is not available, or None."""
    if platform == "hip":
        return None if CLANG else "clang-22 (Debian: clang-22 lld-22) is not installed"
    try:
        _nvrtc()
        _tool("cuobjdump")
        _tool("nvdisasm")
    except (ImportError, OSError, CompileError) as error:
        return f"NVRTC (nvidia-cuda-nvrtc, -cuobjdump, -nvdisasm, cuda-pathfinder) is not installed: {error}"
    return None


@cache
def compiled(target: Target, request: Request, folder: Path | None = None) -> Binary:
    """Compile a request for a target; raises CompileError.

    With a folder, results are cached there under a hash of everything that they depend on: the processes of one test
    run each have a part of the tests, and need the same kernels.
    """
    if folder is None:
        return _cuda(request) if target.platform == "cuda" else _hip(target, request)
    parts = (target.platform, target.arch, request.text, request.options, request.entry, _versions(target.platform))
    path = folder / hashlib.sha256(repr(parts).encode()).hexdigest()
    try:
        numbers, _, code = path.read_bytes().partition(b"\n")
        return Binary(*json.loads(numbers), code)
    except FileNotFoundError:
        made = compiled(target, request)
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
            file.write(json.dumps(made[:3]).encode() + b"\n" + made.code)
        Path(file.name).replace(path)
        return made


@cache
def _versions(platform: str) -> str:
    """Return the versions of the compiler and the tools of a platform."""
    if platform == "hip":
        return subprocess.run((str(CLANG), "--version"), capture_output=True, text=True, check=True).stdout
    found = ctypes.c_int(), ctypes.c_int()
    _nvrtc().nvrtcVersion(*map(ctypes.byref, found))
    tool = subprocess.run((_tool("cuobjdump"), "--version"), capture_output=True, text=True, check=True).stdout
    return f"NVRTC {found[0].value}.{found[1].value} {Path(_nvrtc()._name).stat().st_size} {tool}"


@cache
def _nvrtc() -> ctypes.CDLL:
    from cuda.pathfinder import load_nvidia_dynamic_lib

    path = Path(str(load_nvidia_dynamic_lib("nvrtc").abs_path))
    for builtins in path.parent.glob("libnvrtc-builtins.so*"):  # NVRTC searches them on the loader's path only
        ctypes.CDLL(str(builtins))
    return ctypes.CDLL(str(path))


@cache
def _tool(name: str) -> str:
    from cuda.pathfinder import find_nvidia_binary_utility

    path = find_nvidia_binary_utility(name)
    if path is None:
        raise CompileError(f"no {name}")
    return str(path)


def cubin(text: str, options: tuple[str, ...]) -> bytes:
    """Return the machine code that NVRTC generates; any message of the compiler is an error."""
    library, program, size = _nvrtc(), ctypes.c_void_p(), ctypes.c_size_t()
    library.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"kernel.cu", 0, None, None)
    try:
        array = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        status = library.nvrtcCompileProgram(program, len(options), array)
        library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value + 1)
        library.nvrtcGetProgramLog(program, log)
        if status or log.value.strip():
            raise CompileError(f"{' '.join(options)}\n{log.value.decode(errors='replace')}")
        library.nvrtcGetCUBINSize(program, ctypes.byref(size))
        code = ctypes.create_string_buffer(size.value)
        library.nvrtcGetCUBIN(program, code)
        return code.raw
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _cuda(request: Request) -> Binary:
    code = cubin(request.text, request.options)
    usage = _inspected(code, "cuobjdump", "--dump-resource-usage")
    found = re.search(rf"Function {request.entry}:\s*REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", usage)
    if found is None:
        raise CompileError(f"no entry {request.entry} in {usage}")
    registers, stack, shared, local = map(int, found.groups())
    if "-arch=sm_8" not in " ".join(request.options):
        shared = max(shared - 1024, 0)  # from sm_90 on, cuobjdump includes the system's 1024 bytes per block
    return Binary(registers, stack + local, shared, code)


def _hip(target: Target, request: Request) -> Binary:
    if CLANG is None:
        raise CompileError("no clang")
    mode = ("-x", "hip", "--offload-device-only", f"--offload-arch=gfx{target.arch:x}", "--no-gpu-bundle-output")
    options = (
        "-nogpuinc",
        "-nogpulib",
        "-fdeclspec",
        "-Wall",
        "-Werror",
        "-Wno-unused-const-variable",
        "-Wno-cuda-compat",
        *request.options,
        "-S",
        "-o",
        "-",
        "-",
    )
    done = subprocess.run((CLANG, *mode, *options), input=request.text, capture_output=True, text=True, check=False)
    if done.returncode or done.stderr:
        raise CompileError(f"gfx{target.arch:x} {' '.join(request.options)}\n{done.stderr}")
    text = done.stdout
    called = set(re.findall(r"\b(\w+)@(?:rel32|gotpcrel32|abs32)", text))
    unknown = {name for name in called if not re.search(rf"^{name}:|\.(?:comm|lcomm)\s+{name}\b", text, re.MULTILINE)}
    if unknown:
        raise CompileError(f"{request.entry} calls what no library gives: {', '.join(sorted(unknown))}")

    def number(key: str) -> int:
        found = re.search(rf"\.{key}:\s*(\d+)", text)
        if found is None:
            raise CompileError(f"no {key} in the metadata of {request.entry}")
        return int(found[1])

    # Scalar registers spill into lanes of vector registers, which are counted.
    stack = number("private_segment_fixed_size") + number("vgpr_spill_count")
    return Binary(number("vgpr_count"), stack, number("group_segment_fixed_size"), text.encode())


class HipRtc:
    """hipRTC by its C interface: needs neither CuPy nor a GPU.

    Args:
        library: the shared library, already loaded.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    @property
    def version(self) -> tuple[int, int]:
        """The release that the library reports."""
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("hiprtcVersion", ctypes.byref(major), ctypes.byref(minor))
        return major.value, minor.value

    def compile(self, request: Request) -> bytes:
        """Return the code object of a request; raises CompileError with the log if there are errors or warnings."""
        program = ctypes.c_void_p()
        text = request.text.encode()
        self._call("hiprtcCreateProgram", ctypes.byref(program), text, request.entry.encode(), 0, None, None)
        try:
            options = [option.encode() for option in request.options]
            given = (ctypes.c_char_p * len(options))(*options)
            status = self._library.hiprtcCompileProgram(program, len(options), given)
            log = self._text(program, "ProgramLog").decode(errors="replace").strip("\0 \n")
            if status or log:
                raise CompileError(f"hipRTC, {request.entry} {' '.join(request.options)}: status {status}\n{log}")
            return self._text(program, "Code")
        finally:
            self._call("hiprtcDestroyProgram", ctypes.byref(program))

    def _text(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"hiprtcGet{what}Size", program, ctypes.byref(size))
        text = ctypes.create_string_buffer(max(size.value, 1))
        self._call(f"hiprtcGet{what}", program, text)
        return text.raw[: size.value]

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise CompileError(f"{name}: status {status}")


@cache
def hiprtc() -> HipRtc | None:
    """Return hipRTC 7 or later, from a wheel of TheRock, ROCM_PATH or the system; None if there is none."""
    names = ("libhiprtc.so.8", "libhiprtc.so.7")
    wheels = [
        str(p) for entry in sys.path for name in names if (p := Path(entry, "_rocm_sdk_core/lib", name)).is_file()
    ]
    system = [f"{os.environ.get('ROCM_PATH', '/opt/rocm')}/lib/{name}" for name in names]
    for name in (*wheels, *system, *names):
        try:
            return HipRtc(ctypes.CDLL(name))
        except OSError:
            continue
    return None


def instructions(target: Target, binaries: Sequence[Binary]) -> list[str]:
    """Return the SASS or the AMD assembly of each kernel.

    nvdisasm takes as long to start as to read a hundred kernels, so one run reads the machine code of all of them.
    """
    if target.platform == "hip":
        return [binary.code.decode() for binary in binaries]
    texts = [_machine_code(binary.code) for binary in binaries]
    architecture = next(option for option in jit.standard_options(target) if option.startswith("-arch=sm_"))
    raw = ("--binary", architecture.replace("-arch=sm_", "SM"), "--no-dataflow")
    listing = _inspected(b"".join(texts), "nvdisasm", *raw)
    lines = [
        (int(found[1], 16), found[0]) for found in re.finditer(r"^\s*/\*([0-9a-f]{4,})\*/.*$", listing, re.MULTILINE)
    ]
    ends = list(accumulate(map(len, texts)))
    parts: list[list[str]] = [[] for _ in binaries]
    for address, line in lines:
        parts[bisect_right(ends, address)].append(line)
    return ["\n".join(part) for part in parts]


def _machine_code(cubin: bytes) -> bytes:
    """Return the instructions of all functions in a cubin, which is a 64-bit ELF file."""
    (headers,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, of_names = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", cubin, headers + number * size) for number in range(count)]
    names = sections[of_names][4]
    return b"".join(
        cubin[offset : offset + length]
        for name, *_, offset, length in sections
        if cubin.startswith(b".text.", names + name)
    )


def _inspected(code: bytes, tool: str, *options: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(code)
        return subprocess.run((_tool(tool), *options, file.name), capture_output=True, text=True, check=True).stdout
