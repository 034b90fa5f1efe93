"""[model], [lora] and [export]: what is trained, and how it is written at the end."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from megatrain.base.table import Listed, PlainSize, Table, all_alter, as_tuple, is_not, is_path, key

ModelPath = Annotated[str, is_path(name=r"[\w.-]+/[\w.-]+|[\w-]+")]
AdapterPath = Annotated[str, Field(min_length=1), is_path()]
TargetModules = Annotated[
    str | Annotated[tuple[str, ...], Field(min_length=1)],
    BeforeValidator(as_tuple),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}]}),
    is_not("names no modules", 'Write a list of names: ["q_proj", "v_proj"], "all-linear" or "auto"'),
]
TemplatePath = Annotated[str, is_path("auto")]
LigerChoice = Annotated[Literal["auto"] | bool, is_not("is no choice of kernels", 'Write true, false or "auto"')]
NoRemoteCode = Annotated[
    Literal[False], is_not("is not possible: code in a model folder is never run here", "Leave the key out")
]


class ModelConfig(Table):
    """``[model]``: what is trained."""

    model_name_or_path: ModelPath = key(
        "Hugging Face folder with config.json and safetensors, or the id of a model on the hub.",
        min_length=1,
        examples=["path/to/model"],
        alters="by contents",
        same_name="TRL, LLaMA-Factory",
    )
    revision: str | None = key(
        "Of a model on the hub: branch, tag or commit. A run names the commit in its checkpoints.",
        None,
        min_length=1,
        examples=["main"],
        alters="by contents",
        same_name="transformers",
    )
    tokenizer_name_or_path: ModelPath | None = key(
        "Folder of the tokenizer, or its name on the hub. Default: the model's.", None, alters="by contents"
    )
    chat_template: TemplatePath = key(
        '"auto" (the tokenizer\'s) or the path of a .jinja file.', "auto", alters="by contents"
    )
    attn_implementation: Literal["auto", "sdpa", "eager", "flash_attention_2"] = key(
        "Attention kernel; auto: sdpa where the model supports it, else eager.",
        "auto",
        alters="yes",
        same_name="transformers, TRL, Axolotl, MegaTrain",
    )
    flash_attention: Literal["auto", "FA2", "FA3", "FA4"] = key(
        "Kernels of sdpa's flash attention on a GPU. FA2: torch's. FA3 (Hopper) and FA4 (Blackwell): faster on long "
        "rows, by the packages flash-attn-3 and flash-attn-4; other roundings. auto: FA3 or FA4 where the GPU and the "
        "package allow it, else FA2. Checkpoints record the choice, and a run keeps it.",
        "FA2",
        alters="yes",
    )
    compile: bool = key(
        "torch.compile of the layers, once per kind of layer. Other roundings than without; minutes at the "
        "first step, and a C++ compiler or Triton.",
        False,
        alters="yes",
    )
    compile_backend: Literal["inductor", "aot_eager", "eager"] = key(
        "compile: inductor makes kernels; the others are for finding faults.",
        "inductor",
        alters="yes",
        used_if={"compile": [True]},
    )
    use_liger_kernel: LigerChoice = key(
        "Norms and gated MLPs computed by the package liger-kernel, where it has kernels for the model; needs a GPU. "
        "Other roundings than without. auto: on a GPU, where the extra `gpu` is installed; not with compile, nor with "
        'task = "distill". Checkpoints record the choice, and a run keeps it.',
        "auto",
        alters="yes",
        same_name="transformers, TRL",
    )
    mlp_rows: int = key(
        "Run the MLPs of layers over so many tokens at a time and once more in the backward, for long "
        "sequences: memory inside them is that of a piece. Weights' gradients are summed in another order. 0: off.",
        0,
        ge=0,
        alters="yes",
    )
    split_experts: bool = key(
        "Stream the fused experts of a mixture's layers some at a time, where all of a layer are larger than a part "
        "(16 Mi numbers): the least memory is then a part's, and experts that no token goes to stay where they are. "
        "Their results are summed in fp32: other roundings than without.",
        False,
        alters="yes",
    )
    trust_remote_code: NoRemoteCode = key("Code in a model folder is never run.", False, alters="no")
    train_from_scratch: bool = key("Start from random weights; only config.json is read.", False, alters="by contents")
    freeze: Listed[str] = key(
        'Globs of parameter names that stay as they are, e.g. ["model.embed_tokens.*"].', (), alters="yes"
    )
    images: Literal["off", "frozen", "trained"] = key(
        "Whether rows may have images, prepared by the processor in the model's folder. frozen: what reads them, "
        "vision tower and projector, is streamed and stays as it is; trained: it is trained with the rest, as far as "
        "freeze leaves it. off: rows with images are left out, and what reads them is not loaded.",
        "off",
        alters="yes",
    )

    @property
    def compiler(self) -> str | None:
        """Backend of torch.compile for the layers; None: they are not compiled."""
        return self.compile_backend if self.compile else None


class LoraConfig(Table, json_schema_extra=all_alter("yes")):
    """``[lora]``: small adapters that are trained in place of the model, with peft's names and files."""

    r: int = key(
        "Rank of the adapters, e.g. 16; QLoRA over a quantized folder. 0: none, and the model itself is trained.",
        0,
        ge=0,
    )
    lora_alpha: float = key("Adapters are scaled by lora_alpha / r.", 8.0, gt=0)
    lora_dropout: float = key("Share of an adapter's inputs that is dropped.", 0.0, ge=0, lt=1)
    target_modules: TargetModules = key(
        'Modules with adapters: names or their ends, e.g. ["q_proj", "v_proj"]; "all-linear"; a regular expression of '
        "whole names. auto: those that peft chooses for this kind of model.",
        "auto",
    )
    target_parameters: Listed[str] = key(
        "Parameters with adapters that are no module's weight, such as those of fused experts: "
        '["mlp.experts.gate_up_proj"]. Not with lora_dropout.',
        (),
    )
    exclude_modules: Listed[str] = key("Modules among target_modules that get no adapter.", ())
    modules_to_save: Listed[str] = key(
        'Modules that are trained as a whole beside the adapters, and saved with them, e.g. ["lm_head"].', ()
    )
    layers_to_transform: Listed[int] = key("Numbers of the layers that get adapters. Default: all.", ())
    rank_pattern: dict[str, Annotated[int, Field(ge=1)]] = key("Name of a module -> its own r.", {})
    alpha_pattern: dict[str, Annotated[float, Field(gt=0)]] = key("Name of a module -> its own lora_alpha.", {})
    use_rslora: bool = key("Scale by lora_alpha / sqrt(r).", False)
    use_dora: bool = key("DoRA: magnitudes of the rows of each weight are trained as well.", False)
    init_lora_weights: Literal["gaussian"] | bool = key("true: Kaiming's rule for A, zeros for B.", True)
    adapter_name_or_path: AdapterPath | None = key(
        "Folder of an adapter, as peft or an earlier run wrote it, that training starts from. Its settings hold; only "
        "lora_dropout is taken from here. Default: a new one.",
        None,
        alters="by contents",
        same_name="LLaMA-Factory",
    )

    @property
    def is_on(self) -> bool:
        """Whether adapters are trained."""
        return self.r > 0 or self.adapter_name_or_path is not None


class ExportConfig(Table, json_schema_extra=all_alter("no")):
    """``[export]``: the Hugging Face folder written at the end."""

    format: Literal["safetensors"] = key("Config, tokenizer, shards and index.", "safetensors")
    dtype: Literal["auto", "float32", "bfloat16"] = key("auto: the compute dtype.", "auto")
    max_shard_size: PlainSize = key('Largest file, e.g. "5GB".', 5 * 10**9, ge=1)
    merge: bool = key("[lora]: write the model with its adapters added; false: the adapters alone.", False)
