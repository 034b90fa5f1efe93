"""Whether a model keeps apart the documents that share a row: tried on a small copy of it.

Rows tell documents apart by positions that restart, and by nothing else. Attention takes that as a border where its
class hands the positions to the mask; recurrences, scans and short convolutions mostly carry what they hold across it,
and some attention does, too (biases by distance, masks made without positions). Nothing that transformers declares
tells which, so a document is computed behind another one and alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

from megatrain.base.errors import UnsupportedModelError
from megatrain.models.carried import carried_modules
from megatrain.models.folder import ModelFolderError
from megatrain.models.small import small_model

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig, PreTrainedModel

    from megatrain.converters.spec import ModelSpec
    from megatrain.models.graph import ModelGraph

__all__ = ["settle_packing", "settle_packing_of", "why_documents_mix"]

PackingMode = bool | Literal["concat"]

_MIXES = "it carries what it has read of one document into the next one of the row"
_HAS_IMAGES = "rows with images have positions and masks of their own"
_MIXES_PERHAPS = "it may not keep apart the texts that share a row"

_TOKENS = (37, 41)  # of the document before, and of the one that is compared; longer than a small copy's windows
_ROWS = 4  # what is chosen, experts or keys, may happen to be the same in one
_FIRST_TOKEN = 3  # those before are padding, begin and end of text, mostly
#: Of the largest logit. Sums in another order differ by 1e-5 at most, documents that mix by 1e-3 at least.
_TOLERANCE = 1e-4
_FEW_LAYERS, _MANY_LAYERS = 3, 16  # of the copy; the more where the few lack a kind of module that the model has

_found: dict[object, str | None] = {}  # alternatives to a plan are of the same model


def settle_packing(
    model: ModelSpec, graph: ModelGraph, packing: PackingMode, *, is_default: bool
) -> tuple[PackingMode, str]:
    """Return the packing that suits a model, and a warning where that is not the default.

    "concat" promises no border between texts, so that it suits every model of text.

    Args:
        is_default: the config does not ask for it.

    Raises:
        UnsupportedModelError: the config asks for packing, and the model would mix documents.
    """
    if packing and model.table.images != "off":
        if is_default:
            return False, _off_by_itself(type(graph.model).__name__, _HAS_IMAGES)
        raise UnsupportedModelError(type(graph.model).__name__, f"{_HAS_IMAGES}. Write data.packing = false")
    if not packing or (packing == "concat" and carried_modules(graph.model) is None):
        return packing, ""
    problem = why_documents_mix(graph, model.table.attn_implementation)
    if problem is None:
        return packing, ""
    name = type(graph.model).__name__
    if not is_default:
        raise UnsupportedModelError(name, f"{problem}. Write data.packing = false")
    return False, _off_by_itself(name, problem)


def _off_by_itself(name: str, problem: str) -> str:
    return (
        f"data.packing is off, one document a row, where it is on by default: {name}: {problem}. "
        "data.packing = false says the same without this warning"
    )


def settle_packing_of(model: ModelSpec, packing: PackingMode, *, is_default: bool) -> tuple[PackingMode, str]:
    """Do as :func:`settle_packing` without a plan, for looks at the data; an unusable model changes nothing."""
    if not packing:
        return packing, ""
    try:
        return settle_packing(model, model.build(torch.float32), packing, is_default=is_default)
    except (UnsupportedModelError, ModelFolderError):
        return packing, ""


def why_documents_mix(graph: ModelGraph, attn_implementation: str) -> str | None:
    """Return why documents in one row must not be expected to be computed as if alone; None: they are.

    Kernels of a GPU are judged by the same model on the CPU: what separates documents only there counts as mixing.

    Args:
        graph: the model, without weights.
        attn_implementation: as in transformers, or "auto".
    """
    if carried_modules(graph.model) is not None:
        return f"as it reads images as well, {_MIXES_PERHAPS}"  # the copy is of causal language models only
    attention = "auto" if attn_implementation.startswith("flash") else attn_implementation  # which no CPU has
    kinds = _kinds(graph.model)
    key = (type(graph.config), graph.config.to_json_string(use_diff=False), attention, frozenset(kinds))
    if key not in _found:
        _found[key] = _try(graph.config, attention, kinds)
    return _found[key]


def _try(config: PretrainedConfig, attention: str, kinds: set[str]) -> str | None:
    for num_layers in (_FEW_LAYERS, _MANY_LAYERS):
        try:
            model = small_model(config, attention, seed=0, num_layers=num_layers).eval()
        except UnsupportedModelError as error:
            return f"{_MIXES_PERHAPS}: that cannot be tried, as {error.problem.partition('. ')[0]}"
        missing = kinds - _kinds(model)
        if not missing:
            break
    try:
        is_apart = _is_apart(model)
    except Exception as error:  # each class refuses inputs in its own way
        return f"{_MIXES_PERHAPS}: that cannot be tried ({type(error).__name__}: {error})"
    if not is_apart:
        return _MIXES
    if missing:
        return f"{_MIXES_PERHAPS}: the small copy on which that is tried has no {', '.join(sorted(missing))}"
    return None


def _is_apart(model: PreTrainedModel) -> bool:
    """Compare the logits of a document behind another one, as rows are packed, with those of the same alone."""
    generator = torch.Generator().manual_seed(0)
    num_words = model.get_input_embeddings().weight.shape[0]
    most = getattr(model.config, "max_position_embeddings", None)
    longest = most // 2 if isinstance(most, int) else max(_TOKENS)  # some masks are of so many positions for a row
    before, document = (
        torch.randint(_FIRST_TOKEN, num_words, (_ROWS, min(n, longest)), generator=generator) for n in _TOKENS
    )
    packed = _logits(model, before, document)[:, before.shape[1] :]
    alone = _logits(model, document)
    return bool((packed - alone).abs().max() <= _TOLERANCE * alone.abs().max())


def _logits(model: PreTrainedModel, *documents: Tensor) -> Tensor:
    positions = torch.cat([torch.arange(document.shape[1]) for document in documents]).repeat(_ROWS, 1)
    with torch.no_grad():
        output = model(input_ids=torch.cat(documents, 1), position_ids=positions, use_cache=False)
    logits: Tensor = output.logits.float()
    return logits


def _kinds(model: PreTrainedModel) -> set[str]:
    """Return the classes of a model's modules, of those that come with it."""
    return {type(module).__name__ for module in model.modules() if type(module).__module__ == type(model).__module__}
