"""The package: what a wheel holds, what an import does, which layers there are, and that the README says so."""

import os
import re
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def python(code, path, cwd):
    """Run code in a fresh interpreter that finds fp8core in ``path``."""
    environment = {**os.environ, "PYTHONPATH": str(path)}
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd, env=environment)
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    pytest.importorskip("hatchling", reason="hatchling is not installed (extra test)")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return next(folder.glob("*.whl"))


def files(*folders):
    """Return the paths of all files in folders of the repository, relative to it."""
    found = (path for folder in folders for path in (ROOT / folder).rglob("*"))
    return {p.relative_to(ROOT).as_posix() for p in found if p.is_file() and "__pycache__" not in p.parts}


def test_the_wheel_holds_the_package_and_the_device_sources_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    sources = {f"fp8core/_sources/{name}" for name in files("cuda_src", "hip_src")}
    assert names == files("fp8core") | sources | {"fp8core/_examples/minilm.py"}
    assert "fp8core/py.typed" in names
    assert any(name.endswith(".cu") for name in sources)
    assert any(name.endswith(".hip") for name in sources)


def test_the_wheel_says_what_it_needs(wheel):
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith("/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode())
        scripts = archive.read(name.replace("METADATA", "entry_points.txt")).decode()
        assert any(name.endswith("/licenses/LICENSE") for name in archive.namelist())
    needed = metadata.get_all("Requires-Dist")
    base = {re.split(r"[<>=~ ;]", need)[0].replace("_", "-") for need in needed if "extra ==" not in need}
    assert base == {"numpy", "ml-dtypes", "safetensors", "platformdirs", "rich", "typer"}
    assert metadata["Requires-Python"] == ">=3.11"
    assert set(metadata.get_all("Provides-Extra")) == {
        "cuda12",
        "cuda13",
        "rocm7",
        "demo",
        "test",
        "docs",
        "frameworks",
    }
    assert "fp8core = fp8core.cli:main" in scripts


USE = """
from pathlib import Path
import numpy as np
import fp8core
from fp8core import demo
from fp8core.runtime import sources
assert Path(fp8core.__file__).is_relative_to(Path.cwd()), fp8core.__file__
assert sources.root() == Path.cwd() / "fp8core" / "_sources", sources.root()
assert all(sources.flatten(platform, name) for platform in ("cuda", "hip") for name in sources.names(platform))
assert len(demo.encoder_module().SENTENCES) >= 8
layer = fp8core.Fp8Linear.from_weight(np.ones((32, 64), np.float32))
assert layer(np.ones((2, 64), np.float32)).shape == (2, 32)
"""


def test_the_unpacked_wheel_works_without_the_repository(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    python(USE, tmp_path, tmp_path)
    out = python("import sys; sys.argv = ['fp8core', 'info']; from fp8core import cli; cli.main()", tmp_path, tmp_path)
    assert "scaled_mm_per_token" in out


IN_AN_ARCHIVE = """
import numpy as np
import fp8core
from fp8core.runtime import sources
assert ".whl" in fp8core.__file__
assert fp8core.quantize(np.ones((2, 64), np.float32)).scale.shape == (2, 1)  # the host needs no sources
try:
    sources.root()
except fp8core.BackendError as error:
    print(error)
"""


def test_a_wheel_that_is_imported_as_it_is_has_the_host_and_says_why_it_compiles_nothing(wheel, tmp_path):
    out = python(IN_AN_ARCHIVE, wheel, tmp_path)
    assert (
        out.strip()
        == f"fp8core needs to be installed in a folder, as it reads device sources there, got {wheel}/fp8core"
    )


def test_a_bare_checkout_works_from_anywhere(tmp_path):
    out = python("import fp8core; print(fp8core.__file__)", ROOT, tmp_path)
    assert out.strip() == str(ROOT / "fp8core" / "__init__.py")


HEAVY = """
import sys
import {module}
loaded = sorted({{name.partition(".")[0] for name in sys.modules}} & {{"cupy", "torch", "jax", "jaxlib", "cuda"}})
assert not loaded, loaded
maps = open("/proc/self/maps").read()
libraries = [name for name in ("libcuda", "libnvrtc", "libcublas", "libamdhip", "libhiprtc") if name in maps]
assert not libraries, libraries
"""


@pytest.mark.parametrize("module", ["fp8core", "fp8core.w8a8", "fp8core.checkpoint", "fp8core.cli", "fp8core.demo"])
def test_an_import_loads_no_framework_and_touches_no_gpu(module, tmp_path):
    python(HEAVY.format(module=module), ROOT, tmp_path)


OPENED = """
import sys
import numpy, ml_dtypes, platformdirs
opened = []
def hook(event, arguments):
    if event == "open" and isinstance(arguments[0], str) and not arguments[0].endswith((".py", ".pyc")):
        opened.append(arguments[0])
    if event in ("ctypes.dlopen", "subprocess.Popen", "socket.connect"):
        opened.append((event, arguments))
sys.addaudithook(hook)
import fp8core
assert not [o for o in opened if not str(o).endswith(".so") and ".pyc." not in str(o)], opened
"""


def test_an_import_reads_no_file_loads_no_library_and_starts_no_process(tmp_path):
    python(OPENED, ROOT, tmp_path)


def test_public_names_are_there_and_documented():
    import fp8core

    for name in fp8core.__all__:
        value = getattr(fp8core, name)
        assert value.__doc__ or isinstance(value, tuple), name
    assert fp8core.__all__ == sorted(fp8core.__all__, key=lambda n: (not n.isupper(), n[0].islower(), n))


def test_the_import_contract_holds():
    pytest.importorskip("importlinter", reason="import-linter is not installed (extra test)")
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as run; run()", "--no-cache"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "0 broken" in run.stdout


def test_the_readme_has_the_two_commands_and_ci_runs_the_second():
    commands = re.findall(r"^\$ (python3 -m venv \.venv && .*)$", README, re.MULTILINE)
    assert [command.rpartition("/")[2] for command in commands] == ["fp8core demo", "python -m pytest -n 2"]
    run = (ROOT / ".ci" / "run").read_text()
    pattern = re.search(r"sed -n '(.*)' README.md", run)[1]
    found = subprocess.run(
        ["sed", "-n", pattern, ROOT / "README.md"], capture_output=True, text=True, check=True
    ).stdout
    assert found.splitlines()[0] == commands[1]
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_the_support_matrix_is_current():
    command = [sys.executable, "docs/make_support_matrix.py", "--check"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment)
    assert run.returncode == 0, run.stderr


def test_no_registry_is_named():
    hosts = ["py" + "pi.org", "python" + "hosted", "download.py" + "torch", "conda." + "anaconda", "ngc.nv" + "idia"]
    named = []
    for name in files("fp8core", "tests", "docs", "examples", "bench", ".ci", "cuda_src", "hip_src"):
        text = (ROOT / name).read_bytes().decode("utf-8", "replace")
        named += [f"{name}: {host}" for host in hosts if host in text]
    assert named == []
