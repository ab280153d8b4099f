"""Makes and times public calls of one checkout of fp8core on request: a process of `bench.against`.

    python bench/served.py CHECKOUT

Each line of standard input is a request, and each line of standard output its answer, both in JSON. {"do": "prepare",
"kind": "gpu" or "host", "case": i, "short": …} prepares a call of `bench.calls`, and answers how many calls a run has;
{"do": "time", "rounds": n} answers the milliseconds of a run; {"do": "drop"} frees its memory. The process ends at the
end of its input.
"""

import json
import os
import sys
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).resolve().parent.parent


def import_from(checkout: Path) -> Any:
    """Import fp8core from a checkout; `bench` is imported from this one."""
    sys.path[0] = str(checkout)
    import fp8core

    found = Path(str(fp8core.__file__)).resolve().parent.parent
    if found != checkout:
        raise ImportError(f"fp8core needs to come from {checkout}, got {found}")
    sys.path[0] = str(ROOT)
    return fp8core


class Served:
    """Answers requests. It keeps the last prepared call, as a function that times a number of rounds."""

    def __init__(self) -> None:
        import torch

        from bench import calls, timing

        self.torch, self.calls, self.timing = torch, calls, timing
        self.gpu = calls.DEVICE == "cuda"
        self.time: Callable[[int], float] | None = None

    def list_of(self, kind: str, short: bool) -> list[Any]:
        """Return the calls of a kind."""
        return list(self.calls.calls_of(kind, short))

    def prepare(self, kind: str, case: int, short: bool) -> dict[str, Any]:
        """Prepare a call: run it, so that its kernels are loaded, and capture a GPU call into a graph."""
        call = self.list_of(kind, short)[case]
        if kind == "gpu" and self.gpu:
            count = self.timing.copies(call.bytes)
            graph, calls = self.timing.capture([call.make() for _ in range(count)], least=max(64, count))

            def replays(rounds: int) -> float:
                graph.replay()  # until this replay ends, the device may still work for the other process
                return float(self.timing.elapsed(graph.replay, rounds))

            self.time = replays
            return {"calls": calls}
        run = call.make()
        timer = timeit.Timer(run)
        timer.timeit(1)

        def time(rounds: int) -> float:
            if self.gpu:
                self.torch.cuda.synchronize()
            return timer.timeit(rounds) / rounds * 1e3

        self.time = time
        return {"calls": 1}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a request."""
        if request["do"] == "prepare":
            return self.prepare(request["kind"], request["case"], request["short"])
        if request["do"] == "time":
            assert self.time is not None
            return {"ms": self.time(request["rounds"])}
        self.time = None
        if self.gpu:
            self.torch.cuda.synchronize()
            self.torch.cuda.empty_cache()
        return {}


def serve(requests: TextIO, answers: TextIO) -> None:
    """Answer requests until there are no more. If a request raises an error, that is its answer."""
    served = Served()
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in requests:
        try:
            answer = served.answer(json.loads(line))
        except Exception as error:  # noqa: BLE001 - whatever a call of another version raises is a result
            answer = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    import_from(Path(sys.argv[1]).resolve())
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries must not come between the answers
    serve(sys.stdin, answers)
