"""`from_pretrained` and `config_for`: load FP8 checkpoints of any format, and quantize others while loading them."""

import copy
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.distributed import DistributedConfig
from transformers.utils import cached_file

from fp8core.checkpoint import open_checkpoint
from fp8core.checkpoint.disk.source import read_json
from fp8core.checkpoint.formats.claims import MODELOPT_FILE
from fp8core.errors import CheckpointError, DTypeError
from fp8core.transformers.config import METHOD, Fp8CoreConfig, refuse_spread, spread_over_processes

PLACES: Final = ("cache_dir", "force_download", "proxies", "token", "revision", "local_files_only", "subfolder")
"""Keyword arguments that say where a checkpoint is."""
SHARED: Final = (*PLACES, "trust_remote_code", "code_revision", "dtype", "torch_dtype")
"""Keyword arguments that both a configuration and a model take."""


def from_pretrained(path: str | os.PathLike[str], auto: Any = AutoModelForCausalLM, **kwargs: Any) -> Any:
    """Load a transformers model with its linear layers in FP8.

    An FP8 checkpoint keeps its codes and scales; `config_for` lists the formats. Any other checkpoint is quantized
    while it is loaded, one weight after the other, to the codes and scales that `fp8core quantize` writes.

    Args:
        path: a folder, or the name of a repository.
        auto: the class that loads the model, such as ``AutoModelForCausalLM``, ``AutoModel`` or a model's own class.
        **kwargs: arguments of the class's from_pretrained: device_map, dtype, revision; and, for a checkpoint that is
            not FP8, quantization_config, an `Fp8CoreConfig`. Arguments that are fields of the configuration, such as
            num_labels, change it. Those that spread layers over several processes, such as tp_plan, are refused.

    Returns:
        The model.

    Raises:
        DeviceError: layers are to be spread over processes, or offloaded.
        CheckpointError: quantization_config is no `Fp8CoreConfig`, or is given for a quantized checkpoint; a quantized
            weight is not FP8, or no layer supports its scales; a scale is NaN, infinite, zero or negative; the model
            has no linear layer for an FP8 weight; a weight to be quantized holds NaN or infinities; or a file cannot be
            read.
        DTypeError: dtype, or that of the checkpoint, is not float32, float16 or bfloat16; path is neither text nor a
            path; config is neither of them nor a configuration; or auto has no from_pretrained.

    Examples:
        >>> from tempfile import TemporaryDirectory
        >>> from transformers import AutoModelForCausalLM, LlamaConfig
        >>> from fp8core.transformers import Fp8CoreConfig, from_pretrained
        >>> sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
        >>> model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, num_attention_heads=2))
        >>> with TemporaryDirectory() as folder:
        ...     model.save_pretrained(folder)
        ...     model = from_pretrained(folder, quantization_config=Fp8CoreConfig(scheme="channel"))
        >>> model.model.layers[0].mlp.up_proj
        Linear(in_features=32, out_features=64, bias=False, scheme=channel, weight=float8_e4m3fn)
    """
    _check_path(path, "path", "a folder")
    if not callable(getattr(auto, "from_pretrained", None)):
        raise DTypeError(f"auto needs a class with from_pretrained, got {auto!r}")
    refuse_spread(_distributed(kwargs))
    if kwargs.get("device_mesh") is not None:
        raise spread_over_processes("device_mesh")
    asked = kwargs.pop("quantization_config", None)
    wanted = asked.get("quant_method") if isinstance(asked, Mapping) else getattr(asked, "quant_method", None)
    if asked is not None and wanted != METHOD:
        got = repr(asked) if wanted is None else f"that of {wanted}"
        raise CheckpointError(f"quantization_config needs an Fp8CoreConfig, got {got}")
    config = kwargs.pop("config", None)
    if isinstance(config, PreTrainedConfig):
        config = _in_charge(copy.deepcopy(config), path, kwargs)
    else:
        place = path if config is None else config
        _check_path(place, "config", "a PreTrainedConfig, a folder")
        config, kwargs = _configured(place, path, kwargs)
    quantized = getattr(config, "quantization_config", None)
    if quantized is None:
        return auto.from_pretrained(path, config=config, quantization_config=asked or Fp8CoreConfig(), **kwargs)
    if asked is not None:
        source = quantized.get("source", quantized) or {}  # None if only the weights show it
        method = source.get("quant_method", "FP8")
        raise CheckpointError(f"quantization_config needs a checkpoint that is not quantized, got {method} in {path}")
    return auto.from_pretrained(path, config=config, **kwargs)


def config_for(path: str | os.PathLike[str], **kwargs: Any) -> Any:
    """Return a model's configuration; if the checkpoint is quantized, its ``quantization_config`` selects fp8core.

    ``auto.from_pretrained(path, config=config_for(path))`` then loads FP8 checkpoints of these formats: Hugging Face's
    and DeepSeek's fp8 (blocks of 128x128, with scales in float32 or powers of two; one scale per tensor),
    compressed-tensors (tensor, channel, block, static), ModelOpt (with its configuration in either file), FBGEMM and
    AutoFP8. The format is read from the headers of the weight files; `save_pretrained` writes the checkpoint's own
    configuration again.

    Args:
        path: a folder, or the name of a repository.
        **kwargs: as for ``AutoConfig.from_pretrained``.

    Returns:
        The configuration, as ``AutoConfig.from_pretrained`` returns it.

    Raises:
        DTypeError: path is neither text nor a path.

    Examples:
        >>> import json
        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> from fp8core.transformers import config_for
        >>> quantized = {"quant_method": "fp8", "weight_block_size": [128, 128]}
        >>> with TemporaryDirectory() as folder:
        ...     content = {"model_type": "llama", "quantization_config": quantized}
        ...     written = Path(folder, "config.json").write_text(json.dumps(content))
        ...     config_for(folder).quantization_config["quant_method"]
        'fp8core'
    """
    _check_path(path, "path", "a folder")
    return _configured(path, path, kwargs)[0]


def _check_path(path: object, operand: str, needed: str) -> None:
    """Refuse what transformers would take for the name of a repository, and look for on the network."""
    if not isinstance(path, str | os.PathLike):
        raise DTypeError(f"{operand} needs {needed} or the name of a repository, got {path!r}")


def _distributed(kwargs: Mapping[str, Any]) -> Any:
    """Return what transformers makes of the arguments that spread layers over processes; None if there are none."""
    plan, size = kwargs.get("tp_plan"), kwargs.get("tp_size")
    if plan is not None or size is not None:
        return DistributedConfig(tp_plan=plan, tp_size=size)
    asked = kwargs.get("distributed_config")
    return DistributedConfig.from_dict(asked) if isinstance(asked, dict) else asked


def _configured(place: Any, path: str | os.PathLike[str], kwargs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the configuration of `config_for`, and the keyword arguments that are left for the model.

    Args:
        place: the folder or repository of the configuration.
        path: the folder or repository of the weights.
        kwargs: the keyword arguments of both.
    """
    own = {name: value for name, value in kwargs.items() if name not in ("dtype", "torch_dtype") or value != "auto"}
    config, others = AutoConfig.from_pretrained(place, **{**own, "return_unused_kwargs": True})
    shared = {name: kwargs[name] for name in SHARED if name in kwargs}
    return _in_charge(config, path, kwargs), {**others, **shared}


def _in_charge(config: Any, path: str | os.PathLike[str], kwargs: Mapping[str, Any]) -> Any:
    """Return a configuration whose ``quantization_config`` selects fp8core if the checkpoint is quantized."""
    source = _taken_from(config) or _modelopt(path, kwargs)
    if source is None and not _is_fp8(path, kwargs.get("subfolder") or ""):
        return config
    if source is None or source.get("quant_method") != METHOD:
        source = {"quant_method": METHOD, "source": source}
    config.quantization_config = source
    return config


def _taken_from(config: Any) -> dict[str, Any] | None:
    """Return the quantization_config of a configuration, or that of the text model, which is removed there."""
    for place in (config, config.get_text_config()):
        found = getattr(place, "quantization_config", None)
        if found is not None:
            if place is not config:
                del place.quantization_config
            return dict(found) if isinstance(found, Mapping) else dict(found.to_dict())
    return None


def _modelopt(path: str | os.PathLike[str], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the content of hf_quant_config.json in the form of ModelOpt's quantization_config, or None."""
    places = {name: value for name, value in kwargs.items() if name in PLACES}
    file = cached_file(path, MODELOPT_FILE, _raise_exceptions_for_missing_entries=False, **places)
    if file is None:
        return None
    content = read_json(Path(file))
    found = content.get("quantization")
    if not isinstance(found, dict):
        raise CheckpointError(f"{file} needs a JSON object as quantization, got {found!r}")
    return {"quant_method": "modelopt", "producer": content.get("producer"), **found}


def _is_fp8(path: str | os.PathLike[str], subfolder: str) -> bool:
    """Return whether a folder has FP8 weights, which its configuration need not mention."""
    folder = Path(path, subfolder)
    return any(folder.glob("*.safetensors")) and bool(open_checkpoint(folder).layers)
