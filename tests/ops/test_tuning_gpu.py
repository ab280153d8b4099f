"""Tuning on a GPU: what is timed runs, what is chosen computes right, and another process can be told."""

import os
import subprocess
import sys
from dataclasses import replace
from math import isfinite

import numpy as np
import pytest

import fp8core
from fp8core import timing
from fp8core.core import operation
from fp8core.errors import TuningError
from fp8core.kernels.gemm.table import SCALED_MM
from fp8core.kernels.linear.table import LINEAR
from fp8core.tuning import values
from support.engines import fresh
from support.gpu_products import EXACT, FAST, case, check, cp, e4m3, error, launch, result

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def untuned(monkeypatch):
    """Tune from nothing, and leave nothing tuned: neither in the tables nor in calls prepared during the test."""
    monkeypatch.setattr(SCALED_MM, "_tuned", {})
    monkeypatch.setattr(SCALED_MM, "_plans", {})
    monkeypatch.setattr(SCALED_MM, "_expected", {})
    values.APPLIED.clear()
    yield
    LINEAR.forget()
    operation.forget()


MODES = [("tensor", "tensor"), ("row", "row"), ("tensor", "row"), ("group", "block")]


@pytest.mark.parametrize("modes", MODES)
@pytest.mark.parametrize("m", [16, 80, 512])
@pytest.mark.parametrize("options", [{}, {"bias": "bfloat16", "fast": False}, {"out": "float16"}, {"out": "float32"}])
def test_every_way_computes_the_product(modes, m, options):
    """Offers for a scale each that are given vectors of scales included."""
    made = case(*modes, m=m, n=1152, k=2048, layout="mn", seed=m, **options)
    for choice in SCALED_MM.candidates(made.problem):
        made.storage[...] = 0xA5
        launch(made, SCALED_MM.planned(made.problem, choice))
        bound = FAST if made.problem.use_fast_accum else EXACT
        assert error(result(made), made.want) <= bound, choice


@pytest.mark.parametrize(
    ("modes", "options"),
    [
        (("tensor", "tensor"), {}),
        (("row", "row"), {"bias": "bfloat16"}),
        (("row", "tensor"), {"lda": 1040, "ldb": 1056, "ldo": 520}),
        (("group", "block"), {"layout": "mn"}),
        (("group", "block"), {"m": 67}),
        (("tensor", "tensor"), {"out": "codes", "amax": True}),
        (("row", "row"), {"offset": 1, "bias": "float32"}),
        (("row", "row"), {"n": 511, "k": 1000}),
    ],
)
def test_every_kind_of_problem_can_be_timed(modes, options):
    options = {"m": 80, "fast": False} | options
    if options.get("out") == "codes":
        options["out"] = e4m3()
    made = case(*modes, **options)
    choices = SCALED_MM.candidates(made.problem)
    times = timing.times(made.problem, [SCALED_MM.planned(made.problem, choice) for choice in choices])
    assert len(times) == len(choices)
    assert any(isfinite(us) for us in times)
    assert min(times) > 0.5
    check(made, choices[times.index(min(times))].kernel)


def layer_and_input(m):
    weight = cp.asarray(fresh((1024, 2048), "float32", spread=0.0))
    return fp8core.Fp8Linear.from_weight(weight, out_dtype="float32"), cp.asarray(
        fresh((m, 2048), "float32", spread=0.0)
    )


@pytest.mark.parametrize("m", [16, 96])
def test_a_tuned_layer_computes_as_before(m):
    layer, x = layer_and_input(m)
    before = layer(x).get()
    tuning = fp8core.tune(layer, x)
    assert SCALED_MM.choice(fp8core.explain(layer, x).problem) == tuning.chosen[:2]
    assert fp8core.explain(layer, x).chosen == tuning.chosen.kernel
    after = layer(x).get()
    assert np.linalg.norm(after - before) <= FAST * np.linalg.norm(before)
    assert np.array_equal(layer(x).get(), after)


OTHER_PROCESS = """
import sys
from fp8core import Tuning
from fp8core.kernels.gemm.table import SCALED_MM
tuning = Tuning.from_json(sys.stdin.read())
tuning.apply()
print(SCALED_MM.choice(tuning._problem) == tuning.chosen[:2])
"""


def test_another_process_takes_the_tuning():
    layer, x = layer_and_input(96)
    line = fp8core.tune(layer, x).to_json()
    command = [sys.executable, "-c", OTHER_PROCESS]
    run = subprocess.run(command, input=line, capture_output=True, text=True, check=False, env=dict(os.environ))
    assert (run.returncode, run.stdout) == (0, "True\n"), run.stderr


NAMED = """
import warnings
import cupy as cp
import fp8core
warnings.simplefilter("error", RuntimeWarning)
from fp8core.kernels.gemm.table import SCALED_MM
weight = cp.asarray(cp.random.rand(1024, 2048, dtype=cp.float32))
layer = fp8core.Fp8Linear.from_weight(weight, out_dtype="float32")
x = cp.random.rand(96, 2048, dtype=cp.float32)
layer(x), layer(x)
print(*SCALED_MM.choice(layer.explain(x).problem), layer.explain(x).chosen)
"""


def test_another_process_takes_the_file_that_the_environment_names(tmp_path):
    layer, x = layer_and_input(96)
    tuning = fp8core.tune(layer, x)
    other = next(one for one in tuning.timed if one != tuning.chosen)
    path = fp8core.save_tunings(tmp_path / "tunings.jsonl", [replace(tuning, chosen=other)])
    environment = {**os.environ, "FP8CORE_TUNINGS": str(path)}
    run = subprocess.run([sys.executable, "-c", NAMED], capture_output=True, text=True, check=False, env=environment)
    wanted = f"{other.kernel} {other.algorithm} {other.kernel}\n"
    assert (run.returncode, run.stdout) == (0, wanted), run.stderr


def test_shapes_are_the_products_of_layers():
    layer, x = layer_and_input(96)
    (tuning,) = fp8core.tune_shapes([(96, 1024, 2048)], dtype="float32")
    assert tuning.key[1] == fp8core.explain(layer, x).problem._replace(target=tuning.key[1].target)
    assert "tuned" in {v.kernel: v.reason for v in layer.explain(x).verdicts}[tuning.chosen.kernel]


def test_a_tuning_of_another_gpu_is_refused():
    layer, x = layer_and_input(96)
    tuning = fp8core.tune(layer, x)
    with pytest.raises(TuningError):
        replace(tuning, machine=tuning.machine._replace(gpu="another")).apply()
