"""Finds, loads and calls a BLASLt library by ctypes; every status is checked and reported with the call's name."""

import ctypes
import struct
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any, Final

from fp8core.errors import BackendError
from fp8core.kernels.gemm.blaslt.dialects import DIALECTS, WIDTHS, Dialect
from fp8core.kernels.gemm.blaslt.handles import Handles
from fp8core.kernels.gemm.blaslt.places import candidates, refusal
from fp8core.runtime import device
from fp8core.target import Platform

_P, _SIZE, _INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_LAYOUT: Final = (_P, _INT, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64)
_ATTRIBUTE: Final = (_P, _INT, _P, _SIZE)
PROTOTYPES: Final[dict[str, tuple[Any, ...]]] = {
    "Create": (_P,),
    "MatmulDescCreate": (_P, _INT, _INT),
    "MatmulDescDestroy": (_P,),
    "MatmulDescSetAttribute": _ATTRIBUTE,
    "MatrixLayoutCreate": _LAYOUT,
    "MatrixLayoutDestroy": (_P,),
    "MatmulPreferenceCreate": (_P,),
    "MatmulPreferenceDestroy": (_P,),
    "MatmulPreferenceSetAttribute": _ATTRIBUTE,
    "MatmulAlgoGetHeuristic": (_P, _P, _P, _P, _P, _P, _P, _INT, _P, _P),
    "Matmul": (_P, _P, _P, _P, _P, _P, _P, _P, _P, _P, _P, _P, _P, _P, _SIZE, _P),
}
"""The argument types of each function, by its name without the prefix; all return a status."""
CUBLASLT_PROTOTYPES: Final[dict[str, tuple[Any, ...]]] = {
    "MatmulAlgoCheck": (_P, _P, _P, _P, _P, _P, _P, _P),
    "MatmulAlgoConfigGetAttribute": (_P, _INT, _P, _SIZE, _P),
}
"""The same for functions that hipBLASLt does not have."""


class FailedError(BackendError):
    """A status that says nothing about the product that a library was asked about."""


class Library:
    """A loaded BLASLt library: checked calls, and its handles.

    Args:
        dialect: the library's names and numbers.
        path: the argument of dlopen.

    Raises:
        BackendError: the file cannot be loaded or lacks a function.
    """

    def __init__(self, dialect: Dialect, path: str) -> None:
        self.dialect = dialect
        self.path = path
        try:
            self._dll = ctypes.CDLL(path)
            own = CUBLASLT_PROTOTYPES if dialect.platform == "cuda" else {}
            for name, arguments in (PROTOTYPES | own).items():
                function = self.function(name)
                function.argtypes, function.restype = arguments, _INT
        except (OSError, AttributeError) as error:
            raise BackendError(f"{dialect.name} cannot be loaded from {path}: {error}") from error
        self.handles = Handles(self)

    def __repr__(self) -> str:
        return f"{self.dialect.name} ({self.path})"

    def function(self, name: str) -> "ctypes._NamedFuncPointer":
        """Return the function ``name`` (without the prefix), with its argument types."""
        function: ctypes._NamedFuncPointer = getattr(self._dll, self.dialect.prefix + name)
        return function

    def untyped(self, name: str) -> Callable[..., int]:
        """Return the function ``name`` without argument types, for arguments that are already `ctypes` objects."""
        function: Callable[..., int] = self._dll[self.dialect.prefix + name]
        return function

    @property
    def version(self) -> int | None:
        """The version as GetVersion counts, 130100 for 13.1.0; None for hipBLASLt, which reports it per handle only."""
        if self.dialect.platform != "cuda":
            return None
        get = self.function("GetVersion")
        get.argtypes, get.restype = (), _SIZE
        return int(get())

    def status_name(self, status: int) -> str:
        """Return the name and the number of a status."""
        return f"{self.dialect.statuses.get(status, 'unknown status')} ({status})"

    def check(self, name: str, status: int, subject: object) -> None:
        """Raise BackendError unless ``status``, which the function ``name`` gave for ``subject``, is success.

        It is a FailedError if the status is one of the dialect's failures.
        """
        if status:
            if self.dialect.platform == "hip":
                device.clear_error()
            error = FailedError if status in self.dialect.failures else BackendError
            raise error(f"{self.dialect.prefix}{name}: {self.status_name(status)} for {subject}")


class Handle:
    """A descriptor of a library, which is destroyed with the object.

    Args:
        library: the library that makes it.
        kind: "MatmulDesc", "MatrixLayout" or "MatmulPreference".
        *arguments: of its Create function, after the address of the result.
        subject: the product that it is made for, for error messages.
    """

    __slots__ = ("__weakref__", "_kind", "_library", "_subject", "handle")

    def __init__(self, library: Library, kind: str, *arguments: int, subject: object) -> None:
        out = _P()
        name = f"{kind}Create"
        library.check(name, library.function(name)(ctypes.addressof(out), *arguments), subject)
        self.handle: int = out.value or 0
        self._library, self._kind, self._subject = library, kind, subject
        weakref.finalize(self, library.function(f"{kind}Destroy"), self.handle).atexit = False

    def set(self, attribute: str, value: int) -> None:
        """Set an attribute by its name, in the width that the library takes; ignore one that the library lacks."""
        dialect = self._library.dialect
        numbers = dialect.preferences if self._kind == "MatmulPreference" else dialect.attributes
        if attribute not in numbers:
            return
        data = ctypes.create_string_buffer(struct.pack(WIDTHS[attribute], value), struct.calcsize(WIDTHS[attribute]))
        name = f"{self._kind}SetAttribute"
        status = self._library.function(name)(self.handle, numbers[attribute], ctypes.addressof(data), len(data))
        self._library.check(name, status, f"{attribute} = {value} of {self._subject}")


@cache
def find(platform: Platform) -> Library | str:
    """Return the BLASLt library of a platform, or why there is none; the first call loads it."""
    dialect = DIALECTS[platform]
    reasons: list[str] = []
    reason = refusal(dialect)
    if reason is not None:
        return reason
    for path in candidates(dialect):
        try:
            found = Library(dialect, path)
        except BackendError as error:
            reasons.append(str(error))
        else:
            return refusal(dialect) or found
    return reasons[0] if reasons else f"{dialect.name} was not found{dialect.where}"
