"""torch.compile in processes of its own: what imports load, and calls before and beside a graph."""

import pytest

from support.torch_tensors import run

torch = pytest.importorskip("torch")


def test_importing_fp8core_loads_no_torch_and_importing_its_torch_module_no_dynamo():
    program = """
        import sys
        import fp8core
        print("torch" in sys.modules)
        import fp8core.torch
        print("torch._dynamo" in sys.modules)
    """
    assert run(program) == ["False", "False"]


def test_an_import_that_ctrl_c_interrupts_can_be_repeated():
    """SIGINT arrives whenever torch has defined an operator, which it refuses to do again."""
    program = """
        import signal, torch, fp8core
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background processes ignore it
        define = torch.library.Library.define
        def interrupted(*arguments, **options):
            made = define(*arguments, **options)
            signal.raise_signal(signal.SIGINT)
            return made
        torch.library.Library.define = interrupted
        try:
            import fp8core.torch
        except KeyboardInterrupt:
            print("interrupted")
        torch.library.Library.define = define
        import fp8core.torch
        x = torch.ones(2, 32)
        compiled = torch.compile(fp8core.quantize, backend="eager", fullgraph=True)
        print(torch.equal(compiled(x).scale, fp8core.quantize(x).scale))
        print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
    """
    assert run(program) == ["interrupted", "True", "True"]


@pytest.mark.parametrize("before", ["pass", "torch.compile(lambda x: fp8core.quantize(x * 2), backend='eager')(x)"])
def test_a_function_itself_is_compiled(before):
    """Torch leaves frames alone by their code: what it was told before has to be taken back."""
    program = f"""
        import torch, torch._dynamo, fp8core
        x = torch.ones(2, 32)
        {before}
        fp8core.quantize(x)
        import fp8core.torch
        torch._dynamo.reset()
        compiled = torch.compile(fp8core.quantize, backend="aot_eager", fullgraph=True)
        print(torch.equal(compiled(x).scale, fp8core.quantize(x).scale))
    """
    assert run(program) == ["True"]


def test_calls_before_the_import_change_nothing():
    program = """
        import torch, fp8core
        def f(x):
            return fp8core.quantize(x * 2).scale
        x = torch.ones(2, 32)
        before = torch.compile(f, backend="eager")(x)  # breaks the graph
        import fp8core.torch
        torch._dynamo.reset()
        print(torch.equal(torch.compile(f, backend="eager", fullgraph=True)(x), before))
    """
    assert run(program) == ["True"]


@pytest.mark.parametrize("first", ["import torch._dynamo", "pass"])
def test_what_a_graph_refuses_runs_beside_it_whenever_torch_compile_is_loaded(first):
    program = f"""
        import torch
        {first}
        import fp8core.torch
        x = torch.randn(5, 64)
        call = lambda x: fp8core.quantize(x * 2, stream=0).scale
        print(torch.equal(torch.compile(call, backend="eager")(x), call(x)))
    """
    assert run(program) == ["True"]
