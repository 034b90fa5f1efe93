"""A Hugging Face model without its weights: parameters on the meta device, buffers real."""

from __future__ import annotations

import copy
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from megatrain.models.errors import UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PretrainedConfig, PreTrainedModel

__all__ = ["build_skeleton", "resolve_config", "rows_are_documents"]


def resolve_config(config_or_folder: PretrainedConfig | Path | str, *, trust_remote_code: bool) -> PretrainedConfig:
    """Return a configuration of our own: read from a folder, or copied from the one given.

    Raises:
        UnsupportedModelError: the weights are quantized.
        ModelFolderError: the folder has no usable `config.json`.
    """
    if isinstance(config_or_folder, str | Path):
        config = _read_config(config_or_folder, trust_remote_code)
    else:
        config = copy.deepcopy(config_or_folder)
    quantization = getattr(config, "quantization_config", None)
    if quantization:
        method = (
            quantization.get("quant_method", "?") if isinstance(quantization, dict) else type(quantization).__name__
        )
        raise UnsupportedModelError(
            str(config.model_type),
            f"its weights are quantized ({method}), and full-parameter training needs floating-point weights. "
            "Take the original model, or de-quantize it and remove quantization_config from config.json",
        )
    return config


def _read_config(folder: Path | str, trust_remote_code: bool) -> PretrainedConfig:
    if trust_remote_code:
        from transformers import AutoConfig

        config: PretrainedConfig = AutoConfig.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
        return config
    from megatrain.models.folder import read_config

    return read_config(folder)


def build_skeleton(
    config: PretrainedConfig, *, attn_implementation: str, trust_remote_code: bool, dtype: torch.dtype
) -> PreTrainedModel:
    """Build the causal language model of `config` with parameters on the meta device and all buffers on the CPU.

    Args:
        config: Used by the model as it is, and changed by it: give a copy.
        attn_implementation: As in transformers; "auto" leaves the choice to it.
        trust_remote_code: Allow model code that comes with the model.
        dtype: What the parameters and the buffers are declared as; tables that transformers keeps in fp32 stay so.

    Raises:
        UnsupportedModelError: transformers has no causal language model for the configuration, or a buffer of it
            cannot be made without the model's weights.
    """
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    options: dict[str, Any] = {"dtype": dtype, "trust_remote_code": trust_remote_code}
    if attn_implementation != "auto":
        options["attn_implementation"] = attn_implementation
    try:
        with torch.device("meta"), no_init_weights():
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config, **options)
    except Exception as error:  # the code of every family raises its own kinds
        raise UnsupportedModelError(_name(config), _why_not_built(error)) from error
    with torch.device("meta"):
        model.tie_weights()
    _keep_fp32(model, dtype)
    _make_buffers(model)
    model.train()
    return model


def _name(config: PretrainedConfig) -> str:
    """Return what a model is called in messages: its type, and the file that says so."""
    folder = str(getattr(config, "name_or_path", "") or "")
    return f"{config.model_type} of {Path(folder) / 'config.json'}" if folder else str(config.model_type)


def _why_not_built(error: Exception) -> str:
    if "Unrecognized configuration class" in str(error):
        return (
            "transformers has no causal language model for it. Take a decoder: a model whose config.json names an "
            "architecture that ends in ForCausalLM"
        )
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    return f"transformers cannot build it ({reason}). Check the values of config.json, or copy or download it again"


def _keep_fp32(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Declare the parameters that transformers never lowers to bf16 as fp32, as `from_pretrained` does."""
    patterns = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    if dtype not in (torch.float16, torch.bfloat16) or not patterns:
        return
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and any(part in patterns for part in name.split(".")):
            parameter.data = parameter.data.to(torch.float32)


def _make_buffers(model: PreTrainedModel) -> None:
    """Give every buffer real memory and let the model's own rules fill it.

    Parameters are flagged as initialised for that time, so that only buffers are filled. Floating buffers start as
    NaN, which shows those that have no rule; the persistent ones among them come from the checkpoint.
    """
    from transformers import initialization

    missing = _buffers_on_meta(model)
    if missing:
        made: dict[int, torch.Tensor] = {}
        for module, leaf, buffer in missing:
            if id(buffer) not in made:
                made[id(buffer)] = torch.empty_like(buffer, device="cpu")
                made[id(buffer)].fill_(float("nan") if buffer.is_floating_point() else 0)
            module._buffers[leaf] = made[id(buffer)]
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
    left = [name for name, buffer in model.named_buffers() if buffer.device.type == "meta"]
    if hasattr(model, "named_non_persistent_buffers"):
        left += [name for name, buffer in model.named_non_persistent_buffers() if _has_nan(buffer)]
    if left:
        raise UnsupportedModelError(
            type(model).__name__,
            f"the model's code has no rule to make its buffers {', '.join(sorted(left)[:4])} without its weights",
        )


def _buffers_on_meta(model: nn.Module) -> list[tuple[nn.Module, str, torch.Tensor]]:
    return [
        (module, leaf, buffer)
        for module in model.modules()
        for leaf, buffer in module._buffers.items()
        if buffer is not None and buffer.device.type == "meta"
    ]


def _has_nan(buffer: torch.Tensor) -> bool:
    return buffer.is_floating_point() and buffer.device.type != "meta" and bool(buffer.isnan().any())


@contextmanager
def rows_are_documents() -> Iterator[None]:
    """Let transformers take it that every row is one document, so that causal attention needs no mask.

    It looks for restarts of the positions and for padding, and where it may not look, on fake tensors, makes a mask
    of [S, S]. Not for several threads at once.
    """
    from transformers import masking_utils

    answers: dict[str, Any] = {
        "find_packed_sequence_indices": lambda position_ids: None,
        "is_tracing": lambda *tensors: False,
        "fast_all": lambda mask: True,
    }
    before = {name: value for name, value in vars(masking_utils).items() if name in answers}
    vars(masking_utils).update({name: answers[name] for name in before})
    try:
        yield
    finally:
        vars(masking_utils).update(before)
