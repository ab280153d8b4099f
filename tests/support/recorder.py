"""A launcher that records: what a kernel would have been launched with, by the names of its declared arguments."""

from collections import namedtuple
from typing import Any

from fp8core.runtime import args


class Recorder:
    """In the place of what `jit.prepare` returns; ``launched`` gets (entry, stream, arguments) of each launch."""

    def __init__(self, entry: str, launched: list[tuple[str, int, Any]]) -> None:
        self._entry, self._launched = entry, launched

    def bind_args(self, grid: tuple[int, int, int], given: Any) -> Any:
        """Return the launch that wants the stream and what varies, as `launches.Launcher.bind_args` does."""
        fields = args.fields(type(given))
        varying = [name for name, item in fields.items() if item[-1] in args.VARYING]
        numbers = dict(zip(fields, args.values(given), strict=True))
        flat = namedtuple(type(given).__name__, fields)  # noqa: PYI024  (of what declarations there are within it, too)

        def launch(stream: int, *values: Any) -> None:
            assert len(values) == len(varying), f"{self._entry} takes {varying}, got {values}"
            arguments = flat(**{**numbers, **dict(zip(varying, values, strict=True))})
            self._launched.append((self._entry, stream, arguments))

        return launch
