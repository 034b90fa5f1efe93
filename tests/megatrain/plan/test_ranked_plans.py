"""Plans for one of several ranks: its share of blocks and of the host, and the traffic between ranks."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from transformers import AutoConfig

from megatrain.base import layout as layouts
from megatrain.config import load_config
from megatrain.plan.attempts import MAX_GATHERS_AHEAD
from megatrain.plan.plan import Plan
from megatrain.plan.planner import plan_run
from megatrain.plan.shortfall import DoesNotFitError
from megatrain.plan.simulate import SimulatedRates, simulate_step
from megatrain.plan.together import limit_gathers_ahead
from megatrain.ranks.world import World
from megatrain.training.resolve import resolve
from oracles.tiered_run import QUICKSTART, config_text, write_tiny_model
from processes.saved_run import command_group
from tiered import MiB

TOKENS = 512


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plans")
    text = config_text(folder, write_tiny_model(folder / "model"))
    (folder / "run.toml").write_text(text.replace("gradient_accumulation_steps = 3", "gradient_accumulation_steps = 4"))
    return folder / "run.toml"


def plan_of(
    config: Path, size: int, *changes: str, num_hosts: int = 1, max_ahead: int = 1, with_remedies: bool = True
) -> Plan:
    run = replace(resolve(load_config(config, (), changes).config), world=World.local(0, size, num_hosts))
    return plan_run(run, max_ahead=max_ahead, with_remedies=with_remedies)


def rates(peer: float) -> SimulatedRates:
    return SimulatedRates(1e12, flops_per_s=1e9, update_params_per_s=1e9, peer_bytes_per_s=peer)


def test_a_rank_has_its_share_of_blocks_and_of_the_host(config: Path) -> None:
    alone, ranked = plan_of(config, 1), plan_of(config, 2)
    blocks = [sum(b.nbytes for b in p.program.blocks.values() if b.is_saved) for p in (alone, ranked)]
    num_layouts = len(alone.graph.layouts)
    assert blocks[0] / 2 <= blocks[1] <= blocks[0] / 2 + num_layouts * 65_536 * 12
    for tier in ("ram", "nvme"):
        assert ranked.budgets[tier] == alone.budgets[tier] // 2
    assert len(ranked.run.own_micro_batches) == 2 and ranked.shape.tokens_per_step == alone.shape.tokens_per_step // 2
    # A rank sends half and receives half of the weights (for two passes) and gradients. The tied head adds one use.
    elements = {key: block.num_elements for key, block in ranked.program.blocks.items() if block.kind == "weights"}
    once = sum(elements.values()) + elements["model.embed_tokens/weight"]
    gathered, exchanged = once + sum(elements.values()), once
    assert ranked.traffic["ram->ranks"] == ranked.traffic["ranks->ram"] == 4 * (gathered + exchanged)


def test_one_rank_per_host_moves_all_rank_traffic_over_the_network(config: Path) -> None:
    plan, here = plan_of(config, 2, num_hosts=2), plan_of(config, 2)
    assert "ram->ranks" not in plan.traffic
    moved = plan.traffic["ram->hosts"]
    assert moved == plan.traffic["hosts->ram"] == here.traffic["ram->ranks"] > 0
    assert plan.budgets["ram"] == 2 * here.budgets["ram"]  # each process has all RAM of its host
    slow = simulate_step(plan, TOKENS, rates(moved / 10))
    assert 10 <= slow.step_s < 10.2 and 5 < slow.stall_s["ranks"] < 10


def test_several_processes_on_each_of_several_hosts_are_refused(config: Path) -> None:
    result = CliRunner().invoke(command_group(), ["plan", str(config), "--processes", "2", "--hosts", "2"])
    assert result.exit_code == 2, result.output
    said = " ".join(result.output.split())
    assert "2 hosts with 2 processes each" in said and "until two real hosts have trained in it" in said
    assert "Start one process on each host, or all processes on one host" in said


def test_plan_without_ranks_is_for_the_fullest_rank(config: Path) -> None:
    """With five micro-batches in four lanes, the last of four ranks has two micro-batches."""
    run = resolve(load_config(config, (), ["training.gradient_accumulation_steps=5"]).config)
    one = run.batch.micro_batch_rows * run.batch.max_length
    fullest = run.as_busiest_rank(4)
    assert (fullest.world.rank, fullest.num_own_tokens, fullest.num_busiest_tokens) == (3, 2 * one, 2 * one)
    assert [fullest.tokens_of_rank(rank) for rank in range(3)] == [one] * 3
    words = ["plan", str(config), "--processes", "4", "--set", "training.gradient_accumulation_steps=5", "--json"]
    result = CliRunner().invoke(command_group(), words)
    assert json.loads(result.stdout)["estimate"]["tokens_per_step"] == 2 * one, result.output


def test_prefetched_gathers_hide_rank_traffic(config: Path) -> None:
    ahead, blocking = plan_of(config, 2), plan_of(config, 2, "advanced.prefetch=0")
    assert (ahead.program.sharding.gathers_ahead, blocking.program.sharding.gathers_ahead) == (1, 0)
    more = ahead.placement.workspace_bytes["ram"] - blocking.placement.workspace_bytes["ram"]
    assert more == MiB, "a second copy of the largest weights"
    moved = ahead.traffic["ram->ranks"]
    assert moved == blocking.traffic["ram->ranks"]
    free = simulate_step(ahead, TOKENS, rates(1e15))
    assert "ranks" not in free.stall_s
    peer = moved / (0.3 * free.step_s)
    one_by_one, beside = (simulate_step(plan, TOKENS, rates(peer)) for plan in (blocking, ahead))
    assert one_by_one.step_s == pytest.approx(free.step_s + moved / peer, rel=1e-3)
    assert one_by_one.stall_s["ranks"] == pytest.approx(moved / peer, rel=1e-3)
    assert free.step_s < beside.step_s < 0.9 * one_by_one.step_s
    slow = simulate_step(ahead, TOKENS, rates(moved / (3 * free.step_s)))
    assert 3 * free.step_s <= slow.step_s <= 4 * free.step_s


def test_weights_are_gathered_further_ahead_at_no_cost(config: Path) -> None:
    once, ahead = (plan_of(config, 2, max_ahead=most) for most in (1, MAX_GATHERS_AHEAD))
    assert (once.program.sharding.gathers_ahead, ahead.program.sharding.gathers_ahead) == (1, MAX_GATHERS_AHEAD)
    assert ahead.traffic == once.traffic and ahead.placement.homes == once.placement.homes
    more = ahead.placement.workspace_bytes["ram"] - once.placement.workspace_bytes["ram"]
    assert more == (MAX_GATHERS_AHEAD - 1) * MiB, "a copy of the largest weights for each visit further ahead"
    # The gather of the vocabulary takes longer than a layer's compute, so it begins earlier.
    peer = once.traffic["ram->ranks"] / (0.8 * simulate_step(once, TOKENS, rates(1e15)).step_s)
    waits = [simulate_step(plan, TOKENS, rates(peer)).stall_s.get("ranks", 0.0) for plan in (once, ahead)]
    assert 0 < waits[1] < waits[0]
    # There is space for a second copy, but not for a third.
    tight = f"tiers.ram.size={2 * once.placement.peak_bytes('ram')}B"
    assert plan_of(config, 2, tight, max_ahead=MAX_GATHERS_AHEAD).program.sharding.gathers_ahead == 1
    less = limit_gathers_ahead(ahead, 1)
    assert less.program.sharding.gathers_ahead == 1 and less.placement.workspace_bytes == once.placement.workspace_bytes


def test_without_room_for_a_second_copy_nothing_is_gathered_ahead(config: Path) -> None:
    with pytest.raises(DoesNotFitError) as refused:
        plan_of(config, 2, "tiers.ram.size=64KiB")
    least = refused.value.need_bytes  # bytes for each of the two ranks
    for room_bytes, gathers_ahead in ((least, 0), (least + MiB, 1)):
        plan = plan_of(config, 2, f"tiers.ram.size={2 * room_bytes}B")
        assert plan.program.sharding.gathers_ahead == gathers_ahead
        assert plan.placement.peak_bytes("ram") == plan.budgets["ram"] == room_bytes


def test_minimum_ram_of_a_rank_does_not_grow_with_the_vocabulary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The minimum has space for full copies and sums of one part, so it does not grow with the vocabulary."""
    monkeypatch.setattr(layouts, "PART_ELEMENTS", 1 << 20)
    least: list[int] = []
    for vocab_size in (1 << 15, 1 << 16):
        folder = write_shape(tmp_path / str(vocab_size), vocab_size=vocab_size, hidden_size=256)
        text = config_text(folder, folder, gpu="64KiB", nvme=0, ram="8GiB", precision='compute_dtype = "bfloat16"')
        (folder / "run.toml").write_text(text.replace("steps = 3", "steps = 4"))
        with pytest.raises(DoesNotFitError) as refused:
            plan_of(folder / "run.toml", 2, with_remedies=False)
        assert refused.value.tier == "gpu"
        least.append(refused.value.need_bytes)
    assert least[0] == least[1] < 6 * 256 * vocab_size / 4
    plan = plan_of(folder / "run.toml", 2, f"tiers.gpu.size={least[1]}B")
    assert {plan.trace.visits[visit].is_head for visit, _ in plan.program.cuts.passing} == {False, True}
    result = CliRunner().invoke(command_group(), ["plan", str(folder / "run.toml"), "--processes", "2"])
    assert result.exit_code == 3 and str(least[1]) in result.output.replace(",", "")


def write_shape(folder: Path, **changes: int) -> Path:
    """Write and return a model folder with config and tokenizer, which are enough for plans."""
    folder.mkdir()
    AutoConfig.from_pretrained(QUICKSTART, tie_word_embeddings=False, **changes).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(QUICKSTART / name, folder)
    return folder


def test_command_plans_for_a_given_number_of_processes(config: Path) -> None:
    result = CliRunner().invoke(command_group(), ["plan", str(config), "--processes", "4"])
    assert result.exit_code == 0, result.output
    assert "this is one of 4 processes; the 4 on this host together take ram" in result.output
    assert "ram->ranks" in result.output
    result = CliRunner().invoke(command_group(), ["plan", str(config), "--processes", "1", "--hosts", "2"])
    assert result.exit_code == 0, result.output
    assert "this is one of 2 processes; the 1 on each of 2 hosts together take ram" in result.output
    assert "ram->hosts" in result.output
    words = ["plan", str(config), "--set", "distributed.processes=4"]
    assert "this is one of 4 processes" in CliRunner().invoke(command_group(), words).output
    result = CliRunner().invoke(command_group(), ["plan", str(config), "--processes", "8"])
    assert result.exit_code == 2 and "with 8 processes each needs a micro-batch" in result.output
    words = ["--set", "gradient_accumulation_steps=3", "--set", "training.gradient_lanes=4"]
    result = CliRunner().invoke(command_group(), ["plan", str(config), "--processes", "3", *words])
    assert result.exit_code == 2 and "gradient_lanes = 3, so that each has one" in " ".join(result.output.split())
    words[-1] = "training.gradient_lanes=3"
    result = CliRunner().invoke(command_group(), ["plan", str(config), "--processes", "3", *words])
    assert result.exit_code == 0, result.output
    result = CliRunner().invoke(command_group(), ["plan", str(config), "--processes", "2", "--measure"])
    assert result.exit_code == 2 and "without --measure" in result.output
