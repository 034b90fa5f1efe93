"""A run that is stopped and resumed, in any placement, is bit-identical to an uninterrupted run."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatrain.base.layout import views
from megatrain.checkpoint.inventory import find_checkpoint
from megatrain.checkpoint.reader import CheckpointReader
from megatrain.checkpoint.resume import ConfigChangedError
from megatrain.checkpoint.state import CheckpointError
from megatrain.config import load_config
from megatrain.engine.step import StepEngine, StepResult
from megatrain.engine.unit.weight_gradients import GradientAccumulator
from megatrain.optim.clip import NonFiniteGradientError
from megatrain.plan.planner import plan_run
from megatrain.training.export import export_checkpoint
from megatrain.training.resolve import resolve
from oracles.tiered_run import ALL_NVME, EXAMPLES, config_text, make_loader, write_tiny_model
from oracles.whole_run import WholeRun, train_whole
from tiered import LockedError
from tiered.durable.manifest import current_generation, generation_folder, list_generations, read_manifest

NUM_STEPS = 6
IN_RAM: dict[str, Any] = {"nvme": 0}
ON_NVME: dict[str, Any] = {"placement": ALL_NVME, "ram": "7MiB"}
STRIPED: dict[str, Any] = {"placement": ALL_NVME, "ram": "7MiB", "nvme": 2, "rates": (1, 3)}
STATE_ON_NVME: dict[str, Any] = {"placement": 'optimizer = ["nvme"]'}
ON_GPU: dict[str, Any] = {"gpu": "64MiB", "ram": "2MiB", "nvme": 0}
PAST_RAM: dict[str, Any] = {"gpu": "9MiB", "ram": "7MiB", "placement": ALL_NVME, "tiers": 'direct = "on"'}
PARTLY_ON_GPU: dict[str, Any] = {"gpu": "12MiB", "ram": "7MiB"}
TIGHT: dict[str, Any] = {"ram": "5500KiB", "advanced": 'eviction_policy = "lru"'}


def train(
    folder: Path,
    model: Path,
    placement: dict[str, Any],
    *,
    stop_after: int | None = None,
    checkpoint: str = "",
    changes: Mapping[str, str] | None = None,
    allow: bool = False,
    **tables: Any,
) -> WholeRun:
    text = config_text(folder, model, **{"nvme": 1, **placement, **tables})
    text = text.replace("[training]\n", f"[training]\nmax_steps = {NUM_STEPS}\n")
    for old, new in (changes or {}).items():
        assert old in text, old
        text = text.replace(old, new)
    text += f'[checkpoint]\nmin_free_disk = "0MiB"\n{checkpoint}\n'
    return train_whole(folder, text, stop_after=stop_after, allow=allow)


@pytest.fixture(scope="module")
def unbroken(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> WholeRun:
    return train(tmp_path_factory.mktemp("unbroken"), tiny_model, IN_RAM)


@pytest.mark.parametrize(
    "placements",
    [
        (IN_RAM, ON_NVME, STRIPED),
        (STRIPED, TIGHT, IN_RAM),
        (STRIPED, PARTLY_ON_GPU, ON_GPU),
        (PAST_RAM, PARTLY_ON_GPU, PAST_RAM),
    ],
    ids=[
        *("RAM to NVMe to striped", "striped to tight to RAM", "striped to some GPU to GPU"),
        "past RAM to some GPU to past RAM",
    ],
)
def test_resume_in_any_placement_is_bit_identical(
    placements: Sequence[dict[str, Any]], tiny_model: Path, tmp_path: Path, unbroken: WholeRun
) -> None:
    for placement, stop in zip(placements, (2, 5), strict=False):
        stopped = train(tmp_path / "w", tiny_model, placement, stop_after=stop)
        assert stopped.summary.saved_step == stop and stopped.summary.num_steps == stop
    done = train(tmp_path / "w", tiny_model, placements[-1])
    done.assert_same(unbroken)
    ends = (done.losses[0][1], done.losses[-1][1])
    assert (done.summary.first_loss, done.summary.last_loss) == ends
    assert done.summary.num_trained_tokens == unbroken.summary.num_trained_tokens
    assert done.summary.num_real_tokens == unbroken.summary.num_real_tokens


@pytest.mark.parametrize(
    "placement",
    [IN_RAM, ON_NVME, STATE_ON_NVME, ON_GPU, PARTLY_ON_GPU, PAST_RAM],
    ids=["RAM", "NVMe", "mixed", "GPU", "some GPU", "past RAM"],
)
@pytest.mark.parametrize("mode", ["", "async_save = false"], ids=["async", "sync"])
def test_saving_every_step_is_bit_identical(
    mode: str, placement: dict[str, Any], tiny_model: Path, tmp_path: Path, unbroken: WholeRun
) -> None:
    saved = train(tmp_path / "w", tiny_model, placement, checkpoint=f"save_steps = 1\n{mode}")
    saved.assert_same(unbroken)
    assert [metrics.step for metrics in saved.told.checkpoints] == list(range(1, NUM_STEPS + 1))
    assert len(list_generations(tmp_path / "w/out/checkpoints")) == 2
    segments = [saved.plan.placement.run_traffic_bytes(1)] * NUM_STEPS
    assert saved.summary.link_bytes == {link: sum(moved[link] for moved in segments) for link in segments[0]}
    first = saved.told.checkpoints[0]
    blocks = [block for block in saved.plan.program.blocks.values() if block.is_saved]
    on_drives = sum(block.nbytes for block in blocks if saved.plan.placement.homes[block.key] == "nvme")
    assert first.nbytes == sum(block.nbytes for block in blocks)
    assert (first.linked_bytes, first.written_bytes) == (on_drives, first.nbytes - on_drives)
    assert (first.written_bytes == 0) == (placement in (ON_NVME, PAST_RAM))


def test_ema_export_requires_a_run_with_averages(tiny_model: Path, tmp_path: Path) -> None:
    with_average = {"optimizer": "ema_decay = 0.9", "precision": 'compute_dtype = "bfloat16"'}
    without = {"precision": with_average["precision"]}
    train(tmp_path / "w", tiny_model, ON_GPU, stop_after=2, **with_average)
    out = tmp_path / "w" / "out"
    export_checkpoint(out, tmp_path / "ema", ema=True, dtype=torch.float32)
    exported = load_file(tmp_path / "ema/model.safetensors")
    reader = CheckpointReader(find_checkpoint(out).checkpoint)
    graph = plan_run(resolve(load_config(tmp_path / "w/run.toml").config)).graph
    for layout in graph.layouts.values():
        block = torch.empty(layout.num_elements)
        reader.read(f"{layout.name}/ema", block)
        for name, average in views(block, layout).items():
            assert torch.equal(exported[name], average), name
    export_checkpoint(out, tmp_path / "weights", dtype=torch.float32)
    weights, start = load_file(tmp_path / "weights/model.safetensors"), load_file(tiny_model / "model.safetensors")
    for name, average in exported.items():  # after two steps, the initial weights still make up 0.81 of the average
        far, near = (average - weights[name]).norm(), (average - start[name]).norm()
        assert 0 < near < far, name
    with pytest.raises(ConfigChangedError, match=r"ema_decay: 0\.9 -> 0"):
        train(tmp_path / "w", tiny_model, IN_RAM, **without)
    # A run can continue without its average, but cannot start an average later.
    train(tmp_path / "w", tiny_model, IN_RAM, stop_after=3, allow=True, **without)
    with pytest.raises(CheckpointError, match=r"no average of the weights, which optimizer.ema_decay needs"):
        train(tmp_path / "w", tiny_model, IN_RAM, allow=True, **with_average)
    with pytest.raises(CheckpointError, match=r"no average of the weights.*without --ema"):
        export_checkpoint(out, tmp_path / "none", ema=True)


@pytest.mark.parametrize("state_dtype", ["int8", "bfloat16"])
def test_low_precision_moments_resume_only_in_their_dtype(state_dtype: str, tiny_model: Path, tmp_path: Path) -> None:
    tables = {"optimizer": f'state_dtype = "{state_dtype}"', "precision": 'compute_dtype = "bfloat16"'}
    whole = train(tmp_path / "whole", tiny_model, IN_RAM, **tables)
    train(tmp_path / "w", tiny_model, STATE_ON_NVME, stop_after=3, **tables)
    with pytest.raises(ConfigChangedError, match=f'state_dtype: "{state_dtype}" -> "float32"'):
        train(tmp_path / "w", tiny_model, ON_NVME, precision=tables["precision"])
    with pytest.raises(CheckpointError, match=f'moments in {state_dtype}, and optimizer.state_dtype is "float32"'):
        train(tmp_path / "w", tiny_model, ON_NVME, precision=tables["precision"], allow=True)
    train(tmp_path / "w", tiny_model, PARTLY_ON_GPU, **tables).assert_same(whole)


def test_data_order_and_learning_rate_resume_across_epochs(tiny_model: Path, tmp_path: Path) -> None:
    """An epoch has four steps, and the learning rate changes in every step."""
    changes = {
        "gradient_accumulation_steps = 3": "gradient_accumulation_steps = 10",
        'lr_scheduler_type = "constant"': 'lr_scheduler_type = "cosine"',
    }
    whole = train(tmp_path / "whole", tiny_model, IN_RAM, changes=changes)
    for stop in (1, 4):
        train(tmp_path / "w", tiny_model, IN_RAM, stop_after=stop, changes=changes)
    train(tmp_path / "w", tiny_model, IN_RAM, changes=changes).assert_same(whole)
    lines = [json.loads(line) for line in (tmp_path / "w/out/metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert steps[-1]["epoch"] == 1.5 and len({line["lr"] for line in steps}) == NUM_STEPS


def test_skipped_steps_are_not_counted_as_updates_on_resume(tmp_path: Path) -> None:
    """A token of the first step has an embedding whose square overflows. Adam's bias correction counts only updates."""
    model = write_tiny_model(tmp_path / "model", tie_word_embeddings=False)
    (tmp_path / "batches.toml").write_text(config_text(tmp_path, model))
    config = load_config(tmp_path / "batches.toml").config
    loader = make_loader(config, plan_run(resolve(config)))
    first, *later = [torch.cat([b["input_ids"] for b in next(loader).micro_batches]).unique() for _ in range(3)]
    token = next(token for token in first.tolist() if not any(token in ids for ids in later))
    weights = load_file(model / "model.safetensors")
    weights["model.embed_tokens.weight"][token] = 3e38
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    changes = {f"max_steps = {NUM_STEPS}": "max_steps = 3"}
    tables = {"optimizer": 'nonfinite = "skip"', "changes": changes}
    whole = train(tmp_path / "whole", model, IN_RAM, **tables)
    lines = [json.loads(line) for line in (tmp_path / "whole/out/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if not math.isfinite(float(line.get("grad_norm", 0)))] == [1]
    train(tmp_path / "w", model, IN_RAM, stop_after=2, **tables)
    train(tmp_path / "w", model, IN_RAM, **tables).assert_same(whole)


BY_LAYER = 'clip_scope = "layer"\nmax_grad_norm = 0.05'


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["max_grad_norm = 0", BY_LAYER])
def test_resume_with_updates_in_the_backward_is_bit_identical(optimizer: str, tiny_model: Path, tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", tiny_model, IN_RAM, optimizer=optimizer)
    for stop in (1, 4):
        train(tmp_path / "w", tiny_model, ON_NVME, optimizer=optimizer, stop_after=stop)
    done = train(tmp_path / "w", tiny_model, PARTLY_ON_GPU, optimizer=optimizer)
    done.assert_same(whole)
    assert not done.plan.program.updates.are_deferred
    durable = {key for key, block in done.plan.program.blocks.items() if block.kind in ("weights", "optimizer")}
    assert set(done.state) == durable, "a checkpoint has no gradient"


def test_stop_during_updates_resumes_from_the_last_checkpoint(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the fourth step, one layer's gradient is NaN. The layers closer to the loss have already been updated."""
    tables = {"optimizer": "max_grad_norm = 0", "checkpoint": "save_steps = 2"}
    whole = train(tmp_path / "whole", tiny_model, ON_NVME, **tables)
    take, add, now = StepEngine.step, GradientAccumulator.add, [-1]

    def step(self: StepEngine, micro_batches: Any, *, step_index: int, lr: float) -> StepResult:
        now[0] = step_index
        return take(self, micro_batches, step_index=step_index, lr=lr)

    def spoiled(self: GradientAccumulator, name: str, gradient: torch.Tensor) -> None:
        is_bad = now[0] == 3 and name.startswith("model.layers.1.")
        add(self, name, gradient * torch.nan if is_bad else gradient)

    with monkeypatch.context() as patch:
        patch.setattr(StepEngine, "step", step)
        patch.setattr(GradientAccumulator, "add", spoiled)
        with pytest.raises(NonFiniteGradientError, match="last checkpoint"):
            train(tmp_path / "w", tiny_model, ON_NVME, **tables)
    assert read_manifest(tmp_path / "w/out/checkpoints").blocks
    done = train(tmp_path / "w", tiny_model, ON_NVME, **tables)
    assert any("continuing after step 2" in text for text in done.told.messages)
    done.assert_same(whole)


def test_resume_with_exhausted_data_starts_the_next_epoch(tiny_model: Path, tmp_path: Path) -> None:
    """At the checkpoint, six rows are already used, and the new data has only six rows."""
    changes = {
        str(EXAMPLES / "quickstart" / "loomings.txt"): str(tmp_path / "rows.jsonl"),
        f"max_steps = {NUM_STEPS}": "max_steps = 3",
    }
    tables = {"changes": changes, "data": "packing = false"}
    lines = [json.dumps({"text": f"Row number {number}, of Moby Dick"}) + "\n" for number in range(12)]
    (tmp_path / "rows.jsonl").write_text("".join(lines))
    train(tmp_path / "w", tiny_model, IN_RAM, stop_after=1, **tables)
    (tmp_path / "rows.jsonl").write_text("".join(lines[:6]))
    train(tmp_path / "w", tiny_model, IN_RAM, allow=True, **tables)
    epochs = [json.loads(line).get("epoch") for line in (tmp_path / "w/out/metrics.jsonl").read_text().splitlines()]
    assert [epoch for epoch in epochs if epoch is not None] == [0.5, 2.0, 3.0]


def test_damaged_newest_checkpoint_is_reported_and_skipped(
    tiny_model: Path, tmp_path: Path, unbroken: WholeRun
) -> None:
    train(tmp_path / "w", tiny_model, IN_RAM, stop_after=4, checkpoint="save_steps = 2")
    path = tmp_path / "w/out/checkpoints"
    current = current_generation(path)
    assert current is not None
    victim = next(file for file in sorted(generation_folder(path, current).rglob("c/0")) if file.stat().st_size > 4096)
    data = bytearray(victim.read_bytes())
    data[100] ^= 1
    victim.write_bytes(bytes(data))
    done = train(tmp_path / "w", tiny_model, IN_RAM)
    assert any("step 4" in text and str(victim) in text for text in done.told.messages), done.told.messages
    assert any("continuing after step 2" in text for text in done.told.messages)
    done.assert_same(unbroken)


def test_fallback_to_another_config_is_reported(tiny_model: Path, tmp_path: Path) -> None:
    """The newest checkpoint has the same config but is damaged. The checkpoint before it has a different config."""
    decay = {"optimizer": "weight_decay = 0.2"}
    train(tmp_path / "w", tiny_model, IN_RAM, stop_after=2)
    train(tmp_path / "w", tiny_model, IN_RAM, stop_after=4, allow=True, **decay)
    path = tmp_path / "w/out/checkpoints"
    current = current_generation(path)
    assert current is not None
    next(generation_folder(path, current).rglob("c/0")).unlink()
    done = train(tmp_path / "w", tiny_model, IN_RAM, **decay)
    assert any("continuing after step 2" in text for text in done.told.messages)
    assert any("weight_decay: 0.1 -> 0.2" in text for text in done.told.messages), done.told.messages


def test_resume_past_max_steps_only_exports(tiny_model: Path, tmp_path: Path) -> None:
    train(tmp_path / "w", tiny_model, IN_RAM, stop_after=4)
    done = train(tmp_path / "w", tiny_model, IN_RAM, changes={f"max_steps = {NUM_STEPS}": "max_steps = 3"})
    assert done.summary.num_steps == 4 and len(done.losses) == 4
    assert done.weights
    assert not done.told.checkpoints, "step 4 is already saved"


def test_error_if_no_checkpoint_is_complete(tiny_model: Path, tmp_path: Path) -> None:
    train(tmp_path / "w", tiny_model, IN_RAM, stop_after=2)
    for file in (tmp_path / "w/out/checkpoints/snap").rglob("c/0"):
        file.unlink()
    with pytest.raises(CheckpointError, match="none of the 1 checkpoints"):
        train(tmp_path / "w", tiny_model, IN_RAM)


def test_a_changed_config_is_refused_unless_allowed(tiny_model: Path, tmp_path: Path) -> None:
    train(tmp_path / "w", tiny_model, IN_RAM, stop_after=2)
    before = sorted((tmp_path / "w/out").rglob("*"))
    with pytest.raises(ConfigChangedError, match=r"optimizer.weight_decay: 0.1 -> 0.2\n"):
        train(tmp_path / "w", tiny_model, IN_RAM, optimizer="weight_decay = 0.2")
    assert sorted((tmp_path / "w/out").rglob("*")) == before
    done = train(tmp_path / "w", tiny_model, IN_RAM, optimizer="weight_decay = 0.2", allow=True)
    assert any("weight_decay" in text for text in done.told.messages)


def test_changed_summation_order_is_reported(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("megatrain.training.start.ARITHMETIC", 1)
        train(tmp_path / "w", tiny_model, IN_RAM, stop_after=2)
    done = train(tmp_path / "w", tiny_model, IN_RAM, stop_after=4)
    assert any("step 2" in text and "in another order" in text for text in done.told.messages)
    done = train(tmp_path / "w", tiny_model, IN_RAM)
    assert not any("in another order" in text for text in done.told.messages)


def test_other_data_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    book = str(EXAMPLES / "quickstart" / "loomings.txt")
    same, other = tmp_path / "same.txt", tmp_path / "other.txt"
    same.write_text(Path(book).read_text())
    other.write_text(Path(book).read_text().replace("Ishmael", "Queequeg"))
    train(tmp_path / "w", tiny_model, IN_RAM, stop_after=2)
    train(tmp_path / "w", tiny_model, IN_RAM, stop_after=3, changes={book: str(same)})
    with pytest.raises(ConfigChangedError, match="data: the rows"):
        train(tmp_path / "w", tiny_model, IN_RAM, changes={book: str(other)})


def test_finished_run_does_not_train(tiny_model: Path, tmp_path: Path) -> None:
    first = train(tmp_path / "w", tiny_model, IN_RAM)
    again = train(tmp_path / "w", tiny_model, IN_RAM)
    assert any("this run is done" in text for text in again.told.messages)
    assert again.summary.export_dir == first.summary.export_dir
    assert not again.told.checkpoints


def test_restart_in_a_used_folder_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    train(tmp_path / "w", tiny_model, IN_RAM, stop_after=2)
    with pytest.raises(CheckpointError, match="saved at step 2"):
        train(tmp_path / "w", tiny_model, IN_RAM, checkpoint='resume_from_checkpoint = "no"')


def test_resume_from_another_run_is_bit_identical(tiny_model: Path, tmp_path: Path, unbroken: WholeRun) -> None:
    train(tmp_path / "first", tiny_model, STATE_ON_NVME, stop_after=3)
    source = f'resume_from_checkpoint = "{tmp_path / "first/out"}"'
    done = train(tmp_path / "w", tiny_model, ON_NVME, checkpoint=source)
    assert (done.state, done.weights) == (unbroken.state, unbroken.weights)
    assert done.losses == unbroken.losses[3:]
    assert read_manifest(tmp_path / "first/out/checkpoints").meta["step"] == 3


def test_second_run_on_a_locked_folder_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    from megatrain.run.folder import RunFolder

    with RunFolder(tmp_path / "w/out"), pytest.raises(LockedError, match="in use by process"):
        train(tmp_path / "w", tiny_model, IN_RAM)
