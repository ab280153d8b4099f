"""The benchmarks that `python -m bench` runs, by name, with their arguments."""

from typing import Final, NamedTuple


class Subject(NamedTuple):
    """A benchmark: its module, its arguments, those of its short form, and its options and requirements."""

    module: str
    what: str
    arguments: tuple[str, ...] = ()
    short: tuple[str, ...] = ()
    baselines: bool = True
    gpu: bool = True
    compiles: bool = False
    deep_gemm: bool = False
    goes_on: bool = False
    """Whether it can leave out cases that an earlier run has timed."""
    framework: str = "torch"
    """The framework of its arrays on a GPU."""


def _arguments(text: str) -> tuple[str, ...]:
    return tuple(text.split())


SUBJECTS: Final[dict[str, Subject]] = {
    "quantize": Subject(
        "bench.quantize",
        "quantization beside a copy of as many bytes",
        short=_arguments("--shapes 1x4096 4096x4096"),
        compiles=True,
        goes_on=True,
    ),
    "odd": Subject(
        "bench.odd",
        "quantization of odd shapes",
        short=_arguments("--modes token --types bfloat16"),
        baselines=False,
        goes_on=True,
    ),
    "fused": Subject(
        "bench.fused",
        "RMS norm and SiLU with quantization",
        short=_arguments("--shapes 1x4096 4096x4096"),
        goes_on=True,
    ),
    "weights": Subject(
        "bench.weights", "operations on stored weights", short=_arguments("--shapes 6144x4096"), baselines=False
    ),
    "decode": Subject(
        "bench.decode",
        "products of few rows",
        arguments=_arguments("--modes tensor row block"),
        short=_arguments("--modes row --shapes 6144x4096 --m 1 16"),
        goes_on=True,
    ),
    "crossover": Subject(
        "bench.decode",
        "products by number of rows, across kernels",
        arguments=_arguments(
            "--modes row block --shapes 4096x4096 8192x8192 --m 1 2 3 4 7 8 16 17 32 48 64 65 96 128 192 256"
        ),
        short=_arguments("--modes row --shapes 4096x4096 --m 32 64 128"),
        goes_on=True,
    ),
    "products": Subject(
        "bench.decode",
        "products of many rows",
        arguments=_arguments(
            "--modes tensor row block --shapes 6144x4096 28672x4096 8192x8192 7168x16384 --m 512 4096 --replays 10"
        ),
        short=_arguments("--modes row --shapes 6144x4096 --m 512"),
        deep_gemm=True,
        goes_on=True,
    ),
    "models": Subject(
        "bench.decode",
        "products of many rows in DeepSeek-V3, Qwen3-32B and Llama",
        arguments=_arguments(
            "--modes row block --m 128 384 1024 4096 --replays 6 --shapes 2112x7168 24576x1536 4096x7168 7168x2048"
            " 36864x7168 10240x5120 5120x8192 5120x25600 4096x14336"
        ),
        short=_arguments("--modes row --shapes 2112x7168 --m 384"),
        deep_gemm=True,
        goes_on=True,
    ),
    "grouped": Subject(
        "bench.grouped",
        "grouped products of mixtures of experts",
        short=_arguments("--models Qwen3-30B --tokens 1 128"),
        deep_gemm=True,
        goes_on=True,
    ),
    "moe": Subject(
        "bench.moe",
        "routing of mixtures of experts",
        short=_arguments("--models Qwen3-30B --tokens 1 128"),
        goes_on=True,
    ),
    "ending": Subject(
        "bench.ending",
        "products with an activation or beta",
        arguments=_arguments("--shapes 14336x4096"),
        short=_arguments("--shapes 14336x4096 --m 16 512 --modes row"),
        baselines=False,
        goes_on=True,
    ),
    "odd_products": Subject(
        "bench.odd_products",
        "products of odd shapes beside aligned ones",
        short=_arguments("--no-list --drawn 2"),
        baselines=False,
        goes_on=True,
    ),
    "invariance": Subject(
        "bench.invariance",
        "products without and with batch_invariant",
        short=_arguments("--modes row --shapes 4096x4096 --m 16"),
        baselines=False,
    ),
    "linear": Subject(
        "bench.linear",
        "whole linear layers of few rows",
        short=_arguments("--shapes 4096x4096 --m 1 16"),
        goes_on=True,
    ),
    "layer": Subject(
        "bench.layer",
        "the linear path of decoder layers, on the GPU",
        short=_arguments("--models Llama-8B --m 1"),
        goes_on=True,
    ),
    "jax_layer": Subject(
        "bench.jax_layer",
        "decoder layers of Llama 8B under jax.jit",
        short=_arguments("--m 1"),
        baselines=False,
        framework="jax",
    ),
    "hf_decoder": Subject(
        "bench.hf_decoder",
        "four layers of Qwen3-8B in transformers, one token, in a graph and eager",
        short=_arguments("--layers 1 --batch 1"),
        baselines=False,
    ),
    "hf_experts": Subject(
        "bench.hf_experts",
        "the experts of a layer of Qwen3-30B-A3B in transformers, in a graph and eager",
        short=_arguments("--tokens 16"),
        baselines=False,
    ),
    "choice": Subject(
        "bench.choice",
        "every candidate of many products, beside the choice without tuning",
        short=_arguments("--modes row --seconds 5"),
        baselines=False,
        framework="cupy",
    ),
    "accuracy": Subject(
        "bench.accuracy",
        "the error of every kernel of products by k",
        short=_arguments("--k 512"),
        baselines=False,
    ),
    "first_call": Subject("bench.first_call", "the first call of a fresh process", baselines=False),
    "host": Subject("bench.host", "host time of each public function", gpu=False),
    "engine": Subject(
        "bench.engine", "the host engine", short=_arguments("--rows 256 --cols 1024"), baselines=False, gpu=False
    ),
}
AGAINST: Final = Subject(
    "bench.against", "public calls of two checkouts", short=_arguments("--short"), baselines=False, gpu=False
)
