"""What hypothesis draws: values, layouts, shapes, group shapes, scales; right ones and wrong ones."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from fp8core import BLOCK_128, GROUP_128, PER_TENSOR, PER_TOKEN
from soak.arena import Arena, Layout, Place, numpy_dtype
from support.engines import FLOATS, FP8

ORDINARY = 100
"""The examples of hypothesis' own profile: the numbers in `examples` are for it, others are that much more or less."""
COLS = (1, 2, 3, 7, 8, 16, 17, 31, 64, 96, 100, 127, 128, 129, 192, 256, 300)
GROUPS = (
    *(PER_TENSOR, PER_TOKEN, GROUP_128, BLOCK_128),
    *((-1, 1), (1, 1), (1, 64), (1, 96), (1, 7), (2, 3), (2, -1), (-1, 32), (6, 25), (3, 128), (1000, 1000)),
)

Draw = Callable[[Any], Any]


class Case(NamedTuple):
    """A call whose operands lie in an arena: places among the arguments become arrays once it is sealed."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    check: Callable[[Any], None]
    """Compares the result, which may lie in `written`, with the right one."""
    written: tuple[Place, ...] = ()
    must: str | None = None
    names: tuple[str, ...] = ()
    """Of operands beside the keyword arguments."""

    def ready(self, arena: Arena) -> Callable[[], Any]:
        """Return the call with its arrays."""
        args = [resolved(arena, value) for value in self.args]
        kwargs = {name: resolved(arena, value) for name, value in self.kwargs.items()}
        return lambda: self.function(*args, **kwargs)


def resolved(arena: Arena, value: Any) -> Any:
    """Return ``value`` with arrays in place of places."""
    if isinstance(value, Place):
        return arena.array(value)
    return tuple(resolved(arena, x) for x in value) if type(value) is tuple else value


def examples(ordinary: int) -> settings:
    """Return the settings of a fuzz test: ``ordinary`` examples, always the same; with `long` more and others, made smaller."""
    most = settings.default.max_examples
    ordinary_run = most <= ORDINARY
    return settings(
        phases=(Phase.explicit, Phase.generate) if ordinary_run else (Phase.explicit, Phase.generate, Phase.shrink),
        max_examples=max(1, ordinary * most // ORDINARY),
        deadline=None,
        report_multiple_bugs=False,
        derandomize=ordinary_run,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )


def numbers(shape: tuple[int, ...], dtype: str, flavour: str, seed: int) -> np.ndarray:
    """Return floats: "ordinary" ones, or with "special" values, "zeros", or "tiny" ones around the smallest scale."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * np.exp2(rng.uniform(-4, 4, shape))
    if flavour == "zeros":
        x *= 0
    if flavour == "tiny":
        x *= 2.0**-20
    x = np.asarray(x, np.float32)
    if flavour == "special" and x.size:
        for value in (np.nan, np.inf, -np.inf, -0.0, 1e-40, 3e38, 2.0**-126):
            x.reshape(-1)[rng.integers(x.size)] = value
    with np.errstate(all="ignore"):
        return x.astype(FLOATS[dtype])


def codes(shape: tuple[int, ...], dtype: str, flavour: str, seed: int) -> np.ndarray:
    """Return FP8 numbers; with a flavour other than "ordinary" all codes, NaN too."""
    rng = np.random.default_rng(seed)
    if flavour != "ordinary":
        return rng.integers(0, 256, shape, dtype=np.uint8).view(FP8[dtype])
    return np.asarray(rng.standard_normal(shape), np.float32).astype(FP8[dtype])


def scales(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Return positive fp32 scales."""
    return np.asarray(np.random.default_rng(seed).uniform(0.01, 2.0, shape), np.float32)


seeds = st.integers(0, 2**16)
flavours = st.sampled_from(("ordinary", "ordinary", "special", "zeros", "tiny"))
fp8 = st.sampled_from(tuple(FP8))
e4m3 = st.sampled_from(("float8_e4m3fn", "float8_e4m3fnuz"))
wide = st.sampled_from(tuple(FLOATS))
layouts = st.builds(
    lambda *at: Layout("rows", *at), st.sampled_from((0, 0, 1, 3, 8, 16)), st.sampled_from((0, 0, 1, 4, 5, 8))
)
"""Those that every function takes."""
offsets = st.sampled_from((0, 0, 1, 2, 3, 4)).map(lambda offset: Layout("rows", 0, offset))
"""Without gaps."""
groups = st.sampled_from(GROUPS)


@st.composite
def shapes(draw: Draw, least: int = 1, most: int = 4, cols: tuple[int, ...] = COLS) -> tuple[int, ...]:
    """Draw a shape of some axes, the last one from ``cols``, now and then without elements."""
    axes = draw(st.integers(least, most))
    leading = [draw(st.integers(0, 5) if axes == 2 else st.integers(0, 3)) for _ in range(axes - 1)]
    return (*leading, draw(st.sampled_from((*cols, 0))))


@st.composite
def alone(draw: Draw) -> tuple[int, ...]:
    """Draw one of the shapes of a single number."""
    return draw(st.sampled_from(((), (1,), (1, 1))))


def flat(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return rows and columns of an array folded to two axes."""
    rows = 1
    for extent in shape[:-1]:
        rows *= extent
    return rows, shape[-1]


def grid(group: tuple[int, int], rows: int, cols: int) -> tuple[int, int]:
    """Return how many scales a matrix has along each axis."""
    return tuple(1 if side < 0 else -(-extent // side) for side, extent in zip(group, (rows, cols), strict=True))


def scale_shape(group: tuple[int, int], shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the shape of computed scales; None where only their number is fixed."""
    rows, cols = flat(shape)
    if tuple(group) == (-1, -1):
        return (1,)
    if len(shape) == 2:
        return grid(group, rows, cols)
    return (*shape[:-1], grid(group, rows, cols)[1]) if group[0] == 1 and len(shape) > 2 else None


def same(got: np.ndarray, want: np.ndarray, what: str) -> None:
    """Assert equal bytes; any NaN is like another."""
    want = np.asarray(want)
    assert got.shape == want.shape, f"{what} has shape {got.shape}, not {want.shape}"
    assert got.dtype == want.dtype, f"{what} is of {got.dtype}, not {want.dtype}"
    unsigned = f"u{want.dtype.itemsize}"
    with np.errstate(all="ignore"):
        both_nan = np.isnan(got.astype(np.float32)) & np.isnan(want.astype(np.float32))
    raw = [np.array(x, order="C", ndmin=1).view(unsigned).reshape(x.shape) for x in (got, want)]
    wrong = np.argwhere((raw[0] != raw[1]) & ~both_nan)
    if len(wrong):
        at = tuple(wrong[0])
        raise AssertionError(f"{what}: {len(wrong)} of {want.size} are wrong, first at {at}: {got[at]}, not {want[at]}")


def converted(x: np.ndarray, dtype: str) -> np.ndarray:
    """Return ``x`` rounded to a dtype, without NumPy's warnings."""
    with np.errstate(all="ignore"):
        return x.astype(numpy_dtype(dtype))
