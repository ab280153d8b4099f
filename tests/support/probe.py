"""An operation that computes nothing, with which tests see which cached call operands find, and how."""

from typing import Any

from fp8core.core.calls import Described, NewArray, Planned, Shortcut
from fp8core.core.operation import Operation


class Probe:
    """An operation with ``count`` operands and a new result with one element; it records its launches."""

    def __init__(self, count: int) -> None:
        self.launched: list[tuple[int, list[int]]] = []
        """The number of the call, and the addresses of the operands."""
        self._described = 0
        self.run = Operation((*(f"x{i}" for i in range(count)), "out"), self._describe)

    def _describe(self, specs: Any, options: Any) -> Described:
        self._described += 1
        number = self._described

        def launch(_stream: int, *addresses: int) -> None:
            self.launched.append((number, list(addresses[:-1])))

        return Described({len(specs) - 1: NewArray((1,), "float32")}, lambda: Planned(launch), lambda: None, options)

    def __call__(self, *operands: Any) -> tuple[int, list[int]]:
        """Call the operation, and return its launch: the number of the call, and the addresses."""
        self.run((*operands, None), "options")
        return self.launched[-1]

    def shortcuts(self, first: Any) -> tuple[Shortcut, ...]:
        """Return the shortcuts of calls whose first operand has the size of ``first``."""
        return self.run.cache.shortcuts.get("options", {}).get(first.nbytes, ())

    def shortcut(self, *operands: Any) -> Any:
        """Return the shortcut that calls with these operands create: it takes operands, and returns the launch.

        If it does not recognize operands, it launches nothing and returns None.
        """
        for _ in range(3):  # the first is described, the second found by its signature, the third takes the shortcut
            self(*operands)
        (run,) = self.shortcuts(operands[0])

        def asked(*others: Any) -> tuple[int, list[int]] | None:
            before = len(self.launched)
            made = run((*others, None), None)
            assert len(self.launched) == before + (made is not None)
            return None if made is None else self.launched[-1]

        return asked
