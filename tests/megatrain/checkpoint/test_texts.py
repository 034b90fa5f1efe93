"""What a run reports about its checkpoints: lost parts, drives, copies, summaries and means of losses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatrain.base.observer import RunSummary
from megatrain.checkpoint import locations
from megatrain.checkpoint.document import Checkpoint, RankGeneration
from megatrain.checkpoint.inspection import InventoryEntry
from megatrain.checkpoint.listing import read_listed, write_document
from megatrain.checkpoint.locations import LostPart, describe_drives
from megatrain.checkpoint.notices import LostPartsNotice, moved_run_notices
from megatrain.checkpoint.state import CheckpointError, DecidedSettings, RunState
from megatrain.checkpoint.table import CheckpointConfig, CheckpointSpec
from oracles.run_state import make_state
from tiered import MiB, checksum
from tiered.errors import GenerationError
from tiered.ext import DrivePlace

GONE = LostPart("/d/a", False, ("x/weight", "y/m.1", "z/m.2"), 9, 3 * MiB, "/old/a")
THERE = LostPart("/d/b", True, ("x/weight",), 9, MiB, "/d/b")


def entry(step: int | None, *lost: LostPart, rank: str = "", outside: tuple[DrivePlace, ...] = ()) -> InventoryEntry:
    meta = {} if step is None else {"step": step}
    checkpoint = Checkpoint(Path("checkpoints"), 1, (RankGeneration(rank, 1),), meta)
    return InventoryEntry(checkpoint, lost=lost, outside=outside, problem="gone" if lost else None)


def test_lost_parts_are_described_with_their_place() -> None:
    assert [str(part) for part in (GONE, THERE, replace(GONE, recorded="/d/a"), replace(GONE, recorded=""))] == [
        "3 of 9 blocks (weight, m; 3.00 MiB) lay in '/d/a', which is not there (it was '/old/a')",
        "1 of 9 blocks (weight; 1.00 MiB) lay in '/d/b'",
        "3 of 9 blocks (weight, m; 3.00 MiB) lay in '/d/a', which is not there",
        "3 of 9 blocks (weight, m; 3.00 MiB) lay in '/d/a', which is not there",
    ]


def test_lost_checkpoints_are_reported_together() -> None:
    """Checkpoints of several ranks do not count, because another host may have their parts."""
    assert LostPartsNotice.among([entry(2), entry(3, GONE, rank="rank00000")]) is None
    found = LostPartsNotice.among([entry(6, THERE, GONE), entry(4), entry(2, GONE), entry(None, GONE)])
    gone = GONE.place
    assert found == LostPartsNotice((2, 6), ("'/d/b'", gone), True)
    assert str(found) == f"the checkpoints of steps 2, 6 are gone: parts of them lay in '/d/b'; {gone}"
    copy = "If this folder is a copy of a live run, copy it again; a larger checkpoint.save_total_limit keeps more"
    assert found.remedy(Path("out")) == (
        f"Restore that folder (mount its drive, restore a backup) and run again. {copy}. To start from scratch, name "
        "another output_dir"
    )
    found = LostPartsNotice.among([entry(6, THERE)])
    assert found is not None and str(found) == "the checkpoint of step 6 is gone: parts of it lay in '/d/b'"
    assert found.remedy(Path("out")) == (
        f"Restore a backup and run again. {copy}. Or give up what was trained: megatrain-tier ckpt rm out --all, then "
        "run again"
    )


def test_drives_outside_of_a_moved_run_are_reported_once_each() -> None:
    one, two = (DrivePlace(Path(f"/{name}"), Path(f"/near/{name}"), Path(f"/{name}")) for name in "ab")
    entries = [entry(4, outside=(one, two)), entry(2, outside=(one,)), entry(3)]
    text = "warning: this run was copied or moved without all of its drives. Parts of the checkpoint"
    assert moved_run_notices(entries) == [
        f"{text}s of steps 2, 4 are read from '/a', because '/near/a' does not hold them",
        f"{text} of step 4 are read from '/b', because '/near/b' does not hold them",
    ]


@pytest.mark.parametrize(
    ("rule", "advice"),
    [
        (False, "checkpoint.save_copy = true keeps whole copies in output_dir"),
        (True, "A whole copy of every checkpoint goes to 'out/copies'"),
        ("last", "A whole copy of the last checkpoint goes to 'out/copies'"),
        (3, "A whole copy of one checkpoint in 3 goes to 'out/copies'"),
    ],
)
def test_drives_with_parts_of_checkpoints_are_named(
    monkeypatch: pytest.MonkeyPatch, rule: bool | str | int, advice: str
) -> None:
    a, b, c = Path("a"), Path("b"), Path("c")
    monkeypatch.setattr(locations, "bytes_on_drives", lambda output_dir, drives: {a: MiB, b: 2 * MiB, c: 4 * MiB})
    table = CheckpointConfig.model_validate({"save_copy": rule})
    spec = CheckpointSpec(table, Path("out"), (a, b), "pause")
    old = "4.00 MiB of this run's earlier checkpoints are in 'c'"
    now = "8.00 MiB of each checkpoint stay in 'a', 'b' (now 3.00 MiB): deleting that folder destroys them"
    assert describe_drives(spec, 8 * MiB) == [f"{now}. {advice}", old]
    none = "3.00 MiB of this run's checkpoints are in 'a', 'b': deleting that destroys them"
    assert describe_drives(spec, 0) == [none, old]
    assert describe_drives(replace(spec, table=table.without_saves()), 8 * MiB) == [none, old]
    assert describe_drives(replace(spec, drives=(Path("d"),)), 0) == [
        "1.00 MiB of this run's earlier checkpoints are in 'a'",
        "2.00 MiB of this run's earlier checkpoints are in 'b'",
        old,
    ]


@pytest.mark.parametrize(
    ("values", "url", "every", "num_generations", "num_copies"),
    [
        ({}, None, None, 2, 0),
        ({"save_total_limit": 1}, None, None, 2, 0),
        ({"save_total_limit": 5, "save_copy": True}, None, 1, 5, 5),
        ({"save_total_limit": 1, "save_copy": 3}, None, 3, 2, 2),
        ({"save_copy": "last", "load_best_model_at_end": True}, None, None, 3, 2),
        ({"save_copy": "s3://b/c"}, "s3://b/c", None, 2, 0),
        ({"save_copy": "s3://b/c", "save_strategy": "no"}, "s3://b/c", None, 2, 0),
        ({"save_copy": "s3://b/c", "save_strategy": "no", "save_on_signal": False}, None, None, 0, 0),
        ({"save_copy": 3, "save_strategy": "no", "save_on_signal": False}, None, 3, 0, 0),
        ({"save_on_signal": False}, None, None, 2, 0),
    ],
)
def test_rules_for_checkpoints_and_copies(
    values: dict[str, Any], url: str | None, every: int | None, num_generations: int, num_copies: int
) -> None:
    table = CheckpointConfig.model_validate(values)
    found = (table.copy_url, table.copy_every, table.num_generations, table.num_copies, table.is_on)
    assert found == (url, every, num_generations, num_copies, num_generations > 0)
    off = table.without_saves()
    assert (off.save_strategy, off.save_on_signal, off.save_copy, off.is_on) == ("no", False, False, False)


def test_summary_has_the_counts_and_mean_losses_of_the_state() -> None:
    state = make_state(
        step=5, seconds=2.5, num_real_tokens=70, num_trained_tokens=30, first_loss=9.0, last_loss=1.0,
        first_losses=(9.0, 7.0, 5.0), last_losses=(7.0, 5.0, 3.0, 1.0),
    )  # fmt: skip
    assert state.summary() == RunSummary(5, 9.0, 1.0, 2.5, 70, 30, mean_losses=(8.0, 2.0), num_averaged=2)
    assert replace(state, first_losses=(9.0,)).summary() == RunSummary(5, 9.0, 1.0, 2.5, 70, 30)


def test_unusable_states_are_explained() -> None:
    meta = make_state(step=3).to_meta()
    missing = {key: value for key, value in meta.items() if key not in ("seed", "epoch")}
    for changed, message in (
        ({}, "X holds blocks that another program committed, not a checkpoint of megatrain-tier: name another"),
        (
            {**meta, "checkpoint_format": 2},
            "X has format 2, but this version reads up to 1: upgrade megatrain-tier",
        ),
        (
            {**meta, "checkpoint_format": "1"},
            "X has format 1, but this version reads up to 1: upgrade megatrain-tier",
        ),
        (missing, "X lacks epoch, seed: it is damaged. Use another checkpoint"),
        ({**meta, "seed": "x" * 60}, f"X has seed = '{'x' * 39}: it is damaged. Use another checkpoint"),
    ):
        with pytest.raises(CheckpointError) as caught:
            RunState.from_meta(changed, where="X")
        assert str(caught.value) == message
    assert RunState.from_meta({**meta, "of_a_newer_version": 1}, where="X") == make_state(step=3)


def test_settings_of_an_older_run_are_kept() -> None:
    toml = (
        '[training]\ngradient_lanes = 4\n[model]\nuse_liger_kernel = true\nflash_attention = "FA3"\n'
        '[optimizer]\nmuon_fused = "split"\n'
    )
    of_meta = DecidedSettings.of_meta
    assert of_meta({"config_toml": toml, "model": {"micro_batch_tokens": 77, "device": "cuda"}}) == DecidedSettings(
        4, 77, "split", True, "FA3"
    )
    other = toml.replace("4", '"auto"').replace("true", '"auto"').replace("FA3", "auto")
    for model, tokens in (({"device": "cuda"}, 8192), ({"device": "cpu"}, 2048), ({}, None), (7, None)):
        assert of_meta({"config_toml": other, "model": model}) == DecidedSettings(1, tokens, "split", False, "FA2")
    assert of_meta({}) == DecidedSettings() and of_meta({"config_toml": "="}) is None


RANKS = tuple(RankGeneration(f"rank0000{rank}", 5 + rank, "0" * 16) for rank in (0, 1))
META = make_state(step=2).to_meta()
LISTED = [
    Checkpoint(Path("folder"), number, RANKS, {**META, "step": number}, 4, {"a": 10 * number}) for number in (1, 3)
]


LACKS = "rank 0 lacks a checksum, or has the invalid generation"


def part(path: str, generation: object, digest: str) -> dict[str, Any]:
    return {"ranks": [{"path": path, "generation": generation, "xxh3_64": digest}]}


def test_listed_checkpoints_are_read_as_they_were_written(tmp_path: Path) -> None:
    assert read_listed(tmp_path) == []
    checkpoints = [replace(each, folder=tmp_path / "folder") for each in LISTED]
    write_document(tmp_path / "folder", checkpoints)
    written = [replace(each, meta=json.loads(json.dumps(each.meta))) for each in checkpoints]
    assert read_listed(tmp_path / "folder") == written


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (part("../x", 1, "0"), "rank 0 has the path '../x' instead of 'rank00000'"),
        (part("rank00000", 0, "0"), f"{LACKS} 0"),
        (part("rank00000", 1, ""), f"{LACKS} 1"),
        (part("rank00000", True, "0"), f"{LACKS} True"),
        ({"ranks": []}, "checkpoint 1 has 0 ranks, or invalid numbers"),
        ({"number": -1}, "checkpoint -1 has 2 ranks, or invalid numbers"),
        ({"lanes": "4"}, "checkpoint 1 has 2 ranks, or invalid numbers"),
        ({"elements": {"a": -1}}, "checkpoint 1 has 2 ranks, or invalid numbers"),
        ({"meta": []}, "the state of checkpoint 1 is not an object"),
    ],
)  # fmt: skip
def test_invalid_lists_of_checkpoints_are_explained(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    """Their checksum is right, so another program wrote them."""
    write_document(tmp_path, LISTED)
    path = tmp_path / "RANKS.json"
    document = json.loads(path.read_text())
    document["checkpoints"][0] |= changes
    document["xxh3_64"] = checksum(json.dumps(document["checkpoints"], sort_keys=True).encode())
    path.write_text(json.dumps(document))
    with pytest.raises(GenerationError) as caught:
        read_listed(tmp_path)
    assert str(caught.value) == f"'{path}' is invalid: {problem}. Restore it from a backup"


def test_unreadable_lists_of_checkpoints_are_explained(tmp_path: Path) -> None:
    write_document(tmp_path, LISTED)
    path = tmp_path / "RANKS.json"
    document = json.loads(path.read_text())
    for changed, message in (
        ({**document, "format": 3}, "has format 3, but this version reads up to 2: upgrade"),
        ({**document, "format": "1"}, "has format 1, but this version reads up to 2: upgrade"),
        ({**document, "xxh3_64": "0"}, "is damaged: its checksum does not match. Restore it from a backup"),
        ({"format": 1}, "cannot be read: 'xxh3_64'. Restore it from a backup of the folder"),
    ):
        path.write_text(json.dumps(changed))
        with pytest.raises(GenerationError) as caught:
            read_listed(tmp_path)
        assert str(caught.value) == f"'{path}' {message}"
