"""The work that a trace counts for a layer matches a count by hand from the layer's formulas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatrain.converters.spec import build_graph
from megatrain.engine.device.work import Work, moved_nbytes
from megatrain.trace.trace import trace_visits
from oracles.families import tiny_config

ROWS, LENGTH = 2, 16
FLOAT = 4

Step = tuple[int, int]  # numbers read and written, and number of operators


def total(*steps: Step) -> Step:
    return sum(numbers for numbers, _ in steps), sum(launches for _, launches in steps)


def test_llama_layer_work_matches_a_hand_count() -> None:
    """Count forward and backward of x + A(norm(x)) and then of x + M(norm(x)), operator by operator."""
    config = tiny_config("llama", tied=False, num_key_value_heads=2)
    graph = build_graph(config, attn_implementation="sdpa")
    trace = trace_visits(graph, ROWS, LENGTH, torch.float32, padded=False)
    layer = next(visit for visit in trace.visits if graph.units[visit.unit].name == "model.layers.1")

    tokens, width, inner = ROWS * LENGTH, config.hidden_size, config.intermediate_size
    heads, key_heads, head_width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    stream, middle = tokens * width, tokens * inner
    queries, keys = tokens * heads * head_width, tokens * key_heads * head_width
    table = LENGTH * head_width  # elements of the cosine table, and of the sine table; all rows and heads share them

    # In order: squares, mean, + epsilon, 1 / root, product with 1 / root, product with the weight.
    norm = total(
        (2 * stream, 1), (stream + tokens, 1), (2 * tokens, 1), (2 * tokens, 1),
        (2 * stream + tokens, 1), (2 * stream + width, 1),
    )  # fmt: skip

    def rotary(numbers: int) -> Step:
        """Count x * cos + rotated(x) * sin. Rotating negates one half of x and puts it before the other half."""
        times_table = (2 * numbers + table, 1)
        return total(times_table, (numbers, 1), (2 * numbers, 1), times_table, (3 * numbers, 1))

    residual = (3 * stream, 1)
    products = (0, 7)
    fused = (0, 1)
    silu, gated = (2 * middle, 1), (3 * middle, 1)
    forward = total(
        norm, rotary(queries), rotary(keys), fused, residual, norm, silu, gated, residual, products
    )  # fmt: skip
    kept_input = (2 * stream, 1)

    # The weight's gradient is the gradient times the normalized input, summed over tokens. The input's gradient has two
    # paths: the product with 1 / root, and 1 / root itself (-1/2 root^-3, the mean, the square). The stream's gradient
    # is added.
    norm_backward = total(
        (2 * stream + width, 1), (3 * stream, 1), (stream + width, 1),
        (3 * stream, 1), (2 * stream + tokens, 1), (stream + tokens, 1), (3 * stream, 1),
        (2 * tokens, 1), (2 * tokens, 1), (3 * tokens, 1), (stream + tokens, 1),
        (2 * stream, 1), (2 * stream, 1), (3 * stream, 1), (3 * stream, 1),
        (2 * width, 1),  # copying the weight's gradient into its block
    )  # fmt: skip

    def rotary_backward(numbers: int) -> Step:
        """Count the gradient through the cosines, and both halves' gradients, each padded with zeros and then added."""
        times_table, half = (2 * numbers + table, 1), (3 * numbers // 2, 1)
        return total(times_table, (numbers, 1), half, half, (3 * numbers, 1), times_table, (3 * numbers, 1))

    tokens_first = total((2 * queries, 1), (2 * keys, 1))  # gradients of queries and keys arrive with heads first
    backward = total(
        forward, (stream, 0),  # the recompute, in which a fill replaces the last product
        norm_backward, gated, gated, (3 * middle, 1), (3 * stream, 1),  # gradients of gate and up are added
        norm_backward, rotary_backward(queries), rotary_backward(keys), tokens_first, fused,
        (3 * stream, 1), (3 * stream, 1),  # gradients of queries, keys and values are added
        products, products,
    )  # fmt: skip

    weights = 2 * width * heads * head_width + 2 * width * key_heads * head_width + 3 * width * inner
    pairs = ROWS * heads * LENGTH * LENGTH * head_width
    attention, attention_backward = 2 * 2 * pairs, 5 * 2 * pairs
    numbers, launches = total(forward, kept_input)
    assert layer.forward == Work(2 * weights * tokens, attention, attention // 2, FLOAT * numbers, launches)
    numbers, launches = backward
    in_attention = attention + attention_backward
    multiplied = (6 * weights - 2 * width * inner) * tokens
    assert layer.backward == Work(multiplied, in_attention, in_attention // 2, FLOAT * numbers, launches)
    assert layer.attention.work == Work(0, attention, attention // 2, 0, 1)


def test_head_work_is_extrapolated_from_its_first_pieces() -> None:
    """Work that depends on rows of logits grows with the rows, and every piece has the same number of launches."""
    graph = build_graph(tiny_config("llama", tied=False))
    few, many = (
        trace_visits(graph, rows, LENGTH, torch.float32, head_rows=LENGTH, padded=False).head for rows in (2, 6)
    )
    assert many.launches == 3 * few.launches
    assert many.product_flops == 3 * few.product_flops
    # Zeroing a whole gradient moves bytes that are not proportional to the rows.
    assert many.moved_nbytes == pytest.approx(3 * few.moved_nbytes, rel=0.1)


class Moved(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode that records the number of bytes that each operator reads and writes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        nbytes = moved_nbytes(func, args, kwargs or {}, result)
        self.found += [] if nbytes is None else [nbytes]
        return result


ROW, TABLE, AT = torch.zeros(8), torch.zeros(100, 8), torch.tensor([3, 5])


CALLS: dict[str, tuple[Any, list[int]]] = {
    "empty": (lambda: torch.empty(50), []),
    "views": (lambda: TABLE.t().reshape(8, 100).unsqueeze(0).expand(4, 8, 100), []),
    "zeros": (lambda: torch.zeros(50), [50 * 4]),
    "zeros of a shape": (lambda: torch.zeros_like(TABLE), [3200]),
    "add": (lambda: TABLE + ROW, [3200 + 32 + 3200]),
    "expanded": (lambda: ROW.expand(100, 8) + TABLE, [32 + 3200 + 3200]),
    "concatenate": (lambda: torch.cat([TABLE, TABLE]), [2 * 3200 + 6400]),
    "copy": (lambda: torch.zeros(8).copy_(ROW), [32, 32 + 32]),
    "in place": (lambda: torch.zeros(8).add_(ROW), [32, 32 + 32 + 32]),
    "out": (lambda: torch.add(ROW, ROW, out=torch.empty(8)), [32 + 32 + 32]),
    "embedding": (lambda: torch.nn.functional.embedding(AT, TABLE), [64 + 16 + 64]),
    "look rows up": (lambda: TABLE.index_select(0, AT), [64 + 16 + 64]),
    "add rows": (lambda: torch.zeros(100, 8).index_add_(0, AT, torch.zeros(2, 8)), [3200, 64, 3 * 64]),
}


@pytest.mark.parametrize(("call", "nbytes"), CALLS.values(), ids=CALLS)
def test_bytes_read_and_written_by_operators(call: Any, nbytes: list[int]) -> None:
    with Moved() as moved:
        assert isinstance(call(), Tensor)
    assert moved.found == nbytes
