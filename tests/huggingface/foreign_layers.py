"""FP8 layers as transformers makes them, of random codes."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch import nn  # noqa: E402 - after the skips
from transformers.integrations import compressed_tensors, fbgemm_fp8  # noqa: E402

from support import checkpoint_formats as formats  # noqa: E402


def channelwise(n=48, k=64):
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(4))
    codes, scale = formats.coded(weight, 1, k)
    return codes, scale, formats.values(codes, scale, 1, k)


def of_fbgemm(codes, scale):
    made = fbgemm_fp8.FbgemmFp8Linear(codes.shape[1], codes.shape[0], False)
    made.weight, made.weight_scale = nn.Parameter(codes, False), nn.Parameter(scale, False)
    return made


def of_compressed_tensors(codes, scale):
    made = compressed_tensors.CompressedTensorsFP8Linear(codes.shape[1], codes.shape[0])
    made.weight, made.weight_scale = nn.Parameter(codes, False), nn.Parameter(scale.reshape(1, -1), False)
    return made
