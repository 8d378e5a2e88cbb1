"""The names of layers: those that rules see, and the full names in the report, wherever Dynamo captures a layer."""

import dataclasses
import functools
import gc
import weakref

import pytest
import torch

import fp4compile
from fp4compile.report.report import Report, Row
from tests.helpers import without_codegen
from tests.helpers.old_torch import not_under_torch_2_11


class Block(torch.nn.Module):
    def __init__(self, width=64, hidden=96):
        super().__init__()
        self.up, self.down = torch.nn.Linear(width, hidden), torch.nn.Linear(hidden, width)

    def forward(self, x):
        return self.down(self.up(x).relu())


class Broken(Block):
    def forward(self, x):
        x = self.up(x).relu()
        torch._dynamo.graph_break()
        return self.down(x)


class Model(torch.nn.Module):
    def __init__(self, block=Block, layers=2):
        super().__init__()
        self.layers = torch.nn.ModuleList(block() for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def modules(function, *args, **kwargs):
    """(full name, name that rules see) of each product, in graph order."""
    with torch.no_grad():
        report = fp4compile.explain(function, *args, recipe="mxfp8", **kwargs)
    return [(row.module, row.module if row.name is None else row.name) for row in report.rows]


def x(rows=4):
    return torch.randn(rows, 64)


def test_graph_breaks_inside_a_submodule_keep_full_names():
    model, backend = Model(Broken, layers=3), fp4compile.backend("mxfp8", strict=True)
    with pytest.MonkeyPatch.context() as patch:
        without_codegen.install(patch)
        torch.compile(model, backend=backend)(x()).sum().backward()
    rows = [(row.module, row.name, row.product) for row in backend.report.rows]
    # Dynamo compiles `Broken.forward` twice: for the first block, whose input needs no gradient, and for all others.
    assert rows == [
        ("layers.0.up", "up", "fprop"), ("layers.0.up", "up", "wgrad"),
        ("layers.0.down", "down", "fprop"), ("layers.0.down", "down", "dgrad"), ("layers.0.down", "down", "wgrad"),
        ("layers.1.up", "up", "fprop"), ("layers.1.up", "up", "dgrad"), ("layers.1.up", "up", "wgrad"),
    ]  # fmt: skip
    assert "\n[layers.1.]up " in str(backend.report)


@pytest.mark.parametrize("how", ["compile", "wrap"])
def test_blocks_compiled_one_by_one_have_full_names_and_rules_see_their_own(how, monkeypatch):
    without_codegen.install(monkeypatch)
    model = Model(layers=3)
    backend = fp4compile.backend("mxfp8", rules=[("up", "skip"), ("layers.*", "skip")])
    for index, block in enumerate(model.layers):
        if how == "compile":
            block.compile(backend=backend)
        else:
            model.layers[index] = torch.compile(block, backend=backend)
    model(x()).sum().backward()
    forward = [(row.module, row.name, row.quantised) for row in backend.report.rows if row.product == "fprop"]
    assert forward == [
        ("layers.0.up", "up", False), ("layers.0.down", "down", True),
        ("layers.1.up", "up", False), ("layers.1.down", "down", True),
    ]  # fmt: skip
    assert backend.report.graphs == 2, "the third block has the second's graph"


def test_explain_shows_every_part_that_shares_a_graph():
    """It also captures parts that are compiled already, in a model with graph breaks."""

    class Loop(Model):
        def forward(self, x):
            for layer in self.layers:
                torch._dynamo.graph_break()
                x = layer(x)
            return x

    model = Loop(layers=4)
    model.layers[1] = torch.compile(Block(hidden=80), backend="eager")
    model.layers[2].compile(backend="eager")
    expected = [(f"layers.{i}.{name}", name) for i in range(4) for name in ("up", "down")]
    assert modules(model, x()) == expected
    assert modules(Model(Broken, layers=3), x()) == expected[:6]


@not_under_torch_2_11("captures no layer whose hook breaks the graph")
def test_a_head_that_is_captured_by_itself_is_an_output_head():
    """As where accelerate's hooks (`device_map`) break the graph at each layer; a head inside a block is none."""

    class WithHead(Model):
        def __init__(self):
            super().__init__(layers=1)
            self.layers[0].proj_out, self.lm_head = torch.nn.Linear(64, 64), torch.nn.Linear(64, 160)

        def forward(self, x):
            return self.lm_head(self.layers[0].proj_out(super().forward(x)))

    model, backend = WithHead(), fp4compile.backend("mxfp8")
    for layer in (one for one in model.modules() if isinstance(one, torch.nn.Linear)):
        layer.register_forward_pre_hook(torch.compiler.disable(lambda *_: None))
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        without_codegen.install(patch)
        torch.compile(model, backend=backend)(x())
    assert [(row.module, row.name, row.reason) for row in backend.report.rows] == [
        ("layers.0.up", "", None), ("layers.0.down", "", None), ("layers.0.proj_out", "", None),
        ("lm_head", "", "output head"),
    ]  # fmt: skip


def test_full_names_of_products_without_parameters():
    class Attention(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.q = torch.nn.Linear(64, 64)

        def forward(self, x):
            q = self.q(x)
            torch._dynamo.graph_break()
            return q @ q.transpose(1, 2)

    found = modules(Model(Attention, layers=1), torch.randn(2, 5, 64))
    assert found == [("layers.0.q", "q"), ("layers.0", "")]


def test_a_shared_parameter_has_the_name_by_which_it_was_reached():
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Broken(), Broken()
            self.second.down.weight = self.first.up.weight = torch.nn.Parameter(torch.randn(64, 64))

        def forward(self, x):
            return self.second(x)

    model = Tied()
    model.second.up = torch.nn.Linear(64, 64)
    assert modules(model, x()) == [("second.up", "up"), ("second.down", "down")]


def test_names_are_compared_part_by_part():
    """The module `group` is not the layer `up`, although its name ends with these letters."""

    class Outer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.group = torch.nn.Linear(64, 64)

        def names(self):
            up = self.group
            return modules(lambda x: up(x) @ x.t(), x())

    assert Outer().names() == [("group", "up"), ("", "")]
    row = Row("group", "fprop", 4, 64, 64, None, None, None, "rule", 1, name="up")
    assert "\ngroup [rules: up] " in str(Report("mxfp8", [row]))
    row = dataclasses.replace(row, name="")
    assert "\n[group] " in str(Report("mxfp8", [row]))


class Holder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = [torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)]
        self.scale = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(64, 64))])

    def forward(self, x):
        return self.hidden[1](self.hidden[0](x)) @ self.scale[0]


def call(model, x):
    return model(x)


def both(student, teacher, x):
    return student(x) + teacher(x)


def all_of(*models):
    return models[1](models[0](x()))


lin_global = torch.nn.Linear(64, 64)
listed = [Block(), Block()]
by_key = {"a": torch.nn.Linear(64, 64)}


def closure():
    lin1, lin2, matrix = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64), torch.nn.Parameter(torch.randn(64, 64))
    return lambda x: by_key["a"](lin_global(lin2(lin1(x)))) @ matrix


def in_a_list():
    return lambda x: listed[1](listed[0](x))


def one_layer():
    lin = torch.nn.Linear(64, 64)
    return lambda x: lin(x)


def one_model():
    model = Block()
    return lambda x: model(x)


@pytest.mark.parametrize(("function", "arguments", "expected"), [
    (closure(), [x()], ["lin1", "lin2", "lin_global", "by_key.a", "matrix"]),
    (in_a_list(), [x()], ["listed.0.up", "listed.0.down", "listed.1.up", "listed.1.down"]),
    (Holder(), [x()], ["hidden.0", "hidden.1", "scale.0"]),
    (one_layer(), [x()], ["lin"]),
    (one_model(), [x()], ["up", "down"]),
    (call, [Block(), x()], ["up", "down"]),
    (functools.partial(call, Block()), [x()], ["up", "down"]),
    (torch.nn.Linear(64, 64), [x()], [""]),
    (both, [Block(), Block(), x()], ["student.up", "student.down", "teacher.up", "teacher.down"]),
    (both, [torch.nn.Linear(64, 64), Block(), x()], ["", "up", "down"]),
    (all_of, [Block(), Block()], ["models.0.up", "models.0.down", "models.1.up", "models.1.down"]),
    (functools.partial(both, Block(), Block()), [x()], ["args.0.up", "args.0.down", "args.1.up", "args.1.down"]),
], ids=["closure", "list", "attribute", "one", "model", "argument", "partial", "layer", "two",
        "uneven", "args", "partials"])  # fmt: skip
def test_every_layer_has_a_name_of_its_own(function, arguments, expected):
    assert [seen for _, seen in modules(function, *arguments)] == expected


def test_a_model_that_a_transform_holds_has_its_own_names():
    assert {seen for _, seen in modules(torch.func.jacfwd(Block()), torch.randn(64))} == {"up", "down"}


def test_closed_over_layers_have_scales_and_rules_of_their_own():
    first, second = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)

    def function(x):
        return second(100 * first(x))

    recipe = fp4compile.calibrate(function, [x()])
    scales = dict(recipe.static_scales)
    assert set(scales) == {"first", "second"} and scales["second"] > 10 * scales["first"]
    with torch.no_grad():
        report = fp4compile.explain(function, x(), recipe={"recipe": "mxfp8", "rules": [("first", "skip")]})
    assert [row.reason for row in report.rows] == ["rule 'first'", None]


def test_looking_for_names_keeps_no_tensor_alive(monkeypatch):
    """Up to Python 3.12, a frame that is asked for its variables keeps references to their values."""
    without_codegen.install(monkeypatch)

    class Loop(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Block()

        def forward(self, x):
            return self.block(x)

        def train_loop(self, step):
            batch = torch.randn(4, 64)
            kept = weakref.ref(batch)
            step(batch)
            del batch
            gc.collect()
            return kept()

    loop = Loop()
    assert loop.train_loop(torch.compile(loop, backend=fp4compile.backend("mxfp8"))) is None
