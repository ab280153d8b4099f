"""Tuning: times the kernels of a product on this GPU, only on request, and keeps the results in a file."""

from typing import Final

from fp8core.kernels.gemm.table import SCALED_MM
from fp8core.tuning.files import load_named, load_tunings, save_tunings
from fp8core.tuning.measuring import MARGIN, refuse_captures, timed, tune
from fp8core.tuning.shapes import tune_shapes
from fp8core.tuning.values import Machine, Timed, Tuning, alike, machine

__all__: Final = [
    "MARGIN",
    "Machine",
    "Timed",
    "Tuning",
    "alike",
    "load_tunings",
    "machine",
    "refuse_captures",
    "save_tunings",
    "timed",
    "tune",
    "tune_shapes",
]

SCALED_MM.before = load_named
