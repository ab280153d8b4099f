"""Types that help: mypy --strict and pyright's strict mode agree on what the public functions give and refuse."""

import importlib.util
import inspect
import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import pytest

import fp8core
from fp8core import types

ROOT = Path(__file__).resolve().parents[2]
TYPED = ROOT / "tests" / "package" / "typed"
NEEDS = {"numpy_arrays": "numpy", "torch_tensors": "torch", "jax_arrays": "jax"}
KEYWORDS = {
    fp8core.quantize: types.QuantizeKeywords,
    fp8core.silu_and_mul_quant: types.SiluKeywords,
    fp8core.rms_norm_quant: types.NormKeywords,
    fp8core.dequantize: types.DequantizeKeywords,
    fp8core.per_tensor_dequantize: types.StreamKeyword,
    fp8core.scaled_mm: types.ProductKeywords,
    fp8core.scaled_mm_nt: types.ProductKeywords,
    fp8core.grouped_scaled_mm_nt: types.GroupedKeywords,
    fp8core.moe_permute: types.StreamKeyword,
    fp8core.moe_unpermute: types.UnpermuteKeywords,
    fp8core.linear: types.LinearKeywords,
    fp8core.Fp8Linear.__call__: types.CallKeywords,
    fp8core.requantize_with_max_scale: types.CallKeywords,
    fp8core.convert_to_channelwise: types.StreamKeyword,
    fp8core.normalize_e4m3fn_to_e4m3fnuz: types.CallKeywords,
    fp8core.normalize_e4m3fnuz_to_e4m3fn: types.CallKeywords,
}


@pytest.mark.parametrize(("function", "keywords"), KEYWORDS.items(), ids=lambda it: it.__qualname__)
def test_checkers_know_every_keyword_of_a_function(function, keywords):
    keyword_only = [p for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
    taken = {p.name for p in keyword_only if p.default is not p.empty}  # the others are in the signature itself
    assert taken == set(get_type_hints(keywords))


def checked(*command):
    environment = {**os.environ, "MYPYPATH": f"{ROOT}{os.pathsep}{ROOT / 'examples'}"}
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment)
    return run.returncode, run.stdout + run.stderr


def mypy(*paths):
    pytest.importorskip("mypy", reason="mypy is not installed (extra test)")
    return checked(sys.executable, "-m", "mypy", "--strict", *map(str, paths))


def pyright(folder, *paths):
    found = shutil.which("basedpyright", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if found is None:
        pytest.skip("basedpyright is not installed (extra test)")
    config = folder / "pyrightconfig.json"
    config.write_text(
        json.dumps(
            {
                "include": [str(path) for path in paths],
                "extraPaths": [str(ROOT)],
                "typeCheckingMode": "strict",
                "reportUnnecessaryTypeIgnoreComment": "error",
                "reportUnusedExpression": False,
                "reportMissingTypeStubs": False,
                "reportUnknownMemberType": False,  # of the frameworks
            }
        )
    )
    return checked(found, "--project", str(config), "--pythonpath", sys.executable)


def files():
    return [TYPED / f"{name}.py" for name, needed in NEEDS.items() if importlib.util.find_spec(needed)]


def test_mypy_knows_what_calls_give():
    status, said = mypy(*files(), TYPED / "wrong_calls.py")
    assert status == 0, said


def test_pyright_knows_what_calls_give(tmp_path):
    status, said = pyright(tmp_path, *files(), TYPED / "wrong_calls.py")
    assert status == 0, said


@pytest.mark.parametrize("name", NEEDS)
def test_what_checkers_know_is_true(name):
    pytest.importorskip(NEEDS[name], reason=f"{NEEDS[name]} is not installed (extra frameworks)")
    runpy.run_path(str(TYPED / f"{name}.py"))


def test_a_wrong_claim_is_found(tmp_path):
    wrong = tmp_path / "wrong.py"
    wrong.write_text(
        "from typing import assert_type\nimport numpy as np\nimport fp8core\n"
        "assert_type(fp8core.quantize(np.ones((2, 32), np.float32)).data, int)\n"
    )
    for (status, said), complaint in (
        (mypy(wrong), "[assert-type]"),
        (pyright(tmp_path, wrong), '"assert_type" mismatch'),
    ):
        assert status == 1
        assert complaint in said
