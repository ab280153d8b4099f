"""Every kernel compiles for every architecture as the plans ask for it, into registers, to the instructions meant."""

import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import NamedTuple
from unittest import mock

import pytest

from fp8core.runtime import jit, sources
from fp8core.runtime.jit import Request
from fp8core.target import Target
from support import compilers
from support.kept import kept_folder
from support.plans import OPERATIONS
from support.targets import TARGETS

REGISTERS = {
    "all_close": 64,
    "relayout": 48,
    "clear_amax": 16,
    "count_experts": 56,
    "dequantize": 48,
    "expand": 24,
    "generic_decode": 256,
    "generic_mma": 256,
    "generic_grouped": 256,
    "realign_codes": 48,
    "copy_rows": 48,
    "sm90_tiled": 255,
    "sm90_grouped": 255,
    "sm90_decode": 168,
    "sm90_decode_rows": 232,
    "sm89_decode": 248,
    "rms_norm_quant": 128,
    "normalize": 48,
    "permute": 64,
    "unpermute": 80,
    "quantize_rowwise_unaligned": 104,
    "quantize_groups_unaligned": 80,
    "quantize_elementwise": 64,
    "quantize_tensorwise": 128,
    "quantize_rowwise": 104,
    "requantize": 72,
    "apply_epilogue": 40,
    "silu_and_mul_quant": 80,
    "gfx9_decode": 64,
}
"""The most registers of a thread, by entry: what is above would cost blocks in flight. (A block of sm90_tiled has a
multiprocessor to itself, so its threads may have all that there are, generic_mma holds its tile in registers,
sm90_decode_rows three sets of 64 rows x 128 channels in a warpgroup, generic_decode and sm89_decode their results, of
up to 64 tokens x 32 channels, quantize_tensorwise what it will not read again, quantize_rowwise up to eight vectors of
8, as fnuz codes of a 128x128 block.)"""
MAY_SPILL: tuple[str, ...] = ()
"""Entries that may keep something in local memory."""
REGISTERS_OF_A_BLOCK = {"cuda": 65536, "hip": 4 * 512 * 64}
STATIC_SHARED = 48 << 10


class Use(NamedTuple):
    """How a kernel is launched."""

    target: Target
    source: str
    entry: str
    constants: Mapping[str, int | float | str]
    threads: int
    shared_bytes: int


TWINS = {0x1201: 0x1200}
"""Architectures whose code is that of another one, as `test_a_twin_has_the_same_code` shows."""


def as_twin(target: Target, request: Request) -> tuple[Target, Request]:
    """Return what is compiled in place of a request: the same for the twin of its target, if there is one."""
    if target.arch not in TWINS:
        return target, request
    twin = target._replace(arch=TWINS[target.arch])
    own, others = jit.standard_options(target), jit.standard_options(twin)
    assert request.options[: len(own)] == own
    return twin, request._replace(options=(*others, *request.options[len(own) :]))


@cache
def uses(target: Target, operation: str) -> dict[Request, Use]:
    """Return what the plans of an operation compile on ``target``."""
    found: dict[Request, Use] = {}

    def prepare(
        target: Target,
        source: str,
        entry: str,
        constants: Mapping[str, int | float | str],
        signature: str | type,
        *,
        block: tuple[int, int, int] | int,
        shared_bytes: int = 0,
        **attributes: object,
    ) -> mock.Mock:
        threads = block if isinstance(block, int) else block[0] * block[1] * block[2]
        use = Use(target, source, entry, constants, threads, shared_bytes)
        found[jit.compile_request(target, source, entry, constants)] = use
        return mock.Mock()  # called or bound, it launches nothing

    with mock.patch.object(jit, "prepare", prepare):
        for plan in OPERATIONS[operation](target):
            plan()
    return found


Kernels = list[tuple[Use, compilers.Binary]]


@pytest.fixture
def binaries(request: pytest.FixtureRequest) -> Callable[[Target, str], Kernels]:
    """Return what compiles the kernels of an operation; it skips the test when the compiler is missing."""
    folder = kept_folder(request, "binaries")

    def compile_all(target: Target, operation: str) -> Kernels:
        reason = compilers.missing(target.platform)
        if reason:
            pytest.skip(reason)
        wanted = uses(target, operation)
        with ThreadPoolExecutor(2) as pool:
            made = pool.map(lambda one: compilers.compiled(*as_twin(target, one), folder), wanted)
            return list(zip(wanted.values(), made, strict=True))

    return compile_all


def disassembled(target: Target, kernels: Iterable[tuple[Use, compilers.Binary]]) -> list[tuple[Use, str]]:
    """Return the instructions of kernels."""
    chosen = list(kernels)
    texts = compilers.instructions(target, [binary for _, binary in chosen])
    return [(use, text) for (use, _), text in zip(chosen, texts, strict=True)]


def most_registers(use: Use) -> int:
    """Return the most registers of a thread.

    Blocks of sm90_decode for unaligned weights that have a multiprocessor to themselves cost no other block its
    registers.
    """
    alone = int(use.constants.get("FP8_PHASES", 0)) > 0 and use.constants["FP8_CTAS_PER_SM"] == 1
    return 256 if alone else REGISTERS[use.entry]


def name(target: Target) -> str:
    return str(target).split()[0]


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("target", TARGETS, ids=name)
def test_kernels_compile_and_stay_in_registers(target, operation, binaries):
    kernels = binaries(target, operation)
    assert kernels or operation in ("tiles", "split tiles", "layouts", "grouped tiles", "linear"), (
        "no row of the table is able"
    )
    for use, binary in kernels:
        assert binary.registers <= most_registers(use), f"{use}: {binary.registers} registers"
        granted = -(-binary.registers // 8) * 8 * -(-use.threads // target.warp) * target.warp
        assert granted <= REGISTERS_OF_A_BLOCK[target.platform], f"{use}: {binary.registers} registers: no block starts"
        assert binary.shared <= STATIC_SHARED, f"{use}: {binary.shared} bytes of static shared memory"
        assert binary.shared + use.shared_bytes <= target.shared_bytes, (
            f"{use}: {binary.shared} + {use.shared_bytes} bytes"
        )
        if use.entry not in MAY_SPILL:
            assert binary.stack == 0, f"{use}: {binary.stack} bytes of local memory"


@pytest.mark.parametrize("target", [t for t in TARGETS if t.arch in TWINS], ids=name)
def test_a_twin_has_the_same_code(target, request):
    """No line of a source tells the twins apart; clang does not either, for each entry in one way of compiling it."""
    reason = compilers.missing(target.platform)
    if reason:
        pytest.skip(reason)
    own, other = (f"gfx{arch:x}" for arch in (target.arch, TWINS[target.arch]))
    entries = {use.entry: asked for operation in OPERATIONS for asked, use in uses(target, operation).items()}
    assert len(entries) > 10
    for entry, asked in entries.items():
        for line in asked.text.splitlines():
            assert (f"__{own}__" in line) == (f"__{other}__" in line), f"{entry}: {line}"
        twin = compilers.compiled(*as_twin(target, asked), kept_folder(request, "binaries")).code.decode()
        code = compilers.compiled(target, asked).code.decode()
        assert own in code
        same, want = (re.sub(r"__hip_cuid_\w+", "", text) for text in (code.replace(own, other), twin))
        assert same == want, entry


@pytest.mark.parametrize("platform", ["cuda", "hip"])
def test_every_source_is_asked_for(platform):
    """A source that no plan compiles is dead, or its problem is missing from the table of problems."""
    asked = {use.source for t in TARGETS if t.platform == platform for o in OPERATIONS for use in uses(t, o).values()}
    assert asked == set(sources.names(platform))


@pytest.mark.parametrize("target", [t for t in TARGETS if t.platform == "cuda" and t.arch >= 89], ids=name)
def test_codes_are_made_by_the_conversion_instruction(target, binaries):
    """In each source, for each input, format and mode; shapes of tiles and of groups make codes in the same place."""
    parts = ("FP8_INPUT", "FP8_FORMAT", "FP8_MODE")
    kernels = {
        (use.entry, *map(use.constants.get, parts)): (use, binary)
        for use, binary in binaries(target, "quantize")
        if use.constants.get("FP8_FORMAT") in (0, 2)
    }
    assert kernels
    for use, text in disassembled(target, kernels.values()):
        assert re.search(r"F2FP\.SATFINITE\.E[45]M[32]", text), use


@pytest.mark.parametrize("target", [t for t in TARGETS if t.arch in (0x942, 0x950, 0x1200, 0x1201)], ids=name)
def test_amd_codes_are_made_by_the_conversion_instruction(target, binaries):
    own = (1, 3) if target.arch == 0x942 else (0, 2)
    for use, text in disassembled(target, binaries(target, "quantize")):
        if use.constants.get("FP8_FORMAT") in own:
            assert re.search(r"v_cvt_pk_(fp8|bf8)_f32", text), use
            # What overflows would follow a bit of the mode register: it is clamped before.
            assert re.search(r"v_med3_(num_)?f32", text), use


def test_hopper_products_use_the_fp8_tensor_cores(binaries):
    hopper = next(t for t in TARGETS if t.arch == 90)
    products = [
        (use, binary)
        for operation in ("scaled_mm", "tiles", "layouts")
        for use, binary in binaries(hopper, operation)
        if use.source.startswith("gemm/sm90/")
    ]
    assert products
    for use, text in disassembled(hopper, products):
        assert "QGMMA" in text, use
        # Copies by TMA are one thread's, which the compiler has to know: else each becomes a loop over lanes.
        assert "UTMALDG" in text, use
        if use.constants.get("FP8_CHANNELS") != 64:  # the loads of its weight are not to follow each other as fast
            assert not re.search(r"UTMALDG.*\n.*BRA\.U\.ANY", text), use


@pytest.mark.parametrize("target", [t for t in TARGETS if t.arch in (89, 120)], ids=name)
def test_products_of_few_rows_use_the_fp8_instruction_and_stream_the_weight(target, binaries):
    products = [(use, binary) for use, binary in binaries(target, "scaled_mm") if use.source == "gemm/mma/decode"]
    words = {0: "E4M3", 2: "E5M2"}
    mixes, tiles = set(), set()
    for use, text in disassembled(target, products):
        mix = f"{words[int(use.constants['FP8_B'])]}.{words[int(use.constants['FP8_A'])]}"
        assert set(re.findall(r"[HQ]MMA\S*", text)) == {f"QMMA.16832.F32.{mix}"}, use
        wide = re.findall(r"LDG\S*\.128", text)
        # Two pieces of a row of the weight and of a, in the loop and behind it.
        weight, a = 2 * int(use.constants["FP8_TILES"]), int(use.constants["FP8_SIDE"]) // 8
        assert len([load for load in wide if ".EF" in load]) == 4 * weight, use
        assert len(wide) == 4 * (weight + a), use
        mixes.add(mix)
        tiles.add(use.constants["FP8_TILES"])
    assert mixes == {"E4M3.E4M3", "E4M3.E5M2", "E5M2.E4M3"}
    assert tiles == {1, 2}


OF_A_WARP = {
    80: "HMMA", 89: "HMMA QMMA", 90: "HMMA", 100: "HMMA", 120: "HMMA QMMA",
    0x90A: "mfma16", 0x942: "mfma16 mfma8", 0x950: "mfma16 mfma8",
    0x1100: "wmma16", 0x1200: "wmma16 wmma8", 0x1201: "wmma16 wmma8",
}  # fmt: skip
"""Matrix instructions of a warp: of 16-bit floats, and of FP8 where it has any."""


@pytest.mark.parametrize("target", TARGETS, ids=name)
def test_products_of_anything_use_fp8_instructions_where_a_warp_has_them(target, binaries):
    """In each source, for each mix of formats and way of reading them; scales and results are made behind the sums."""
    parts = ("FP8_A", "FP8_B", "FP8_DIRECT", "FP8_SIDE")
    products = {
        (use.entry, *map(use.constants.get, parts)): (use, binary)
        for use, binary in binaries(target, "scaled_mm")
        if use.entry in ("generic_decode", "generic_mma")
    }
    used = set()
    for use, text in disassembled(target, products.values()):
        found = set(re.findall(r"\b[A-Z]MMA\b", text))
        found |= {a + b for a, b in re.findall(r"v_(mfma|wmma)_f32_16x16x\d+_?[bf][fp](8|16)", text)}
        assert len(found) == 1, (use, found)
        assert found <= {OF_A_WARP[target.arch].split()[use.constants["FP8_DIRECT"]]}, use
        used |= found
    assert used == set(OF_A_WARP[target.arch].split())


@pytest.mark.parametrize("target", [t for t in TARGETS if t.arch in (0x942, 0x950, 0x1200, 0x1201)], ids=name)
def test_amd_products_of_few_rows_use_the_matrix_instructions_and_stream_the_weight(target, binaries):
    products = [(use, binary) for use, binary in binaries(target, "scaled_mm") if use.source == "gemm/decode"]
    words = {0: "fp8", 1: "fp8", 2: "bf8", 3: "bf8"}
    instruction, hint = ("v_mfma_f32_16x16x32", " nt") if target.warp == 64 else ("v_wmma_f32_16x16x16", "TH_LOAD_NT")
    mixes = set()
    for use, text in disassembled(target, products):
        mix = f"{words[int(use.constants['FP8_B'])]}_{words[int(use.constants['FP8_A'])]}"
        assert set(re.findall(r"v_(?:mfma|wmma)\w+", text)) == {f"{instruction}_{mix}"}, use
        wide = re.findall(r"global_load_(?:dwordx4|b128).*", text)
        assert len([load for load in wide if hint in load]) * 2 == len(wide), use
        mixes.add(mix)
    assert mixes == {"fp8_fp8", "fp8_bf8", "bf8_fp8"}
