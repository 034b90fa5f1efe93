"""Models given by hub id, and exports pushed to the hub. A fake server implements the hub's protocol."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from fakes.hub_server import TOKEN, FakeHub, serving
from processes.saved_run import ROOT, SavedRun, command_words, make_run

ID = "someone/tiny"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> SavedRun:
    """Return a run folder with some text. Its model, in three files, exists only on the hub."""
    run = make_run(tmp_path_factory.mktemp("hub") / "w")
    source = run.folder / "model"
    whole = AutoModelForCausalLM.from_pretrained(source)
    (source / "model.safetensors").unlink()
    whole.save_pretrained(source, max_shard_size="150kB")
    assert len(list(source.glob("model-*.safetensors"))) == 3
    (source / "modeling_evil.py").write_text("raise SystemExit('code of a model ran')")
    (source / "pytorch_model.bin").write_bytes(b"pickle")
    source.rename(run.folder.parent / "source")
    return run


@pytest.fixture
def hub(made: SavedRun) -> Iterator[FakeHub]:
    hub = FakeHub()
    hub.add(ID, made.folder.parent / "source")
    with serving(hub):
        yield hub


class Machine:
    """Simulated machine with an empty hub cache and one run."""

    def __init__(self, hub: FakeHub, made: SavedRun, folder: Path) -> None:
        self.run = made.copy(folder / "w")
        self.hub, self.cache = hub, folder / "hf"

    def call(self, *words: object, **environment: str) -> subprocess.CompletedProcess[str]:
        # Start a new interpreter, because huggingface_hub reads environment variables when it is imported.
        base = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
        own = {"HF_ENDPOINT": self.hub.address, "HF_HOME": str(self.cache), "HF_HUB_DISABLE_XET": "1"}
        return subprocess.run(
            [*command_words(), *map(str, words)], cwd=ROOT, env={**base, **own, "OMP_NUM_THREADS": "1", **environment},
            capture_output=True, text=True, timeout=240,
        )  # fmt: skip

    def config(self, name: str = ID, *lines: str) -> Path:
        path = self.run.write_config(steps=2, model="\n".join(lines))
        path.write_text(path.read_text().replace('"model"', f'"{name}"', 1))
        return path


@pytest.fixture
def machine(hub: FakeHub, made: SavedRun, tmp_path: Path) -> Machine:
    return Machine(hub, made, tmp_path)


def shards(hub: FakeHub) -> list[tuple[str, str]]:
    return [(path, wanted) for _, path, wanted in hub.asked if path.endswith(".safetensors")]


@pytest.mark.slow
def test_interrupted_weight_download_is_resumed_by_the_run(machine: Machine) -> None:
    hub, config = machine.hub, machine.config()
    planned = machine.call("plan", config)
    assert planned.returncode == 0 and planned.stdout.startswith("tiny  "), planned
    names = {path for _, path, _ in hub.asked}
    assert "config.json" in names and "tokenizer.json" in names
    assert not shards(hub) and not names & {"modeling_evil.py", "pytorch_model.bin"}

    second = "model-00002-of-00003.safetensors"
    hub.cut[second] = 40_000
    broken = machine.call("run", config)
    assert broken.returncode == 2, broken
    assert f"error: {ID}: " in broken.stderr and "cannot be reached" in broken.stderr, broken.stderr
    assert "Traceback" not in broken.stderr
    hub.cut.clear()
    hub.asked.clear()
    done = machine.call("run", config)
    assert done.returncode == 0, done.stderr
    third = "model-00003-of-00003.safetensors"
    assert [name for name, _ in shards(hub)] == [second, third], "no shard is fetched twice"
    assert f"fetched {third}" in done.stderr
    saved = (machine.run.out / "config.resolved.toml").read_text()
    assert f'model_name_or_path = "{ID}"' in saved and f'revision = "{hub.commit}"' in saved

    # Once the model is cached, no network is needed.
    hub.asked.clear()
    exported = machine.call("export", machine.run.out, machine.run.folder / "e", HF_ENDPOINT="http://127.0.0.1:9")
    assert exported.returncode == 0 and not hub.asked, exported.stderr

    # The result is pushed to the hub.
    out = machine.run.folder / "sent"
    pushed = machine.call("export", machine.run.out, out, "--push-to-hub", "me/result", "--private", HF_TOKEN=TOKEN)
    assert pushed.returncode == 0 and f"hub    {hub.address}/me/result" in pushed.stdout, pushed
    sent = hub.sent["me/result"]
    assert {name: data for name, data in sent.items() if name != ".gitattributes"} == {
        path.name: path.read_bytes() for path in out.iterdir()
    }


@pytest.mark.slow
def test_hub_downloads_and_failed_uploads_are_reported(machine: Machine) -> None:
    config, out = machine.config(), machine.run.folder / "sent"
    checked = machine.call("check", config)
    assert checked.returncode == 0 and "`run` fetches" in checked.stdout and "in 3 files" in checked.stdout, checked
    assert machine.call("run", config).returncode == 0
    machine.hub.asked.clear()
    again = machine.call("run", config, "--max-steps", "3", HF_ENDPOINT="http://127.0.0.1:9")
    assert again.returncode == 0 and not machine.hub.asked, again.stderr
    refused = machine.call("export", machine.run.out, out, "--push-to-hub", "me/result", HF_TOKEN="wrong")
    assert refused.returncode == 2 and "HF_TOKEN" in refused.stderr and out.is_dir(), refused.stderr


@pytest.mark.parametrize(
    ("name", "line", "environment", "message"),
    [
        ("someone/tinny", "", {}, "is neither a folder here nor a model on the hub"),
        ("gated/tiny", "", {}, "is gated: accept its terms at http://127.0.0.1"),
        (ID, 'revision = "v9"', {}, "has no revision 'v9' on the hub"),
        (ID, "", {"HF_ENDPOINT": "http://127.0.0.1:9"}, "http://127.0.0.1:9 cannot be reached"),
        (ID, "", {"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set"),
    ],
)
def test_failed_fetches_are_reported(
    machine: Machine, name: str, line: str, environment: dict[str, str], message: str
) -> None:
    result = machine.call("run", machine.config(name, line), **environment)
    assert result.returncode == 2, result
    assert message in result.stderr and "Traceback" not in result.stderr, result.stderr
    assert "Retrying" not in result.stderr
    assert not machine.run.out.exists()


def test_pickles_are_not_fetched(machine: Machine) -> None:
    files = machine.hub.models[ID]
    for name in [name for name in files if "safetensors" in name]:
        del files[name]
    result = machine.call("run", machine.config())
    assert result.returncode == 2 and "has no model.safetensors on the hub" in result.stderr, result.stderr
