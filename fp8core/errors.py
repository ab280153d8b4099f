"""The exceptions of the library: each says which operand, what was needed and what was got."""


class Fp8Error(Exception):
    """The root of every exception that fp8core raises on purpose."""


class ShapeError(Fp8Error, ValueError):
    """Shapes that do not fit together, or a scale whose shape says nothing known."""


class DTypeError(Fp8Error, TypeError):
    """A dtype that the operation does not take."""


class LayoutError(Fp8Error, ValueError):
    """Strides, an alignment or an overlap that the operation does not take."""


class DeviceError(Fp8Error, ValueError):
    """Arrays on different devices, or on one that cannot be used."""


class ScaleError(Fp8Error, ValueError):
    """A scale that is missing, superfluous, ambiguous or of a wrong kind."""


class UnsupportedProblemError(Fp8Error, ValueError):
    """A well-formed problem that no kernel of the table can run."""


class BackendError(Fp8Error, RuntimeError):
    """A failure of the driver, the compiler or a BLAS library: the call, its status and the problem."""


class CheckpointError(Fp8Error, ValueError):
    """A checkpoint that cannot be read or written."""


class TuningError(Fp8Error, ValueError):
    """A tuning that cannot be read, or that was made where times may be others."""
