"""Write docs/reference/kernels.md and the README's table of the kernels for each device, from the tables of kernels.

Run it without arguments to rewrite both; with --check the exit status says whether they are current.
"""

import sys
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path

from fp8core.cli import GPUS, UNPROVEN, proven, target_named
from fp8core.kernels.fused import NORM_QUANTIZE, SILU_QUANTIZE
from fp8core.kernels.gemm.table import SCALED_MM
from fp8core.kernels.grouped.table import GROUPED_MM
from fp8core.kernels.moe import MOE_PERMUTE, MOE_UNPERMUTE
from fp8core.kernels.quantize import QUANTIZE
from fp8core.ops.example_problems import example_grouped, example_product, example_quantize
from fp8core.problem import (
    BLOCK_128,
    GROUP_128,
    PER_TENSOR,
    PER_TOKEN,
    Granularity,
    GroupShape,
    MoePermute,
    MoeUnpermute,
    NormQuantize,
    SiluQuantize,
)
from fp8core.table import Explanation
from fp8core.target import Target, native_e4m3

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference" / "kernels.md"
README = ROOT / "README.md"
BEGIN, END = "<!-- where it runs: begin -->\n", "<!-- where it runs: end -->\n"
ELSEWHERE = 1 << 20
"""An ordinal that no machine has, so that the tables are the same on all of them."""

MARK = "†"
HEAD = """# Kernels and devices

This page shows which kernel runs each operation on each device. `docs/make_support_matrix.py` writes it from the tables
that every call uses. For your own calls, [`explain`](api.md#fp8core.explain) and `fp8core explain` show the kernel and
the reasons; [dispatch](../concepts/dispatch-and-explain.md) says how a kernel is chosen, and the
[vocabulary](../dev/vocabulary.md#names-that-explain-and-the-support-matrix-print) explains the names.

Every operation runs on every device of these tables, sometimes on a fallback that takes any operands
(`elementwise`, `generic_decode`, `generic_mma`, `generic_grouped`). `fp8core info` names the architecture of a GPU:
A100 is sm_80, RTX 30 sm_86, L4, L40S and RTX 40 sm_89, H100 and H200 sm_90, B200 sm_100, RTX 50 sm_120; MI200 is
gfx90a, MI300 gfx942, MI350 gfx950, RX 7900 gfx1100, RX 9070 gfx1201.

"""
LEGEND = f"""- `kernel`? runs if the vendor's library on the device offers an algorithm, which only the device can tell;
  otherwise the kernel after it runs.
- `sm90_tiled` on sm_90: if cuBLASLt has an algorithm with a lower estimated time for the product, that one runs, mostly
  with scales per tensor, token or channel. Only the device can tell which algorithms the library has.
- {MARK} {UNPROVEN}.
- `generic_decode`, `generic_mma` and `generic_grouped` multiply codes with a warp's FP8 instructions on sm_89, sm_120,
  gfx942, gfx950, gfx1200 and gfx1201, if there is one for both formats; on other devices, and for other formats, they
  multiply 16-bit floats, which represent every code exactly.
- sm_100 can apply block scales that are powers of two in hardware (MXFP8). No kernel here uses that: products take fp32
  scales, and whether these are powers of two is known only on the device, after the kernel was chosen.
"""
README_LEGEND = f"""- *own*: a kernel that fp8core has for it. On H100 and H200 products of many rows run on the
  library's kernel if that is estimated to be faster.
- *library*: cuBLASLt or hipBLASLt if it has an algorithm, else the fallback.
- *fallback*: a slower kernel that takes any operands.
- {MARK} {UNPROVEN}.

By device and kernel: [Kernels](docs/reference/kernels.md).
"""

Ask = Callable[[Target], Explanation]


def quantization(group_shape: GroupShape, *, static: bool = False) -> Ask:
    """Return a function that explains a quantization on a target."""
    return lambda target: QUANTIZE.explain(example_quantize(target, group_shape, static=static))


def product(a: Granularity, b: Granularity, m: int, **ending: object) -> Ask:
    """Return a function that explains a product on a target; ``ending`` are fields of the problem."""
    return lambda target: SCALED_MM.explain(example_product(target, a, b, m=m)._replace(**ending))


def grouped(a: Granularity, b: Granularity) -> Ask:
    """Return a function that explains a grouped product on a target."""
    return lambda target: GROUPED_MM.explain(example_grouped(target, a, b, groups=EXPERTS))


def norm(target: Target) -> Explanation:
    """Return the explanation of rms_norm_quant per token."""
    wide, data = "bfloat16", native_e4m3(target)
    return NORM_QUANTIZE.explain(
        NormQuantize(target, wide, wide, data, PER_TOKEN, False, "float32", "k", False, False, 4096, 16)
    )


def silu(target: Target) -> Explanation:
    """Return the explanation of silu_and_mul_quant by groups of 1x128."""
    return SILU_QUANTIZE.explain(
        SiluQuantize(target, "bfloat16", native_e4m3(target), GROUP_128, False, "float32", "k", False, 4096, 16)
    )


def permute(target: Target) -> Explanation:
    """Return the explanation of moe_permute of codes with scales by groups of 1x128."""
    return MOE_PERMUTE.explain(MoePermute(target, "int64", 128, 8, 4096, 4, 16))


def unpermute(target: Target) -> Explanation:
    """Return the explanation of moe_unpermute with weights."""
    return MOE_UNPERMUTE.explain(MoeUnpermute(target, "bfloat16", "float32", "bfloat16", 8, 4096, 16))


QUANTIZATIONS: dict[str, Ask] = {
    "static": quantization(PER_TENSOR, static=True),
    "per tensor": quantization(PER_TENSOR),
    "per token": quantization(PER_TOKEN),
    "1x128": quantization(GROUP_128),
    "128x128": quantization(BLOCK_128),
}
PRODUCERS: dict[str, Ask] = {"rms_norm_quant": norm, "silu_and_mul_quant": silu}
MIXTURES: dict[str, Ask] = {"moe_permute": permute, "moe_unpermute": unpermute}
VECTORS: tuple[tuple[str, Granularity, Granularity], ...] = (
    ("tensor x tensor", "tensor", "tensor"),
    ("token x channel", "row", "row"),
    ("tensor x channel", "tensor", "row"),
)
BLOCKS: tuple[tuple[str, Granularity, Granularity], ...] = (
    ("1x128 x 128x128", "group", "block"),
    ("1x128 x 1x128", "group", "group"),
)
TOKENS = (16, 256)
"""The numbers of rows of the products: as in decoding, and as in a batch."""
EXPERTS = 8
"""The groups of the grouped products, each of 32 rows."""
ENDINGS: dict[str, dict[str, object]] = {
    "`silu` or `gelu`": {"activation": "silu"},
    "`gelu_tanh`": {"activation": "gelu_tanh"},
    "`beta`": {"beta": 1.0},
}
"""By label on the page: fields of problems."""
TABLES: dict[str, dict[str, Ask]] = {
    "Quantization of rows of 4096 bfloat16": QUANTIZATIONS,
    "Norms and activations with quantization, 4096 columns of bfloat16": PRODUCERS,
    **{
        f"Products of {m} x 4096 x 4096 to bfloat16": {name: product(a, b, m) for name, a, b in VECTORS + BLOCKS}
        for m in TOKENS
    },
    f"Products of {TOKENS[-1]} x 4096 x 4096 that end in an activation or add to their result": {
        f"{name}, {said}": product(a, b, TOKENS[-1], **ending)
        for name, a, b in (VECTORS[1], BLOCKS[0])
        for said, ending in ENDINGS.items()
    },
    f"Grouped products of {EXPERTS} groups of 32 x 4096 x 4096 to bfloat16": {
        name: grouped(a, b) for name, a, b in VECTORS + BLOCKS
    },
    "Rows of 4096 columns for 8 of 128 experts": MIXTURES,
}
"""The page's tables by heading, each with its columns."""

OPERATIONS: dict[str, tuple[Ask, ...]] = {
    "`quantize`": tuple(QUANTIZATIONS.values()),
    "`rms_norm_quant`, `silu_and_mul_quant`": tuple(PRODUCERS.values()),
    **{
        f"products, {name}, {m} rows": tuple(product(a, b, m) for _, a, b in scales)
        for name, scales in (("scales per tensor, token, channel", VECTORS), ("scales per block", BLOCKS))
        for m in TOKENS
    },
    "grouped products": tuple(grouped(a, b) for _, a, b in VECTORS + BLOCKS),
    "`moe_permute`, `moe_unpermute`": tuple(MIXTURES.values()),
}
"""The rows of the README's table, each for one or several problems."""
FAMILIES: dict[str, tuple[str, ...]] = {
    "H100, H200": ("sm_90",),
    "A100, RTX 30": ("sm_80", "sm_86"),
    "L4, RTX 40, RTX 50": ("sm_89", "sm_120"),
    "B200": ("sm_100",),
    "MI300, MI350": ("gfx942", "gfx950"),
    "CPU": ("host",),
}
"""The columns of the README's table, each for one or several devices."""
FALLBACKS = ("generic_decode", "generic_mma", "generic_grouped", "elementwise")


def cell(explanation: Explanation) -> str:
    """Return the kernel that runs a problem, preceded by the one that runs it if its library offers an algorithm."""
    return " ".join([*(f"`{name}`?" for name in possible(explanation)[:1]), f"`{explanation.chosen or 'none'}`"])


def possible(explanation: Explanation) -> list[str]:
    """Return the kernels that would run a problem before the chosen one, if their library offers an algorithm."""
    before = takewhile(lambda verdict: verdict.status != "chosen", explanation.verdicts)
    return [verdict.kernel for verdict in before if verdict.status == "unknown"]


def kind(explanation: Explanation) -> str:
    """Return the README's term for the kernel that runs a problem."""
    if explanation.chosen == "host":
        return "NumPy"
    if possible(explanation):
        return "library"
    return "fallback" if explanation.chosen in FALLBACKS else "own"


def kinds(asks: tuple[Ask, ...], targets: list[Target]) -> str:
    """Return the README's terms for the kernels that run several problems on several devices."""
    return " / ".join(dict.fromkeys(kind(ask(target)) for ask in asks for target in targets))


def table(columns: list[str], rows: dict[str, list[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    lines = [columns, ["---"] * len(columns), *([name, *cells] for name, cells in rows.items())]
    return [f"| {' | '.join(line)} |" for line in lines]


def named(name: str) -> Target:
    """Return a device by name, with an ordinal that no machine has."""
    return target_named(name)._replace(device=ELSEWHERE)


def marked(name: str, *targets: Target) -> str:
    """Return a name, with a mark if the kernels have not run on hardware."""
    return name if all(map(proven, targets)) else f"{name} {MARK}"


def page() -> str:
    """Return the page about all devices."""
    targets = {name: named(name) for name in (*GPUS, "host")}
    lines = [HEAD + LEGEND]
    for heading, columns in TABLES.items():
        rows = {marked(name, at): [cell(ask(at)) for ask in columns.values()] for name, at in targets.items()}
        lines += [f"## {heading}", "", *table(["device", *columns], rows), ""]
    return "\n".join(lines)


def summary() -> str:
    """Return the README's table."""
    families = {title: [named(name) for name in names] for title, names in FAMILIES.items()}
    rows = {
        name: [
            " / ".join(dict.fromkeys(kind(ask(at)) for ask in asks for at in places)) for places in families.values()
        ]
        for name, asks in OPERATIONS.items()
    }
    return "\n".join([*table(["", *(marked(title, *at) for title, at in families.items())], rows), "", README_LEGEND])


def texts() -> dict[Path, str]:
    """Return the current texts of the page and the README."""
    before, rest = README.read_text(encoding="utf-8").split(BEGIN)
    return {PAGE: page(), README: f"{before}{BEGIN}{summary()}{END}{rest.split(END)[1]}"}


def main() -> int:
    """Rewrite the texts; with --check, print which would change, and return 1 if any would."""
    wanted = texts()
    if "--check" in sys.argv[1:]:
        stale = [path for path, text in wanted.items() if not path.exists() or path.read_text("utf-8") != text]
        for path in stale:
            print(f"{path.relative_to(ROOT)} is not current: run python docs/make_support_matrix.py", file=sys.stderr)
        return int(bool(stale))
    for path, text in wanted.items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
