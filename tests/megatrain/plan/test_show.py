"""Tables and lines that a plan prints."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatrain.config import load_config
from megatrain.machine.planned_machine import find_machine
from megatrain.models.graph import ModelGraph
from megatrain.plan import process
from megatrain.plan.plan import Plan
from megatrain.plan.process import ProcessMemory, most_resident_bytes, process_memory, resident_bytes
from megatrain.plan.show import estimate_lines, headline, messages, process_line, table_rows
from megatrain.plan.times import Estimate, OutsideTraffic
from megatrain.ranks.world import World
from oracles.tiered_run import ALL_NVME, EXAMPLES, config_text, plan_of
from tiered import GiB, MiB
from tiered.ext import Routes

MODEL = EXAMPLES / "quickstart" / "model"
#: Bytes of the fp32 weights of the embedding (which the head shares), of a layer, and of the last norm.
EMBEDDING, LAYER, NORM = 4 * 131_072, 4 * 174_080, 4 * 1024
WEIGHTS = EMBEDDING + 4 * LAYER + NORM
INPUT = 4 * 2 * 64 * 128
#: Results of a layer's products and attention, in whole pages: 4 * 2 * 64 * (128 + 64 + 64 + 128 + 4 + 128 + 2 * 320).
RESULTS = 593_920
MINIMUM = "minimum for streamed blocks: the largest need of one part of a step"
PLANS: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "kept graphs": ({"nvme": "0", "training": 'recompute = "none:3"'}, {}),
    "drive": ({"nvme": "1", "placement": ALL_NVME, "training": 'recompute = "selective:2"'}, {"save_copy": "true"}),
    "GPU": (
        {
            "nvme": "0",
            "gpu": "14MiB",
            "advanced": "stream_updates = 2",
            "optimizer": 'max_grad_norm = 0\nnonfinite = "ignore"',
        },
        {},
    ),
}


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Plan]:
    found = {}
    for name, (tables, checkpoint) in PLANS.items():
        folder = tmp_path_factory.mktemp("plan")
        text = config_text(folder, MODEL, **{**tables, "nvme": int(tables["nvme"])})  # type: ignore[arg-type]
        lines = "\n".join(f"{key} = {value}" for key, value in checkpoint.items())
        (folder / "run.toml").write_text(f"{text}[checkpoint]\n{lines}\n")
        found[name] = plan_of(load_config(folder / "run.toml").config)
    return found


def test_headline_counts_parameters_in_millions_or_billions(
    plans: Mapping[str, Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, rest = plans["drive"], "4 layers   pretrain, float32, 384 tokens/step (3 x 2 rows)"
    assert headline(plan) == f"model  0.8 M parameters, {rest}"
    run = replace(plan.run, batch=replace(plan.run.batch, order="micro_batch"))
    one_at_a_time = f"model  0.8 M parameters, {rest.removesuffix(')')}, one micro-batch at a time)"
    assert headline(replace(plan, run=run)) == one_at_a_time
    model = replace(plan.run.model, is_trained=False, folder="a/big model/")
    run = replace(plan.run, model=model, dtype=torch.bfloat16)
    run = replace(run, batch=replace(run.batch, num_rows=2))
    expected = "big model  0.8 M parameters, 4 layers   forward only, bfloat16, 128 tokens/step"
    assert headline(replace(plan, run=run)) == expected
    for count, text in ((999_900_000, "999.9 M"), (1_000_000_000, "1.00 B"), (1_050_000_000, "1.05 B")):
        monkeypatch.setattr(ModelGraph, "num_parameters", count)
        trained = 131_072 + 4 * 172_288 + 128
        assert headline(plan) == f"model  {text} parameters ({trained:,} trained), {rest}"


def test_table_of_kept_graphs(plans: Mapping[str, Plan]) -> None:
    plan = plans["kept graphs"]
    # At the peak, a micro-batch's graph of the norm is in the workspace of its backward, which is larger.
    graphs = 3 * sum(plan.trace.visits[visit].memory.graph_nbytes for visit in (2, 3, 4, 5))
    graphs -= plan.trace.visits[5].memory.backward_nbytes - 1024
    assert plan.kept_bytes == pytest.approx(graphs, abs=4096)
    assert table_rows(plan) == [
        ("weights", {"ram": WEIGHTS}, "float32; resident"),
        ("activations", {"ram": 3 * INPUT}, "float32; resident"),  # of the first layer
        ("gradients", {"ram": WEIGHTS + EMBEDDING}, "float32; resident"),  # the head has another gradient
        ("optimizer", {"ram": 2 * WEIGHTS}, "float32; resident"),
        ("working set", {"ram": 0}, MINIMUM),
        (
            "kept graphs",
            {"ram": plan.kept_bytes},
            "3 of 4 layers keep their graphs, which the backward need not recompute",
        ),
        (
            "workspace",
            {"ram": plan.placement.workspace_bytes["ram"] - plan.kept_bytes},
            "activations inside one unit, logits; exact",
        ),
    ]
    guessed = replace(plan, traced=replace(plan.traced, trace=replace(plan.trace, guesses=("one",))))
    assert table_rows(guessed)[-1][2] == "activations inside one unit, logits; estimated"


def test_table_of_streamed_blocks(plans: Mapping[str, Plan]) -> None:
    plan = plans["drive"]
    assert table_rows(plan) == [
        ("weights", {"ram": 0, "nvme": WEIGHTS}, "float32; streamed"),
        (
            "activations",
            {"ram": 0, "nvme": 3 * (5 * INPUT + 2 * RESULTS)},
            "float32, uint8; streamed; products and attention of 2 layers are not recomputed",
        ),
        ("gradients", {"ram": 0, "nvme": WEIGHTS + EMBEDDING}, "float32; streamed"),
        ("optimizer", {"ram": 0, "nvme": 2 * WEIGHTS}, "float32; streamed"),
        ("working set", {"ram": 4 * LAYER, "nvme": 0}, MINIMUM),  # an update of a layer
        (
            "checkpoints",
            {"ram": 0, "nvme": 2 * 3 * WEIGHTS},
            "at most 2 in addition to the live blocks; other parts are in output_dir",
        ),
        (
            "workspace",
            {"ram": plan.placement.workspace_bytes["ram"], "nvme": 0},
            "activations inside one unit, logits; exact",
        ),
    ]
    recompute = replace(plan.program.recompute, saved_attention=frozenset({1, 2}))
    notes = [note for _, _, note in table_rows(replace(plan, program=replace(plan.program, recompute=recompute)))]
    attention, products = "attention of 2 layers is not recomputed", "products and attention of 2 layers are not"
    assert notes[1] == f"float32, uint8; streamed; {attention}; {products} recomputed"


def test_table_of_partly_resident_blocks(plans: Mapping[str, Plan]) -> None:
    """The GPU tier holds the embedding, the norm and two layers. Layers share two gradient blocks."""
    plan, gpu_weights = plans["GPU"], EMBEDDING + 2 * LAYER + NORM
    assert table_rows(plan) == [
        ("weights", {"gpu": gpu_weights, "ram": 2 * LAYER}, "float32; 4 of 6 blocks resident, 2 streamed"),
        ("activations", {"gpu": 15 * INPUT, "ram": 0}, "float32; resident"),
        (
            "gradients",
            {"gpu": gpu_weights, "ram": 0},
            "float32; 3 of 4 blocks resident, 1 streamed; 5 layers share 2 of them",
        ),
        ("optimizer", {"gpu": 2 * gpu_weights, "ram": 4 * LAYER}, "float32; resident"),
        ("working set", {"gpu": LAYER, "ram": LAYER}, MINIMUM),
        (
            "workspace",
            {"gpu": plan.placement.workspace_bytes["gpu"], "ram": 0},
            "activations inside one unit, logits; exact",
        ),
    ]


def recompute_line(layers: str, share: str, more: str) -> str:
    return (
        f"the backward recomputes {layers}: {share} of the operations of a step; "
        f'training.recompute = "selective" would reduce this to 0% with {more} more memory'
    )


def test_messages_about_resident_blocks(plans: Mapping[str, Plan]) -> None:
    resident = "every block is resident in ram: nothing is streamed"
    plan, recompute = plans["kept graphs"], recompute_line("1 of 4 layers", "5%", "1.70 MiB")
    assert messages(plan) == (resident, recompute)
    assert messages(replace(plan, library_memory="libraries"), "other tensors") == (
        resident,
        "other tensors",
        "libraries",
        recompute,
    )
    table = plan.run.model.table.model_copy(update={"compile": True, "compile_backend": "eager"})
    compiled = replace(plan, run=replace(plan.run, model=replace(plan.run.model, table=table)))
    assert messages(compiled) == (resident, recompute.partition(";")[0])
    trace = replace(plan.trace, guesses=("a length", "a width"), dense_masks=("a window", "a bias"))
    trace = replace(trace, uncounted_ops=("an operator", "another"))
    assert messages(replace(plan, traced=replace(plan.traced, trace=trace))) == (
        resident,
        "the workspace is estimated: a length",
        "the workspace is estimated: a width",
        "the FLOPs of a step are unknown: an operator; another",
        "attention needs masks of [S, S], so memory grows with the square of data.max_length (a window, a bias)",
    )


def test_messages_about_streamed_blocks(plans: Mapping[str, Plan]) -> None:
    """Half of the ticks use at most a layer's weight and gradient."""
    plan = plans["drive"]
    room = f"{(256 * MiB - plan.placement.workspace_bytes['ram']) / MiB:.2f} MiB of ram are prefetch room. "
    room += f"Half of the ticks need at most {plan.placement.median_working_bytes['ram'] / MiB:.2f} MiB of it; "
    room += "the rest prefetches"
    copies = f"save_copy keeps 2 complete copies of checkpoints in output_dir, {3 * WEIGHTS / MiB:.2f} MiB each"
    recompute = recompute_line("4 of 4 layers, except their saved results", "10%", "3.40 MiB")
    assert messages(plan, "other tensors") == (room, "other tensors", copies, recompute)
    visits = [
        replace(visit, no_token_probability=0.998 if index in (1, 2, 3) else 0.0)
        for index, visit in enumerate(plan.trace.visits)
    ]
    with_experts = replace(plan, traced=replace(plan.traced, trace=replace(plan.trace, visits=tuple(visits))))
    # Each part has a token with a probability of 1 - 0.998 ** 384 = 0.54.
    experts = (
        "experts are split into 3 parts; 384 tokens are expected to reach 2 of them. "
        "The weights of the others do not move, so the bytes of this plan are an upper bound"
    )
    assert messages(with_experts) == (room, copies, experts, recompute)
    recompute = recompute.replace("3.40 MiB", f"{2 * RESULTS / MiB:.2f} MiB")  # a rank has one micro-batch
    for world, hosts, count in (
        (World.local(1, 4), "4 on this host", 4),
        (World.local(0, 2, 2), "1 on each of 2 hosts", 1),
    ):
        sizes = f"ram {count * plan.totals['ram'] / MiB:.2f} MiB, nvme {count * plan.totals['nvme'] / MiB:.2f} MiB"
        ranks = f"this is one of {world.size} processes; the {hosts} together take {sizes}, "
        ranked = replace(with_experts, run=replace(plan.run, world=world))
        assert messages(ranked) == (room, copies, recompute, f"{ranks}and train 384 tokens per step")


def test_messages_about_a_gpu_tier(plans: Mapping[str, Plan]) -> None:
    plan = plans["GPU"]
    used = sum(plan.placement.home_bytes["gpu"].values()) + plan.placement.workspace_bytes["gpu"]
    room = f"{(14 * MiB - used) / MiB:.2f} MiB of gpu are prefetch room. "
    room += "Half of the ticks need at most 0 B of it; the rest prefetches"
    # The embedding, the norm and one layer. The other resident layer is one of the groups that stream their updates.
    share = 100 * (EMBEDDING + NORM + LAYER) // WEIGHTS
    updates = f"3 of 6 groups of blocks, {share} % of the trained parameters, have their home in gpu and are updated "
    streamed = "there; 1 others are fetched part by part for their updates"
    recompute = recompute_line("4 of 4 layers", "18%", f"{12 * 591_872 / MiB:.2f} MiB")
    assert messages(plan) == (room, updates + streamed, recompute)
    program = replace(plan.program, updates=replace(plan.program.updates, streamed=frozenset()))
    share = 100 * (EMBEDDING + NORM + 2 * LAYER) // WEIGHTS
    updates = f"4 of 6 groups of blocks, {share} % of the trained parameters, have their home in gpu and are updated "
    placement = replace(plan.placement, missing_bytes={"gpu": 3 * MiB}, routes=Routes((("nvme", "gpu"),)))
    assert messages(replace(plan, program=program, placement=placement)) == (
        room,
        f"{updates}there",
        "nvme->gpu, gpu->nvme: copies between drives and GPU memory bypass ram",
        "gpu: buffers of copies are replaced by other sizes within a step; 3.00 MiB more would avoid this",
        recompute,
    )
    on_host = replace(plan, traced=replace(plan.traced, host_updates="no kernel"))
    assert messages(on_host) == (room, "updates run in ram: no kernel", recompute)


def test_messages_about_another_machine(plans: Mapping[str, Plan]) -> None:
    plan, machine = plans["kept graphs"], find_machine("rtx4090-128gb")
    machine = replace(machine, file=machine.file.model_copy(update={"note": "Rented by the hour."}))
    run = replace(plan.run, tiers=replace(plan.run.tiers, machine=machine))
    planned = "planned for rtx4090-128gb; the workspace is counted with"
    note = "rtx4090-128gb: Rented by the hour."
    assert messages(replace(plan, run=run))[2:] == (f"{planned} this CPU's kernels; another CPU may differ", note)
    run = replace(run, device=torch.device("cuda"))
    assert messages(replace(plan, run=run))[2:] == (f"{planned}out its GPU, which may differ", note)
    machine = replace(machine, file=machine.file.model_copy(update={"note": ""}))
    run = replace(run, tiers=replace(run.tiers, machine=machine))
    assert messages(replace(plan, run=run))[2:] == (f"{planned}out its GPU, which may differ",)


def test_lines_of_an_estimate() -> None:
    assert estimate_lines(Estimate(10, {})) == ()
    estimate = Estimate(
        12_345,
        {"compute": 2.0, "nvme": 0.004},
        step_s=2.5,
        bound_by="nvme",
        crossing_tokens=20_000.4,
        written_bytes={"/a": 3_000_000_000, "/b": 1_000_000_000},
        occasions=(
            OutsideTraffic("start", 3 * MiB, 5 * MiB, seconds=1.5),
            OutsideTraffic("checkpoint", 1 * MiB, 2 * MiB, 4 * MiB, 0.25),
            OutsideTraffic("export", 7 * MiB, 6 * MiB, seconds=3.0),
        ),
        notes=("first note", "second note"),
    )
    wear = "NVMe writes     4.00 GB per step, 4.00 TB in 1,000 steps   /a 3.00 GB  /b 1.00 GB"
    end = "4,938 tokens/s   bound by: nvme"
    crossing = "   T* = 20,000 tokens/step (here 12,345)"
    assert estimate_lines(estimate) == (
        "busy per step   compute 2.00 s  nvme 4 ms",
        f"predicted step  2.50 s at best, {end}{crossing}",
        wear,
        "start           reads 3.00 MiB of weights, writes 5.00 MiB to drives: 1.50 s of the drive at best",
        "checkpoint      reads 1.00 MiB through ram, writes 2.00 MiB to output_dir, links 4.00 MiB on drives: "
        "0.25 s of the drive at best",
        "export          writes 6.00 MiB, reads 7.00 MiB, also to check it: 3.00 s of the drive at best",
        "first note",
        "second note",
    )
    occasions = (
        OutsideTraffic("start", 0, 0, seconds=0.0),
        OutsideTraffic("checkpoint", 0, 2 * MiB),
        OutsideTraffic("export", 6 * MiB, 6 * MiB),
    )
    timed = replace(estimate, is_timed=True, crossing_tokens=0.0, occasions=occasions, notes=())
    known = replace(timed, run_written_bytes={"/a": 6_000_000_000_000, "/b": 500_000_000_000})
    assert estimate_lines(known) == (
        "busy per step   compute 2.00 s  nvme 4 ms",
        f"predicted step  2.50 s, {end}",
        "NVMe writes     4.00 GB per step, 6.50 TB in this run   /a 3.00 GB  /b 1.00 GB",
        "checkpoint      writes 2.00 MiB to output_dir",
        "export          writes 6.00 MiB, reads it back to check it",
    )
    one = Estimate(10, {}, written_bytes={"/a": 0, "/b": 2_500_000_000})
    assert estimate_lines(one)[0].endswith("/a 0.00 MB  /b 2.50 GB")
    one = Estimate(10, {}, written_bytes={"/a": 50_000_000}, run_written_bytes={"/a": 0})
    assert estimate_lines(one) == ("NVMe writes     50.00 MB per step, 0.00 MB in this run",)
    assert estimate_lines(replace(one, written_bytes={"/a": 0}, notes=("note",))) == ("note",)


def test_values_of_an_estimate_as_json() -> None:
    estimate = Estimate(
        1000, {"compute": 2.0}, ("gpu->ram",), 2.5, "nvme", 20.0, {"/a": 3}, {"/a": 30}, 1e-9, 1e-3, True, ("note",),
        (OutsideTraffic("start", 3, 5, 2, 1.5),),
    )  # fmt: skip
    values = {
        "tokens_per_step": 1000,
        "busy_s": {"compute": 2.0},
        "not_measured": ["gpu->ram"],
        "predicted_step_s": 2.5,
        "computing_is_timed": True,
        "predicted_tokens_per_s": 400.0,
        "bound_by": "nvme",
        "crossing_tokens_per_step": 20.0,
        "nvme_written_bytes_per_step": {"/a": 3},
        "nvme_written_bytes_per_run": {"/a": 30},
        "notes": ["note"],
        "occasions": [
            {"name": "start", "read_bytes": 3, "written_bytes": 5, "linked_bytes": 2, "seconds": 1.5},
        ],
    }
    assert estimate.to_json() == values
    unknown = replace(estimate, step_s=None, written_bytes=None, run_written_bytes=None)
    changes = {"predicted_step_s": None, "predicted_tokens_per_s": None, "nvme_written_bytes_per_step": {}}
    assert unknown.to_json() == {**values, **changes, "nvme_written_bytes_per_run": None}


# -- memory of the process ---------------------------------------------------------------------------------------------


def test_line_of_the_process() -> None:
    memory = ProcessMemory(5 * GiB, 300 * MiB, 100 * MiB, 60 * MiB, 40 * MiB)
    assert (memory.non_tier_bytes, memory.total_bytes) == (500 * MiB, 5 * GiB + 500 * MiB)
    assert process_line(memory) == (
        "process         about 5.49 GiB of RAM: 5.00 GiB in the tier + 500.00 MiB of Python and libraries, kernels, "
        "tokenizer and rows"
    )


@pytest.mark.parametrize("are_loaded", [False, True])
def test_memory_of_a_process_by_hand(
    are_loaded: bool, plans: Mapping[str, Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels count until they are loaded. The limit of an op has no space for workspace that it will allocate."""
    monkeypatch.setattr(process, "own_bytes", lambda: 1000)
    monkeypatch.delitem(sys.modules, "megatrain.optim.kernels", raising=False)
    if are_loaded:
        monkeypatch.setitem(sys.modules, "megatrain.optim.kernels", sys.modules[__name__])
    kernels, tokenizer = 0 if are_loaded else 120 * MiB, 26 * (MODEL / "tokenizer.json").stat().st_size
    workspace = {name: sum(plan.placement.workspace_bytes.values()) for name, plan in plans.items()}
    kept_bytes = plans["kept graphs"].kept_bytes
    # On the drive, all blocks have copies in RAM. With the GPU tier, two layers have copies in each of the tiers.
    tiers = {
        "kept graphs": 4 * WEIGHTS + EMBEDDING + 3 * INPUT + workspace["kept graphs"],
        "drive": 4 * WEIGHTS + EMBEDDING + 3 * (5 * INPUT + 2 * RESULTS) + workspace["drive"],
        "GPU": 4 * (EMBEDDING + NORM + 2 * LAYER) + 15 * INPUT + workspace["GPU"] + 2 * LAYER + (6 + 1) * LAYER,
    }
    for name, plan in plans.items():
        memory = ProcessMemory(tiers[name], 1000, kernels, 14 * MiB + tokenizer, 40 * MiB)
        assert process_memory(plan) == memory, name
        computing = plan.trace.visits[1].memory.backward_nbytes  # the largest of all ticks
        free = workspace[name] - (kept_bytes if name == "kept graphs" else 0) - computing
        assert most_resident_bytes(plan) == 1000 + tiers[name] + 40 * MiB - free, name
    plan = plans["drive"]
    no_tokenizer = replace(plan, run=replace(plan.run, model=replace(plan.run.model, tokenizer_folder=str(tmp_path))))
    assert process_memory(no_tokenizer).data_bytes == 14 * MiB
    forward = replace(plan, program=replace(plan.program, ticks=()))
    assert process_memory(forward).kernels_bytes == 0


def test_copies_fill_a_tier_up_to_its_capacity(plans: Mapping[str, Plan]) -> None:
    plan = plans["drive"]
    workspace = plan.placement.workspace_bytes["ram"]
    for capacity, expected in ((16 * MiB, 16 * MiB), (MiB, workspace + 4 * LAYER)):
        budgets = {**plan.budgets_by_tier, "ram": replace(plan.budgets_by_tier["ram"], capacity_bytes=capacity)}
        assert resident_bytes(replace(plan, budgets_by_tier=budgets), "ram") == expected
    assert resident_bytes(plan, "nvme") == plan.totals["nvme"]
