"""`fp8core explain` says what `fp8core.explain` says of the same product, for every pair of scales and formats."""

import itertools

import ml_dtypes
import numpy as np
import pytest

import fp8core
from fp8core.dtypes import FORMATS
from fp8core.errors import Fp8Error
from fp8core.problem import BLOCK_128, GROUP_128, PER_CHANNEL, PER_TENSOR
from support.command_line import (
    fp8core_,  # noqa: F401
    rows,
)

GROUPS = {"tensor": PER_TENSOR, "row": PER_CHANNEL, "group": GROUP_128, "block": BLOCK_128}
OUTS = ("bfloat16", "float16", "float32", *FORMATS)
EXTENTS = [(4, 256, 384), (4, 256, 128), (1, 256, 384), (4, 1, 384), (1, 1, 128), (4, 200, 200), (130, 130, 136)]


def said(call):
    """Return verdicts by kernel, or the refusal."""
    try:
        return [[v.kernel, v.status, v.reason] for v in call().verdicts]
    except Fp8Error as error:
        return str(error)


def quantized(rows_, cols, dtype, group):
    """An FP8 matrix and scales as they are for a group shape; no scale is a number by accident."""
    shape = (1,) if group == PER_TENSOR else group.scale_shape(rows_, cols)
    scale = np.ones(shape, np.float32)
    return fp8core.Quantized(np.ones((rows_, cols), getattr(ml_dtypes, dtype)), scale, group)


def printed(answer):
    """Return verdicts by kernel as the command line printed them, or the refusal."""
    code, out, err = answer
    if code:
        assert (code, out) == (1, "")
        return err.removeprefix("error: ").rstrip("\n")
    return rows(out)


def test_it_agrees_with_the_api_on_every_pair_of_scales_and_formats(fp8core_):
    compared = set()
    for a, b, (scale_a, group_a), (scale_b, group_b) in itertools.product(
        FORMATS, FORMATS, list(GROUPS.items())[:3], GROUPS.items()
    ):
        m, n, k = EXTENTS[len(compared) % len(EXTENTS)]
        out = OUTS[len(compared) % len(OUTS)]
        options = {"out_dtype": out, **({"out_scale": 1.0} if out in FORMATS else {})}
        operands = quantized(m, k, a, group_a), quantized(n, k, b, group_b)
        want = said(lambda: fp8core.explain(fp8core.scaled_mm_nt, *operands, **options))  # noqa: B023
        arguments = ("--a", a, "--b", b, "--out", out, "--scale-a", scale_a, "--scale-b", scale_b, "--target", "host")
        assert printed(fp8core_("explain", m, n, k, *arguments)) == want, arguments
        compared.add((a, b, scale_a, scale_b))
    assert len(compared) == 4 * 4 * 3 * 4


@pytest.mark.parametrize("extents", EXTENTS)
@pytest.mark.parametrize("scale_b", GROUPS)
@pytest.mark.parametrize("scale_a", ["tensor", "row", "group"])
def test_it_agrees_with_the_api_on_every_shape(fp8core_, scale_a, scale_b, extents):
    m, n, k = extents
    operands = quantized(m, k, "float8_e4m3fn", GROUPS[scale_a]), quantized(n, k, "float8_e4m3fn", GROUPS[scale_b])
    want = said(lambda: fp8core.explain(fp8core.scaled_mm_nt, *operands))
    answer = fp8core_("explain", m, n, k, "--scale-a", scale_a, "--scale-b", scale_b, "--target", "host")
    assert printed(answer) == want
    if isinstance(want, str):
        with pytest.raises(Fp8Error):
            fp8core.scaled_mm_nt(*operands)
    else:
        fp8core.scaled_mm_nt(*operands)


def test_it_says_that_no_kernel_is_able(fp8core_):
    e5m2 = ("--a", "float8_e5m2", "--b", "float8_e5m2", "--target", "sm_90")
    _, out, _ = fp8core_("explain", 16, 256, 256, *e5m2)
    assert "No kernel is able: the call raises UnsupportedProblemError.\n" in out
    assert "No kernel" not in fp8core_("explain", 16, 256, 256, "--target", "sm_90")[1]


ENDINGS = [
    ({"bias": "float32"}, ("--bias", "float32")),
    ({"bias": "bfloat16", "activation": "silu"}, ("--bias", "bfloat16", "--activation", "silu")),
    ({"activation": "gelu_tanh", "beta": -0.5}, ("--activation", "gelu_tanh", "--beta", "-0.5")),
    ({"beta": 1.0, "amax": True}, ("--beta", "1", "--amax")),
    ({"use_fast_accum": False}, ("--no-fast-accum",)),
    ({"batch_invariant": True, "activation": "gelu"}, ("--batch-invariant", "--activation", "gelu")),
    ({"bias": "float16"}, ("--bias", "float16")),
    ({"beta": float("inf")}, ("--beta", "inf")),
    ({"beta": 1.0, "out_dtype": "float8_e4m3fn"}, ("--beta", "1", "--out", "float8_e4m3fn")),
]


@pytest.mark.parametrize(("ending", "arguments"), ENDINGS, ids=lambda one: " ".join(one) if type(one) is tuple else "")
@pytest.mark.parametrize("target", ["sm_90", "gfx942", "host"])
@pytest.mark.parametrize("m", [16, 256])
def test_it_agrees_with_the_api_on_how_a_product_ends(fp8core_, m, target, ending, arguments):
    n, k = 512, 768
    keywords = {"out_dtype": "bfloat16", **ending}
    native = "float8_e4m3fnuz" if target == "gfx942" else "float8_e4m3fn"
    keywords |= {"out_scale": 1.0} if keywords["out_dtype"] in FORMATS else {}
    for name, shape, dtype in (("bias", (n,), ending.get("bias")), ("amax", (1,), "float32")):
        if name in ending:
            keywords[name] = fp8core.ArraySpec(shape, dtype)
    if "beta" in ending:
        keywords["out"] = fp8core.ArraySpec((m, n), keywords["out_dtype"])
    x, weight = (
        fp8core.Quantized(fp8core.ArraySpec((rows_, k), native), fp8core.ArraySpec((rows_, 1), "float32"), PER_CHANNEL)
        for rows_ in (m, n)
    )
    want = said(lambda: fp8core.explain(fp8core.scaled_mm_nt, x, weight, target=target, **keywords))
    answer = fp8core_("explain", m, n, k, *arguments, "--target", target)
    if isinstance(want, str):
        assert printed(answer) == want
        return
    verdicts = [[kernel, status.removesuffix(" *"), reason] for kernel, status, reason in printed(answer)]
    assert verdicts == want
    assert all(word in answer[1].split("\n")[0] for word in ending.values() if isinstance(word, str))
