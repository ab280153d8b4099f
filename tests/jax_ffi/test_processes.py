"""What takes processes of their own: several devices, exported programs, the compilation cache, no compiler."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("jax")

ROOT = Path(__file__).parents[2]


def run(*command, **environment):
    """Run Python alone, without a compiler in its reach, and return the lines that it prints."""
    variables = {
        name: value for name, value in os.environ.items() if not name.startswith(("XLA_", "JAX_")) and name != "PATH"
    }
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])])
    variables.update(PYTHONPATH=paths, JAX_PLATFORMS="cpu", PATH="", **environment)
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False, env=variables)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "Exception ignored" not in done.stderr, done.stderr[-4000:]  # at exit
    return done.stdout.splitlines()


def program(text, *arguments, **environment):
    return run("-c", textwrap.dedent(text), *map(str, arguments), **environment)


def test_four_devices():
    lines = run(str(ROOT / "tests/jax_ffi/sharded.py"), XLA_FLAGS="--xla_force_host_platform_device_count=4")
    assert lines[-1] == "all"
    layers, quantizations = 12 + 13 + 4, 2 * 15 + 7 + 4
    mixtures = 13 + 2 + 7 + 2
    assert len(lines) == 2 * (layers + mixtures + 6 + 2 + 6 + quantizations + 4 + 2 + 2 + 2 + 2 + 1 + 1) + 1


def test_rows_that_a_reshape_left_divided_over_parts_of_an_axis():
    """Four devices share eight rows that became [2, 4]: a half of their axis divides each of the two."""
    lines = program(
        """
        import jax, numpy as np
        from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
        import fp8core, fp8core.jax
        from fp8core.jax.sharding import named
        from jax_ffi.cases import K, near, same, weight, wide
        from jax_ffi.meshes import collectives

        devices, w = np.array(jax.devices()), weight()
        four, twelve, two = Mesh(devices[:4], "a"), Mesh(devices, "a"), Mesh(devices.reshape(2, 6), ("b", "a"))
        beside_one = Mesh(devices[:4].reshape(4, 1), ("a", "b"))
        for mesh, over, rows, leading in (
            *((four, "a", 8, leading) for leading in ((2, 4), (4, 2), (2, 2, 2), (1, 2, 4))),
            (beside_one, "a", 8, (8,)),
            *((twelve, "a", 24, leading) for leading in ((2, 12), (3, 8), (4, 6), (2, 3, 4), (3, 2, 4), (8, 3))),
            *((two, ("a", "b"), 24, leading) for leading in ((2, 12), (3, 8), (6, 4), (4, 6))),
        ):
            x = wide(rows, K)
            given = jax.device_put(x, NamedSharding(mesh, P(over)))
            for options in ({}, {"group_shape": fp8core.GROUP_128}, {"group_shape": fp8core.PER_TENSOR}):
                call = lambda x: tuple(fp8core.quantize(x.reshape(*leading, x.shape[1]), **options))
                assert same(jax.jit(call)(given), call(x)), (leading, options)
            call = lambda x: fp8core.linear(x.reshape(*leading, x.shape[1]), w).reshape(len(x), -1)
            assert near(jax.jit(call)(given), call(x)), leading
            print(f"{over} {leading}: {', '.join(collectives(call, given))}")
        turned = Mesh(devices[[0, 1, 3, 2]], "b")  # in an order that no parts of an axis of the others give
        assert named([NamedSharding(turned, P("b")), NamedSharding(four, P())], [2, 1], four)[0].spec == P()
        """,
        XLA_FLAGS="--xla_force_host_platform_device_count=12",
    )
    gathered = [line for line in lines if not line.endswith(": ")]  # which no parts of their axes tell
    assert gathered == ["a (8, 3): all-gather", "('a', 'b') (4, 6): all-gather"]
    assert len(lines) == 15


def test_jax_loads_only_what_its_programs_need_and_no_compiler_is_in_reach():
    lines = program(
        """
        import shutil, sys
        import fp8core
        print("jax" in sys.modules)
        import jax, jax.numpy as jnp
        print("fp8core.jax" in sys.modules)
        print(jax.jit(lambda x: fp8core.quantize(x))(jnp.ones((2, 64))).shape)
        print("fp8core.jax" in sys.modules, "torch" in sys.modules, "fp8core.checkpoint" in sys.modules)
        print([shutil.which(name) for name in ("cc", "gcc", "g++", "clang", "nvcc")])
        """
    )
    assert lines == ["False", "False", "(2, 64)", "True False False", "[None, None, None, None, None]"]


STEP = """
    import sys
    import jax, jax.numpy as jnp, numpy as np
    import fp8core, fp8core.jax
    from jax_ffi.cases import K, same, weight, wide

    def step(x, data, scale):
        q = fp8core.quantize(x, group_shape=(1, 128), scale_layout="mn")
        return fp8core.linear(x, fp8core.Quantized(data, scale, (1, -1))), q.data, q.scale

    def wanted(x):
        q = fp8core.quantize(x, group_shape=(1, 128))
        return fp8core.linear(x, weight()), *q
"""


def test_an_exported_program_runs_in_a_process_that_traced_nothing(tmp_path):
    pytest.importorskip("flatbuffers")
    making = (
        STEP
        + """
    from jax import export
    checks = [export.DisabledSafetyCheck.custom_call("fp8core")]
    rows, = export.symbolic_shape("rows")
    for name, m in (("fixed", 5), ("open", rows)):
        x = jax.ShapeDtypeStruct((m, K), jnp.bfloat16)
        made = export.export(jax.jit(step), disabled_checks=checks)(x, *weight())
        open(f"{sys.argv[1]}/{name}", "wb").write(made.serialize())
    """
    )
    program(making, tmp_path)
    loading = (
        STEP
        + """
    from jax import export
    for name, sizes in (("fixed", [5]), ("open", [1, 5, 17])):
        made = export.deserialize(bytearray(open(f"{sys.argv[1]}/{name}", "rb").read()))
        for m in sizes:
            print(name, m, same(made.call(wide(m, K), *weight()), wanted(wide(m, K))))
    """
    )
    assert program(loading, tmp_path) == ["fixed 5 True", "open 1 True", "open 5 True", "open 17 True"]


def test_the_compilation_cache_serves_another_process(tmp_path):
    text = (
        STEP
        + """
    jax.config.update("jax_compilation_cache_dir", sys.argv[1])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    seen = []
    jax.monitoring.register_event_listener(lambda event, **_: seen.append(event))
    x = wide(5, K)
    print(same(jax.jit(step)(x, *weight()), wanted(x)))
    print(sum(event.endswith("cache_hits") for event in seen) > 0)
    """
    )
    assert program(text, tmp_path) == ["True", "False"]
    assert program(text, tmp_path) == ["True", "True"]


def test_an_import_that_ctrl_c_interrupts_can_be_repeated():
    """SIGINT arrives at each line of the registration in turn, JAX's own included, in a child of this process."""
    lines = program(
        """
        import os, signal, sys
        import jax, fp8core
        from jax._src import tree_util

        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background processes ignore it
        FILES = {tree_util.__file__, *(
            os.path.join(os.path.dirname(fp8core.__file__), "jax", f"{name}.py")
            for name in ("install", "handler", "ending", "batching", "gradients")
        )}

        def import_interrupted(at):
            left = at + 1

            def line(frame, event, _):
                nonlocal left
                if event == "line":
                    left -= 1
                    if not left:
                        signal.raise_signal(signal.SIGINT)
                return line

            sys.settrace(lambda frame, *_: line if frame.f_code.co_filename in FILES else None)
            try:
                import fp8core.jax
            except KeyboardInterrupt:
                return "interrupted"
            finally:
                sys.settrace(None)
            return "whole"

        class Loaded(Exception):
            pass

        def stop(frame, *_):
            if frame.f_code.co_name == "install" and frame.f_code.co_filename.endswith("jax/install.py"):
                raise Loaded

        sys.settrace(stop)
        try:
            import fp8core.jax
        except Loaded:
            sys.settrace(None)
        at, status = 0, 0
        while status == 0:
            child = os.fork()
            if not child:
                was = import_interrupted(at)
                try:
                    import fp8core.jax

                    pair = jax.tree.map(lambda x: x + 1, fp8core.ops.quantized.quantized(1, 2, (1, 128)))
                    assert (*pair, pair.group_shape) == (2, 3, (1, 128)), pair
                    print(at, was, signal.getsignal(signal.SIGINT) is signal.default_int_handler, flush=True)
                except BaseException as error:
                    print(at, was, repr(error), flush=True)
                os._exit(was == "whole")
            _, status = os.waitpid(child, 0)
            at += 1
        """
    )
    assert lines == [*(f"{at} interrupted True" for at in range(len(lines) - 1)), f"{len(lines) - 1} whole True"]
    assert len(lines) > 40


def test_the_example_prints_a_small_error():
    lines = run(str(ROOT / "examples/jax_layer.py"), "--hidden", "128", "--layers", "2", "--tokens", "3")
    assert [line.split()[0] for line in lines] == ["bfloat16", "FP8", "relative"]
    assert 0 < float(lines[-1].split(":")[1].split()[0]) < 0.15
