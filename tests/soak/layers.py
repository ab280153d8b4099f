"""A linear layer whose weight is rewritten, replaced, moved and copied between calls, in every way that users have."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np

import fp8core
from fp8core import Fp8Linear
from soak.machines import Machine
from soak.works import NATIVE, _values, bounded
from support import reference

N, K, ROWS = 48, 256, 5
WEIGHTS = 4


class Weights:
    """What every thread shares and nobody changes: weights, inputs, and the answers of plain calls on fresh layers."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.high = [_values((i, 7), (N, K)) for i in range(WEIGHTS)]
        self.x = [_values((i, 8), (ROWS, K)) for i in range(2)]
        made = [reference.quantize(w) for w in self.high]
        self.codes, self.scales = [q.codes.view(NATIVE) for q in made], [q.scale for q in made]
        fnuz = np.array([reference.fn_to_fnuz(c) for c in range(256)], np.uint8)
        self.fnuz = [fnuz[q.codes].view("u1").view(_fnuz()) for q in made]
        up = machine.upload
        self.on_machine: dict[str, list[Any]] = {
            "high": [up(w) for w in self.high],
            "codes": [up(w) for w in self.codes],
            "fnuz": [up(w) for w in self.fnuz],
            "scales": [up(s) for s in self.scales],
            "scales of fnuz": [up(2 * s) for s in self.scales],
            "x": [up(x) for x in self.x],
        }
        self.one, self.nothing = up(np.ones(1, np.float32)), up(self.x[0][:0])
        self.answers = {(j, i): self._answer(j, i) for j in range(WEIGHTS) for i in range(len(self.x))}

    def _answer(self, j: int, i: int) -> Any:
        there = self.on_machine
        layer = Fp8Linear(self.machine.upload(self.codes[j]), self.machine.upload(self.scales[j]))
        y = layer(there["x"][i])
        self.machine.synchronize()
        q = reference.quantize(self.x[i])
        a = reference.dequantize(q.codes, "float8_e4m3fn", q.scale, (1, -1)).astype(np.float64)
        b = reference.dequantize(self.codes[j].view(np.uint8), "float8_e4m3fn", self.scales[j], (1, -1)).astype(
            np.float64
        )
        got = np.ascontiguousarray(self.machine.engine.numpy(y))
        bounded(got, a @ b.T, np.abs(a) @ np.abs(b).T, "bfloat16")
        return self.machine.raw_of(y)


def _fnuz() -> Any:
    import ml_dtypes

    return ml_dtypes.float8_e4m3fnuz


class MovingLayer:
    """One thread's layer; `moved` puts another weight into it and says how, `called` gives bytes to compare."""

    def __init__(self, weights: Weights, rng: np.random.Generator) -> None:
        self.weights, self.machine, self.rng = weights, weights.machine, rng
        self.now = 0
        self.how = self._fresh()

    def _fresh(self) -> str:
        up = self.machine.upload
        self.weight, self.scale = up(self.weights.codes[self.now]), up(self.weights.scales[self.now])
        self.layer = Fp8Linear(self.weight, self.scale)
        return "a new layer"

    def called(self) -> tuple[Any, Any]:
        """Return the bytes of a call's result, and those of the answer."""
        i = int(self.rng.integers(len(self.weights.x)))
        y = self.layer(self.weights.on_machine["x"][i])
        return self.machine.raw_of(y), self.weights.answers[self.now, i]

    def empty_call(self) -> str:
        """Call the layer without rows, which launches nothing and so settles nothing."""
        y = self.layer(self.weights.nothing)
        assert tuple(y.shape) == (0, N)
        return "m = 0"

    def moved(self) -> str:
        """Let the layer have another weight, or be another layer."""
        ways = [*self.in_place(), self._fresh, self._assigned, self._deep_copy, self._pickled]
        if self.machine.name.startswith("torch"):
            ways += [self._data_swapped, self._offloaded]
        return self._one_of(ways)

    def in_place(self) -> list[Callable[[], str]]:
        """Return the ways that leave weight and scale where they are."""
        return [self._copied, self._quantized, self._requantized, self._normalized]

    def rewritten(self) -> str:
        """Let the layer have another weight in the same memory."""
        return self._one_of(self.in_place())

    def _one_of(self, ways: list[Callable[[], str]]) -> str:
        self.now = int(self.rng.integers(WEIGHTS))
        self.how = ways[int(self.rng.integers(len(ways)))]()
        return self.how

    def _copied(self) -> str:
        there, j = self.weights.on_machine, self.now
        self.machine.copy(self.weight, there["codes"][j])
        self.machine.copy(self.scale, there["scales"][j])
        return "a foreign copy in place"

    def _quantized(self) -> str:
        fp8core.quantize(self.weights.on_machine["high"][self.now], out=(self.weight, self.scale))
        return "quantize(out=weight)"

    def _requantized(self) -> str:
        there, j = self.weights.on_machine, self.now
        self.machine.copy(self.scale, there["scales"][j])
        fp8core.requantize_with_max_scale(there["codes"][j], self.weights.one, [N], out=self.weight)
        return "requantize_with_max_scale(out=weight)"

    def _normalized(self) -> str:
        there, j = self.weights.on_machine, self.now
        _, scale, _ = fp8core.normalize_e4m3fnuz_to_e4m3fn(
            there["fnuz"][j], there["scales of fnuz"][j], out=self.weight
        )
        self.machine.copy(self.scale, scale)
        return "normalize(out=weight)"

    def _assigned(self) -> str:
        """Assign another weight and scale; where that is refused, nothing may have changed."""
        up, j = self.machine.upload, self.now
        weight, scale = up(self.weights.codes[j]), up(self.weights.scales[j])
        try:
            self.layer.weight = weight
        except (AttributeError, fp8core.Fp8Error):
            return f"layer.weight = refused, {self._copied()}"
        self.weight = weight
        try:
            self.layer.weight_scale = scale
        except (AttributeError, fp8core.Fp8Error):
            self.machine.copy(self.scale, scale)
            return "layer.weight =, and the scale in place"
        self.scale = scale
        return "layer.weight ="

    def _deep_copy(self) -> str:
        """Take a deep copy, then spoil the original's memory."""
        self._copied()
        theirs = self.weight, self.scale
        self.layer = copy.deepcopy(self.layer)
        self.weight, self.scale = self.layer.weight, self.layer.weight_scale
        for array in theirs:
            self.machine.copy(array, self.weights.on_machine["codes" if array is theirs[0] else "scales"][self.now - 1])
        return "deepcopy, and the original rewritten"

    def _pickled(self) -> str:
        self._copied()
        theirs = self.weight
        self.layer = pickle.loads(pickle.dumps(self.layer))
        self.weight, self.scale = self.layer.weight, self.layer.weight_scale
        self.machine.copy(theirs, self.weights.on_machine["codes"][self.now - 1])
        return "pickle, and the original rewritten"

    def _data_swapped(self) -> str:
        there, j = self.weights.on_machine, self.now
        self.layer.weight.data, self.layer.weight_scale.data = there["codes"][j].clone(), there["scales"][j].clone()
        self.weight, self.scale = self.layer.weight, self.layer.weight_scale
        return ".data ="

    def _offloaded(self) -> str:
        """Send weight and scale to the host, overwrite what they left, and bring them back elsewhere."""
        self._copied()
        for tensor in (self.layer.weight, self.layer.weight_scale):
            host, left = tensor.detach().cpu().clone(), tensor.data
            tensor.data = host
            left.view(self.machine.torch.uint8).fill_(0x55)
            tensor.data = host.clone().to(left.device)
        self.weight, self.scale = self.layer.weight, self.layer.weight_scale
        return "offload and back"
