"""`python -m fp4compile run`, and what is said at the end of any program; test_launchers.py has it on two ranks.

Programs get the arguments that they would have alone.
"""

import json
import textwrap
from pathlib import Path

import pytest

from tests.helpers.programs import Program

pytestmark = pytest.mark.slow
PROGRAM = """
    import json, sys
    from pathlib import Path
    if __name__ == "__main__":
        import torch
        found = {"argv": sys.argv[1:], "file": Path(sys.argv[0]).name, "main": sys.modules["__main__"].__file__}
        torch.compile(torch.nn.Linear(64, 64, bias=False), backend="fp4compile_mxfp8")  # it is never called
        Path(f"found_{found['file']}.json").write_text(json.dumps(found))
"""
# The backend is never called. (Up to torch 2.13 Dynamo leaves out an nn.Sequential that is compiled in place, too.)
NEVER_CALLED = """
    import torch, fp4compile
    model = torch.nn.Sequential(torch.nn.Linear(64, 64))
    model.forward = torch.compiler.disable(model.forward)
    model.compile(backend={backend})
    model(torch.ones(4, 64))
    {end}
"""
IDLE_RULE = """
    import torch, fp4compile
    backend = fp4compile.backend("mxfp8", rules=[("0", "quantize"), ("0*", "skip")])
    torch.compile(torch.nn.Sequential(torch.nn.Linear(64, 64)), backend=backend)(torch.ones(4, 64))
"""
NO_MATMUL = """
    import torch, fp4compile
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.layer = torch.nn.Embedding(8, 64), torch.nn.Linear(64, 64)
        def forward(self, tokens):
            return torch.compiler.disable(self.layer)(self.embed(tokens))
    torch.compile(Model(), backend=fp4compile.backend("mxfp8"))(torch.arange(4))
"""
ONLY_A_ROUTER = """
    import torch, fp4compile
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.router, self.layer = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
        def forward(self, x):
            return torch.compiler.disable(self.layer)(self.router(x))
    with torch.no_grad():
        torch.compile(Model(), backend=fp4compile.backend("mxfp8"))(torch.ones(4, 64))
"""
NEIGHBOURS = "import beside; print(beside.WHERE)"
ARGUMENTS = ["-m", "x", "--flag", "a b", "-h"]  # options of this command's names are the program's
RUN = ["-m", "fp4compile", "run"]
# What follows `python`, by the name of a case.
COMMANDS = {
    "a script": [*RUN, "--in-place", "script.py", *ARGUMENTS], "a module": [*RUN, "-m", "training.tune", *ARGUMENTS],
    "a package": [*RUN, "-m", "training", *ARGUMENTS], "an object": ["object.py"], "a name": [*RUN, "name.py"],
    "another backend": [*RUN, "eager.py"], "a crash": ["crash.py"], "an idle rule": ["idle.py"],
    "no matmul": ["none.py"], "only a router": ["router.py"],
    "a script elsewhere": [*RUN, "elsewhere/neighbours.py"],
}  # fmt: skip


def write(folder: Path, **scripts: str) -> None:
    for name, text in scripts.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(text))


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """(the folder, how each of the programs ended)."""
    folder = tmp_path_factory.mktemp("programs")
    (folder / "training").mkdir()
    (folder / "elsewhere").mkdir()
    write(folder / "training", __init__="", __main__=PROGRAM, tune=PROGRAM)
    write(folder / "elsewhere", neighbours=NEIGHBOURS, beside="WHERE = 'beside the script'")
    write(
        folder, beside="WHERE = 'in the working directory'", script=PROGRAM, idle=IDLE_RULE,
        none=NO_MATMUL, router=ONLY_A_ROUTER,
        object=NEVER_CALLED.format(backend="fp4compile.backend('mxfp8')", end=""),
        name=NEVER_CALLED.format(backend="'fp4compile_mxfp8'", end=""),
        eager=NEVER_CALLED.format(backend="'eager'", end=""),
        crash=NEVER_CALLED.format(backend="'fp4compile_mxfp8'", end="raise OSError('gone')"),
    )  # fmt: skip
    return folder, {case: Program(command, folder, cwd=folder).ended() for case, command in COMMANDS.items()}


@pytest.mark.parametrize(
    "case, file", [("a script", "script.py"), ("a module", "tune.py"), ("a package", "__main__.py")]
)
def test_a_program_sees_what_it_would_see_alone(case, file, programs):
    folder, found = programs
    assert found[case].status == 0, found[case].said
    seen = json.loads((folder / f"found_{file}.json").read_text())
    assert seen["argv"] == ARGUMENTS and seen["file"] == Path(seen["main"]).name == file
    assert "recipe mxfp8: compiled nothing" in found[case].said


def test_a_script_imports_what_lies_beside_it(programs):
    """As it does alone, whatever the working directory has under that name."""
    found = programs[1]["a script elsewhere"]
    assert (found.status, found.printed) == (0, "beside the script\n"), found.said


# ---------------------------------------------------------------- what is said at the end


@pytest.mark.parametrize("case", ["an object", "a name"])
def test_a_backend_that_was_never_called_says_so_at_the_end(case, programs):
    said = programs[1][case].said
    assert said.count("recipe mxfp8: compiled nothing. Likely causes: a module of torch's own") == 1


def test_run_says_that_a_script_used_no_backend_and_a_crash_speaks_for_itself(programs):
    found = programs[1]
    assert "the script gave none of this package's backends to torch.compile" in found["another backend"].said
    assert found["a crash"].status == 1 and found["a crash"].said.endswith("OSError: gone\n")
    assert "compiled nothing" not in found["a crash"].said


def test_a_rule_that_decided_about_nothing_is_told_at_the_end(programs):
    assert "rules that decided about no matmul: '0*'" in programs[1]["an idle rule"].said


def test_graphs_without_a_matmul_are_told_at_the_end(programs):
    """While they are compiled, other graphs of the model may follow."""
    said = programs[1]["no matmul"].said
    assert said.count("recipe mxfp8: 0 of 0 matmuls quantised") == 1 and "quantised nothing" not in said


def test_graphs_of_routers_alone_are_told_at_the_end(programs):
    said = programs[1]["only a router"].said
    assert said.count("recipe mxfp8: 0 of 1 matmuls quantised") == 1 and "quantised nothing" not in said
