"""Operands of several frameworks in one call, on the host."""

from functools import cache
from typing import Any

import numpy as np

import fp8core
from soak.layers import Weights
from soak.machines import installed
from soak.session import Actor, Session

HOST = ("numpy", "torch-cpu", "jax-cpu")


@cache
def engines() -> dict[str, Any]:
    """Return the host's frameworks that are installed."""
    return installed(HOST)


class HostActor(Actor):
    """A thread on the host, which mixes NumPy, PyTorch and JAX."""

    def __init__(self, session: Session, number: int) -> None:
        super().__init__(session, number)
        self.scenarios.append((self.mixed, 2))

    def mixed(self) -> None:
        """Make a product of x, weight and scale of three frameworks; the result is of the first one's."""
        weights: Weights = self.session.weights
        names = [str(self.rng.choice(list(engines()))) for _ in range(3)]
        j, i = int(self.rng.integers(len(weights.codes))), int(self.rng.integers(len(weights.x)))
        values = weights.x[i], weights.codes[j], weights.scales[j]
        x, weight, scale = (engines()[n].array(v) for n, v in zip(names, values, strict=True))
        said = f"mixed {' x '.join(names)}, weight {j}, input {i}"
        self.history.append(said)
        y = fp8core.Fp8Linear(weight, scale)(x) if self.rng.random() < 0.5 else fp8core.linear(x, weight, scale)
        got = np.ascontiguousarray(engines()[names[0]].numpy(y)).reshape(-1).view(np.uint8)
        self.compare(self.machine.upload(got), weights.answers[j, i], said)
        self.counts["launches"] += 1
