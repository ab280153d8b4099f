"""The run-time compiler without a GPU: what it is given, and that nothing is kept of what fails."""

import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from fp8core.errors import BackendError
from fp8core.runtime import compiler, device, jit, kernel_cache, launches, sources
from fp8core.runtime.args import Pointer
from support.targets import H200
from support.threads import in_time


class OneArgs(NamedTuple):
    places: Pointer


THREADS = 8


class Machine:
    """A driver and its compiler that do as they are told, and count what they are asked for.

    A module is unloaded with its last reference, as CuPy's is.
    """

    def __init__(self):
        self.compiled, self.loaded, self.unloaded = [], [], []
        self.refuse_compile = self.refuse_load = False
        self.at_work = None
        """A barrier that every compilation waits at, if there is one."""
        machine = self

        class Module:
            def load(self, code):
                if machine.refuse_load:
                    raise RuntimeError("CUDA_ERROR_OUT_OF_MEMORY")
                machine.loaded.append(code)
                self.code = code

            def get_function(self, entry):
                return SimpleNamespace(ptr=0xABC0)

            def __del__(self):
                machine.unloaded.append(getattr(self, "code", None))

        self.cuda = SimpleNamespace(Module=Module, driver=None)

    def compile_text(self, text, options, name="fp8core"):
        if self.at_work is not None:
            self.at_work.wait(timeout=60)
        self.compiled.append(text)
        if self.refuse_compile:
            raise BackendError("refused by the compiler")
        return text.encode()


@pytest.fixture
def machine(tmp_path, monkeypatch):
    made = Machine()
    monkeypatch.setenv("FP8CORE_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setattr(device, "cupy", lambda: made)
    monkeypatch.setattr(device, "platform", lambda: "cuda")
    monkeypatch.setattr(device, "current", lambda: 0)
    monkeypatch.setattr(device, "target", lambda ordinal: H200)
    monkeypatch.setattr(device, "on", lambda ordinal: nullcontext())
    monkeypatch.setattr(compiler, "version", lambda: "a compiler 1.0")
    monkeypatch.setattr(compiler, "compile_text", made.compile_text)
    made.folder = tmp_path / "kernels"
    return made


def kept(machine):
    return list(machine.folder.iterdir()) if machine.folder.exists() else []


def together(count, work):
    """Return what ``count`` threads made of ``work``, all begun at once: a result or an exception each."""
    start = threading.Barrier(count)

    def one(i):
        start.wait(timeout=60)
        try:
            return work(i)
        except BackendError as error:
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))


@pytest.mark.parametrize("fault", ["refuse_compile", "refuse_load"])
@pytest.mark.parametrize("threads", [1, THREADS])
def test_nothing_is_kept_of_what_fails(machine, fault, threads):
    modules = compiler.Modules()
    setattr(machine, fault, True)
    found = together(threads, lambda _: modules.load("text", ()))
    said = {"refuse_compile": "refused by the compiler", "refuse_load": "the driver cannot load fp8core"}[fault]
    assert all(isinstance(error, BackendError) and said in str(error) for error in found), found
    assert len(modules) == len(modules._turns) == 0
    assert machine.loaded == []
    assert len(kept(machine)) == (fault == "refuse_load"), "what the compiler made is good for another process"
    setattr(machine, fault, False)
    machine.compiled.clear()
    again = together(threads, lambda _: modules.load("text", ()))
    assert len({id(module) for module in again}) == 1
    assert machine.loaded == [b"text"]
    assert len(machine.compiled) == (fault == "refuse_compile")


def test_code_on_disk_that_the_driver_refuses_is_compiled_again_and_replaced(machine, monkeypatch):
    """Such as that of a compiler whose version says less than its code depends on."""
    name = compiler.file_name(H200, "text", ())
    kernel_cache.keep(name, b"refused")
    load = machine.cuda.Module.load

    def refusing(module, code):
        if code == b"refused":
            raise RuntimeError("CUDA_ERROR_NO_BINARY_FOR_GPU")
        load(module, code)

    monkeypatch.setattr(machine.cuda.Module, "load", refusing)
    with pytest.warns(RuntimeWarning, match=r"cannot be used, .*NO_BINARY_FOR_GPU: compiled again"):
        compiler.Modules().load("text", ())
    assert machine.loaded == [b"text"]
    assert kernel_cache.fetch(name, lambda: b"anew") == (b"text", True)


@pytest.mark.parametrize("kept", [False, True])
def test_code_that_the_compiler_makes_alike_is_not_replaced(machine, kept):
    """The driver's reason is another one then, and what it refused is good."""
    name = compiler.file_name(H200, "text", ())
    if kept:
        kernel_cache.keep(name, b"text")
    machine.refuse_load = True
    with pytest.raises(BackendError, match=r"the driver cannot load fp8core .*OUT_OF_MEMORY"):
        compiler.Modules().load("text", ())
    assert machine.compiled == ["text"]


def test_a_failed_launcher_is_prepared_anew(machine, monkeypatch):
    monkeypatch.setattr(compiler, "load", compiler.Modules().load)
    monkeypatch.setattr(launches, "_launch_function", lambda platform: lambda *arguments: 0)
    monkeypatch.setattr(device, "count", lambda: 1)
    name, constants = sources.names("cuda")[0], {"ONLY_HERE": 1}
    machine.refuse_compile = True
    for _ in range(2):
        with pytest.raises(BackendError, match="refused by the compiler"):
            jit.prepare(H200, name, "entry", constants, OneArgs, block=1)
    machine.refuse_compile = False
    assert jit.prepare(H200, name, "entry", constants, OneArgs, block=1).function.address == 0xABC0
    assert len(machine.compiled) == 3


def test_a_destructor_amid_a_compilation_may_need_the_same_kernel(machine, monkeypatch):
    """A collection of garbage may begin anywhere, and end in a call of the library."""
    modules, compiled, found = compiler.Modules(), compiler.compile_text, []

    def amid(*given):
        if not found:
            found.append(None)
            found[0] = modules.load("text", ())
        return compiled(*given)

    monkeypatch.setattr(compiler, "compile_text", amid)
    in_time(lambda: found.append(modules.load("text", ())))
    assert found == [modules.load("text", ())] * 2


def test_a_destructor_amid_allowing_shared_memory_may_need_another_kernel(machine):
    module, found = machine.cuda.Module(), []

    def attribute(which, address):
        if not found:
            found.append(None)
            found[0] = compiler.function(module, "other", 1 << 16)
        return 0

    machine.cuda.driver = SimpleNamespace(
        CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8,
        funcGetAttribute=attribute,
        funcSetAttribute=lambda *_: None,
    )
    in_time(lambda: found.append(compiler.function(module, "entry", 1 << 16)))
    assert [each.address for each in found] == [0xABC0, 0xABC0]


def test_threads_share_a_module_and_compile_others_beside_it(machine):
    modules = compiler.Modules()
    machine.at_work = threading.Barrier(2)  # broken unless two compile at once
    found = together(THREADS, lambda i: modules.load(f"text {i % 2}", ()))
    assert sorted(machine.compiled) == ["text 0", "text 1"]
    assert len({id(module) for module in found}) == len(modules) == 2


def test_modules_of_devices_and_options_are_apart(machine, monkeypatch):
    modules = compiler.Modules()
    first = modules.load("text", ())
    assert modules.load("text", ()) is first
    assert modules.load("text", ("-DONE",)) is not first
    monkeypatch.setattr(device, "current", lambda: 1)
    assert modules.load("text", ()) is not first


def test_a_launch_keeps_its_module_loaded(machine, monkeypatch):
    monkeypatch.setattr(launches, "_launch_function", lambda platform: lambda *arguments: 0)
    monkeypatch.setattr(device, "count", lambda: 1)
    modules = compiler.Modules()
    launcher = launches.Launcher(H200, compiler.function(modules.load("text", ()), "f"), "f", ["P"], (1, 1, 1), 0, b"")
    bound = launcher.bind((1, 1, 1))
    del modules, launcher
    gc.collect()
    assert machine.unloaded == []
    bound(0, 0)
    del bound
    gc.collect()
    assert machine.unloaded == [b"text"]


def test_the_process_s_modules_cannot_be_emptied():
    """Launches recorded in a graph hold an address and no module."""
    assert not [name for name in dir(compiler.MODULES) if "clear" in name or "forget" in name]
    assert compiler.load == compiler.MODULES.load


@pytest.fixture
def nvrtc():
    pytest.importorskip("cupy")
    if device.platform() != "cuda":
        pytest.skip("the CUDA compiler is meant")
    try:
        device.cupy().cuda.nvrtc.getVersion()
    except (ImportError, OSError, RuntimeError) as error:
        pytest.skip(f"NVRTC: {error}")


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120"])
def test_the_compiler_makes_code_without_a_device(arch):
    text = 'extern "C" __global__ void f(int* p) { *p = VALUE; }'
    code = compiler.compile_text(text, (f"-arch={arch}", "-std=c++17", "-DVALUE=3"))
    assert code.startswith(b"\x7fELF")
    assert b"f" in code


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(("platform", "code"), [("cuda", b"cubin"), ("hip", b"code object")])
def test_a_program_of_the_compiler_is_destroyed(monkeypatch, platform, code, fails):
    destroyed = []

    def compile_program(program, options):
        if fails:
            raise RuntimeError("NVRTC_ERROR_COMPILATION")

    compiler_of = SimpleNamespace(
        createProgram=lambda text, name, *headers: (text, name),
        compileProgram=compile_program,
        getCUBIN=lambda program: b"cubin" if platform == "cuda" else b"",  # hipRTC has none
        getPTX=lambda program: b"text" if platform == "cuda" else b"code object",
        getProgramLog=lambda program: "the log",
        destroyProgram=destroyed.append,
    )
    monkeypatch.setattr(device, "platform", lambda: platform)
    monkeypatch.setattr(device, "cupy", lambda: SimpleNamespace(cuda=SimpleNamespace(nvrtc=compiler_of)))
    monkeypatch.setattr(compiler, "version", lambda: "a compiler 1.0")
    if fails:
        with pytest.raises(BackendError, match=r"a compiler 1.0 cannot compile f: NVRTC_ERROR(.|\n)*-O3(.|\n)*the log"):
            compiler.compile_text("text", ("-O3",), "f")
    else:
        assert compiler.compile_text("text", ("-O3",), "f") == code
    assert destroyed == [("text", "f")]


@pytest.mark.usefixtures("nvrtc")
def test_a_compile_error_holds_the_log_and_the_options():
    with pytest.raises(BackendError) as caught:
        compiler.compile_text('#line 7 "quantize.cu"\nint broken = missing;', ("-arch=sm_90a",), "quantize")
    text = str(caught.value)
    for part in (
        "cannot compile quantize",
        "NVRTC_ERROR_COMPILATION",
        "-arch=sm_90a",
        "quantize.cu(7)",
        '"missing" is undefined',
    ):
        assert part in text, text


@pytest.mark.usefixtures("nvrtc")
def test_the_compilers_version_is_known():
    assert any(letter.isdigit() for letter in compiler.version())


class Driver:
    """A driver that keeps what functions are told, which have 48 KB of shared memory, 1 KB of it declared."""

    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
    CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT = 9

    def __init__(self):
        self.told = {}

    def funcGetAttribute(self, attribute, address):
        return self.told.get((address, attribute), 47 << 10)

    def funcSetAttribute(self, address, attribute, value):
        self.told[address, attribute] = value


@pytest.mark.parametrize(
    ("platform", "shared_bytes", "all_shared", "told"),
    [
        ("cuda", 0, False, {}),
        ("cuda", 47 << 10, False, {}),
        ("cuda", 48 << 10, False, {8: 48 << 10}),
        ("cuda", 200 << 10, False, {8: 200 << 10}),
        ("cuda", 0, True, {9: 100}),
        ("cuda", 200 << 10, True, {8: 200 << 10, 9: 100}),
        ("hip", 60 << 10, True, {}),
    ],
)
def test_a_function_is_told_what_shared_memory_it_may_ask_for_and_is_to_leave(
    machine, monkeypatch, platform, shared_bytes, all_shared, told
):
    driver = machine.cuda.driver = Driver()
    monkeypatch.setattr(device, "platform", lambda: platform)
    module = compiler.Modules().load("text", ())
    found = compiler.function(module, "f", shared_bytes, all_shared=all_shared)
    assert found == compiler.Function(0xABC0, module)
    assert driver.told == {(0xABC0, attribute): value for attribute, value in told.items()}
