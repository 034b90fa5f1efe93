"""Factors, their levels, and the combinations of levels that are refused or impossible."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations, product

#: Levels of each factor, the plainest first. Test names consist of these words.
FACTORS: dict[str, tuple[str, ...]] = {
    "model": ("llama", "qwen3_moe", "gpt_oss", "zamba2", "qwen2_5_vl", "gpt2"),
    "task": ("pretrain", "sft", "dpo", "kto", "orpo", "distill", "reward"),
    "adapters": ("full", "lora", "dora"),
    "base": ("plain", "nf4", "fp8", "mxfp4"),
    "optimizer": ("adamw", "adamw_bf16", "adamw_int8", "lion_int8", "sgd", "adafactor", "muon"),
    "precision": ("fp32", "bf16", "bf16_gradients"),
    "placement": ("ram", "least", "drive", "objects", "emulated", "cuda", "one_memory"),
    "recompute": ("full", "none", "selective"),
    "cut": ("whole", "parts", "experts", "mlp_rows"),
    "packing": ("rows", "packed", "concat"),
    "images": ("text", "frozen", "trained"),
    "ranks": ("alone", "2ranks", "2hosts"),
    "lanes": ("open", "1lane", "4lanes"),
    "clip": ("global", "layer", "none"),
    "checkpoints": ("unsaved", "resumed", "moved", "copied", "away"),
    "evaluation": ("blind", "scored", "sampled"),
    "average": ("bare", "averaged"),
    "order": ("by_layer", "by_micro_batch"),
    "reading": ("whole", "streamed"),
    "layers": ("eager", "compiled"),
    "kernels": ("torch", "liger"),
    "rates": ("one_rate", "layer_decay"),
}

Row = Mapping[str, str]


@dataclass(frozen=True)
class Exclusion:
    """Combination of incompatible levels.

    Attributes:
        levels: Incompatible levels, by factor.
        text: Part of the error message that refuses such a run, or "" if no such run is possible.
        why: Reason why no such run is possible, or "" if there is an error message.
        is_late: Whether the error comes from the first step instead of the start.
    """

    levels: Mapping[str, tuple[str, ...]]
    text: str = ""
    why: str = ""
    is_late: bool = False

    def holds(self, row: Row) -> bool:
        """Return whether a complete or partial row has this combination."""
        return all(row.get(factor) in levels for factor, levels in self.levels.items())


def refused(text: str, *, is_late: bool = False, **levels: str | tuple[str, ...]) -> Exclusion:
    """Return a combination that the program refuses with an error message."""
    found = {name: (each,) if isinstance(each, str) else each for name, each in levels.items()}
    return Exclusion(found, text=text, is_late=is_late)


def absent(why: str, **levels: str | tuple[str, ...]) -> Exclusion:
    """Return a combination that no run can have."""
    return Exclusion({name: (each,) if isinstance(each, str) else each for name, each in levels.items()}, why=why)


PREFERENCES = ("dpo", "kto", "orpo")
IMAGES = ("frozen", "trained")
ON_CPU = ("ram", "least", "drive", "objects", "emulated")
IN_SOFTWARE = ("cuda", "one_memory")
SEVERAL = ("2ranks", "2hosts")
TEXT_MODELS = ("llama", "qwen3_moe", "gpt_oss", "zamba2", "gpt2")

#: All combinations that the program refuses, with their error messages, and all impossible combinations.
EXCLUSIONS: tuple[Exclusion, ...] = (
    # model
    refused("does not read images", model=TEXT_MODELS, images=IMAGES),
    # task
    refused('needs conversations, but task = "pretrain"', task="pretrain", images=IMAGES),
    refused('task = "dpo" reads only text', task=PREFERENCES, images=IMAGES),
    refused('does not support task = "distill" with model.images', task="distill", images=IMAGES),
    refused("transformers has no class of it", model="qwen2_5_vl", task="reward"),
    refused('task = "reward" reads only text', task="reward", images=IMAGES),
    refused('with task = "reward" each text needs a separate row', task="reward", packing=("packed", "concat")),
    refused("generates text, which a model trained with", task="reward", evaluation="sampled"),
    refused('with task = "dpo" each text needs a separate row', task=PREFERENCES, packing=("packed", "concat")),
    refused('"concat" joins', task=("sft", "distill"), packing="concat"),
    # base
    refused("full-parameter training needs floating-point weights", adapters="full", base=("nf4", "fp8", "mxfp4")),
    refused("the weight of a Conv1D", model="gpt2", base="nf4"),
    absent(
        "mxfp4 is the format of gpt-oss' fused experts; transformers writes it for no other of these models",
        model=("llama", "qwen3_moe", "zamba2", "qwen2_5_vl", "gpt2"),
        base="mxfp4",
    ),
    absent("mxfp4 is of gpt-oss alone, which reads no images", base="mxfp4", images=IMAGES),
    absent("fp8 is made of nn.Linear, and GPT-2 has Conv1D", model="gpt2", base="fp8"),
    absent("mxfp4 is of gpt-oss alone, whose masks know no documents", base="mxfp4", packing="packed"),
    absent("mxfp4 is of gpt-oss alone, whose MLP hands on more than hidden states", base="mxfp4", cut="mlp_rows"),
    # packing
    # Masks ignore positions, so documents in a packed row would attend to each other, as in transformers.
    refused("Write data.packing = false", model="gpt_oss", packing="packed"),
    refused("may not keep apart the texts", model="qwen2_5_vl", packing=("packed", "concat")),
    refused("Write data.packing = false", model="zamba2", packing="packed"),
    refused("Write data.packing = false", images=IMAGES, packing="packed"),
    refused("needs conversations", images=IMAGES, packing="concat"),
    # cuts
    refused("no submodule of its layers computes each token by itself", model="gpt_oss", cut="mlp_rows"),
    refused("needs whole layers or matrices", cut="experts", optimizer=("adafactor", "muon")),
    refused("needs whole layers or matrices", cut="experts", clip="layer"),
    # ranks
    refused("needs whole matrices, and with", optimizer=("adafactor", "muon"), ranks=SEVERAL),
    refused("processes need at least one lane each", lanes="1lane", ranks=SEVERAL),
    refused("all micro-batches of a layer run before the next", order="by_micro_batch", ranks=SEVERAL),
    absent(
        "the device in software has no collectives between processes",
        placement=IN_SOFTWARE,
        ranks=SEVERAL,
    ),
    # order
    refused('needs advanced.micro_batch_order = "layer"', lanes="4lanes", order="by_micro_batch"),
    refused(
        "bfloat16 gradients cannot be summed over micro-batches", precision="bf16_gradients", order="by_micro_batch"
    ),
    # reading
    refused(
        'streaming is only for task = "sft" and "pretrain"',
        task=(*PREFERENCES, "distill", "reward"),
        reading="streamed",
    ),
    refused("data.streaming reads no images", images=IMAGES, reading="streamed"),
    # layers
    refused("needs whole layers or matrices", cut="experts", layers="compiled"),
    refused("runs a layer in pieces", cut="mlp_rows", layers="compiled"),
    refused("cannot compile its forward and backward as one graph", images=IMAGES, layers="compiled", is_late=True),
    absent("torch.compile knows no tensors of the device in software", placement=IN_SOFTWARE, layers="compiled"),
    # kernels
    refused("the kernels of model.use_liger_kernel need a GPU", placement=ON_CPU, kernels="liger"),
    refused('does not support task = "distill" with model.use_liger_kernel', task="distill", kernels="liger"),
    refused("liger-kernel has no kernels for", model=("zamba2", "gpt2"), kernels="liger"),
    absent("liger's kernels need a GPU, and the device in software has no collectives", ranks=SEVERAL, kernels="liger"),
    absent("liger's kernels need a GPU, and the one in software cannot compile", layers="compiled", kernels="liger"),
    # evaluation
    refused("supports only text in this release", images=IMAGES, evaluation="sampled"),
)


def is_excluded(row: Row) -> bool:
    """Return whether a complete or partial row has incompatible levels."""
    return any(each.holds(row) for each in EXCLUSIONS)


def all_pairs() -> list[dict[str, str]]:
    """Return every pair of levels of two different factors."""
    return [
        {first: one, second: other}
        for first, second in combinations(FACTORS, 2)
        for one, other in product(FACTORS[first], FACTORS[second])
    ]


def completed(part: Row, given: Row | None = None) -> dict[str, str] | None:
    """Return the plainest row with these levels that is not excluded, or None if every such row is excluded.

    Args:
        part: Levels that the row must have, by factor.
        given: Preferred levels of the other factors. Default: the plainest.
    """
    order = [*part, *(name for name in FACTORS if name not in part)]

    def extend(row: dict[str, str], number: int) -> dict[str, str] | None:
        if is_excluded(row):
            return None
        if number == len(order):
            return row
        name = order[number]
        levels = (part[name],) if name in part else FACTORS[name]
        if given is not None and name not in part:
            levels = (given[name], *(each for each in levels if each != given[name]))
        for level in levels:
            if (found := extend({**row, name: level}, number + 1)) is not None:
                return found
        return None

    return extend({}, 0)
