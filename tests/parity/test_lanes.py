"""In every placement, gradients are bit-identical to the lanes' sums, which the test adds in the order of the tree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain.base import layout as layouts
from megatrain.base.errors import ConfigError
from megatrain.base.layout import PART_ALIGNMENT_ELEMENTS, UnitLayout, views
from megatrain.checkpoint.resume import settings_of_newest
from megatrain.config import load_config
from megatrain.engine.head import head_plan
from megatrain.engine.micro_batches import count_labels, shifted_labels
from megatrain.engine.tape import leased, pieces
from megatrain.engine.tape.leased import LeasedGradients
from megatrain.engine.tape.updates import Updater
from megatrain.optim.base import Update
from megatrain.plan import attempts
from megatrain.plan.plan import Plan
from megatrain.ranks.lanes import lane_micro_batches, total
from megatrain.training.trainer import Trainer
from oracles.memory_access import MemoryAccess
from oracles.runners import layer_runner
from oracles.tiered_run import ALL_NVME, TieredRun, config_text, make_loader, run_config, write_tiny_model
from tiered.units import PAGE_BYTES, round_up

NUM_MICRO_BATCHES = 6


def text_of(folder: Path, model: Path, *, lanes: int | str, num: int = NUM_MICRO_BATCHES, **tables: Any) -> str:
    text = config_text(folder, model, **tables).replace("per_device_train_batch_size = 2", "")
    given = "" if lanes == "auto" else f"gradient_lanes = {lanes}\n"
    batch = f"per_device_train_batch_size = 1\ngradient_accumulation_steps = {num}\n{given}"
    return text.replace("gradient_accumulation_steps = 3", batch)


def run(folder: Path, model: Path, *, num_steps: int = 2, **options: Any) -> TieredRun:
    folder.mkdir(parents=True, exist_ok=True)
    return run_config(text_of(folder, model, **{"nvme": 0, **options}), folder, num_steps=num_steps)


class AccessByUse(MemoryAccess):
    """In-memory access that returns gradients by use site."""

    def take(self) -> dict[tuple[int, str], Tensor]:
        found = {
            (visit, name): self._accumulators[visit][name] for visit, names in self._filled.items() for name in names
        }
        self._accumulators, self._filled = {}, {}
        return found


def compute_lane_gradients(plan: Plan, weights: Mapping[str, Tensor], micro_batches: list[Any]) -> dict[str, Tensor]:
    """Run each lane's micro-batches alone, add the lanes' gradients in the order of the tree, and return the sums."""
    access = AccessByUse(plan.graph, weights, plan.graph.dtype)
    runner = layer_runner(
        plan.graph,
        access,
        device="cpu",
        head_rows=plan.trace.head_rows,
        head_columns=plan.trace.head_columns,
    )
    num_items = sum(count_labels(shifted_labels(batch["labels"]).reshape(-1)) for batch in micro_batches)
    num_lanes = plan.run.num_lanes
    sums: dict[tuple[int, int], dict[tuple[int, str], Tensor]] = {}
    for lane in range(num_lanes):
        own = [micro_batches[number] for number in lane_micro_batches(lane, num_lanes, len(micro_batches))]
        if own:
            runner.forward_backward(own, num_items=num_items)
        sums[lane, lane + 1] = access.take()

    def add(left: dict[Any, Tensor], right: dict[Any, Tensor]) -> dict[Any, Tensor]:
        both = {key: left[key] + right[key] for key in left.keys() & right.keys()}
        return {**left, **right, **both}

    by_use = total(0, num_lanes, sums, add)
    found: dict[str, Tensor] = {}
    for visit, name in sorted(by_use):
        gradient = by_use[visit, name]
        if plan.run.grad_dtype == torch.bfloat16:  # rounded once, when a use site's sum is complete
            gradient = gradient.bfloat16()
        found[name] = found[name] + gradient if name in found else gradient
    return found


def first_step_gradients(
    text: str, folder: Path, patch: pytest.MonkeyPatch
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the gradients that the first step's updates use, and the result of ``compute_lane_gradients``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.toml").write_text(text)
    config = load_config(folder / "run.toml").config
    taken: dict[tuple[str, int], Tensor] = {}
    update = Updater.update

    def spying(self: Updater, index: int, part: int, tier: str, tensors: Any, step: Update, filled: Any) -> None:
        layout, _ = self.trained[index]
        key = self._program.gradient_keys(layout, 0)[part]
        taken[layout.name, part] = tensors[key].clone()
        update(self, index, part, tier, tensors, step, filled)

    with Trainer(config).open() as trainer:
        trainer.load()
        plan = trainer.plan
        weights: dict[str, Tensor] = {}
        for layout in plan.graph.layouts.values():
            with trainer.weights.master(layout) as read:
                flat = read(0, layout.num_elements).clone()
                if plan.graph.dtype == torch.bfloat16:  # round half away from zero, like the split of masters
                    flat = ((flat.view(torch.int32) + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)
                weights.update(views(flat, layout))
        micro_batches = next(make_loader(config, plan)).micro_batches
        engine = trainer.make_engine(1)
        patch.setattr(Updater, "update", spying)
        engine.step(micro_batches, step_index=0, lr=1e-3)
        engine.finish_updates()
        patch.undo()
        trainer.end_steps()
    found: dict[str, Tensor] = {}
    for layout in plan.graph.layouts.values():
        if layout.trainable:
            flat = torch.cat([taken[layout.name, part] for part in range(len(plan.program.layout_parts(layout)))])
            found.update(views(flat, layout))
    return found, compute_lane_gradients(plan, weights, list(micro_batches))


def assert_gradients_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert expected
    for name, gradient in expected.items():
        assert torch.equal(found[name].to(gradient.dtype), gradient), name
    # Gradients that no micro-batch contributes to are zero.
    assert all(not found[name].any() for name in found.keys() - expected.keys())


BY_HAND: dict[str, dict[str, Any]] = {
    "2 lanes": {"lanes": 2},
    "4 lanes, uneven": {"lanes": 4},
    "a lane for each of 8": {"lanes": 8, "num": 8},
    "more lanes than micro-batches": {"lanes": 8, "num": 3},
    "rounded to bf16": {"lanes": 4, "precision": 'grad_dtype = "bfloat16"'},
    "computed in bf16": {"lanes": 4, "precision": 'compute_dtype = "bfloat16"\ngrad_dtype = "bfloat16"'},
    "graphs that are not kept": {"lanes": 4, "training": 'recompute = "full"'},
    "updates in the backward": {"lanes": 4, "optimizer": "max_grad_norm = 0"},
    "from a drive": {"lanes": 4, "nvme": 1, "placement": ALL_NVME, "ram": "9MiB"},
}


@pytest.mark.parametrize("name", BY_HAND)
def test_gradients_are_tree_sums_of_the_lanes(
    name: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = text_of(tmp_path, tiny_model, **{"nvme": 0, **BY_HAND[name]})
    assert_gradients_equal(*first_step_gradients(text, tmp_path, monkeypatch))


def test_lane_sums_of_untied_head_and_vocabulary_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedding and the head hold all parts of their layouts, or lease the parts one after the other."""
    model = write_tiny_model(tmp_path / "model", tie_word_embeddings=False)
    monkeypatch.setattr(layouts, "PART_ELEMENTS", PART_ALIGNMENT_ELEMENTS)
    monkeypatch.setattr(head_plan, "_COLUMNS", 192)  # several vocabulary parts per part of the weight
    monkeypatch.setattr(attempts, "spared_bytes", lambda *_: 1 << 40)
    with monkeypatch.context() as patch:
        for folder, tables in (("held", {}), ("passing", {"nvme": 1, "placement": ALL_NVME, "ram": "9MiB"})):
            text = text_of(tmp_path / folder, model, lanes=4, **{"nvme": 0, **tables})
            found, expected = first_step_gradients(text, tmp_path / folder, patch)
            assert_gradients_equal(found, expected)


def test_auto_is_one_lane_and_more_lanes_change_rounding(tiny_model: Path, tmp_path: Path) -> None:
    runs = {lanes: run(tmp_path / str(lanes), tiny_model, lanes=lanes) for lanes in ("auto", 1, 4)}
    runs[1].assert_same(runs["auto"])
    assert runs[4].digests != runs[1].digests
    assert runs[4].losses == pytest.approx(runs[1].losses, rel=1e-5)


def count_sum_bytes(patch: pytest.MonkeyPatch) -> Counter[int]:
    """Return a counter of the bytes that the engine allocates for gradient sums outside of blocks, by visit."""
    made: Counter[int] = Counter()
    visits: list[int] = []
    held, like = LeasedGradients.lease_sums, pieces.empty_sum

    def watching(self: LeasedGradients, layouts: Sequence[UnitLayout], visit: int) -> AbstractContextManager[Any]:
        visits.append(visit)
        return held(self, layouts, visit)

    def counting(gradient: Tensor) -> Tensor:
        memory = like(gradient)
        made[visits[-1]] += memory.nbytes
        return memory

    patch.setattr(LeasedGradients, "lease_sums", watching)
    for module in (leased, pieces):
        patch.setattr(module, "empty_sum", counting)
    return made


@pytest.mark.parametrize("grad_dtype", ["float32", "bfloat16"])
def test_workspace_includes_open_lane_sums(
    grad_dtype: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The workspace has exactly the pages that the largest visit needs, including its open sums.

    With few lanes, the largest visit is a layer. With more lanes, the open sums dominate, and the head is largest.
    """
    fullest, taken = {}, {}
    for lanes in (1, 2, 8):
        with monkeypatch.context() as patch:
            made = count_sum_bytes(patch)
            options = {"precision": f'grad_dtype = "{grad_dtype}"', "training": 'recompute = "full"'}
            plan = run(tmp_path / str(lanes), tiny_model, lanes=lanes, num=8, num_steps=1, **options).plan
        visits, largest = plan.trace.visits, max(layout.num_elements for layout in plan.graph.layouts.values())
        num_sums = lanes.bit_length() - (grad_dtype == "float32")  # in fp32, the block holds the first sum
        assert max(made.values(), default=0) == 4 * num_sums * largest
        computing = [
            max(each.memory.forward_nbytes, each.memory.backward_nbytes + made[n]) for n, each in enumerate(visits)
        ]
        (head,) = (number for number, visit in enumerate(visits) if visit.is_head)
        streams = 2 * 8 * max(visit.memory.held_nbytes for visit in visits)
        in_visit = max(*computing, plan.trace.head_nbytes + made[head])
        fullest[lanes] = round_up(streams + in_visit, PAGE_BYTES)
        taken[lanes] = plan.placement.workspace_bytes["ram"]
    for lanes in (2, 8):
        assert taken[lanes] - taken[1] == fullest[lanes] - fullest[1]


def test_sequential_micro_batches_allow_only_one_lane(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        text_of(tmp_path, tiny_model, lanes=4, nvme=0, advanced='micro_batch_order = "micro_batch"')
    )
    with pytest.raises(ConfigError, match="gradient_lanes = 4 needs"):
        load_config(tmp_path / "run.toml")


def test_resumed_run_keeps_its_number_of_lanes(tiny_model: Path, tmp_path: Path) -> None:
    """With "auto", a resumed run keeps its number of lanes. A different number would change results, and is refused."""

    def trainer(lanes: int | str, steps: int) -> Trainer:
        text = text_of(tmp_path, tiny_model, lanes=lanes, nvme=0).replace(
            "[training]", f"[training]\nmax_steps = {steps}"
        )
        (tmp_path / "run.toml").write_text(text)
        return Trainer(load_config(tmp_path / "run.toml").config)

    assert settings_of_newest(tmp_path / "out", "auto") is None
    trainer(4, 1).train()
    kept = settings_of_newest(tmp_path / "out", "auto")
    assert kept is not None and (kept.num_lanes, kept.micro_batch_tokens) == (4, 2048)
    going_on = trainer("auto", 2)
    assert going_on.plan.program.sharding.own_lanes.num_lanes == 4
    going_on.train()
    from megatrain.checkpoint.resume import ConfigChangedError

    with pytest.raises(ConfigChangedError, match=r"training\.gradient_lanes: 4 -> 1"):
        trainer(1, 3).train()
