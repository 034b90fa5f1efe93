"""Config tables [placement] and [advanced]: homes by kind of block, and options for measurements."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import BeforeValidator, Field, PlainSerializer, WithJsonSchema

from megatrain.base.sizes import SIZE_SCHEMA, dump_size
from megatrain.base.table import PlainSize, Table, all_alter, as_tuple, explain, key, parse_bytes
from megatrain.machine.table import TierName


def _parse_placement(value: object) -> object:
    """Accept "auto", one tier, or several tiers in order of preference."""
    if isinstance(value, str) and value != "auto":
        return (value,)
    return as_tuple(value)


def _parse_prefetch(value: object) -> object:
    """Parse "auto", "unlimited", 0 or a size in bytes."""
    if value in ("auto", "unlimited") or (isinstance(value, int) and value == 0 and not isinstance(value, bool)):
        return value
    if isinstance(value, str) and value.strip() == "0":
        return 0
    return parse_bytes(value)


_TIER = {"type": "string", "enum": list(get_args(TierName))}
Preference = Annotated[
    Literal["auto"] | Annotated[tuple[TierName, ...], Field(min_length=1)],
    BeforeValidator(_parse_placement),
    WithJsonSchema({"anyOf": [{"const": "auto"}, _TIER, {"type": "array", "items": _TIER, "minItems": 1}]}),
    explain("is not a placement", 'Write "auto" or tiers in order of preference: ["ram", "nvme"]'),
]
PrefetchSize = Annotated[
    Literal["auto", "unlimited"] | Annotated[int, Field(ge=0)],
    BeforeValidator(_parse_prefetch),
    PlainSerializer(lambda value: value if isinstance(value, str) else dump_size(value) if value else "0"),
    WithJsonSchema({"anyOf": [{"enum": ["auto", "unlimited", "0", 0]}, SIZE_SCHEMA]}),
]
GroupCount = Annotated[
    Literal["auto"] | Annotated[int, Field(ge=0)],
    explain("is not a number of groups", 'Write a whole number at least 0, or "auto"'),
]


class PlacementConfig(Table, json_schema_extra=all_alter("no")):
    """``[placement]``: for each kind of bytes, "auto" or tiers in order of preference."""

    weights: Preference = key(
        'Parameters in the compute dtype. "folder": frozen parameters are read from the model\'s folder at each '
        "use; with auto, this applies to frozen parameters that do not fit in RAM.",
        "auto",
    )
    gradients: Preference = key("Gradient sums.", "auto")
    optimizer: Preference = key("Optimizer state, and the low halves of bf16 parameters.", "auto")
    activations: Preference = key("Inputs of layers, kept for the recompute.", "auto")


class AdvancedConfig(Table, json_schema_extra=all_alter("no")):
    """``[advanced]``: options for measurements. They do not affect results."""

    prefetch: PrefetchSize = key('Maximum number of prefetched bytes: "auto", "0", "2GiB" or "unlimited".', "auto")
    eviction_policy: Literal["schedule", "lru"] = key("Order of eviction from a full tier.", "schedule")
    file_size: PlainSize | None = key(
        'Maximum size of a file of a block: "16MiB". Not set: 512 MiB; stripes 16 MiB.', None, ge=4096, multiple_of=4096
    )
    micro_batch_order: Literal["auto", "layer", "micro_batch"] = key(
        "layer: each layer runs all micro-batches before the next layer. micro_batch: a step runs one micro-batch at "
        "a time and keeps the activations of only one. auto: layer, but micro_batch if weights and fp32 gradient "
        "sums stay in the compute tier, no drive is used, and the plan predicts a shorter step.",
        "auto",
    )
    stream_updates: GroupCount = key(
        "With a GPU: number of groups (weights with their state in RAM) that are fetched part by part and updated"
        " in GPU memory, while the CPU updates the others. auto: the number that balances both, if measured rates"
        " predict a shorter step; 0: none.",
        "auto",
    )
    emulate_gpu: bool = key(
        'With device = "cpu": replace GPU memory by a second part of RAM of size tiers.gpu.size. The CPU computes. '
        "For tests and for trying a setup.",
        False,
    )

    @property
    def has_open_order(self) -> bool:
        """Whether the planner may choose the order of micro-batches."""
        return self.micro_batch_order == "auto"

    @property
    def prefetch_bytes(self) -> int | None:
        """Maximum number of prefetched bytes; None if only memory limits prefetching."""
        return self.prefetch if isinstance(self.prefetch, int) else None
