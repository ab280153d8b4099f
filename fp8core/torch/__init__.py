"""fp8core inside PyTorch: operators for torch.compile and torch.export, and FP8 layers for ``torch.nn``.

Importing this module makes the functions of `fp8core` traceable: torch.compile and torch.export record operators
(``torch.ops.fp8core``) in place of the calls, without graph breaks. Eager calls do not change.

CPU tensors run on the host engine. Its results are correct but not bit-identical to those of any particular GPU, so use
it for tests and experiments.

Examples:
    >>> import torch, fp8core.torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.SiLU(), torch.nn.Linear(64, 8)).eval()
    >>> fp8core.torch.quantize_model_(model).quantized
    ('0', '2')
    >>> with torch.no_grad():
    ...     model(torch.ones(1, 64)).shape
    torch.Size([1, 8])
"""

from fp8core.interop.versions import require_version
from fp8core.interrupts import interrupts_wait

require_version("torch")

with interrupts_wait():  # these modules define operators, and torch refuses to define one again
    from fp8core.torch.calibration import calibrate
    from fp8core.torch.compiling import compile_options
    from fp8core.torch.grouped import GroupedLinear
    from fp8core.torch.linear import Linear
    from fp8core.torch.models import Report, dequantize_model_, quantization_config, quantize_model_, warm_up
    from fp8core.torch.tracing import install

__all__ = [
    "GroupedLinear",
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
