"""Config tables [model], [lora] and [export]: the model, its adapters, and the export."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from megatrain.base.table import Listed, PlainSize, Table, all_alter, as_tuple, explain, key, mark_path

ModelPath = Annotated[str, mark_path(name=r"[\w.-]+/[\w.-]+|[\w-]+")]
AdapterPath = Annotated[str, Field(min_length=1), mark_path()]
TargetModules = Annotated[
    str | Annotated[tuple[str, ...], Field(min_length=1)],
    BeforeValidator(as_tuple),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}]}),
    explain("is not a list of modules", 'Write a list of names: ["q_proj", "v_proj"], "all-linear" or "auto"'),
]
TemplatePath = Annotated[str, mark_path("auto")]
LigerChoice = Annotated[Literal["auto"] | bool, explain("is not a valid choice", 'Write true, false or "auto"')]
NoRemoteCode = Annotated[
    Literal[False], explain("is not possible: code in a model folder is never run here", "Remove the key")
]


#: Converters in the order in which they change a model: the file in ``megatrain/converters``, and the class.
CONVERTERS = (
    "multimodal.MultimodalModules",
    "adapters.Adapters",
    "experts.ExpertsInParts",
    "documents.AttentionByDocuments",
)


class ModelConfig(Table):
    """``[model]``: the model to train."""

    model_name_or_path: ModelPath = key(
        "Hugging Face folder with config.json and safetensors, or the id of a model on the hub.",
        min_length=1,
        examples=["path/to/model"],
        alters="by contents",
        same_name="TRL, LLaMA-Factory",
    )
    revision: str | None = key(
        "Branch, tag or commit of a hub model. Checkpoints record the commit.",
        None,
        min_length=1,
        examples=["main"],
        alters="by contents",
        same_name="transformers",
    )
    tokenizer_name_or_path: ModelPath | None = key(
        "Folder or hub id of the tokenizer. Default: the model's tokenizer.", None, alters="by contents"
    )
    chat_template: TemplatePath = key(
        '"auto" (the tokenizer\'s template) or the path of a .jinja file.', "auto", alters="by contents"
    )
    attn_implementation: Literal["auto", "sdpa", "eager", "flash_attention_2"] = key(
        "Attention kernel; auto: sdpa if the model supports it, else eager.",
        "auto",
        alters="yes",
        same_name="transformers, TRL, Axolotl, MegaTrain",
    )
    flash_attention: Literal["auto", "FA2", "FA3", "FA4"] = key(
        "Kernels of sdpa's flash attention on a GPU. FA2: the kernels of torch. FA3 (Hopper) and FA4 (Blackwell): "
        "kernels of the packages flash-attn-3 and flash-attn-4, faster on long rows, with different rounding. auto: "
        "FA3 or FA4 if the GPU and the package support it, else FA2. Checkpoints record the choice, and a resumed run "
        "keeps it.",
        "FA2",
        alters="yes",
    )
    compile: bool = key(
        "Compile each type of layer with torch.compile. This changes rounding, takes minutes at the first step, and "
        "needs a C++ compiler or Triton.",
        False,
        alters="yes",
    )
    compile_backend: Literal["inductor", "aot_eager", "eager"] = key(
        "Backend of compile. inductor generates kernels; the other backends are for debugging.",
        "inductor",
        alters="yes",
        used_if={"compile": [True]},
    )
    use_liger_kernel: LigerChoice = key(
        "Use the norms and gated MLPs of the package liger-kernel if it supports the model. Needs a GPU and changes "
        'rounding. auto: true on a GPU if the extra `gpu` is installed, except with compile or task = "distill". '
        "Checkpoints record the choice, and a resumed run keeps it.",
        "auto",
        alters="yes",
        same_name="transformers, TRL",
    )
    mlp_rows: int = key(
        "For long sequences: number of tokens that an MLP computes at a time, and recomputes in the backward. This "
        "limits the memory of MLPs and changes the order in which weight gradients are summed. 0: off.",
        0,
        ge=0,
        alters="yes",
    )
    split_experts: bool = key(
        "Stream the fused experts of a mixture in parts of several experts, if a layer's experts exceed the size of a "
        "part (16 Mi elements). This reduces the minimum memory to one part, and experts without tokens are not moved. "
        "Results are summed in fp32, which changes rounding.",
        False,
        alters="yes",
    )
    trust_remote_code: NoRemoteCode = key("Code in a model folder is never run.", False, alters="no")
    train_from_scratch: bool = key("Start from random weights, and read only config.json.", False, alters="by contents")
    freeze: Listed[str] = key('Glob patterns of parameters to freeze: ["model.embed_tokens.*"].', (), alters="yes")
    images: Literal["off", "frozen", "trained"] = key(
        "Treatment of rows with images, which the processor in the model's folder prepares. frozen: vision encoder and "
        "projector are streamed but not trained. trained: they are also trained, except parameters in freeze. off: "
        "rows with images are dropped, and the vision encoder is not loaded.",
        "off",
        alters="yes",
    )

    @property
    def compiler(self) -> str | None:
        """Backend of torch.compile for the layers, or None if layers are not compiled."""
        return self.compile_backend if self.compile else None


class LoraConfig(Table, json_schema_extra=all_alter("yes")):
    """``[lora]``: small adapters that are trained instead of the model. Names and files are the same as in peft."""

    r: int = key(
        "Rank of the adapters, e.g. 16; with a quantized folder this is QLoRA. 0: no adapters; the model itself is "
        "trained.",
        0,
        ge=0,
    )
    lora_alpha: float = key("Numerator of the adapters' scale, lora_alpha / r.", 8.0, gt=0)
    lora_dropout: float = key("Dropout probability of adapter inputs.", 0.0, ge=0, lt=1)
    target_modules: TargetModules = key(
        'Modules with adapters: a list of names or name endings, e.g. ["q_proj", "v_proj"]; "all-linear"; or a regular '
        "expression for whole names. auto: the default of peft for this model.",
        "auto",
    )
    target_parameters: Listed[str] = key(
        "Parameters that get adapters although they are not a module's weight, such as fused experts, e.g. "
        '["mlp.experts.gate_up_proj"]. Cannot be combined with lora_dropout.',
        (),
    )
    exclude_modules: Listed[str] = key("Modules in target_modules that get no adapter.", ())
    modules_to_save: Listed[str] = key(
        'Modules that are fully trained and saved with the adapters, e.g. ["lm_head"].', ()
    )
    layers_to_transform: Listed[int] = key("Indices of the layers with adapters. Default: all.", ())
    rank_pattern: dict[str, Annotated[int, Field(ge=1)]] = key("r by module name.", {})
    alpha_pattern: dict[str, Annotated[float, Field(gt=0)]] = key("lora_alpha by module name.", {})
    use_rslora: bool = key("Scale by lora_alpha / sqrt(r).", False)
    use_dora: bool = key("DoRA: also train the magnitude of each row of a weight.", False)
    init_lora_weights: Literal["gaussian"] | bool = key("As in peft. true: Kaiming for A, zeros for B.", True)
    adapter_name_or_path: AdapterPath | None = key(
        "Folder of an adapter to start from, created by peft or by an earlier run. Its settings apply, except "
        "lora_dropout. Default: a new adapter.",
        None,
        alters="by contents",
        same_name="LLaMA-Factory",
    )

    @property
    def is_on(self) -> bool:
        """Whether adapters are trained."""
        return self.r > 0 or self.adapter_name_or_path is not None


class ExportConfig(Table, json_schema_extra=all_alter("no")):
    """``[export]``: the Hugging Face folder that a run writes when it ends."""

    format: Literal["safetensors"] = key("Format of the weight files.", "safetensors")
    dtype: Literal["auto", "float32", "bfloat16"] = key("dtype of the weights. auto: the compute dtype.", "auto")
    max_shard_size: PlainSize = key('Maximum size of a weight file, e.g. "5GB".', 5 * 10**9, ge=1)
    merge: bool = key("[lora]: true writes the model with merged adapters; false writes only the adapters.", False)
