"""Small checkpoints, functions that write and read them, and the names that a run leaves in a folder."""

import json
import re

import ml_dtypes
import numpy as np
import pytest
import safetensors

NAMES = {
    np.dtype(np.float32): "F32",
    np.dtype(np.float16): "F16",
    np.dtype(ml_dtypes.bfloat16): "BF16",
    np.dtype(np.float64): "F64",
    np.dtype(np.int64): "I64",
    np.dtype(np.uint8): "U8",
    np.dtype(np.int8): "I8",
    np.dtype(ml_dtypes.float8_e4m3fn): "F8_E4M3",
    np.dtype(ml_dtypes.float8_e5m2): "F8_E5M2",
    np.dtype(ml_dtypes.float8_e8m0fnu): "F8_E8M0",
}
DTYPES = {name: dtype for dtype, name in NAMES.items()}
GROUPS = {"channel": (1, -1), "tensor": (-1, -1), "block": (128, 128)}


def write(path, tensors, metadata=None):
    """Write a safetensors file by hand, as safetensors.numpy does not support float8."""
    header, end = {"__metadata__": metadata} if metadata else {}, 0
    for name, array in tensors.items():
        header[name] = {"dtype": NAMES[array.dtype], "shape": array.shape, "data_offsets": [end, end + array.nbytes]}
        end += array.nbytes
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(array.tobytes() for array in tensors.values()))
    return path


def read(path):
    """Read a safetensors file with the library."""
    found = safetensors.deserialize(path.read_bytes())
    return {name: np.frombuffer(t["data"], DTYPES[t["dtype"]]).reshape(t["shape"]) for name, t in found}


def normal(*shape, dtype=np.float32, seed=0):
    return (np.random.default_rng(seed).standard_normal(shape) / 16).astype(dtype)


def fp8(*shape):
    return normal(*shape).astype(ml_dtypes.float8_e4m3fn)


def model(dtype=np.float32):
    """Return the tensors of a checkpoint with one of every kind."""
    return {
        "model.embed_tokens.weight": normal(50, 128, dtype=dtype),
        "model.layers.0.self_attn.q_proj.weight": normal(96, 128, dtype=dtype, seed=1),
        "model.layers.0.self_attn.q_proj.bias": normal(96, dtype=dtype, seed=2),
        "model.layers.0.mlp.down_proj.weight": normal(200, 256, dtype=dtype, seed=3),
        "model.layers.0.mlp.gate.weight": normal(8, 128, dtype=dtype, seed=4),
        "model.layers.0.mlp.experts.weight": normal(2, 32, 128, dtype=dtype, seed=5),
        "model.layers.0.input_layernorm.weight": normal(128, dtype=dtype, seed=6),
        "model.steps.weight": np.arange(6).reshape(2, 3),
        "model.empty.weight": np.zeros((0, 128), dtype),
        "lm_head.weight": normal(50, 128, dtype=dtype, seed=7),
    }


LINEARS = {"model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.down_proj.weight"}


def is_ignored(module, summary):
    """Return whether readers treat a module of this name as not quantized, for a summary, a plan or a configuration."""
    config = summary if isinstance(summary, dict) else summary.quantization_config
    return any(re.match(one[3:], module) if one.startswith("re:") else one == module for one in config["ignore"])


def shrink(config):
    """Keep four layers of each kind in a configuration of transformers, which are enough, and quicker."""
    for key in ("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers", "num_decoder_layers"):
        if isinstance(getattr(config, key, None), int) and getattr(config, key) > 4:
            setattr(config, key, 4)
    for key, value in list(vars(config).items()):
        if key == "layer_types" and isinstance(value, list):
            setattr(config, key, value[:4])
        elif hasattr(value, "to_dict"):
            shrink(value)


@pytest.fixture
def source(tmp_path):
    (tmp_path / "in").mkdir()
    return write(tmp_path / "in" / "model.safetensors", model(), {"format": "pt", "note": "ours"})


@pytest.fixture
def target(tmp_path):
    (tmp_path / "out").mkdir()
    return tmp_path / "out" / "fp8.safetensors"


def left_in(folder):
    return sorted(p.name for p in folder.iterdir())


def shards(folder):
    """Create a folder with two shards, their index, a config and other files."""
    folder.mkdir()
    names = list(model())
    files = {"model-00001-of-00002.safetensors": names[:3], "model-00002-of-00002.safetensors": names[3:]}
    for file, held in files.items():
        write(folder / file, {name: model()[name] for name in held})
    weight_map = {name: file for file, held in files.items() for name in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 96}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"not copied")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text("{}")
    return folder
