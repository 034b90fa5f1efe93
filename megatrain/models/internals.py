"""List of the transformers internals that the package uses, and a check that the installed version has them.

Any Hugging Face decoder can be trained without special cases, because transformers' own code determines masks, weight
names and initial values. This requires parts of transformers that are not public. The tables below list all of them.
``python -m megatrain.models.internals`` prints missing internals (``make canary`` checks the newest release).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, requires, version

#: Purpose of each internal that all runs use. Keys are "module:name" or "module:name.attribute".
MODEL_INTERNALS = {
    "transformers.cache_utils:Cache": "to distinguish caches from other arguments of a forward",
    "transformers.conversion_mapping:get_model_conversion_mapping": "names of weights in files",
    "transformers.core_model_loading:Concatenate": "names of weights in files",
    "transformers.core_model_loading:MergeModulelist": "names of weights in files",
    "transformers.core_model_loading:PrefixChange": "names of weights in files",
    "transformers.core_model_loading:WeightConverter": "names of weights in files",
    "transformers.core_model_loading:WeightRenaming": "names of weights in files",
    "transformers.core_model_loading:WeightTransform": "names of weights in files",
    "transformers.core_model_loading:build_glob_alternation": "weights that stay in fp32",
    "transformers.core_model_loading:dot_natural_key": "names of weights in files",
    "transformers.core_model_loading:rename_source_key": "names of weights in files",
    "transformers.integrations.moe:_grouped_linear": "experts in parts",
    "transformers.initialization:guard_torch_init_functions": "initial weights",
    "transformers.initialization:no_init_weights": "models without memory",
    "transformers.loss.loss_utils:ForCausalLMLoss": "the loss, which the head computes in pieces",
    "transformers.masking_utils:ALL_MASK_ATTENTION_FUNCTIONS": "attention by documents",
    "transformers.masking_utils:is_tracing": "attention by documents",
    "transformers.modeling_layers:GradientCheckpointingLayer": "to find the layers of a model",
    "transformers.modeling_outputs:BaseModelOutputWithPast": "the model's result without logits",
    "transformers.modeling_utils:ALL_ATTENTION_FUNCTIONS": "attention by documents",
    "transformers.modeling_utils:PreTrainedModel._from_config": "models without memory",
    "transformers.modeling_utils:PreTrainedModel._get_dtype_plan": "weights that stay in fp32",
    "transformers.modeling_utils:PreTrainedModel._init_weights": "initial weights",
    "transformers.modeling_utils:PreTrainedModel._keys_to_ignore_on_load_missing": "names of weights in files",
    "transformers.modeling_utils:PreTrainedModel._keys_to_ignore_on_load_unexpected": "names of weights in files",
    "transformers.modeling_utils:PreTrainedModel._keys_to_ignore_on_save": "export",
    "transformers.modeling_utils:PreTrainedModel._no_split_modules": "to find the layers of a model",
    "transformers.models.auto.configuration_auto:CONFIG_MAPPING": "configs of folders",
    "transformers.models.auto.modeling_auto:AutoModelForCausalLM._model_mapping": "models of images and sounds",
    "transformers.models.auto.modeling_auto:AutoModelForMultimodalLM._model_mapping": "models of images and sounds",
    "transformers.configuration_utils:PreTrainedConfig._attn_implementation": "the attention that a run uses",
    "transformers.utils.chat_template_utils:render_jinja_template": "masks of chats",
    "transformers.utils.output_capturing:_active_collector": "outputs that a model collects in its layers",
    "transformers.utils.output_capturing:OutputRecorder": "modules that return attention weights",
    "transformers.utils:logging": "progress bars",
}
#: Internals that only learning rate schedules use. They are separate, because their module imports peft.
SCHEDULE_INTERNALS = {"transformers.trainer_utils:SchedulerType": "learning rate schedules"}
#: Internals that only `megatrain.hf` uses.
TRAINER_INTERNALS = {
    "transformers.trainer:Trainer._load_from_checkpoint": "to resume from a store",
    "transformers.trainer:Trainer.get_optimizer_cls_and_kwargs": "to choose the optimizer",
    "transformers.trainer_utils:PREFIX_CHECKPOINT_DIR": "folders of checkpoints",
}
#: Internals that are used only if rows have images.
IMAGE_INTERNALS = {
    "transformers.image_utils:load_image": "images in their orientation",
    "transformers.models.auto.processing_auto:processor_class_from_name": "processors without torchvision",
    "transformers.modeling_utils:PreTrainedModel.get_encoder": "to distinguish image encoders from audio encoders",
    "transformers.processing_utils:ProcessorMixin._get_arguments_from_pretrained": "processors of images alone",
    "transformers.processing_utils:ProcessorMixin.check_argument_for_proper_class": "processors of images alone",
    "transformers.processing_utils:ProcessorMixin.create_mm_token_type_ids": "placeholder tokens of images",
}


class TransformersVersionError(Exception):
    """Error for a transformers version that lacks internals. The message lists the missing internals."""


def missing_internals(names: Iterable[str]) -> list[str]:
    """Return the internals in ``names`` that the installed transformers lacks."""
    return [name for name in names if not _exists(name)]


def _exists(name: str) -> bool:
    module, _, path = name.partition(":")
    try:
        value: object = import_module(module)
        for leaf in path.split("."):
            value = getattr(value, leaf)
    except (ImportError, AttributeError):
        return False
    return True


def is_conv1d(module: object) -> bool:
    """Return whether a module is transformers' ``Conv1D``, a linear layer with weight ``(in, out)``."""
    return type(module).__name__ == "Conv1D"


@functools.cache
def check_internals(*, with_trainer: bool = False, with_images: bool = False, with_schedules: bool = False) -> None:
    """Check that the installed transformers has all internals that this package uses.

    Raises:
        TransformersVersionError: Internals are missing.
    """
    internals = {
        **MODEL_INTERNALS,
        **(TRAINER_INTERNALS if with_trainer else {}),
        **(IMAGE_INTERNALS if with_images else {}),
        **(SCHEDULE_INTERNALS if with_schedules else {}),
    }
    missing = missing_internals(internals)
    if missing:
        missing_text = "; ".join(f"{name.replace(':', '.')} ({internals[name]})" for name in missing)
        raise TransformersVersionError(
            f"transformers {version('transformers')} lacks {missing_text}. Install a supported version: "
            f"pip install '{required_transformers()}'"
        )


def required_transformers() -> str:
    """Return the transformers version that this package requires, in pip's syntax."""
    try:
        lines = requires("megatrain-tier") or []
    except PackageNotFoundError:  # the package is not installed
        lines = []
    return next((line.split(";")[0].strip() for line in lines if line.startswith("transformers")), "transformers")


def print_missing() -> int:
    """Print the missing internals. Return 1 if there are any."""
    table = {**MODEL_INTERNALS, **TRAINER_INTERNALS, **IMAGE_INTERNALS, **SCHEDULE_INTERNALS}
    missing = missing_internals(table)
    print(f"transformers {version('transformers')}: {len(table) - len(missing)} of {len(table)} internals exist")
    for name in missing:
        print(f"missing: {name.replace(':', '.')} ({table[name]})")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(print_missing())
