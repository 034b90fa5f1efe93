"""Check, on a small copy of a model, that the documents of a packed row are computed separately.

In a packed row, positions start again at each document. Attention respects this boundary if the model passes positions
to the mask. Recurrences, scans and short convolutions usually carry their state across the boundary. Some attention
also ignores the boundary (distance biases, masks built without positions). transformers does not declare which models
separate documents. The check therefore compares a document's logits alone and after another document.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

from megatrain.base.errors import UnsupportedModelError
from megatrain.models.folder import ModelFolderError
from megatrain.models.passthrough import passthrough_modules
from megatrain.models.small import small_model

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig, PreTrainedModel

    from megatrain.converters.spec import ModelSpec
    from megatrain.models.graph import ModelGraph

__all__ = ["choose_model_packing", "choose_packing", "find_mixing_reason"]

PackingMode = bool | Literal["concat"]

_STATE_REASON = "it carries state from one document of a row into the following one"
_IMAGE_REASON = "rows with images have special positions and masks"
_MIXING_REASON = "it may not keep apart the texts that share a row"

_DOCUMENT_LENGTHS = (37, 41)  # lengths of both documents, longer than a small copy's attention window
_NUM_ROWS = 4  # in a single row, the chosen experts or keys could be equal by chance
_FIRST_TOKEN = 3  # lower ids are usually special tokens
#: Tolerance relative to the largest logit. Summation order changes logits by at most 1e-5, mixing by at least 1e-3.
_TOLERANCE = 1e-4
_FEW_LAYERS, _MANY_LAYERS = 3, 16  # layers in the copy; 16 if the first 3 do not contain all module classes

_reasons: dict[object, str | None] = {}  # cache, because a planner checks the same model for each alternative


def choose_packing(
    model: ModelSpec, graph: ModelGraph, packing: PackingMode, *, is_default: bool
) -> tuple[PackingMode, str]:
    """Return a packing mode that the model supports, and a warning if default packing is turned off, else "".

    "concat" does not separate texts, so every text model supports it.

    Args:
        is_default: Whether the config leaves the packing mode at its default.

    Raises:
        UnsupportedModelError: If the config sets packing, but the model would mix documents.
    """
    if packing and model.table.images != "off":
        if is_default:
            return False, _off_warning(type(graph.model).__name__, _IMAGE_REASON)
        raise UnsupportedModelError(type(graph.model).__name__, f"{_IMAGE_REASON}. Write data.packing = false")
    if not packing or (packing == "concat" and passthrough_modules(graph.model) is None):
        return packing, ""
    problem = find_mixing_reason(graph, model.table.attn_implementation)
    if problem is None:
        return packing, ""
    name = type(graph.model).__name__
    if not is_default:
        raise UnsupportedModelError(name, f"{problem}. Write data.packing = false")
    return False, _off_warning(name, problem)


def _off_warning(name: str, problem: str) -> str:
    return (
        f"data.packing, on by default, is off, with one document per row: {name}: {problem}. "
        "Write data.packing = false to silence this warning"
    )


def choose_model_packing(model: ModelSpec, packing: PackingMode, *, is_default: bool) -> tuple[PackingMode, str]:
    """Build the model and return the result of `choose_packing`. If the model cannot be used, return ``packing``."""
    if not packing:
        return packing, ""
    try:
        return choose_packing(model, model.build(torch.float32), packing, is_default=is_default)
    except (UnsupportedModelError, ModelFolderError):
        return packing, ""


def find_mixing_reason(graph: ModelGraph, attn_implementation: str) -> str | None:
    """Return the reason why a model may mix the documents of a row, or None if it computes them separately.

    The check runs on the CPU, so it also returns a reason for a model that separates documents only on a GPU.

    Args:
        graph: Graph of the model, without weights.
        attn_implementation: Attention implementation of transformers, or "auto".
    """
    if passthrough_modules(graph.model) is not None:
        # The small copy is a text model, so image modules cannot be checked.
        return f"as it also reads images, {_MIXING_REASON}"
    attention = "auto" if attn_implementation.startswith("flash") else attn_implementation  # flash needs a GPU
    class_names = _module_classes(graph.model)
    key = (type(graph.config), graph.config.to_json_string(use_diff=False), attention, frozenset(class_names))
    if key not in _reasons:
        _reasons[key] = _check_small_copy(graph.config, attention, class_names)
    return _reasons[key]


def _check_small_copy(config: PretrainedConfig, attention: str, class_names: set[str]) -> str | None:
    for num_layers in (_FEW_LAYERS, _MANY_LAYERS):
        try:
            model = small_model(config, attention, seed=0, num_layers=num_layers).eval()
        except UnsupportedModelError as error:
            return f"{_MIXING_REASON}: that cannot be tried, as {error.problem.partition('. ')[0]}"
        missing = class_names - _module_classes(model)
        if not missing:
            break
    try:
        is_separate = _has_separate_documents(model)
    except Exception as error:  # each class raises different errors
        return f"{_MIXING_REASON}: that cannot be tried ({type(error).__name__}: {error})"
    if not is_separate:
        return _STATE_REASON
    if missing:
        return f"{_MIXING_REASON}: the small copy on which that is tried has no {', '.join(sorted(missing))}"
    return None


def _has_separate_documents(model: PreTrainedModel) -> bool:
    """Return whether a document has the same logits alone and after another document."""
    generator = torch.Generator().manual_seed(0)
    vocab_size = model.get_input_embeddings().weight.shape[0]
    max_positions = getattr(model.config, "max_position_embeddings", None)
    # Limit the lengths, because the masks of some models support only a limited number of positions.
    max_length = max_positions // 2 if isinstance(max_positions, int) else max(_DOCUMENT_LENGTHS)
    other_document, document = (
        torch.randint(_FIRST_TOKEN, vocab_size, (_NUM_ROWS, min(n, max_length)), generator=generator)
        for n in _DOCUMENT_LENGTHS
    )
    packed_logits = _compute_logits(model, other_document, document)[:, other_document.shape[1] :]
    single_logits = _compute_logits(model, document)
    return bool((packed_logits - single_logits).abs().max() <= _TOLERANCE * single_logits.abs().max())


def _compute_logits(model: PreTrainedModel, *documents: Tensor) -> Tensor:
    positions = torch.cat([torch.arange(document.shape[1]) for document in documents]).repeat(_NUM_ROWS, 1)
    with torch.no_grad():
        output = model(input_ids=torch.cat(documents, 1), position_ids=positions, use_cache=False)
    logits: Tensor = output.logits.float()
    return logits


def _module_classes(model: PreTrainedModel) -> set[str]:
    """Return the names of the module classes that are defined in the model's own source file."""
    return {type(module).__name__ for module in model.modules() if type(module).__module__ == type(model).__module__}
