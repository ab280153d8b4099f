"""The thread that drops what the device is done with: started once, ended with the interpreter, begun anew in a child."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from fp8core.runtime import releases
from support.releases import SECONDS, Owner


class Starting:
    """A queue whose thread was not started, the threads that are made for it, and what happens while one is."""

    def __init__(self, monkeypatch):
        self.made, self.amid, self.behind = [], lambda: None, lambda: None

        class Thread(threading.Thread):
            def start(thread):
                self.made.append(thread)
                self.amid()
                super().start()
                self.behind()

        self.queue = releases.Releases()
        monkeypatch.setattr(releases, "threading", SimpleNamespace(Thread=Thread, Event=threading.Event))


@pytest.fixture
def starting(monkeypatch):
    made = Starting(monkeypatch)
    yield made
    made.queue._stop()


def test_a_destructor_amid_the_start_may_hand_over_an_owner(starting):
    """A collection of garbage may begin anywhere, and end in a call of the library."""
    owners = [Owner()]
    freed = owners[0].freed

    def amid():
        starting.queue.start()
        starting.queue.add(owners.pop(), lambda: True)

    starting.amid = amid
    starter = threading.Thread(target=starting.queue.start, daemon=True)
    starter.start()
    starter.join(SECONDS)
    assert not starter.is_alive()
    assert len(starting.made) == 1
    assert freed.wait(SECONDS)


def test_many_threads_start_one(starting):
    together = threading.Barrier(8)

    def start(_):
        together.wait(SECONDS)
        starting.queue.start()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(start, range(8)))
    assert starting.queue.wait(SECONDS)
    assert len(starting.made) == 1


def test_a_thread_that_another_has_started_meanwhile_is_the_only_one(starting):
    """Between the question whether there is one and the lock."""

    def acquire(blocking):
        starting.queue._starting = lock
        starting.queue.start()
        return lock.acquire(blocking)

    lock = starting.queue._starting
    starting.queue._starting = SimpleNamespace(acquire=acquire, release=lock.release)
    starting.queue.start()
    assert starting.queue.wait(SECONDS)
    assert len(starting.made) == 1


def test_no_thread_is_started_behind_the_end(starting):
    """It would run while the interpreter is torn down."""
    starting.queue.start()
    starting.queue._stop()
    starting.queue.start()
    assert len(starting.made) == 1
    assert not starting.made[0].is_alive()


def test_a_thread_that_could_not_be_started_is_started_by_the_next_call(starting, caplog):
    """A call that keeps an operand has launched already: it must neither fail nor leave the operand to be freed."""

    def amid():
        raise RuntimeError("can't start new thread")

    owner = Owner()
    freed, starting.amid = owner.freed, amid
    starting.queue.start()
    starting.queue.add(owner, lambda: True)
    del owner
    assert "operands are kept until a thread can be started: can't start new thread" in caplog.text
    assert not freed.is_set()
    starting.amid = lambda: None
    assert starting.queue.wait(SECONDS)
    assert freed.is_set()
    assert len(starting.made) == 2


@pytest.fixture
def interruptible():
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    yield
    signal.signal(signal.SIGINT, usual)


def test_an_interrupt_amid_the_start_lets_no_call_start_a_second_thread(starting, interruptible):
    """Two threads would drop the same owners, and nothing would end the first before the interpreter."""
    starting.behind = lambda: signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        starting.queue.start()
    starting.behind = lambda: None
    assert starting.queue.wait(SECONDS)
    assert len(starting.made) == 1


def run(program):
    done = subprocess.run(
        (sys.executable, "-c", textwrap.dedent(program)), capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


ABORTING = """
import ctypes
make, aborts = ctypes.pythonapi.PyCapsule_New, ctypes.cast(ctypes.CDLL(None).abort, ctypes.c_void_p)
make.restype, make.argtypes = ctypes.py_object, (ctypes.c_void_p,) * 3
def memory():
    return make(1, None, aborts)  # also where Python no longer runs destructors that are written in it
"""


def test_the_interpreter_ends_while_something_is_kept_and_does_not_free_it():
    program = """
        import atexit, threading
        @atexit.register
        def last():
            print(threading.active_count())
        from fp8core.runtime.releases import releases
        queue = releases()
        queue.start()
        queue.add(memory(), lambda: False)
        queue.after(memory(), lambda: (lambda: False))
        print("end", flush=True)
    """
    assert run(ABORTING + textwrap.dedent(program)) == ["end", "1"]


def test_an_interpreter_that_starts_no_threads_any_more_keeps_what_the_last_calls_use():
    """Python 3.12 starts none once the first function of atexit runs: as here, in every release."""
    program = """
        import atexit, logging, threading
        from fp8core.runtime.releases import releases
        def start(thread):
            raise RuntimeError("can't create new thread at interpreter shutdown")
        @atexit.register
        def last():
            threading.Thread.start = start
            queue = releases()
            queue.start()
            queue.add(memory(), lambda: False)
            print("end", flush=True)
        logging.getLogger("fp8core").addHandler(logging.NullHandler())
    """
    assert run(ABORTING + textwrap.dedent(program)) == ["end"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")
def test_a_child_begins_anew_and_leaves_alone_what_the_parent_keeps():
    program = """
        import os, sys, threading
        from fp8core.runtime.releases import releases
        class Memory:
            def __init__(self, name): self.name = name
            def __del__(self): print("freed", self.name, flush=True)
        queue = releases()
        done = threading.Event()
        queue.start()
        queue.add(Memory("parents"), done.is_set)
        child = os.fork()
        if child == 0:
            queue.start()
            queue.add(Memory("childs"), lambda: True)
            print("child", queue.wait(30), flush=True)
            sys.exit(0)
        os.waitpid(child, 0)
        done.set()
        print("parent", queue.wait(30), flush=True)
    """
    assert run(program) == ["freed", "childs", "child", "True", "freed", "parents", "parent", "True"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")
def test_a_child_does_not_free_what_waits_for_a_thread_of_the_parent():
    program = """
        import os, sys
        from fp8core.runtime.releases import releases
        queue = releases()
        queue.add(memory(), lambda: False)
        child = os.fork()
        queue.start()
        if child == 0:
            print("child", queue.wait(30), flush=True)
            sys.exit(0)
        print("ended", os.waitpid(child, 0)[1])
    """
    assert run(ABORTING + textwrap.dedent(program)) == ["child", "True", "ended", "0"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")
def test_a_child_of_a_fork_while_the_thread_is_being_started_has_a_queue_and_a_thread_of_its_own():
    program = """
        import os, signal, sys, threading, warnings
        from fp8core.runtime.releases import releases
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of any fork beside threads
        class Memory:
            def __init__(self, name): self.name = name
            def __del__(self): print("freed", self.name, flush=True)
        starting, forked, plain = threading.Event(), threading.Event(), threading.Thread
        class Held(plain):
            def start(self):
                starting.set()
                forked.wait(30)
                super().start()
        queue = releases()
        queue.add(Memory("parents"), lambda: True)
        starter = threading.Thread(target=queue.start)
        threading.Thread = Held
        starter.start()
        starting.wait(30)
        threading.Thread = plain
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            queue.start()
            queue.add(Memory("childs"), lambda: True)
            print("child", queue.wait(10), flush=True)
            sys.exit(0)
        print("ended", os.waitpid(child, 0)[1], flush=True)
        forked.set()
        print("parent", queue.wait(30), flush=True)
    """
    wanted = "freed childs child True ended 0 freed parents parent True"
    assert run(program) == wanted.split()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")
def test_an_interrupt_ends_a_child_that_another_thread_forks_during_the_start():
    """The start holds back the parent's Ctrl-C; in the child nothing would give it back."""
    program = """
        import os, signal, threading, warnings
        from fp8core.runtime.releases import releases
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of any fork beside threads
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
        plain, children = threading.Thread, []
        def fork():
            child = os.fork()
            if child == 0:
                try:
                    os.kill(os.getpid(), signal.SIGINT)
                    for _ in range(1000):  # handlers run between two instructions
                        pass
                except KeyboardInterrupt:
                    print("interrupted", flush=True)
                os._exit(0)
            children.append(child)
        class Forking(plain):
            def start(self):
                forking = plain(target=fork)
                forking.start()
                forking.join()
                super().start()
        threading.Thread = Forking
        releases().start()
        print("ended", os.waitpid(children[0], 0)[1])
    """
    assert run(program) == ["interrupted", "ended", "0"]


def test_nothing_runs_until_something_is_kept():
    program = """
        import threading
        from fp8core.runtime.releases import releases
        import fp8core
        releases()
        print(threading.active_count())
        releases().start()
        releases().start()
        print(threading.active_count())
    """
    assert run(program) == ["1", "2"]
