"""Steps whose weight is a part of a parameter, or computed from one."""

from tests.fuzz.kinds import applied, kind, result
from tests.fuzz.programs import Draft, Layer


@kind(1.2)
def part_of_a_weight(d: Draft) -> None:
    """Slices, selections and single dimensions of a parameter: layers of their own part of it."""
    x = d.pick()
    into, width = d.shape(x)[-1], d.width()
    form = d.rng.choice(("rows", "columns", "select", "squeeze", "narrow", "both", "view"))
    shape, view = {
        "rows": ((width + 32, into), "self.{0}[16:{1}]"),
        "columns": ((width, into + 32), "self.{0}[:, 32:]"),
        "select": ((3, width, into), "self.{0}[1]"),
        "squeeze": ((1, width, into), "self.{0}.squeeze(0)"),
        "narrow": ((width + 16, into), "self.{0}.narrow(0, 16, {2})"),
        "both": ((width + 32, into + 16), "self.{0}[32:, 16:]"),
        "view": ((width * into,), "self.{0}.view({2}, -1)"),
    }[form]
    w = d.parameter(*shape)
    d.layers.append(Layer(w, view.format(w, 16 + width, width), width, into))
    weight = view.format(w, 16 + width, width)
    h, made = result(d, x, width)
    d.step("part_of_a_weight", [x], made, [f"{h} = F.linear({x}, {weight})"], [f"{h} = q.linear('{w}', {x}, {weight})"])


@kind(1.2)
def several_of_a_weight(d: Draft) -> None:
    """chunk, split and unbind of a parameter: Q, K and V of one weight."""
    x = d.pick()
    into, width = d.shape(x)[-1], d.width()
    names = [d.name("v") for _ in range(3)]
    form = d.rng.choice(("chunk", "split", "unbind", "uneven"))
    shape, call = {
        "chunk": ((3 * width, into), "chunk(3)"),
        "split": ((3 * width, into), f"split({width})"),
        "unbind": ((3, width, into), "unbind(0)"),
        "uneven": ((2 * width + 32, into), f"split([{width}, 32, {width}])"),
    }[form]
    w = d.parameter(*shape)
    parts = ", ".join(names)
    take = f"{parts} = self.{w}.{call}"
    h, made = result(d, x, width)
    middle = "F.relu({}).sum(-1, keepdim=True)" if form == "uneven" else "F.relu({})"
    code = [f"F.linear({x}, {v})" for v in names]
    oracle = [f"q.linear('{w}', {x}, {v})" for v in names]
    lines = [[take, f"{h} = {a} + {middle.format(b)} * {c}"] for a, b, c in (code, oracle)]
    d.step("several_of_a_weight", [x], made, *lines)


@kind(0.8)
def cast_weight(d: Draft) -> None:
    """Casts that change the weight's values: the quantiser sees what the product would have."""
    x = d.pick()
    into, width = d.shape(x)[-1], d.width()
    w = d.parameter(width, into, letter="fine")
    cast = d.rng.choice(("bool()", "to(torch.int32)", "to(torch.float8_e5m2)", "half()", "bfloat16()", "double()"))
    h, made = result(d, x, width)
    weight = f"self.{w}.{cast}.to({x}.dtype)"
    d.step("cast_weight", [x], made, [f"{h} = F.linear({x}, {weight})"],
           [f"{h} = q.linear('{w}', {x}, {weight}, fprop='may', back='may')"])  # fmt: skip


@kind(0.5)
def cast_activation(d: Draft) -> None:
    x = d.pick()
    width = d.width()
    layer = d.linear(d.shape(x)[-1], width)
    h, shape = result(d, x, width)
    code, oracle = applied(layer, f"{x}.bfloat16().to({x}.dtype)")
    d.step("cast_activation", [x], shape, [f"{h} = {code}"], [f"{h} = {oracle}"])


@kind(1.2)
def weight_by_function(d: Draft) -> None:
    """A weight that is computed is no parameter: left alone, forward and backward, whatever layer reads x beside it."""
    x = d.pick()
    into, width = d.shape(x)[-1], d.width()
    beside = d.chance(0.7)
    layer = d.linear(into, width) if beside else None
    w = d.parameter(width, into)
    h, made = result(d, x, width)
    forms = ("{0} * 0.5", "{0}.flip(0)", "{0}.roll(3, 1)", "F.relu({0})", "-{0}", "{0} + 1")
    weight = d.rng.choice(forms).format(f"self.{w}")
    code, oracle = [f"{h} = F.linear({x}, {weight})"], [f"{h} = q.function({x}, {weight})"]
    if beside:
        called, expected = applied(layer, x)
        code, oracle = [*code, f"{h} = {h} + {called}"], [*oracle, f"{h} = {h} + {expected}"]
    d.step("weight_by_function", [x], made, code, oracle)


@kind(0.4)
def merged_lora(d: Draft) -> None:
    """A product of two parameters, added to a third."""
    x = d.pick()
    into, width, rank = d.shape(x)[-1], d.width(), 32
    w, a, b = d.parameter(width, into), d.parameter(rank, into), d.parameter(width, rank)
    h, made = result(d, x, width)
    d.step("merged_lora", [x], made, [f"{h} = F.linear({x}, self.{w} + self.{b} @ self.{a})"],
           [f"{h} = q.function({x}, self.{w} + self.{b} @ self.{a})"])  # fmt: skip
