"""Preference data: every way to write the rows, errors in them, and the batches that are made from them."""

# ruff: noqa: E501  -- one case per line reads best
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatrain.base.batch_keys import DESIRABLE, REFERENCE
from megatrain.data.chat import RowEncoder
from megatrain.data.encoding import load_tokenizer
from megatrain.data.formats import Conversation, PromptCompletion
from megatrain.data.packing import BatchShape
from megatrain.data.pair_rows import CHOSEN, PAIRS, REJECTED
from megatrain.data.preference_format import PREFERENCE, Preference
from megatrain.data.row_kind import RowKind
from megatrain.data.rows_report import DataError, RowError
from megatrain.data.tagged_rows import ANSWERS, MISMATCHED
from megatrain.data.token_dataset import TokenDataset, hold_out
from oracles.rows_in_memory import encode_rows, loader_of, to_row
from oracles.tiered_run import QUICKSTART

ASKED = {"role": "user", "content": "Who?"}
GOOD, BAD = {"role": "assistant", "content": "Ahab."}, {"role": "assistant", "content": "Bob."}
THEIRS = [{"from": "human", "value": "Who?"}]
GPT = {"from": "gpt", "value": "Ahab."}, {"from": "gpt", "value": "Bob."}

#: Rows that prefer the answer "Ahab." to the answer "Bob.", for the prompt "Who?".
CHATS: dict[str, dict[str, Any]] = {
    "TRL": {"prompt": [ASKED], "chosen": [GOOD], "rejected": [BAD]},
    "TRL, implicit": {"chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]},
    "the prompt twice": {"prompt": [ASKED], "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]},
    "text beside conversations": {"prompt": "Who?", "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]},
    "text before messages": {"prompt": "Who?", "chosen": [GOOD], "rejected": [BAD]},
    "LLaMA-Factory, Alpaca": {"instruction": "Who?", "input": "", "chosen": "Ahab.", "rejected": "Bob."},
    "LLaMA-Factory, ShareGPT": {"conversations": THEIRS, "chosen": GPT[0], "rejected": GPT[1]},
}
JUDGED: dict[str, dict[str, Any]] = {
    "TRL": {"prompt": [ASKED], "completion": [BAD], "label": False},
    "LLaMA-Factory, Alpaca": {"instruction": "Who?", "output": "Bob.", "kto_tag": False},
    "LLaMA-Factory, ShareGPT": {"conversations": [*THEIRS, GPT[1]], "kto_tag": False},
    "messages": {"messages": [ASKED, BAD], "label": False},
}


@pytest.mark.parametrize("name", CHATS)
def test_pairs_of_conversations(name: str) -> None:
    row = to_row(CHATS[name], "here", PREFERENCE, {})
    assert row == Preference(
        Conversation((ASKED, GOOD), "here", loss_start=1),
        Conversation((ASKED, BAD), "here", loss_start=1),
        True,
        "here",
    )


@pytest.mark.parametrize("name", JUDGED)
def test_labelled_answers_are_read_as_preferences(name: str) -> None:
    row = to_row(JUDGED[name], "here", PREFERENCE, {})
    assert row == Preference(Conversation((ASKED, BAD), "here", loss_start=1), None, False, "here")


def test_texts() -> None:
    plain = to_row({"prompt": "a ", "chosen": "b", "rejected": "c"}, "", PREFERENCE, {})
    assert plain == Preference(PromptCompletion("a ", "b", ""), PromptCompletion("a ", "c", ""), True, "")
    named = to_row(
        {"q": "a", "better": "b", "worse": "c"},
        "",
        PREFERENCE,
        {"prompt": "q", "chosen": "better", "rejected": "worse"},
    )
    assert named == Preference(PromptCompletion("a", "b", ""), PromptCompletion("a", "c", ""), True, "")
    implicit = to_row({"chosen": "the whale is big", "rejected": "the whale sings"}, "", PREFERENCE, {})
    assert implicit == Preference(
        PromptCompletion("the whale", " is big", ""), PromptCompletion("the whale", " sings", ""), True, ""
    )
    judged = to_row({"prompt": "a", "completion": "b", "label": True}, "", PREFERENCE, {})
    assert judged == Preference(PromptCompletion("a", "b", ""), None, True, "")


OTHER_NAMES = 'If they have other names, write for example columns = { chosen = "better", rejected = "worse" }'
LABEL = "`label` says whether the answer is a good one, and must be true or false; this is {}. Write true or false"
FIX = "Fix or remove the row"
NO_PREFIX = (
    "`prompt` is not what `chosen` and `rejected` begin with. Leave the prompt out of the answers, or leave `prompt` "
    "out of the row"
)
#: Rows, with the class of their error and its message. A reason is given if it differs from the problem.
WRONG: dict[str, tuple[dict[str, Any], type[DataError], str]] = {
    "no rejected": ({"prompt": "a", "chosen": "b"}, DataError, f"no field `rejected`; the row has `prompt`, `chosen`. {OTHER_NAMES}"),
    "no chosen": ({"prompt": "a", "rejected": "b"}, DataError, f"no field `chosen`; the row has `prompt`, `rejected`. {OTHER_NAMES}"),
    "nothing of it": ({"text": "a"}, DataError, f"no preferences: they have the fields `prompt`, `chosen` and `rejected`, or `prompt`, `completion` and `label`; the row has `text`. {OTHER_NAMES}"),
    "the same": ({"prompt": "a", "chosen": "b", "rejected": "b"}, RowError, f"`chosen` and `rejected` are the same: there is nothing to prefer. {FIX}"),
    "a number": ({"prompt": "a", "completion": "b", "label": 1}, DataError, LABEL.format("a number")),
    "text as label": ({"prompt": "a", "completion": "b", "label": "good"}, DataError, LABEL.format("text")),
    "text as kto_tag": ({"prompt": "a", "completion": "b", "kto_tag": "good"}, DataError, LABEL.replace("`label`", "`kto_tag`").format("text")),
    "no completion": ({"prompt": "a", "label": True}, DataError, 'no field `completion`; the row has `prompt`, `label`. `prompt` may be the prompt, but no field contains an answer as text. Add one, for example `answer`, and write columns = { prompt = "prompt", completion = "answer" } under this [[data.train]]'),
    "no prompt": ({"question": "a", "completion": "b", "label": True}, DataError, 'no field `prompt`; the row has `question`, `completion`, `label`. Write for example columns = { prompt = "question", completion = "completion" } under this [[data.train]]'),
    "no turn of the assistant": ({"messages": [ASKED], "label": True}, DataError, "no field `completion`; the row has `messages`, `label`. No field of the row is text. Write rows with `messages`, `prompt` and `completion`, or `text`"),
    "another prompt": ({**CHATS["text beside conversations"], "prompt": "Why?"}, RowError, NO_PREFIX),
    "another rejected prompt": ({"prompt": "Who?", "chosen": [ASKED, GOOD], "rejected": [{**ASKED, "content": "Why?"}, BAD]}, RowError, NO_PREFIX),
    "another conversation": ({**CHATS["the prompt twice"], "prompt": [BAD]}, RowError, NO_PREFIX),
    "another rejected conversation": ({**CHATS["the prompt twice"], "rejected": [GOOD, BAD]}, RowError, NO_PREFIX),
    "nothing shared": ({"chosen": [GOOD], "rejected": [BAD]}, RowError, f"`chosen` and `rejected` begin with different messages, so there is no prompt. {FIX}"),
    "no answer": ({"prompt": [ASKED], "chosen": [ASKED], "rejected": [BAD]}, RowError, f"`chosen` has no turn of the assistant after the prompt. {FIX}"),
    "no rejected answer": ({"prompt": [ASKED], "chosen": [GOOD], "rejected": [ASKED]}, RowError, f"`rejected` has no turn of the assistant after the prompt. {FIX}"),
    "empty": ({"prompt": "a", "chosen": " ", "rejected": "b"}, RowError, f"`chosen` has no answer after the prompt. {FIX}"),
    "empty rejected": ({"prompt": "a", "chosen": "b", "rejected": " "}, RowError, f"`rejected` has no answer after the prompt. {FIX}"),
    "only the shared start": ({"chosen": "the whale", "rejected": "the whale sings"}, RowError, f"`chosen` has no answer after the prompt. {FIX}"),
    "text and messages": ({"prompt": "a", "chosen": "b", "rejected": [BAD]}, RowError, f"of `chosen` and `rejected` one is text and the other is a list of messages. {FIX}"),
    "number as prompt": ({"prompt": 5, "chosen": "b", "rejected": "c"}, RowError, f"`prompt` must be text, not a number. {FIX}"),
    "text as margin": ({"chosen": "a b", "rejected": "a c", "margin": "2"}, RowError, f"`margin` must be a number of fp32, this is text, '2'. {FIX}"),
    "flag as margin": ({"chosen": "a b", "rejected": "a c", "margin": True}, RowError, f"`margin` must be a number of fp32, this is true or false, True. {FIX}"),
    "large margin": ({"chosen": "a b", "rejected": "a c", "margin": -3.5e38}, RowError, f"`margin` must be a number of fp32, this is a number, -3.5e+38. {FIX}"),
}  # fmt: skip
#: Reasons that state less than the message.
REASONS = {
    "the same": "`chosen` and `rejected` are the same",
    "another prompt": "`prompt` is not what the answers begin with",
    "another conversation": "`prompt` is not what the answers begin with",
    "nothing shared": "there is no prompt that the answers share",
    "no rejected answer": "`rejected` has no answer",
    "empty rejected": "`rejected` has no answer",
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_rows(name: str) -> None:
    row, kind, message = WRONG[name]
    with pytest.raises(kind) as raised:
        to_row(row, "rows.jsonl line 1", PREFERENCE, {})
    assert type(raised.value) is kind and str(raised.value) == f"rows.jsonl line 1: {message}"
    assert name not in REASONS or getattr(raised.value, "reason", "") == REASONS[name]


def test_shared_messages_and_margins_are_kept() -> None:
    """The prompt ends before the assistant's first differing turn, also if the answers begin with equal turns."""
    asked_again = {"role": "user", "content": "Sure?"}
    system = {"role": "system", "content": "Be brief."}
    row = {"chosen": [ASKED, GOOD, asked_again, GOOD], "rejected": [ASKED, GOOD, asked_again, BAD, asked_again]}
    assert to_row({**row, "margin": 2.5}, "here", PREFERENCE, {}) == Preference(
        Conversation((ASKED, GOOD, asked_again, GOOD), "here", loss_start=3),
        Conversation((ASKED, GOOD, asked_again, BAD, asked_again), "here", loss_start=3),
        True,
        "here",
        2.5,
    )
    longer = {"chosen": [ASKED, GOOD], "rejected": [ASKED, GOOD, asked_again, BAD], "tools": [{"name": "f"}]}
    assert to_row(longer, "here", PREFERENCE, {}) == Preference(
        Conversation((ASKED, GOOD), "here", loss_start=1, tools=({"name": "f"},)),
        Conversation((ASKED, GOOD, asked_again, BAD), "here", loss_start=1, tools=({"name": "f"},)),
        True,
        "here",
    )
    theirs = {"conversations": THEIRS, "system": "Be brief.", "chosen": GPT[0], "rejected": GPT[1], "margin": -7}
    assert to_row(theirs, "here", PREFERENCE, {}) == Preference(
        Conversation((system, ASKED, GOOD), "here", loss_start=2),
        Conversation((system, ASKED, BAD), "here", loss_start=2),
        True,
        "here",
        -7.0,
    )
    judged = {"instruction": "Who?", "system": "Be brief.", "output": "Ahab.", "label": True, "tools": [{"name": "f"}]}
    answer = Conversation((system, ASKED, GOOD), "here", loss_start=2, tools=({"name": "f"},))
    assert to_row(judged, "here", PREFERENCE, {}) == Preference(answer, None, True, "here")


def test_characters_of_both_answers_count_with_their_prompt() -> None:
    row = {"prompt": "Who?", "chosen": "Ahab.", "rejected": "Bob."}
    assert to_row(row, "", PREFERENCE, {}).num_characters == len("Who?Ahab.") + len("Who?Bob.")
    chats = {"prompt": [ASKED], "completion": [BAD], "label": False}
    assert to_row(chats, "", PREFERENCE, {}).num_characters == len("Who?Bob.")


def encoded(rows: list[dict[str, Any]], kind: RowKind = PAIRS, max_length: int = 64) -> TokenDataset:
    encoder = RowEncoder(load_tokenizer(str(QUICKSTART)), train_on="completion")
    read = [to_row(row, f"row {number}", PREFERENCE, {}) for number, row in enumerate(rows)]
    return encode_rows(read, encoder, max_length=max_length, kind=kind)


def text_of(dataset: TokenDataset, document: int, *, trained: bool) -> str:
    part = slice(int(dataset.starts[document]), int(dataset.starts[document + 1]))
    tokens = dataset.tokens[part][dataset.trained[part]] if trained else dataset.tokens[part]
    return str(load_tokenizer(str(QUICKSTART)).decode(tokens.tolist(), skip_special_tokens=True))


ROWS_OF_PAIRS = [{"prompt": f"{n}:", "chosen": f" good {n}", "rejected": f" bad {n}"} for n in range(5)]
ROWS_OF_ANSWERS = [{"prompt": f"{n}:", "completion": f" answer {n}", "label": n > 2} for n in range(4)]


def test_a_pair_is_two_documents_of_one_row() -> None:
    dataset = encoded(ROWS_OF_PAIRS)
    assert dataset.kind is PAIRS and dataset.roles.tolist() == [CHOSEN, REJECTED] * 5
    assert dataset.begins_row.tolist() == [True, False] * 5
    assert [text_of(dataset, n, trained=True).strip() for n in (2, 3)] == ["good 1", "bad 1"]
    kept = hold_out(dataset, 2, data_seed=0)
    assert len(kept.epoch_documents(0)) == 3 and set(kept.epoch_documents(0) % 2) == {0}
    assert dataset.fingerprint() != encoded(ROWS_OF_PAIRS, ANSWERS).fingerprint()


def test_each_answer_is_paired_with_the_previous_one() -> None:
    dataset = encoded(ROWS_OF_ANSWERS, ANSWERS)
    assert dataset.roles[::2].tolist() == [REJECTED, REJECTED, REJECTED, CHOSEN]
    assert set(dataset.roles[1::2].tolist()) == {MISMATCHED}
    assert [text_of(dataset, n, trained=False) for n in (0, 1, 3)] == ["0: answer 0", "0: answer 3", "1: answer 0"]
    from_pairs = encoded(ROWS_OF_PAIRS[:1], ANSWERS)
    assert from_pairs.roles.tolist() == [CHOSEN, MISMATCHED, REJECTED, MISMATCHED]


def test_micro_batches_hold_whole_examples_with_their_reference() -> None:
    dataset = encoded(ROWS_OF_PAIRS)
    loader = loader_of(dataset, BatchShape(4, 2, 64, packing=False), data_seed=1)
    loader.use_reference(-np.arange(len(dataset), dtype=np.float32))
    assert loader.steps_per_epoch == 2
    seen: list[float] = []
    for _ in range(2):
        for batch in next(loader).micro_batches:
            assert batch["input_ids"].shape[0] == 4
            first, second = batch[REFERENCE].view(2, 2)
            present = batch["labels"].view(2, 2, -1).ne(-100).any(-1)
            assert (present[0] == present[1]).all() and (batch[DESIRABLE] == present[0]).all()
            assert (second[present[1]] == first[present[0]] - 1).all()
            seen += first[present[0]].tolist()
    assert sorted(seen) == [-8.0, -6.0, -4.0, -2.0, 0.0]


@pytest.mark.parametrize(("rows", "kind"), [(ROWS_OF_PAIRS, PAIRS), (ROWS_OF_ANSWERS, ANSWERS)])
def test_an_epoch_of_examples_has_the_tokens_of_both_answers(rows: list[dict[str, Any]], kind: RowKind) -> None:
    dataset = encoded(rows, kind)
    loader = loader_of(dataset, BatchShape(4, 2, 64, packing=False), data_seed=1)
    batches = [next(loader) for _ in range(loader.steps_per_epoch)]
    for batch in batches:
        filled = [each["attention_mask"][each["labels"].ne(-100).any(-1)] for each in batch.micro_batches]
        assert batch.num_real_tokens == sum(int(mask.sum()) for mask in filled)
    assert sum(batch.num_real_tokens for batch in batches) == len(dataset.tokens) > 0


def test_dropped_pairs_are_dropped_entirely(tmp_path: Path) -> None:
    longer = {"prompt": "x", "chosen": " the same start and then a", "rejected": " the same start and then b"}
    dataset = encoded([*ROWS_OF_PAIRS, longer], max_length=7)
    assert len(dataset) == 10
    (dropped,) = dataset.report.dropped
    assert "the two answers have the same tokens after truncation to data.max_length" in dropped.reason
    with pytest.raises(
        DataError, match=r'only one answer, with a label, but the loss compares two answers. Set loss_type = "kto"'
    ):
        encoded(ROWS_OF_ANSWERS)
    assert json.loads(json.dumps(dataset.report.to_json()))["num_rows"] == 6
