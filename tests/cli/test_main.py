"""Commands, exit codes and messages. A fake replaces the trainer, because these tests cover only the command line."""

# ruff: noqa: E501  -- one case per line reads best
from __future__ import annotations

import contextlib
import errno
import importlib
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from megatrain.base.observer import CheckpointMetrics, RunInfo, RunObserver, RunSummary, StepMetrics
from megatrain.data.rows_report import DataError
from megatrain.machine.files import machine_names
from megatrain.machine.this_machine import THIS_MACHINE
from megatrain.plan.limits import Objection
from megatrain.plan.process import ProcessMemory
from megatrain.plan.times import Estimate
from megatrain.ranks.group import RankGroup
from tiered import CapacityError, GiB, MiB
from tiered.durable.manifest import Manifest, write_manifest

CliModule = Callable[[str], ModuleType]
CONFIG = """task = "sft"
output_dir = "out"
[model]
model_name_or_path = "model"
[[data.train]]
path = "chat.jsonl"
"""


@dataclass(frozen=True)
class SomePlan:
    headline: str = "tiny  0.8 M params"
    tiers: tuple[str, ...] = ("ram", "nvme")
    rows: tuple[tuple[str, dict[str, int], str], ...] = (
        ("weights fp32", {"ram": 3 * MiB}, "all in RAM"),
        ("optimizer fp32", {"ram": 100, "nvme": 6 * MiB}, ""),
    )
    totals: dict[str, int] = field(default_factory=lambda: {"ram": 3 * MiB + 100, "nvme": 6 * MiB})
    budgets: dict[str, int] = field(default_factory=lambda: {"ram": 4 * MiB, "nvme": GiB})
    traffic: dict[str, int] = field(default_factory=lambda: {"nvme->ram": 6 * MiB})
    trace: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(exact=True, guesses=()))
    messages: tuple[str, ...] = ("hint   more RAM, less traffic",)
    objections: tuple[Objection, ...] = ()
    estimate: Estimate = field(default_factory=lambda: Estimate(0, {}))
    graph: None = None
    run: SimpleNamespace = field(
        default_factory=lambda: SimpleNamespace(
            optimizer=SimpleNamespace(lr_scheduler_type="constant", depends_on_length=False),
            model=SimpleNamespace(hub=None, table=SimpleNamespace(train_from_scratch=False)),
            tiers=SimpleNamespace(machine=THIS_MACHINE),
            checkpoint=None,
            max_steps=None,
            data=SimpleNamespace(table=SimpleNamespace(val_size=None)),
        )
    )
    traced: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(packing_warning="", flash_note=""))


METRICS = StepMetrics(
    step=1, max_steps=2, epoch=0.5, loss=1.25, grad_norm=0.5, lr=1e-5, num_real_tokens=100, num_trained_tokens=50,
    step_s=0.5, eta_s=0.5, tier_used_bytes={"ram": MiB}, tier_capacity_bytes={"ram": 4 * MiB},
)  # fmt: skip
CHECKPOINT = CheckpointMetrics(
    step=2, path=Path("out/checkpoints"), nbytes=3 * MiB, written_bytes=MiB, linked_bytes=2 * MiB, seconds=1.5, stall_s=0.1
)  # fmt: skip
SUMMARY = RunSummary(
    num_steps=2, first_loss=1.25, last_loss=1.0, seconds=1.0, num_real_tokens=200, num_trained_tokens=100,
    tier_peak_bytes={"ram": MiB}, tier_capacity_bytes={"ram": 4 * MiB}, link_bytes={"nvme->ram": 12 * MiB},
)  # fmt: skip


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch, cli_module: CliModule) -> dict[str, Any]:
    """Replace the trainer with a fake. The returned dict controls the fake, which stores its config in the dict."""
    asked: dict[str, Any] = {"plan": SomePlan(), "summary": SUMMARY, "error": None, "trained": False}

    class ReplacedTrainer:
        def __init__(
            self,
            config: Any,
            *,
            observer: RunObserver,
            plan: Any = None,
            activity: Any = None,
            allow_config_change: bool = False,
            exit_code_of: Any = None,
            group: Any = None,
        ) -> None:
            asked["config"], asked["allow_config_change"] = config, allow_config_change
            self.observer = observer
            self.plan = asked["plan"]
            self.run = self.plan.run

        def train(self) -> RunSummary:
            asked["trained"] = True
            self.observer.on_ready(None)
            if asked["error"] is not None:
                raise asked["error"]
            self.observer.on_start(RunInfo("out", "sft", "cpu", Path("out"), 2, 128))
            self.observer.on_step(METRICS)
            self.observer.on_step(replace(METRICS, step=2, loss=1.0, eta_s=0.0))
            self.observer.on_message("careful")
            self.observer.on_checkpoint(CHECKPOINT)
            self.observer.on_end(asked["summary"])
            return asked["summary"]  # type: ignore[no-any-return]

    session = cli_module("session")
    monkeypatch.setattr(session, "refuse_early", lambda config, **options: None)
    monkeypatch.setattr(session, "plan_one_rank", lambda config: asked["plan"])
    monkeypatch.setattr(session, "Trainer", ReplacedTrainer)
    monkeypatch.setattr("megatrain.training.trainer.Trainer", ReplacedTrainer)
    monkeypatch.setattr(session, "check_drives", lambda plan: None)
    monkeypatch.setattr(session, "check_folders", lambda spec: None)
    for module in (session, importlib.import_module("megatrain.training.open_run")):
        monkeypatch.setattr(module, "inspect_weights", lambda plan: ("", None))
    memory = ProcessMemory(3 * MiB, 400 * MiB, 0, MiB, MiB)
    monkeypatch.setattr("megatrain.plan.process.process_memory", lambda plan: memory)
    for function, field_name in (("headline", "headline"), ("table_rows", "rows")):
        monkeypatch.setattr(f"megatrain.plan.show.{function}", attrgetter(field_name))
    monkeypatch.setattr("megatrain.plan.show.messages", lambda plan, passthrough: plan.messages)
    return asked


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(CONFIG)
    (tmp_path / "chat.jsonl").touch()
    return path


@pytest.fixture
def call(cli_module: CliModule) -> Callable[..., Result]:
    group = cli_module("main").command_group
    return lambda *arguments: CliRunner().invoke(group, [str(argument) for argument in arguments])


def test_run_prints_the_plan_then_lines(call: Callable[..., Result], config: Path, trainer: dict[str, Any]) -> None:
    result = call("run", config)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == "tiny  0.8 M params"
    assert lines[1].split() == ["RAM", "NVME", "note"]
    assert lines[2].split() == ["weights", "fp32", "3.0", "-", "all", "in", "RAM"]
    assert lines[3].split() == ["optimizer", "fp32", "<0.1", "6.0"]
    assert lines[4].split() == ["total", "MiB", "3.0", "6.0"]
    assert lines[5].split() == ["budget", "4.0", "1,024.0"]
    assert lines[6].startswith("process         about ") and "3.00 MiB in the tier + " in lines[6]
    assert lines[7] == "moved per step  nvme->ram 6.00 MiB"
    assert "fits." in lines
    step = "step 1/2 50.0% | loss 1.2500 | gnorm 0.50 | lr 1.0e-05 | 200 tok/s (trained 100) | ram 1.0/4.0 MiB | eta 0 s"  # fmt: skip
    assert step in lines
    assert any(
        line.startswith("saved  checkpoint at step 2: 3.00 MiB (1.00 MiB written, 2.00 MiB linked)") for line in lines
    )
    assert "done   2 steps in 1.00 s of training   200 tok/s   200 tokens, 100 trained" in lines
    assert "loss   1.2500 -> 1.0000 (first and last step)" in lines
    assert "\x1b" not in result.output


def test_run_json_is_one_object_per_line(call: Callable[..., Result], config: Path, trainer: dict[str, Any]) -> None:
    result = call("run", config, "--json")
    objects = [json.loads(line) for line in result.stdout.splitlines()]
    assert objects[0]["totals"] == {"ram": 3 * MiB + 100, "nvme": 6 * MiB}
    assert [value.get("event") for value in objects[1:]] == ["step", "step", "message", "checkpoint", "end"]
    assert objects[1]["loss"] == 1.25
    assert (objects[4]["step"], objects[4]["path"]) == (2, "out/checkpoints")


def test_options_change_the_config(
    call: Callable[..., Result], config: Path, trainer: dict[str, Any], tmp_path: Path
) -> None:
    over = tmp_path / "over.toml"
    over.write_text("seed = 9\n")
    result = call("run", config, "-c", over, "--set", "learning_rate=2e-5", "--max-steps", 7)
    assert result.exit_code == 0, result.output
    used = trainer["config"]
    assert (used.seed, used.optimizer.learning_rate, used.training.max_steps) == (9, 2e-5, 7)


def test_dry_run_does_not_train(call: Callable[..., Result], config: Path, trainer: dict[str, Any]) -> None:
    result = call("run", config, "--dry-run")
    assert result.exit_code == 0
    assert not trainer["trained"]
    assert "fits." in result.stdout


@pytest.mark.parametrize(
    ("change", "options", "code", "is_trained"),
    [
        ({}, {}, 0, True),
        ({}, {"dry_run": True}, 0, False),
        ({"plan": SomePlan(objections=(Objection("tiers.ram", "no", "go", "place"),))}, {"dry_run": True}, 2, False),
        ({"plan": SomePlan(objections=(Objection("tiers.ram", "no", "go", "size"),))}, {"dry_run": True}, 3, False),
        ({"summary": replace(SUMMARY, interrupted=True)}, {}, 1, True),
        ({"summary": replace(SUMMARY, interrupted=True, saved_step=2)}, {"as_json": True}, 75, True),
        ({"error": KeyboardInterrupt()}, {}, 1, True),
    ],
)
def test_a_session_maps_its_options_to_an_exit_code(
    cli_module: CliModule,
    config: Path,
    trainer: dict[str, Any],
    change: dict[str, Any],
    options: dict[str, bool],
    code: int,
    is_trained: bool,
) -> None:
    session, terminal, shared = cli_module("session"), cli_module("terminal"), cli_module("options")
    trainer |= change
    given = shared.RunOptions(shared.ConfigSource(config), **options)
    output, spinner = terminal.RunOutput(), terminal.Spinner("reading", is_shown=False)
    one = session.Session(given, given.source.read(), RankGroup.single(), output, spinner)
    try:
        found = session.run(one)
    except cli_module("main").RunFailedError as error:
        found = error.exit_code
    assert (found, trainer["trained"]) == (code, is_trained)


def test_options_of_a_run_reach_its_processes(cli_module: CliModule) -> None:
    """A dry run starts no processes, so the arguments for the processes lack ``--dry-run``."""
    shared = cli_module("options")
    source = shared.ConfigSource(Path("a.toml"), (Path("b.toml"),), ("seed=1", "lr=2"))
    options = shared.RunOptions(source, dry_run=True, allow_config_change=True, as_json=True)
    words = "a.toml -c b.toml --set seed=1 --set lr=2 --allow-config-change --json"
    assert options.arguments == words.split()
    assert shared.RunOptions(shared.ConfigSource(Path("a.toml"))).arguments == ["a.toml"]


def test_progress_none_is_silent_after_the_plan(
    call: Callable[..., Result], config: Path, trainer: dict[str, Any]
) -> None:
    assert "step 1/2" not in call("run", config, "--set", "progress=none").stdout


def test_plan(call: Callable[..., Result], config: Path, trainer: dict[str, Any]) -> None:
    result = call("plan", config, "--json")
    assert (result.exit_code, json.loads(result.stdout)["fits"]) == (0, True)


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (DataError("a.jsonl line 2", "broken JSON", "Fix it"), 4, "error: a.jsonl line 2: broken JSON. Fix it"),
        (CapacityError("ram", 10, 5), 1, "error: tier 'ram' is too small: 10 bytes"),
        (OSError(28, "No space left on device", "out/model"), 1, "error: out/model: No space left on device"),
        (MemoryError(), 1, "error: out of memory"),
        (KeyboardInterrupt(), 1, "interrupted; nothing saved"),
        (RuntimeError("odd"), 1, "error: internal error, RuntimeError: odd"),
    ],
)
def test_failures_have_a_code_and_no_traceback(
    call: Callable[..., Result], config: Path, trainer: dict[str, Any], error: BaseException, code: int, message: str
) -> None:
    trainer["error"] = error
    result = call("run", config)
    assert result.exit_code == code
    assert message in result.stderr
    assert "Traceback" not in result.output


def test_debug_variable_shows_the_traceback(
    call: Callable[..., Result], config: Path, trainer: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGATRAIN_TIER_DEBUG", "1")
    trainer["error"] = RuntimeError("odd")
    assert "Traceback" in call("run", config).output


def test_interrupted_run(call: Callable[..., Result], config: Path, trainer: dict[str, Any]) -> None:
    trainer["summary"] = replace(SUMMARY, interrupted=True, first_loss=None, last_loss=None)
    result = call("run", config)
    assert result.exit_code == 1
    assert "interrupted; nothing saved" in result.stderr
    trainer["summary"] = replace(SUMMARY, interrupted=True, saved_step=2)
    result = call("run", config)
    assert result.exit_code == 75
    assert "interrupted at step 2, saved: run the same command again to continue" in result.stderr


def test_interrupted_start_names_the_earlier_checkpoint(
    call: Callable[..., Result], config: Path, trainer: dict[str, Any], tmp_path: Path
) -> None:
    trainer["error"] = KeyboardInterrupt()
    (tmp_path / "out/checkpoints").mkdir(parents=True)
    write_manifest(tmp_path / "out/checkpoints", Manifest(1, (), {"step": 40}))
    result = call("run", config)
    assert result.exit_code == 1
    assert "interrupted; last saved at step 40: run the same command again" in result.stderr


def test_resume_options(call: Callable[..., Result], config: Path, trainer: dict[str, Any], tmp_path: Path) -> None:
    assert call("run", config).exit_code == 0
    assert not trainer["allow_config_change"]
    assert trainer["config"].checkpoint.resume_from_checkpoint == "auto"
    assert call("run", config, "--resume", "no", "--allow-config-change").exit_code == 0
    assert trainer["allow_config_change"]
    assert trainer["config"].checkpoint.resume_from_checkpoint == "no"
    assert call("run", config, "--resume", tmp_path / 'an "odd" run').exit_code == 0
    assert str(trainer["config"].checkpoint.resume_from_checkpoint) == str(tmp_path / 'an "odd" run')


def test_config_problems_exit_2(call: Callable[..., Result], config: Path, trainer: dict[str, Any]) -> None:
    config.write_text(CONFIG + "[data]\ncutoff_len = 3\n")
    result = call("run", config, "--set", "tiers.ram.size=110")
    assert result.exit_code == 2
    assert result.stderr.splitlines() == [
        f"error: 2 problems in {config}",
        "  line 8: unknown key `data.cutoff_len`. That is LLaMA-Factory's name; here: data.max_length",
        '  --set, tiers.ram.size = 110 has no unit. Write "110GiB" or "110GB"',
    ]
    assert "config" not in trainer


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rum"], "No such command 'rum'. Did you mean 'run'?"),
        (["rnu", "x.toml"], "No such command 'rnu'. Did you mean 'run'?"),
        (["xyzzy"], "No such command 'xyzzy'"),
        (
            ["chat", "out"],
            "The command 'chat' was removed. `megatrain-tier generate FOLDER --interactive` talks to",
        ),
        (["run", "x.toml", "--lr", "3"], "No such option: --lr. To set this config key, use --set learning_rate=VALUE"),
        (["run", "x.toml", "--procesess", "3"], "Did you mean '--processes'?"),
        (["run"], "Missing argument 'CONFIG'"),
        (["run", "x.toml", "--max-steps", "0"], "0 is not in the range x>=1"),
        (["plan", "x.toml", "--wat"], "No such option"),
        (
            ["doctor", "--processes", "2"],
            "`doctor` no longer has --processes. Plan for several GPUs with `plan --machine FILE`",
        ),
        (
            ["plan", "x.toml", "--what-if", "ram=64GiB"],
            "`plan` no longer has --what-if. Plan once more with other values",
        ),
        (["trace", "out"], "The command 'trace' was removed. Open RUN/trace.json at https://ui.perfetto.dev"),
        (["report", ".", "--compare", "."], "`report` no longer has --compare. Call `report --json` for each run"),
        (["run", "x.toml", "--detach"], "`run` no longer has --detach. Start it in tmux, as `nohup megatrain-tier run"),
        (["plan", "no-such.toml"], "1 problem in no-such.toml\n  there is no such file"),
    ],
)
def test_usage_errors_exit_2(call: Callable[..., Result], arguments: list[str], message: str) -> None:
    result = call(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_help_lists_each_command_in_one_group(call: Callable[..., Result], cli_module: CliModule) -> None:
    main = cli_module("main")
    grouped = [name for names in main.GROUPS.values() for name in names]
    assert sorted(grouped) == sorted(main.command_group.list_commands(None))
    lines = call("--help").stdout.splitlines()
    titles = [line for line in lines if line.endswith(":") and not line.startswith(" ")]
    assert titles == ["Options:", *(f"{title}:" for title in main.GROUPS)]
    assert lines[lines.index("Start:") + 1].split()[0] == "init"


@pytest.mark.parametrize("command", ["", "ckpt", "config", "data"])
def test_no_summary_is_cut_at_80_columns(
    call: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = call(*command.split(), "--help").stdout
    assert "..." not in text.partition("Options:")[2]
    assert max(map(len, text.splitlines())) <= 80


def test_the_exit_codes_are_the_last_lines_of_the_help(call: Callable[..., Result], cli_module: CliModule) -> None:
    lines = call("--help").stdout.rstrip().splitlines()
    codes = [value for name, value in vars(cli_module("main")).items() if name.startswith("EXIT_")]
    assert [int(line.split()[0]) for line in lines[-len(codes) :]] == sorted(codes)


def test_machines_are_listed_without_a_config(call: Callable[..., Result]) -> None:
    result = call("plan", "--machine", "list")
    assert result.exit_code == 0
    assert [line.split()[0] for line in result.stdout.splitlines()] == list(machine_names())


def test_warnings_go_to_stderr(call: Callable[..., Result], config: Path, trainer: dict[str, Any]) -> None:
    result = call("plan", config, "--json", "--set", "warmup_ratio=0.1")
    assert "warning: --set: `warmup_ratio` is the name in transformers 4" in result.stderr
    assert json.loads(result.stdout)["fits"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        *([*name.split(), "--help"] for name in ("run", "plan", "export", "ckpt ls", "status")),
    ],
)
def test_help_does_not_import_torch(cli_package: str, arguments: list[str]) -> None:
    script = (
        "import sys, runpy, atexit\n"
        "heavy = ('torch', 'transformers', 'numpy', 'pydantic', 'tiered', 'megatrain')\n"
        "atexit.register(lambda: print('HEAVY', [name for name in heavy if name in sys.modules]))\n"
        f"sys.argv = ['megatrain-tier', *{arguments!r}]\n"
        f"runpy.run_module('{cli_package}', run_name='__main__')\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=60,
        env={**os.environ, "NO_COLOR": "1"}, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "HEAVY []" in result.stdout
    assert "megatrain-tier" in result.stdout


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [({}, "expandable_segments:True"), ({"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, "None")],
    ids=["by us", "by the user"],
)
def test_expandable_segments_are_the_default_allocator_setting(
    cli_package: str, chosen: dict[str, str], expected: str
) -> None:
    script = (
        "import sys, os, runpy, atexit\n"
        "atexit.register(lambda: print('CONF', os.environ.get('PYTORCH_ALLOC_CONF'), 'torch' in sys.modules))\n"
        "sys.argv = ['megatrain-tier', '--version']\n"
        f"runpy.run_module('{cli_package}', run_name='__main__')\n"
    )
    others = {name: value for name, value in os.environ.items() if not name.startswith("PYTORCH_")}
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=60,
        env={**others, **chosen}, check=True,
    )  # fmt: skip
    assert f"CONF {expected} False" in result.stdout


def test_expected_error_classes_exist(cli_module: CliModule) -> None:
    """The table names classes as text to avoid heavy imports. Without this test, a renamed class would go unnoticed."""
    for module_name, class_name, code in cli_module("main").EXPECTED_ERRORS:
        kind = getattr(importlib.import_module(module_name), class_name)
        assert issubclass(kind, Exception), class_name
        assert code in (1, 2, 3, 4)


@pytest.mark.parametrize("arguments", [["--help"], ["run", "no-such-file.toml"]])
def test_python_can_run_the_package_as_the_command(cli_package: str, arguments: list[str]) -> None:
    """`python -m megatrain` prints the same output and exits with the same code as the installed command."""
    pytest.importorskip("megatrain_tier_cli", reason="the project is not installed")
    here = Path(__file__).parents[2]
    ours, theirs = (
        subprocess.run(
            [sys.executable, "-m", name, *arguments], cwd=here, capture_output=True, text=True, timeout=120, check=False
        )
        for name in ("megatrain", cli_package)
    )
    assert (ours.returncode, ours.stdout, ours.stderr) == (theirs.returncode, theirs.stdout, theirs.stderr)
    assert ours.returncode == (0 if arguments == ["--help"] else 2)


def test_an_interrupt_during_imports_has_no_traceback(cli_package: str) -> None:
    script = (
        "import runpy, sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'click': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        f"runpy.run_module('{cli_package}', run_name='__main__')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "interrupted; nothing saved\n")


@contextlib.contextmanager
def full_drive(limit: int) -> Iterator[None]:
    """Limit the size of every file to ``limit`` bytes, to simulate a drive without space."""
    before, writes_no_bytecode = resource.getrlimit(resource.RLIMIT_FSIZE), sys.dont_write_bytecode
    sys.dont_write_bytecode = True  # an import would leave a truncated .pyc file
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        sys.dont_write_bytecode = writes_no_bytecode


def test_write_file_is_atomic(cli_module: CliModule, tmp_path: Path) -> None:
    write_file = cli_module("main").write_file
    path, link = tmp_path / "page.html", tmp_path / "link.html"
    write_file(path, "old")
    link.symlink_to(path)
    for target in (path, link, tmp_path / "new.html"):
        with full_drive(100), pytest.raises(cli_module("main").RunFailedError, match=r"\.html: File too large"):
            write_file(target, "x" * 1000)
    assert path.read_text() == "old" and sorted(tmp_path.iterdir()) == [link, path]
    write_file(link, "new")
    assert path.read_text() == "new" and link.is_symlink()
    write_file(Path("/dev/null"), "text")
    assert not Path("/dev/null").is_file()


def test_a_replaced_file_keeps_its_mode(cli_module: CliModule, tmp_path: Path) -> None:
    path, fresh = tmp_path / "page.html", tmp_path / "fresh.html"
    path.write_text("old")
    path.chmod(0o640)
    fresh.write_text("")
    cli_module("main").write_file(path, "new")
    cli_module("main").write_file(tmp_path / "new.html", "new")
    assert path.read_text() == "new" and path.stat().st_mode & 0o777 == 0o640
    assert (tmp_path / "new.html").stat().st_mode == fresh.stat().st_mode, "as the umask decides"


def test_files_are_written_into_pipes(tmp_path: Path) -> None:
    """If stdout is a pipe, ``/dev/stdout`` resolves to a path that does not exist."""
    words = [sys.executable, "-m", "cli", "config", "schema", "-o", "/dev/stdout"]
    result = subprocess.run(words, capture_output=True, text=True, check=False)
    assert result.returncode == 0 and result.stdout.startswith("{"), result.stderr


def test_write_file_falls_back_to_writing_in_place(
    cli_module: CliModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "page.html"
    path.write_text("old")

    def replace(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "replace", replace)
    cli_module("main").write_file(path, "new")
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]
    with pytest.raises(cli_module("main").RunFailedError, match=r"other\.html: Operation not permitted"):
        cli_module("main").write_file(tmp_path / "other.html", "new")
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("has_links", [True, False])
def test_exclusive_files_overwrite_nothing(
    cli_module: CliModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_links: bool
) -> None:
    """Even a file that another program creates after the command's check is not overwritten."""

    def link(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    if not has_links:
        monkeypatch.setattr(os, "link", link)
    path, main = tmp_path / "run.toml", cli_module("main")
    main.write_file(path, "old", is_exclusive=True)
    with pytest.raises(main.RunFailedError, match=r"run\.toml: already exists; nothing was written") as caught:
        main.write_file(path, "new", is_exclusive=True)
    assert caught.value.exit_code == main.EXIT_CONFIG
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_init_on_a_full_drive_leaves_no_file(cli_module: CliModule, tmp_path: Path) -> None:
    with full_drive(100):
        result = CliRunner().invoke(cli_module("main").command_group, ["init", str(tmp_path / "run.toml")])
    assert result.exit_code == 1 and "megatrain-tier.schema.json: File too large" in result.stderr, result.output
    assert list(tmp_path.iterdir()) == []
