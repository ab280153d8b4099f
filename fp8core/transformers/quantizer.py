"""The quantizer that transformers calls while it loads a model: it chooses the FP8 layers and fills them."""

import copy
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.auto import register_quantizer
from transformers.quantizers.base import HfQuantizer

from fp8core.checkpoint import open_files, plan_checkpoint
from fp8core.checkpoint.formats.selection import only
from fp8core.checkpoint.quantization.quantizing import refuse
from fp8core.dtypes import HIGH_PRECISION
from fp8core.errors import CheckpointError, DeviceError
from fp8core.interop import dtype_name
from fp8core.torch import Linear, dequantize_model_
from fp8core.torch.input_dtypes import high_precision
from fp8core.torch.layers import not_finite, refused
from fp8core.transformers.config import METHOD, Fp8CoreConfig, refuse_spread
from fp8core.transformers.experts import Experts, layouts_of
from fp8core.transformers.grouping import group_experts_, separate_experts_
from fp8core.transformers.names import WEIGHT, Named, Names, has, transforms_of
from fp8core.transformers.stored import carry, complete, initialized, refuse_bad_scales, store_scales_, waiting
from fp8core.transformers.unstacking import unstack_experts


@register_quantizer(METHOD)
class Fp8CoreQuantizer(HfQuantizer):  # type: ignore[misc]
    """Replaces a model's linear layers by FP8 layers while it is loaded, from an FP8 checkpoint or from any other.

    transformers makes a quantizer for each model and calls it; users do not. Before the weights are loaded, the
    quantizer reads the headers of the files and changes the model; afterwards it completes the layers.

    Args:
        quantization_config: an `Fp8CoreConfig`.
        layers: the names of the FP8 layers of a model that is loaded already, each with whether its scale of inputs is
            static.
        **kwargs: as for transformers' HfQuantizer.

    Examples:
        >>> from fp8core.transformers import Fp8CoreConfig, Fp8CoreQuantizer
        >>> Fp8CoreQuantizer(Fp8CoreConfig(), pre_quantized=False).is_trainable
        True
    """

    requires_calibration = False
    quantization_config: Fp8CoreConfig

    def __init__(self, quantization_config: Fp8CoreConfig, layers: Mapping[str, bool] = {}, **kwargs: Any) -> None:
        # A copy: it will record how this model was quantized, and the caller may use the original for other models.
        super().__init__(copy.copy(quantization_config), **kwargs)
        self._unstacked: frozenset[str] = frozenset()
        """Source patterns of the converters that would stack experts which stay unstacked here."""
        self._chosen: dict[str, float | None] = {}
        """By name: the weights to quantize when they are loaded, with the static scales of these layers' inputs."""
        self._layers = dict(layers)
        """The names of the FP8 layers, each with whether it is static, which the saved configuration describes."""
        self._bad: list[str] = []
        """The names of the loaded weights that are not finite."""

    # Before the weights are loaded.

    def validate_environment(self, *_: Any, device_map: Any = None, **__: Any) -> None:
        """Refuse a device_map that leaves layers on the disk.

        Raises:
            DeviceError: a layer is mapped to "disk".
        """
        if isinstance(device_map, Mapping) and "disk" in device_map.values():
            places = ", ".join(name or "the whole model" for name, place in device_map.items() if place == "disk")
            raise DeviceError(f"device_map needs to keep FP8 layers on a device, got {places} on the disk")

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which a model is loaded, which its FP8 layers take as that of their inputs.

        Raises:
            DTypeError: they take no inputs of this dtype.
        """
        return high_precision(dtype)

    def _process_model_before_weight_loading(self, model: Any, checkpoint_files: Any = None, **_: Any) -> None:
        refuse_spread(getattr(model.config, "distributed_config", None))  # set while a model is loaded; not saved
        files = [Path(file) for file in checkpoint_files or ()]
        if not files or any(file.suffix != ".safetensors" for file in files):
            raise CheckpointError(f"a model in FP8 needs safetensors files, got {[file.name for file in files]}")
        if self.pre_quantized:
            self._take_layers(model, files)
        else:
            self._choose_layers(model, files)

    def _take_layers(self, model: Any, files: list[Path]) -> None:
        """Replace each linear layer for which the files have an FP8 weight by a layer that waits for its tensors."""
        config = self.quantization_config
        about = {**model.config.to_dict(), "quantization_config": config.source}
        checkpoint = open_files(files, about)
        other = checkpoint.other
        if other is not None:
            raise CheckpointError(f"{files[0].parent} needs only FP8 weights, got {other[0]}, which is of {other[1]}")
        if not checkpoint.layers:
            method = (config.source or {}).get("quant_method")
            raise CheckpointError(f"{files[0].parent} needs FP8 weights, got none; its quant_method is {method}")
        weights = {layer.weight.name: layer for layer in checkpoint.layers.values()}
        unstack_experts(model, checkpoint.all_tensors)
        names = self._names(model, checkpoint.all_tensors, set(weights))
        modules, shared = dict(model.named_modules()), names.shared(checkpoint.all_tensors)
        for key, layer in weights.items():
            named = names.of(key)
            if named.name not in names.parameters:
                continue  # the model has no such parameter, which transformers reports
            place = named.name.removesuffix(WEIGHT)
            what = _other_than_linear(named, modules, shared)
            if what is not None:
                hint = "fp8core convert rewrites it as bfloat16"
                if layer.experts is not None:
                    what = f"{layer.experts} experts in one tensor"
                    hint += ", and with --split-experts one by one"
                raise CheckpointError(
                    f"{key} needs a linear layer of its own in {type(model).__name__}, got {what}: {hint}"
                )
            modules[place] = waiting(layer, modules[place], config.options)
            model.set_submodule(place, modules[place])
        for key in checkpoint.kv_scales():
            place, _, leaf = names.of(key).name.rpartition(".")
            if place in modules and not hasattr(modules[place], leaf):
                carry(modules[place], leaf, checkpoint.all_tensors[key])

    def _choose_layers(self, model: Any, files: list[Path]) -> None:
        """Choose the weights that `fp8core quantize` would quantize, if the model has linear layers for them."""
        config, excluded = self.quantization_config, list(self.quantization_config.exclude or ())
        scheme: Any = config.scheme
        present = open_files(files).all_tensors
        unstack_experts(model, present)
        names: Names | None = None
        kept: dict[str, str] = {}
        scales = None if config.input_scales is None else dict(config.input_scales)
        while True:
            plan = plan_checkpoint(
                files[0].parent,
                scheme=scheme,
                include=config.include,
                exclude=excluded,
                input_scales=scales,
            )
            wanted = {one.tensor: one.module for one in plan.verdicts if one.status == "quantized"}
            if wanted or not kept:
                refuse(plan)
            if names is None:
                names = self._names(model, present, set(wanted))
                modules, shared = dict(model.named_modules()), names.shared(present)
            found = {key: names.of(key) for key in wanted if key in present}
            unable = {
                wanted[key]: got
                for key, named in found.items()
                if named.name in names.parameters and (got := _other_than_linear(named, modules, shared)) is not None
            }
            if not unable:
                break
            kept |= unable
            excluded += map(only, unable)
            scales = None if scales is None else {name: x for name, x in scales.items() if name not in unable}
        chosen = {one.name: wanted[key] for key, one in found.items() if one.name in names.parameters}
        self._chosen = {name: None if scales is None else scales.get(module) for name, module in chosen.items()}
        if not self._chosen:
            why = next((f"{got} for {name}" for name, got in kept.items()), "none that the model has")
            raise CheckpointError(f"{files[0].parent} needs a weight of a linear layer of the model, got {why}")
        if kept:
            name, got = next(iter(kept.items()))
            others = f" (and {len(kept) - 1} other weights)" if len(kept) > 1 else ""
            warnings.warn(f"{name} stays unquantized: the model has {got} for it{others}", RuntimeWarning, stacklevel=3)
        config.source = plan.quantization_config

    def _names(self, model: Any, present: Iterable[str], fp8: set[str]) -> Names:
        """Return the names of the checkpoint's tensors, after unstacking the experts if weights of theirs are FP8."""
        transforms = transforms_of(model)
        names = Names(model, transforms)
        named = names.of_all(key for key in present if key.endswith(WEIGHT))
        joined = {one.name.rpartition(".")[0] for key, one in named.items() if key in fp8 and one.pattern is not None}
        layouts = layouts_of(model, named)
        if joined.isdisjoint(layouts):
            return names
        for place, layout in layouts.items():
            model.set_submodule(place, Experts(model.get_submodule(place), layout))
            around = model.get_submodule(place.rpartition(".")[0])
            if not any(True for _ in around.parameters(recurse=False)):
                around._is_hf_initialized = True  # that of Qwen3-Omni would initialize the stacked experts
        self._unstacked = frozenset(pattern for layout in layouts.values() for pattern in layout.patterns)
        return Names(model, transforms, self._unstacked)

    # While they are loaded.

    def update_weight_conversions(self, weight_conversions: list[Any], model: Any = None) -> list[Any]:
        """Return transformers' converters without those that would stack experts which stay unstacked."""
        del model
        return [one for one in weight_conversions if not has(one, self._unstacked)]

    def param_needs_quantization(self, model: Any, param_name: str, **_: Any) -> bool:
        """Return whether to quantize a weight when it is loaded."""
        del model
        return param_name in self._chosen

    def get_quantize_ops(self) -> Any:
        """Return the operation that quantizes a loaded weight."""
        return Quantize(self.quantization_config, self._chosen, self._bad)

    @property
    def quantized_element_size(self) -> float:
        """The bytes per element of a weight for which `param_needs_quantization` is true."""
        return 1.0

    # Afterwards.

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        if self._bad:
            raise refused(sorted(self._bad))
        layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, Linear)}
        for name, layer in layers.items():
            complete(name, layer)
        refuse_bad_scales(layers)
        self._layers = {name: layer.input_scale is not None for name, layer in layers.items()}
        group_experts_(model)
        return model

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Any], dict[str, str]]:
        """Return the state to save: scales have the names, shapes and dtypes of the checkpoint that was loaded.

        Raises:
            CheckpointError: a layer is no longer FP8, or no longer static or dynamic, as the configuration to be saved
                says.
        """
        modules, state = dict(model.named_modules()), model.state_dict()
        for name, static in self._layers.items():
            if type(modules.get(name)) is nn.Linear:
                raise CheckpointError(
                    f"save_pretrained needs {name} in FP8, as its configuration says, got a Linear of torch.nn: "
                    "dequantize a model of transformers by its own dequantize()"
                )
            if f"{name}.weight" in state and (f"{name}.input_scale" in state) != static:
                what = f"static scale of the inputs of {name}, as its configuration says"
                needed, got = ("a", "none") if static else ("no", "one")
                raise CheckpointError(f"save_pretrained needs {needed} {what}, got {got}")
        store_scales_(model, state)
        return state, {}

    def _dequantize(self, model: Any, dtype: torch.dtype | str | None = None) -> Any:
        if isinstance(dtype, str):  # the default is config.dtype, which save_pretrained turns into a string
            dtype = cast("torch.dtype", getattr(torch, dtype_name(dtype, "dtype", HIGH_PRECISION)))
        separate_experts_(model)
        dequantize_model_(model, dtype)
        return model

    def is_serializable(self) -> bool:
        """Return True: models can be saved."""
        return True

    @property
    def is_trainable(self) -> bool:
        """True: adapters can be trained on the frozen layers."""
        return True

    @property
    def is_compileable(self) -> bool:
        """True: models can be compiled."""
        return True


def _other_than_linear(named: Named, modules: Mapping[str, nn.Module], shared: Mapping[str, str]) -> str | None:
    """Return what a model has for a weight of the checkpoint in place of a linear layer of its own, or None."""
    if named.pattern is not None:
        return "one joined with others or split"
    module = modules.get(named.name.removesuffix(WEIGHT))
    if named.name in shared:
        return f"one that shares its weight with {shared[named.name].removesuffix(WEIGHT)}"
    if type(module) is nn.Linear:
        return None
    return "a parameter" if module is None else f"a {type(module).__name__}"


class Quantize(ConversionOps):  # type: ignore[misc]
    """Quantizes a loaded weight, and replaces its linear layer by an FP8 layer; notes weights that are not finite."""

    def __init__(self, config: Fp8CoreConfig, input_scales: Mapping[str, float | None], bad: list[str]) -> None:
        self.config, self.input_scales, self.bad = config, input_scales, bad

    def convert(self, input_dict: dict[str, Any], *, full_layer_name: str, model: Any, **_: Any) -> dict[str, Any]:
        """Return the codes and scales by name, as parameters of the new layer."""
        (loaded,) = input_dict.values()
        weight = loaded[0] if isinstance(loaded, list) else loaded
        if not_finite(weight):  # transformers would replace an error that is raised here by one without the name
            self.bad.append(full_layer_name)
        place = full_layer_name.removesuffix(WEIGHT)
        linear = model.get_submodule(place)
        linear.weight = nn.Parameter(weight, requires_grad=False)
        scheme = "tensor" if self.config.scheme == "static" else self.config.scheme
        scale = self.input_scales[full_layer_name]
        made = Linear.from_linear(linear, scheme=scheme, input_scale=scale, **self.config.options)
        made._parameters["bias"] = linear._parameters["bias"]  # the same object, which is marked once it is loaded
        initialized(made)
        model.set_submodule(place, made)
        new = {name: made._parameters[name] for name in ("weight", "weight_scale", "input_scale")}
        return {f"{place}.{name}": parameter for name, parameter in new.items() if parameter is not None}
