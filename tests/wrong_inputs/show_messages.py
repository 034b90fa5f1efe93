"""Prints the messages for all wrong inputs, for human readers: python tests/wrong_inputs/show_messages.py [WORD]."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp()

from wrong_inputs.all_cases import all_cases  # noqa: E402
from wrong_inputs.judge_message import ask, faults  # noqa: E402
from wrong_inputs.workplace import make_base_model, make_workplace  # noqa: E402


def main(word: str) -> None:
    counts: Counter[tuple[str, int, str]] = Counter()
    with tempfile.TemporaryDirectory() as name:
        model = make_base_model(Path(name) / "base")
        for case in all_cases():
            if word not in f"{case.kind} / {case.name}":
                continue
            print(f"\n== {case.kind} / {case.name}")
            for command in case.commands:
                work = make_workplace(Path(name) / "work", model)
                locus = case.spoil(work)
                work.write_config()
                start = time.perf_counter()
                answer = ask(command, work)
                wrong = faults(case, answer, locus)
                counts[case.kind, case.code, "FAULTY" if wrong else "good"] += 1
                print(f"{command}: exit {answer.code}, {time.perf_counter() - start:.2f} s")
                for problem in answer.problems:
                    print(f"    {problem.replace(name, '...')}")
                for each in wrong:
                    print(f"  FAULT {each[:700].replace(name, '...')}")
    print()
    for (kind, code, verdict), count in sorted(counts.items()):
        print(f"{kind:35} exit {code}  {verdict:6} {count:4}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")
