"""Read, verify and convert checkpoints of every FP8 format, and quantize others."""

from fp8core.checkpoint.conversion.changes import Change
from fp8core.checkpoint.conversion.converting import Conversion, convert_checkpoint, plan_conversion
from fp8core.checkpoint.disk.extras import Extra
from fp8core.checkpoint.disk.running import Progress
from fp8core.checkpoint.formats.claims import Claim
from fp8core.checkpoint.formats.schemes import SCHEMES
from fp8core.checkpoint.inspecting import Inspection, Kind, inspect_checkpoint
from fp8core.checkpoint.quantization.planning import Plan
from fp8core.checkpoint.quantization.quantizing import Summary, plan_checkpoint, quantize_checkpoint
from fp8core.checkpoint.quantization.verdicts import Verdict
from fp8core.checkpoint.reading.faults import Fault
from fp8core.checkpoint.reading.layers import Layer, Tensor
from fp8core.checkpoint.reading.reader import Checkpoint, open_checkpoint, open_files
from fp8core.checkpoint.shapes.tuning import tune_checkpoint
from fp8core.checkpoint.verifying import Verification, verify_checkpoint
from fp8core.types import SchemeName

__all__ = [
    "SCHEMES",
    "Change",
    "Checkpoint",
    "Claim",
    "Conversion",
    "Extra",
    "Fault",
    "Inspection",
    "Kind",
    "Layer",
    "Plan",
    "Progress",
    "SchemeName",
    "Summary",
    "Tensor",
    "Verdict",
    "Verification",
    "convert_checkpoint",
    "inspect_checkpoint",
    "open_checkpoint",
    "open_files",
    "plan_checkpoint",
    "plan_conversion",
    "quantize_checkpoint",
    "tune_checkpoint",
    "verify_checkpoint",
]
