"""The stream of a launch: the one that a caller gave, or the current one of the first operand's framework."""

from contextlib import suppress
from operator import index
from typing import TYPE_CHECKING, Any

from fp8core.errors import DeviceError
from fp8core.runtime import device

if TYPE_CHECKING:
    from fp8core.interop.tensor import TensorView
    from fp8core.target import Target


class LaunchStream:
    """The stream of a launch, known before all of its operands have been viewed.

    Args:
        explicit: the caller's ``stream=``, if any.
    """

    __slots__ = ("explicit", "first")

    def __init__(self, explicit: object = None) -> None:
        self.explicit = explicit
        self.first: TensorView | None = None
        """The view of the first operand, once there is one; it chooses the stream if the caller gave none."""

    def on(self, target: "Target") -> int | None:
        """Return the stream's address; None if nothing has chosen it yet, or a view on another device would choose it.

        Raises:
            DeviceError: ``explicit`` is not a stream.
        """
        if self.explicit is not None:
            return stream_address(self.explicit)
        if self.first is None or self.first.target != target:
            return None
        return self.first.framework.stream(target)


def stream_address(stream: Any) -> int:
    """Return the address of a stream that a caller gave, 0 for the default one; raise DeviceError for anything else."""
    address = stream
    integral = hasattr(type(stream), "__index__")
    offer = getattr(stream, "__cuda_stream__", None)
    if offer is not None:
        with suppress(TypeError, IndexError, KeyError):  # a class, or not a pair: not a stream
            address = (offer() if callable(offer) else offer)[1]
    elif not integral:
        address = next((at for name in ("ptr", "cuda_stream") if (at := getattr(stream, name, None)) is not None), None)
    if hasattr(type(address), "__index__") and not isinstance(address, bool):
        with suppress(TypeError):  # an array of several numbers has __index__, too
            number = index(address)
            if not 0 <= number < 1 << 64:
                raise DeviceError(f"stream needs an address, 0 or more, got {number}")
            return 0 if number == device.LEGACY else number  # torch's allocator does not take 1
    raise DeviceError(
        f"stream needs an address or an object with __cuda_stream__, .ptr or .cuda_stream, got {type(stream).__name__}"
    )
