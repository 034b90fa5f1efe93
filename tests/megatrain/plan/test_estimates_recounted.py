"""Predicted times match times that are counted from the tape by code independent of the estimate.

Only people read these times, so no other test would reveal a mistake for several processes or for paths that share a
drive.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from fakes.rates import drive, make_machine
from megatrain.config import load_config
from megatrain.engine.tape.tape import Tape, compile_step
from megatrain.machine import file_systems
from megatrain.machine.file_systems import FileSystem
from megatrain.machine.profiles import DriveProfile, LoadedProfile, MachineProfile
from megatrain.plan.estimate import estimate_step
from megatrain.plan.plan import Plan
from megatrain.plan.planner import plan_run
from megatrain.plan.times import OutsideTraffic, StepShape
from megatrain.ranks.world import World
from megatrain.training.resolve import resolve
from oracles.tiered_run import config_text, write_tiny_model

WORLDS = {"one process": (1, 1), "2 processes": (2, 1), "4 processes": (4, 1), "2 hosts": (2, 2)}
PATHS = {
    "one path": ("a",),
    "two paths on a drive": ("a", "a/b"),
    "two drives": ("a", "b"),
    "two of three on a drive": ("a", "b", "b/c"),
}


def plan_of(folder: Path, size: int, num_hosts: int, *changes: str) -> Plan:
    model = write_tiny_model(folder / "model")
    path = folder / "run.toml"
    text = config_text(folder, model, ram="40MiB")
    path.write_text(text.replace("gradient_accumulation_steps = 3", "gradient_accumulation_steps = 4"))
    keys = ["placement.weights=nvme", "placement.optimizer=nvme", "placement.gradients=nvme", *changes]
    run = resolve(load_config(path, (), keys).config)
    return plan_run(replace(run, world=World.local(0, size, num_hosts)))


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Plan]:
    return {name: plan_of(tmp_path_factory.mktemp("plan"), *world) for name, world in WORLDS.items()}


def tape_of(plan: Plan) -> Tape:
    """Return the tape of a middle step, which starts with the copies that the previous step left."""
    parts = (plan.program, plan.placement.homes, plan.placement.stays)
    return compile_step(*parts, pinned=compile_step(*parts, updates=False).pinned)


def drives_of(plan: Plan) -> tuple[int, int]:
    """Return the bytes that a rank's leases fetch from and write back to drives in a step."""
    homes, blocks = plan.placement.homes, plan.program.blocks
    read = written = 0
    for op in tape_of(plan).ops:
        for use in op.uses:
            if homes[use.key] == "nvme" and op.tier != "nvme":
                read += blocks[use.key].nbytes * use.needs_fetch
                written += blocks[use.key].nbytes * use.needs_write_back
    return read, written


def num_updated_elements(plan: Plan) -> int:
    """Return the number of fp32 master elements that a rank updates in a step."""
    keys = {use.key for op in tape_of(plan).ops if op.phase == "update" for use in op.uses if use.mode == "rw"}
    return sum(plan.program.blocks[key].num_elements for key in keys if plan.program.blocks[key].kind == "weights")


def busy_s(read: float, written: float, rates: DriveProfile) -> float:
    both = min(read, written)
    return (
        2 * both / rates.mixed_bytes_per_s
        + (read - both) / rates.read_bytes_per_s
        + (written - both) / rates.write_bytes_per_s
    )


class Machine:
    """Machine whose drives are named by the first part of a path below the root."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.drives = {"a": drive(2e9, 1e9, 1.5e9), "b": drive(4e9, 3e9, 3.5e9), "m": drive(8e9, 8e9, 8e9)}
        real = file_systems.file_system_of

        def named(path: Path) -> FileSystem:
            return replace(real(root), source=self.of(path))

        monkeypatch.setattr(FileSystem, "key", property(lambda system: system.source))
        for module in ("megatrain.machine.this_machine", "megatrain.machine.profiles", "megatrain.plan.estimate"):
            monkeypatch.setattr(f"{module}.file_system_of", named)

    def of(self, path: Path) -> str:
        """Return the name of a path's drive: "m" for the root and for paths outside it."""
        return (path.relative_to(self.root).parts or ("m",))[0] if path.is_relative_to(self.root) else "m"

    @property
    def profile(self) -> MachineProfile:
        return make_machine(self.root, drives=self.drives)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def shape_at(plan: Plan, here: Machine, names: Sequence[str]) -> StepShape:
    weights = [float(number) for number in range(1, len(names) + 1)]
    return StepShape(plan.shape.tokens_per_step, None, [here.root / name for name in names], weights)


@pytest.mark.parametrize("names", PATHS.values(), ids=PATHS)
@pytest.mark.parametrize("world", WORLDS)
def test_seconds_of_drives_and_updates(
    world: str, names: Sequence[str], plans: Mapping[str, Plan], here: Machine
) -> None:
    """The processes of a host share its drives and cores, so the predicted times include the work of all of them."""
    plan, on_host = plans[world], WORLDS[world][0] // WORLDS[world][1]
    shape = shape_at(plan, here, names)
    found = estimate_step(plan, shape, LoadedProfile(here.profile)).seconds
    read, written = (on_host * nbytes for nbytes in drives_of(plan))
    assert read and written
    share: dict[str, float] = defaultdict(float)
    for path, weight in zip(shape.paths, shape.weights, strict=True):
        share[here.of(path)] += weight / sum(shape.weights)
    by_drive = {name: busy_s(read * part, written * part, here.drives[name]) for name, part in share.items()}
    assert found["nvme"] == pytest.approx(max(by_drive.values()), rel=1e-6)
    assert found["optimizer"] == pytest.approx(
        on_host * num_updated_elements(plan) / here.profile.adamw_params_per_s["float32"]
    )


def test_all_ranks_together_update_each_number_once(plans: Mapping[str, Plan]) -> None:
    """The only extra elements are padding of shards to equal lengths: fewer than 65,536 per rank and layout."""
    alone = num_updated_elements(plans["one process"])
    for world, (size, _) in WORLDS.items():
        padding = size * 65_536 * len(plans[world].graph.layouts)
        assert alone <= size * num_updated_elements(plans[world]) < alone + padding, world


def expected_occasion_bytes(
    plan: Plan, here: Machine, names: Sequence[str]
) -> Iterator[tuple[OutsideTraffic, dict[str, list[float]]]]:
    """Yield each occasion (start, checkpoint, export) with the bytes that it should read and write on each drive."""
    homes = plan.placement.homes
    saved = [block for block in plan.program.blocks.values() if block.is_saved]
    shape = shape_at(plan, here, names)
    share = {path: weight / sum(shape.weights) for path, weight in zip(shape.paths, shape.weights, strict=True)}
    on_drives = sum(block.nbytes for block in saved if homes[block.key] == "nvme")
    masters = sum(block.nbytes for block in saved if homes[block.key] == "nvme" and block.kind == "weights")
    files = sum(path.stat().st_size for path in Path(plan.run.model.folder).glob("*.safetensors"))
    exported = sum(entry.numel for layout in plan.graph.layouts.values() for entry in layout.entries) * 4
    out = here.of(plan.run.output_dir)
    for occasion in estimate_step(plan, shape, LoadedProfile(here.profile)).occasions:
        moved: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        if occasion.name == "start":
            moved[here.of(Path(plan.run.model.folder))][0] += files
            for path, part in share.items():
                moved[here.of(path)][1] += on_drives * part
        elif occasion.name == "checkpoint":
            moved[out][1] += sum(block.nbytes for block in saved) - on_drives
        else:
            for path, part in share.items():
                moved[here.of(path)][0] += masters * part
            moved[out][0] += exported
            moved[out][1] += exported
        yield occasion, moved


@pytest.mark.parametrize("names", PATHS.values(), ids=PATHS)
@pytest.mark.parametrize("out", ["a", "b", "m"])
def test_seconds_of_start_checkpoint_and_export(
    names: Sequence[str], out: str, plans: Mapping[str, Plan], here: Machine
) -> None:
    """A drive's time covers all folders on it: the tier's paths, `output_dir` and the model's folder."""
    plan = plans["one process"]
    folder = here.root / out
    folder.mkdir(exist_ok=True)
    model = folder / "model"
    if not model.exists():
        model.symlink_to(plan.run.model.folder)
    run = replace(plan.run, output_dir=folder / "out", model=replace(plan.run.model, folder=str(model)))
    found = list(expected_occasion_bytes(replace(plan, run=run), here, names))
    assert [occasion.name for occasion, _ in found] == ["start", "checkpoint", "export"]
    for occasion, moved in found:
        wanted = max(busy_s(*nbytes, here.drives[name]) for name, nbytes in moved.items())
        assert occasion.seconds == pytest.approx(wanted, rel=0.01), occasion.name
