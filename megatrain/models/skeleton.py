"""Construction of Hugging Face models without weights. Parameters are on the meta device, but buffers have values."""

from __future__ import annotations

import copy
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from megatrain.base.errors import UnsupportedModelError
from megatrain.models.folder import PLAIN_ADVICE
from megatrain.models.internals import check_internals

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from transformers import PretrainedConfig, PreTrainedModel

    from megatrain.models.converter import ModelConverter

__all__ = [
    "build_skeleton",
    "is_multimodal",
    "loaded_dtypes",
    "multimodal_class",
    "resolve_config",
    "single_document_rows",
]


def resolve_config(
    config_or_folder: PretrainedConfig | Path | str, *, trust_remote_code: bool, allow_quantized: bool = False
) -> PretrainedConfig:
    """Read a configuration from a folder, or copy an existing configuration.

    Args:
        config_or_folder: A Hugging Face configuration, or a folder with `config.json`.
        trust_remote_code: Whether to run model code from the folder.
        allow_quantized: Whether to accept quantized weights, which is possible only if they are frozen. If True, the
            returned configuration has no quantization.

    Raises:
        UnsupportedModelError: The weights are quantized and `allow_quantized` is False.
        ModelFolderError: The folder has no usable `config.json`.
    """
    if isinstance(config_or_folder, str | Path):
        config = _read_config(config_or_folder, trust_remote_code)
    else:
        config = copy.deepcopy(config_or_folder)
    quantization = getattr(config, "quantization_config", None)
    if quantization and allow_quantized:
        del config.quantization_config
    elif quantization:
        is_folder = isinstance(config_or_folder, str | Path)
        source = f"'{Path(config_or_folder, 'config.json')}'" if is_folder else "its config"
        raise UnsupportedModelError(
            str(config.model_type),
            f"according to {source}, its weights are quantized{_format_method(quantization)}, but full-parameter "
            "training needs floating-point weights. "
            f"Train adapters: [lora]. Or {PLAIN_ADVICE[0].lower()}{PLAIN_ADVICE[1:]}",
        )
    return config


def _format_method(quantization: Any) -> str:
    """Return the method of a `quantization_config` in parentheses after a space, or "" if it has no method."""
    if not isinstance(quantization, dict):
        return f" ({type(quantization).__name__})"
    is_bitsandbytes = any(key.startswith("load_in_") for key in quantization)  # early folders do not store the method
    method = quantization.get("quant_method") or ("bitsandbytes" if is_bitsandbytes else "")
    return f" ({method})" if method else ""


def _read_config(folder: Path | str, trust_remote_code: bool) -> PretrainedConfig:
    if trust_remote_code:
        from transformers import AutoConfig

        config: PretrainedConfig = AutoConfig.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
        return config
    from megatrain.models.folder import read_config

    return read_config(folder)


def build_skeleton(
    config: PretrainedConfig,
    *,
    attn_implementation: str,
    trust_remote_code: bool,
    dtype: torch.dtype,
    text_only: bool = False,
    converters: Sequence[ModelConverter] = (),
) -> PreTrainedModel:
    """Build the model that `config` describes. Parameters are on the meta device, all buffers on the CPU.

    The class comes from a converter if a converter provides one. Otherwise it is the causal language model, or the
    multimodal class if `config.json` names it or there is no causal language model.

    Args:
        config: Configuration. The model keeps and changes it.
        attn_implementation: Attention implementation in transformers, or "auto" for transformers' default.
        trust_remote_code: Whether to run model code from the folder.
        dtype: dtype of parameters and buffers, except those that transformers keeps in fp32.
        text_only: Whether to use only the causal language model, never the multimodal class.
        converters: Converters. They are called before the buffers are created and again when the model is complete.

    Raises:
        UnsupportedModelError: transformers has no class with a trainable language model for the configuration, or a
            buffer cannot be created without the model's weights.
        TransformersVersionError: The installed transformers lacks internals that this package uses.
    """
    check_internals()
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    options: dict[str, Any] = {"dtype": dtype}
    if attn_implementation != "auto":
        options["attn_implementation"] = attn_implementation
    classes = (converter.model_class(config) for converter in converters)
    model_class = next((converter_class for converter_class in classes if converter_class is not None), None)
    multimodal = None if text_only or model_class is not None else multimodal_class(config)
    try:
        with torch.device("meta"), no_init_weights():
            model: PreTrainedModel = (
                model_class._from_config(config, **options)
                if model_class is not None
                else multimodal._from_config(config, **options)
                if multimodal is not None and _is_folder_class(multimodal, config)
                else AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code, **options)
            )
    except Exception as error:  # the model families raise different types of errors
        raise UnsupportedModelError(_model_name(config), _explain_failure(error, text_only)) from error
    with torch.device("meta"):
        model.tie_weights()
    for converter in converters:
        converter.remove_untrained(model)
    _keep_fp32(model, dtype)
    _create_buffers(model)
    model.train()
    for converter in converters:
        converter.convert(model)
    return model


def is_multimodal(model: PreTrainedModel | type[PreTrainedModel]) -> bool:
    """Return whether a model or model class also takes images or audio as input."""
    modalities = model.input_modalities
    return (modalities if isinstance(modalities, str) else "".join(modalities)) != "text"


def multimodal_class(config: PretrainedConfig) -> Any:
    """Return transformers' multimodal class for a configuration, or None.

    A configuration without a separate text part yields None, because it does not show which weights belong to the
    language model.
    """
    from transformers import AutoModelForMultimodalLM

    model_class = AutoModelForMultimodalLM._model_mapping.get(type(config), None)
    if model_class is not None and is_multimodal(model_class) and config.get_text_config() is config:
        return None
    return model_class


def _is_folder_class(multimodal: type, config: PretrainedConfig) -> bool:
    """Return whether the folder contains a model of the multimodal class, not of the causal language model class."""
    from transformers import AutoModelForCausalLM

    names = getattr(config, "architectures", None) or ()
    return multimodal.__name__ in names or type(config) not in AutoModelForCausalLM._model_mapping


def _model_name(config: PretrainedConfig) -> str:
    """Return the model's type and the path of its config, for messages."""
    folder = str(getattr(config, "name_or_path", "") or "")
    return f"{config.model_type} of {Path(folder) / 'config.json'}" if folder else str(config.model_type)


def _explain_failure(error: Exception, text_only: bool) -> str:
    if "Unrecognized configuration class" in str(error):
        text = "transformers has no causal language model for it. Use a decoder: a model whose config.json names an "
        text += "architecture that ends in ForCausalLM"
        if text_only:
            text += ". `run` can also train models that read images, from a folder with weights"
        return text
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    return f"transformers cannot build it ({reason}). Check the values of config.json, or copy or download it again"


def _keep_fp32(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Convert to fp32 the parameters that `from_pretrained` always keeps in fp32."""
    parameters = dict(model.named_parameters())
    for name in _find_fp32_names(model, parameters, dtype):
        if parameters[name].is_floating_point():
            parameters[name].data = parameters[name].data.to(torch.float32)


def _find_fp32_names(model: PreTrainedModel, names: Iterable[str], dtype: torch.dtype) -> list[str]:
    """Return the names of the tensors that `from_pretrained` keeps in fp32 even if `dtype` is not fp32."""
    from transformers.core_model_loading import build_glob_alternation

    plan = model._get_dtype_plan(dtype)
    if not plan:
        return []
    pattern, _, _ = build_glob_alternation(list(plan))
    return [name for name in names if pattern.search(name)]


def loaded_dtypes(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Return the dtype of each parameter and buffer after `from_pretrained` with `dtype`.

    The model's code sets the dtype of some tensors, and transformers' rules keep others in fp32.
    """
    from transformers.initialization import no_init_weights

    with torch.device("meta"), no_init_weights():
        loaded_model = type(model)._from_config(copy.deepcopy(model.config), dtype=dtype)
    dtypes = {name: value.dtype for name, value in loaded_model.state_dict(keep_vars=True).items()}
    return dtypes | dict.fromkeys(_find_fp32_names(loaded_model, dtypes, dtype), torch.float32)


def _create_buffers(model: PreTrainedModel) -> None:
    """Allocate all buffers and fill them according to the model's initialization rules.

    Parameters are temporarily flagged as initialized, so that the rules fill only buffers. Floating-point buffers start
    as NaN, which reveals buffers without a rule. If such a buffer is persistent, the checkpoint provides its values.
    """
    from transformers import initialization

    meta_buffers = _find_meta_buffers(model)
    if meta_buffers:
        buffers: dict[int, torch.Tensor] = {}
        for module, leaf, buffer in meta_buffers:
            if id(buffer) not in buffers:
                buffers[id(buffer)] = torch.empty_like(buffer, device="cpu")
                buffers[id(buffer)].fill_(float("nan") if buffer.is_floating_point() else 0)
            module._buffers[leaf] = buffers[id(buffer)]
        parameters = list(model.parameters())
        for parameter in parameters:
            parameter._is_hf_initialized = True
        with torch.no_grad(), torch.random.fork_rng(devices=[]), initialization.guard_torch_init_functions():
            torch.manual_seed(0)
            model.initialize_weights()
        for parameter in parameters:
            del parameter._is_hf_initialized
        for module in model.modules():
            module.__dict__.pop("_is_hf_initialized", None)
    unfilled_names = [name for name, buffer in model.named_buffers() if buffer.device.type == "meta"]
    if hasattr(model, "named_non_persistent_buffers"):
        unfilled_names += [name for name, buffer in model.named_non_persistent_buffers() if _has_nan(buffer)]
    if unfilled_names:
        raise UnsupportedModelError(
            type(model).__name__,
            f"the model's code cannot compute its buffers {', '.join(sorted(unfilled_names)[:4])} without its weights",
        )


def _find_meta_buffers(model: nn.Module) -> list[tuple[nn.Module, str, torch.Tensor]]:
    return [
        (module, leaf, buffer)
        for module in model.modules()
        for leaf, buffer in module._buffers.items()
        if buffer is not None and buffer.device.type == "meta"
    ]


def _has_nan(buffer: torch.Tensor) -> bool:
    return buffer.is_floating_point() and buffer.device.type != "meta" and bool(buffer.isnan().any())


@contextmanager
def single_document_rows() -> Iterator[None]:
    """Make transformers assume that every row is a single document, so that causal attention needs no mask.

    Otherwise transformers searches for position restarts and padding. This search is impossible with fake tensors, so
    transformers would create a dense mask, ``(S, S)``. Not thread-safe.
    """
    from transformers import masking_utils

    replacements: dict[str, Any] = {
        "find_packed_sequence_indices": lambda position_ids: None,
        "is_tracing": lambda *tensors: False,
        "fast_all": lambda mask: True,
    }
    originals = {name: value for name, value in vars(masking_utils).items() if name in replacements}
    vars(masking_utils).update({name: replacements[name] for name in originals})
    try:
        yield
    finally:
        vars(masking_utils).update(originals)
