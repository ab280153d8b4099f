"""fp8core.transformers in processes of its own."""

import pytest

from support.torch_tensors import run

pytest.importorskip("transformers")


def test_an_import_that_ctrl_c_interrupts_can_be_repeated():
    """SIGINT arrives when transformers has registered the method, which it refuses to do again, in a child for each."""
    program = """
        import os, signal, torch
        from transformers.quantizers import auto
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background processes ignore it
        for register in ("register_quantization_config", "register_quantizer"):
            child = os.fork()
            if child:
                print(os.waitpid(child, 0)[1], flush=True)
                continue
            usual = getattr(auto, register)
            def interrupted(method):
                def made(kind):
                    usual(method)(kind)
                    signal.raise_signal(signal.SIGINT)
                    return kind
                return made
            setattr(auto, register, interrupted)
            try:
                import fp8core.transformers
            except KeyboardInterrupt:
                print("interrupted")
            setattr(auto, register, usual)
            import fp8core.transformers
            print(auto.AUTO_QUANTIZER_MAPPING["fp8core"] is fp8core.transformers.Fp8CoreQuantizer)
            print(auto.AUTO_QUANTIZATION_CONFIG_MAPPING["fp8core"] is fp8core.transformers.Fp8CoreConfig, flush=True)
            os._exit(0)
    """
    assert run(program) == ["interrupted", "True", "True", "0"] * 2
