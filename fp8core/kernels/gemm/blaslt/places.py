"""Where to find a BLASLt library: the arguments that dlopen gets, in this order."""

import ctypes
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from fp8core.kernels.gemm.blaslt.dialects import Dialect
from fp8core.runtime import loaded

RUNTIME_OF: Final[dict[str, str]] = {
    "libhipblaslt.so.1": f"{loaded.HIP_RUNTIME}.so.7",
    "libhipblaslt.so.0": f"{loaded.HIP_RUNTIME}.so.6",
}
"""The HIP runtime that each hipBLASLt is linked to: beside another one it would load its own."""
_SIBLINGS: Final = "_rocm_sdk_libraries*"
"""The folder of the libraries in TheRock's wheels, beside the runtime's folder _rocm_sdk_core."""


def candidates(dialect: Dialect) -> Iterator[str]:
    """Yield arguments for dlopen: libraries that the process has loaded, then those of wheels, then the system's."""
    for name in dialect.sonames:
        if is_loaded(name):
            yield name
    if dialect.platform == "hip":
        yield from beside_the_runtime(dialect)
        return
    for folder in dialect.folders:
        for entry in sys.path:
            yield from (str(path) for name in dialect.sonames if (path := Path(entry, folder, name)).is_file())
    yield from dialect.sonames


def beside_the_runtime(dialect: Dialect) -> Iterator[str]:
    """Yield the libraries that belong to the HIP runtime that is mapped.

    A library of another installation, such as a PyTorch that is installed but not imported, may map a second runtime.
    """
    runtime = loaded.hip_runtime()
    if isinstance(runtime, Path):
        folders = dict.fromkeys((runtime.parent, runtime.resolve().parent))
        wheels = (path / "lib" for folder in folders for path in sorted(folder.parent.parent.glob(_SIBLINGS)))
        for folder in (*folders, *wheels):
            yield from (str(path) for name in dialect.sonames if (path := folder / name).is_file())
    yield from (name for name, needed in RUNTIME_OF.items() if is_loaded(needed))


def is_loaded(name: str) -> bool:
    """Return whether the process has loaded a library of this name, without loading it."""
    try:
        ctypes.CDLL(name, mode=os.RTLD_NOLOAD)
    except OSError:
        return False
    return True


def refusal(dialect: Dialect) -> str | None:
    """Return why no library of a platform may be used in this process, or None."""
    runtime = loaded.hip_runtime() if dialect.platform == "hip" else None
    return f"{dialect.name} is not used: {runtime}" if isinstance(runtime, str) else None
