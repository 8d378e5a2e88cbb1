"""What a GPU run was of, and on what: a hash of the files, the commit where git knows it, the GPU and the versions."""

import datetime
import hashlib
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch
import triton

SOURCES = ("fp4compile", "ptxsim", "tests", "pyproject.toml")
# Made by Python and by tools, or no input of a test.
NOT_SOURCES = {"__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache"}


def tree_hash(root: Path) -> str:
    """SHA-256 of the names and contents of the package's and the tests' files, in the order of their names.

    A copy of a checkout without its `.git` has the hash of the checkout.
    """
    digest = hashlib.sha256()
    for path in sorted(_files(root), key=lambda path: path.relative_to(root).as_posix()):
        name, content = path.relative_to(root).as_posix(), path.read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def _files(root: Path) -> list[Path]:
    found = [path for name in SOURCES for path in (root / name, *(root / name).rglob("*"))]
    return [path for path in found if path.is_file() and not NOT_SOURCES & set(path.parts) and path.suffix != ".pyc"]


def commit(root: Path) -> str | None:
    """The commit whose sources these are; None where git does not know it, or they have been changed since."""
    if _git(root, "status", "--porcelain", "--", *SOURCES) != "":
        return None
    return _git(root, "rev-parse", "HEAD") or None


def _git(root: Path, *arguments: str) -> str | None:
    """What git prints; None where it fails, or where `root` is not the top of a checkout."""
    if not (root / ".git").exists():
        return None
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def environment() -> dict[str, Any]:
    """The GPUs, the cores and the versions that tests run with."""
    count = torch.cuda.device_count()
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(0) if count else "no GPU",
        "gpus": count,
        "cpus": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "python": platform.python_version(),
    }
