"""Tiny models that are not causal language models, with inputs: diffusion, T5, speech, vision, reward, proteins."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Case:
    """Tiny model with inputs and a loss.

    Attributes:
        make: Function that creates the model with random weights.
        inputs: Function that creates the keyword arguments of a forward on two rows.
        loss: Function that computes the loss from the model's output.
        ram_kib: RAM of the store in KiB: less than half of what weights, gradients and optimizer state need.
        needs: Package that defines the model.
    """

    make: Callable[[], nn.Module]
    inputs: Callable[[], Mapping[str, Any]]
    loss: Callable[[Any], Tensor]
    ram_kib: int
    needs: str = "transformers"


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def _ids(*shape: int, most: int = 64) -> Tensor:
    return torch.randint(3, most, shape, generator=torch.Generator().manual_seed(sum(shape)))


def _velocity(output: Any) -> Tensor:
    """Return the flow-matching loss of a predicted velocity, with a random tensor as the true velocity."""
    (found,) = output
    target = torch.randn(found.shape, generator=torch.Generator().manual_seed(7))
    return (found.float() - target).square().mean()


def _own(output: Any) -> Tensor:
    loss: Tensor = output.loss
    return loss


def _grid(columns: int) -> Tensor:
    """Return the positions of a latent's 4 x 4 patches, with shape (16, columns)."""
    y, x = torch.meshgrid(torch.arange(4.0), torch.arange(4.0), indexing="ij")
    places = torch.zeros(16, columns)
    places[:, 1], places[:, 2] = y.flatten(), x.flatten()
    return places


def _flux() -> nn.Module:
    from diffusers import FluxTransformer2DModel

    return FluxTransformer2DModel(
        in_channels=4,
        num_layers=2,
        num_single_layers=4,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
        guidance_embeds=True,
    )


def _flux_inputs() -> dict[str, Any]:
    return {
        "hidden_states": _random(2, 16, 4),
        "encoder_hidden_states": _random(2, 8, 32),
        "pooled_projections": _random(2, 32),
        "timestep": torch.tensor([0.3, 0.7]),
        "guidance": torch.ones(2),
        "img_ids": _grid(3),
        "txt_ids": torch.zeros(8, 3),
        "return_dict": False,
    }


def _flux2() -> nn.Module:
    from diffusers import Flux2Transformer2DModel

    return Flux2Transformer2DModel(
        in_channels=4,
        num_layers=2,
        num_single_layers=4,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        timestep_guidance_channels=32,
        axes_dims_rope=(4, 4, 4, 4),
    )


def _flux2_inputs() -> dict[str, Any]:
    inputs = _flux_inputs()
    del inputs["pooled_projections"]
    return {**inputs, "img_ids": _grid(4), "txt_ids": torch.zeros(8, 4)}


def _qwen_image() -> nn.Module:
    from diffusers import QwenImageTransformer2DModel

    return QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=4,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        axes_dims_rope=(8, 4, 4),
    )


def _qwen_image_inputs() -> dict[str, Any]:
    return {
        "hidden_states": _random(2, 16, 16),
        "encoder_hidden_states": _random(2, 7, 16),
        "encoder_hidden_states_mask": torch.ones(2, 7, dtype=torch.long),
        "timestep": torch.tensor([0.3, 0.7]),
        "img_shapes": [[(1, 4, 4)]] * 2,
        "return_dict": False,
    }


def _wan() -> nn.Module:
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=16,
        ffn_dim=64,
        num_layers=6,
        rope_max_seq_len=32,
    )


def _wan_inputs() -> dict[str, Any]:
    steps = torch.tensor([300, 700])
    texts = {"encoder_hidden_states": _random(2, 8, 16), "return_dict": False}
    return {"hidden_states": _random(2, 4, 3, 8, 8), "timestep": steps, **texts}


def _sd3() -> nn.Module:
    from diffusers import SD3Transformer2DModel

    return SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_layers=4,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=32,
        caption_projection_dim=32,
        pooled_projection_dim=64,
        out_channels=4,
        pos_embed_max_size=8,
    )


def _sd3_inputs() -> dict[str, Any]:
    texts = {"encoder_hidden_states": _random(2, 6, 32), "pooled_projections": _random(2, 64), "return_dict": False}
    return {"hidden_states": _random(2, 4, 8, 8), "timestep": torch.tensor([300, 700]), **texts}


def _unet() -> nn.Module:
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(16, 32),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=16,
        attention_head_dim=4,
        norm_num_groups=8,
    )


def _unet_inputs() -> dict[str, Any]:
    texts = {"encoder_hidden_states": _random(2, 6, 16), "return_dict": False}
    return {"sample": _random(2, 4, 8, 8), "timestep": torch.tensor([300, 700]), **texts}


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    more = {"pad_token_id": 0, "decoder_start_token_id": 0, "dropout_rate": 0.0}
    return T5ForConditionalGeneration(
        T5Config(vocab_size=64, d_model=32, d_kv=16, d_ff=64, num_layers=3, num_heads=2, **more)
    )


def _whisper() -> nn.Module:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    return WhisperForConditionalGeneration(
        WhisperConfig(
            vocab_size=64,
            num_mel_bins=8,
            d_model=32,
            encoder_layers=3,
            decoder_layers=3,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=64,
            decoder_ffn_dim=64,
            max_source_positions=16,
            max_target_positions=16,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
        )
    )


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            image_size=16,
            patch_size=4,
            hidden_size=32,
            num_hidden_layers=6,
            num_attention_heads=2,
            intermediate_size=64,
            num_labels=5,
        )
    )


def _reward() -> nn.Module:
    from transformers import LlamaConfig, LlamaForSequenceClassification

    return LlamaForSequenceClassification(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=6,
            num_attention_heads=2,
            num_key_value_heads=2,
            num_labels=1,
            pad_token_id=0,
        )
    )


def _difference(output: Any) -> Tensor:
    """Return the pairwise reward loss, where the first text is the preferred one."""
    better, worse = output.logits
    return -nn.functional.logsigmoid(better - worse).mean()


def _protein() -> nn.Module:
    from transformers import EsmConfig, EsmForMaskedLM

    return EsmForMaskedLM(
        EsmConfig(
            vocab_size=33,
            hidden_size=32,
            num_hidden_layers=6,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=32,
            position_embedding_type="rotary",
            pad_token_id=1,
            mask_token_id=32,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def _tags() -> nn.Module:
    from transformers import BertConfig, BertForTokenClassification

    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForTokenClassification(
        BertConfig(
            vocab_size=64,
            hidden_size=32,
            num_hidden_layers=6,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=32,
            num_labels=5,
            **none,
        )
    )


CASES: dict[str, Case] = {
    "Flux": Case(_flux, _flux_inputs, _velocity, 896, "diffusers"),
    "Flux.2": Case(_flux2, _flux2_inputs, _velocity, 640, "diffusers"),
    "Qwen-Image": Case(_qwen_image, _qwen_image_inputs, _velocity, 896, "diffusers"),
    "Wan": Case(_wan, _wan_inputs, _velocity, 512, "diffusers"),
    "SD3": Case(_sd3, _sd3_inputs, _velocity, 832, "diffusers"),
    "UNet": Case(_unet, _unet_inputs, _velocity, 960, "diffusers"),
    "T5": Case(_t5, lambda: {"input_ids": _ids(2, 9), "labels": _ids(2, 7)}, _own, 448),
    "Whisper": Case(_whisper, lambda: {"input_features": _random(2, 8, 32), "labels": _ids(2, 7)}, _own, 448),
    "ViT": Case(_vit, lambda: {"pixel_values": _random(2, 3, 16, 16), "labels": torch.tensor([1, 4])}, _own, 384),
    "reward": Case(_reward, lambda: {"input_ids": _ids(2, 9)}, _difference, 448),
    "token classes": Case(_tags, lambda: {"input_ids": _ids(2, 9), "labels": _ids(2, 9, most=5)}, _own, 384),
    "protein": Case(_protein, lambda: {"input_ids": _ids(2, 9, most=33), "labels": _ids(2, 9, most=33)}, _own, 384),
}
