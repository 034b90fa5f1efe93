"""Write docs/cli.md from the help of the commands: ``python docs/commands.py > docs/cli.md``."""

from __future__ import annotations

from collections.abc import Iterator

import click

from megatrain_tier_cli.main import CODE_MEANINGS, DEBUG_VARIABLE, PROGRAM, command_group

_WIDTH = 100  # columns of a help text

_INTRODUCTION = f"""\
# Commands

`python docs/commands.py > docs/cli.md` writes this page from the help of the commands; do not edit it.
CONFIG is a TOML file ([its keys](config.md)), and RUN is the `output_dir` of a run. Output has colors only on a
terminal and if `NO_COLOR` is not set. `{DEBUG_VARIABLE}=1` shows the traceback of an error.
"""

#: Example arguments of each command. tests/docs runs the examples in this order.
_EXAMPLES = {
    "init": 'my.toml --task sft --model models/base --data "data/*.jsonl"',
    "import": "ds_config.json --from deepspeed -o translated.toml",
    "config show": "run.toml --origin",
    "config explain": "cutoff_len",
    "config diff": "run.toml outputs/first",
    "config schema": "-o megatrain-tier.schema.json",
    "doctor": "--quick /mnt/nvme",
    "plan": "run.toml --set tiers.ram.size=64GiB --set data.max_length=2048",
    "data preview": "run.toml -n 2",
    "data stats": "run.toml",
    "check": "run.toml",
    "verify": "run.toml",
    "run": "run.toml --set output_dir=outputs/second --set learning_rate=2e-5",
    "score": "run.toml --set output_dir=outputs/scores",
    "status": "outputs/first",
    "save": "outputs/first",
    "stop": "outputs/first",
    "report": "outputs/first --html report.html",
    "export": "outputs/first model-400 --step 400 --dtype bfloat16",
    "generate": 'model-400 --prompt "Call me" --prompt "The sea" --max-new-tokens 8 -o said.jsonl',
    "ckpt ls": "outputs/first",
    "ckpt verify": "outputs/first",
    "ckpt rm": "outputs/first --step 200 --yes",
    "clean": "state --yes",
    "completion": "bash",
}


def to_markdown() -> str:
    """Return the page as Markdown, independent of the terminal."""
    found = {name.removeprefix(f"{PROGRAM} "): text for name, _, text in commands()}
    assert sorted(_EXAMPLES) == sorted(found), sorted(set(_EXAMPLES) ^ set(found))
    parts = [_INTRODUCTION, "| exit code | meaning |", "|---|---|"]
    parts += [f"| {code} | {meaning} |" for code, meaning in CODE_MEANINGS.items()]
    for name, example in _EXAMPLES.items():
        parts += ["", f"## `{PROGRAM} {name}`", "", "```text", found[name], "```", "", "Example:", ""]
        parts += ["```sh", f"{PROGRAM} {name} {example}", "```"]
    return "\n".join(parts) + "\n"


def commands() -> Iterator[tuple[str, click.Command, str]]:
    """Yield (full name, command, help) of every command that is not a group."""
    settings = {**command_group.context_settings, "terminal_width": _WIDTH, "color": False}
    yield from _below(command_group, click.Context(command_group, info_name=PROGRAM, **settings))


def _below(group: click.Group, ctx: click.Context) -> Iterator[tuple[str, click.Command, str]]:
    for name in group.list_commands(ctx):
        command = group.get_command(ctx, name)
        assert command is not None, name
        inner = click.Context(command, info_name=name, parent=ctx)
        if isinstance(command, click.Group):
            yield from _below(command, inner)
        else:
            yield inner.command_path, command, command.get_help(inner)


if __name__ == "__main__":
    print(to_markdown(), end="")
