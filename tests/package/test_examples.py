"""Every public name has an example in its docstring, and every example of a docstring runs, on the host.

So does the program in examples/ that takes arrays of any framework; the others are tested where their frameworks are.
"""

import doctest
import importlib
import inspect
import pkgutil
import runpy
from importlib.util import find_spec
from pathlib import Path

import pytest

import fp8core
from fp8core import checkpoint, w8a8

PUBLIC = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module in (fp8core, checkpoint, w8a8)
    for name in module.__all__
    if getattr(getattr(module, name), "__module__", "").startswith("fp8core")  # no constant, no alias of typing
    and (inspect.isclass(getattr(module, name)) or inspect.isfunction(getattr(module, name)))
}
FINDER = doctest.DocTestFinder(exclude_empty=True)


def modules():
    found = pkgutil.walk_packages(fp8core.__path__, "fp8core.")
    absent = [f"fp8core.{name}" for name in ("torch", "transformers", "jax") if not find_spec(name)]
    left_out = ("fp8core._", "fp8core.__main__", *absent)
    return sorted(it.name for it in found if not it.name.startswith(left_out))


def examples():
    """Return the examples of all docstrings of the package, methods and private names included."""
    return [
        test
        for name in ["fp8core", *modules()]
        for test in FINDER.find(importlib.import_module(name), name)
        if test.examples
    ]


EXAMPLES = {test.name: test for test in examples()}


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_has_an_example(name):
    documented = FINDER.find(PUBLIC[name], name)
    assert any(test.examples for test in documented), f"{name} needs an Examples: block in its docstring"


SAME_ARGUMENTS = {
    f"fp8core.w8a8.torch_{kind}_w8a8_scaled_mm" for kind in ("per_tensor", "per_token", "channelwise")
} | {"fp8core.w8a8.rocm_per_tensor_w8a8_scaled_mm"}
"""They refer to another function's."""
HARMLESS = {
    "fp8core.w8a8.dispatch_w8a8_scaled_mm",
    "fp8core.w8a8.Fp8LinearOp",
    "fp8core.checkpoint.Checkpoint",
    "fp8core.checkpoint.inspect_checkpoint",
}
"""They raise nothing of their own."""
WITH_ARGUMENTS = [
    name
    for name, value in PUBLIC.items()
    if name not in SAME_ARGUMENTS
    and not (inspect.isclass(value) and (issubclass(value, Exception) or hasattr(value, "_fields")))
    and not hasattr(value, "__dataclass_fields__")  # values: their fields are described where they are declared
    and {*inspect.signature(value).parameters} - {"self"}
]


@pytest.mark.parametrize("name", WITH_ARGUMENTS)
def test_a_public_function_says_what_it_takes_and_raises(name):
    value = PUBLIC[name]
    said = inspect.getdoc(value)
    if inspect.isclass(value) and "Args:" not in said:
        said += inspect.getdoc(value.__init__)
    undescribed = [p for p in inspect.signature(value).parameters if f"{p}: " not in said]
    assert undescribed == [], f"{name} does not describe {undescribed}"
    assert name in HARMLESS or "Raises:" in said, f"{name} needs a Raises: block"


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = []
    runner = doctest.DocTestRunner(verbose=False)
    runner.run(EXAMPLES[name], out=said.append, clear_globs=False)
    assert runner.failures == 0, "".join(said)


def test_a_wrong_example_is_found():
    test = doctest.DocTestParser().get_doctest(">>> 1 + 1\n3\n", {}, "wrong", None, 0)
    runner = doctest.DocTestRunner(verbose=False)
    runner.run(test, out=lambda _: None)
    assert runner.failures == 1


PROGRAMS = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.parametrize(
    ("program", "option", "given", "needs"),
    [
        *[("mixture_of_experts", name, 0, "a positive whole number") for name in ("--tokens", "--experts", "--each")],
        ("mixture_of_experts", "--tokens", -1, "a positive whole number"),
        ("mixture_of_experts", "--each", 9, "at most as many as --experts, 8"),
        ("mixture_of_experts", "--hidden", 64, "a positive multiple of 128"),
        ("mixture_of_experts", "--inner", 0, "a positive multiple of 64"),
        *[("jax_layer", name, 0, "a positive whole number") for name in ("--tokens", "--layers")],
        ("jax_layer", "--hidden", 100, "a positive multiple of 64"),
    ],
)
def test_sizes_for_which_a_program_has_no_result_are_refused(program, option, given, needs, monkeypatch, capsys):
    if program == "jax_layer":
        pytest.importorskip("jax")
    path = str(PROGRAMS / f"{program}.py")
    monkeypatch.setattr("sys.argv", [path, option, str(given)])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(path, run_name="__main__")
    assert capsys.readouterr().err.endswith(f"error: argument {option}: needs {needs}, got {given}\n")


@pytest.mark.parametrize(
    "framework",
    ["numpy", "torch", "jax", *(pytest.param(name, marks=pytest.mark.gpu) for name in ("cupy", "torch", "jax"))],
)
@pytest.mark.parametrize(("tokens", "experts"), [(64, 8), (3, 40)])
def test_the_mixture_of_experts(framework, tokens, experts, monkeypatch, capsys):
    """Random codes of E4M3 in two products and SiLU: an error of a wrong expert, row or share would be near 1."""
    pytest.importorskip(framework)
    path = str(PROGRAMS / "mixture_of_experts.py")
    options = {"--framework": framework, "--tokens": tokens, "--experts": experts}
    monkeypatch.setattr("sys.argv", [path, *(str(word) for option in options.items() for word in option)])
    runpy.run_path(path, run_name="__main__")
    rows, kernel, error = capsys.readouterr().out.splitlines()
    counts = [int(count) for count in rows.partition(": ")[2].split()]
    assert len(counts) == experts
    assert sum(counts) == 2 * tokens
    assert kernel.startswith("GroupedMm: ")
    assert 0.02 < float(error.split()[-1]) < 0.08
