"""`python -m fp4compile run`: scripts and modules get the arguments that they would have alone; launchers run it."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

PROGRAM = """
    import json, sys
    from pathlib import Path
    if __name__ == "__main__":
        import os, torch
        found = {"argv": sys.argv[1:], "file": Path(sys.argv[0]).name, "main": sys.modules["__main__"].__file__,
                 "rank": os.environ.get("RANK")}
        torch.compile(torch.nn.Linear(64, 64), backend="fp4compile_mxfp8")  # is never called
        Path(f"found{found['rank'] or ''}.json").write_text(json.dumps(found))
"""
ARGUMENTS = ["-m", "x", "--flag", "a b", "-h"]  # options of this command's names are the program's


def run(folder: Path, *command: str) -> subprocess.CompletedProcess:
    package = folder / "training"
    package.mkdir()
    for name in ("__init__", "__main__", "tune"):
        (package / f"{name}.py").write_text(textwrap.dedent(PROGRAM if name != "__init__" else ""))
    (folder / "script.py").write_text(textwrap.dedent(PROGRAM))
    root = str(Path(__file__).parents[2])
    return subprocess.run(
        [sys.executable, *command, *ARGUMENTS], cwd=folder, capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "command, file",
    [(["script.py"], "script.py"), (["-m", "training.tune"], "tune.py"), (["-m", "training"], "__main__.py")],
)
def test_a_program_sees_what_it_would_see_alone(command, file, tmp_path):
    done = run(tmp_path, "-m", "fp4compile", "run", *command)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["argv"] == ARGUMENTS and found["file"] == Path(found["main"]).name == file
    assert "recipe mxfp8: compiled nothing" in done.stderr


@pytest.mark.slow
def test_a_launcher_runs_it_on_each_rank(tmp_path):
    """As `torchrun -m fp4compile run -m training.tune` does."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "fp4compile", "run"]
    done = run(tmp_path, *launcher, "-m", "training.tune")
    assert done.returncode == 0, done.stderr
    for rank in "01":
        assert json.loads((tmp_path / f"found{rank}.json").read_text())["argv"] == ARGUMENTS
        assert f"rank {rank}: recipe mxfp8: compiled nothing" in done.stderr
