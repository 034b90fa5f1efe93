"""Rates of layers on the CPU, fitted to the step times of small models that the engine runs.

In a step, a matrix product reads its weight from RAM instead of the caches, allocates its result, and waits for threads
of other operators. A product timed in isolation takes a fifth less time, so this module does not time individual
operators. Instead, it fits the rates to the measured seconds of forwards, heads and backwards.
"""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatrain.api import load_config, measure_ticks, plan_run, resolve, work_of_phases

__all__ = ["SHAPES", "LayerRates", "LayerShape", "fit_costs", "measure_layers"]

_DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True, slots=True)
class LayerRates:
    """Rates of layers on the CPU, with the threads of a run. Dtypes whose times are too short for a fit are left out.

    Attributes:
        matmul_flops: FLOP/s of matrix products, by dtype.
        attention_flops: FLOP/s of fused attention by dtype, counting the token pairs of a causal kernel.
        elementwise: Bytes per second that all other operators read and write, by dtype.
        launches_per_s: Operator calls per second of one thread, including the Python code of a step.
    """

    matmul_flops: Mapping[str, float]
    attention_flops: Mapping[str, float]
    elementwise: Mapping[str, float]
    launches_per_s: float


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Sizes of a Llama model and a micro-batch in which one kind of work dominates the time.

    Attributes:
        mlp_size: Width of the MLP.
        num_rows: Rows of the micro-batch.
    """

    hidden_size: int
    mlp_size: int
    num_layers: int
    vocabulary: int
    num_rows: int
    row_tokens: int


SHAPES = (
    LayerShape(64, 64, 4, 64, 1, 8),  # launches dominate
    LayerShape(768, 2048, 1, 2048, 1, 256),  # matrix products dominate
    LayerShape(256, 640, 1, 512, 1, 1536),  # attention dominates
    LayerShape(128, 384, 2, 512, 8, 256),  # all other operators dominate
)
_HEAD_WIDTH = 64
_CONFIG = """
task = "pretrain"
device = "cpu"
output_dir = "{folder}/out"
[model]
model_name_or_path = "{folder}"
train_from_scratch = true
attn_implementation = "sdpa"
[precision]
compute_dtype = "{dtype}"
[data]
max_length = {row_tokens}
packing = true
[[data.train]]
path = "{folder}/text.txt"
[training]
per_device_train_batch_size = {num_rows}
recompute = "full"
[tiers.ram]
size = "2GiB"
"""


def measure_layers(*, seconds: float, shapes: Sequence[LayerShape] = SHAPES) -> LayerRates:
    """Time steps of small models in each dtype, and return the rates that explain the times.

    Args:
        seconds: Approximate time for the steps of one model; ``measure_ticks`` sets the minimum number of repetitions.
        shapes: Models to time. Each kind of work needs a model that it dominates, or its rate is undetermined.

    Raises:
        NotMeasurableError: The RAM is too small.
    """
    dtype_costs = {
        dtype: fit_costs([phase for shape in shapes for phase in _measure_phases(shape, dtype, seconds)])
        for dtype in _DTYPES
    }

    def get_rates(kind: int) -> dict[str, float]:
        return {dtype: 1 / costs[kind] for dtype, costs in dtype_costs.items() if costs[kind]}

    launches = next(iter(get_rates(3).values()), 0.0)
    return LayerRates(get_rates(0), get_rates(1), get_rates(2), launches)


def fit_costs(phases: Sequence[tuple[float, Sequence[float]]]) -> list[float]:
    """Return the nonnegative seconds per unit of each kind of work; 0 for a kind without influence on the times.

    The function minimizes the squares of relative errors, so that a short phase has the same weight as a long phase.

    Args:
        phases: `(seconds, amounts of work by kind)` of each phase.
    """
    work = np.array([[amount / taken_s for amount in amounts] for taken_s, amounts in phases])
    max_work, best_costs, min_error = work.max(axis=0), np.zeros(work.shape[1]), np.inf
    used_kinds = np.flatnonzero(max_work)  # the cost of a kind without work is undetermined
    # The nonnegative least-squares solution is the unconstrained solution for one of the 15 subsets of kinds.
    for kinds in itertools.chain.from_iterable(
        itertools.combinations(used_kinds, count) for count in range(1, len(used_kinds) + 1)
    ):
        scaled_work = work[:, kinds] / max_work[list(kinds)]
        costs = np.linalg.lstsq(scaled_work, np.ones(len(work)), rcond=None)[0]
        error = float(np.linalg.norm(scaled_work @ costs - 1))
        if costs.min() > 0 and error < min_error:
            min_error, best_costs = error, np.zeros(work.shape[1])
            best_costs[list(kinds)] = costs / max_work[list(kinds)]
    return [float(cost) for cost in best_costs]


def _measure_phases(shape: LayerShape, dtype: str, seconds: float) -> Iterator[tuple[float, Sequence[float]]]:
    """Yield the seconds, and the amounts of work by kind, of a step's forward, head and backward."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(_model_config(shape)), encoding="utf-8")
        config = Path(folder, "run.toml")
        batch = {"num_rows": shape.num_rows, "row_tokens": shape.row_tokens}
        config.write_text(_CONFIG.format(folder=folder, dtype=dtype, **batch), encoding="utf-8")
        plan = plan_run(resolve(load_config(config).config))
        ticks = measure_ticks(plan, budget_s=seconds)
    phase_s: dict[str, float] = {}
    for tick, tick_s in zip(plan.program.ticks, ticks.seconds, strict=True):
        phase_s[tick.phase] = phase_s.get(tick.phase, 0.0) + tick_s
    for phase, work in work_of_phases(plan).items():
        attention = work.attention_flops - work.skipped_flops
        yield phase_s[phase], (work.product_flops, attention, work.moved_nbytes, work.launches)


def _model_config(shape: LayerShape) -> dict[str, object]:
    num_heads = shape.hidden_size // min(_HEAD_WIDTH, shape.hidden_size)
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.mlp_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": shape.row_tokens,
        "tie_word_embeddings": False,
    }
