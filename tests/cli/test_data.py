"""``megatrain-tier data`` shows rows with their trained tokens marked, and statistics of all rows."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from click.testing import CliRunner, Result

from megatrain.data.preview import DataStats, LengthBin, RowPreview, SourceStats, TextRun
from megatrain.data.rows_report import DataReport, DropCount
from processes.saved_run import QUICKSTART, call_in_new_process, command_group

CONFIG = """task = "sft"
output_dir = "out"
device = "cpu"
[model]
model_name_or_path = "model"
chat_template = "chat.jinja"
[data]
max_length = 64
cache_dir = "none"
[[data.train]]
path = "rows.jsonl"
"""
TEMPLATE = "{% for m in messages %}<{{ m.role }}>\n{{ m.content }}\n</>\n{% endfor %}"


def row(answer: str) -> str:
    return json.dumps({"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": answer}]})


def call(*words: object) -> Result:
    return CliRunner().invoke(command_group(), ["data", *map(str, words)])


@pytest.fixture
def config(tmp_path: Path) -> Path:
    shutil.copytree(QUICKSTART / "model", tmp_path / "model")
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    (tmp_path / "rows.jsonl").write_text("\n".join([row("Ahab."), row("Call me\x1b[31m Ishmael."), row("")]) + "\n")
    path = tmp_path / "run.toml"
    path.write_text(CONFIG)
    return path


def test_preview_marks_trained_tokens(config: Path) -> None:
    result = call("preview", config)
    assert result.exit_code == 0, result.output
    assert "\x1b" not in result.output, "control characters of the data are shown, not executed"
    assert "<assistant>\n[[Ahab." in result.stdout
    assert "\\x1b[31m Ishmael" in result.stdout
    assert "dropped: none of its tokens would be trained" in result.stdout
    one = call("preview", config, "-n", "1").stdout
    assert "row 1" in one and "row 2" not in one


@pytest.mark.parametrize(
    ("preview", "lines"),
    [
        (
            RowPreview(
                3, "rows.jsonl line 3", "conversation",
                (TextRun("<user>\n\x1b[1m", False), TextRun("Ahab", True), TextRun("</>\n", True)),
                1200, 300, 2400, "too\x07 long", ("empty\x07",), 2, False, ("tool_calls", "x"), ("<s>", "\x1b"),
            ),
            [
                "row 3  conversation  1,200 tokens, 300 trained (25.0%), in 2 pieces, cut from 2,400 tokens",
                "rows.jsonl line 3",
                "dropped: too\\x07 long",
                "a turn is not trained: empty\\x07",
                "the chat template has no place for tool_calls / x: set model.chat_template",
                "the text of the row contains special tokens: <s> \\x1b",
                "<user>",
                "\\x1b[1m[[Ahab]][[</>]]",
            ],
        ),
        (
            RowPreview(4, "", "text", (TextRun("Call", True),), 0, 0, 1500, is_text=True, left_out=("name",)),
            [
                "row 4  text  0 tokens, 0 trained (0.0%), from the start of 1,500 tokens; the run uses all",
                "the chat template has no place for name",
                "[[Call]]",
            ],
        ),
        (RowPreview(5, "", "text", (), 7, 7, 7), ["row 5  text  7 tokens, 7 trained (100.0%)"]),
    ],
)  # fmt: skip
def test_preview_lists_all_facts_about_a_row(
    cli_module: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str], preview: RowPreview, lines: list[str]
) -> None:
    cli_module("data")._print_row(preview, has_color=False)
    assert capsys.readouterr().out.splitlines() == lines


def test_all_statistics_are_printed(
    cli_module: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    report = DataReport(
        1200, 1190, 30, 4, 3, 90_000, 45_000,
        (DropCount("no\x07 text", 2, "a line 7"), DropCount("bad", 1, "a line 9")),
        (DropCount("empty", 5, "a line 8"),), "a line 5", (), DropCount("", 2, "e.jsonl"),
        (DropCount("name", 1, "a line 2"),), (DropCount("<s>", 3, "a line 4"),),
    )  # fmt: skip
    sources = (SourceStats("a", 2.0, 700, 60_000, 15_000), SourceStats("b", 1.0, 490, 30_000, 30_000))
    histogram = (LengthBin(1, 1, 3), LengthBin(2, 3, 1000), LengthBin(1024, 2047, 500))
    percentiles = {0: 3, 50: 1024, 100: 2048}
    stats = DataStats(report, sources, percentiles, histogram, 2490, 150_000, 37_500, 1234, 1300, 0.125, 0.5, "10 rows")
    cli_module("data")._print_stats(stats, is_packed=True, max_length=2048)
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "rows       1,200 read, 10 dropped, 30 truncated to 2,048 tokens",
        "         2  dropped: no\\x07 text (first: a line 7)",
        "         1  dropped: bad (first: a line 9)",
        "         5  turns not trained: empty (first: a line 8)",
        "         4  dropped: too long",
        "         3  dropped: without a trained token (first: a line 5)",
        "note       the chat template leaves out `name` of 1 row (first: a line 2)",
        "note       the text of 3 rows contains <s>, which the tokenizer reads as a special token, as in transformers "
        "(first: a line 4)",
        "  2 empty files skipped (first: e.jsonl)",
        "held out   10 rows",
        "epoch      2,490 documents, 150,000 tokens, 37,500 trained (25.0%)",
        "           1,234 rows in 1,300 steps",
        "padding    12.5%   (50.0% without packing)",
        "source     a  700 documents, 60,000 tokens, 25.0% trained, weight 2",
        "source     b  490 documents, 30,000 tokens, 100.0% trained, weight 1",
        "lengths    shortest 3   50% <= 1,024   100% <= 2,048",
        "              1-1          3  #",
        "              2-3      1,000  ########################################",
        "      1,024-2,047        500  ####################",
    ]
    plain = DataReport(1, 1, 0, 0, 0, 0, 0)
    stats = replace(stats, report=plain, sources=sources[1:], held_out="", num_tokens=0, num_trained_tokens=0)
    cli_module("data")._print_stats(stats, is_packed=False, max_length=64)
    assert capsys.readouterr().out.splitlines() == [
        "rows       1 read, 0 dropped, 0 truncated to 64 tokens",
        "epoch      2,490 documents, 0 tokens, 0 trained (0.0%)",
        "           1,234 rows in 1,300 steps",
        "padding    12.5%   (50.0% with packing)",
        *lines[-4:],
    ]
    cli_module("data")._print_stats(replace(stats, sources=sources[:1]), is_packed=False, max_length=64)
    assert lines[13] in capsys.readouterr().out, "a single source with a weight"


def test_a_long_text_is_shown_in_part(config: Path) -> None:
    """The text has more tokens than a preview. Nothing of it is lost, which the preview and `check` both state."""
    (config.parent / "rows.jsonl").write_text(json.dumps({"text": "Call me Ishmael. " * 3000}) + "\n")
    config.write_text(CONFIG.replace('"sft"', '"pretrain"'))
    head = call("preview", config).stdout.splitlines()[0]
    assert head.endswith(" tokens; the run uses all") and ", from the start of " in head and "cut" not in head
    checked = CliRunner().invoke(command_group(), ["check", str(config), "--skip-weights"]).stdout
    assert "1 row (a text file is one row)" in checked and "documents (pieces of texts, or answers)" in checked


def test_preview_imports_no_torch(config: Path) -> None:
    """The output is the same as in a process that has imported torch."""
    alone, has_torch = call_in_new_process("data", "preview", config)
    assert alone.returncode == 0 and not has_torch, alone.stderr
    assert "PyTorch" not in alone.stderr, "transformers reports nothing"
    assert alone.stdout == call("preview", config).stdout and "<assistant>\n[[Ahab." in alone.stdout


def test_preview_of_one_row(config: Path) -> None:
    result = call("preview", config, "--row", "2", "--json")
    assert result.exit_code == 0, result.output
    (found,) = json.loads(result.stdout)["rows"]
    assert found["number"] == 2 and found["where"].endswith("line 2")
    assert "Ishmael" in "".join(part["text"] for part in found["segments"] if part["is_trained"])
    missing = call("preview", config, "--row", "9")
    assert missing.exit_code == 4 and "The data has 3 rows" in missing.stderr


def test_stats(config: Path) -> None:
    result = call("stats", config)
    assert result.exit_code == 0, result.output
    assert "rows       3 read, 1 dropped, 0 truncated to 64 tokens" in result.stdout
    assert f"without a trained token (first: {config.parent / 'rows.jsonl'} line 3)" in result.stdout
    assert "padding" in result.stdout and "lengths" in result.stdout
    values = json.loads(call("stats", config, "--json").stdout)
    assert values["num_documents"] == 2
    assert not (config.parent / "out").exists()


def test_padding_of_a_batch_in_tokens(config: Path) -> None:
    """The rows of a micro-batch are padded together, whether the batch size is given in tokens or in rows."""
    (config.parent / "rows.jsonl").write_text("\n".join(row("Call me Ishmael. " * count) for count in (1, 2, 1, 2)))
    shares = []
    for batch in ("train_batch_tokens=256", "per_device_train_batch_size=4"):
        result = call("stats", config, "--json", "--set", f"training.{batch}", "--set", "data.packing=false")
        assert result.exit_code == 0, result.output
        shares.append(json.loads(result.stdout)["padding_share"])
    assert shares[0] == shares[1] > 0


def test_empty_files_and_rows_are_counted(config: Path) -> None:
    (config.parent / "rows.jsonl").write_text("\n".join([row("Ahab."), "{}", "[]", row("Ahab.")]))
    (config.parent / "more.jsonl").write_text("")
    config.write_text(CONFIG.replace("rows.jsonl", "*.jsonl"))
    found = call("stats", config).stdout
    assert "1 empty file skipped (first:" in found and "2  dropped: a row must be an object with fields" in found
    checked = CliRunner().invoke(command_group(), ["check", str(config)])
    assert "2 rows dropped: a row must be an object" in " ".join(checked.output.split())
    strict = CliRunner().invoke(command_group(), ["check", str(config), "--json", "--set", "data.bad_rows=error"])
    findings = json.loads(strict.stdout)["findings"]
    said = [each["text"] for each in findings if (each["subject"], each["severity"]) == ("data", "problem")]
    assert len(said) == 2 and said[0].startswith("1 empty file") and said[1].startswith("2 rows dropped"), findings


def test_trained_text_is_coloured_on_a_terminal(
    config: Path, cli_module: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal:
        @staticmethod
        def isatty() -> bool:
            return True

    data = cli_module("data")
    monkeypatch.setattr(data, "sys", type("Sys", (), {"stdout": Terminal}))
    monkeypatch.delenv("NO_COLOR", raising=False)
    coloured = CliRunner().invoke(command_group(), ["data", "preview", str(config), "-n", "1"], color=True)
    assert "\x1b[32m" in coloured.output and "[[" not in coloured.output
    monkeypatch.setenv("NO_COLOR", "1")
    plain = CliRunner().invoke(command_group(), ["data", "preview", str(config), "-n", "1"], color=True)
    assert "\x1b" not in plain.output and "[[Ahab" in plain.output


def test_mistakes(config: Path) -> None:
    (config.parent / "rows.jsonl").write_text("{broken\n")
    for words in (("preview", config), ("stats", config)):
        result = call(*words)
        assert result.exit_code == 4 and "line 1" in result.stderr and "Traceback" not in result.output
    assert call("stats", config.parent / "nowhere.toml").exit_code == 2
    assert call("preview", config, "-n", "0").exit_code == 2


def test_a_piped_command_prints_its_progress_after_a_second(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After the first second, each activity prints one line. A faster command prints no progress."""
    terminal = sys.modules[f"{command_group().callback.__module__.rpartition('.')[0]}.terminal"]
    monkeypatch.setattr(terminal, "_is_own_process", lambda: True)
    monkeypatch.setattr(terminal, "_FIRST_LINE_DELAY_S", 3600.0)
    with terminal.Spinner("reading") as spinner:
        spinner.show_activity("opening")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(terminal, "_FIRST_LINE_DELAY_S", 0.0)
    with terminal.Spinner("reading") as spinner:
        assert spinner._first_line.finished.wait(60)
        spinner.show_activity("opening")
        spinner.show_activity("opening")
    assert capsys.readouterr().err == "reading ...\nopening ...\n"
    for min_line_s, shown in ((0.0, [0, 10, 20]), (3600.0, [0])):
        monkeypatch.setattr(terminal, "_MIN_LINE_S", min_line_s)
        with terminal.Spinner("reading") as spinner:
            assert spinner._first_line.finished.wait(60)
            for percent in range(25):
                spinner.show_activity(f"weights, {percent} of 100 B", percent / 100)
        assert capsys.readouterr().err.splitlines() == ["reading ...", *(f"weights, {n} of 100 B ..." for n in shown)]
    with terminal.Spinner("reading", is_shown=False) as spinner:
        spinner.show_activity("opening")
    assert capsys.readouterr().err == ""
