"""What else from_pretrained takes: arguments of the configuration, configurations, folders in folders."""

import shutil
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from safetensors.torch import save_file  # noqa: E402 - after the skips

from fp8core.checkpoint import convert_checkpoint, quantize_checkpoint  # noqa: E402
from fp8core.errors import CheckpointError, DeviceError, DTypeError  # noqa: E402
from fp8core.torch import Linear  # noqa: E402
from fp8core.transformers import Fp8CoreConfig, Fp8CoreQuantizer, config_for, from_pretrained  # noqa: E402
from huggingface.cases import TOKENS, config_of, fp8_layers, logits, same, tensors_of, written  # noqa: E402


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A checkpoint in bfloat16, and one in FP8."""
    root = tmp_path_factory.mktemp("models")
    written("llama", root / "wide")
    from_pretrained(root / "wide").save_pretrained(root / "fp8")
    return root


both = pytest.mark.parametrize("name", ["wide", "fp8"])


def is_fp8(model):
    return type(model.model.layers[0].mlp.up_proj) is Linear


@both
def test_arguments_of_the_configuration_change_it(folders, name):
    classes = transformers.AutoModelForSequenceClassification, transformers.LlamaForSequenceClassification
    for auto in classes:
        model = from_pretrained(folders / name, auto=auto, num_labels=3, pad_token_id=0, dtype=torch.float16)
        assert is_fp8(model)
        assert model.dtype == torch.float16
        assert model(TOKENS).logits.shape == (2, 3)


@pytest.mark.parametrize("dtype", [torch.float16, "float16", "auto", None])
def test_the_dtype_is_the_model_s(folders, dtype):
    for name in ("wide", "fp8"):
        asked = {} if dtype is None else {"dtype": dtype}
        wanted = transformers.AutoConfig.from_pretrained(folders / name, **{} if dtype == "auto" else asked)
        assert config_for(folders / name, **asked).dtype == wanted.dtype
        model = from_pretrained(folders / name, dtype=dtype)
        assert model.dtype == (torch.float16 if dtype in (torch.float16, "float16") else torch.bfloat16)
        assert is_fp8(model)


@pytest.mark.parametrize("path", [None, 5, ["folder"]])
def test_a_path_of_another_type_is_not_looked_for_on_the_network(path):
    for call in (from_pretrained, config_for):
        with pytest.raises(DTypeError, match=r"^path needs a folder or the name of a repository, got "):
            call(path)


@pytest.mark.parametrize("config", [{"model_type": "llama"}, 5])
def test_a_configuration_of_another_type_is_not_looked_for_on_the_network(folders, config):
    with pytest.raises(DTypeError, match=r"^config needs a PreTrainedConfig, a folder or the name of a rep"):
        from_pretrained(folders / "wide", config=config)


def test_what_loads_no_model_is_refused(folders):
    with pytest.raises(DTypeError, match=r"^auto needs a class with from_pretrained, got None$"):
        from_pretrained(folders / "fp8", None)


@pytest.mark.parametrize(
    ("dtype", "got"), [(torch.float64, "float64"), ("float64", "float64"), (torch.float8_e4m3fn, "float8_e4m3fn")]
)
@both
def test_a_dtype_that_no_layer_takes_is_refused_before_weights_are_read(folders, name, dtype, got):
    words = rf"^dtype needs one of float32, float16, bfloat16, as a torch\.dtype, got torch\.{got}$"
    with pytest.raises(DTypeError, match=words):
        from_pretrained(folders / name, dtype=dtype)


@pytest.mark.parametrize("given", ["object", "folder", "config_for"])
@both
def test_a_configuration_may_be_given(folders, name, given):
    config = {
        "object": transformers.AutoConfig.from_pretrained,
        "folder": str,
        "config_for": config_for,
    }[given](folders / name)
    before = config if isinstance(config, str) else config.to_dict()
    model = from_pretrained(folders / name, config=config)
    assert is_fp8(model)
    assert torch.equal(logits(model), logits(from_pretrained(folders / name)))
    assert before == (config if isinstance(config, str) else config.to_dict())


@both
def test_a_folder_in_the_folder(folders, name, tmp_path):
    shutil.copytree(folders / name, tmp_path / "all" / "inner")
    assert is_fp8(from_pretrained(tmp_path / "all", subfolder="inner"))


AUTO = [{"tp_plan": "auto"}, {"distributed_config": {"tp_plan": "auto"}}]


@both
@pytest.mark.parametrize(
    ("spread", "got"),
    [
        *((one, "tp_size=2") for one in (*AUTO, {"tp_size": 2})),
        ({"distributed_config": {"fsdp_size": 2}}, "fsdp_size=2"),
        ({"device_mesh": object()}, "device_mesh"),
    ],
)
def test_layers_are_not_spread_over_processes(folders, name, spread, got, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(DeviceError, match=f"needs whole layers in each process, got {got}: leave it out"):
        from_pretrained(folders / name, **spread)


@both
@pytest.mark.parametrize("spread", [*AUTO, {"tp_size": 1}])
@pytest.mark.filterwarnings("ignore:Passing `tp_plan` directly:FutureWarning")
def test_one_process_has_the_whole_model(folders, name, spread):
    """As in transformers, whose plan "auto" counts the processes."""
    found = from_pretrained(folders / name, **spread)
    assert torch.equal(logits(found), logits(from_pretrained(folders / name)))


@both
def test_nor_by_transformers_own_from_pretrained(folders, name):
    """Which leaves what it was told with the configuration while it loads the model, and not in files."""
    config = config_for(folders / name)
    config.distributed_config = SimpleNamespace(tp_size=2, fsdp_size=None)
    asked = {} if name == "fp8" else {"quantization_config": Fp8CoreConfig()}
    with pytest.raises(DeviceError, match="needs whole layers in each process, got tp_size=2: leave it out"):
        transformers.AutoModelForCausalLM.from_pretrained(folders / name, config=config, **asked)


@pytest.mark.parametrize("size", ["tp_size", "ep_size", "pp_size", "fsdp_size", "dp_replicate_size"])
def test_nor_in_any_way_that_transformers_knows(size):
    spread = SimpleNamespace(config=SimpleNamespace(distributed_config=SimpleNamespace(**{size: 2})))
    quantizer = Fp8CoreQuantizer(Fp8CoreConfig(), pre_quantized=False)
    with pytest.raises(DeviceError, match=f"needs whole layers in each process, got {size}=2: leave it out"):
        quantizer._process_model_before_weight_loading(spread)


def test_options_reach_every_layer(folders):
    options = {"use_fast_accum": False, "batch_invariant": True}
    config = config_for(folders / "fp8")
    config.quantization_config |= options
    quantized = from_pretrained(folders / "wide", quantization_config=Fp8CoreConfig(**options))
    for model in quantized, from_pretrained(folders / "fp8", config=config):
        found = {(layer.use_fast_accum, layer.batch_invariant) for layer in fp8_layers(model).values()}
        assert found == {(False, True)}


def test_one_configuration_serves_several_models(folders, tmp_path):
    """What is said of one model when it is saved is not what was done to the next."""
    asked = Fp8CoreConfig("channel")
    assert asked.options == {"use_fast_accum": True, "batch_invariant": False}
    before = asked.to_dict()
    first = from_pretrained(folders / "wide", quantization_config=asked)
    written("qwen3", tmp_path / "other")
    from_pretrained(tmp_path / "other", quantization_config=asked)
    asked.scheme = "tensor"  # nor what the caller makes of it
    assert from_pretrained(folders / "wide", quantization_config=asked).model.layers[0].mlp.up_proj.scheme == "tensor"
    asked.scheme = "channel"
    assert asked.to_dict() == before
    first.save_pretrained(tmp_path / "saved")
    assert config_of(tmp_path / "saved") == config_of(folders / "fp8")
    assert torch.equal(logits(from_pretrained(tmp_path / "saved")), logits(first))


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.float8_e4m3fnuz], ids=str)
def test_codes_stay_in_their_format(folders, dtype, tmp_path):
    tensors = tensors_of(folders / "fp8")
    codes = {name: x.float().to(dtype) for name, x in tensors.items() if x.dtype == torch.float8_e4m3fn}
    shutil.copytree(folders / "fp8", tmp_path / "in")
    save_file({**tensors, **codes}, tmp_path / "in" / "model.safetensors", {"format": "pt"})
    model = from_pretrained(tmp_path / "in")
    assert all(same(layer.weight, codes[f"{name}.weight"]) for name, layer in fp8_layers(model).items())
    model.save_pretrained(tmp_path / "out")
    assert all(same(tensors_of(tmp_path / "out")[name], x) for name, x in codes.items())


@pytest.mark.parametrize(
    ("dtype", "form"),
    [
        *((torch.bfloat16, None), (torch.float16, None)),
        *((torch.float8_e8m0fnu, "F8_E8M0"), (torch.uint8, "U8")),
    ],
    ids=str,
)
def test_scales_that_were_changed_are_saved_as_they_are_or_refused(folders, dtype, form, tmp_path):
    tensors = tensors_of(folders / "fp8")
    numbers = torch.float8_e8m0fnu if dtype == torch.uint8 else dtype
    scales = {name: x.to(numbers).view(dtype) for name, x in tensors.items() if name.endswith("weight_scale")}
    shutil.copytree(folders / "fp8", tmp_path / "narrow")
    save_file({**tensors, **scales}, tmp_path / "narrow" / "model.safetensors", {"format": "pt"})
    model = from_pretrained(tmp_path / "narrow")
    model.save_pretrained(tmp_path / "same")
    assert all(same(tensors_of(tmp_path / "same")[name], x) for name, x in scales.items())
    name = "model.layers.0.mlp.up_proj"
    layer = model.get_submodule(name)
    assert torch.equal(layer.weight_scale, scales[f"{name}.weight_scale"].view(numbers).float())
    with torch.no_grad():
        layer.weight_scale.mul_(1 + 2**-20)
    if form is not None:
        refusal = rf"{name}.weight_scale needs numbers that {form}\[320, 1\], its form in the file, holds, got others"
        with pytest.raises(CheckpointError, match=refusal):
            model.save_pretrained(tmp_path / "changed")
        return
    model.save_pretrained(tmp_path / "changed")
    assert torch.equal(tensors_of(tmp_path / "changed")[f"{name}.weight_scale"], layer.weight_scale)
    assert torch.equal(logits(from_pretrained(tmp_path / "changed")), logits(model))


@both
def test_a_scale_that_was_added_is_named(folders, name, tmp_path):
    """The configuration would say that no layer has one."""
    model = from_pretrained(folders / name)
    model.model.layers[0].mlp.up_proj.input_scale = torch.nn.Parameter(torch.ones(1), requires_grad=False)
    words = r"needs no static scale of the inputs of model\.layers\.0\.mlp\.up_proj, as its configuration says, got one"
    with pytest.raises(CheckpointError, match=words):
        model.save_pretrained(tmp_path / "added")


def test_a_scale_that_was_added_to_grouped_layers_is_named(tmp_path):
    written("qwen3_moe", tmp_path / "wide")
    model = from_pretrained(tmp_path / "wide")
    down = model.model.layers[1].mlp.experts.down_proj
    down.input_scale = torch.nn.Parameter(torch.ones(down.groups, 1), requires_grad=False)
    with pytest.raises(CheckpointError, match=r"inputs of model\.layers\.1\.mlp\.experts\.0\.down_proj, as .* got one"):
        model.save_pretrained(tmp_path / "added")


def test_a_scale_that_was_removed_is_named(folders, tmp_path):
    """The file would say that the inputs of every layer have one."""
    scales = dict.fromkeys(fp8_layers(from_pretrained(folders / "fp8")), 0.05)
    static = from_pretrained(folders / "wide", quantization_config=Fp8CoreConfig("static", input_scales=scales))
    static.save_pretrained(tmp_path / "static")
    for model in (static, from_pretrained(tmp_path / "static")):
        model.model.layers[0].mlp.up_proj.input_scale = None
        with pytest.raises(CheckpointError, match=r"needs a static scale .*layers\.0\.mlp\.up_proj, .* got none"):
            model.save_pretrained(tmp_path / "removed")
    model = from_pretrained(tmp_path / "static")
    model.model.layers[0].mlp.up_proj.weight_scale = None
    with pytest.raises(
        CheckpointError, match=r"mlp\.up_proj\.weight_scale needs a tensor, as the file has weight_scale"
    ):
        model.save_pretrained(tmp_path / "removed")


def test_static_scales_are_saved_in_the_dtype_of_the_file(folders, tmp_path):
    scales = dict.fromkeys(fp8_layers(from_pretrained(folders / "fp8")), 0.05)
    asked = Fp8CoreConfig("static", input_scales=scales)
    from_pretrained(folders / "wide", quantization_config=asked).save_pretrained(tmp_path / "in")
    tensors = tensors_of(tmp_path / "in")
    tensors |= {name: x.bfloat16() for name, x in tensors.items() if name.endswith("input_scale")}
    save_file(tensors, tmp_path / "in" / "model.safetensors", {"format": "pt"})
    from_pretrained(tmp_path / "in").save_pretrained(tmp_path / "out")
    assert all(same(tensors_of(tmp_path / "out")[name], x) for name, x in tensors.items())


@pytest.mark.parametrize("to", ["compressed-tensors", "deepseek", "modelopt"])
def test_what_accelerate_has_offloaded_is_saved_as_it_was(folders, to, tmp_path):
    accelerate = pytest.importorskip("accelerate")
    convert_checkpoint(folders / "fp8", tmp_path / "in", to=to, lossy=True)
    model = from_pretrained(tmp_path / "in")
    accelerate.cpu_offload(model, execution_device="cpu")
    model.hf_device_map = {"model.layers.0": "cpu", "model.layers.1": 0}  # as from_pretrained does where there is a GPU
    with pytest.warns(UserWarning, match="save a model with offloaded modules"):
        model.save_pretrained(tmp_path / "out")
    before, after = tensors_of(tmp_path / "in"), tensors_of(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(same(x, after[name]) for name, x in before.items())


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", r"hf_quant_config\.json is not JSON"),
        ("[]", r"hf_quant_config\.json needs a JSON object, got list"),
        ("{}", r"hf_quant_config\.json needs a JSON object as quantization, got None"),
        ('{"quantization": []}', r"hf_quant_config\.json needs a JSON object as quantization, got \[\]"),
    ],
)
def test_a_configuration_of_modelopt_that_says_nothing_is_named(folders, tmp_path, content, words):
    shutil.copytree(folders / "wide", tmp_path / "in")
    (tmp_path / "in" / "hf_quant_config.json").write_text(content)
    with pytest.raises(CheckpointError, match=words):
        from_pretrained(tmp_path / "in")


class Shared(transformers.LlamaForCausalLM):
    """Two layers of it have the same projection."""

    _tied_weights_keys = {"model.layers.1.mlp.down_proj.weight": "model.layers.0.mlp.down_proj.weight"}  # noqa: RUF012


def test_layers_that_share_a_weight(folders, tmp_path):
    """transformers puts the loaded weight into the other layer, which has no scale for FP8 codes."""
    tied = {"tie_word_embeddings": True}  # otherwise transformers ties nothing
    model = Shared.from_pretrained(folders / "wide", **tied)
    shared = model.model.layers[0].mlp.down_proj.weight
    model.model.layers[1].mlp.down_proj.weight = shared
    model.save_pretrained(tmp_path / "wide")
    assert "model.layers.1.mlp.down_proj.weight" not in tensors_of(tmp_path / "wide")
    words = r"0\.mlp\.down_proj stays unquantized: .* one that shares its weight with model\.layers\.1\.mlp\.down_proj for it"
    with pytest.warns(RuntimeWarning, match=words):
        found = from_pretrained(tmp_path / "wide", Shared)
    first, second = (layer.mlp.down_proj for layer in found.model.layers)
    assert type(first) is type(second) is torch.nn.Linear
    assert first.weight is second.weight
    assert torch.equal(first.weight, shared)
    assert type(found.model.layers[1].mlp.up_proj) is Linear
    logits(found)

    quantize_checkpoint(tmp_path / "wide", tmp_path / "fp8")
    with pytest.raises(CheckpointError, match=r"0\.mlp\.down_proj\.weight needs a linear layer of its own .* shares"):
        from_pretrained(tmp_path / "fp8", Shared)
    own = from_pretrained(folders / "fp8", Shared, **tied)  # both layers are stored
    assert type(own.model.layers[1].mlp.down_proj) is Linear
    assert torch.equal(logits(own), logits(from_pretrained(folders / "fp8")))
