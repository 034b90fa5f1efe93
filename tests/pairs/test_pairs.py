"""Tests each feature together with every other compatible feature: a covering array of whole runs (docs/pairs.md).

Each run is a row of levels. Its results are bit-identical to the same run in one process with everything in the
device's memory. It moves the planned bytes, and its tiers stay within their capacity. Its counts, losses and exports
match a computation with plain transformers and peft.
"""

from __future__ import annotations

import os
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from oracles.peft_model import parameters_by_name, plain_name
from pairs import array, factors
from pairs.array import all_rows, chosen, name_of, pairs_of
from pairs.configs import LAYER_DECAY, LEARNING_RATE, NUM_STEPS, ROWS_PER_STEP, WINDOW_STARTS, plain_of
from pairs.factors import Exclusion, Row, all_pairs, is_excluded
from pairs.places import LENGTH, Place
from pairs.plain import documents_of, expected_epoch, negative_log_likelihoods, open_model, rewards
from pairs.refusals import cases, refusal_of, refused_row
from pairs.runs import RankEnd, Run, train

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(1800)]

_TODAY = {name_of(row) for row in chosen(os.environ["TEST_DAY"])}


#: First four hex digits of a test name -> cause of a failure that is not fixed yet.
KNOWN: dict[str, str] = {}


def run_of(row: Row) -> Any:
    """Return a pytest parameter for a row. Rows that are not in today's selection are slow."""
    name = name_of(row)
    marks = [] if name in _TODAY else [pytest.mark.slow]
    if (why := KNOWN.get(name.partition("-")[0])) is not None:
        marks.append(pytest.mark.xfail(reason=why, strict=True))
    return pytest.param(row, id=name, marks=marks)


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("pairs"))


def test_every_pair_is_covered_or_excluded() -> None:
    """Each pair is either covered or excluded, not both. Each exclusion has either an error message or a reason."""
    assert not [name_of(row) for row in all_rows() if is_excluded(row)]
    covered = set().union(*map(pairs_of, all_rows()))
    for pair in all_pairs():
        assert (tuple(pair.items()) in covered) != is_excluded(pair), pair
    for each in factors.EXCLUSIONS:
        assert bool(each.text) != bool(each.why), each


@pytest.mark.slow
def test_rows_match_the_generator() -> None:
    assert list(all_rows()) == array.generate(all_rows()), "run: python -m pairs.array"


@pytest.mark.parametrize(
    ("exclusion", "levels"),
    [pytest.param(each, levels, id="-".join(levels.values())) for each, levels in cases()],
)
def test_excluded_pairs_are_refused_with_their_message(
    exclusion: Exclusion, levels: Row, place: Place, tmp_path: Path
) -> None:
    said = refusal_of(refused_row(exclusion, levels), place, tmp_path / "run")
    assert exclusion.text in said, said
    assert exclusion.is_late or not list((tmp_path / "run").glob("out/*")), "a run that is refused writes nothing"


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
    if row["rates"] == "layer_decay":
        assert_rates(row, plain, place)
    assert_export(row, plain, place)


def assert_within_plan(end: RankEnd) -> None:
    """Assert that every link moved the planned bytes, no prefetch was wasted, and tiers stayed within capacity."""
    links = {**end.moved, **end.planned}
    moved, planned = ({link: each.get(link, 0) for link in links} for each in (end.moved, end.planned))
    if end.interrupted:  # the stop was not planned, so blocks of the next step may be in flight
        assert all(moved[link] >= planned[link] for link in links), (moved, planned)
    else:
        assert moved == planned
        assert end.wasted == (0, 0)
    for tier, (held, most, capacity) in end.tiers.items():
        assert held <= most <= capacity, tier


def assert_counts(row: Row, plain: Run, place: Place) -> None:
    """Assert that an epoch has the expected token counts, and the loss that plain transformers computes."""
    if row["reading"] == "streamed":
        if row["packing"] != "rows":
            assert_full_rows(row, plain)
            return
        epoch = plain.steps[: WINDOW_STARTS[0]]
        assert [step.epoch for step in plain.steps] == [0.25, 0.5, 0.75, 1.0]  # a streamed run is one epoch
    else:
        epoch = [step for step in plain.steps if step.epoch <= 1.0]
        assert 1 <= len(epoch) <= 2 and epoch[-1].epoch == 1.0
    expected = expected_epoch(row, place)
    assert epoch[0].lr == 0.0
    assert sum(step.num_trained_tokens for step in epoch) == expected.num_trained
    assert sum(step.num_real_tokens for step in epoch) == expected.num_tokens
    near = {"rel": 5e-5 if row["precision"] == "fp32" else 2e-2}
    if expected.loss is not None:
        total = sum(step.loss * step.num_trained_tokens for step in epoch)
        assert total / expected.num_trained == pytest.approx(expected.loss, **near)
    for name, value in expected.figures.items():
        assert len(epoch) == 1 and epoch[0].preferences[name] == pytest.approx(value, **near)


def assert_full_rows(row: Row, plain: Run) -> None:
    """Assert that streamed texts fill the rows of each step. A random draw decides which texts share a row."""
    for step in plain.steps:
        most = ROWS_PER_STEP * LENGTH
        if row["packing"] == "concat":  # the last row of a window may be short
            assert most - LENGTH < step.num_real_tokens <= most
            assert step.num_trained_tokens == step.num_real_tokens - ROWS_PER_STEP
        else:  # of any two rows, at least one is more than half full
            assert most // 2 < step.num_real_tokens <= most


def assert_rates(row: Row, plain: Run, place: Place) -> None:
    """Assert that AdamW and Lion with ``layer_decay`` move each layer's weights at the layer's learning rate."""
    if row["model"] in ("zamba2", "qwen2_5_vl") or row["optimizer"] not in ("adamw", "adamw_bf16", "lion_int8"):
        return
    (end,) = plain.starts[0]
    before = load_file(place.meant(row["model"], row["base"], row["task"]) / "model.safetensors")
    layer = re.compile(r"\.(?:layers|h)\.(\d+)\.")
    num_layers = 1 + max(int(found[1]) for name in before if (found := layer.search(name)))
    moves: dict[int, float] = {}  # layer number from 1, or 0 for embeddings -> largest change of a weight
    for name, weight in end.weights.items():
        found = layer.search(name)
        depth = int(found[1]) + 1 if found else 0 if re.search(r"embed_tokens|wte|wpe", name) else num_layers + 1
        if "lora_B" in name:  # lora_B starts at zero
            change = weight
        elif row["adapters"] == "full":
            change = weight - before[plain_name(name)].float()
        else:
            continue
        moves[depth] = max(moves.get(depth, 0.0), float(change.abs().max()))
    assert len(moves) >= num_layers
    for depth, move in moves.items():
        rate = LEARNING_RATE * LAYER_DECAY ** (num_layers + 1 - depth)
        assert move == pytest.approx((NUM_STEPS - 1) * rate, rel=0.15), (depth, moves)


def assert_export(row: Row, plain: Run, place: Place) -> None:
    """Assert that the export, loaded with transformers or peft, has the run's weights and last held-out loss."""
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
    near = {"rel": 5e-5 if row["precision"] == "fp32" else 2e-2}
    if row["task"] == "reward":
        assert_rewards(told, rewards(open_model(row, place, plain.exported), documents_of(row, place, held_out)), near)
        return
    documents = [each for (each,) in documents_of(row, place, held_out)]
    num_trained = sum(each.num_trained for each in documents)
    model = open_model(row, place, plain.exported)
    loss = sum(negative_log_likelihoods(model, documents)) / num_trained
    assert told[3] == num_trained
    assert told[2] == pytest.approx(loss, **near)


def assert_rewards(told: tuple[Any, ...], found: tuple[Tensor, Tensor], near: dict[str, float]) -> None:
    """Assert that the last evaluation's metrics match the exported model's rewards, computed one text at a time."""
    chosen, rejected = found
    both = torch.cat(found)
    near = {"abs": near["rel"] * float(both.abs().max())}
    assert told[3] == len(chosen)
    assert told[2] == pytest.approx(float(-functional.logsigmoid(chosen - rejected).mean()), **near)
    assert told[4] == {
        "accuracy": float((chosen > rejected).double().mean()),
        "margin": pytest.approx(float((chosen - rejected).mean()), **near),
        "mean_reward": pytest.approx(float(both.mean()), **near),
        "min_reward": pytest.approx(float(both.min()), **near),
        "max_reward": pytest.approx(float(both.max()), **near),
    }


def read_exported(folder: Path) -> dict[str, Any]:
    found = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return found
