"""One tensor over several that are adjacent in memory: only where they are, and for as long as they are."""

import gc

import pytest

torch = pytest.importorskip("torch")

from fp8core.torch.adjacent import ADJACENT, are_adjacent  # noqa: E402 - after the skip

WHOLE = torch.arange(48.0).view(12, 4)
BUFFER = bytearray(WHOLE.numpy().tobytes())


def of_buffer(row, rows):
    """Return rows of a buffer, as a tensor whose storage begins with them."""
    return torch.frombuffer(BUFFER, dtype=torch.float32, count=rows * 4, offset=row * 16).view(rows, 4)


@pytest.mark.parametrize(
    ("parts", "adjacent"),
    [
        ([WHOLE[:4], WHOLE[4:6], WHOLE[6:]], True),
        ([WHOLE[2:4], WHOLE[4:5]], True),
        ([WHOLE[3:]], True),
        ([WHOLE[4:6], WHOLE[:4]], False),
        ([WHOLE[:4], WHOLE[5:]], False),
        ([WHOLE[:4], WHOLE[3:]], False),
        ([WHOLE[:4], WHOLE[4:8].T], False),
        ([WHOLE[:4, :2], WHOLE[2:4]], False),
        ([of_buffer(0, 4), of_buffer(4, 2)], False),
    ],
    ids=["three", "inner", "one", "turned round", "gap", "overlap", "transposed", "columns", "other storage"],
)
def test_tensors_are_one_where_their_rows_follow_each_other_in_one_storage(parts, adjacent):
    assert are_adjacent(parts) == adjacent
    one = ADJACENT.as_one(parts)
    assert (one is not None) == adjacent
    assert one is None or (one.data_ptr() == parts[0].data_ptr() and torch.equal(one, torch.cat(parts)))


def test_the_tensor_is_the_same_until_the_memory_is_another():
    gc.collect()  # models of other tests
    parts, before = list(WHOLE.clone().split((4, 8))), len(ADJACENT)
    one = ADJACENT.as_one(parts)
    assert ADJACENT.as_one(parts) is one
    for part, new in zip(parts, (WHOLE + 100).split((4, 8)), strict=True):
        part.data = new
    assert torch.equal(ADJACENT.as_one(parts), WHOLE + 100)
    assert len(ADJACENT) == before + 1
    parts[1].data = WHOLE[4:].clone()  # apart: what was one is not kept
    assert ADJACENT.as_one(parts) is None
    assert len(ADJACENT) == before
