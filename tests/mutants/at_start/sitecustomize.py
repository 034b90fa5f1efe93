"""Starts `mutants.recording` in every interpreter that has this folder on `PYTHONPATH`, if `MUTANTS_RECORD` is set."""

import os
import sys

if "MUTANTS_RECORD" in os.environ:
    sys.path.append(os.environ["MUTANTS_TESTS"])
    try:
        from mutants import recording
    finally:
        sys.path.pop()
    recording.start()
