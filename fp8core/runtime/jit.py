"""Compiles a kernel, given as source, entry and constants, and returns a launcher that takes plain numbers."""

from collections.abc import Mapping
from functools import cache
from typing import Final, NamedTuple

from fp8core.runtime import args, compiler, device, sources
from fp8core.runtime.launches import ATTRIBUTE, AbsentLauncher, Dim3, Launcher
from fp8core.target import ABSENT, Target

COOPERATIVE: Final = 2
CLUSTER_DIMENSION: Final = 4
PROGRAMMATIC_STREAM_SERIALIZATION: Final = 6
"""Attributes of launches (CUlaunchAttributeID, CU_LAUNCH_ATTRIBUTE_...), each with its value in an `ATTRIBUTE`."""

Constants = tuple[tuple[str, int | float | str], ...]


class Asked(NamedTuple):
    """A kernel that was prepared for a device that is not in this machine."""

    target: Target
    """The device, without its model: that of GPU decides which kernels are chosen, not what they are."""
    source: str
    entry: str
    constants: Constants


ASKED: Final[dict[Asked, None]] = {}
"""Those so far, in their order: `fp8core.runtime.ahead` compiles them."""


class Request(NamedTuple):
    """The input of a compiler: one flattened text, the options, and the name of the kernel in the text."""

    text: str
    options: tuple[str, ...]
    entry: str


def compile_request(target: Target, source: str, entry: str, constants: Mapping[str, int | float | str]) -> Request:
    """Return the compile request for ``entry`` of the device source ``source`` (a name without suffix)."""
    defines = tuple(f"-D{name}={value}" for name, value in {"FP8CORE_WARP": target.warp, **constants}.items())
    return Request(sources.flatten(target.platform, source), (*standard_options(target), *defines), entry)


def standard_options(target: Target) -> tuple[str, ...]:
    """Return the options of every kernel: arithmetic is not contracted, and fp32 subnormals are flushed to zero."""
    if target.platform == "hip":
        # Code for an architecture without feature flags runs on all its devices, with any xnack and sramecc setting.
        architecture = f"--offload-arch=gfx{target.arch:x}"
        return ("-std=c++17", "-O3", architecture, "-ffp-contract=off", "-fgpu-flush-denormals-to-zero")
    suffix = "a" if target.arch in (90, 100, 103) else ""
    return ("-std=c++17", "-default-device", f"-arch=sm_{target.arch}{suffix}", "-fmad=false", "-ftz=true")


@cache
def _function(
    target: Target, source: str, entry: str, constants: Constants, shared_bytes: int, all_shared: bool
) -> compiler.Function:
    request = compile_request(target, source, entry, dict(constants))
    with device.on(target.device):
        module = compiler.load(request.text, request.options)
        return compiler.function(module, request.entry, shared_bytes, all_shared=all_shared)


def prepare(
    target: Target,
    source: str,
    entry: str,
    constants: Mapping[str, int | float | str],
    arguments: type,
    *,
    block: Dim3 | int,
    shared_bytes: int = 0,
    cluster: int = 1,
    programmatic: bool = False,
    cooperative: bool = False,
    all_shared: bool = False,
    **extents: int,
) -> Launcher:
    """Return ``entry`` of ``source`` compiled for ``target`` with ``constants``, ready to launch.

    Args:
        target: the device. The kernel is compiled and loaded by this call, but only once for equal arguments; for a
            device that is not in this machine it is only noted in `ASKED`, and cannot be launched.
        source: the file's name in cuda_src or hip_src, without its suffix.
        entry: the name of the ``extern "C"`` kernel.
        constants: names and values of macros, passed as ``-DNAME=VALUE``.
        arguments: the declaration of the kernel's arguments (`fp8core.runtime.args`).
        block: the threads of a block.
        shared_bytes: the dynamic shared memory of a block, in bytes.
        cluster: the blocks of a cluster, along x.
        programmatic: let the kernel begin before the preceding kernel on the stream has ended (PDL).
        cooperative: make the launch fail unless all blocks can be resident at once.
        all_shared: leave multiprocessors configured for kernels that need all shared memory (`compiler.function`).
        **extents: the length of each array among the arguments.
    """
    chosen = tuple(constants.items())
    if target.device == ABSENT:
        ASKED[Asked(target._replace(model=""), source, entry, chosen)] = None
        return AbsentLauncher(target, entry)
    function = _function(target, source, entry, chosen, shared_bytes, all_shared)
    attributes = b""
    if cluster > 1:
        attributes += ATTRIBUTE.pack(CLUSTER_DIMENSION, cluster, 1, 1)
    if programmatic and target.arch >= 90 and target.platform == "cuda":
        attributes += ATTRIBUTE.pack(PROGRAMMATIC_STREAM_SERIALIZATION, 1, 0, 0)
    if cooperative and target.platform == "cuda":
        attributes += ATTRIBUTE.pack(COOPERATIVE, 1, 0, 0)
    shape = (block, 1, 1) if isinstance(block, int) else block
    items = args.items(arguments, **extents)
    return Launcher(target, function, entry, items, shape, shared_bytes, attributes, cooperative)
