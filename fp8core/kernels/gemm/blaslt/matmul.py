"""Prepares the call of a library's product."""

import ctypes
from typing import Final

from fp8core.kernels.gemm.args import Matmul, ready
from fp8core.kernels.gemm.blaslt import first_run
from fp8core.kernels.gemm.blaslt.descriptors import Layouts, Operation, Product
from fp8core.kernels.gemm.blaslt.library import Library, find
from fp8core.kernels.gemm.blaslt.query import algorithms
from fp8core.runtime import device

_ONE: Final = ctypes.c_float(1.0)


def plan(product: Product, number: int = 0) -> Matmul:
    """Return a prepared call of the library's algorithm ``number``, in the order of `query.algorithms`.

    The call takes an out_scale as the library does: the number by which results are multiplied.

    A descriptor contains addresses, so it is mutable state: each call takes one from a pool.

    Raises:
        BackendError: the library offers no such algorithm, or a descriptor cannot be made.
    """
    candidate = algorithms(product)[number]
    library = find(product.target.platform)
    assert isinstance(library, Library)
    ordinal = product.target.device
    address = ctypes.c_void_p.from_param  # converts once: argument types would convert in every call
    per_stream = library.dialect.handle_a_stream
    of_device = library.handles.of_device(ordinal)
    shared = address(of_device)
    of_stream: dict[int, int] = {}
    call = device.with_current(ordinal, library.untyped("Matmul"))
    layouts = Layouts(library, product)
    matrices = layouts.weight, layouts.tokens, layouts.addend, layouts.out
    weight, tokens, addend, result = (address(matrix.handle) for matrix in matrices)
    algorithm = ctypes.create_string_buffer(candidate.algorithm, len(candidate.algorithm))
    factor, accumulates = ctypes.c_float(product.beta), product.beta != 0
    algorithm_at, one, beta = (address(ctypes.addressof(x)) for x in (algorithm, _ONE, factor))
    workspace_bytes = ctypes.c_size_t.from_param(candidate.workspace_bytes)
    pool = [Operation(library, product)]

    def handle_of(stream: int) -> int:
        found = library.handles.of_stream(ordinal, stream)
        return of_stream.setdefault(stream, found) if stream != device.PER_THREAD else found

    def launch(stream: int, *addresses: int) -> None:
        a, b, scale_a, scale_b, bias, out, out_scale, amax, scratch = addresses
        try:
            operation = pool.pop()
        except IndexError:
            operation = Operation(library, product)
        pointers = (scale_a, scale_b, bias, out_scale, amax)
        if operation.addresses != pointers:
            operation.point(pointers)
        out_at = address(out)
        handle, addend_at = shared, out_at if accumulates else None
        if per_stream:  # hipBLASLt, whose C is described as its D
            stream = device.driver_stream(stream)
            handle, addend_at = address(of_stream.get(stream) or handle_of(stream)), out_at
        arguments = (
            handle,
            operation.argument,
            one,
            address(b),
            weight,
            address(a),
            tokens,
            beta,
            addend_at,
            addend,
            out_at,
            result,
            algorithm_at,
            address(scratch),
            workspace_bytes,
            address(stream),
        )
        status = call(*arguments)
        if status:
            status = device.retry_with_context(status, ordinal, call, *arguments)
        pool.append(operation)
        if status:
            library.check("Matmul", status, product)

    made = ready(launch, scratch_bytes=candidate.workspace_bytes, owns=(layouts, algorithm, factor))
    if per_stream:
        library.handles.keep_spare(ordinal)
        use = library.handles.use(ordinal)
        with use.lock:
            first_run.run(product, made, of_stream, of_device, use.under_way)
    return made
