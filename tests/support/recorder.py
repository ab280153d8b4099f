"""A launcher that records the arguments of launches, by the names in their declaration, instead of launching."""

from collections import namedtuple
from typing import Any

from fp8core.runtime import args


class Recorder:
    """A stand-in for the launcher that `jit.prepare` returns; appends (entry, stream, arguments) to ``launched``."""

    def __init__(self, entry: str, launched: list[tuple[str, int, Any]]) -> None:
        self._entry, self._launched = entry, launched

    def bind_args(self, grid: tuple[int, int, int], given: Any) -> Any:
        """Return a launch that takes the stream and the varying arguments, as `launches.Launcher.bind_args` does."""
        fields = args.fields(type(given))
        varying = [name for name, item in fields.items() if item[-1] in args.VARYING]
        numbers = dict(zip(fields, args.values(given), strict=True))
        flat = namedtuple(type(given).__name__, fields)  # noqa: PYI024  (nested declarations are flattened)

        def launch(stream: int, *values: Any) -> None:
            assert len(values) == len(varying), f"{self._entry} takes {varying}, got {values}"
            arguments = flat(**{**numbers, **dict(zip(varying, values, strict=True))})
            self._launched.append((self._entry, stream, arguments))

        return launch
