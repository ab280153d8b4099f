"""The demo: runs a real sentence encoder with FP8 linear layers, and measures its error relative to fp32.

The encoder is `examples/minilm.py`, which wheels contain as `fp8core/_examples/minilm.py`. This package finds it, runs
it, and reports the measurements.
"""

from fp8core.demo.comparing import Layer, Report, Sentence, compare, ticks
from fp8core.demo.model import MODEL, encoder_module, fetch_model, model_folder
from fp8core.demo.plotting import check_plot, plot
from fp8core.demo.showing import show

__all__ = [
    "MODEL",
    "Layer",
    "Report",
    "Sentence",
    "check_plot",
    "compare",
    "encoder_module",
    "fetch_model",
    "model_folder",
    "plot",
    "show",
    "ticks",
]
