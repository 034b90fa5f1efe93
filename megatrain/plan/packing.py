"""What becomes of ``data.packing`` with a model that does not keep apart the documents that share a row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from megatrain.models.carried import carried_modules
from megatrain.models.errors import UnsupportedModelError
from megatrain.models.folder import ModelFolderError
from megatrain.models.graph import build_graph
from megatrain.models.packed_rows import why_documents_mix

if TYPE_CHECKING:
    from megatrain.config.schema import RunConfig
    from megatrain.models.graph import ModelGraph

__all__ = ["packing_with_model", "settle_packing", "with_packing"]


def settle_packing(config: RunConfig, graph: ModelGraph) -> tuple[RunConfig, str]:
    """Return the config with packing off where the default does not suit the model, and a warning that says so.

    "concat" promises no border between texts, so that it suits every model of text.

    Raises:
        UnsupportedModelError: the config asks for packing, and the model would mix documents.
    """
    packing = config.data.packing
    if not packing or (packing == "concat" and carried_modules(graph.model) is None):
        return config, ""
    problem = why_documents_mix(graph, config.model.attn_implementation)
    if problem is None:
        return config, ""
    name = type(graph.model).__name__
    if "packing" in config.data.model_fields_set:
        raise UnsupportedModelError(name, f"{problem}. Write data.packing = false")
    text = (
        f"data.packing is off, one document a row, where it is on by default: {name}: {problem}. "
        "data.packing = false says the same without this warning"
    )
    return with_packing(config, False), text


def with_packing(config: RunConfig, packing: bool | Literal["concat"]) -> RunConfig:
    """Return a config with another ``data.packing``, or the config itself."""
    if config.data.packing == packing:
        return config
    return config.model_copy(update={"data": config.data.model_copy(update={"packing": packing})})


def packing_with_model(config: RunConfig) -> tuple[RunConfig, str]:
    """Do as :func:`settle_packing` for those who look at data only: a model that cannot be used changes nothing."""
    if not config.data.packing:
        return config, ""
    table = config.model
    try:
        graph = build_graph(
            table.model_name_or_path,
            attn_implementation=table.attn_implementation,
            text_only=table.train_from_scratch,
        )
        return settle_packing(config, graph)
    except (UnsupportedModelError, ModelFolderError):
        return config, ""
