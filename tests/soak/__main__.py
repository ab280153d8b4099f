"""`python -m tests.soak --seconds 600 --report FILE`: the soak in one process, without pytest; 1 on any wrong number."""

import argparse
import faulthandler
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # what pytest's pythonpath does for the tests

from soak.machines import machine
from soak.session import Budget, Session, WrongNumber, written


def main() -> int:
    """Soak one engine after another and print the counts, also when asked to end.

    Where each thread was is printed then, and in a crash.
    """
    faulthandler.enable()
    faulthandler.register(signal.SIGTERM, chain=True)
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument(
        "--engine", action="append", help="numpy, torch-cpu, cupy, torch-cuda; both of a GPU if left out"
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="for all engines together")
    parser.add_argument("--steps", type=int, default=100, help="of each thread, at least")
    parser.add_argument("--seed", type=int, default=0, help="give pieces that run beside each other different ones")
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--report", type=Path, help="JSON with the counts; engines that are in it already stay")
    given = parser.parse_args()
    names = given.engine or ["torch-cuda", "cupy"]
    for name in names:
        began = time.monotonic()
        there = machine(name)
        session = Session(there, given.seed, Budget(given.steps, given.seconds / len(names), given.threads))
        print(f"{name}: made ready in {time.monotonic() - began:.0f} s", flush=True)
        faulthandler.unregister(signal.SIGTERM)
        signal.signal(signal.SIGTERM, lambda *_, session=session: setattr(session, "stopped", True))
        faulthandler.register(signal.SIGTERM, chain=True)
        try:
            counts = session.run()
        except WrongNumber as wrong:
            print(wrong, file=sys.stderr)
            return 1
        print(written(given.report, there, given.seed, counts), flush=True)
        if session.stopped:
            break
    return 0


if __name__ == "__main__":
    sys.exit(main())
