"""Today's names for the table rows, kinds of records, subjects and steps in runs of format 1."""

import json
from typing import Any, Final

ROWS: Final = {
    "hopper_decode": "sm90_decode",
    "hopper_block_mm": "sm90_tiled",
    "sm90_blockwise": "sm90_tiled",
    "hopper_linear": "fused",
    "hopper_chained": "overlapped",
    "two_launches": "sequential",
}
KINDS: Final = {"host": "engine"}
SUBJECTS: Final = {"overhead": "host", "host": "engine"}
STEPS: Final = {"of it: looks of three": "of it: signature of three"}
MODEL: Final = "Llama-8B"
"""The model of decoder layers in records that name none."""


def renamed(line: str) -> dict[str, Any]:
    """Return the record of a line with today's names, except for subjects, whose meaning depends on their run."""
    for former, name in ROWS.items():
        line = line.replace(f'"{former}"', f'"{name}"')
    record: dict[str, Any] = json.loads(line)
    if "bench" in record:
        record["bench"] = KINDS.get(record["bench"], record["bench"])
    if record.get("bench") == "layer":
        record.setdefault("model", MODEL)
    if record.get("bench") == "grouped":
        record.setdefault("skew", 0.0)
    if "step" in record:
        record["step"] = STEPS.get(record["step"], record["step"])
    if "peers" in record:
        record["baselines"] = record.pop("peers")
    return record
