"""Modules that do not read text, such as a vision tower with its projection, or an audio encoder.

If rows have no images, these modules are not loaded, and exports contain unchanged copies (``models/passthrough.py``).
If rows have images, the modules are streamed and either frozen or trained. Micro-batches without images skip them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from torch import Tensor, nn

from megatrain.base.errors import UnsupportedModelError
from megatrain.models.converter import ModelConverter, ModelSettings
from megatrain.models.internals import check_internals
from megatrain.models.passthrough import RegisteredTensor, remove_tensors
from megatrain.models.skeleton import multimodal_class

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from transformers import PreTrainedModel

__all__ = ["Images", "MultimodalModules", "non_text_modules", "text_modules"]

#: Treatment of image modules: not loaded, streamed but frozen, or trained.
Images = Literal["off", "frozen", "trained"]


class MultimodalModules(ModelConverter):
    """Converter that passes through, freezes or trains the modules of a model that do not read text.

    Args:
        images: Treatment of image modules. Audio modules are never trained.
    """

    def __init__(self, images: Images) -> None:
        self._images = images
        self._text_ids: frozenset[int] | None = None  # ids of the language model's modules

    @classmethod
    def for_model(cls, settings: ModelSettings) -> MultimodalModules | None:
        """Return a converter, or None if there is no model folder from which modules could be passed through."""
        images = settings.table.images
        return None if images == "off" and settings.table.train_from_scratch else cls(images)

    def remove_untrained(self, model: PreTrainedModel) -> None:
        """Remove or freeze the modules that are not trained.

        Raises:
            UnsupportedModelError: If the language model is not separate, or the model cannot read images.
        """
        if self._images != "off":
            check_internals(with_images=True)
            _freeze_non_text(model, self._images)
        elif type(model) is multimodal_class(model.config):
            _remove_non_text(model)

    def convert(self, model: PreTrainedModel) -> None:
        """Store the model. Its modules are read later, because other converters can still replace them."""
        self._model = model

    def is_optional(self, module: nn.Module) -> bool:
        """Return whether micro-batches without images skip a module."""
        if self._images == "off":
            return False
        if self._text_ids is None:
            self._text_ids = frozenset(map(id, text_modules(self._model)))
        return id(module) not in self._text_ids


def _remove_non_text(model: PreTrainedModel) -> None:
    """Remove all parameters and buffers outside of the language model from a skeleton.

    The language model consists of transformers' decoder, the embedding and the head. All other modules with parameters
    are passed through. If this assumption is wrong, an error is raised as soon as the model uses a removed parameter.

    Raises:
        UnsupportedModelError: If the model has no decoder, or if the decoder shares a weight with another module.
    """
    if model.config.get_text_config() is model.config:
        return
    language_parts = _language_model(model)
    shared_ids = {id(parameter) for part in language_parts for parameter in part.parameters()}
    persistent_names = set(model.state_dict(keep_vars=True))
    paths: list[str] = []
    names: list[str] = []
    removed_tensors: dict[tuple[int, str], RegisteredTensor] = {}  # a module can have several names, so use its id
    for path, module, contains_text in _find_outside_modules(language_parts, model, remove_duplicate=False):
        tensors: list[tuple[str, Tensor, bool]] = [
            (leaf, p, True) for leaf, p in module._parameters.items() if p is not None
        ]
        if contains_text:
            paths += [f"{path}.{leaf}".lstrip(".") for leaf, _, _ in tensors]
        else:
            tensors += [(leaf, b, False) for leaf, b in module._buffers.items() if b is not None]
            if not _is_below(paths, path) and (tensors or next(module.parameters(), None) is not None):
                paths.append(path)
        for leaf, value, is_parameter in tensors:
            name = f"{path}.{leaf}".lstrip(".")
            if id(value) in shared_ids:
                raise UnsupportedModelError(
                    type(model).__name__, f"it shares {name} with its language model, so it cannot be kept as it is"
                )
            if name in persistent_names:
                names.append(name)
            tensor = RegisteredTensor(name, module, leaf, value if is_parameter else value.to("meta"), is_parameter)
            removed_tensors.setdefault((id(module), leaf), tensor)
    if removed_tensors:
        remove_tensors(model, paths, names, tuple(removed_tensors.values()))


def _freeze_non_text(model: PreTrainedModel, images: Images) -> None:
    """Freeze the audio modules of an image-text model, and the image modules if ``images`` is "frozen".

    Args:
        model: Skeleton with all of its modules.
        images: "frozen" or "trained".

    Raises:
        UnsupportedModelError: If the model has no decoder, or does not read images.
    """
    modalities = model.input_modalities
    if "image" not in ((modalities,) if isinstance(modalities, str) else modalities):
        raise UnsupportedModelError(
            type(model).__name__,
            f'it does not read images, but the config sets model.images = "{images}". Remove this key, or use an '
            "image-text model",
        )
    text_ids = {id(parameter) for part in _language_model(model) for parameter in part.parameters()}
    audio_ids = {id(p) for module in _audio_modules(model) for p in module.parameters()}
    for parameter in model.parameters():
        if id(parameter) in audio_ids or (images == "frozen" and id(parameter) not in text_ids):
            parameter.requires_grad_(False)


def text_modules(model: PreTrainedModel) -> list[nn.Module]:
    """Return all modules of a model's language model, including the embedding and the head."""
    return [module for part in _language_model(model) for module in part.modules()]


def non_text_modules(model: PreTrainedModel, *, audio: bool = True) -> list[str]:
    """Return the paths of the outermost modules that have weights and are not part of the language model.

    Args:
        audio: Whether to include audio modules.
    """
    excluded_ids = set() if audio else {id(m) for encoder in _audio_modules(model) for m in encoder.modules()}
    paths: list[str] = []
    for path, module, contains_text in _find_outside_modules(_language_model(model), model):
        is_outermost = not contains_text and not _is_below(paths, path)
        if is_outermost and id(module) not in excluded_ids and next(module.parameters(), None) is not None:
            paths.append(path)
    return paths


def _find_outside_modules(
    language_parts: Sequence[nn.Module], model: PreTrainedModel, *, remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Module, bool]]:
    """Yield each module outside of the language model: path, module, and whether it contains language modules."""
    text_ids = {id(module) for part in language_parts for module in part.modules()}
    ancestor_ids = {id(m) for m in model.modules() if any(id(child) in text_ids for child in m.modules())}
    for path, module in model.named_modules(remove_duplicate=remove_duplicate):
        if id(module) not in text_ids:
            yield path, module, id(module) in ancestor_ids


def _is_below(paths: Sequence[str], path: str) -> bool:
    return any(path.startswith(f"{parent}.") for parent in paths)


def _audio_modules(model: PreTrainedModel) -> Iterator[nn.Module]:
    encoder = model.get_encoder("audio")
    if encoder not in (None, model, model.base_model):
        yield encoder


def _language_model(model: PreTrainedModel) -> list[nn.Module]:
    try:
        decoder = model.get_decoder()
        parts = [decoder, model.get_input_embeddings(), model.get_output_embeddings()]
    except (AttributeError, NotImplementedError):  # some classes have no text part
        decoder = None
    if decoder in (None, model, model.base_model):
        raise UnsupportedModelError(
            type(model).__name__, "transformers does not separate its language model from the rest. Use a text model"
        )
    return [part for part in parts if isinstance(part, nn.Module)]
