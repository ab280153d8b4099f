"""`fp8core compile`, with a stand-in for CuPy whose compiler returns what it was given."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.numpy import save_file

import fp8core
from fp8core.runtime import ahead
from support.checkpoints import normal

CUPY = '''
"""A CuPy without a driver. Its compiler fails with options in which it finds $REFUSED, is killed with those in which it
finds $KILLED, and cannot write files of more than $LARGEST bytes."""
import os, resource, signal, sys
from types import SimpleNamespace

def no_device():
    raise RuntimeError("cudaErrorInsufficientDriver: no driver")

class Compiler:
    def createProgram(self, text, name, headers, names):
        return SimpleNamespace(text=text, options=None)
    def compileProgram(self, program, options):
        program.options = options
        if "LARGEST" in os.environ:
            resource.setrlimit(resource.RLIMIT_FSIZE, (int(os.environ["LARGEST"]),) * 2)
        if any(os.environ.get("KILLED", "none at all") in option for option in options):
            os.kill(os.getpid(), signal.SIGKILL)
        if any(os.environ.get("REFUSED", "none at all") in option for option in options):
            raise RuntimeError("NVRTC_ERROR_COMPILATION")
    def getCUBIN(self, program):
        with open(os.environ["COMPILED"], "a") as file:
            file.write(" ".join(program.options) + "\\n")
        return "\\n".join((*program.options, program.text)).encode()
    def getProgramLog(self, program):
        return "the log of the compiler"
    def destroyProgram(self, program):
        pass
    def getVersion(self):
        return 13, 0

runtime = SimpleNamespace(is_hip=os.environ.get("PLATFORM") == "hip", getDeviceCount=no_device, runtimeGetVersion=lambda: 7)
driver = SimpleNamespace(get_build_version=lambda: 13000)
cuda = SimpleNamespace(runtime=runtime, driver=driver, nvrtc=Compiler())
sys.modules["cupy.cuda"] = cuda
'''
STARTING = """
import os, signal, sys
if "INTERRUPTED" in os.environ and "--multiprocessing-fork" in sys.orig_argv:
    os.kill(os.getpid(), signal.SIGINT)
"""
LAYERS = "1,16,64,300x4096x1024"


@pytest.fixture
def fp8core_(tmp_path):
    """Return a function that runs the command line in a process of its own: (exit status, stdout, stderr)."""
    (tmp_path / "standing_in").mkdir()
    (tmp_path / "standing_in" / "cupy.py").write_text(CUPY)
    (tmp_path / "standing_in" / "sitecustomize.py").write_text(STARTING)
    paths = tmp_path / "standing_in", Path(fp8core.__file__).parents[1]

    def run(*arguments, **variables):
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "FP8CORE_CACHE_DIR": str(tmp_path / "kernels"),
            "COMPILED": str(tmp_path / "compiled"),
            **variables,
        }
        command = [sys.executable, "-m", "fp8core", "compile", *map(str, arguments)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout, done.stderr

    return run


def compiled(tmp_path):
    """Return the options of each compilation so far."""
    return (tmp_path / "compiled").read_text().splitlines() if (tmp_path / "compiled").exists() else []


def files(tmp_path):
    return sorted(path.name for path in (tmp_path / "kernels").glob("*.kernel"))


def test_each_kernel_is_compiled_once_and_kept(fp8core_, tmp_path):
    code, said, log = fp8core_("--shapes", LAYERS, "--target", "sm_90")
    found = re.fullmatch(r"(\d+) kernels for sm_90 compiled in [\d.]+ s: (.*)\n", said)
    assert (code, log, found[2]) == (0, "", str(tmp_path / "kernels"))
    options, kept = compiled(tmp_path), files(tmp_path)
    assert len(options) == len(set(options)) == len(kept) == int(found[1]) > 4
    assert all("-arch=sm_90a" in each for each in options)

    code, said, log = fp8core_("--shapes", LAYERS, "--target", "sm_90")
    assert (code, said, log) == (0, f"{len(kept)} kernels for sm_90, all compiled already: {tmp_path}/kernels\n", "")
    code, said, log = fp8core_("--shapes", LAYERS, "--target", "sm_90", "--scheme", "block", "--jobs", 1)
    assert (code, log) == (0, "")
    new = len(files(tmp_path)) - len(kept)
    assert new > 0
    assert said.startswith((f"{new} kernels for sm_90 compiled in", f"{new} kernel for sm_90 compiled in"))
    assert compiled(tmp_path)[: len(options)] == options
    assert len(compiled(tmp_path)) == len(options) + new


def test_a_damaged_file_is_made_again(fp8core_, tmp_path):
    fp8core_("--shapes", "16x4096x1024", "--target", "sm_90")
    first = tmp_path / "kernels" / files(tmp_path)[0]
    sound = first.read_bytes()
    first.write_bytes(sound[:-1])
    code, said, log = fp8core_("--shapes", "16x4096x1024", "--target", "sm_90")
    assert (code, said.startswith("1 kernel for sm_90 compiled in ")) == (0, True)
    assert log.startswith(f"warning: the compiled kernel {first} is not used, it is damaged")
    assert log.count("\n") == 1
    assert first.read_bytes() == sound


def test_the_layers_of_a_model(fp8core_, tmp_path):
    save_file({"up.weight": normal(512, 256), "down.weight": normal(256, 512)}, tmp_path / "m.safetensors")
    code, said, _ = fp8core_(tmp_path / "m.safetensors", "--rows", "1,16", "--target", "sm_120", "--dtype", "float16")
    lines = said.splitlines()
    assert code == 0
    assert lines[0] == f"{tmp_path}/m.safetensors: 2 weights of 2 shapes, 2 numbers of rows each"
    assert re.fullmatch(r"\d+ kernels for sm_120 compiled in .*", lines[1])
    assert lines[2] == "The kernels of sm_120 are compiled and emulated, never run on hardware."
    assert all("-arch=sm_120 " in each for each in compiled(tmp_path))


def write_experts(folder, config):
    sizes = {"gate_proj": (128, 256), "up_proj": (128, 256), "down_proj": (256, 128)}
    names = [
        (f"model.layers.0.mlp.experts.{i}.{part}.weight", shape) for i in range(4) for part, shape in sizes.items()
    ]
    save_file({name: normal(*shape) for name, shape in names}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


def test_the_experts_of_a_model(fp8core_, tmp_path):
    write_experts(tmp_path, {"model_type": "hunyuan_v1_moe", "moe_topk": [2, 2]})
    code, said, log = fp8core_(tmp_path, "--rows", "1,16", "--target", "sm_90", "--scheme", "block")
    assert (code, log) == (0, "")
    assert said.splitlines()[:2] == [
        f"{tmp_path}: 12 weights of 2 shapes, 2 numbers of rows each",
        f"{tmp_path}: 1 mixture of experts of 1 shape, with the same numbers of tokens",
    ]
    sources = [path.read_bytes() for path in (tmp_path / "kernels").glob("*.kernel")]
    assert all(any(entry in each for each in sources) for entry in (b"sm90_grouped", b"count_experts", b"silu_and_mul"))


def test_experts_whose_number_config_json_lacks_are_told(fp8core_, tmp_path):
    write_experts(tmp_path, {"model_type": "mine"})
    code, said, log = fp8core_(tmp_path, "--rows", 1, "--target", "sm_90")
    assert (code, "mixture" in said) == (0, False)
    assert log.startswith("warning: config.json needs one number for all layers as num_experts_per_tok, ")


def test_a_kernel_that_the_compiler_refuses(fp8core_, tmp_path):
    code, said, log = fp8core_("--shapes", LAYERS, "--target", "sm_90", "--jobs", 1, REFUSED="-DFP8_COLUMNS")
    assert (code, said) == (1, "")
    assert "cannot compile fp8core: NVRTC_ERROR_COMPILATION" in log
    assert "the log of the compiler" in log
    assert "Traceback" not in log
    assert len(files(tmp_path)) == len(compiled(tmp_path))  # what was compiled before is kept


def test_a_disk_that_becomes_full(fp8core_, tmp_path):
    code, said, log = fp8core_("--shapes", LAYERS, "--target", "sm_90", "--jobs", 1, LARGEST="4096")
    assert (code, said) == (1, "")
    assert log.startswith(f"error: compiled kernels cannot be kept in {tmp_path}/kernels: File too large; set FP8CORE_")
    assert log.count("\n") == 1
    assert not list((tmp_path / "kernels").iterdir())


def test_a_process_that_is_killed_is_an_error_and_keeps_what_was_compiled(fp8core_, tmp_path):
    code, said, log = fp8core_("--shapes", LAYERS, "--target", "sm_90", "--jobs", 1, KILLED="-DFP8_COLUMNS")
    assert (code, said) == (1, "")
    assert log == "error: jobs needs memory for each process that compiles, got one that was killed: fewer need less\n"
    assert len(files(tmp_path)) == len(compiled(tmp_path))


def test_an_interrupt_is_left_to_the_first_process(fp8core_):
    code, said, log = fp8core_("--shapes", LAYERS, "--target", "sm_90", "--jobs", 2, INTERRUPTED="1")
    assert (code, log) == (0, "")
    assert "compiled in" in said


def test_there_are_no_more_processes_than_cores_that_may_be_used(monkeypatch):
    class Counted(Exception):
        pass

    def counted(processes, **_):
        raise Counted(processes)

    monkeypatch.setattr(ahead, "ProcessPoolExecutor", counted)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {5, 7, 9}, raising=False)
    for jobs, kernels, wanted in ((None, 8, 3), (None, 2, 2), (5, 8, 5), (5, 4, 4)):
        with pytest.raises(Counted) as found:
            ahead.compile_all([None] * kernels, jobs)
        assert found.value.args == (wanted,)


@pytest.mark.parametrize(
    ("arguments", "variables", "code", "match"),
    [
        (("--shapes", "16x64x64"), {}, 2, r"'--target': needs sm_80 .*, as there is no GPU here: .*no driver"),
        (("--shapes", "16x64x64", "--target", "host"), {}, 2, r"'--target': needs sm_80 \(A100\), .*, got 'host'"),
        ((), {}, 2, "'MODEL': needs a model or --shapes, got neither"),
        (("--target", "sm_90"), {}, 2, "needs a model or --shapes, got neither"),
        (("--shapes", "16x64", "--target", "sm_90"), {}, 2, "needs m x n x k as in 1,16x4096x4096, got '16x64'"),
        (("--shapes", "16x64x64", "--target", "sm_90", "--jobs", "0"), {}, 2, "Invalid value for '--jobs'"),
        (("--shapes", "16x64x64", "--target", "gfx942"), {}, 1, "gfx942 needs CuPy for hip, got one with "),
        (("--shapes", "16x64x64", "--target", "sm_90"), {"PLATFORM": "hip"}, 1, "sm_90 needs CuPy for cuda, got one "),
        (("absent", "--target", "sm_90"), {}, 1, "cannot read absent: No such file or directory"),
    ],
)
def test_arguments_that_cannot_be_meant_are_refused_before_anything_is_compiled(
    fp8core_, tmp_path, arguments, variables, code, match
):
    left, said, log = fp8core_(*arguments, **variables)
    assert (left, said) == (code, "")
    assert re.search(match, " ".join(log.split()))
    assert not compiled(tmp_path)


def test_a_folder_that_is_not_used_is_refused_before_anything_is_compiled(fp8core_, tmp_path):
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels").chmod(0o777)
    save_file({"up.weight": normal(512, 256)}, tmp_path / "m.safetensors")
    code, said, log = fp8core_(tmp_path / "m.safetensors", "--target", "sm_90")
    assert (code, said) == (1, "")
    assert f"compiled kernels cannot be kept in {tmp_path}/kernels: " in log
    assert "can be written by others" in log
    assert not compiled(tmp_path)


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_compiled(fp8core_, tmp_path):
    code, said, log = fp8core_("--shapes", LAYERS, "--target", "sm_90", FP8CORE_CACHE_DIR="/proc/kernels")
    assert (code, said) == (1, "")
    assert re.fullmatch(r"error: (\d+) of \1 compiled kernels cannot be kept in /proc/kernels: .*\n", log)
    assert not compiled(tmp_path)
