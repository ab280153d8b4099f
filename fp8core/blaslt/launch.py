"""The call of a library's product, made ready."""

import ctypes
from collections.abc import Callable
from typing import Final, Protocol, cast

from fp8core import device
from fp8core.blaslt.heuristic import offers
from fp8core.blaslt.library import Library, find
from fp8core.blaslt.product import Layouts, Operation, Product
from fp8core.problem import Target

_ONE: Final = ctypes.c_float(1.0)
_ZERO: Final = ctypes.c_float(0.0)


class Launch(Protocol):
    """A prepared product: plain integers in, nothing allocated, any thread, any current device."""

    scratch_bytes: int
    """How much memory, aligned to 256 bytes, a call is given as its scratch."""
    owns: object
    """What has to live as long as the launch."""

    def __call__(
        self,
        stream: int,
        a: int,
        b: int,
        scale_a: int,
        scale_b: int,
        bias: int,
        out: int,
        out_scale: int,
        amax: int,
        scratch: int,
        /,
    ) -> None:
        """Launch; the parameters of `SCALED_MM`, out_scale as the library takes it: what a result is multiplied by."""


def with_scratch(launch: Callable[..., None], scratch_bytes: int, owns: object = None) -> Launch:
    """Return ``launch`` with the bytes of scratch that it wants of its caller, and what it keeps alive."""
    named = cast("Launch", launch)
    named.scratch_bytes, named.owns = scratch_bytes, owns
    return named


def lacks_context(target: Target) -> bool:
    """Return whether the calling thread has not met its device: cuBLASLt then says "execution failed" (H200)."""
    context = ctypes.c_void_p()
    return (
        target.platform == "cuda" and device.driver().cuCtxGetCurrent(ctypes.byref(context)) == 0 and not context.value
    )


def plan(product: Product, choice: int = 0) -> Launch:
    """Return the call of the library's offer number ``choice``, made ready.

    A descriptor holds addresses, so it is shared mutable state: each call takes one from a pool.

    Raises:
        BackendError: the library offers no such algorithm, or a descriptor cannot be made.
    """
    offer = offers(product)[choice]
    library = find(product.target.platform)
    assert isinstance(library, Library)
    ordinal = product.target.device
    handle = library.handle(ordinal)
    matmul = library.function("Matmul")
    layouts = Layouts(library, product)
    weight, tokens, addend, result = (x.handle for x in (layouts.weight, layouts.tokens, layouts.addend, layouts.out))
    algorithm = ctypes.create_string_buffer(offer.algorithm, len(offer.algorithm))
    algorithm_at, one, zero = (ctypes.addressof(x) for x in (algorithm, _ONE, _ZERO))
    workspace_bytes = offer.workspace_bytes
    pool = [Operation(library, product)]
    given_addend = library.dialect.addend
    current = device.current

    def launch(
        stream: int,
        a: int,
        b: int,
        scale_a: int,
        scale_b: int,
        bias: int,
        out: int,
        out_scale: int,
        amax: int,
        scratch: int,
    ) -> None:
        try:
            operation = pool.pop()
        except IndexError:
            operation = Operation(library, product)
        addresses = (scale_a, scale_b, bias, out_scale, amax)
        if operation.addresses != addresses:
            operation.point(addresses)
        arguments = (
            handle,
            operation.handle,
            one,
            b,
            weight,
            a,
            tokens,
            zero,
            out if given_addend else 0,
            addend,
            out,
            result,
            algorithm_at,
            scratch,
            workspace_bytes,
            stream,
        )
        if current() == ordinal:
            status = matmul(*arguments)
        else:
            with device.on(ordinal):
                status = matmul(*arguments)
        if status and lacks_context(product.target):
            with device.on(ordinal):
                device.bind(ordinal)
                status = matmul(*arguments)
        pool.append(operation)
        if status:
            library.check("Matmul", status, product)

    return with_scratch(launch, workspace_bytes, (layouts, algorithm))
