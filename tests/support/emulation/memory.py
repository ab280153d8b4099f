"""Arrays for kernels, with guard zones around them."""

from typing import Any

import numpy as np

GUARD = 256
"""The size of a guard zone on either side of a `Memory` array, and the alignment of the array, in bytes."""
POISON = 0xA5


class Memory:
    """Arrays between guard zones, the only memory that kernels launched under `Emulator.watch` may touch."""

    def __init__(self) -> None:
        self._kept: list[tuple[np.ndarray, int, bool, np.ndarray]] = []

    def array(self, values: np.ndarray, *, writable: bool = False, offset: int = 0) -> np.ndarray:
        """Return a copy of ``values`` that starts ``offset`` bytes past an aligned address."""
        size = values.nbytes
        whole = np.full(size + 3 * GUARD + offset, POISON, np.uint8)
        start = -whole.ctypes.data % GUARD + GUARD + offset
        result = whole[start : start + size].view(values.dtype).reshape(values.shape)
        result[...] = values
        self._kept.append((whole, start, writable, result.copy()))
        return result

    def empty(self, shape: tuple[int, ...], dtype: Any, *, offset: int = 0) -> np.ndarray:
        """Return an array that kernels may write, poisoned."""
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return self.array(np.full(size, POISON, np.uint8).view(dtype).reshape(shape), writable=True, offset=offset)

    def keep(self) -> None:
        """Take what the arrays hold now, as a test has changed them, for what kernels have to leave as it is."""
        self._kept = [
            (whole, start, writable, whole[start : start + kept.nbytes].copy())
            for whole, start, writable, kept in self._kept
        ]

    def arrays(self) -> list[tuple[int, int, bool]]:
        """Return, for each array, its address, its size in bytes, and whether it may be written."""
        return [(whole.ctypes.data + start, kept.nbytes, writable) for whole, start, writable, kept in self._kept]

    def check(self) -> None:
        """Assert that no guard zone and no input was touched."""
        for whole, start, writable, kept in self._kept:
            assert (whole[:start] == POISON).all(), "bytes before an array were written"
            assert (whole[start + kept.nbytes :] == POISON).all(), "bytes after an array were written"
            if not writable:
                assert whole[start : start + kept.nbytes].tobytes() == kept.tobytes(), "an input was written"
