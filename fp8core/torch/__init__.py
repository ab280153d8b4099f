"""fp8core inside PyTorch: operators for torch.compile and torch.export, and FP8 layers for ``torch.nn``.

Once it is imported, the functions of `fp8core` can be traced: torch.compile and torch.export find operators
(``torch.ops.fp8core``) in their place, without graph breaks. Calls outside of graphs go on as before.

Tensors of the CPU run on the host engine, with the bits of no particular GPU: fit for tests and for trying things out.

Examples:
    >>> import torch, fp8core.torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.SiLU(), torch.nn.Linear(64, 8)).eval()
    >>> fp8core.torch.quantize_model_(model).quantized
    ('0', '2')
    >>> with torch.no_grad():
    ...     model(torch.ones(1, 64)).shape
    torch.Size([1, 8])
"""

from fp8core.interop.oldest import require

require("torch")

from fp8core.torch.calibration import calibrate
from fp8core.torch.compiling import compile_options
from fp8core.torch.linear import Linear
from fp8core.torch.models import Report, dequantize_model_, quantization_config, quantize_model_, warm_up
from fp8core.torch.tracing import install

__all__ = [
    "Linear",
    "Report",
    "calibrate",
    "compile_options",
    "dequantize_model_",
    "quantization_config",
    "quantize_model_",
    "warm_up",
]

install()
