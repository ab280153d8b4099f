"""The soak of each engine, and faults planted into it that it has to report."""

import pytest

from soak.conftest import seconds
from soak.machines import machine
from soak.session import Budget, Session, written

STEPS = 150
GPU_SECONDS = 10.0


def soaked(request, record_property, name):
    there = machine(name)
    config = request.config
    seed = config.getoption("soak_seed", None) or 0
    budget = Budget(STEPS, seconds(config) or (GPU_SECONDS if there.gpu else 0.0))
    counts = Session(there, seed, budget).run()
    record_property("soak", written(config.getoption("soak_report", None), there, seed, counts))
    assert counts["checks"] > STEPS * budget.threads / 2
    return counts


@pytest.mark.parametrize("name", ["numpy", "torch-cpu"])
def test_a_soak_of_the_host(request, record_property, name):
    soaked(request, record_property, name)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["torch-cuda", "cupy"])
def test_a_soak_of_the_gpu(request, record_property, name):
    counts = soaked(request, record_property, name)
    assert counts["replays"] > 0
