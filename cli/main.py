"""The command group: all commands, and the exit codes of errors.

This module and the modules of the commands import heavy packages only inside functions, so that ``--help`` is fast.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import importlib
import os
import secrets
import shutil
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import click

from .terminal import OWN_PROCESS, echo_wrapped, safe_output

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_CONFIG = 2
EXIT_DOES_NOT_FIT = 3
EXIT_DATA = 4
EXIT_VERIFY = 5
EXIT_INTERRUPTED_AND_SAVED = 75

#: Meaning of each exit code, for the help and docs/cli.md.
CODE_MEANINGS = {
    EXIT_DONE: "done",
    EXIT_FAILED: "failed, or interrupted without a save",
    EXIT_CONFIG: "wrong config, model folder or usage",
    EXIT_DOES_NOT_FIT: "does not fit the tiers",
    EXIT_DATA: "wrong data",
    EXIT_VERIFY: "verify found a difference",
    EXIT_INTERRUPTED_AND_SAVED: "interrupted and saved; the same command continues",
}

PROGRAM = "megatrain-tier"
DEBUG_VARIABLE = "MEGATRAIN_TIER_DEBUG"

#: Errors that users can fix, as (module, class, exit code). Looking an error up imports no modules.
EXPECTED_ERRORS: tuple[tuple[str, str, int], ...] = (
    ("megatrain.base.errors", "ConfigError", EXIT_CONFIG),
    ("megatrain.tasks.prompts", "PromptError", EXIT_CONFIG),
    ("megatrain.ranks.world", "WorldError", EXIT_CONFIG),
    ("megatrain.base.errors", "ModelFolderError", EXIT_CONFIG),
    ("megatrain.base.errors", "UnsupportedModelError", EXIT_CONFIG),
    ("megatrain.models.internals", "TransformersVersionError", EXIT_CONFIG),
    ("megatrain.models.graph", "FreezeError", EXIT_CONFIG),
    ("megatrain.converters.adapters", "AdapterError", EXIT_CONFIG),
    ("megatrain.models.checkpoint_names", "ConversionError", EXIT_CONFIG),
    ("megatrain.models.initialize", "InitializationError", EXIT_CONFIG),
    ("megatrain.optim.plugins", "OptimizerError", EXIT_CONFIG),
    ("megatrain.optim.lr", "ScheduleError", EXIT_CONFIG),
    ("megatrain.extras.doctor.drives", "UnusablePathError", EXIT_CONFIG),
    ("megatrain.checkpoint.resume", "ConfigChangedError", EXIT_CONFIG),
    ("megatrain.extras.translate.read", "TranslationError", EXIT_CONFIG),
    ("megatrain.checkpoint.resume", "NoSuchCheckpointError", EXIT_CONFIG),
    ("megatrain.models.export", "ExportTargetError", EXIT_CONFIG),
    ("tiered.errors", "UnusableDirectoryError", EXIT_CONFIG),
    ("megatrain.checkpoint.state", "CheckpointError", EXIT_FAILED),
    ("megatrain.base.owner", "UnreachableRunError", EXIT_FAILED),
    ("megatrain.extras.report.history", "NoRunRecordsError", EXIT_CONFIG),
    ("megatrain.plan.shortfall", "DoesNotFitError", EXIT_DOES_NOT_FIT),
    ("megatrain.plan.limits", "BeyondMachineError", EXIT_DOES_NOT_FIT),
    ("megatrain.machine.files", "MachineFileError", EXIT_CONFIG),
    ("megatrain.data.rows_report", "DataError", EXIT_DATA),
    ("megatrain.data.scores", "ScoresError", EXIT_CONFIG),
    ("megatrain.engine.device.environment", "DeviceError", EXIT_FAILED),
    ("megatrain.engine.device.environment", "DeterminismError", EXIT_CONFIG),
    ("megatrain.engine.forward", "NoTrainedTokensError", EXIT_DATA),
    ("megatrain.engine.lockstep", "VisitOrderError", EXIT_FAILED),
    ("megatrain.engine.step", "NonFiniteGradientError", EXIT_FAILED),
    ("megatrain.models.export", "ExportError", EXIT_FAILED),
    ("megatrain.models.export", "DamagedShardError", EXIT_FAILED),
    ("tiered.errors", "TieredError", EXIT_FAILED),
)
#: Commands by section of the help, in the order in which users need them.
GROUPS = {
    "Start": ("init", "import", "check", "plan", "run"),
    "Watch": ("status", "save", "stop"),
    "Result": ("report", "generate", "export", "score"),
    "Inspect": ("config", "data", "doctor", "verify"),
    "Maintain": ("ckpt", "clean", "completion"),
}
#: Module and attribute of each command, imported when the command is called.
_COMMANDS = {
    **{name: (f".{name}", "command") for names in GROUPS.values() for name in names},
    "import": (".import_", "command"),  # ``import`` is a keyword, so the module has another name.
    "save": (".control", "save_command"),
    "status": (".show_runs", "command"),
    "stop": (".control", "stop_command"),
}
#: Common short names of keys.
_SHORT_NAMES = {
    "lr": "learning_rate",
    "epochs": "num_train_epochs",
    "num_epochs": "num_train_epochs",
    "steps": "max_steps",
    "batch_size": "per_device_train_batch_size",
    "seq_len": "max_length",
    "model": "model_name_or_path",
    "rank": "lora.r",
}

#: Replacement for each removed command.
_REMOVED_COMMANDS = {
    "trace": "Open RUN/trace.json at https://ui.perfetto.dev; `megatrain-tier report RUN` prints its path",
    "chat": "`megatrain-tier generate FOLDER --interactive` talks to a model",
}
#: Replacement for each removed option, by (command, option).
_REMOVED_OPTIONS = {
    ("doctor", "--processes"): "Plan for several GPUs with `plan --machine FILE`: write the rate between them as "
    "`peer` into [gpu] of the file that `doctor --save-profile FILE` makes",
    ("generate", "--rows"): "Use --micro-batch-size",
    ("generate", "--together"): "Use --batch-size",
    ("plan", "--what-if"): "Plan once more with other values: plan CONFIG --set tiers.ram.size=64GiB --set "
    "data.max_length=2048",
    ("report", "--compare"): "Call `report --json` for each run; `megatrain-tier config diff RUN RUN2` lists the keys "
    "that differ",
    ("run", "--detach"): "Start it in tmux, as `nohup megatrain-tier run CONFIG &`, or with systemd-run; "
    "`megatrain-tier status --follow RUN` shows it from anywhere",
    ("verify", "--processes"): "Run CONFIG twice, with `run --processes N` and with `run --processes 1`, both with "
    "--set training.gradient_lanes=N: the losses in metrics.jsonl are bit-identical",
}

#: Errors from creating or renaming a file, after which the old file may still be writable in place.
_RENAME_ERRORS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY)


class RunFailedError(Exception):
    """Error that ends a command. The command line prints the message and returns the exit code."""

    def __init__(self, message: str, exit_code: int) -> None:
        self.exit_code = exit_code
        super().__init__(message)


def write_file(path: Path, text: str, *, is_exclusive: bool = False) -> None:
    """Write a file that the user named, atomically if its folder permits, so that a full drive keeps the old file.

    Raises:
        RunFailedError: The file cannot be written, or exists although `is_exclusive` is set.
    """
    try:
        if path.exists() and not path.is_file():  # Do not resolve a terminal or pipe: the resolved name may not exist.
            path.write_text(text, encoding="utf-8")
        else:
            _write_atomically(Path(os.path.realpath(path)), text, is_exclusive=is_exclusive)
    except FileExistsError:
        raise RunFailedError(f"{path}: already exists; nothing was written. Name another file", EXIT_CONFIG) from None
    except OSError as error:
        raise RunFailedError(f"{path}: {error.strerror}. Name another file", EXIT_FAILED) from None


def _write_atomically(target: Path, text: str, *, is_exclusive: bool) -> None:
    partial = target.with_name(f".{PROGRAM}-{secrets.token_hex(8)}.partial")
    try:
        with partial.open("x", encoding="utf-8") as file:
            file.write(text)
        if is_exclusive:
            _link(partial, target)
            return
        if target.exists():
            shutil.copymode(target, partial)
        os.replace(partial, target)
    except OSError as error:
        # The folder or its mount forbids a new file, but the old file may be writable.
        if is_exclusive or error.errno not in _RENAME_ERRORS or not os.access(target, os.W_OK):
            raise
        target.write_text(text, encoding="utf-8")
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()


def _link(partial: Path, target: Path) -> None:
    try:
        os.link(partial, target)
    except FileExistsError:
        raise
    except OSError:  # Some file systems have no hard links.
        with target.open("xb") as file:
            file.write(partial.read_bytes())


def exit_code_of(error: BaseException) -> int | None:
    """Return the exit code of an expected error, or None."""
    if isinstance(error, RunFailedError):
        return error.exit_code
    for module_name, class_name, code in EXPECTED_ERRORS:
        error_class = getattr(sys.modules.get(module_name), class_name, None)
        if error_class is not None and isinstance(error, error_class):
            return code
    return EXIT_FAILED if isinstance(error, OSError | MemoryError) else None


def describe(error: BaseException) -> str:
    """Return the message of an error, without a traceback."""
    if isinstance(error, IsADirectoryError) and error.filename is not None:
        name = error.filename2 or error.filename
        return f"{name}: is a folder, but this program needs a file there. Move the folder, or use another path"
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, MemoryError):
        return "out of memory. Reduce [tiers.ram] or data.max_length"
    text = str(error) or type(error).__name__
    if exit_code_of(error) is None:
        return (
            f"internal error, {type(error).__name__}: {text}\nSet {DEBUG_VARIABLE}=1 to see where, and please report it"
        )
    return text


class Subcommands(click.Group):
    """A command group that lists its commands with full summaries, which click would truncate to one line."""

    def sections(self, ctx: click.Context) -> Mapping[str, Sequence[str]]:
        """Return the names of the commands, by section title."""
        return {"Commands": self.list_commands(ctx)}

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the name and the first sentence of each command."""
        for title, names in self.sections(ctx).items():
            commands = [(name, command) for name in names if (command := self.get_command(ctx, name)) is not None]
            with formatter.section(title):
                formatter.write_dl([(name, command.get_short_help_str(sys.maxsize)) for name, command in commands])


class CommandGroup(Subcommands):
    """A command group that imports commands on demand, and converts exceptions to messages and exit codes."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def sections(self, ctx: click.Context) -> Mapping[str, Sequence[str]]:
        return GROUPS

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = str(args[0])
        if name in _REMOVED_COMMANDS:
            ctx.fail(f"The command '{name}' was removed. {_REMOVED_COMMANDS[name]}")
        suggestions = difflib.get_close_matches(name, _COMMANDS, n=1, cutoff=0.5)
        if name not in _COMMANDS and suggestions and not name.startswith("-"):
            ctx.fail(f"No such command '{name}'. Did you mean '{suggestions[0]}'?")
        return super().resolve_command(ctx, args)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, name = _COMMANDS[cmd_name]
        command = getattr(importlib.import_module(module, __package__), name)
        assert isinstance(command, click.Command), cmd_name
        return command

    def main(self, args: Sequence[str] | None = None, **extra: Any) -> Any:  # type: ignore[override]
        extra["standalone_mode"] = False
        if os.environ.get("NO_COLOR"):
            extra["color"] = False
        with safe_output():  # Names, rows and messages may come from untrusted files.
            self._run(args, extra)

    def _run(self, args: Sequence[str] | None, extra: dict[str, Any]) -> NoReturn:
        try:
            code = super().main(args, **extra)
        except click.ClickException as error:
            if isinstance(error, click.NoSuchOption):
                error = _explain_unknown_option(error)
            error.show()
            sys.exit(error.exit_code)
        except (KeyboardInterrupt, click.Abort):
            click.echo("interrupted; nothing saved", err=True)
            sys.exit(EXIT_FAILED)
        except Exception as error:
            if os.environ.get(DEBUG_VARIABLE):
                traceback.print_exc()
            code = exit_code_of(error) or EXIT_FAILED
            prefix = "" if code == EXIT_INTERRUPTED_AND_SAVED else "error: "
            echo_wrapped(f"{prefix}{describe(error)}", err=True)
            sys.exit(code)
        sys.exit(code if isinstance(code, int) else EXIT_DONE)


def _explain_unknown_option(error: click.NoSuchOption) -> click.UsageError:
    """Explain how to set a config key that the user wrote as an option. Drop suggestions that are not similar."""
    command = "" if error.ctx is None else str(error.ctx.info_name)
    replacement = _REMOVED_OPTIONS.get((command, error.option_name))
    if replacement is not None:
        return click.UsageError(f"`{command}` no longer has {error.option_name}. {replacement}", error.ctx)
    option = error.option_name.lstrip("-").replace("-", "_")
    from megatrain.config.keys import full_keys_of_leaf

    leaf = _SHORT_NAMES.get(option, option)
    if full_keys_of_leaf(leaf.rpartition(".")[2]):
        text = f"No such option: {error.option_name}. To set this config key, use --set {leaf}=VALUE"
        return click.UsageError(text, error.ctx)
    suggestions = difflib.get_close_matches(error.option_name, error.possibilities or (), cutoff=0.7)
    return click.NoSuchOption(error.option_name, None, suggestions, error.ctx)


def _print_version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if not value or ctx.resilient_parsing:
        return
    from importlib.metadata import PackageNotFoundError, version

    try:
        click.echo(f"{PROGRAM} {version(PROGRAM)}")
    except PackageNotFoundError:
        click.echo(f"{PROGRAM} (not installed, run from its folder)")
    ctx.exit()


def _enable_expandable_segments() -> None:
    """Set torch's CUDA allocator to expandable segments, unless the user configured the allocator.

    A tier fills most of the GPU's memory. In the rest, layers allocate and free large blocks of many sizes, which would
    fragment segments of fixed size. torch reads the variable when CUDA is first used.
    """
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


@click.group(
    cls=CommandGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="\b\nExit codes:\n" + "\n".join(f"  {code:<4}{meaning}" for code, meaning in CODE_MEANINGS.items()),
)
@click.option(
    "--version", is_flag=True, expose_value=False, is_eager=True, callback=_print_version, help="Print the version."
)
def command_group() -> None:
    """Train language models that do not fit in memory.

    Weights, gradients and optimizer state are stored in GPU memory, in RAM and on NVMe drives, and move on a schedule.
    """


def main() -> None:
    """Run the command line of megatrain-tier."""
    _enable_expandable_segments()
    command_group.main(prog_name=PROGRAM, obj=OWN_PROCESS)
