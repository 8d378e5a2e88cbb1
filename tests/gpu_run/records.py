"""Records of a GPU run: a line of JSON for each test (pytest's id) and program (`program SEED`), as it ends.

{"id", "outcome", "seconds", "at"}: so a part that is stopped loses nothing. The last record of an id counts.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def program(seed: int) -> str:
    """The name of a program in records."""
    return f"program {seed}"


def read_records(path: Path) -> dict[str, dict[str, Any]]:
    """The last record of each id. A line that a killed process has cut is passed over."""
    found: dict[str, dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue
        found[entry["id"]] = entry
    return found


def is_done(entry: Mapping[str, Any] | None) -> bool:
    """Whether a record says that a test or program need not run again."""
    return entry is not None and entry["outcome"] in ("passed", "skipped")
