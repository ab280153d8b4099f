"""Tuning without a GPU: made-up times, a recording library, and what calls get afterwards."""

import json
import re
from dataclasses import replace
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

import fp8core
from fp8core.core.operation import Operation, times_forgotten
from fp8core.errors import TuningError, UnsupportedProblemError
from fp8core.kernels.gemm.table import SCALED_MM
from fp8core.kernels.linear.table import LINEAR
from fp8core.runtime import device
from fp8core.table import Choice, Table
from fp8core.target import HOST
from fp8core.tuning import MARGIN, Tuning, measuring, timed, values
from fp8core.tuning.values import checksum
from support.blaslt_fixtures import built  # noqa: F401
from support.blaslt_tools import problem
from support.targets import H200
from support.tuning_stub import FAR, PROBLEM, saying, stub  # noqa: F401

CANDIDATES = (
    ("cublaslt", 0),
    ("cublaslt", 1),
    ("cublaslt_relayout", 0),
    ("cublaslt_relayout", 1),
    ("cublaslt_epilogue", 0),
    ("cublaslt_epilogue", 1),
    ("sm90_decode", 0),
)


def test_the_candidates_are_all_algorithms_of_all_able_rows(stub):
    assert SCALED_MM.candidates(PROBLEM) == CANDIDATES


def test_the_stopwatch_gets_each_candidate_made_ready(stub):
    seen = SimpleNamespace()
    timed(PROBLEM, lambda p, launches: vars(seen).update(p=p, launches=launches) or [1.0] * len(launches))
    assert seen.p == PROBLEM
    assert len(seen.launches) == len(CANDIDATES)
    assert seen.launches[1].scratch_bytes == 2000  # the second algorithm's workspace


def test_the_fastest_is_chosen_and_what_was_not_timed_left_out(stub):
    found = timed(PROBLEM, saying(9.0, 5.0, 7.0))
    names = SCALED_MM.kernel("cublaslt").algorithms(PROBLEM)
    assert len(set(names)) == 2
    assert found.chosen == ("cublaslt", 1, 5.0, names[1])
    assert found.timed == (
        ("cublaslt", 0, 9.0, names[0]),
        ("cublaslt", 1, 5.0, names[1]),
        ("cublaslt_relayout", 0, 7.0, names[0]),
    )
    assert found.gain == pytest.approx(0.8)
    assert "> cublaslt algorithm 1: 5.00 us" in str(found)


@pytest.mark.parametrize(("first", "chosen"), [(1 + MARGIN, 0), (1 + 1.1 * MARGIN, 1), (FAR, 1)])
def test_chance_replaces_nothing(stub, first, chosen):
    assert timed(PROBLEM, saying(first, 1.0)).chosen[:2] == ("cublaslt", chosen)


@pytest.mark.parametrize("place", [0, 1, 2], ids=["array", "data", "scale"])
def test_captures_of_the_frameworks_of_pairs_are_refused_too(monkeypatch, place):
    """Timing waits for the device, which ends a capture of any stream."""
    arrays = [object() for _ in range(3)]
    on_stream = {id(array): 7 * (at == place) for at, array in enumerate(arrays)}
    current = SimpleNamespace(cuda=SimpleNamespace(get_current_stream=lambda: SimpleNamespace(ptr=0)))
    monkeypatch.setattr(device, "count", lambda: 1)
    monkeypatch.setattr(device, "cupy", lambda: current)
    monkeypatch.setattr(device, "capturing", lambda stream: stream == 7)

    def view(x, name):
        if id(x) not in on_stream:
            raise fp8core.DTypeError(f"{name} needs an array")
        return SimpleNamespace(target=H200, stream=on_stream[id(x)])

    monkeypatch.setattr(measuring.interop, "view", view)
    monkeypatch.setattr(measuring.interop, "stream_of", lambda view: view.stream)
    with pytest.raises(TuningError, match="not being captured into a graph, got the current stream of a"):
        measuring.refuse_captures((arrays[0], fp8core.Quantized(*arrays[1:])))


@pytest.mark.parametrize("extent", ["m", "n", "k"])
def test_a_product_without_elements_is_refused(stub, extent):
    """A stopwatch that places weights would divide by their bytes."""
    empty = PROBLEM._replace(**{extent: 0}, lda=0, ldb=0) if extent == "k" else PROBLEM._replace(**{extent: 0})
    with pytest.raises(UnsupportedProblemError, match=rf"tune needs a product with elements, .* got .*{extent}=0"):
        timed(empty, saying(1.0))


def launched(stub, p):
    SCALED_MM.plan(tuple(p))(*range(16, 176, 16))
    return stub.lines("Matmul")[-1]


def test_calls_get_what_was_chosen_once_it_is_applied(stub):
    found = timed(PROBLEM, saying(9.0, 5.0))
    assert "algorithm=1 " in launched(stub, PROBLEM)
    found.apply()
    assert "algorithm=2 " in launched(stub, PROBLEM)
    assert "algorithm=1 " in launched(stub, PROBLEM._replace(m=100))


def test_a_tuning_is_for_all_devices_of_its_kind_and_for_settled_weights(stub):
    timed(PROBLEM, saying(9.0, 5.0)).apply()
    for ordinal in (0, 1):
        for stable in (False, True):
            p = PROBLEM._replace(target=H200._replace(device=ordinal), prefetch_weight=stable)
            assert SCALED_MM.choice(p) == ("cublaslt", 1)


def test_explain_names_the_tuned_kernel_and_algorithm(stub):
    before = SCALED_MM.explain(PROBLEM)
    timed(PROBLEM, saying(9.0, 9.0, 9.0, 5.0)).apply()
    verdicts = {v.kernel: v for v in SCALED_MM.explain(PROBLEM).verdicts}
    assert SCALED_MM.explain(PROBLEM).chosen == "cublaslt_relayout"
    assert verdicts["cublaslt_relayout"].reason == "tuned, algorithm 1"
    assert verdicts["cublaslt"] == ("cublaslt", "able", "")
    assert [v.kernel for v in before.verdicts] == list(verdicts)


def test_a_line_of_json_is_the_same_tuning(stub):
    found = timed(problem("group x block", m=96, scale_a_strides=(1, 96)), saying(9.0, 5.0))
    assert "\n" not in found.to_json()
    assert Tuning.from_json(found.to_json()) == found
    assert isinstance(Tuning.from_json(found.to_json())._problem.scale_a_strides, tuple)


@pytest.mark.parametrize(
    "options",
    [
        {"beta": 2, "out": np.ones((96, 512), ml_dtypes.bfloat16)},
        {"activation": "silu", "use_fast_accum": 0, "batch_invariant": np.True_},
        {"out_dtype": "float8_e4m3fn", "out_scale": 2, "amax": np.ones(1, np.float32)},
        {"bias": np.ones(512, np.float32), "out_dtype": "float32"},
    ],
    ids=["beta", "flags", "float8", "bias"],
)
def test_whatever_a_call_asks_for_comes_back_from_json(stub, options):
    x, weight = (fp8core.quantize(np.ones((rows, 1024), np.float32)) for rows in (96, 512))
    asked = fp8core.explain(fp8core.scaled_mm_nt, x, weight, target=H200, **options).problem
    found = replace(timed(PROBLEM, saying(9.0)), _problem=asked)
    assert Tuning.from_json(found.to_json()) == found


def test_a_tuning_is_readable_and_shows_no_numbers_of_kernels(stub):
    found, p = timed(PROBLEM, saying(9.0, 5.0)), PROBLEM
    assert (found.m, found.n, found.k) == (p.m, p.n, p.k)
    assert (*found.dtypes, *found.scales) == (p.a, p.b, p.out, p.scale_a, p.scale_b)
    assert repr(found) == f"Tuning({str(found).splitlines()[0]}; cublaslt algorithm 1: 5.00 us)"
    assert str(found).splitlines()[1:] == ["> cublaslt algorithm 1: 5.00 us", "  cublaslt: 9.00 us"]
    values = {"machine", "chosen", "default", "timed", "m", "n", "k", "dtypes", "scales", "gain", "key"}
    public = {name for name in dir(found) if not name.startswith("_")}
    assert public == values | {"problems", "apply", "to_json", "from_json"}
    with pytest.raises(AttributeError):
        found.chosen = found.timed[0]


@pytest.mark.parametrize(
    "damage", [lambda x: x[:-9], lambda x: "[]", lambda x: x.replace('"m"', '"q"'), lambda x: "{}"]
)
def test_what_is_no_tuning_is_refused(stub, damage):
    with pytest.raises(TuningError, match="not a tuning"):
        Tuning.from_json(damage(timed(PROBLEM, saying(1.0)).to_json()))


NO_LINES = {
    "": r"invalid JSON \(Expecting value.*\) in ''$",
    '{"check": "0", ': r"invalid JSON \(Expecting property name",
    "{}": "it has no checksum in '{}'$",
    "[]": "it has no checksum in '\\[\\]'$",
    "null": "it has no checksum",
    '"text"': "it has no checksum",
    '{"check": 1}': "its checksum is wrong",
    "[" * 100_000: "nested too deep in '\\[",
    '{"check":' * 100_000: "nested too deep",
    "1" * 5000: "Exceeds the limit",
}


@pytest.mark.parametrize("text", NO_LINES, ids=lambda text: text[:20])
def test_text_that_is_no_tuning_is_refused_in_words(text):
    with pytest.raises(TuningError, match=f"^not a tuning: {NO_LINES[text]}"):
        Tuning.from_json(text)


@pytest.mark.parametrize("given", [None, 5, b"{}", {}, []], ids=repr)
def test_what_is_no_text_is_no_tuning(given):
    with pytest.raises(TuningError, match=f"text needs a line of JSON, got {type(given).__name__}"):
        Tuning.from_json(given)


def changed(line, path, value):
    """Return a line whose field at a path is another, or gone where that is None, with the right checksum."""
    fields = json.loads(line)
    del fields["check"]
    at = fields
    for name in path[:-1]:
        at = at[name]
    at[path[-1]] = value
    if value is None:
        del at[path[-1]]
    return json.dumps({"check": checksum(fields)} | fields)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (["machine"], None, "a line needs the fields machine, problem, chosen, default, timed and no others, got"),
        (["more"], 1, "a line needs the fields"),
        (["machine"], [], "machine needs the fields gpu, driver, library, fp8core, sources and no others, got"),
        (["machine", "gpu"], ["NVIDIA H200"], "gpu needs text, got"),
        (["machine", "driver"], True, "driver needs a whole number, got True"),
        (["problem"], 5, "problem needs the fields target, m, n, k"),
        (["problem", "beta"], None, "problem needs the fields"),
        (["problem", "m"], 96.0, "m needs a whole number, got 96.0"),
        (["problem", "m"], {}, "m needs a whole number, got {}"),
        (["problem", "beta"], "1", "beta needs a number, got '1'"),
        (["problem", "out_scale"], 1, "out_scale needs true or false, got 1"),
        (["problem", "scale_a"], "rows", "scale_a needs one of 'tensor', 'row', 'group', 'block', got 'rows'"),
        (["problem", "scale_a"], [], "scale_a needs one of"),
        (["problem", "scale_a_strides"], [1], "scale_a_strides needs a list of 2, got"),
        (["problem", "target", "platform"], "tpu", "platform needs one of 'cuda', 'hip', 'host', got 'tpu'"),
        (["chosen"], ["cublaslt", 0], "chosen needs a list of 3, got"),
        (["chosen", 1], "0", "chosen needs a whole number, got '0'"),
        (["default", 2], 0, "default needs text, got 0"),
        (["timed"], {}, "timed needs a list, got {}"),
        (["timed", 0], ["cublaslt", 0], "timed needs the fields kernel, algorithm, us, name and no others, got"),
        (["timed", 0], ["cublaslt", 0, 5.0, "", ""], "timed needs the fields"),
        (["timed", 0, 2], "5", "us needs a number, got '5'"),
    ],
)
def test_fields_of_other_types_are_refused_by_their_names(stub, path, value, words):
    line = timed(PROBLEM, saying(9.0, 5.0)).to_json()
    with pytest.raises(TuningError, match=f"^not a tuning: {re.escape(words)}.* in "):
        Tuning.from_json(changed(line, path, value))
    assert Tuning.from_json(changed(line, ["problem", "m"], 97)).m == 97  # a line that is right is taken


@pytest.mark.parametrize(
    "change", [{"gpu": "NVIDIA H100"}, {"driver": 12080}, {"library": 130200}, {"fp8core": "9"}, {"sources": "f"}]
)
def test_a_tuning_of_another_machine_is_refused(stub, change):
    found = timed(PROBLEM, saying(9.0, 5.0))
    foreign = replace(found, machine=found.machine._replace(**change))
    with pytest.raises(TuningError, match=r"the tuning needs Machine\(.*, got "):
        Tuning.from_json(foreign.to_json()).apply()
    assert not SCALED_MM._tuned


def test_an_algorithm_is_found_by_its_name_wherever_it_stands(stub):
    found = timed(PROBLEM, saying(9.0, 5.0))
    line = replace(found, chosen=found.chosen._replace(algorithm=7)).to_json()
    Tuning.from_json(line).apply()
    assert SCALED_MM.choice(PROBLEM) == ("cublaslt", 1)
    gone = replace(found, chosen=found.chosen._replace(name="0123"))
    with pytest.raises(UnsupportedProblemError, match="cublaslt has no algorithm 0123 for ScaledMm"):
        gone.apply()


def test_a_tuning_that_one_device_cannot_take_is_applied_to_none(stub, monkeypatch):
    found, numbered = timed(PROBLEM, saying(9.0, 5.0)), Table.numbered
    monkeypatch.setattr(Table, "numbered", lambda *asked: None if asked[1].target.device else numbered(*asked))
    with pytest.raises(UnsupportedProblemError, match="cublaslt has no algorithm"):
        found.apply()
    assert not SCALED_MM._tuned
    assert not values.APPLIED


def test_calls_that_were_planned_are_dropped_even_if_applying_is_interrupted(stub, monkeypatch):
    """Some of the devices have the new choice then."""
    found, prefer, before = timed(PROBLEM, saying(9.0, 5.0)), Table.prefer, times_forgotten()

    def interrupted(table, problem, choice):
        if SCALED_MM._tuned:
            raise KeyboardInterrupt
        prefer(table, problem, choice)

    monkeypatch.setattr(Table, "prefer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        found.apply()
    assert SCALED_MM._tuned
    assert times_forgotten() > before


def test_a_digit_that_was_changed_is_noticed(stub):
    line = timed(PROBLEM, saying(9.0, 5.0)).to_json()
    assert '"m": 96' in line
    with pytest.raises(TuningError, match="its checksum is wrong"):
        Tuning.from_json(line.replace('"m": 96', '"m": 97'))


def test_a_choice_that_is_not_able_is_refused(stub):
    for choice in (Choice("cublaslt", 2), Choice("host"), Choice("nothing")):
        with pytest.raises(
            UnsupportedProblemError, match=f"{choice.kernel} has no algorithm {choice.algorithm} for ScaledMm"
        ):
            SCALED_MM.prefer(PROBLEM, choice)


def test_prepared_calls_and_steps_of_layers_are_forgotten(stub, monkeypatch):
    monkeypatch.setattr(LINEAR, "_plans", {"a layer": "steps with the former product"})
    operation = Operation(("x",), lambda operands, options: None)
    operation.cache.by_specs["key"] = "call"
    assert len(operation) == 1
    timed(PROBLEM, saying(1.0)).apply()
    assert len(operation) == 0
    assert not LINEAR._plans


@pytest.mark.parametrize(
    ("p", "said"),
    [
        (problem(batch_invariant=True), "needs a product whose kernel may depend on m, got a batch-inv"),
        (problem(target=HOST), "got the host"),
    ],
)
def test_products_with_nothing_to_choose_from_are_refused(stub, p, said):
    with pytest.raises(UnsupportedProblemError, match=said):
        timed(p, saying(1.0))


def test_tune_takes_calls_with_a_product():
    x, weight = np.ones((4, 64), np.float32), np.ones((8, 64), np.float32)
    for other in (fp8core.quantize, x, [x]):
        with pytest.raises(TypeError, match="tune needs an operation with a product"):
            fp8core.tune(other, x)
    with pytest.raises(UnsupportedProblemError, match="got the host"):
        fp8core.tune(fp8core.Fp8Linear.from_weight(weight), x)
