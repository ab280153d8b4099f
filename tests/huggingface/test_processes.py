"""fp8core.transformers in processes of its own."""

import pytest

from support.torch_tensors import run

pytest.importorskip("transformers")


@pytest.mark.parametrize("register", ["register_quantization_config", "register_quantizer"])
def test_an_import_that_ctrl_c_interrupts_can_be_repeated(register):
    """SIGINT arrives when transformers has registered the method, which it refuses to do again."""
    program = f"""
        import signal, torch
        from transformers.quantizers import auto
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background processes ignore it
        usual = auto.{register}
        def interrupted(method):
            def made(kind):
                usual(method)(kind)
                signal.raise_signal(signal.SIGINT)
                return kind
            return made
        auto.{register} = interrupted
        try:
            import fp8core.transformers
        except KeyboardInterrupt:
            print("interrupted")
        auto.{register} = usual
        import fp8core.transformers
        print(auto.AUTO_QUANTIZER_MAPPING["fp8core"] is fp8core.transformers.Fp8CoreQuantizer)
        print(auto.AUTO_QUANTIZATION_CONFIG_MAPPING["fp8core"] is fp8core.transformers.Fp8CoreConfig)
    """
    assert run(program) == ["interrupted", "True", "True"]
