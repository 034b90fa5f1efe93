"""All wrong inputs, in a fixed order, with unique names."""

from __future__ import annotations

from wrong_inputs import (
    break_config,
    break_files,
    break_rows,
    damage_model,
    damage_tokenizer,
    mutate_config,
    spoil_place,
)
from wrong_inputs.workplace import WrongInput

PARTS = (mutate_config, break_config, break_rows, break_files, damage_model, damage_tokenizer, spoil_place)


def all_cases() -> list[WrongInput]:
    found = [case for part in PARTS for case in part.cases()]
    names = [f"{case.kind} / {case.name}" for case in found]
    assert len(set(names)) == len(names), [name for name in names if names.count(name) > 1]
    return found
