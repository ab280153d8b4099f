"""What specs say of shapes and strides: which arrays are matrices, which are contiguous, and which overlap themselves."""

from contextlib import nullcontext

import pytest

from fp8core.core import specs
from fp8core.core.specs import Matrix, TensorSpec
from fp8core.errors import LayoutError, ShapeError
from fp8core.target import HOST


def spec(shape, strides):
    return TensorSpec("x", "float32", shape, strides, HOST)


@pytest.mark.parametrize(
    ("shape", "strides", "want"),
    [
        ((3, 64), (64, 1), Matrix(3, 64, 64)),
        ((3, 64), (70, 1), Matrix(3, 64, 70)),
        ((3, 64), (0, 1), Matrix(3, 64, 0)),
        ((64,), (1,), Matrix(1, 64, 64)),
        ((1, 64), (-7, 1), Matrix(1, 64, 64)),  # the stride of an axis of one has no meaning
        ((3, 1), (5, 9), Matrix(3, 1, 5)),
        ((3, 0), (-7, 7), Matrix(3, 0, 0)),
        ((2, 0, 5), (3, 3, 7), Matrix(0, 5, 5)),
        ((2, 3, 64), (210, 70, 1), Matrix(6, 64, 70)),
        ((1, 3, 1, 64), (9, 70, 5, 1), Matrix(3, 64, 70)),
        ((1, 1, 64), (-9, 9, 1), Matrix(1, 64, 64)),
    ],
)
def test_arrays_that_are_matrices(shape, strides, want):
    assert specs.matrix(spec(shape, strides)) == want


@pytest.mark.parametrize(
    ("shape", "strides", "error", "needs"),
    [
        ((), (), ShapeError, "at least one axis"),
        ((3, 64), (128, 2), LayoutError, "a contiguous last axis"),
        ((3, 64), (-64, 1), LayoutError, "rows in ascending order"),
        ((2, 3, 64), (211, 70, 1), LayoutError, "leading axes that fold"),
        ((2, 1, 3, 64), (200, 9, 70, 1), LayoutError, "leading axes that fold"),
    ],
)
def test_arrays_that_are_no_matrices(shape, strides, error, needs):
    with pytest.raises(error, match=f"^x needs {needs}"):
        specs.matrix(spec(shape, strides))


@pytest.mark.parametrize(
    ("shape", "strides", "fits"),
    [
        ((3, 4), (4, 1), True),
        ((3, 4), (1, 3), True),
        ((3, 4), (-4, -1), True),
        ((3, 4), (1, -3), True),
        ((3, 4), (3, 1), False),
        ((3, 4), (1, 2), False),
        ((3, 4), (-1, 2), False),
        ((3, 4), (8, 6), True),  # 3 * 8 == 4 * 6, past both ends
        ((4, 4), (8, 6), True),
        ((4, 5), (8, 6), False),
        ((3, 5), (8, 6), True),
        ((3, 4), (0, 1), False),
        ((3, 4), (1, 0), False),
        ((1, 4), (0, 1), True),
        ((3, 1), (1, 0), True),
        ((1, 1), (0, 0), True),
        ((3, 0), (0, 1), True),
        ((0, 4), (1, 0), True),
    ],
)
def test_results_in_which_two_elements_share_memory_are_refused(shape, strides, fits):
    with nullcontext() if fits else pytest.raises(LayoutError, match="needs elements that do not overlap"):
        specs.check_no_overlap(spec(shape, strides), strides)


@pytest.mark.parametrize(
    ("shape", "strides", "count"),
    [
        ((), (), 1),
        ((3, 4), (4, 1), 12),
        ((3, 1), (1, 7), 3),
        ((1, 4), (-9, 1), 4),
        ((3, 0, 4), (9, 9, 9), 0),
        ((3, 4), (1, 3), None),
        ((3, 4), (5, 1), None),
        ((4,), (2,), None),
        ((4,), (-1,), None),
    ],
)
def test_contiguous_arrays_are_counted(shape, strides, count):
    with nullcontext() if count is not None else pytest.raises(LayoutError, match="needs contiguous memory"):
        assert specs.contiguous_count(spec(shape, strides)) == count


@pytest.mark.parametrize(
    ("shape", "strides", "error"),
    [
        ((4,), (1,), None),
        ((1,), (9,), ShapeError),
        ((4, 1), (1, 1), ShapeError),
        ((4,), (2,), LayoutError),
        ((4,), (-1,), LayoutError),
    ],
)
def test_vectors_are_contiguous_and_of_their_length(shape, strides, error):
    with nullcontext() if error is None else pytest.raises(error, match="x needs 4 contiguous elements"):
        specs.check_vector(spec(shape, strides), 4)
    specs.check_vector(spec((1,), (9,)), 1)
