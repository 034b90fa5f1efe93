"""Warnings about settings that a config permits but users rarely intend. No warning stops a run.

The bounds are rules of thumb, explained in docs/decisions. They are wide enough for published recipes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from megatrain.converters.fused import find_fused
from megatrain.models.graph import num_learned_positions

if TYPE_CHECKING:
    from megatrain.converters.spec import ModelSpec
    from megatrain.models.graph import ModelGraph
    from megatrain.optim.table import OptimizerConfig

__all__ = ["model_warnings"]

#: Models below this size, as in tests and demonstrations, get the bounds for training from scratch.
_SMALL_MODEL_PARAMETERS = 50_000_000
_LORA_FACTOR = 10  # adapters usually train best at about ten times the rate of all parameters


@dataclass(frozen=True, slots=True)
class _LearningRates:
    """Plausible peak learning rates for an optimizer that trains all parameters."""

    min_rate: float
    max_rate: float
    max_rate_from_scratch: float


_RATES = {
    "adamw": _LearningRates(1e-8, 5e-4, 1e-2),
    "adafactor": _LearningRates(1e-8, 5e-4, 1e-2),  # without scale_parameter, so its updates are as large as AdamW's
    "lion": _LearningRates(1e-9, 1e-4, 3e-3),
    "sgd": _LearningRates(1e-6, 1.0, 10.0),
    "muon": _LearningRates(1e-8, 5e-2, 1e-1),  # wide, because muon_adjust_lr = "original" needs much larger rates
}


def model_warnings(model: ModelSpec, max_length: int, optimizer: OptimizerConfig, graph: ModelGraph) -> Iterator[str]:
    """Yield a warning for each setting that does not suit the model, for example an implausible learning rate."""
    yield from _position_warning(graph, max_length, from_scratch=model.table.train_from_scratch)
    width = getattr(graph.config.get_text_config(), "hidden_size", None)
    if model.lora is not None and isinstance(width, int) and model.lora.r > width:
        yield (
            f"lora.r = {model.lora.r} is more than the model's hidden_size = {width}: adapters are larger than the "
            "matrices that they change"
        )
    is_new = model.table.train_from_scratch or graph.num_parameters < _SMALL_MODEL_PARAMETERS
    for key, rate in optimizer.learning_rates.items():
        yield from _rate_warning(key, rate, optimizer.optim, is_new=is_new, has_lora=model.lora is not None)
    if optimizer.optim == "muon" and optimizer.muon_fused != "whole":
        yield from _fused_warning(graph, optimizer)


def _fused_warning(graph: ModelGraph, optimizer: OptimizerConfig) -> Iterator[str]:
    """Yield a warning if parameters seem to contain several fused matrices that this project cannot split."""
    _, unknown = find_fused(graph)
    unsplit = [name for name in unknown if not any(fnmatchcase(name, glob) for glob in optimizer.muon_exclude)]
    products = dict.fromkeys(name.removesuffix(".weight").rpartition(".")[2] for name in unsplit)
    if unsplit:
        globs = ", ".join(f'"*.{product}*"' for product in products)
        yield (
            f"Muon orthogonalizes {unsplit[0]} as one matrix ({len(unsplit)} such parameters). Its name suggests that "
            "it contains several matrices. To train these parameters with AdamW, set optimizer.muon_exclude = "
            f"[{globs}]"
        )


def _position_warning(graph: ModelGraph, length: int, *, from_scratch: bool) -> Iterator[str]:
    positions = getattr(graph.config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(positions, int) or not 1 < positions < length or num_learned_positions(graph) is not None:
        return  # the plan already rejects rows that are longer than learned position embeddings
    text = f"data.max_length = {length}, but the model's config.json has max_position_embeddings = {positions}"
    if from_scratch:
        yield f"{text}. Other programs may truncate rows there. Use at most {positions}, or raise it in config.json"
    else:
        yield (
            f"{text}, so it was not trained on later positions. Use at most {positions}, or set its rope scaling in "
            "config.json"
        )


def _rate_warning(key: str, rate: float, optim: str, *, is_new: bool, has_lora: bool) -> Iterator[str]:
    bounds = _RATES.get(optim)
    if bounds is None:
        return  # no bounds are known for optimizers from other packages
    max_rate = _LORA_FACTOR * bounds.max_rate if has_lora else bounds.max_rate
    highest = bounds.max_rate_from_scratch if is_new else max_rate
    text = f'{key} = {rate:g} is implausible for optim = "{optim}"'
    if rate > highest:
        condition = " of adapters" if has_lora else "" if is_new else " of a trained model with all its parameters"
        yield f"{text}: training{condition} usually diverges above {highest:g}. Use a smaller value"
    elif rate < bounds.min_rate:
        yield f"{text}: the weights hardly change below {bounds.min_rate:g}. Use a larger value"
