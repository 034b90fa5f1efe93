"""Training on rows with images matches Hugging Face, and is bit-identical wherever the blocks are."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from megatrain.config import load_config
from megatrain.converters.spec import build_graph
from megatrain.data.dataset import load_dataset
from megatrain.data.encoding import load_tokenizer
from megatrain.data.images import ImageProcessor
from megatrain.data.loader import BatchLoader
from megatrain.data.packing import BatchShape
from megatrain.data.row_order import EpochOrder
from megatrain.models.table import LoraConfig
from megatrain.ranks.world import World
from megatrain.trace.trace import trace_visits
from megatrain.training.export import export_checkpoint
from oracles.huggingface import assert_same_gradients, train_step
from oracles.image_models import FAMILIES, image_data, make_folder, write_rows
from oracles.memory_access import MemoryAccess
from oracles.peft_model import parameters_by_name, plain_name, with_adapters
from oracles.runners import layer_runner
from oracles.tiered_run import ALL_NVME, plan_of
from oracles.whole_run import train_whole
from processes import warm
from processes.ranks import run_on_ranks
from processes.worlds import RankResult, digests
from processes.worlds import train as train_on_rank

SEED = 3
MAX_LENGTH = 192
IN_CI = ("qwen2_5_vl", "llava")
#: Image sizes of each row. Rows have two images, one or none; images are wide, tall or square.
ROWS = [[(40, 60), (90, 33)], [], [(50, 50)], [(64, 64)], [], [(33, 70)]]


@pytest.fixture(autouse=True)
def quiet_single_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("transformers.models.smolvlm.processing_smolvlm.num2words", str)  # used only for videos
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("image_models")


def folder_of(family: str, folders: Path) -> Path:
    return folders / family if (folders / family).is_dir() else make_folder(family, folders)


def make_loader(folder: Path, rows: Path, *, num_micro_batches: int, batch_rows: int) -> BatchLoader:
    tokenizer = load_tokenizer(str(folder))
    data = image_data(rows, folder, MAX_LENGTH)
    shape = BatchShape(batch_rows, num_micro_batches, MAX_LENGTH, packing=False)
    return BatchLoader(EpochOrder(load_dataset(data, tokenizer), shape, data_seed=1), data.collator(shape, tokenizer))


@pytest.mark.parametrize("images", ["trained", "frozen"])
@pytest.mark.parametrize(
    "family", [family if family in IN_CI else pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES]
)
def test_loss_and_every_gradient_equal_hugging_face(
    family: str, images: Literal["frozen", "trained"], folders: Path, tmp_path: Path
) -> None:
    folder = folder_of(family, folders)
    rows = write_rows(tmp_path, ROWS)
    # With one row per micro-batch, two of six have no image. With two rows, the number of images varies.
    for num_micro_batches, batch_rows in ((6, 1), (3, 2)):
        batches = next(make_loader(folder, rows, num_micro_batches=num_micro_batches, batch_rows=batch_rows))
        micro_batches = batches.micro_batches
        assert sum("pixel_values" in batch for batch in micro_batches) >= num_micro_batches - 2
        graph = build_graph(folder, images=images)
        own = dict(graph.model.named_parameters())
        model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).train()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(own[name].requires_grad)
        expected = train_step(model, micro_batches, SEED)
        buffers = dict(model.named_buffers())
        for name, buffer in graph.model.named_buffers():
            if name in graph.persistent_buffers():
                buffer.copy_(buffers[name])
        tower = {entry.name for unit in graph.optional_units for entry in _entries(graph, unit)}
        assert tower and bool(tower & set(expected.gradients)) == (images == "trained")
        tokenizer = load_tokenizer(str(folder))
        example = ImageProcessor(str(folder), tokenizer, MAX_LENGTH).make_example(batch_rows)
        trace = trace_visits(graph, batch_rows, MAX_LENGTH, torch.float32, example=example)
        assert trace.exact, trace.guesses
        access = MemoryAccess(graph, dict(model.named_parameters()), torch.float32)
        runner = layer_runner(graph, access, device="cpu", trace=trace)
        loss = runner.forward_backward(micro_batches, seed=SEED)
        gradients = access.finish()
        assert_same_gradients(expected, loss.loss, gradients)


def _entries(graph: Any, unit: int) -> Sequence[Any]:
    names = {layout for _, _, layout in graph.units[unit].params}
    return [entry for name in names for entry in graph.layouts[name].entries]


TOWERS = {"qwen2_5_vl": ["model.visual"], "llava": ["model.vision_tower", "model.multi_modal_projector"]}


@pytest.mark.parametrize(
    ("family", "images"),
    [
        ("qwen2_5_vl", "trained"),
        ("llava", "frozen"),
        pytest.param("qwen2_5_vl", "frozen", marks=pytest.mark.slow),
        pytest.param("llava", "trained", marks=pytest.mark.slow),
    ],
)
def test_image_model_adapters_match_peft(
    family: str, images: Literal["frozen", "trained"], folders: Path, tmp_path: Path
) -> None:
    """Only the language model has adapters. The tower's modules have the same names, but no adapters."""
    folder, rows = folder_of(family, folders), write_rows(tmp_path, ROWS[:3])
    micro_batches = next(make_loader(folder, rows, num_micro_batches=3, batch_rows=1)).micro_batches
    graph = build_graph(folder, images=images, lora=LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))
    tower = TOWERS[family]
    base = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    settings = {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": r"model\.language_model\..*_proj",
        "modules_to_save": tower if images == "trained" else None,
    }
    theirs = with_adapters(base, settings)
    expected = train_step(theirs, micro_batches, SEED)
    expected.gradients = {plain_name(name): gradient for name, gradient in expected.gradients.items()}
    trained = {plain_name(name) for name, parameter in theirs.named_parameters() if parameter.requires_grad}
    assert trained == set(graph.trainable_parameters) >= set(expected.gradients)
    buffers = dict(AutoModelForImageTextToText.from_pretrained(folder).named_buffers())
    with graph.plain_model():
        for name, buffer in graph.model.named_buffers():
            if name in graph.persistent_buffers():
                buffer.copy_(buffers[name])
    example = ImageProcessor(str(folder), load_tokenizer(str(folder)), MAX_LENGTH).make_example(1)
    trace = trace_visits(graph, 1, MAX_LENGTH, torch.float32, example=example)
    access = MemoryAccess(graph, parameters_by_name(theirs), torch.float32)
    runner = layer_runner(graph, access, device="cpu", trace=trace)
    loss = runner.forward_backward(micro_batches, seed=SEED)
    assert_same_gradients(expected, loss.loss, access.finish())


# -- whole runs ----------------------------------------------------------------------------------------------------


def config_text(
    folder: Path, model: Path, rows: Path, images: str, *, placement: str = "", ram: str = "256MiB", training: str = ""
) -> str:
    return f"""
task = "sft"
output_dir = "{folder / "out"}"
device = "cpu"
[model]
model_name_or_path = "{model}"
images = "{images}"
[data]
max_length = {MAX_LENGTH}
packing = false
cache_dir = "{folder / "cache"}"
val_size = 1
[[data.train]]
path = "{rows}"
[evaluation]
eval_strategy = "steps"
eval_steps = 2
[training]
max_steps = 4
{training}
per_device_train_batch_size = 1
gradient_accumulation_steps = 3
[checkpoint]
save_steps = 1
[optimizer]
learning_rate = 1e-3
lr_scheduler_type = "constant"
warmup_steps = 0
[precision]
compute_dtype = "float32"
[placement]
{placement}
[tiers.ram]
size = "{ram}"
[[tiers.nvme]]
path = "{folder / "drive"}"
size = "256MiB"
"""


@pytest.mark.parametrize("images", ["frozen", "trained"])
def test_selective_recompute_saves_results_of_a_trained_tower(images: str, folders: Path, tmp_path: Path) -> None:
    model, rows = folder_of("qwen2_5_vl", folders), write_rows(tmp_path / "data", ROWS)
    path = tmp_path / "run.toml"
    path.write_text(config_text(tmp_path, model, rows, images, training='recompute = "selective:9"'))
    plan = plan_of(load_config(path).config)
    saving = plan.program.recompute.saved_results
    optional = {plan.trace.visits[visit].unit in plan.graph.optional_units for visit in saving}
    assert optional == ({False, True} if images == "trained" else {False})


#: Image sizes of each row, by number of ranks. Ranks have different numbers of images, and some ranks have none.
FEW_IMAGES = {2: [[(40, 60), (90, 33)], [], [], []], 3: [[(40, 60), (90, 33)], [], [], [(50, 50)], [], []]}


def train_ranks(world: World, folder: Path, model: Path, rows: Path, images: str) -> RankResult:
    """Train on one rank of a world. On odd ranks, blocks have other homes."""
    where = {"placement": ALL_NVME, "ram": f"{48 * world.size}MiB"} if world.rank % 2 else {}
    text = config_text(folder, model, rows, images, **where)
    num_rows = len(rows.read_text().splitlines())
    text = text.replace("accumulation_steps = 3", f"accumulation_steps = {num_rows}\ngradient_lanes = 4")
    text = text.replace("val_size = 1\n", "").replace("[evaluation]", f'[[data.eval]]\npath = "{rows}"\n[evaluation]')
    folder.mkdir(exist_ok=True)
    return train_on_rank(world, folder, [text], 2)


@pytest.mark.parametrize(
    ("family", "images", "size"),
    [
        ("qwen2_5_vl", "trained", 2),
        pytest.param("qwen2_5_vl", "trained", 3, marks=pytest.mark.slow),
        pytest.param("qwen2_5_vl", "frozen", 3, marks=pytest.mark.slow),
        pytest.param("llava", "trained", 3, marks=pytest.mark.slow),
    ],
)
def test_ranks_match_one_process_bitwise(family: str, images: str, size: int, folders: Path, tmp_path: Path) -> None:
    """A rank without images still gathers the tower's weights and exchanges its gradients like the other ranks."""
    model, rows = folder_of(family, folders), write_rows(tmp_path / "data", FEW_IMAGES[size])
    alone = train_ranks(World.single(), tmp_path / "alone", model, rows, images)
    assert len(set(alone.losses)) == 2 and alone.evaluations
    results = run_on_ranks(size, train_ranks, tmp_path / "ranks", model, rows, images)
    for result in results:
        assert (result.losses, result.norms) == (alone.losses, alone.norms)
        assert result.evaluations == alone.evaluations
        assert result.moved == result.planned
        assert result.moved_by_evaluations == result.planned_of_evaluations
        used = {place for link, nbytes in result.moved.items() if nbytes for place in link.split("->")}
        assert all(int(tier in used) <= most <= capacity for tier, (most, capacity) in result.tiers.items())
    assert digests(results) == digests([alone])


def train(folder: Path, text: str, *sets: str) -> tuple[list[tuple[float, ...]], Path]:
    lines = train_whole(folder, text, overrides=sets).lines
    losses = [(line["step"], *(line[name] for name in sorted(line) if name.endswith("loss"))) for line in lines]
    return [each for each in losses if len(each) > 1], folder / "out/final"


def test_image_run_resumes_and_exports_bitwise_equal(folders: Path, tmp_path: Path) -> None:
    model, rows = folder_of("qwen2_5_vl", folders), write_rows(tmp_path / "data", ROWS)
    steps = ("evaluation.eval_steps=1", "training.max_steps=2")
    text = config_text(tmp_path / "whole", model, rows, "frozen")
    losses, final = train(tmp_path / "whole", text, *steps)
    text = config_text(tmp_path / "parts", model, rows, "frozen", placement=ALL_NVME, ram="36MiB")
    train(tmp_path / "parts", text, *steps, "training.max_steps=1")
    again, continued = train(tmp_path / "parts", text, *steps)
    assert again == losses
    before, after = load_file(model / "model.safetensors"), load_file(final / "model.safetensors")
    assert before.keys() == after.keys()
    assert (continued / "model.safetensors").read_bytes() == (final / "model.safetensors").read_bytes()
    tower = [name for name in before if "visual" in name]
    assert tower and all(torch.equal(before[name], after[name]) for name in tower)
    assert any(not torch.equal(before[name], after[name]) for name in before if name not in tower)
    for name in ("preprocessor_config.json", "processor_config.json", "config.json"):
        assert json.loads((final / name).read_text()) == json.loads((model / name).read_text()), name
    reloaded, report = AutoModelForImageTextToText.from_pretrained(final, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"], type(reloaded)


OPEN = """
import sys, torch
from peft import PeftModel
from transformers import AutoModelForImageTextToText
base = AutoModelForImageTextToText.from_pretrained(sys.argv[1], dtype=torch.float32)
model = PeftModel.from_pretrained(base, sys.argv[2]).eval()
batch = torch.load(sys.argv[3])
with torch.no_grad():
    print(float(model(**batch).loss))
    with model.disable_adapter():
        print(float(model(**batch).loss))
"""


@pytest.mark.parametrize("images", ["frozen", pytest.param("trained", marks=pytest.mark.slow)])
def test_adapters_are_bit_identical_across_tiers_and_load_in_peft(images: str, folders: Path, tmp_path: Path) -> None:
    model, rows = folder_of("llava", folders), write_rows(tmp_path / "data", ROWS)
    lora = '[lora]\nr = 4\ntarget_modules = ["q_proj", "v_proj"]\n[export]\ndtype = "float32"\n[training]'
    results = []
    for name, where in (("ram", {}), ("folder", {"placement": ALL_NVME.replace("nvme", "folder", 1), "ram": "36MiB"})):
        text = config_text(tmp_path / name, model, rows, images, **where).replace("[training]", lora, 1)  # type: ignore[arg-type]
        results.append(train(tmp_path / name, text))
    (losses, final), (again, other) = results
    assert losses == again
    adapter = load_file(final / "adapter_model.safetensors")
    assert (final / "adapter_model.safetensors").read_bytes() == (other / "adapter_model.safetensors").read_bytes()
    in_tower = [name for name in adapter if "vision_tower" in name]
    assert bool(in_tower) == (images == "trained") and not any(".lora_" in name for name in in_tower)
    batch = next(make_loader(model, rows, num_micro_batches=1, batch_rows=1)).micro_batches[0]
    torch.save(dict(batch), tmp_path / "batch")
    words = [sys.executable, "-W", "ignore", "-c", OPEN, str(model), str(final), str(tmp_path / "batch")]
    found = warm.run(words, timeout=200)
    assert found.returncode == 0, found.stderr
    adapted, plain = map(float, found.stdout.split())
    merged = export_checkpoint(tmp_path / "folder/out", tmp_path / "merged", merge=True, dtype=torch.float32)
    here = AutoModelForImageTextToText.from_pretrained(merged, dtype=torch.float32).eval()
    with torch.no_grad():
        assert float(here(**batch).loss) == pytest.approx(adapted, rel=1e-5)
    assert abs(adapted - plain) > 1e-3
