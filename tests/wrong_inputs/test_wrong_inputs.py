"""Wrong inputs lead to the documented exit code, and to a message with a location and a remedy but no traceback."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest
from wrong_inputs.all_cases import all_cases
from wrong_inputs.judge_message import ask, command_line, faults, has_remedy, read_answer
from wrong_inputs.workplace import Spoil, Workplace, WrongInput, make_base_model, make_workplace

from megatrain.config.keys import KEYS
from processes import warm
from processes.saved_run import ROOT, command_words

CASES = {f"{case.kind} / {case.name}": case for case in all_cases()}
#: Case -> one of its commands, alternating from case to case. With `-m slow`, all commands run.
COMMANDS = {name: case.commands[number % len(case.commands)] for number, (name, case) in enumerate(CASES.items())}
#: Number of cases of each kind. `EVERYDAY` has a third of each kind; with `-m slow`, all cases run.
KINDS = Counter(case.kind for case in CASES.values())
EVERYDAY = [name for kind in KINDS for name in [name for name, case in CASES.items() if case.kind == kind][::3]]
#: Cases of different kinds that run in a separate process, as users run the command.
IN_A_PROCESS = (
    ("config: misspelled key / data.max_elngth (for max_length)", "run"),
    ("config: not TOML / not UTF-8", "check"),
    ("config: bad --set / --set 'size=7GiB'", "plan"),
    ("data: broken JSON / a line is cut off", "run"),
    ("model: weights / cut off at 30.00%", "check"),
    ("run: does not fit / RAM of 1 MiB", "plan"),
)


@pytest.fixture(scope="module")
def base_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that all cases share. Each case empties it first."""
    return tmp_path_factory.mktemp("work") / "w"


def spoiled(case: WrongInput, folder: Path, base_model: Path) -> tuple[Workplace, list[str]]:
    work = make_workplace(folder, base_model)
    locus = [str(part) for part in case.spoil(work)]
    work.write_config()
    return work, locus


def refuse(name: str, command: str, folder: Path, base_model: Path) -> None:
    case = CASES[name]
    work, locus = spoiled(case, folder, base_model)
    wrong = faults(case, ask(command, work), locus)
    assert not wrong, f"{command}: " + "\n".join(wrong)


@pytest.mark.parametrize("name", EVERYDAY)
def test_a_wrong_input_is_refused_with_place_and_remedy(name: str, folder: Path, base_model: Path) -> None:
    refuse(name, COMMANDS[name], folder, base_model)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_wrong_input_is_refused_by_every_command(name: str, folder: Path, base_model: Path) -> None:
    for command in CASES[name].commands:
        refuse(name, command, folder, base_model)


@pytest.mark.parametrize(("name", "command"), IN_A_PROCESS)
def test_wrong_input_is_refused_in_a_separate_process(name: str, command: str, folder: Path, base_model: Path) -> None:
    case = CASES[name]
    work, locus = spoiled(case, folder, base_model)
    result = warm.run(
        [*command_words(), *command_line(command, work)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=120,
    )
    answer = read_answer(command, result.returncode, result.stdout, result.stderr)
    assert faults(case, answer, locus) == []


def test_every_class_of_input_has_enough_cases() -> None:
    counts = Counter(case.kind.partition(":")[0] for case in CASES.values())
    assert len(CASES) >= 260
    assert {"config": 200, "data": 100, "model": 100, "run": 20}.items() <= {
        kind: min(count, {"config": 200, "data": 100, "model": 100, "run": 20}[kind]) for kind, count in counts.items()
    }.items()
    assert {case.code for case in CASES.values()} == {2, 3, 4}


@pytest.mark.parametrize("kind", ["config: wrong type", "config: misspelled key"])
def test_every_schema_key_has_an_invalid_case(kind: str) -> None:
    names = [case.name for case in CASES.values() if case.kind == kind]
    assert len(names) >= len(KEYS) - 1  # config_version has only one value


def harmless(**files: bytes) -> Spoil:
    def change(work: Workplace) -> tuple[str, ...]:
        for name, content in files.items():
            work.file(name.replace("__", "/").replace("_dot_", "."), content)
        return ()

    return change


def with_config(change: str) -> Spoil:
    def spoil(work: Workplace) -> tuple[str, ...]:
        text = work.config.text()
        work.raw_config = {
            "byte order mark": lambda: b"\xef\xbb\xbf" + text.encode(),
            "Windows lines": lambda: text.replace("\n", "\r\n").encode(),
            "no last line end": lambda: text.rstrip("\n").encode(),
            "comments": lambda: text.replace("\n", " # caf\u00e9\n").encode(),
        }[change]()
        return ()

    return spoil


def with_rows(content: str) -> Spoil:
    def spoil(work: Workplace) -> tuple[str, ...]:
        work.file("rows.jsonl", content.replace("ROW", (work.folder / "held_out.jsonl").read_text().strip()))
        return ()

    return spoil


#: Unusual but valid inputs.
RIGHT: dict[str, Spoil] = {
    "nothing": lambda work: (),
    **{f"a config with {change}": with_config(change) for change in (
        "byte order mark", "Windows lines", "no last line end", "comments",
    )},
    "empty lines between rows": with_rows("\n\nROW\n\n  \nROW"),
    "rows with a byte order mark": with_rows("\ufeffROW\n"),
    "other files in the model folder": harmless(
        model__README_dot_md=b"#", model__pytorch_model_dot_bin=b"pickle", model__training_args_dot_bin=b"\0",
        model__flax_model_dot_msgpack=b"\0", model__generation_config_dot_json=b"{}",
    ),
    "an index next to one file of weights": harmless(model__model_dot_safetensors_dot_index_dot_json=b"{"),
    "a tokenizer without settings": harmless(model__tokenizer_config_dot_json=b"{}"),
    "a foreign file in output_dir": harmless(out__notes_dot_txt=b"mine"),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_correct_inputs_are_accepted(name: str, folder: Path, base_model: Path) -> None:
    """If the command also refused valid inputs, the tests above would prove nothing."""
    for command in ("check", "run") if name == "nothing" else ("check",):
        work = make_workplace(folder, base_model)
        RIGHT[name](work)
        work.write_config()
        answer = ask(command, work)
        assert (answer.code, answer.problems, answer.crash) == (0, (), ""), answer.output


@pytest.mark.parametrize(
    "text",
    [
        "line 3: this is not TOML: invalid value",
        "x.jsonl line 2: `text` must be text, not a number",
        "data.max_length = [7] is not a whole number",
        "model/config.json: transformers cannot use it: integer modulo by zero",
        "nothing is written here",
        "the use of a file, or folder",
    ],
)
def test_problem_description_without_advice_is_not_a_remedy(text: str) -> None:
    assert not has_remedy(text)
    assert has_remedy(f"{text}. Write something else")
