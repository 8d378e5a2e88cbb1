"""`make versions`: what is run for a version of torch, what is recorded of it, and what the README says."""

import json
import re
import sys
from pathlib import Path

import pytest

from benchmarks import versions

ROOT = Path(__file__).parents[2]
XML = """<testsuites><testsuite tests="6"><testcase name="a"/><testcase name="b"><skipped/></testcase>
<testcase name="c"><failure/></testcase><testcase name="d"><error/></testcase>
<testcase name="e"><system-out/></testcase><testcase name="f"/></testsuite></testsuites>"""


def result(torch="2.14.1", tests=versions.WHOLE, passed=10, failed=0, left_out=""):
    return {"torch": torch, "triton": versions.VERSIONS[torch.partition("+")[0]], "tests": tests, "left_out": left_out,
            "passed": passed, "failed": failed, "skipped": 2, "date": "2026-11-24"}  # fmt: skip


def test_the_readme_says_what_is_recorded():
    content = json.loads(versions.OUT.read_text(encoding="utf-8"))
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert versions.sentence(content) in readme and versions.published(readme, content) == readme
    assert all(one["torch"].partition("+")[0] in versions.VERSIONS for one in content)


def test_what_development_uses_is_among_the_versions():
    pins = dict(re.findall(r"^(TORCH|TRITON) := (\S+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert versions.VERSIONS[pins["TORCH"]] == pins["TRITON"]
    assert f"torch=={pins['TORCH']}\n" in (ROOT / "constraints.txt").read_text(encoding="utf-8")


def test_a_part_never_takes_the_place_of_the_whole():
    whole, part, newer = result(), result(tests="tests/passes"), result("2.14.1+cpu", passed=11)
    assert versions.merged([], [part]) == [part] and versions.merged([part], [whole]) == [whole]
    assert versions.merged([whole], [part]) == [whole] and versions.merged([whole], [newer]) == [newer]
    other = result(tests="tests/numerics")
    assert versions.merged([part], [other]) == [other]
    assert versions.merged([whole, result("2.15.0")], [result("2.11.0")]) == [
        result("2.11.0"), whole, result("2.15.0")
    ]  # fmt: skip


def test_failures_are_said():
    assert "2.14.1 (Triton 3.8.0; 1 test fails)" in versions.sentence([result(failed=1)])
    assert "2.14.1 (Triton 3.8.0; 2 tests fail)" in versions.sentence([result(failed=2)])


def test_what_was_left_out_is_said():
    said = " Tests of the code that Triton compiles ran under Triton 3.9.0 alone."
    assert said not in versions.sentence([result("2.15.0")])
    assert versions.sentence([result(left_out="pinned_triton"), result("2.15.0")]).replace("\n", " ").endswith(said)


@pytest.mark.parametrize(("torch", "left_out"), [("2.14.1", "pinned_triton"), ("2.13.0", "")])
def test_tests_of_the_pinned_triton_are_left_out_under_another(torch, left_out, checkout):
    folder = checkout("<testsuite><testcase/></testsuite>")
    assert versions.main(["--only", torch]) == 0
    (heard,) = (each for each in json.loads((folder / "heard.json").read_text())["arguments"] if "PYTEST=" in each)
    assert ("not pinned_triton" in heard) == bool(left_out)
    assert json.loads((folder / "versions.json").read_text())[0]["left_out"] == left_out


MAKE = """#!{python}
import json, os, sys
from pathlib import Path
settings = dict(argument.split("=", 1) for argument in sys.argv if "=" in argument)
heard = {{name: os.environ.get(name) for name in ("PIP_CONSTRAINT", "MAKEFLAGS")}}
heard["arguments"] = sys.argv[1:]
Path("heard.json").write_text(json.dumps(heard))
if {xml!r}:
    Path(f"build/versions/{{settings['TORCH']}}.xml").write_text({xml!r})
environment = Path(settings["VENV"]) / "bin"
environment.mkdir(parents=True)
(environment / "python").write_text("#!/bin/sh\\necho 2.14.1+cu130 3.8.1\\n")
(environment / "python").chmod(0o755)
sys.exit({status})
"""


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout whose `make` says what it was called with; a function sets what it finds."""
    (tmp_path / "constraints.txt").write_text("# pins\ntorch==2.13.0\ntorchvision==1\nnumpy==2.4.6\n")
    (tmp_path / "README.md").write_text("before\n<!-- versions -->\n<!-- end -->\nafter\n")
    (tmp_path / "bin").mkdir()
    for name, path in (("ROOT", ""), ("OUT", "versions.json"), ("README", "README.md")):
        monkeypatch.setattr(versions, name, tmp_path / path)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setenv("MAKEFLAGS", "w -- PYTEST=another")

    def finds(xml, status=0):
        make = tmp_path / "bin" / "make"
        make.write_text(MAKE.format(python=sys.executable, xml=xml, status=status))
        make.chmod(0o755)
        return tmp_path

    return finds


def test_one_version_and_a_part_of_the_tests(checkout, capsys):
    folder = checkout("<testsuite><testcase/></testsuite>")
    assert versions.main(["--only", "2.14.1", "--environments", "venvs", "--", "tests/passes", "-k", "a or $b"]) == 0
    heard = json.loads((folder / "heard.json").read_text())
    assert heard["PIP_CONSTRAINT"] == "build/versions/constraints.txt" and heard["MAKEFLAGS"] is None
    assert heard["arguments"] == [
        "--no-print-directory", "suite", "VENV=venvs/2.14.1", "TORCH=2.14.1", "TRITON=3.8.0",
        f"PYTHON={sys.executable}", "CONSTRAINTS=build/versions/constraints.txt",
        "PYTEST=-m 'not gpu and not pinned_triton' --junitxml=build/versions/2.14.1.xml tests/passes -k 'a or $$b'",
    ]  # fmt: skip
    assert (folder / heard["PIP_CONSTRAINT"]).read_text() == "# pins\ntorchvision==1\nnumpy==2.4.6\n"
    (one,) = json.loads((folder / "versions.json").read_text())
    assert (one["torch"], one["triton"], one["tests"]) == ("2.14.1+cu130", "3.8.1", "tests/passes -k 'a or $b'")
    assert (one["passed"], one["failed"], one["skipped"]) == (1, 0, 0)
    readme = (folder / "README.md").read_text()
    assert "2.14.1 (Triton 3.8.1; `tests/passes -k 'a or $b'` alone)" in readme and readme.endswith("end -->\nafter\n")
    assert capsys.readouterr().out.splitlines()[-1].split()[:2] == ["2.14.1+cu130", "3.8.1"]


@pytest.mark.parametrize(("xml", "status", "failed"), [
    (XML, 2, 2), (XML, 0, 2), ("<testsuite><testcase/></testsuite>", 2, None), ("", 2, None), ("<testsuite/>", 0, 0),
])  # fmt: skip
def test_what_fails_or_does_not_run_fails_the_command(xml, status, failed, checkout):
    """A failing test, pytest that was ended, an environment that was not made, and a suite without tests."""
    folder = checkout(xml, status)
    assert versions.main(["--only", "2.14.1"]) == 1
    (one,) = json.loads((folder / "versions.json").read_text())
    assert one["failed"] == failed and one["tests"] == versions.WHOLE
