"""fp8core inside PyTorch."""

from fp8core.torch.tracing import install

install()
