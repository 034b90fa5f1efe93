"""What the host costs beside computing: steps of a model so small that nothing else takes time."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from megatrain.api import load_config, measure_ticks, plan_run, resolve, work_of_phases

_MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
_CONFIG = """
task = "pretrain"
device = "cpu"
output_dir = "{folder}/out"
[model]
model_name_or_path = "{folder}"
train_from_scratch = true
[precision]
compute_dtype = "float32"
[data]
max_length = 8
[[data.train]]
path = "{folder}/text.txt"
[training]
per_device_train_batch_size = 1
recompute = "full"
[tiers.ram]
size = "1GiB"
"""


def launches_per_s(*, seconds: float) -> float:
    """Return the operators of forward and backward that one thread calls per second, with the Python code around them.

    By steps of a tiny model on the CPU, with the engine of a run.

    Args:
        seconds: about how long it takes, beside loading what makes models.
    """
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(_MODEL), encoding="utf-8")
        config = Path(folder, "run.toml")
        config.write_text(_CONFIG.format(folder=folder), encoding="utf-8")
        plan = plan_run(resolve(load_config(config).config))
        ticks = measure_ticks(plan, budget_s=seconds)
    timed = zip(plan.program.ticks, ticks.seconds, strict=True)
    launching_s = sum(tick_s for tick, tick_s in timed if tick.phase != "update")
    return sum(work.launches for work in work_of_phases(plan).values()) / launching_s
