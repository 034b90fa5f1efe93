"""TierStrategy matches Lightning's own strategy, and refuses what it does not support."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from megatrain import TieredAdamW, TieredLion, open_store
from megatrain.embed.partition import OffloadError
from megatrain.embed.weights import block_of
from tiered import TieredStore

lightning = pytest.importorskip("lightning")

from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402
from lightning.pytorch.strategies import StrategyRegistry  # noqa: E402

from megatrain import lightning as tier_lightning  # noqa: E402
from megatrain.embed.integrations.lightning_files import KeptGenerations  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),  # about few workers, no logger, existing folders
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
]
Make = Callable[[Any], torch.optim.Optimizer]


class Net(lightning.LightningModule):
    """Module with four layers, one of them frozen, and one direct parameter."""

    def __init__(self, make: Make | None = None, width: int = 32) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["make"])
        self.make = make or (lambda parameters: TieredAdamW(parameters, lr=1e-2))
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(4)))
        self.layers[1].requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(width))
        self.register_buffer("shift", torch.full((width,), 0.5))
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.to(self.shift.dtype)) * self.scale + self.shift

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        loss = self(x).square().mean()
        self.losses.append(loss.item())
        return loss

    def validation_step(self, x: Tensor, batch_idx: int) -> None:
        self.log("validation_loss", self(x).square().mean())

    def predict_step(self, x: Tensor, batch_idx: int) -> Tensor:
        return self(x)

    def configure_optimizers(self) -> Any:
        optimizer = self.make(self.parameters())
        return {
            "optimizer": optimizer,
            "lr_scheduler": {
                "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5),
                "interval": "step",
            },
        }


class NormNet(Net):
    """Module that records the gradient norm before each clipping."""

    def __init__(self, make: Make | None = None) -> None:
        super().__init__(make)
        self.norms: list[float] = []

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        gradients = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
        self.norms.append(nn.utils.get_total_norm(gradients).item())


class ManualNet(Net):
    """Module that calls the optimizer itself, and clips gradients in every other batch."""

    def __init__(self, make: Make | None = None) -> None:
        super().__init__(make)
        self.automatic_optimization = False

    def training_step(self, x: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        for part in x.split(2):
            loss = self(part).square().mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            if batch_idx % 2:
                self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
            optimizer.step()
            self.losses.append(loss.item())
        self.lr_schedulers().step()


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def data() -> DataLoader:
    rows = torch.randn(24, 32, generator=torch.Generator().manual_seed(1))
    return DataLoader(list(rows), batch_size=4)


def net(make: Make | None = None, kind: type[Net] = Net) -> Net:
    torch.manual_seed(0)
    return kind(make)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TieredStore]:
    with small_store(tmp_path) as opened:
        yield opened


def small_store(folder: Path, **options: Any) -> TieredStore:
    return open_store(ram="64KiB", nvme=folder / "tiers", nvme_size="8MiB", **options)


def trainer(folder: Path, store: TieredStore | None, **options: Any) -> Any:
    """Return a quiet trainer for two epochs of six batches. Without a store, it uses Lightning's default strategy."""
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    options = {"accelerator": "cpu", "max_epochs": 2, "enable_checkpointing": False, **quiet, **options}
    if store is not None:
        options["strategy"] = tier_lightning.TierStrategy(store)
    return lightning.Trainer(default_root_dir=folder, **options)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: numbers.clone() for name, numbers in model.state_dict().items()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(found) == list(expected)
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_clip_val": 0.02},
        {"accumulate_grad_batches": 3, "gradient_clip_val": 0.02},
        {"precision": "bf16-mixed"},
    ],
    ids=["plain", "clipped", "accumulated", "mixed"],
)
def test_strategy_matches_the_plain_strategy(store: TieredStore, tmp_path: Path, options: dict[str, Any]) -> None:
    expected, found = net(adamw), net()
    trainer(tmp_path, None, **options).fit(expected, data(), data())
    trainer(tmp_path, store, **options).fit(found, data(), data())
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    assert 0.1 * found.losses[0] < found.losses[-1] < 0.4 * found.losses[0]
    for name, numbers in expected.state_dict().items():
        torch.testing.assert_close(found.state_dict()[name], numbers, rtol=1e-4, atol=1e-6)


def test_bf16_true_keeps_an_fp32_master(store: TieredStore, tmp_path: Path) -> None:
    bf16, fp32 = net(lambda parameters: TieredAdamW(parameters, lr=1e-5)), net(adamw)
    before = weights(bf16)
    trainer(tmp_path, store, precision="bf16-true").fit(bf16, data())
    assert block_of(bf16.layers[0][0].weight) is not None
    assert {p.dtype for p in bf16.parameters()} == {torch.bfloat16}
    trainer(tmp_path, None, max_epochs=1).fit(fp32, data())
    assert bf16.losses[0] == pytest.approx(fp32.losses[0], rel=0.02)
    low = [key for key in (spec.key for spec in store.blocks()) if key.endswith("low")]
    assert low
    assert before["layers.0.0.weight"].dtype == torch.float32


def test_trainer_clipping_uses_the_exact_norm(store: TieredStore, tmp_path: Path) -> None:
    expected, model = net(adamw, NormNet), net()
    trainer(tmp_path, None, gradient_clip_val=0.02).fit(expected, data())
    fitted = trainer(tmp_path, store, gradient_clip_val=0.02)
    fitted.fit(model, data())
    (optimizer,) = fitted.optimizers
    assert 0.02 < expected.norms[-1] < 1, "clipped"
    assert optimizer.grad_norm == pytest.approx(expected.norms[-1], rel=1e-4)
    assert optimizer.max_grad_norm == 0, "set for the trainer's steps only"


def test_manual_optimization(store: TieredStore, tmp_path: Path) -> None:
    expected, found = net(adamw, ManualNet), net(None, ManualNet)
    trainer(tmp_path, None).fit(expected, data())
    trainer(tmp_path, store).fit(found, data())
    assert len(found.losses) == 24
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_checkpoint_is_small_and_resumes_bit_for_bit(tmp_path: Path, precision: str) -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        return TieredAdamW(parameters, lr=1e-3, weight_decay=0.1)

    whole, half, rest = net(make), net(make), net(make)
    options = {"precision": precision, "enable_checkpointing": True, "accumulate_grad_batches": 2}
    with small_store(tmp_path / "whole") as store:
        trainer(tmp_path / "whole", store, **options).fit(whole, data(), data())
        expected = weights(whole)
    with small_store(tmp_path / "half") as store:
        callback = ModelCheckpoint(tmp_path / "half", save_last=True)
        trainer(tmp_path / "half", store, max_epochs=1, callbacks=[callback], **options).fit(half, data(), data())
        file = tmp_path / "half" / "last.ckpt"
        saved = torch.load(file, weights_only=True)
    assert set(saved["optimizer_states"][0]) == {"state", "param_groups", "tiered"}
    assert saved["optimizer_states"][0]["state"] == {}
    num_bytes = sum(t.numel() * t.element_size() for t in expected.values())
    assert num_bytes < file.stat().st_size < num_bytes + 20_000  # plus names and headers
    with small_store(tmp_path / "half") as store:
        trainer(tmp_path / "half", store, **options).fit(rest, data(), data(), ckpt_path=file, weights_only=True)
        assert_same(weights(rest), expected)
    assert half.losses + rest.losses == whole.losses


def test_checkpoint_weights_load_without_a_store(store: TieredStore, tmp_path: Path) -> None:
    model = net()
    fitted = trainer(tmp_path, store)
    fitted.fit(model, data())
    fitted.save_checkpoint(tmp_path / "last.ckpt")
    assert_same(weights(Net.load_from_checkpoint(tmp_path / "last.ckpt")), weights(model))


def test_weights_changed_by_a_hook_override_the_generation(store: TieredStore, tmp_path: Path) -> None:
    class Changed(Net):
        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["state_dict"]["layers.2.0.bias"] = torch.full((32,), 7.0)

        def on_train_start(self) -> None:
            self.at_start = weights(self)

    fitted = trainer(tmp_path, store)
    model = net()
    fitted.fit(model, data())
    fitted.save_checkpoint(tmp_path / "last.ckpt")
    saved = weights(model)
    changed = net(None, Changed)
    with small_store(tmp_path / "other") as other:
        trainer(tmp_path, other, max_epochs=3).fit(changed, data(), ckpt_path=tmp_path / "last.ckpt")
    assert_same(changed.at_start, {**saved, "layers.2.0.bias": torch.full((32,), 7.0)})


def test_a_model_on_the_meta_device_is_filled_by_the_checkpoint(store: TieredStore, tmp_path: Path) -> None:
    model = net()
    fitted = trainer(tmp_path, store)
    fitted.fit(model, data())
    fitted.save_checkpoint(tmp_path / "last.ckpt")
    expected = trainer(tmp_path, None).predict(model, data())

    class Meta(Net):
        def configure_model(self) -> None:
            if not self.layers[0][0].weight.is_meta:
                self.layers.to("meta")

    with small_store(tmp_path / "other") as other:
        found = trainer(tmp_path, other).predict(net(None, Meta), data(), ckpt_path=tmp_path / "last.ckpt")
    assert all(torch.equal(one, two) for one, two in zip(found, expected, strict=True))


def test_checkpoint_of_the_plain_strategy_is_loaded(store: TieredStore, tmp_path: Path) -> None:
    expected = net(adamw)
    plain = trainer(tmp_path, None, max_epochs=1)
    plain.fit(expected, data())
    plain.save_checkpoint(tmp_path / "plain.ckpt")
    trainer(tmp_path, None, max_epochs=3).fit(expected, data(), ckpt_path=tmp_path / "plain.ckpt")
    model = net()
    trainer(tmp_path, store, max_epochs=3).fit(model, data(), ckpt_path=tmp_path / "plain.ckpt")
    assert model.losses == pytest.approx(expected.losses[6:], rel=1e-5)


def test_generations_are_kept_while_files_reference_them(tmp_path: Path) -> None:
    with small_store(tmp_path, keep_generations=1) as store:
        callback = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=3, save_top_k=-1)
        fitted = trainer(tmp_path, store, max_epochs=3, callbacks=[callback], enable_checkpointing=True)
        fitted.fit(net(), data())
    files = [tmp_path / f"step={step}.ckpt" for step in (3, 6, 9, 12, 15, 18)]
    assert all(file.exists() for file in files)
    files[1].unlink()
    for file in (files[0], files[3]):
        model = net()
        with small_store(tmp_path, keep_generations=1) as store:
            trainer(tmp_path, store, max_epochs=4).fit(model, data(), ckpt_path=file)
        assert model.losses
    with small_store(tmp_path, keep_generations=1) as store:
        fitted = trainer(tmp_path, store, max_epochs=5)
        fitted.fit(net(), data(), ckpt_path=files[5])
        fitted.save_checkpoint(tmp_path / "new.ckpt")
    generations = {int(folder.name) for folder in (tmp_path / "tiers" / "snap").iterdir() if folder.name.isdigit()}
    assert generations == {1, 3, 4, 5, 6, 7}, "no file names the second any more"


def test_record_of_checkpoint_files_survives_a_restart(tmp_path: Path) -> None:
    """A noted file counts before it is written. Once it has existed, its deletion removes it from the record."""
    existing, folder = {"b"}, tmp_path / "store"
    kept = KeptGenerations(str(folder), existing.__contains__)
    assert kept.numbers() == set()
    for file, number in (("a", 3), ("b", 4), ("c", 5)):
        kept.note(file, number)
    assert kept.numbers() == {3, 4, 5}
    existing |= {"a"}
    assert kept.numbers() == {3, 4, 5}
    existing -= {"a", "b"}
    assert kept.numbers() == {5}
    record = folder / "checkpoint_files.json"
    assert json.loads(record.read_text()) == {"c": 5} and list(folder.iterdir()) == [record]
    kept.note("b", 6)
    existing |= {"b"}
    assert KeptGenerations(str(folder), existing.__contains__).numbers() == {6}  # of an earlier process, "c" is lost
    record.write_text("[1]")
    assert KeptGenerations(str(folder), existing.__contains__).numbers() == set()


def test_completion_lists_the_public_names() -> None:
    assert dir(tier_lightning) == ["TierStrategy"]


def test_deleting_a_checkpoint_file_releases_its_generation(tmp_path: Path) -> None:
    with small_store(tmp_path, keep_generations=1) as store:
        callback = ModelCheckpoint(tmp_path, monitor=None, every_n_train_steps=1, save_top_k=1)
        fitted = trainer(tmp_path, store, callbacks=[callback], enable_checkpointing=True)
        fitted.fit(net(), data())
        assert len(list(tmp_path.glob("*.ckpt"))) == 1
        assert len(fitted.strategy._kept.numbers()) == 1


def test_fit_again_validate_predict_and_save_afterwards(store: TieredStore, tmp_path: Path) -> None:
    model, plain = net(), net(adamw)
    for _ in range(2):
        fitted = trainer(tmp_path, store)
        fitted.fit(model, data())
        trainer(tmp_path, None).fit(plain, data())
        assert block_of(model.layers[0][0].weight) is not None, "also in the store after teardown"
    assert model.losses == pytest.approx(plain.losses, rel=1e-5)
    (result,) = fitted.validate(model, data(), verbose=False)
    loss = sum(model(x).square().mean().item() for x in data()) / len(data())
    assert result["validation_loss"] == pytest.approx(loss, rel=1e-5)
    predictions = fitted.predict(model, data())
    assert torch.equal(predictions[0], model(next(iter(data()))))
    fitted.save_checkpoint(tmp_path / "after.ckpt")
    assert (tmp_path / "after.ckpt").exists()


def test_offloaded_modules_keep_their_store(store: TieredStore, tmp_path: Path) -> None:
    from megatrain import offload

    model = net()
    offload(model.layers, store, name="mine")
    trainer(tmp_path, store).fit(model, data())
    assert {spec.key.split("/")[0] for spec in store.blocks()} == {"mine", "optimizer"}


def test_modules_named_in_leave_stay_in_memory(store: TieredStore, tmp_path: Path) -> None:
    """Parameters named in the option `leave` stay in memory, and so does the module's own parameter."""
    model = net()
    strategy = tier_lightning.TierStrategy(store, leave=["layers.3.*"])
    trainer(tmp_path, None, strategy=strategy, max_epochs=1).fit(model, data())
    in_memory = {name for name, parameter in model.named_parameters() if block_of(parameter) is None}
    assert in_memory == {"scale", "layers.3.0.weight", "layers.3.0.bias"}


def test_strategy_can_offload_only_optimizer_state(store: TieredStore, tmp_path: Path) -> None:
    model, plain = net(lambda parameters: TieredLion(parameters, lr=1e-3, store=store)), net(adamw)
    options: dict[str, Any] = {"strategy": tier_lightning.TierStrategy(store, offload_model=False)}
    trainer(tmp_path, None, gradient_clip_val=0.1, **options).fit(model, data())
    trainer(tmp_path, None, max_epochs=1).fit(plain, data())
    assert not any(block_of(parameter) for parameter in model.parameters())
    assert model.losses[0] == plain.losses[0]
    assert 0.8 * model.losses[0] < model.losses[-1] < 0.95 * model.losses[0]


def test_registered_strategy_opens_a_store(tmp_path: Path) -> None:
    assert "megatrain" in StrategyRegistry.available_strategies()
    model = net()
    fitted = trainer(tmp_path, None, strategy="megatrain", enable_checkpointing=True)
    fitted.fit(model, data())
    assert isinstance(fitted.strategy, tier_lightning.TierStrategy)
    assert (tmp_path / "tiers").is_dir()
    assert 0.1 * model.losses[0] < model.losses[-1] < 0.2 * model.losses[0]
    fitted.strategy.store.close()


def refused(folder: Path, store: TieredStore, message: str, model: Net | None = None, **options: Any) -> None:
    with pytest.raises(OffloadError) as caught:
        trainer(folder, store, **options).fit(model or net(), data())
    assert str(caught.value) == message


def test_unsupported_settings_are_refused_before_the_first_step(store: TieredStore, tmp_path: Path) -> None:
    model = net()
    precisions = 'precision="16-true": an offloaded module needs one of 32-true, bf16-true, bf16-mixed'
    refused(tmp_path, store, precisions, model, precision="16-true")
    by_value = (
        'gradient_clip_algorithm="value": the tiered optimizers can only clip by norm. Leave it out, or pass "norm"'
    )
    refused(tmp_path, store, by_value, model, gradient_clip_val=0.1, gradient_clip_algorithm="value")
    model.make = adamw
    foreign = (
        "configure_optimizers returned AdamW for layers.0.0.weight, whose gradient is in the store. Return "
        "megatrain.TieredAdamW(self.parameters(), ...)"
    )
    refused(tmp_path, store, foreign, model)
    taken = 'this store already has a module "model". Choose another: megatrain.offload(..., name="...")'
    refused(tmp_path, store, taken)
    assert model.losses == []
    without_folder = (
        "the trainer saves checkpoints, but the store has no folder for state. Use open_store(path=...), "
        "open_store(nvme=...), or Trainer(enable_checkpointing=False)"
    )
    with open_store(ram="1MiB") as only_ram:
        refused(tmp_path, only_ram, without_folder, enable_checkpointing=True)


def test_two_norms_and_a_cached_optimizer_are_refused(tmp_path: Path) -> None:
    twice = net(lambda parameters: TieredAdamW(parameters, max_grad_norm=1.0))
    with small_store(tmp_path / "one") as store:
        message = "gradient_clip_val=0.1 differs from TieredAdamW(max_grad_norm=1.0). Set only one of them"
        refused(tmp_path, store, message, twice, gradient_clip_val=0.1)
    kept: list[torch.optim.Optimizer] = []

    def cached(parameters: Any) -> torch.optim.Optimizer:
        kept.extend([] if kept else [TieredAdamW(parameters)])
        return kept[0]

    model = net(cached)
    with small_store(tmp_path / "two") as store:
        trainer(tmp_path, store).fit(model, data())
        message = "configure_optimizers returned the optimizer of the last fit. Create a new one there"
        refused(tmp_path, store, message, model)


def test_missing_lightning_error_names_the_extra() -> None:
    code = """
import sys
sys.modules["lightning"] = None
import megatrain
try:
    megatrain.lightning
except ModuleNotFoundError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 'pip install -e ".[lightning]"' in done.stdout
