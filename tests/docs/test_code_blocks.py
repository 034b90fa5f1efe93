"""Every code block on the pages is executed: Python runs, configs load, and commands do what the page says.

The blocks of a page run from top to bottom in one folder, as a reader would run them. Later blocks use files of earlier
blocks.
"""

from __future__ import annotations

import json
import re
import shutil
import tomllib
import warnings
from dataclasses import dataclass
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from megatrain.config import load_config
from oracles.code_blocks import LANGUAGES, NAMES, ROOT, SHELLS, Block, Command, blocks_of, commands_of
from processes.saved_run import SavedRun, command_group, make_run

#: Number of blocks per page that a preceding comment exempts from execution.
NOT_EXECUTED = {
    "bench/README.md": 6,
    "docs/distributed.md": 3,
    "docs/embedding_processes.md": 2,
    "docs/first_gpu_run.md": 4,
    "docs/heads.md": 1,
    "docs/gpu.md": 3,
    "docs/lora_first_run.md": 2,
    "docs/mutants.md": 1,
    "docs/null_gpu.md": 2,
    "docs/pairs.md": 1,
    "docs/quickstart.md": 1,
}

#: Command that is parsed with all its options but not executed -> the reason, and the test that executes it.
ONLY_PARSED = {
    "doctor": "measures this machine for a quarter of a minute; tests/cli/test_doctor.py",
    "verify": "trains a model several times; tests/megatrain/extras/test_verify.py",
    "save": "needs a concurrent run; tests/cli/test_control.py",
    "stop": "needs a concurrent run; tests/cli/test_control.py",
}
#: Pages whose commands are only parsed here, because another test runs them and compares their output.
COMPARED_ELSEWHERE = {"docs/sizing.md": "tests/docs/test_sizing.py"}
#: Number of steps on a page -> the smaller number that the test runs instead.
SMALL_STEPS = {"200": "2", "400": "4"}
#: Placeholder in a synopsis -> its replacement, which exists in the folder where a page's blocks run.
PLACEHOLDERS = {
    "CONFIG": "run.toml",
    "RUN": "outputs/first",
    "FILE": "ds_config.json",
    "FILE|COMMAND...": "ds_config.json",
    "FOLDER": "outputs/first/final",
}
#: Pages with code that calls trainers of other packages. Warnings from these trainers are ignored.
WARNS = (
    "docs/any_module.md",
    "docs/embedding_pytorch.md",
    "docs/embedding_trainers.md",
    "docs/heads.md",
    "docs/teachers.md",
)
#: Pages whose run has a different output folder -> this folder; and pages that assume a finished run.
OUTPUT_DIRS = {"docs/checkpoints.md": "out", "docs/lora_first_run.md": "outputs/lora"}
WITH_A_RUN = ("README.md", "docs/cli.md", "docs/after_training.md", "docs/generation.md")

MINIMAL = 'task = "sft"\noutput_dir = "o"\n[model]\nmodel_name_or_path = "m"\n[[data.train]]\npath = "d.jsonl"\n'
#: Shape of the model in examples/quickstart.toml, because the repository does not include its weights.
SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
BLOCKS = {page: blocks_of(page) for page in NAMES}
TRACED = "[profile]\ntrace_steps = [3]"


@dataclass
class Reader:
    """Simulated reader who follows a page in a folder."""

    page: str
    folder: Path
    num_outputs: int = 0

    def follow(self, block: Block) -> None:
        if block.language == "python":
            with warnings.catch_warnings():
                if self.page in WARNS:
                    warnings.simplefilter("ignore", UserWarning)
                    warnings.simplefilter("ignore", FutureWarning)
                exec(compile(block.text, str(block), "exec"), {"__name__": "__main__"})
        elif block.language == "toml":
            self.load(block)
        elif block.language == "json":
            json.loads(block.text)
        elif block.language in SHELLS:
            commands = list(commands_of(block))
            assert commands, f"{block}: a shell block without a command"
            for command in commands:
                self.give(command, block)

    def load(self, block: Block) -> None:
        """Load a complete config, or a partial config on top of a minimal config."""
        base, part = self.folder / "base.toml", self.folder / "part.toml"
        base.write_text(MINIMAL)
        part.write_text(block.text)
        is_whole = {"task", "output_dir", "model"} <= set(tomllib.loads(block.text))
        loaded = load_config(part) if is_whole else load_config(base, [part])
        assert not loaded.warnings, f"{block}: {loaded.warnings}"

    def give(self, command: Command, block: Block) -> None:
        name, *words = command.words
        if name == "megatrain-tier":
            self.call([self.filled(word) for word in words], command, block)
        elif str(command) in ("git clone REPOSITORY_URL megatrain-tier", "cd megatrain-tier"):
            return  # the repository's address is not known yet
        elif name == "make":
            check_target(words[0], block)
        elif name.rsplit("/", 1)[-1] == "pip":
            check_extras(words, block)
        elif name == "python" and words[0].endswith(".py"):
            check_program(words, block)
        else:
            pytest.fail(f"{block}: no test knows the command '{command}'")

    def filled(self, word: str) -> str:
        """Return a word of a command, or its replacement if it is a placeholder or a large number of steps."""
        if re.fullmatch(r"\[?(--)?[A-Za-z-]+\]?", word):
            word = word.strip("[]")
        if word in ("OUT", "PATH"):
            self.num_outputs += 1
            return f"{word.lower()}-{self.num_outputs}"
        return PLACEHOLDERS.get(word, SMALL_STEPS.get(word, word))

    def call(self, words: list[str], command: Command, block: Block) -> None:
        """Run a command in this process. Its exit code must match the comment on the line, or be 0 without one."""
        if words[0] in ONLY_PARSED or self.page in COMPARED_ELSEWHERE:
            parse(words)
            return
        if words[0] == "clean" and not Path(words[1]).exists():
            Path(words[1]).mkdir()
        if words[0] == "run":
            words += self.shortened(words[1])
        told = re.search(r"exit code (\d+)", command.comment)
        result = CliRunner().invoke(command_group(), words)
        expected = int(told[1]) if told else 0
        assert result.exit_code == expected, f"{block}: {words}\n{result.output}"

    def shortened(self, config: str) -> list[str]:
        """Return the options that shorten a run of an example."""
        if "smollm2" in Path(config).read_text():
            return ["--dry-run", "--set", "model.train_from_scratch=true"]
        return ["--max-steps", "6"] if config.startswith("examples/") else []


def parse(words: list[str]) -> None:
    """Parse the options and arguments of a command without executing it."""
    group = command_group()
    command: click.Command = group
    ctx = click.Context(group, info_name="megatrain-tier")
    rest = list(words)
    while isinstance(command, click.Group):
        inner = command.get_command(ctx, rest.pop(0))
        assert inner is not None, words
        command = inner
    command.make_context(words[0], rest, parent=ctx).close()


def check_target(target: str, block: Block) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert target in targets, f"{block}: make {target}"


def check_extras(words: list[str], block: Block) -> None:
    if "--no-deps" in words:
        pinned = (ROOT / "requirements-kvikio.txt").read_text(encoding="utf-8")
        assert words[-1] in pinned.replace(";", " ").split(), f"{block}: {words}"
        return
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    named = re.findall(r"\[([a-z,]+)\]", " ".join(words))
    assert named, f"{block}: pip without an extra"
    assert {name for names in named for name in names.split(",")} <= set(extras), f"{block}: {words}"


def check_program(words: list[str], block: Block) -> None:
    """Assert that a program of the repository exists and has these options; tests/test_benches.py runs the benches."""
    program = ROOT / words[0]
    assert program.is_file(), f"{block}: {words[0]}"
    text = "".join(path.read_text(encoding="utf-8") for path in {program, ROOT / "bench" / "common.py"})
    unknown = [word for word in words[1:] if word.startswith("--") and f'"{word}"' not in text]
    assert unknown == [], f"{block}: {words[0]} has no {unknown}"


def prepare(folder: Path, output_dir: str) -> SavedRun:
    """Create the files that the pages assume: a config with its model and data, and files of other tools."""
    run = make_run(folder)
    drive = '[[tiers.nvme]]\npath = "state"\nsize = "40MiB"\n'
    run.write_config(out=output_dir, steps=4, more=drive + TRACED)
    batch = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "bf16": {"enabled": True}}
    (folder / "ds_config.json").write_text(json.dumps(batch))
    shared = {"model_name_or_path": "a/b", "learning_rate": 1e-5, "bf16": True, "output_dir": "o"}  # JSON is valid YAML
    (folder / "sft.yaml").write_text(json.dumps({**shared, "dataset_name": "c/d", "max_length": 128}))
    (folder / "my_sft.yaml").write_text(json.dumps({**shared, "stage": "sft", "dataset": "e", "cutoff_len": 128}))
    make_chats(folder)
    (folder / "examples/quickstart/smollm2-135m").mkdir(parents=True)
    for path in (ROOT / "examples").glob("*.toml"):
        shutil.copy(path, folder / "examples")
    for name in ("recipes", "models"):
        shutil.copytree(ROOT / "examples" / name, folder / "examples" / name)
    for path in (ROOT / "examples/quickstart").iterdir():
        if path.name != "smollm2-135m":
            (folder / "examples/quickstart" / path.name).symlink_to(path)
    (folder / "examples/quickstart/smollm2-135m/config.json").write_text(json.dumps(SMOLLM2))
    return run


def make_chats(folder: Path) -> None:
    """Write chats, and a tiny model with a chat template. It replaces the model that a page names."""
    asked, said = {"role": "user", "content": "Who are you?"}, {"role": "assistant", "content": "Ishmael."}
    (folder / "chats.jsonl").write_text((json.dumps({"messages": [asked, said]}) + "\n") * 9)
    model = folder / "models/Qwen3-8B"
    shutil.copytree(folder / "model", model)
    (model / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )


@pytest.fixture(scope="module")
def folder_with_finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a finished run."""
    folder = tmp_path_factory.mktemp("done") / "w"
    result = prepare(folder, "outputs/first").call("run", folder / "run.toml")
    assert result.exit_code == 0, result.output
    return folder


@pytest.fixture
def reader(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reader:
    page: str = request.param
    folder = tmp_path / "w"
    if page in WITH_A_RUN:
        shutil.copytree(request.getfixturevalue("folder_with_finished_run"), folder, symlinks=True)
    else:
        prepare(folder, OUTPUT_DIRS.get(page, "outputs/first"))
    monkeypatch.chdir(folder)
    return Reader(page, folder)


@pytest.mark.parametrize("page", NAMES)
def test_every_code_block_has_a_known_language(page: str) -> None:
    assert [str(block) for block in BLOCKS[page] if block.language not in LANGUAGES] == []
    assert sum(bool(block.reason) for block in BLOCKS[page]) == NOT_EXECUTED.get(page, 0)


#: Slow pages. test_readme.py and test_examples.py also run their commands.
LONG_PAGES = ("docs/quickstart.md", "examples/README.md")


@pytest.mark.parametrize(
    "reader",
    [pytest.param(page, marks=pytest.mark.slow) if page in LONG_PAGES else page for page in NAMES if BLOCKS[page]],
    indirect=True,
)
def test_blocks_are_executed(reader: Reader) -> None:
    followed = 0
    for block in BLOCKS[reader.page]:
        if not block.reason:
            reader.follow(block)
            followed += 1
    assert followed == len(BLOCKS[reader.page]) - NOT_EXECUTED.get(reader.page, 0)


def test_parse_only_commands_appear_on_the_pages() -> None:
    """Every command in ``ONLY_PARSED`` is on a page."""
    given = {
        command.words[1]
        for blocks in BLOCKS.values()
        for block in blocks
        if block.language in SHELLS and not block.reason
        for command in commands_of(block)
        if command.words[0] == "megatrain-tier"
    }
    assert set(ONLY_PARSED) <= given
    assert {"run", "plan", "check", "export", "ckpt"} <= given


def test_invalid_code_blocks_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``Reader.follow`` rejects wrong options, keys, targets, extras and programs, and unknown commands."""
    (tmp_path / "w").mkdir()
    monkeypatch.chdir(tmp_path / "w")
    reader = Reader("page.md", tmp_path / "w")
    wrong = [
        ("sh", "megatrain-tier plan --no-such-option"),
        ("sh", "megatrain-tier doctor --no-such-option"),
        ("sh", "megatrain-tier plan nowhere.toml   # a comment"),
        ("console", "$ megatrain-tier no-such-command\noutput"),
        ("console", "no prompt, no command"),
        ("sh", "make no-such-target"),
        ("sh", "pip install -e '.[nothing]'"),
        ("sh", "python bench/step.py --no-such-option"),
        ("sh", "python bench/nothing.py"),
        ("sh", "curl example"),
        ("toml", "[data]\nmax_lenght = 4\n"),
        ("toml", 'task = "sft"\noutput_dir = "o"\n[model]\n'),
        ("json", "{"),
        ("python", "assert False"),
    ]
    for language, text in wrong:
        with pytest.raises((Exception, pytest.fail.Exception)):
            reader.follow(Block("page.md", 1, language, text + "\n", ""))
