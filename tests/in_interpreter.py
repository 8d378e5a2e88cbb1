"""Kernel tests run twice: on a GPU where there is one, and in Triton's interpreter in a process of their own."""

import os
import subprocess
import sys
from pathlib import Path


def assert_passes(test_file: str, variable: str = "TRITON_INTERPRET") -> None:
    """Run a test file again with a variable of the environment set to 1, as before its kernels are imported."""
    environment = {**os.environ, variable: "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", test_file]
    root = Path(__file__).parent.parent
    run = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert " passed" in run.stdout
