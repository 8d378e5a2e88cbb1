"""Dynamo's limits of recompilations: it then runs functions uncompiled, which a strict backend does not let pass."""

import warnings
import weakref

import pytest
import torch
from torch._dynamo.backends import registry

import fp4compile
from tests.helpers.report_text import flat

pytestmark = pytest.mark.usefixtures("graphs_as_captured")


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(64, 64)

    def forward(self, x):
        return self.layer(x)


@pytest.fixture(autouse=True)
def two_compilations():
    with torch._dynamo.config.patch(recompile_limit=2):
        yield


def call(compiled, *rows):
    for count in rows:
        compiled(torch.ones(count, 64))


def said(caught):
    return [str(warning.message) for warning in caught if "compiled Net.forward" in str(warning.message)]


def test_strict_raises_at_the_first_shape_that_would_run_uncompiled():
    backend = fp4compile.backend("mxfp8", strict=True)
    compiled = torch.compile(Net(), backend=backend, dynamic=False)
    call(compiled, 2, 3)
    for rows in (4, 4, 5):
        with pytest.raises(RuntimeError, match=r"Net\.forward \(.*\.py:\d+\) .*\.recompile_limit=2 .* dynamic=True"):
            call(compiled, rows)
    call(compiled, 2, 3)  # what was compiled still runs
    assert backend.report.graphs == 2


@pytest.mark.parametrize("cure", [{"dynamic": True}, {"dynamic": False, "limit": 4}])
def test_what_the_message_advises_helps(cure):
    cure = dict(cure)
    with torch._dynamo.config.patch(recompile_limit=cure.pop("limit", 2)):
        backend = fp4compile.backend("mxfp8", strict=True)
        call(torch.compile(Net(), backend=backend, **cure), 2, 3, 4, 5)
    assert backend.report.uncompiled == {}


def test_strict_raises_at_the_first_recipe_that_would_run_uncompiled():
    model, recipes = Net(), ["mxfp8", "mxfp4", "nvfp4"]
    backends = [fp4compile.backend(recipe, strict=True) for recipe in recipes]
    first, second, third = (torch.compile(model, backend=backend) for backend in backends)
    call(first, 2), call(second, 2)
    with pytest.raises(RuntimeError, match=r"recipe 'nvfp4': Dynamo has compiled Net\.forward.*\.reset\(\) between"):
        call(third, 2)


class Numbered(Net):
    def __init__(self, number):
        super().__init__()
        self.number = number

    def forward(self, x):
        return self.number * self.layer(x)


def test_what_differs_is_named_and_decides_what_is_advised(monkeypatch):
    backend, x = fp4compile.backend("mxfp8", strict=True), torch.ones(2, 64)
    blocks = [Numbered(number) for number in (2, 3, 4)]
    for block in blocks:
        block.compile(backend=backend)
    blocks[0](x), blocks[1](x)
    with pytest.raises(RuntimeError, match=r"nothing else is\. The .* of: self\.number == 3\. Raise the limit$"):
        blocks[2](x)
    shapes = torch.compile(Net(), backend=backend, dynamic=False)
    call(shapes, 2, 3)
    with pytest.raises(RuntimeError, match=r"of: tensor 'x' size mismatch at index 0.* Compile with dynamic=True, or"):
        call(shapes, 4)
    monkeypatch.setattr("fp4compile._inductor_patches._reason_of", lambda error: None)
    with pytest.raises(RuntimeError, match=r"nothing else is\. Raise the limit, or, where only sizes differ"):
        call(shapes, 4)


def test_the_limit_that_was_reached_is_named():
    compiled = torch.compile(Net(), backend=fp4compile.backend("mxfp8", strict=True), dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=9, accumulated_recompile_limit=2):
        call(compiled, 2, 3)
        with pytest.raises(RuntimeError, match=r"torch\._dynamo\.config\.accumulated_recompile_limit=2"):
            call(compiled, 4)


@pytest.mark.parametrize("by_name", [True, False])
def test_others_warn_once_and_the_report_says_it(by_name):
    given = "fp4compile_mxfp8" if by_name else fp4compile.backend("mxfp8")
    compiled = torch.compile(Net(), backend=given, dynamic=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call(compiled, 2, 3)
        report = fp4compile.backend("mxfp8").report  # equal backends share it
        assert report.uncompiled == {} and "uncompiled" not in str(report) and said(caught) == []
        call(compiled, 4, 5, 2)
    assert len(said(caught)) == 1
    (function,) = report.uncompiled
    assert report.to_dict()["uncompiled"] == {function: "recompile_limit"} and function.startswith("Net.forward (")
    assert "what runs uncompiled is not counted" in report.summary()
    assert f"raise torch._dynamo.config.recompile_limit): {function} " in flat(report)
    torch.compiler.reset()
    assert report.uncompiled == {} and "uncompiled" not in report.summary()


def test_one_that_compiles_nothing_for_the_limit_says_so():
    model = Net()
    backends = [fp4compile.backend(recipe) for recipe in ("mxfp8", "mxfp4", "nvfp4", "nvfp4_rowwise")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for backend in backends:
            call(torch.compile(model, backend=backend), 2)
    assert [backend.report.graphs for backend in backends] == [1, 1, 0, 0]
    for backend in backends[2:]:
        said = backend.report.summary()
        assert "compiled nothing" in said and "torch._dynamo.config.recompile_limit=8" in said
        assert "torch.compiler.reset() between recipes" in said
    assert "leaves Net.forward (test_recompile_limit.py:" in backends[2].report.summary()
    assert "another backend reached Dynamo's limit of recompilations" in backends[3].report.summary()


def test_other_backends_reach_their_limits_as_ever():
    fp4compile.backend("mxfp8", strict=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call(torch.compile(Net(), backend="eager", dynamic=False), 2, 3, 4)
    assert said(caught) == []


def test_other_errors_of_dynamo_pass():
    def broken(x):
        torch._dynamo.graph_break()
        return x

    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(broken, backend=fp4compile.backend("mxfp8", strict=True), fullgraph=True)(torch.ones(2, 64))


def test_patches_are_made_once():
    convert_frame = torch._dynamo.convert_frame
    fp4compile.backend("mxfp8")
    before = convert_frame._compile, convert_frame._is_registered_backend
    fp4compile.backend("nvfp4")
    assert before == (convert_frame._compile, convert_frame._is_registered_backend)


@pytest.mark.parametrize("recipe", ["mxfp8", fp4compile.Recipe(fprop_x="mxfp8", fprop_w="mxfp8")])
@pytest.mark.parametrize("installed", [True, False])
def test_no_weak_reference_stays_on_parameters(recipe, installed, monkeypatch):
    """`torch.utils.swap_tensors` refuses tensors that have one. Dynamo drops those of backends that it knows."""
    if not installed:  # as where the package is imported from a checkout
        torch._dynamo.list_backends()  # reads the entry points
        for known in (registry._BACKENDS, registry._COMPILER_FNS):
            for name in [name for name in known if name.startswith("fp4compile")]:
                monkeypatch.delitem(known, name)
    model = Net()
    call(torch.compile(model, backend=fp4compile.backend(recipe)), 2)
    assert [weakref.getweakrefs(parameter) for parameter in model.parameters()] == [[], []]
