"""The exceptions of the library. Messages name the operand, what it needs and what was given."""


class Fp8Error(Exception):
    """The base class of all exceptions that fp8core raises deliberately.

    Examples:
        >>> import numpy as np, fp8core
        >>> try:
        ...     fp8core.quantize(np.ones(4, np.int32))
        ... except fp8core.Fp8Error as error:
        ...     print(error)
        x needs float32, float16, bfloat16, got int32
    """


class ShapeError(Fp8Error, ValueError):
    """Shapes that do not fit together, or a scale whose shape has no known meaning.

    Examples:
        >>> import numpy as np, fp8core
        >>> fp8core.quantize(np.ones((2, 4), np.float32), group_shape=(1, 0))
        Traceback (most recent call last):
        fp8core.errors.ShapeError: group_shape needs a pair of whole numbers, each -1 or 1 to 2**31 - 1, got (1, 0)
    """


class DTypeError(Fp8Error, TypeError):
    """A dtype or a type that the operation does not take.

    Examples:
        >>> import numpy as np, fp8core
        >>> fp8core.quantize([1.0, 2.0])
        Traceback (most recent call last):
        fp8core.errors.DTypeError: x needs an array that offers DLPack, got builtins.list
    """


class LayoutError(Fp8Error, ValueError):
    """Strides, an alignment, an overlap or a kind of memory that the operation does not take.

    Examples:
        >>> import numpy as np, fp8core
        >>> fp8core.quantize(np.ones((2, 4), np.float32)[::-1])
        Traceback (most recent call last):
        fp8core.errors.LayoutError: x needs rows in ascending order, got strides (-4, 1) (elements)
    """


class DeviceError(Fp8Error, ValueError):
    """Arrays on different devices, a device that cannot be used, or a stream that is none.

    Examples:
        >>> import numpy as np, fp8core
        >>> fp8core.quantize(np.ones((2, 4), np.float32), stream=-1)
        Traceback (most recent call last):
        fp8core.errors.DeviceError: stream needs an address, 0 or more, got -1
    """


class ScaleError(Fp8Error, ValueError):
    """A scale that is missing, superfluous, ambiguous or of a wrong kind.

    Examples:
        >>> import numpy as np, fp8core
        >>> fp8core.quantize(np.ones((2, 4), np.float32), scale=0.5, scale_ub=1.0)
        Traceback (most recent call last):
        fp8core.errors.ScaleError: scale_ub needs to be left out where a scale is given, got both
    """


class UnsupportedProblemError(Fp8Error, ValueError):
    """A well-formed problem that no kernel of the table can run.

    Examples:
        >>> import numpy as np, fp8core
        >>> q = fp8core.quantize(np.ones((2, 32), np.float32), dtype="float8_e5m2")
        >>> try:
        ...     fp8core.scaled_mm_nt(q, q)
        ... except fp8core.UnsupportedProblemError as error:
        ...     print(str(error).splitlines()[0])  # doctest: +ELLIPSIS
        no kernel can run ScaledMm(target=host, m=2, n=2, k=32, ...
    """


class BackendError(Fp8Error, RuntimeError):
    """A failure of the driver, the compiler or a BLAS library: the call, its status and the problem.

    Examples:
        >>> import fp8core
        >>> issubclass(fp8core.BackendError, RuntimeError)
        True
    """


class CheckpointError(Fp8Error, ValueError):
    """A checkpoint that cannot be read or written.

    Examples:
        >>> import fp8core
        >>> from fp8core.checkpoint import quantize_checkpoint
        >>> try:
        ...     quantize_checkpoint("no-such-folder", "fp8")
        ... except fp8core.CheckpointError as error:
        ...     print("no-such-folder" in str(error))
        True
    """


class TuningError(Fp8Error, ValueError):
    """A tuning that cannot be read, was measured on another GPU, driver or version, or would disturb a capture.

    Examples:
        >>> import fp8core
        >>> fp8core.Tuning.from_json("[]")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        fp8core.errors.TuningError: not a tuning: ...
    """
