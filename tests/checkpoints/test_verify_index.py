"""`verify_checkpoint` compares an index with the files."""

import json

import pytest

from fp8core.checkpoint import verify_checkpoint
from fp8core.errors import CheckpointError

torch = pytest.importorskip("torch")
from safetensors.torch import load_file, save_file  # noqa: E402

from checkpoints.faulty import SCALE, found  # noqa: E402
from support import checkpoint_formats as written  # noqa: E402
from support.checkpoint_formats import write_format  # noqa: E402


def sharded(folder, twice=None, index=None):
    write_format(written.deepseek, folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"a.safetensors": names[:4], "b.safetensors": names[4:]}
    for file, held in parts.items():
        more = [] if twice is None or file != twice[0] else [twice[1]]
        save_file({name: tensors[name] for name in {*held, *more}}, folder / file)
    weight_map = {name: file for file, held in parts.items() for name in held}
    text = json.dumps({"weight_map": weight_map}) if index is None else index(weight_map)
    (folder / "model.safetensors.index.json").write_text(text)
    return folder


def written_twice(weight_map):
    name = next(iter(weight_map))
    return json.dumps({"weight_map": weight_map}).replace(
        '"weight_map": {', f'"weight_map": {{"{name}": "b.safetensors", '
    )


def moved(weight_map):
    return json.dumps({"weight_map": {**weight_map, SCALE: "a.safetensors"}})


def elsewhere(weight_map):
    return json.dumps({"weight_map": {**weight_map, SCALE: "c.safetensors"}})


def without(weight_map):
    return json.dumps({"weight_map": {name: file for name, file in weight_map.items() if name != SCALE}})


def test_an_index_that_is_right_has_no_fault(tmp_path):
    assert not found(sharded(tmp_path / "model"))


@pytest.mark.parametrize(("index", "name"), [(moved, SCALE), (elsewhere, SCALE), (without, SCALE)])
def test_an_index_that_is_wrong_is_told_with_the_tensor(tmp_path, index, name):
    assert ("index", name) in found(sharded(tmp_path / "model", index=index))


def test_a_fault_of_an_index_is_told_with_its_name(tmp_path):
    folder = sharded(tmp_path / "model", index=without)
    (folder / "model.safetensors.index.json").rename(folder / "diffusion.safetensors.index.json")
    texts = [fault.text for fault in verify_checkpoint(folder).faults if fault.kind == "index"]
    assert texts == [f"diffusion.safetensors.index.json does not name {SCALE}, which is in b.safetensors"]


def test_an_index_that_names_a_tensor_twice_is_told(tmp_path):
    folder = sharded(tmp_path / "model", index=written_twice)
    name = min(name for file in folder.glob("*.safetensors") for name in load_file(file))
    assert ("index", name) in found(folder)
    assert next(f.text for f in verify_checkpoint(folder).faults if f.kind == "index").endswith(
        "b.safetensors and a.safetensors"
    )


def test_a_tensor_in_two_files_without_an_index_is_told(tmp_path):
    folder = sharded(tmp_path / "model", twice=("a.safetensors", SCALE))
    (folder / "model.safetensors.index.json").unlink()
    assert ("index", SCALE) in found(folder)


def test_an_index_whose_files_are_all_elsewhere_is_called_so(tmp_path):
    """The folder does hold a safetensors file."""
    write_format(written.deepseek, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "b.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"model.safetensors.index.json names no file that is there"):
        verify_checkpoint(tmp_path / "model")
