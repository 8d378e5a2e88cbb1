"""Kernel tests run twice: on a GPU where there is one, and in Triton's interpreter in a process of their own."""

import os
import subprocess
import sys
from pathlib import Path


def assert_passes(test_file: str, variable: str = "TRITON_INTERPRET") -> None:
    """Run a test file again with a variable of the environment set to 1, as before its kernels are imported."""
    environment = {**os.environ, variable: "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", test_file]
    root = Path(__file__).parents[2]
    run = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert " passed" in run.stdout


def patch_triton_once() -> None:
    """Let the interpreter keep what it puts into triton.language, for a process that does nothing else with it.

    It puts it there anew at every call of a device function, which takes a third of these tests' time.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    patch, patched = interpreter._patch_lang, []

    def patch_once(kernel):
        for module in kernel.__globals__.values():
            if (module is tl or module is tl.core) and module not in patched:
                patched.append(module)
                patch(kernel)
        return interpreter._LangPatchScope()  # of changes to take back: none

    interpreter._patch_lang = patch_once
