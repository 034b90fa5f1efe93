"""Training resumes bit for bit from ``state_dict``, even with other tier sizes and folders."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megatrain
from megatrain.embed.block_homes import shared_state
from oracles.embedded import assert_same_weights, pair_of, run_backward, small_store
from processes import warm
from tiered import GenerationError, TieredStore, read_manifest

ROOT = Path(__file__).resolve().parents[3]


def make() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Sequential(nn.Linear(16, 16), nn.Tanh()), nn.Linear(16, 4)).bfloat16()


def batch(step: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(step)).bfloat16()


def steps(module: nn.Module, optimizer: Any, first: int, last: int) -> list[float]:
    """Train and return the losses."""
    losses = []
    for step in range(first, last):
        losses.append(float(run_backward(module, batch(step)).float().square().mean()))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def build(store: TieredStore, seed: int = 0, **options: Any) -> tuple[nn.Module, Any]:
    module, _ = pair_of(make, seed)
    megatrain.offload(module, store, **options)
    return module, megatrain.TieredAdamW(module.parameters(), lr=1e-2, max_grad_norm=0.5)


def saved_run(folder: Path, file: Path) -> tuple[dict[str, Tensor], list[float]]:
    """Train three steps, save, and train three more. Return the final weights, and the losses after the save."""
    with small_store(folder) as store:
        module, optimizer = build(store)
        steps(module, optimizer, 0, 3)
        torch.save(optimizer.state_dict(), file)
        losses = steps(module, optimizer, 3, 6)
        return {name: numbers.clone() for name, numbers in module.state_dict().items()}, losses


@pytest.mark.parametrize("where", ["same", "moved", "another", "path alone"])
def test_training_resumes_bitwise_equal(where: str, tmp_path: Path) -> None:
    file, folder = tmp_path / "optimizer.pt", tmp_path / "one"
    weights, losses = saved_run(folder, file)
    state = torch.load(file, weights_only=True)
    assert state["state"] == {} and 1_000 < file.stat().st_size < 5_000
    if where == "moved":
        folder = folder.rename(tmp_path / "elsewhere")
    homes: dict[str, Any] = {"same": {"weights": "nvme"}, "moved": {"weights": "ram"}}.get(where, {})
    if where == "path alone":
        store = megatrain.open_store(ram="32MiB", path=folder)
    else:
        store = small_store(folder if where != "another" else tmp_path / "new", "32MiB")
    with store:
        module, optimizer = build(store, seed=9, **homes)
        optimizer.load_state_dict(state)
        assert steps(module, optimizer, 3, 6) == losses
        found = module.state_dict()
        assert all(torch.equal(numbers, found[name]) for name, numbers in weights.items())
        again = optimizer.state_dict()["tiered"]
        assert again["steps"] == dict.fromkeys(range(6), 6)
    with small_store(tmp_path / "more") as store:
        module, optimizer = build(store, seed=9)
        optimizer.load_state_dict({**optimizer.state_dict(), "tiered": again})
        assert all(torch.equal(numbers, module.state_dict()[name]) for name, numbers in weights.items())


def test_equal_generation_number_of_another_run_is_not_loaded(tmp_path: Path) -> None:
    """Both stores have committed a generation 1, and nothing has changed since."""
    with small_store(tmp_path / "one") as store:
        module, optimizer = build(store)
        steps(module, optimizer, 0, 3)
        state = optimizer.state_dict()
        expected = {name: numbers.clone() for name, numbers in module.state_dict().items()}
    with small_store(tmp_path / "two") as store:
        module, optimizer = build(store, seed=9)
        steps(module, optimizer, 7, 9)
        own = optimizer.state_dict()
        assert own["tiered"]["generation"] == state["tiered"]["generation"] == 1
        optimizer.load_state_dict(state)
        found = module.state_dict()
        assert all(torch.equal(numbers, found[name]) for name, numbers in expected.items())
        optimizer.load_state_dict(own)
        assert not torch.equal(module.state_dict()["0.weight"], expected["0.weight"])


def test_replaced_generations_are_reported_without_a_load(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for run in range(2):
        caplog.clear()
        with small_store(tmp_path / "one") as store:
            module, optimizer = build(store)
            steps(module, optimizer, 0, 1)
            optimizer.state_dict()
            assert ("contains generations 1, 2 of an earlier program" in caplog.text) == (run == 1)
            steps(module, optimizer, 1, 2)
            caplog.clear()
            state = optimizer.state_dict()
            assert "earlier program" not in caplog.text
    with small_store(tmp_path / "one") as store:
        module, optimizer = build(store)
        optimizer.load_state_dict(state)
        steps(module, optimizer, 2, 3)
        optimizer.state_dict()
        assert "earlier program" not in caplog.text


def test_saving_twice_without_a_change_commits_once(tmp_path: Path) -> None:
    with small_store(tmp_path) as store:
        module, optimizer = build(store)
        assert optimizer.state_dict()["tiered"]["generation"] is None
        optimizer.load_state_dict(optimizer.state_dict())  # as accelerate does
        steps(module, optimizer, 0, 1)
        first, second = optimizer.state_dict(), optimizer.state_dict()
        assert first == second and first["tiered"]["generation"] == 1
        optimizer.load_state_dict(first)
        assert shared_state(store).last_commit[1] == 1
        steps(module, optimizer, 1, 2)
        assert optimizer.state_dict()["tiered"]["generation"] == 2


def test_loading_an_earlier_state_repeats_the_losses(tmp_path: Path) -> None:
    with small_store(tmp_path) as store:
        module, optimizer = build(store)
        steps(module, optimizer, 0, 2)
        state = optimizer.state_dict()
        losses = steps(module, optimizer, 2, 5)
        run_backward(module, batch(9))  # loading drops these gradients and the pending update
        optimizer.step()
        run_backward(module, batch(10))
        optimizer.load_state_dict(state)
        assert steps(module, optimizer, 2, 5) == losses


def test_two_optimizers_of_one_store_are_saved_together(tmp_path: Path) -> None:
    """A commit by one optimizer includes the deferred updates of the other."""
    results, states = [], list[Any]()
    for is_resumed in (False, True):
        with small_store(tmp_path / "store") as store:
            pairs = []
            for number in range(2):
                module, _ = pair_of(make, number)
                megatrain.offload(module, store, name=f"m{number}")
                pairs.append((module, megatrain.TieredAdamW(module.parameters(), lr=1e-2)))
            if is_resumed:
                for (_, optimizer), state in zip(pairs, states, strict=True):
                    optimizer.load_state_dict(state)
            else:
                for module, optimizer in pairs:
                    steps(module, optimizer, 0, 3)
                states = [optimizer.state_dict() for _, optimizer in pairs]
                assert len({state["tiered"]["generation"] for state in states}) == 1
            results.append([steps(module, optimizer, 3, 5) for module, optimizer in pairs])
    assert results[0] == results[1]


@pytest.mark.parametrize("first", ["model", "optimizer"])
def test_the_order_of_loading_does_not_matter(first: str, tmp_path: Path) -> None:
    """Loading the same weights again does not change the low halves of their masters."""
    with small_store(tmp_path / "one") as store:
        module, optimizer = build(store)
        steps(module, optimizer, 0, 3)
        state = optimizer.state_dict()
        weights = {name: numbers.clone() for name, numbers in module.state_dict().items()}
        losses = steps(module, optimizer, 3, 6)
    with small_store(tmp_path / "one") as store:
        module, optimizer = build(store, seed=9)
        for what in ("model", "optimizer") if first == "model" else ("optimizer", "model"):
            if what == "model":
                module.load_state_dict(weights)
            else:
                optimizer.load_state_dict(state)
        assert steps(module, optimizer, 3, 6) == losses


@pytest.mark.parametrize("offload_gradients", [False, True])
def test_ordinary_parameters(offload_gradients: bool, tmp_path: Path) -> None:
    """The module's ``state_dict`` has the bf16 weights. The optimizer's generation has their masters' low halves."""
    runs: list[Any] = []
    for is_resumed in (False, True):
        module, _ = pair_of(make)
        with small_store(tmp_path / "store") as store:
            optimizer = megatrain.TieredAdamW(
                module.parameters(), lr=1e-2, store=store, offload_gradients=offload_gradients, state="nvme"
            )
            if is_resumed:
                optimizer.load_state_dict(runs[0])
                module.load_state_dict(runs[1])
            else:
                steps(module, optimizer, 0, 3)
                runs += [optimizer.state_dict(), {name: one.clone() for name, one in module.state_dict().items()}]
            runs.append(steps(module, optimizer, 3, 6))
    assert runs[2] == runs[3]


def test_mismatched_state_is_refused_without_loss(tmp_path: Path) -> None:
    with small_store(tmp_path / "one") as store:
        module, optimizer = build(store)
        steps(module, optimizer, 0, 2)
        good = optimizer.state_dict()
        before = {name: numbers.clone() for name, numbers in module.state_dict().items()}

        def without(group: str, **values: Any) -> dict[str, Any]:
            return {**good, group: {**good[group], **values}}

        shared_state(store).note_change()
        steps_after = dict(optimizer.steps)
        number, folder = good["tiered"]["generation"], Path(str(store.path)).resolve()
        advice = (
            "A store keeps only its newest generations, see open_store(keep_generations=...). If its folder was moved, "
            "open the store at the new path"
        )
        with pytest.raises(GenerationError) as unread:
            read_manifest(folder, 77)
        absent = f"{folder}: {unread.value}"
        for state, kind, message in (
            ({**good, "param_groups": []}, ValueError, "the saved state has groups of [] parameters, but this"),
            (
                without("tiered", blocks="other"),
                ValueError,
                f"generation {number} of {store.path} has different parameters or a different kind of optimizer. "
                "Create the same model, frozen parameters and optimizer as when it was saved",
            ),
            (
                without("tiered", format=2),
                ValueError,
                "this state was saved by a newer version (format 2): update megatrain-tier",
            ),
            (
                without("tiered", shards=[2, 5]),
                ValueError,
                "this state names a generation of rank 2 of 5, but this is one whole model. Each rank can load only "
                "its own state, with the same number of ranks. For checkpoints that any number of ranks can load, "
                'create TieredAdamW with checkpoint="tensors"',
            ),
            (
                without("tiered", generation=77),
                GenerationError,
                f"the optimizer's state names generation 77 of {store.path}, which does not exist: {absent}. {advice}",
            ),
            (
                without("tiered", mark="of another run"),
                GenerationError,
                f"the optimizer's state names generation {number} of {store.path}, which does not exist: {folder} has "
                f"a generation {number} of a different run. {advice}",
            ),
            (
                without("tiered", generation=None),
                ValueError,
                "this state is from before the first step and contains no values. Start again",
            ),
        ):
            with pytest.raises(kind) as caught:
                optimizer.load_state_dict(state)
            assert str(caught.value).startswith(message)
        assert optimizer.steps == steps_after
        assert all(torch.equal(numbers, module.state_dict()[name]) for name, numbers in before.items())
    with small_store(tmp_path / "two") as store:
        other = nn.Linear(3, 3)
        megatrain.offload(other, store)
        optimizer = megatrain.TieredAdamW(other.parameters())
        good["param_groups"][0]["params"] = [0, 1]
        with pytest.raises(ValueError, match="different parameters"):
            optimizer.load_state_dict(good)


def test_missing_generation_is_refused(tmp_path: Path) -> None:
    with small_store(tmp_path) as store:
        module, optimizer = build(store)
        states = []
        for step in range(4):
            steps(module, optimizer, step, step + 1)
            states.append(optimizer.state_dict())
        with pytest.raises(GenerationError, match=r"generation 1 of .*keep_generations"):
            optimizer.load_state_dict(states[0])
        optimizer.load_state_dict(states[2])


def test_state_dict_of_a_store_without_a_folder_raises() -> None:
    with megatrain.open_store(ram="8MiB") as store:
        module, optimizer = build(store)
        steps(module, optimizer, 0, 1)
        with pytest.raises(GenerationError, match=r"open_store\(path="):
            optimizer.state_dict()
        assert optimizer.full_state_dict()["state"]


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
@pytest.mark.parametrize("is_tiered", [False, True])
def test_optimizer_state_round_trips_through_torch(kind: str, is_tiered: bool, tmp_path: Path) -> None:
    def make_both(module: nn.Module, store: TieredStore) -> list[Any]:
        if kind == "adamw":
            return [torch.optim.AdamW(module.parameters(), lr=1e-2), megatrain.TieredAdamW]
        return [torch.optim.SGD(module.parameters(), lr=1e-2, momentum=0.9), megatrain.TieredSGD]

    names = ("exp_avg", "exp_avg_sq") if kind == "adamw" else ("momentum_buffer",)
    plain, module = pair_of(lambda: make().float())
    with small_store(tmp_path) as store:
        if is_tiered:
            megatrain.offload(module, store)
        other, cls = make_both(plain, store)
        options = {"momentum": 0.9} if kind == "sgd" else {}
        optimizer = cls(module.parameters(), lr=1e-2, store=store, **options)
        for step in range(3):
            run_backward(module, batch(step).float())
            optimizer.step()
            optimizer.zero_grad()
        full = optimizer.full_state_dict()
        torch.save(full, tmp_path / "full.pt")
        other.load_state_dict(torch.load(tmp_path / "full.pt", weights_only=True))
        plain.load_state_dict(module.state_dict())
        run_backward(plain, batch(7).float())
        other.step()
        third, _ = pair_of(lambda: make().float())
        back = cls(third.parameters(), lr=1.0, store=store, name="back", **options)
        back.load_state_dict(other.state_dict())
        assert back.param_groups[0]["lr"] == 1e-2
        for one, two, three in zip(plain.parameters(), third.parameters(), module.parameters(), strict=True):
            for name in names:
                assert torch.equal(other.state[one][name], back.state[two][name])
                assert full["state"] and not torch.equal(optimizer.state[three][name], back.state[two][name])
            if kind == "adamw":
                assert float(back.state[two]["step"]) == 4
        wrong = other.state_dict()
        wrong["state"][0] = {**wrong["state"][0], names[0]: torch.zeros(1)}
        with pytest.raises(ValueError, match="does not have the shape"):
            back.load_state_dict(wrong)
        back.load_state_dict({**other.state_dict(), "state": {}})
        assert all(parameter not in back.state for parameter in third.parameters())
        assert not back.full_state_dict()["state"]


def test_unsupported_torch_optimizer_variants_are_refused(tmp_path: Path) -> None:
    _, module = pair_of(make)
    with small_store(tmp_path) as store:
        optimizer = megatrain.TieredAdamW(module.parameters(), store=store)
        other = torch.optim.AdamW(module.parameters(), amsgrad=True)
        with pytest.raises(ValueError, match="amsgrad"):
            optimizer.load_state_dict(other.state_dict())


_CHILD = """
import sys
sys.path[:0] = [{tests!r}, {root!r}]
from pathlib import Path
import torch
from megatrain.embed import stores
from test_resume_embedded import build, steps
from oracles.embedded import small_store

folder = Path({folder!r})
with small_store(folder / "store") as store:
    module, optimizer = build(store)
    done = 0
    while True:
        steps(module, optimizer, done, done + 1)
        done += 1
        torch.save(optimizer.state_dict(), folder / "new.pt")
        (folder / "new.pt").rename(folder / f"step{{done}}.pt")
        print(done, flush=True)
"""


def test_training_resumes_after_a_kill_during_or_between_commits(tmp_path: Path) -> None:
    """After a kill, the newest saved file names a complete generation, and training continues from it bit for bit."""
    code = _CHILD.format(tests=str(Path(__file__).parent), root=str(ROOT / "tests"), folder=str(tmp_path))
    child = warm.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    for line in child.stdout:
        if int(line) == 4:
            break
    time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    saved = max(int(path.stem.removeprefix("step")) for path in tmp_path.glob("step*.pt"))
    with small_store(tmp_path / "store") as store:
        module, optimizer = build(store, seed=9)
        optimizer.load_state_dict(torch.load(tmp_path / f"step{saved}.pt", weights_only=True))
        losses = steps(module, optimizer, saved, saved + 2)
    shutil.rmtree(tmp_path / "store")
    with small_store(tmp_path / "store") as store:
        module, optimizer = build(store)
        assert steps(module, optimizer, 0, saved + 2)[saved:] == losses


def test_weights_loaded_by_load_state_dict_match_saved_weights(tmp_path: Path) -> None:
    file = tmp_path / "optimizer.pt"
    weights, _ = saved_run(tmp_path / "one", file)
    plain, _ = pair_of(make)
    plain.load_state_dict(weights)
    with small_store(tmp_path / "two") as store:
        module, _ = build(store, seed=9)
        module.load_state_dict(weights)
        assert_same_weights(plain, module)
