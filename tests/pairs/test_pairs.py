"""Every feature with every other one that it can meet: a covering array of whole runs (docs/pairs.md).

Each run is a row of levels. Its bits are those of the same run all in RAM, in one process; it moves what its plan says
and takes no more than its tiers have; what it counts, loses and writes is counted and computed once more without it.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from oracles.peft_model import parameters_by_name, plain_name
from pairs import array, factors
from pairs.array import all_rows, chosen, name_of, pairs_of
from pairs.configs import NUM_STEPS, plain_of
from pairs.factors import Exclusion, Row, all_pairs, is_excluded
from pairs.places import Place
from pairs.plain import documents_of, expected_epoch, negative_log_likelihoods, open_model
from pairs.refusals import cases, refusal_of, refused_row
from pairs.runs import RankEnd, Run, train

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(1800)]

_TODAY = {name_of(row) for row in chosen(os.environ["PAIRS_SEED"])}


#: Digits of a row -> why it fails: what the array found and nobody has mended yet.
KNOWN: dict[str, str] = {}


def run_of(row: Row) -> Any:
    """Return a row as a test's parameter."""
    name = name_of(row)
    marks = [] if name in _TODAY else [pytest.mark.slow]
    if (why := KNOWN.get(name.partition("-")[0])) is not None:
        marks.append(pytest.mark.xfail(reason=why, strict=True))
    return pytest.param(row, id=name, marks=marks)


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("pairs"))


def test_every_pair_is_covered_or_excluded() -> None:
    """Nothing is left out without a reason, and no reason is given that hides nothing."""
    assert not [name_of(row) for row in all_rows() if is_excluded(row)]
    covered = set().union(*map(pairs_of, all_rows()))
    for pair in all_pairs():
        assert (tuple(pair.items()) in covered) != is_excluded(pair), pair
    for each in factors.EXCLUSIONS:
        assert bool(each.text) != bool(each.why), each


@pytest.mark.slow
def test_the_rows_are_those_that_the_generator_makes() -> None:
    assert list(all_rows()) == array.generate(all_rows()), "run: python -m pairs.array"


@pytest.mark.parametrize(
    ("exclusion", "levels"),
    [pytest.param(each, levels, id="-".join(levels.values())) for each, levels in cases()],
)
def test_what_is_refused_is_refused_in_these_words(
    exclusion: Exclusion, levels: Row, place: Place, tmp_path: Path
) -> None:
    said = refusal_of(refused_row(exclusion, levels), place, tmp_path / "run")
    assert exclusion.text in said, said
    assert not list((tmp_path / "run").glob("out/*")), "a run that is refused writes nothing"


@pytest.mark.parametrize("row", [run_of(row) for row in all_rows()])
def test_run(row: Row, place: Place, tmp_path: Path) -> None:
    plain_row = plain_of(row)
    plain = train(plain_row, place, tmp_path / "plain", is_plain=True)
    stop_after = None
    if row["checkpoints"] != "unsaved":
        stop_after = random.Random(name_of(row)).randrange(1, NUM_STEPS)
    run = train(row, place, tmp_path / "run", stop_after=stop_after)

    assert run.bits == plain.bits and len(plain.bits) == NUM_STEPS
    assert run.evaluations == plain.evaluations and bool(run.evaluations) == (row["evaluation"] != "blind")
    assert run.exported_bits == plain.exported_bits != {}
    for start in (*plain.starts, *run.starts):
        for end in start:
            assert_within_plan(end)
    assert_counts(row, plain, place)
    assert_export(row, plain, place)


def assert_within_plan(end: RankEnd) -> None:
    """Every link moved what was planned, nothing was fetched for nothing, and no tier took more than it has."""
    links = {**end.moved, **end.planned}
    moved, planned = ({link: each.get(link, 0) for link in links} for each in (end.moved, end.planned))
    if end.interrupted:  # nobody foresees a stop: what the next step needs may be on its way
        assert all(moved[link] >= planned[link] for link in links), (moved, planned)
    else:
        assert moved == planned
        assert end.wasted == (0, 0)
    for tier, (most, capacity) in end.tiers.items():
        assert 0 <= most <= capacity, tier


def assert_counts(row: Row, plain: Run, place: Place) -> None:
    """An epoch holds the tokens of the files, and its loss is that of plain transformers, row by row."""
    expected = expected_epoch(row, place)
    epoch = [step for step in plain.steps if step.epoch <= 1.0]
    assert 1 <= len(epoch) <= 2 and epoch[-1].epoch == 1.0 and epoch[0].lr == 0.0
    assert sum(step.num_trained_tokens for step in epoch) == expected.num_trained
    assert sum(step.num_real_tokens for step in epoch) == expected.num_tokens
    near = {"rel": 5e-5 if row["precision"] == "fp32" else 2e-2}
    if expected.loss is not None:
        total = sum(step.loss * step.num_trained_tokens for step in epoch)
        assert total / expected.num_trained == pytest.approx(expected.loss, **near)
    for name, value in expected.figures.items():
        assert len(epoch) == 1 and epoch[0].preferences[name] == pytest.approx(value, **near)


def assert_export(row: Row, plain: Run, place: Place) -> None:
    """What was written opens with transformers or peft, is what the run had, and says what it was last said to say."""
    model = open_model({**row, "precision": "fp32"}, place, plain.exported)
    (end,) = plain.starts[0]
    found = {plain_name(name): weight for name, weight in read_exported(plain.exported).items()}
    opened = parameters_by_name(model) if row["adapters"] != "full" else dict(model.named_parameters())
    had = {plain_name(name): weight for name, weight in end.weights.items()}
    for weights in (opened, had):
        shared = found.keys() & weights.keys()
        assert shared and not [name for name in shared if not torch.equal(found[name], weights[name])]
    if row["evaluation"] == "blind" or row["task"] in factors.PREFERENCES or row["packing"] == "concat":
        return
    told = next(each for each in plain.evaluations if each[:2] == (NUM_STEPS, "held_out"))
    _, held_out = place.data(row["task"], images=row["images"] != "text")
    documents = [each for (each,) in documents_of(row, place, held_out)]
    num_trained = sum(each.num_trained for each in documents)
    model = open_model(row, place, plain.exported)
    loss = sum(negative_log_likelihoods(model, documents)) / num_trained
    assert told[3] == num_trained
    assert told[2] == pytest.approx(loss, rel=5e-5 if row["precision"] == "fp32" else 2e-2)


def read_exported(folder: Path) -> dict[str, Any]:
    found = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return found
