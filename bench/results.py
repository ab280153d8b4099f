"""What a benchmark writes: JSON lines, read as records by kind. Times are microseconds if not said otherwise.

A line says its kind in "bench"; the lines of quantize, fused, weights and decode are known by their fields.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

Record = dict[str, Any]

BYTES_A_MICROSECOND: Final = 4.3e6
"""The bandwidth that the records' floors are stated for."""
LARGE: Final = 100e6
"""Bytes from which on nothing but the memory counts."""

DECODE: Final = "sm90_decode"
BLOCK: Final = "sm90_blockwise"
LIBRARY: Final = "cublaslt"
"""The rows of fp8core's table that the records of products name; the last one calls cuBLASLt."""
FORMER_NAMES: Final = {
    "hopper_decode": DECODE,
    "hopper_block_mm": BLOCK,
    "hopper_linear": "fused",
    "hopper_chained": "overlapped",
    "two_launches": "sequential",
}
"""What rows were called when some of the results were measured."""
PEERS: Final = ("torch", "vllm", "sgl", "deep_gemm")
LABELS: Final = {
    "fp8core": "fp8core",
    DECODE: "fp8core kernel",
    BLOCK: "fp8core kernel",
    LIBRARY: "cuBLASLt",
    "copy": "copy",
    "vllm": "vLLM",
    "sgl": "SGLang",
    "torch": "torch",
    "torch.compile": "torch.compile",
    "triton": "Triton",
    "neighbour": "neighbour",
    "deep_gemm": "DeepGEMM",
}
MODES: Final = {
    "static": "static",
    "tensor": "per tensor",
    "token": "per token",
    "1x128": "1x128",
    "1x128 mn": "1x128, scales m-major",
    "128x128": "128x128",
}
PRODUCTS: Final = {"tensor": "per tensor", "row": "per token x per channel", "block": "1x128 x 128x128"}
KINDS: Final = {"norm": "RMS norm", "add+norm": "add + RMS norm", "silu": "SiLU · mul"}

_KEYS: Final[dict[str, tuple[str, ...]]] = {
    "fused": ("kind", "mode", "rows", "cols"),
    "decode": ("mode", "m", "n", "k"),
    "linear": ("bench", "m", "n", "k"),
    "invariance": ("bench", "mode", "m", "n", "k"),
    "odd": ("mode", "x", "rows", "cols"),
    "first_call": ("bench",),
    "weights": ("case", "rows", "cols"),
    "quantize": ("mode", "rows", "cols"),
    "host": ("mode",),
    "overhead": ("framework", "step"),
    "calls": ("framework", "step"),
    "machine": ("command",),
    "subject": ("subject",),
}
"""What distinguishes records of a kind, in the order in which lines without a kind are tried."""


class Results(NamedTuple):
    """The records of each kind; of two about one case, the later one. ``machine`` has all commands as "commands"."""

    machine: Record
    subject: Sequence[Record]
    quantize: Sequence[Record]
    odd: Sequence[Record]
    fused: Sequence[Record]
    weights: Sequence[Record]
    decode: Sequence[Record]
    linear: Sequence[Record]
    invariance: Sequence[Record]
    first_call: Sequence[Record]
    calls: Sequence[Record]
    overhead: Sequence[Record]
    host: Sequence[Record]

    @property
    def device(self) -> str:
        """What was measured, in a few words."""
        return str(self.machine.get("device") or self.machine.get("cpu") or "unnamed machine")


def kind_of(record: Record) -> str:
    """Return which benchmark wrote a record.

    Raises:
        ValueError: none of those known here.
    """
    named = record.get("bench")
    if named in _KEYS:
        return str(named)
    for kind, keys in _KEYS.items():
        if named is None and keys and all(key in record for key in keys):
            return kind
    raise ValueError(f"no benchmark is known to write a line with {sorted(record)}")


def append(path: Path | None, *records: Record) -> None:
    """Add a line for each record to the file, if there is one."""
    if path is None:
        return
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def read(path: Path) -> Results:
    """Return the records of a file of JSON lines, which may come from several commands on one machine.

    Raises:
        ValueError: a line of no benchmark known here, or lines from different GPUs.
    """
    found: dict[str, dict[tuple[Any, ...], Record]] = {kind: {} for kind in _KEYS}
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.strip():
            for former, name in FORMER_NAMES.items():
                line = line.replace(f'"{former}"', f'"{name}"')  # noqa: PLW2901
            record = json.loads(line)
            kind = kind_of(record)
            found[kind][tuple(record[key] for key in _KEYS[kind])] = record
    about: Record = {"commands": []}
    for record in found.pop("machine").values():
        about |= {**record, "commands": [*about["commands"], record["command"]]}
        about.setdefault("gpus", set()).update({record["device"]} if "device" in record else ())
    if len(about.pop("gpus", ())) > 1:
        raise ValueError(f"{path} has lines from different GPUs, which cannot be compared")
    return Results(machine=about, **{kind: list(records.values()) for kind, records in found.items()})


def us(record: Record, name: str) -> float | None:
    """Return the median time of a variant, or None if it has none."""
    timing = record.get("us", {}).get(name)
    return None if timing is None else float(timing["median"])


def moved(record: Record) -> float:
    """Return the bytes that the case has to move, as its floor has them (not of products bound by arithmetic)."""
    return float(record["floor_us"]) * BYTES_A_MICROSECOND


def own_kernel(record: Record) -> float | None:
    """Return the time of a product by whichever kernel of fp8core runs it."""
    return next((t for name in (DECODE, BLOCK) if (t := us(record, name)) is not None), None)


def own(record: Record) -> float | None:
    """Return the time of what fp8core runs: a kernel of its own, or its call of the library where there is none."""
    return next((t for name in ("fp8core", DECODE, BLOCK, LIBRARY) if (t := us(record, name)) is not None), None)


def best_peer(record: Record) -> tuple[float, str] | None:
    """Return the least time of the baselines and whose it is."""
    return min(((t, name) for name in PEERS if (t := us(record, name)) is not None), default=None)


def neighbour_time(record: Record) -> float | None:
    """Return the time of an odd shape's aligned neighbour for as many bytes as the odd shape has, if it has more."""
    time = us(record, "neighbour")
    return None if time is None else time * max(1.0, record["floor_us"] / record["neighbour_floor_us"])


def of_copy(record: Record) -> float | None:
    """Return the speed of fp8core's kernel as a share of the copy's of as many bytes."""
    mine, copy = us(record, "fp8core"), us(record, "copy")
    return None if mine is None or copy is None else copy / mine


def large(records: Iterable[Record]) -> list[Record]:
    """Return those that move at least `LARGE` bytes."""
    return [record for record in records if moved(record) >= LARGE]


def shape(record: Record) -> str:
    """Return a record's shape as a name."""
    keys = ("m", "n", "k") if "m" in record else ("rows", "cols")
    return "x".join(str(record[key]) for key in keys)


def values(function: Callable[[Record], float | None], records: Iterable[Record]) -> list[float]:
    """Return what a function finds in the records in which it finds something."""
    return [found for record in records if (found := function(record)) is not None]


def names(records: Iterable[Record], of: Sequence[str] = tuple(LABELS)) -> list[str]:
    """Return which variants have a time in any of the records, in the order of ``of``."""
    timed = {name for record in records for name in record.get("us", {})}
    return [name for name in of if name in timed]
