"""Fetch the kernels that benchmarks compare with, from the wheels of their projects: a folder for `--baselines`.

    python -m bench.fetch FOLDER [--wheels FOLDER] [--python 3.12]

pip downloads about 700 MB. FOLDER then has vLLM's and SGLang's kernels as `vllm_C.so` and `sgl_ops.so`, and in `site`
the package of DeepGEMM that vLLM ships, which compiles its kernels with nvcc at the first use. They load with torch
2.11, on Linux on x86-64. They are for measuring only and not part of the project.
"""

import argparse
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple

TORCH: Final = "2.11"
"""The version of torch that the kernels below are built for; newer versions of them need a newer torch."""


class Library(NamedTuple):
    """A library in a wheel: the requirement for pip, the end of its path in the wheel, and its file name here."""

    requirement: str
    ending: str
    name: str


LIBRARIES: Final = (
    Library("vllm==0.26.0", "vllm/_C_stable_libtorch.abi3.so", "vllm_C.so"),
    Library("sglang-kernel==0.4.5", "sgl_kernel/sm90/common_ops.abi3.so", "sgl_ops.so"),
)
DEEP_GEMM: Final = PurePosixPath("vllm/third_party/deep_gemm")
PLATFORMS: Final = ("manylinux_2_28_x86_64", "manylinux2014_x86_64")


def download(requirement: str, python: str, folder: Path) -> Path:
    """Return the wheel of a requirement, after pip has downloaded it unless it is in the folder already."""
    version = python.replace(".", "")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", python, "--implementation", "cp"]
    for abi in (f"cp{version}", "abi3", "none"):
        command += ["--abi", abi]
    for name in PLATFORMS:
        command += ["--platform", name]
    subprocess.run([*command, "--dest", str(folder), requirement], check=True)
    package, version = requirement.split("==")
    return next(folder.glob(f"{package.replace('-', '_')}-{version}-*.whl"))


def unpack(archive: zipfile.ZipFile, member: str, target: Path) -> None:
    """Write a member of an archive to a file."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with archive.open(member) as source, target.open("wb") as file:
        shutil.copyfileobj(source, file, 1 << 22)


def take(wheel: Path, library: Library, folder: Path) -> None:
    """Extract a library from a wheel, and DeepGEMM if the wheel contains it.

    Raises:
        ValueError: the wheel does not have exactly one such library.
    """
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        found = [name for name in names if name.endswith(library.ending)]
        if len(found) != 1:
            raise ValueError(f"{wheel.name} needs one file {library.ending}, got {found}")
        unpack(archive, found[0], folder / library.name)
        for name in map(PurePosixPath, names):
            if name.is_relative_to(DEEP_GEMM) and name.suffix not in ("", ".pyc"):
                unpack(archive, str(name), folder / "site" / name.relative_to(DEEP_GEMM.parent))


def main() -> int:
    """Fetch the kernels, and print the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where they go; what is there of the same names is replaced")
    parser.add_argument("--wheels", type=Path, help="keep the wheels in this folder, and take those that are there")
    parser.add_argument("--python", default=".".join(platform.python_version_tuple()[:2]), help="default: %(default)s")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        for library in LIBRARIES:
            wheels = chosen.wheels or Path(scratch)
            wheels.mkdir(parents=True, exist_ok=True)
            take(download(library.requirement, chosen.python, wheels), library, chosen.folder)
            print(f"{library.requirement}: {chosen.folder / library.name}")
    print(f"DeepGEMM: {chosen.folder / 'site'}; all of them are built for torch {TORCH}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
