"""The demo: a real sentence encoder with FP8 linear layers, and how close it stays to fp32.

The encoder is `examples/minilm.py`, which wheels carry as `fp8core/_examples/minilm.py`; here it is found, fed,
measured and reported.
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
