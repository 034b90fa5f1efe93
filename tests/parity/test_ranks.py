"""Runs are bit-identical with any number of processes, and each process moves the bytes that its plan states."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from transformers import AutoConfig, AutoModelForCausalLM

from fakes.rates import drive, make_machine
from megatrain.base import layout as layouts
from megatrain.base.batch_keys import IGNORED_LABEL
from megatrain.base.errors import ConfigError
from megatrain.base.layout import PART_ALIGNMENT_ELEMENTS
from megatrain.config import load_config
from megatrain.engine.unit.weight_gradients import GradientAccumulator
from megatrain.machine.file_systems import file_system_of
from megatrain.machine.profiles import load_profile, store_profile
from megatrain.plan.estimate import estimate_step
from megatrain.plan.rank_checks import check_ranks
from megatrain.plan.shortfall import DoesNotFitError
from megatrain.ranks.collectives import Collectives, RanksDifferError
from megatrain.ranks.world import World
from megatrain.tasks.evaluation import deal_micro_batches
from megatrain.training.resolve import resolve
from oracles.tiered_run import ALL_NVME, EXAMPLES, config_text, force_passing, write_tiny_model
from processes.ranks import run_on_ranks
from processes.worlds import RankResult, digests, plan_of_rank, train

LANES, NUM_MICRO_BATCHES, NUM_STEPS = 4, 5, 3
BF16 = 'compute_dtype = "bfloat16"'


@dataclass(frozen=True)
class Case:
    """Run that is repeated with different numbers of ranks and hosts.

    Attributes:
        model: Name of the model's folder.
        tables: Arguments of ``config_text``.
        other_tables: Additional arguments on odd ranks, which give blocks other homes.
        has_parts: Whether layouts are cut into parts of the smallest size.
        passes: When vocabulary parts are leased one by one: ``never``, ``on hosts`` (with several hosts), or ``always``
            (with several ranks).
        labels: Which micro-batches have labels: ``all`` or ``few``.
        lanes: Number of gradient lanes.
        num_micro_batches: Number of micro-batches in a step.
    """

    model: str
    tables: Mapping[str, Any]
    other_tables: Mapping[str, Any]
    has_parts: bool = False
    passes: str = "never"
    labels: str = "all"
    lanes: int = LANES
    num_micro_batches: int = NUM_MICRO_BATCHES


def samples(count: int) -> str:
    """Return config keys that generate ``count`` samples. One of three ranks gets fewer rows or none."""
    return f"predict_with_generate = true\nmax_predict_samples = {count}\nmax_new_tokens = 4"


CASES = {
    "tied, bf16, dropout, noise": Case(
        "tied",
        {
            "precision": f'{BF16}\ngrad_dtype = "bfloat16"',
            "training": "neftune_noise_alpha = 5",
            "optimizer": "ema_decay = 0.9",
            "evaluation": f'weights = "both"\n{samples(2)}',
        },
        {"placement": ALL_NVME, "ram": "24MiB"},
        has_parts=True,
        passes="on hosts",
    ),
    "a mixture, Lion, frozen parts, layers clipped one by one": Case(
        "mixture",
        {
            "optimizer": 'optim = "lion"\nclip_scope = "layer"\nmax_grad_norm = 0.1',
            "model": 'freeze = ["model.embed_tokens.*"]',
        },
        {"placement": 'optimizer = ["nvme"]\ngradients = ["nvme"]'},
        labels="few",
    ),
    "a separate GPU tier": Case(
        "untied",
        {"gpu": "24MiB", "optimizer": "max_grad_norm = 0.5", "evaluation": samples(5)},
        {"gpu": "24MiB", "placement": 'optimizer = ["nvme"]'},
        has_parts=True,
        passes="always",
        labels="few",
    ),
}

MORE_LANES = {
    "tied, five lanes": Case(
        "tied", {"precision": BF16}, {"placement": ALL_NVME, "ram": "24MiB"}, has_parts=True, passes="always", lanes=5
    ),
    "tied, eight lanes": Case(
        "tied",
        {"precision": BF16},
        {"placement": ALL_NVME, "ram": "96MiB"},
        lanes=8,
        num_micro_batches=9,
    ),
}


def write_models(folder: Path) -> None:
    """Write the tiny models that the cases train."""
    write_tiny_model(folder / "tied", attention_dropout=0.1)
    write_tiny_model(folder / "untied", tie_word_embeddings=False)
    # Half of the vocabulary entries are end tokens, so generation stops after different numbers of tokens for different
    # prompts, and thus on different ranks.
    ends = {"eos_token_id": list(range(0, AutoConfig.from_pretrained(folder / "untied").vocab_size, 2))}
    (folder / "untied/generation_config.json").write_text(json.dumps(ends))
    shape = AutoConfig.from_pretrained(folder / "untied")
    torch.manual_seed(3)
    mixture = AutoConfig.for_model(
        "mixtral",
        **{key: getattr(shape, key) for key in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")},
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        num_local_experts=16,
        num_experts_per_tok=1,
        output_router_logits=True,
        router_aux_loss_coef=0.05,
    )
    write_tiny_model(folder / "mixture")
    AutoModelForCausalLM.from_config(mixture, dtype=torch.float32).save_pretrained(folder / "mixture")


def own_folder(world: World) -> str:
    """Return the folder name of a world, which is the set of all ranks of a run."""
    return f"world{world.num_hosts}x{world.local_size}"


def text_of(folder: Path, case: Case, world: World) -> str:
    """Return a rank's config. On odd ranks, blocks have other homes."""
    tables = dict(case.tables)
    if world.rank % 2:
        tables |= case.other_tables
    own = {name: tables.pop(name, "") for name in ("training", "model", "evaluation")}
    text = config_text(folder / own_folder(world), folder / case.model, **tables)
    text = text.replace("per_device_train_batch_size = 2", "per_device_train_batch_size = 1")
    batch = (
        f"gradient_accumulation_steps = {case.num_micro_batches}\ngradient_lanes = {case.lanes}\n{own['training']}\n"
    )
    text = text.replace("gradient_accumulation_steps = 3", batch).replace("max_length = 64", "max_length = 32")
    text += f'[[data.eval]]\npath = "{EXAMPLES}/quickstart/loomings.txt"\nmax_samples = 12\n'
    text += f"[evaluation]\n{own['evaluation']}\n"
    return text.replace("[data]\n", f"{own['model']}\n[data]\n", 1)


def remove_some_labels(micro_batches: list[dict[str, Tensor]], step: int) -> None:
    """Remove the labels of some micro-batches.

    Step 0 keeps only the labels of the last micro-batch. Step 1 removes the labels of the last two micro-batches. Later
    steps remove the labels of every second micro-batch.
    """
    keeps = [number == NUM_MICRO_BATCHES - 1 for number in range(NUM_MICRO_BATCHES)]
    if step:
        keeps = [number < NUM_MICRO_BATCHES - 2 if step == 1 else number % 2 == 0 for number in range(len(keeps))]
    for keep, micro_batch in zip(keeps, micro_batches, strict=True):
        if not keep:
            micro_batch["labels"] = torch.full_like(micro_batch["labels"], IGNORED_LABEL)


@contextmanager
def record_product_shapes() -> Iterator[set[tuple[int, int, int]]]:
    """Collect the shapes `(M, K, N)` of the matrix products that compute weight gradients."""
    add, seen = GradientAccumulator._add_matmul, set[tuple[int, int, int]]()

    def seeing(self: GradientAccumulator, target: Tensor, left: Tensor, right: Tensor, **options: Any) -> None:
        if not isinstance(left, FakeTensor):  # fake tensors belong to a trace
            seen.add((*left.shape, right.shape[1]))
        add(self, target, left, right, **options)

    with mock.patch.object(GradientAccumulator, "_add_matmul", seeing):
        yield seen


def train_cases(world: World, folder: Path, names: list[str]) -> dict[str, RankResult]:
    """Train the cases, one after the other, on one rank."""
    found = {}
    for number, name in enumerate(names):
        case = {**CASES, **MORE_LANES}[name]
        own = folder / own_folder(world) / f"case{number}"
        own.mkdir(parents=True, exist_ok=True)
        size = PART_ALIGNMENT_ELEMENTS if case.has_parts else layouts.PART_ELEMENTS
        text = text_of(folder, case, world).replace(own_folder(world), f"{own_folder(world)}/case{number}")
        passes = not world.is_single and (
            case.passes == "always" or (case.passes == "on hosts" and world.num_hosts > 1)
        )
        with (
            mock.patch.object(layouts, "PART_ELEMENTS", size),
            force_passing(passes),
            record_product_shapes() as products,
        ):
            result = train(world, own, [text], NUM_STEPS, remove_some_labels if case.labels == "few" else None)
        found[name] = replace(result, products=frozenset(products))
        assert found[name].passes == passes, name
    return found


def by_case(
    size: int, folder: Path, *, num_hosts: int = 1, names: Sequence[str] = tuple(CASES)
) -> dict[str, list[RankResult]]:
    """Run the cases in a world of ``size`` ranks, and return each case's results by rank."""
    of_ranks = run_on_ranks(size, train_cases, folder, list(names), num_hosts=num_hosts)
    return {name: [of_rank[name] for of_rank in of_ranks] for name in names}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the models, and return the folder that holds them and all runs."""
    folder = tmp_path_factory.mktemp("ranks")
    write_models(folder)
    return folder


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, list[RankResult]]:
    """Return each case's result in one process, which adds gradients in the same lanes."""
    return by_case(1, folder)


#: The only case that CI runs on two hosts. Its layouts have parts, and its homes differ between ranks. CI runs the
#: other cases on one host with three ranks.
ON_HOSTS = "tied, bf16, dropout, noise"


@pytest.mark.parametrize(
    ("size", "names"),
    [
        pytest.param(3, [name for name in CASES if name != ON_HOSTS], id="3"),
        *(pytest.param(size, list(CASES), id=f"{size}, all", marks=pytest.mark.slow) for size in (2, 3, 4)),
    ],
)
def test_same_bits_and_planned_traffic(
    size: int, names: Sequence[str], folder: Path, alone: dict[str, list[RankResult]]
) -> None:
    """With any number of ranks and any homes, all results equal the results of one process."""
    of_cases = by_case(size, folder, names=names)
    for name, results in of_cases.items():
        assert_same(name, results, alone[name])
    # The number of visits by which gathers run ahead depends on the free memory, but is the same on all ranks.
    ahead = [{result.gathers_ahead for result in results} for results in of_cases.values()]
    assert all(len(each) == 1 for each in ahead) and max(map(max, ahead)) > 1, ahead


def assert_same(name: str, results: Sequence[RankResult], alone: Sequence[RankResult]) -> None:
    """Assert that the ranks match one process, move the planned bytes and stay within their tiers."""
    (expected,) = alone
    assert len(set(expected.losses)) == NUM_STEPS and all(expected.norms), name
    for rank, result in enumerate(results):
        assert result.losses == expected.losses, (name, rank)
        assert result.norms == expected.norms and result.num_tokens == expected.num_tokens, (name, rank)
        assert result.moved == result.planned, (name, rank)
        assert result.evaluations == expected.evaluations != {}, (name, rank)
        assert result.samples == expected.samples, (name, rank)
        assert all(result.samples.values()) == ("evaluation" in {**CASES, **MORE_LANES}[name].tables), name
        assert result.moved_by_evaluations == result.planned_of_evaluations, (name, rank)
        assert {f"{end}->{place}" for end in ("ram", "gpu") for place in ("ranks", "hosts")} & set(result.moved), name
        used = {place for link, nbytes in result.moved.items() if nbytes for place in link.split("->")}
        for tier, (most, capacity) in result.tiers.items():
            assert int(tier in used) <= most <= capacity, (name, rank, tier)
        window, planned = result.window
        assert 0 < window <= planned, (name, rank)
        # With passing parts, the planned peak is exact to the byte, except on an emulated GPU. There, the plan assumes
        # that sums are sent while the next layer runs.
        on_gpu = bool({"gpu->ranks", "gpu->hosts"} & set(result.moved))
        assert window == planned or not result.passes or on_gpu, (name, rank, window, planned)
    # Matrix libraries may round the same rows differently in a smaller matrix than in a larger one, so the shapes must
    # be equal.
    assert frozenset().union(*(result.products for result in results)) == expected.products, name
    # Every row is evaluated by exactly one rank.
    assert sum(result.num_own_labels for result in results) == expected.num_own_labels, name
    assert {count for _, count in expected.evaluations.values()} == {expected.num_own_labels}, name
    assert digests(results) == digests([expected]), name


@pytest.mark.parametrize("names", [[ON_HOSTS], pytest.param(list(CASES), marks=pytest.mark.slow)])
def test_same_bits_on_two_hosts(names: list[str], folder: Path, alone: dict[str, list[RankResult]]) -> None:
    """With one process per host, all traffic between ranks is between hosts, and the results are bit-identical."""
    for name, results in by_case(2, folder, num_hosts=2, names=names).items():
        assert_same(name, results, alone[name])
        for result in results:
            tier = "gpu" if "gpu->hosts" in result.moved else "ram"
            assert result.moved[f"{tier}->hosts"] == result.moved[f"hosts->{tier}"] > 0, name
            assert not any("ranks" in link for link in result.moved), name


@pytest.mark.slow
@pytest.mark.parametrize(("lanes", "worlds"), [("five", ((4, 1), (4, 4))), ("eight", ((3, 1), (8, 1)))])
def test_same_bits_with_more_lanes(lanes: str, worlds: Sequence[tuple[int, int]], folder: Path) -> None:
    """The last of four ranks has two of five lanes, whose sum is not a node of the tree."""
    name = f"tied, {lanes} lanes"
    (expected,) = by_case(1, folder, names=[name])[name]
    for size, num_hosts in worlds:
        assert_same(name, by_case(size, folder, num_hosts=num_hosts, names=[name])[name], [expected])


def collect_plans_and_errors(world: World, folder: Path, model: Path) -> dict[str, Any]:
    """Plan with settings that differ between ranks. Return plans, refusals, and what each rank reports if one fails."""
    said: dict[str, Any] = {}
    folder.mkdir(exist_ok=True)
    lanes = "gradient_accumulation_steps = 4\ngradient_lanes = 4"
    text = config_text(folder, model, nvme=0).replace("gradient_accumulation_steps = 3", lanes)
    path = folder / f"refused{world.rank}.toml"

    def plan_with(text: str) -> str:
        path.write_text(text)
        try:
            plan_of_rank(path, world)
        except (DoesNotFitError, RanksDifferError) as error:
            return f"{type(error).__name__}: {error}"
        return "planned"

    # The host of one rank has less RAM.
    said["too small"] = plan_with(text.replace("256MiB", "4MiB" if world.rank else "64MiB"))
    said["other program"] = plan_with(
        text.replace("[precision]", '[precision]\ngrad_dtype = "bfloat16"') if world.rank else text
    )
    # Rank 0 computes slowly. Rank 1 has a slow drive, and computes three of the five micro-batches.
    rates: dict[str, Any] = {"matmul_flops_per_s": {"cpu/float32": 1e11 if world.rank else 1e9}}
    rates["drives"] = {file_system_of(folder).key: drive(1e6, 1e6, 1e6) if world.rank else drive(2e9, 1e9, 1.5e9)}
    os.environ["XDG_CACHE_HOME"] = str(folder / f"cache{world.rank}")
    store_profile(make_machine(folder, **rates))
    uneven = config_text(folder, model, placement=ALL_NVME, ram="24MiB").replace(
        "gradient_accumulation_steps = 3", lanes.replace("steps = 4", "steps = 5")
    )
    path.write_text(uneven)
    plan = plan_of_rank(path, world)
    assert plan.estimate is not None
    said["micro-batches"] = len(plan.run.own_micro_batches)
    said["homes"], said["traffic of weights"] = dict(plan.placement.homes), plan.traffic["ram->ranks"]
    said["rates"] = {**plan.estimate.seconds, "bound by": plan.estimate.bound_by, "step": plan.estimate.step_s}
    said["notes"] = plan.estimate.notes
    said["alone"] = estimate_step(plan, plan.shape, load_profile())
    collectives = Collectives()
    try:
        collectives.run_on_all(lambda: 1 // world.rank)
    except ZeroDivisionError as error:
        said["error of rank 0"] = str(error)
    said["afterwards"] = collectives.run_on_all(lambda: world.rank)
    # Operations that move whole layers between ranks.
    share, whole = torch.full((3,), float(world.rank)), [torch.full((3,), float(rank + 5)) for rank in range(2)]
    collectives.scatter(share, whole if world.is_first else None, 0)
    found = [torch.zeros(3) for _ in range(2)]
    collectives.collect(share * 2, found if world.rank == 1 else None, 1)
    said["moved"] = share.tolist(), [each.tolist() for each in found]
    return said


def test_ranks_share_plans_and_planning_errors(folder: Path) -> None:
    first, second = run_on_ranks(2, collect_plans_and_errors, folder / "refused", folder / "tied")
    assert first["too small"] == second["too small"]
    assert first["too small"].startswith("DoesNotFitError: does not fit: tier 'ram' has 2097152 bytes")
    assert first["other program"] == second["other program"]
    assert first["other program"].startswith("RanksDifferError: the ranks do not have the same program of a step")
    assert "float32" in first["other program"] and "bfloat16" in first["other program"]
    assert first["error of rank 0"] == second["error of rank 0"] and "zero" in first["error of rank 0"]
    check_rates(first, second)
    assert [first["afterwards"], second["afterwards"]] == [0, 1]
    assert first["moved"] == ([5.0] * 3, [[0.0] * 3] * 2)
    assert second["moved"] == ([6.0] * 3, [[10.0] * 3, [12.0] * 3])


def check_rates(first: dict[str, Any], second: dict[str, Any]) -> None:
    """Assert that all ranks plan with the lowest rates of any rank, and predict the slowest rank's step time."""
    assert (first["micro-batches"], second["micro-batches"]) == (2, 3)
    both = first["homes"].keys() & second["homes"].keys()  # rank 1 has more activations
    assert both == first["homes"].keys() and all(first["homes"][key] == second["homes"][key] for key in both)
    assert first["traffic of weights"] == second["traffic of weights"]
    alone = first["alone"], second["alone"]
    assert [each.bound_by for each in alone] == ["compute", "nvme"]
    # Both ranks plan to compute at the rate of rank 0, and to move blocks at the rate of rank 1.
    assert first["rates"]["compute"] == alone[0].seconds["compute"] > alone[1].seconds["compute"]
    assert second["rates"]["compute"] == pytest.approx(1.5 * first["rates"]["compute"])
    assert second["rates"]["nvme"] == alone[1].seconds["nvme"] > 100 * alone[0].seconds["nvme"]
    assert first["rates"]["nvme"] > 100 * alone[0].seconds["nvme"]
    assert first["rates"]["step"] == second["rates"]["step"] == alone[1].step_s
    assert first["rates"]["bound by"] == second["rates"]["bound by"] == "nvme"
    both = "rates           the lowest of 2 ranks; rates of rank 0 and rank 1 are lower"
    assert both in first["notes"] and both in second["notes"]
    assert "predicted step  of rank 1, the slowest rank" in first["notes"]


REFUSED = {
    "training.gradient_lanes": ("gradient_lanes = 3", 4),
    "training.gradient_accumulation_steps": ("", 33),
    "advanced.micro_batch_order": ('[advanced]\nmicro_batch_order = "micro_batch"', 2),
    "optimizer.optim": ('[optimizer]\noptim = "adafactor"', 2),
    "optimizer.optim, matrices": ('[optimizer]\noptim = "muon"', 2),
}


@pytest.mark.parametrize("case", REFUSED)
def test_settings_unsupported_on_several_ranks_are_refused(case: str, tmp_path: Path) -> None:
    (change, size), key = REFUSED[case], case.partition(",")[0]
    (tmp_path / "run.toml").write_text(
        f'task = "pretrain"\noutput_dir = "out"\n[model]\nmodel_name_or_path = "{tmp_path}"\n[data]\nmax_length = 32\n'
        f'[[data.train]]\npath = "x.txt"\n[training]\ngradient_accumulation_steps = 4\n{change}\n'
    )
    run = resolve(load_config(tmp_path / "run.toml").config)
    check_ranks(run)
    with pytest.raises(ConfigError, match=key) as raised:
        check_ranks(replace(run, world=World.local(0, size)))
    assert f"{size} processes" in str(raised.value)


def test_evaluation_shards_fit_the_planned_memory(tmp_path: Path) -> None:
    """Each rank gets at least one micro-batch, and no more rows than in its training step."""
    (tmp_path / "run.toml").write_text(
        f'task = "pretrain"\noutput_dir = "out"\n[model]\nmodel_name_or_path = "{tmp_path}"\n'
        '[[data.train]]\npath = "x.txt"\n'
        "[training]\nper_device_train_batch_size = 3\ngradient_accumulation_steps = 5\ngradient_lanes = 4\n"
    )
    run = resolve(load_config(tmp_path / "run.toml").config)
    for size, rows in product((1, 2, 3, 4), (1, 2, 3)):
        dealt = deal_micro_batches(replace(run, world=World.local(0, size)), rows)
        assert [each.start for each in dealt] == [0, *(each.stop for each in dealt[:-1])]
        for rank, own in enumerate(dealt):
            trained = replace(run, world=World.local(rank, size)).own_micro_batches
            assert 0 < len(own) * rows <= len(trained) * 3, (size, rows, rank)
