"""The call of a library's product, made ready."""

import ctypes
from collections.abc import Callable
from typing import Final, Protocol, cast

from fp8core.blaslt.heuristic import offers
from fp8core.blaslt.library import Library, find
from fp8core.blaslt.product import Layouts, Operation, Product
from fp8core.runtime import device

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
    address = ctypes.c_void_p.from_param  # converts once: the call has no argument types, which would do so each time
    handle = address(library.handle(ordinal))
    matmul = device.calling(ordinal, library.untyped("Matmul"))
    layouts = Layouts(library, product)
    matrices = layouts.weight, layouts.tokens, layouts.addend, layouts.out
    weight, tokens, addend, result = (address(matrix.handle) for matrix in matrices)
    algorithm = ctypes.create_string_buffer(offer.algorithm, len(offer.algorithm))
    algorithm_at, one, zero = (address(ctypes.addressof(x)) for x in (algorithm, _ONE, _ZERO))
    workspace_bytes = ctypes.c_size_t.from_param(offer.workspace_bytes)
    pool = [Operation(library, product)]
    given_addend = library.dialect.addend

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
        out_at = address(out)
        arguments = (
            handle,
            operation.argument,
            one,
            address(b),
            weight,
            address(a),
            tokens,
            zero,
            out_at if given_addend else None,
            addend,
            out_at,
            result,
            algorithm_at,
            address(scratch),
            workspace_bytes,
            address(stream),
        )
        status = matmul(*arguments)
        if status:
            status = device.retry_with_context(status, ordinal, matmul, *arguments)
        pool.append(operation)
        if status:
            library.check("Matmul", status, product)

    return with_scratch(launch, offer.workspace_bytes, (layouts, algorithm))
