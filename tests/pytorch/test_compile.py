"""torch.compile of every public function: one graph, and the bits of eager calls."""

import pytest

torch = pytest.importorskip("torch")

from pytorch.cases import CASES, bits  # noqa: E402

ROWS = 1, 5, 16


@pytest.mark.parametrize("dynamic", [None, True, False], ids=lambda x: f"dynamic={x}")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_one_graph_and_the_bits_of_eager_calls(case, dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(case.function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for m in ROWS:
        eager_inputs, inputs = case.inputs(m), case.inputs(m)
        assert bits(compiled(*inputs)) == bits(case.function(*eager_inputs))
        assert bits(inputs) == bits(eager_inputs), "what was written in place"
