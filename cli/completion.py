"""``megatrain-tier completion``: print the completion script of a shell."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from .main import EXIT_DONE, PROGRAM

#: Line that enables completion for commands and options, by shell.
_SHELLS = {
    "bash": 'eval "$(megatrain-tier completion bash)"      # in ~/.bashrc',
    "zsh": 'eval "$(megatrain-tier completion zsh)"       # in ~/.zshrc, after compinit',
    "fish": "megatrain-tier completion fish | source       # in ~/.config/fish/config.fish",
}


@click.command("completion")
@click.argument("shell", type=click.Choice(list(_SHELLS)))
@click.pass_context
def command(ctx: click.Context, shell: str) -> int:
    """Print the completion script of a shell.

    \b
    bash   eval "$(megatrain-tier completion bash)"  in ~/.bashrc
    zsh    eval "$(megatrain-tier completion zsh)"   in ~/.zshrc, after compinit
    fish   megatrain-tier completion fish | source   in ~/.config/fish/config.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None, shell
    variable = f"_{PROGRAM.replace('-', '_').upper()}_COMPLETE"
    click.echo(f"# {_SHELLS[shell]}")
    click.echo(kind(ctx.find_root().command, {}, PROGRAM, variable).source())
    return EXIT_DONE
