"""Train a Flux transformer from diffusers, fully or with LoRA, with its frozen text encoders and VAE also offloaded.

Without the marked lines, this is an ordinary program. The model learns the velocity between a latent and noise (flow
matching), as in diffusers' own scripts. The first call creates a tiny model with random weights. For a real model, pass
``--model`` and set the sizes of the store, such as ``gpu="16GiB", ram="100GiB", nvme_size="400GiB"``:

    python examples/python/diffusion.py --output /tmp/flux --lora
    python examples/python/diffusion.py --output /tmp/flux --model black-forest-labs/FLUX.1-dev --dtype bfloat16

Needs ``pip install diffusers`` (and ``peft`` for ``--lora``). The program draws its own training images: discs, each in
a single color.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from diffusers import AutoencoderKL, FluxPipeline, FluxTransformer2DModel
from torch import Tensor
from transformers import AutoTokenizer, CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

import megatrain  # megatrain

QUICKSTART = Path(__file__).resolve().parent.parent / "quickstart"
COLOURS = {"red": (1.0, -1.0, -1.0), "green": (-1.0, 1.0, -1.0), "blue": (-1.0, -1.0, 1.0), "white": (1.0, 1.0, 1.0)}


def model_folder(folder: Path) -> Path:
    """Return a folder with the parts of a tiny Flux pipeline. The first call creates the folder."""
    if folder.exists():
        return folder
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(QUICKSTART / "model")
    clip = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=32,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    t5 = T5Config(vocab_size=len(tokenizer), d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2)
    FluxTransformer2DModel(
        in_channels=16,
        num_layers=2,
        num_single_layers=4,
        attention_head_dim=32,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(8, 12, 12),
        guidance_embeds=True,
    ).save_pretrained(folder / "transformer")
    down, up = ("DownEncoderBlock2D",) * 2, ("UpDecoderBlock2D",) * 2
    AutoencoderKL(
        down_block_types=down, up_block_types=up, block_out_channels=(8, 16), norm_num_groups=4
    ).save_pretrained(folder / "vae")
    CLIPTextModel(clip).save_pretrained(folder / "text_encoder")
    T5EncoderModel(t5).save_pretrained(folder / "text_encoder_2")
    for name in ("tokenizer", "tokenizer_2"):
        tokenizer.save_pretrained(folder / name)
    return folder


def pictures(num_rows: int = 2, size: int = 32) -> Iterator[tuple[list[str], Tensor]]:
    """Yield batches of captions and their images, (rows, 3, size, size), with values from -1 to 1."""
    y, x = torch.meshgrid(torch.linspace(-1, 1, size), torch.linspace(-1, 1, size), indexing="ij")
    names = list(COLOURS)
    for first in range(0, 1_000_000, num_rows):
        chosen = [names[row % len(names)] for row in range(first, first + num_rows)]
        discs = torch.stack([((x**2 + y**2) < 0.5) * torch.tensor(COLOURS[name])[:, None, None] for name in chosen])
        yield [f"a {name} disc" for name in chosen], discs


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder of the model and of the trained weights")
    parser.add_argument("--model", help="folder or hub id of a Flux pipeline; default: a tiny one")
    parser.add_argument("--dtype", default="float32", help="dtype of the weights: float32 or bfloat16")
    parser.add_argument("--lora", action="store_true", help="train only adapters")
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()

    model, dtype = options.model or model_folder(options.output / "model"), getattr(torch, options.dtype)
    transformer = FluxTransformer2DModel.from_pretrained(model, subfolder="transformer", torch_dtype=dtype)
    vae = AutoencoderKL.from_pretrained(model, subfolder="vae", torch_dtype=dtype).requires_grad_(False)
    clip = CLIPTextModel.from_pretrained(model, subfolder="text_encoder", dtype=dtype).requires_grad_(False)
    t5 = T5EncoderModel.from_pretrained(model, subfolder="text_encoder_2", dtype=dtype).requires_grad_(False)
    tokenizers = [AutoTokenizer.from_pretrained(model, subfolder=name) for name in ("tokenizer", "tokenizer_2")]
    transformer.enable_gradient_checkpointing()
    if options.lora:
        from peft import LoraConfig

        transformer.requires_grad_(False)
        targets = ["to_q", "to_k", "to_v", "to_out.0"]
        torch.manual_seed(0)
        transformer.add_adapter(LoraConfig(r=4, lora_alpha=4, target_modules=targets, init_lora_weights="gaussian"))

    store = megatrain.open_store(ram="3MiB", nvme=options.output / "store", nvme_size="256MiB")  # megatrain
    for name, module in {"transformer": transformer, "vae": vae, "clip": clip, "t5": t5}.items():  # megatrain
        megatrain.offload(module, store, name=name)  # megatrain
    trained = [parameter for parameter in transformer.parameters() if parameter.requires_grad]
    # was: optimizer = torch.optim.AdamW(trained, lr=options.rate)
    optimizer = megatrain.TieredAdamW(trained, lr=options.rate, max_grad_norm=1.0)  # megatrain

    device = transformer.device  # the compute device of the store
    generator = torch.Generator().manual_seed(0)
    for step, (texts, images) in zip(range(options.steps), pictures(), strict=False):
        with torch.no_grad():  # text encoders and VAE are frozen
            tokens = [
                one(texts, padding="max_length", max_length=length, truncation=True, return_tensors="pt").to(device)
                for one, length in zip(tokenizers, (clip.config.max_position_embeddings, 64), strict=True)
            ]
            pooled, embeddings = clip(tokens[0].input_ids).pooler_output, t5(tokens[1].input_ids).last_hidden_state
            latents = vae.encode(images.to(device, dtype)).latent_dist.mode()
            latents = (latents - (vae.config.shift_factor or 0)) * vae.config.scaling_factor
        rows, channels, height, width = latents.shape
        packed = FluxPipeline._pack_latents(latents, rows, channels, height, width)
        noise = torch.randn(packed.shape, generator=generator).to(device, dtype)
        time = torch.rand(rows, generator=generator).to(device, dtype)
        velocity = transformer(
            hidden_states=torch.lerp(packed, noise, time[:, None, None]),
            encoder_hidden_states=embeddings,
            pooled_projections=pooled,
            timestep=time,
            guidance=torch.ones_like(time) if transformer.config.guidance_embeds else None,
            img_ids=FluxPipeline._prepare_latent_image_ids(rows, height // 2, width // 2, device, dtype),
            txt_ids=torch.zeros(embeddings.shape[1], 3, device=device, dtype=dtype),
            return_dict=False,
        )[0]
        loss = (velocity - (noise - packed)).float().square().mean()
        loss.backward()
        # was: torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item()}")
    if options.lora:
        transformer.save_lora_adapter(options.output / "adapter")
    else:
        transformer.save_pretrained(options.output / "transformer")


if __name__ == "__main__":
    main()
