"""For the chat templates of 36 families, the trained tokens decode to exactly the assistant's turns and their ends.

The templates in tests/data were written for this project, after the families' published templates. They have the same
special tokens, roles, white space, refusals and rewriting, but less prose.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatrain.base import limited
from megatrain.base.limited import LimitError, run_limited
from megatrain.data import masks
from megatrain.data.chat import RowEncoder, TokenizedRow
from megatrain.data.encoding import load_tokenizer
from megatrain.data.formats import Conversation
from megatrain.data.rows_report import DataError, RowError
from oracles.rows_in_memory import encode_row

FOLDER = Path(__file__).parents[2] / "data/chat_templates"
TOKENIZER = Path(__file__).parents[3] / "examples/quickstart/model"
FAMILIES = sorted(path.stem for path in FOLDER.glob("*.jinja"))
_WORD_BORDER = "\u2581"  # in special tokens of families with a byte-level tokenizer
TURNS = (
    ("user", "Hi there"),
    ("assistant", "Call me Ishmael."),
    ("user", "Why?"),
    ("assistant", "So be it \u2014 na\u00efve  two\n\nlines: \U0001f433"),
)
SYSTEM = ("system", "Short answers")
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = {"type": "function", "id": "abcdefghi", "function": {"name": "get_weather", "arguments": {"city": "Nantucket"}}}
MakeTokenizer = Callable[[str], Any]


def facts(family: str) -> dict[str, str]:
    """Return the keys and values in the comment at the top of a template."""
    text = (FOLDER / f"{family}.jinja").read_text(encoding="utf-8")
    lines = text.split("-#}")[0].splitlines()[1:]
    return {key: value.replace("\\n", "\n") for key, _, value in (line.partition(": ") for line in lines)}


@pytest.fixture(params=["bytes", "words"])
def make_tokenizer(request: pytest.FixtureRequest, word_tokenizer_file: Path) -> MakeTokenizer:
    def make(family: str) -> Any:
        from transformers import PreTrainedTokenizerFast

        words = request.param == "words"
        if words and _WORD_BORDER in (FOLDER / f"{family}.jinja").read_text(encoding="utf-8"):
            pytest.skip("a tokenizer of words decodes this border as a space")
        made: Any = (
            PreTrainedTokenizerFast(tokenizer_file=str(word_tokenizer_file))
            if words
            else load_tokenizer(str(TOKENIZER))
        )
        known = facts(family)
        special = known["special"].split()
        ends = {
            "bos_token": known.get("bos", special[0]),
            "eos_token": known.get("eos", known["end"].split(">")[0] + ">"),
        }
        made.add_special_tokens({**ends, "additional_special_tokens": special})
        made.chat_template = (FOLDER / f"{family}.jinja").read_text(encoding="utf-8")
        return made

    return make


def conversation(*messages: Any, tools: Any = None) -> Conversation:
    made = tuple({"role": m[0], "content": m[1]} if isinstance(m, tuple) else m for m in messages)
    return Conversation(made, "rows line 1", tools=tools)


def trained_runs(tokenizer: Any, encoded: TokenizedRow) -> list[str]:
    """Return the text of each unbroken run of trained tokens."""
    runs: list[list[int]] = [[]]
    for token, wanted in zip(encoded.tokens, encoded.trained, strict=True):
        if wanted:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return [tokenizer.decode(run, skip_special_tokens=False) for run in runs if run]


def expected_runs(family: str, texts: list[str]) -> list[tuple[str, str]]:
    """Return (text with its lead-in, end of turn) for each assistant turn."""
    known = facts(family)
    lead, end = known.get("lead", ""), known["end"]
    runs = [(lead + text if known.get("every") else text, "" if known.get("open") else end) for text in texts]
    return [*runs[:-1], (lead + texts[-1], known.get("last_end", end))]


def check(tokenizer: Any, family: str, encoded: TokenizedRow, texts: list[str]) -> None:
    """Compare the trained runs with the texts; white space next to a special token may belong to either."""
    runs, expected = trained_runs(tokenizer, encoded), expected_runs(family, texts)
    assert len(runs) == len(expected), runs
    for run, (text, end) in zip(map(str.rstrip, runs), expected, strict=True):
        assert run.endswith(end), (run, end)
        written = run.removesuffix(end).strip().replace("|> ", "|>")  # words begin with a space, even after "|>"
        assert written == text.strip(), (run, text)


def test_at_least_thirty_families_are_tested() -> None:
    assert len(FAMILIES) >= 30


@pytest.mark.parametrize("family", FAMILIES)
def test_exactly_the_assistant(make_tokenizer: MakeTokenizer, family: str) -> None:
    tokenizer = make_tokenizer(family)
    turns = TURNS if facts(family).get("system") == "no" else (SYSTEM, *TURNS)
    texts = [text for role, text in turns if role == "assistant"]
    check(tokenizer, family, encode_row(RowEncoder(tokenizer), conversation(*turns)), texts)
    check(tokenizer, family, encode_row(RowEncoder(tokenizer), conversation(*TURNS)), texts)
    check(tokenizer, family, encode_row(RowEncoder(tokenizer), conversation(*TURNS[:2])), texts[:1])
    check(
        tokenizer, family, encode_row(RowEncoder(tokenizer, train_on="last_assistant"), conversation(*turns)), texts[1:]
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_match_the_chat_template(make_tokenizer: MakeTokenizer, family: str) -> None:
    tokenizer = make_tokenizer(family)
    encoded = encode_row(RowEncoder(tokenizer), conversation(*TURNS))
    text = tokenizer.apply_chat_template([{"role": r, "content": c} for r, c in TURNS], tokenize=False)
    whole = tokenizer(text, add_special_tokens=False)["input_ids"]
    cut = encoded.tokens if encoded.tokens == whole else encoded.tokens[:-1]  # drop an added end token
    assert whole[: len(cut)] == cut
    assert not tokenizer.decode(whole[len(cut) :]).strip()


@pytest.mark.parametrize("family", FAMILIES)
def test_two_questions_in_a_row_are_trained_or_refused(make_tokenizer: MakeTokenizer, family: str) -> None:
    tokenizer = make_tokenizer(family)
    row = conversation(("user", "Hi"), *TURNS[:2])
    if facts(family).get("strict"):
        with pytest.raises(RowError, match=r"rows line 1: the chat template rejects this conversation: .*alternate"):
            encode_row(RowEncoder(tokenizer), row)
    else:
        check(tokenizer, family, encode_row(RowEncoder(tokenizer), row), ["Call me Ishmael."])


@pytest.mark.parametrize("family", FAMILIES)
def test_an_empty_answer_is_not_trained(make_tokenizer: MakeTokenizer, family: str) -> None:
    tokenizer = make_tokenizer(family)
    row = conversation(("user", "Hi"), ("assistant", " "), *TURNS[:2])
    encoded = encode_row(RowEncoder(tokenizer), row)
    check(tokenizer, family, encoded, ["Call me Ishmael."])
    assert encoded.untrained_turns == ("it is empty",)


WITH_TOOLS = [family for family in FAMILIES if facts(family).get("tools")]


@pytest.mark.parametrize("family", WITH_TOOLS)
def test_calls_of_tools_are_trained_and_answers_of_tools_are_not(make_tokenizer: MakeTokenizer, family: str) -> None:
    tokenizer = make_tokenizer(family)
    call = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    answer = {"role": "tool", "content": "18 C", "tool_call_id": "abcdefghi", "name": "get_weather"}
    encoded = encode_row(
        RowEncoder(tokenizer),
        conversation(("user", "Weather?"), call, answer, ("assistant", "It is fine."), tools=(TOOL,)),
    )
    called, said = trained_runs(tokenizer, encoded)
    assert re.search(r"get_weather.*Nantucket", called, re.DOTALL)
    assert called.endswith(facts(family)["end"])
    assert said.removesuffix(facts(family)["end"]).strip().endswith("It is fine.")
    assert not any("18 C" in run or "Weather" in run for run in (called, said))


def test_a_removed_thought_leaves_its_turn_untrained(make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer("qwen3")
    thought = "<think>\nhm\n</think>\n\nBecause"
    row = conversation(("user", "a"), ("assistant", thought), ("user", "c"), ("assistant", thought))
    encoded = encode_row(RowEncoder(tokenizer), row)
    (run,) = trained_runs(tokenizer, encoded)
    assert run.strip() == f"{thought}<|im_end|>"
    assert encoded.untrained_turns == ("the chat template rewrites it",)


def test_reasoning_in_a_separate_field_is_trained(make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer("qwen3")
    answer = {"role": "assistant", "content": "Because", "reasoning_content": "hm"}
    (run,) = trained_runs(tokenizer, encode_row(RowEncoder(tokenizer), conversation(("user", "a"), answer)))
    assert run.strip() == "<think>\nhm\n</think>\n\nBecause<|im_end|>"


def test_thought_opened_by_the_prompt_is_trained_after_its_tag(make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer("qwen3_5")
    row = conversation(("user", "a"), ("assistant", "<think>\nhm\n</think>\n\nBecause"))
    (run,) = trained_runs(tokenizer, encode_row(RowEncoder(tokenizer), row))
    assert run.strip() == "hm\n</think>\n\nBecause<|im_end|>"


def test_a_template_that_removes_every_thought_refuses_rows_with_one(make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer("deepseek_r1")
    row = conversation(("user", "a"), ("assistant", "<think>\nhm\n</think>\n\nBecause"))
    with pytest.raises(RowError, match="line 1: message 2 cannot be separated from the rest: the chat template rewr"):
        encode_row(RowEncoder(tokenizer), row)


def test_end_markers_that_are_not_special_tokens_are_trained(tokenizer: Any) -> None:
    tokenizer.chat_template = (FOLDER / "phi4.jinja").read_text(encoding="utf-8").replace("<|im_end|>", "[[over]]")
    encoded = encode_row(RowEncoder(tokenizer), conversation(*TURNS))
    first, last = trained_runs(tokenizer, encoded)
    assert first == "Call me Ishmael.[[over]]"
    assert last.endswith("[[over]]<|endoftext|>")


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}"
BOMBS = {
    "loops": ENDLESS + "{% endfor %}{% endfor %}",
    "loops in an answer": "{% if messages | length > 1 %}" + ENDLESS + "{% endfor %}{% endfor %}{% endif %}hello",
    "doubling": "{% set x = namespace(t='ab') %}{% for i in range(60) %}{% set x.t = x.t ~ x.t %}{% endfor %}{{ x.t }}",
    "format": "{{ '{:>9999999999}'.format(1) }}",
    "center": "{{ 'a'.center(9999999999) }}",
}


@pytest.mark.parametrize("name", BOMBS)
def test_endless_template_error_names_its_file(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limited, "MAX_CPU_S", 1)
    monkeypatch.setattr(limited, "MAX_EXTRA_BYTES", 256 << 20)
    path = tmp_path / "bomb.jinja"
    path.write_text(BOMBS[name])
    encoder = RowEncoder(load_tokenizer(str(TOKENIZER), chat_template=str(path)))
    messages = [{"role": role, "content": text} for role, text in TURNS]
    with pytest.raises(DataError, match=r"bomb\.jinja.*the chat template cannot be used: it takes more than"):
        encode_row(encoder, Conversation("rows.jsonl, row 1", messages))


def test_each_conversation_kind_is_tried_within_limits_once(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[Any] = []

    def fail(act: Callable[[], Any]) -> None:
        raise LimitError("it takes more than 10 s of processor time")

    def count(act: Callable[[], Any]) -> Any:
        tries.append(act)
        return run_limited(act)

    tokenizer.chat_template = "{# of this test #}{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    monkeypatch.setattr(masks, "run_limited", fail)
    for _ in range(2):  # a kind of conversation that failed is tried again
        with pytest.raises(DataError, match="it takes more than 10 s"):
            encode_row(RowEncoder(tokenizer), conversation(*TURNS))
    monkeypatch.setattr(masks, "run_limited", count)
    encode_row(RowEncoder(tokenizer), conversation(*TURNS))
    assert (found := len(tries)) > 0
    encode_row(RowEncoder(tokenizer), conversation(*TURNS))
    assert len(tries) == found
    encode_row(RowEncoder(tokenizer), conversation(*TURNS[:2]))
    assert len(tries) > found
