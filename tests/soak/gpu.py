"""What a thread does on a GPU beside the rest: graphs, explicit streams, several frameworks, a green context."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np

import fp8core
from fp8core import PER_TENSOR
from soak import green
from soak.layers import ROWS, N
from soak.machines import CupyMachine, Machine, installed, machine
from soak.session import Actor, Session
from soak.works import PLACINGS
from support.engines import GPU

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # or JAX takes most of the memory when it starts
GREEN_MULTIPROCESSORS = 16
BYSTANDERS = (1280, 1536, 2048, 1 << 12, 1 << 16, 65_591)
"""Bytes of memory that is nobody's but the user's during a replay: as large as a captured call's scratch, and others."""


class Gate:
    """Steps of several threads go through together, a capture goes alone: what others allocate would end it."""

    def __init__(self) -> None:
        self._free, self._inside, self._waiting = threading.Condition(), 0, 0

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Be one of several, after those who wait to be alone."""
        with self._free:
            self._free.wait_for(lambda: not self._waiting)
            self._inside += 1
        try:
            yield
        finally:
            with self._free:
                self._inside -= 1
                self._free.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Wait, from inside of `shared`, until all others are outside, and keep them there."""
        with self._free:
            self._inside -= 1
            self._waiting += 1
            self._free.notify_all()
            self._free.wait_for(lambda: self._inside == 0)
            self._waiting -= 1
            try:
                yield
            finally:
                self._inside += 1
                self._free.notify_all()


GATE = Gate()


@cache
def others() -> dict[str, Any]:
    """Return the engines of the GPU's frameworks that are installed."""
    return installed(GPU)


@cache
def peer(name: str) -> Machine:
    """Return the machine of a framework, to compare its arrays on its own stream."""
    return machine(name)


@cache
def green_stream() -> int | str:
    """Return the one stream of a green context, or why there is none."""
    return green.stream(0, GREEN_MULTIPROCESSORS)


class GpuActor(Actor):
    """A thread with streams of its own."""

    def __init__(self, session: Session, number: int) -> None:
        super().__init__(session, number)
        others()  # frameworks start before the threads do: loading libraries beside launches is not what is asked here
        self.scenarios += [(self.graph, 1), (self.explicit_stream, 2), (self.mixed, 1), (self.foreign_out, 1)]
        if number == 0:
            self.scenarios.append((self.green_context, 1))

    def prepare(self) -> None:
        if isinstance(self.machine, CupyMachine):
            self.machine.cupy.cuda.Device(0).use()
        super().prepare()
        with self.machine.on(self.stream):
            self.tensorwise = []
            for x in self.session.weights.on_machine["x"]:
                q = fp8core.quantize(x, group_shape=PER_TENSOR)
                self.tensorwise.append([self.machine.raw_of(q.data), self.machine.raw_of(q.scale)])
            self.machine.synchronize()

    def step(self) -> None:
        with GATE.shared():
            super().step()

    def address(self, stream: Any) -> int:
        """Return a stream's address."""
        return int(stream.ptr if isinstance(self.machine, CupyMachine) else stream.cuda_stream)

    def explicit_stream(self) -> None:
        """Call on a stream that is not the current one: the input is still being made on that."""
        bench = self.session.benches[int(self.rng.integers(len(self.session.benches)))]
        i, placing = int(self.rng.integers(len(bench.work.inputs))), PLACINGS[int(self.rng.integers(len(PLACINGS)))]
        other = self.streams[int(self.rng.integers(len(self.streams)))]
        said = f"{bench.work.name} of input {i}, {placing}, stream={other}"
        self.history.append(said)
        given = (other, self.address(other))[int(self.rng.integers(2))]
        got = bench.run(i, placing, then=lambda: self.machine.hand_over(other, self.stream), stream=given)
        for one, want in zip(got, bench.answers[i, placing], strict=True):
            self.compare(one, want, said)
        self.settle()  # what the other stream's pool gave must not go back before
        self.counts["launches"] += 1

    def graph(self) -> None:
        """Capture a layer and a quantization, and replay them with other inputs and weights."""
        weights, m = self.session.weights, self.machine
        x = m.upload(weights.x[0])
        high = m.upload(weights.high[self.layer.now])
        refresh = bool(self.rng.random() < 0.5)
        layer, mover = self.layer.layer, self.layer
        if self.rng.random() < 0.5:
            layer(x)
        y, q = m.upload(np.zeros((ROWS, N), weights.x[0].dtype)), None

        def calls() -> Any:
            if refresh:
                fp8core.quantize(high, out=(mover.weight, mover.scale))
            layer(x, out=y)
            return fp8core.quantize(x, group_shape=PER_TENSOR)

        self.history.append(f"capture of {'quantize(out=weight), ' if refresh else ''}layer(x) and quantize(x)")
        m.synchronize()
        with GATE.alone():
            q, replay = self._captured(calls)
        self.counts["graphs"] += 1
        for _ in range(int(self.rng.integers(2, 6))):
            i = int(self.rng.integers(len(weights.x)))
            m.copy(x, weights.on_machine["x"][i])
            if refresh:
                mover.now = int(self.rng.integers(len(weights.high)))
                m.copy(high, weights.on_machine["high"][mover.now])
            elif self.rng.random() < 0.6:
                self.history.append(mover.rewritten())
            bystanders = [m.memory(int(n)) for n in BYSTANDERS]
            for raw in bystanders:
                m.poison(raw)
            m.poison(y)
            self.history.append(f"replay: weight {mover.now}, input {i}")
            replay()
            self.counts["replays"] += 1
            self.compare(m.raw_of(y), weights.answers[mover.now, i], "replay of a layer")
            for got, want in zip((q.data, q.scale), self.tensorwise[i], strict=True):
                self.compare(m.raw_of(got), want, "replay of quantize")
            for raw in bystanders:
                untouched = m.memory(raw.nbytes)
                m.poison(untouched)
                self.compare(raw, untouched, "bystander of a replay")
        self.settle()
        m.synchronize()
        self.session.saw(m.free_bytes())

    def _captured(self, calls: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        """Return what ``calls`` gave inside a capture, and its replay on the current stream."""
        if isinstance(self.machine, CupyMachine):
            stream = self.stream
            stream.begin_capture()
            try:
                made = calls()
            finally:
                graph = stream.end_capture()
            return made, lambda: graph.launch(self.stream)
        torch = self.machine.torch
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            made = calls()
        return made, graph.replay

    def _late(self, name: str, values: np.ndarray) -> Any:
        """Return an array of a framework that its current stream is still writing."""
        array = others()[name].array(values)
        if name.startswith("jax"):
            return array
        there, spare = peer(name), others()[name].array(np.zeros_like(values))
        for _ in range(3):
            there.copy(spare, array)
        return spare

    def mixed(self) -> None:
        """Make a product of x, weight and scale of three frameworks, each on the stream of its own."""
        weights = self.session.weights
        names = [self.machine.name, *(str(self.rng.choice(list(others()))) for _ in range(2))]
        j, i = int(self.rng.integers(len(weights.codes))), int(self.rng.integers(len(weights.x)))
        weight, scale = (
            self._late(n, v) for n, v in zip(names[1:], (weights.codes[j], weights.scales[j]), strict=True)
        )
        x = self._late(names[0], weights.x[i])
        said = f"mixed {' x '.join(names)}, weight {j}, input {i}"
        self.history.append(said)
        layer = fp8core.Fp8Linear(weight, scale)
        for _ in range(3):
            self.compare(self.machine.raw_of(layer(x)), weights.answers[j, i], said)
            self.counts["launches"] += 1

    def foreign_out(self) -> None:
        """Let a result go into memory of another framework, which reads it on its own stream at once."""
        weights = self.session.weights
        there = peer("cupy" if self.machine.name != "cupy" else "torch-cuda")
        if there.name not in others():
            return
        j, i = int(self.rng.integers(len(weights.codes))), int(self.rng.integers(len(weights.x)))
        out = there.upload(np.zeros((ROWS, N), weights.x[i].dtype))
        want = there.upload(np.asarray(self.machine.engine.numpy(weights.answers[j, i])))
        codes, scales = (weights.on_machine[name][j] for name in ("codes", "scales"))
        self.history.append(f"linear into {there.name}, weight {j}, input {i}")
        fp8core.linear(self._late(self.machine.name, weights.x[i]), codes, scales, out=out)
        self.compare(there.raw_of(out), want, "foreign out")
        self.counts["launches"] += 1

    def green_context(self) -> None:
        """Quantize on a stream of a green context, with a few multiprocessors."""
        stream = green_stream()
        if isinstance(stream, str):
            self.counts[stream] += 1
            return
        i = int(self.rng.integers(len(self.session.weights.x)))
        x = self.session.weights.on_machine["x"][i]
        self.machine.synchronize()
        self.history.append(f"quantize on a green context, input {i}")
        q = fp8core.quantize(x, group_shape=PER_TENSOR, stream=stream)
        self.machine.synchronize()
        for got, want in zip((q.data, q.scale), self.tensorwise[i], strict=True):
            self.compare(self.machine.raw_of(got), want, "green context")
        self.counts["launches"] += 1
