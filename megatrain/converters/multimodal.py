"""The parts of a model that read other inputs than text: a vision tower and its projection, an audio encoder.

If rows have no images, these modules are not loaded, but copied into an export unchanged (``models/passthrough.py``).
If rows have images, they are streamed, frozen or trained, and a micro-batch without images skips their units.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from torch import Tensor, nn

from megatrain.base.errors import UnsupportedModelError
from megatrain.models.converter import ModelConverter
from megatrain.models.internals import check_internals
from megatrain.models.passthrough import TensorPlace, remove_tensors
from megatrain.models.skeleton import multimodal_class

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from transformers import PreTrainedModel

__all__ = ["Images", "MultimodalModules", "non_text_modules", "text_modules"]

#: Treatment of the image modules: passed through unchanged, streamed but not trained, or trained with the rest.
Images = Literal["off", "frozen", "trained"]


class MultimodalModules(ModelConverter):
    """Passes through, freezes or trains the modules of a model that read other inputs than text.

    Args:
        images: Treatment of the image modules; audio modules are never trained.
    """

    def __init__(self, images: Images) -> None:
        self._images = images
        self._text: frozenset[int] | None = None  # ids of the language model's modules, once all exist

    def take_out(self, model: PreTrainedModel) -> None:
        """Pass through or freeze the modules that are not trained.

        Raises:
            UnsupportedModelError: transformers does not separate its language model, or it reads no images.
        """
        if self._images != "off":
            check_internals(with_images=True)
            _freeze_non_text(model, self._images)
        elif type(model) is multimodal_class(model.config):
            _remove_non_text(model)

    def convert(self, model: PreTrainedModel) -> None:
        """Record the model: other converters may replace its modules before its units are found."""
        self._model = model

    def is_optional(self, module: nn.Module) -> bool:
        """Return whether only images reach a unit."""
        if self._images == "off":
            return False
        if self._text is None:
            self._text = frozenset(map(id, text_modules(self._model)))
        return id(module) not in self._text


def _remove_non_text(model: PreTrainedModel) -> None:
    """Remove the parameters and buffers from a skeleton that only non-text inputs reach.

    The language model is transformers' decoder, with the embedding and the head. All other owners of parameters are
    passed through. Their placeholders raise an error if they are used, so a wrong guess fails instead of training.

    Raises:
        UnsupportedModelError: the model has no decoder, or shares a weight between the decoder and another module.
    """
    if model.config.get_text_config() is model.config:
        return
    text = _language_model(model)
    shared = {id(parameter) for part in text for parameter in part.parameters()}
    persistent = set(model.state_dict(keep_vars=True))
    paths: list[str] = []
    names: list[str] = []
    places: dict[tuple[int, str], TensorPlace] = {}  # a module may have several names
    for path, module, contains_text in _modules_outside(text, model, remove_duplicate=False):
        own: list[tuple[str, Tensor, bool]] = [
            (leaf, p, True) for leaf, p in module._parameters.items() if p is not None
        ]
        if contains_text:
            paths += [f"{path}.{leaf}".lstrip(".") for leaf, _, _ in own]
        else:
            own += [(leaf, b, False) for leaf, b in module._buffers.items() if b is not None]
            if not _is_below(paths, path) and (own or next(module.parameters(), None) is not None):
                paths.append(path)
        for leaf, value, is_parameter in own:
            name = f"{path}.{leaf}".lstrip(".")
            if id(value) in shared:
                raise UnsupportedModelError(
                    type(model).__name__, f"it shares {name} with its language model, so it cannot be kept as it is"
                )
            if name in persistent:
                names.append(name)
            place = TensorPlace(name, module, leaf, value if is_parameter else value.to("meta"), is_parameter)
            places.setdefault((id(module), leaf), place)
    if places:
        remove_tensors(model, paths, names, tuple(places.values()))


def _freeze_non_text(model: PreTrainedModel, images: Images) -> None:
    """Freeze the parts of an image-text model that are not trained: audio modules, and image modules if "frozen".

    Args:
        model: A skeleton with all of its modules.
        images: "frozen" or "trained".

    Raises:
        UnsupportedModelError: the model has no decoder, or does not read images.
    """
    modalities = model.input_modalities
    if "image" not in ((modalities,) if isinstance(modalities, str) else modalities):
        raise UnsupportedModelError(
            type(model).__name__,
            f'it does not read images, and the config says model.images = "{images}". Leave that out, or take an '
            "image-text model",
        )
    text = {id(parameter) for part in _language_model(model) for parameter in part.parameters()}
    sounds = {id(p) for module in _sound_modules(model) for p in module.parameters()}
    for parameter in model.parameters():
        if id(parameter) in sounds or (images == "frozen" and id(parameter) not in text):
            parameter.requires_grad_(False)


def text_modules(model: PreTrainedModel) -> list[nn.Module]:
    """Return all modules of a model's language model, including the embedding and the head."""
    return [module for part in _language_model(model) for module in part.modules()]


def non_text_modules(model: PreTrainedModel, *, sounds: bool = True) -> list[str]:
    """Return paths of the outermost modules with weights outside of a model's language model.

    Args:
        sounds: Whether to include audio modules.
    """
    left_out = set() if sounds else {id(m) for sound in _sound_modules(model) for m in sound.modules()}
    paths: list[str] = []
    for path, module, contains_text in _modules_outside(_language_model(model), model):
        is_outermost = not contains_text and not _is_below(paths, path)
        if is_outermost and id(module) not in left_out and next(module.parameters(), None) is not None:
            paths.append(path)
    return paths


def _modules_outside(
    text: Sequence[nn.Module], model: PreTrainedModel, *, remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Module, bool]]:
    """Yield each module outside of the language model: its path, and whether it contains a part of that model."""
    inside = {id(module) for part in text for module in part.modules()}
    above = {id(module) for module in model.modules() if any(id(child) in inside for child in module.modules())}
    for path, module in model.named_modules(remove_duplicate=remove_duplicate):
        if id(module) not in inside:
            yield path, module, id(module) in above


def _is_below(paths: Sequence[str], path: str) -> bool:
    return any(path.startswith(f"{other}.") for other in paths)


def _sound_modules(model: PreTrainedModel) -> Iterator[nn.Module]:
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
            type(model).__name__, "transformers does not separate its language model from the rest. Take a text model"
        )
    return [part for part in parts if isinstance(part, nn.Module)]
