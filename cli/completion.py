"""``megatrain-tier completion``: the script with which a shell completes commands and options."""

from __future__ import annotations

import click

_COMMAND = "megatrain-tier"
_HOW = {
    "bash": 'eval "$(megatrain-tier completion bash)"      # in ~/.bashrc',
    "zsh": 'eval "$(megatrain-tier completion zsh)"       # in ~/.zshrc, after compinit',
    "fish": "megatrain-tier completion fish | source       # in ~/.config/fish/config.fish",
}


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def command(ctx: click.Context, shell: str) -> int:
    """Print the completion script of a shell.

    \b
    bash   eval "$(megatrain-tier completion bash)"  in ~/.bashrc
    zsh    eval "$(megatrain-tier completion zsh)"   in ~/.zshrc, after compinit
    fish   megatrain-tier completion fish | source   in ~/.config/fish/config.fish
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None, shell
    variable = f"_{_COMMAND.replace('-', '_').upper()}_COMPLETE"
    click.echo(f"# {_HOW[shell]}")
    click.echo(kind(ctx.find_root().command, {}, _COMMAND, variable).source())
    return 0
