"""One side of `disk_offload.py`: a process that scores rows or continues prompts for each line of standard input."""

from __future__ import annotations

import gc
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file

from bench.common import high_water_bytes, reset_high_water
from bench.compare.worker import RESULT_FD, drive_bytes

#: Label of a token that is not scored.
IGNORED_LABEL = -100


@dataclass(frozen=True)
class ForwardJob:
    """Task and settings of one side. All sides compute in fp32.

    Attributes:
        side: "ours" or "accelerate".
        model: Hugging Face folder with weights.
        folder: Writable folder of the side.
        ram_bytes: Size of our RAM tier, or accelerate's ``max_memory`` for the CPU.
        num_threads: Number of torch threads.
        shape: Number of micro-batches in our pass, rows per micro-batch, and tokens per row.
        text: File that our side scores.
        rows: Safetensors file with the token ids and labels of that text, which accelerate scores.
        prompts, max_new_tokens: Prompts, all in one batch, and the maximum number of new greedy tokens for each.
    """

    side: str
    model: str
    folder: str
    ram_bytes: int
    num_threads: int
    shape: tuple[int, int, int]
    text: str
    rows: str
    prompts: tuple[str, ...]
    max_new_tokens: int


@dataclass(frozen=True)
class Turn:
    """Request to a side.

    Attributes:
        task: "score" or "generate".
        rows_per_forward: Rows that accelerate scores in one forward.
        keeps_cache: Whether the model's files are in the page cache when the turn begins, and stay there.
    """

    task: str
    rows_per_forward: int
    keeps_cache: bool


@dataclass(frozen=True)
class Outcome:
    """Result of a turn.

    Attributes:
        seconds: Duration of the passes in seconds, without opening the model.
        mean_log_prob, num_scored: Mean log-probability of the scored tokens, and their number.
        tokens: New token ids for each prompt, up to the end-of-text token.
        planned_bytes, moved_bytes: Planned and actually moved bytes by link, for our side only.
    """

    seconds: float
    mean_log_prob: float = math.nan
    num_scored: int = 0
    tokens: Sequence[Sequence[int]] = ()
    planned_bytes: Mapping[str, int] | None = None
    moved_bytes: Mapping[str, int] | None = None


class ForwardSide(Protocol):
    """Protocol of a side that has loaded its model."""

    def about(self) -> dict[str, Any]:
        """Return facts for the report."""
        ...

    def take(self, turn: Turn) -> Outcome:
        """Score or generate as a turn requests, and return the outcome."""
        ...


def main() -> None:
    """Answer each turn on standard input (one per line) with a line of JSON, until the input ends."""
    # Libraries print to standard output, so redirect it to the log and keep the pipe for this program.
    with os.fdopen(os.dup(RESULT_FD), "w", buffering=1) as answers:
        os.dup2(sys.stderr.fileno(), RESULT_FD)
        os.environ["HF_HUB_OFFLINE"] = "1"
        values = json.loads(sys.argv[1])
        job = ForwardJob(**{**values, "shape": tuple(values["shape"]), "prompts": tuple(values["prompts"])})
        torch.set_num_threads(job.num_threads)
        start_s = time.perf_counter()
        side: ForwardSide = OursSide(job) if job.side == "ours" else AccelerateSide(job)
        print(json.dumps({"start_s": time.perf_counter() - start_s, **side.about()}), file=answers)
        for line in sys.stdin:
            turn = Turn(**json.loads(line))
            (read_into_cache if turn.keeps_cache else drop_cached)(Path(job.model))
            gc.collect()  # our side opens a store per turn: free the previous one, as the end of a command would
            reset_high_water()
            before = drive_bytes()["read_bytes"]
            outcome = side.take(turn)
            measured = {"read_bytes": drive_bytes()["read_bytes"] - before, "peak_rss": high_water_bytes()}
            print(json.dumps({**asdict(outcome), **measured}), file=answers)


def drop_cached(model: Path) -> None:
    """Drop a model's weights from the page cache, except pages that a process has mapped."""
    for path in model.glob("*.safetensors"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_into_cache(model: Path) -> None:
    """Read a model's weights into the page cache."""
    for path in model.glob("*.safetensors"):
        with path.open("rb", buffering=0) as file:
            memory = bytearray(16 << 20)
            while file.readinto(memory):
                pass


class OursSide:
    """Our `score` and `generate`, which bypass the page cache. Every turn opens a new store."""

    def __init__(self, job: ForwardJob) -> None:
        self._job, self._num_turns = job, 0

    def about(self) -> dict[str, Any]:
        """Return the version of transformers, which can affect the results."""
        import transformers

        return {"version": transformers.__version__}

    def take(self, turn: Turn) -> Outcome:
        """Score the text or continue the prompts, depending on the turn."""
        return self._score() if turn.task == "score" else self._generate()

    def _score(self) -> Outcome:
        from megatrain.extras.scoring import Scorer

        self._num_turns += 1
        out = Path(self._job.folder) / f"out{self._num_turns}"
        summary = Scorer(scoring_config(self._job, out)).run()
        shutil.rmtree(out)
        return Outcome(
            summary.seconds,
            summary.mean_log_prob,
            summary.num_scored_tokens,
            planned_bytes=summary.planned_bytes,
            moved_bytes=summary.link_bytes,
        )

    def _generate(self) -> Outcome:
        found = generator(self._job)
        completions = found.run()
        return Outcome(
            found.seconds,
            tokens=[completion.token_ids for completion in completions],
            planned_bytes=found.planned_bytes,
            moved_bytes=found.moved_bytes,
        )


def scoring_config(job: ForwardJob, out: Path) -> Any:
    """Return our scoring config for a job."""
    from megatrain.config.schema import RunConfig

    num_micro_batches, rows, length = job.shape
    return RunConfig.model_validate(
        {
            "task": "pretrain",
            "output_dir": str(out),
            "device": "cpu",
            "model": {"model_name_or_path": job.model, "attn_implementation": "sdpa"},
            "precision": {"compute_dtype": "float32"},
            "data": {"max_length": length, "train": [{"path": job.text}], "cache_dir": "none", "packing": False},
            "training": {"per_device_train_batch_size": rows, "gradient_accumulation_steps": num_micro_batches},
            "score": {"top_k": 0},
            "tiers": {"ram": {"size": f"{job.ram_bytes}B"}},
        }
    )


def generator(job: ForwardJob) -> Any:
    """Return a generator for a job's prompts. All prompts are in one micro-batch, as on the other side."""
    from megatrain.extras.generation import Generator, config_for_prompts
    from megatrain.tasks.prompts import GenerationSettings

    config = scoring_config(job, Path(job.folder) / "generate")
    config = config_for_prompts(config, len(job.prompts), len(job.prompts))
    return Generator(config, job.prompts, GenerationSettings(job.max_new_tokens, 0.0, 0, ""))


class AccelerateSide:
    """Side that uses transformers with a device map. Each forward reads the weights beyond ``max_memory`` from disk."""

    def __init__(self, job: ForwardJob) -> None:
        import accelerate
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._job, self._version = job, accelerate.__version__
        self._model = AutoModelForCausalLM.from_pretrained(
            job.model,
            dtype=torch.float32,
            attn_implementation="sdpa",
            device_map="auto",
            max_memory={"cpu": job.ram_bytes},
            offload_folder=str(Path(job.folder) / "offload"),
        ).eval()
        self._tokenizer = AutoTokenizer.from_pretrained(job.model, padding_side="left")
        self._drop_s = 0.0

    def about(self) -> dict[str, Any]:
        """Return accelerate's version, the bytes of offloaded parameters, and whether any are offloaded to disk."""
        offloaded = sum(parameter.numel() for parameter in self._model.parameters() if parameter.is_meta)
        return {
            "version": self._version,
            "offloaded_bytes": 4 * offloaded,
            "offloads": "disk" in self._model.hf_device_map.values(),
        }

    def take(self, turn: Turn) -> Outcome:
        """Score the rows, or continue the prompts."""
        with self._cache(turn.keeps_cache), torch.no_grad():
            return self._score(turn.rows_per_forward) if turn.task == "score" else self._generate()

    @contextmanager
    def _cache(self, keeps: bool) -> Iterator[None]:
        """Unless ``keeps``, drop the model's files from the page cache before every forward, and time the drops."""
        self._drop_s = 0.0
        if keeps:
            yield
            return

        def drop(*_: Any) -> None:
            start_s = time.perf_counter()
            drop_cached(Path(self._job.model))
            self._drop_s += time.perf_counter() - start_s

        hook = self._model.register_forward_pre_hook(drop)
        try:
            yield
        finally:
            hook.remove()

    def _score(self, rows_per_forward: int) -> Outcome:
        batch = load_file(self._job.rows)
        total, count = 0.0, 0
        start_s = time.perf_counter()
        for first in range(0, len(batch["input_ids"]), rows_per_forward):
            rows = {name: part[first : first + rows_per_forward] for name, part in batch.items()}
            labels = rows.pop("labels")[:, 1:]
            logits = self._model(**rows, use_cache=False).logits[:, :-1]
            for scores, row in zip(logits, labels, strict=True):  # one row at a time, because log_softmax makes a copy
                asked = row != IGNORED_LABEL
                found = scores.log_softmax(-1)[asked].gather(1, row[asked].unsqueeze(1))
                total += float(found.sum(dtype=torch.float64))
                count += int(asked.sum())
        return Outcome(time.perf_counter() - start_s - self._drop_s, total / count, count)

    def _generate(self) -> Outcome:
        inputs = self._tokenizer(list(self._job.prompts), return_tensors="pt", padding=True)
        start_s = time.perf_counter()
        found = self._model.generate(**inputs, max_new_tokens=self._job.max_new_tokens, do_sample=False)
        seconds = time.perf_counter() - start_s - self._drop_s
        new = found[:, inputs["input_ids"].shape[1] :].tolist()
        return Outcome(seconds, tokens=[_to_end(tokens, self._tokenizer.eos_token_id) for tokens in new])


def _to_end(tokens: Sequence[int], end: int) -> Sequence[int]:
    """Return the tokens up to and including the end-of-text token, without the padding that follows."""
    return tokens[: tokens.index(end) + 1] if end in tokens else tokens
