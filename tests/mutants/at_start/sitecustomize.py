"""Starts the recording in every interpreter that has this folder on `PYTHONPATH`: `mutants.recording`."""

import os
import sys

if "MUTANTS_RECORD" in os.environ:
    sys.path.append(os.environ["MUTANTS_TESTS"])
    try:
        from mutants import recording
    finally:
        sys.path.pop()
    recording.start()
