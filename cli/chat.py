"""``megatrain-tier chat``: a look at what was trained."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from .main import EXIT_CONFIG, EXIT_DONE, RunFailedError
from .terminal import Spinner, without_collector


@click.command("chat")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("-p", "--prompt", "prompts", multiple=True, metavar="TEXT", help="Ask this and end. May be repeated.")
@click.option("--system", default="", metavar="TEXT", help="The system message in front of the conversation.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=512, show_default=True, metavar="N")
@click.option(
    "--temperature",
    type=click.FloatRange(min=0),
    metavar="T",
    help="0: the likeliest token each time. Default: as the model's generation_config.json says.",
)
@click.option("--seed", type=click.IntRange(min=0), metavar="N", help="Of sampling. Default: another one each time.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
def command(
    folder: Path,
    prompts: tuple[str, ...],
    system: str,
    max_new_tokens: int,
    temperature: float | None,
    seed: int | None,
    device: str,
) -> int:
    """Talk to a trained model, to have a look at it.

    FOLDER is the output_dir of a run, or what an export wrote: a model, or an adapter. It is loaded whole, by
    transformers, and answers a token at a time. A model without a chat template continues the text that it is given.

    Without --prompt each line of stdin is one: /new begins another conversation, Ctrl-C stops an answer, Ctrl-D ends.
    """
    with Spinner("loading the model") as spinner, without_collector():
        import torch

        from megatrain.machine.machine import available_ram_bytes, gpu_memory_bytes, resolve_device
        from megatrain.tasks.chat import ChatError, ChatSettings, open_chat

        found = resolve_device(device)
        places = [(found, gpu_memory_bytes(found)[0])] if found.type == "cuda" else []
        if device != "cuda":
            places.append((torch.device("cpu"), available_ram_bytes()))
        chat = open_chat(folder, places, ChatSettings(max_new_tokens, temperature, seed, system))
        spinner.stop()
    click.echo(chat.description, err=True)
    if system and not chat.has_template:
        raise RunFailedError("--system: this model has no chat template, so no system message", EXIT_CONFIG)

    def answer(prompt: str) -> None:
        chat.answer(prompt, lambda text: click.echo(text, nl=False))
        click.echo()

    if prompts:
        for prompt in prompts:
            answer(prompt)
        return EXIT_DONE
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        kind = "a chat" if chat.has_template else "no chat template: it continues the text that you begin"
        click.echo(f"{kind}. /new begins another one, Ctrl-C stops an answer, Ctrl-D ends", err=True)
    while True:
        try:
            prompt = input("> " if is_terminal else "")
        except EOFError:
            return EXIT_DONE
        except KeyboardInterrupt:
            click.echo(err=True)
            return EXIT_DONE
        if prompt.strip() in ("/new", "/exit", "/quit"):
            if prompt.strip() != "/new":
                return EXIT_DONE
            chat.forget()
        elif prompt.strip():
            try:
                answer(prompt)
            except ChatError as error:
                if not is_terminal:
                    raise
                click.echo(f"error: {error}. /new begins another conversation", err=True)
            except KeyboardInterrupt:
                if not is_terminal:
                    raise
                click.echo(" [stopped]")
