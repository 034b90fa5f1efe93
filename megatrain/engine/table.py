"""Config tables [precision] and [training]: number formats, the loss, and the size and number of steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, cast

from pydantic import Field

from megatrain.base.table import HF, Table, all_alter, explain, key

LaneCount = Annotated[
    Literal["auto"] | Annotated[int, Field(ge=1, le=1024)],
    explain("is not a number of lanes", 'Write a whole number from 1 to 1024, or "auto"'),
]


RecomputeMode = Literal["auto", "full", "selective", "none"]
_LAST_LAYERS = r"(selective|none):[1-9][0-9]{0,3}"
RecomputeText = Annotated[
    RecomputeMode | Annotated[str, Field(pattern=rf"^{_LAST_LAYERS}$", examples=["selective:4"])],
    explain(
        "is not a recompute mode",
        'Write "auto", "full", "selective" or "none"; "selective:4" and "none:4" apply only to the last 4 layers',
    ),
]


@dataclass(frozen=True, slots=True)
class RecomputeChoice:
    """Choice of the layers and operations that the backward recomputes.

    Attributes:
        mode: ``full`` recomputes every layer. ``selective`` saves results of matmuls and attention, and recomputes all
            other operations. ``none`` keeps the graphs of layers whose weights stay in place, and is ``selective`` for
            other layers. ``auto`` lets the plan choose, depending on memory and time.
        num_layers: Number of final layers that use ``mode``; the others use ``full``. None if all layers use ``mode``.
    """

    mode: RecomputeMode = "auto"
    num_layers: int | None = None

    @classmethod
    def parse(cls, text: str) -> RecomputeChoice:
        """Parse the value of ``training.recompute``."""
        mode, _, count = text.partition(":")
        return cls(cast("RecomputeMode", mode), int(count) if count else None)


class PrecisionConfig(Table, json_schema_extra=all_alter("yes")):
    """``[precision]``: number formats."""

    compute_dtype: Literal["auto", "float32", "bfloat16"] = key(
        "Data type that layers compute in; auto: bfloat16 with CUDA, float32 on the CPU.", "auto"
    )
    grad_dtype: Literal["float32", "bfloat16"] = key(
        "Data type of stored gradients. Sums always use float32; bfloat16 halves the bytes and rounds "
        "each sum once, to 8 bits of mantissa.",
        "float32",
    )


class TrainingConfig(Table):
    """``[training]``: size of a step and length of the run."""

    train_batch_tokens: int | None = key(
        "Tokens per optimizer step, a multiple of data.max_length. Replaces the next two keys. The step is "
        "split evenly into micro-batches of at most 8,192 tokens on a GPU and 2,048 on a CPU, and into at least one "
        "micro-batch per gradient lane if there are enough rows. Checkpoints record this split, and a resumed run "
        "keeps it.",
        None,
        ge=2,
        alters="yes",
    )
    per_device_train_batch_size: int = key(
        "Rows per micro-batch; with dpo, examples of two rows.", 8, ge=1, alters="yes", same_name=HF
    )
    gradient_accumulation_steps: int = key("Micro-batches per optimizer step.", 1, ge=1, alters="yes", same_name=HF)
    gradient_lanes: LaneCount = key(
        "Number of lanes of a step. Micro-batches are summed in order within a lane, and a fixed tree adds the "
        "lanes. Results are bit-identical for any number of processes up to this number. auto: the number of "
        "processes at the first start, recorded in checkpoints. 1: one ordered sum, as in plain PyTorch.",
        "auto",
        alters="yes",
    )
    recompute: RecomputeText = key(
        "Work recomputed in the backward. full: every layer, with the least memory. selective: all operations except "
        "matrix products and attention, whose results are saved with the activations. none: nothing in layers "
        "whose weights stay in the compute tier, because their graphs are kept; selective in other layers. auto: "
        'the plan\'s choice. "selective:4" and "none:4" apply only to the last 4 layers. Compiled layers save no '
        "results.",
        "auto",
        alters="no",
    )
    num_train_epochs: float = key("Passes over the data.", 1.0, gt=0, alters="yes", same_name=HF)
    max_steps: int = key(
        "Number of optimizer steps; overrides num_train_epochs. -1: not set.", -1, ge=-1, alters="yes", same_name=HF
    )
    label_smoothing_factor: float = key(
        "Share of each target that is spread evenly over the vocabulary. Not used in evaluations.",
        0.0,
        ge=0,
        lt=1,
        alters="yes",
        same_name=HF,
    )
    z_loss: float = key(
        "z-loss: adds this factor times the squared log-sum-exp of the logits to each token's loss, which limits "
        "the drift of logits; PaLM used 1e-4. 0: none. Not used in evaluations.",
        0.0,
        ge=0,
        alters="yes",
    )
    neftune_noise_alpha: float = key(
        "NEFTune: uniform noise on the input embeddings of at most this value / sqrt(tokens in a row x width). 0:"
        " none.",
        0.0,
        ge=0,
        alters="yes",
        same_name=HF,
    )
