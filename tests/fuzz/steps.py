"""The kinds of steps that programs are made of. Each function adds one to the draft, or nothing where none fits.

Between products only operators whose decompositions are exact: sums, products, relu, negation, views.
"""

from collections.abc import Callable

from tests.fuzz.programs import Draft, Layer

KINDS: dict[str, tuple[float, Callable[[Draft], None]]] = {}


def kind(weight: float):
    """Registers a kind of step; weight: how often it is drawn."""

    def register(function):
        KINDS[function.__name__] = (weight, function)
        return function

    return register


def draw_step(draft: Draft, only: tuple[str, ...] = ()) -> None:
    names = [name for name in KINDS if not only or name in only]
    count = len(draft.steps)
    for _ in range(20):  # a kind that finds nothing to work on adds nothing
        name = draft.rng.choices(names, [KINDS[n][0] for n in names])[0]
        KINDS[name][1](draft)
        if len(draft.steps) > count:
            return


def _new(d: Draft, x: str, width: int) -> tuple[str, dict]:
    """The name of a result with x's leading dimensions, and its shape."""
    name = d.name("h")
    return name, {name: (*d.shape(x)[:-1], width)}


def _call(d: Draft, layer: str, x: str, bias: bool | None = None) -> tuple[str, str]:
    """How the module calls a Linear, and how the oracle does."""
    has_bias = f"self.{layer} = torch.nn.Linear" in "\n".join(d.setup) and bias is not False
    last = f", self.{layer}.bias" if has_bias else ""
    return f"self.{layer}({x})", f"q.linear('{layer}', {x}, self.{layer}.weight{last})"


# ---------------------------------------------------------------- layers


@kind(6)
def linear(d: Draft) -> None:
    x = d.pick()
    width = d.width()
    layer = d.linear(d.shape(x)[-1], width, frozen=d.chance(0.1))
    h, shape = _new(d, x, width)
    code, oracle = _call(d, layer, x)
    d.step("linear", [x], shape, [f"{h} = {code}"], [f"{h} = {oracle}"])


@kind(2)
def activation(d: Draft) -> None:
    x = d.pick()
    h, shape = _new(d, x, d.shape(x)[-1])
    text = d.rng.choice(("F.relu({0})", "-{0}", "{0} * 2", "{0} * (F.relu({0}) + 1)", "{0} + 1", "F.relu({0}) * {0}"))
    d.step("activation", [x], shape, [f"{h} = {text.format(x)}"])


@kind(2)
def add(d: Draft) -> None:
    x = d.pick()
    others = [name for name, shape in d.shapes.items() if shape == d.shape(x) and name != x]
    if others:
        y = d.rng.choice(others)
        h, shape = _new(d, x, d.shape(x)[-1])
        d.step("add", [x, y], shape, [f"{h} = {x} {d.rng.choice('+-*')} {y}"])


@kind(2)
def several(d: Draft) -> None:
    """Q, K and V, or gate and up: layers that read one value."""
    x = d.pick()
    width = d.width()
    layers = [d.linear(d.shape(x)[-1], width, bias=d.chance(0.3)) for _ in range(d.rng.choice((2, 3)))]
    h, shape = _new(d, x, width)
    calls = [_call(d, layer, x) for layer in layers]
    join = d.rng.choice((" + ", " * "))
    d.step("several", [x], shape, [f"{h} = {join.join(c for c, _ in calls)}"], [f"{h} = {join.join(o for _, o in calls)}"])


@kind(1.5)
def bare(d: Draft) -> None:
    """F.linear, matmul, einsum, `W @ x` with a parameter of the module itself."""
    x = d.pick()
    into, width = d.shape(x)[-1], d.width()
    flat = len(d.shape(x)) == 2
    crosswise = d.chance(0.5)
    w = d.parameter(into, width) if crosswise else d.parameter(width, into)
    h, shape = _new(d, x, width)
    if crosswise:
        forms = [f"{x} @ self.{w}", f"torch.matmul({x}, self.{w})", f"torch.einsum('...i,io->...o', {x}, self.{w})"]
        forms += [f"torch.mm({x}, self.{w})", f"F.linear({x}, self.{w}.T)"] if flat else []
        weight = f"self.{w}.t()"
    else:
        forms = [f"F.linear({x}, self.{w})", f"{x} @ self.{w}.t()", f"torch.einsum('...i,oi->...o', {x}, self.{w})"]
        forms += [f"(self.{w} @ {x}.t()).t()", f"torch.mm(self.{w}, {x}.t()).T"] if flat else []
        weight = f"self.{w}"
    d.layers.append(Layer(w, f"self.{w}", width, into, crosswise))
    d.step("bare", [x], shape, [f"{h} = {d.rng.choice(forms)}"], [f"{h} = q.linear('{w}', {x}, {weight})"])


@kind(1)
def addmm(d: Draft) -> None:
    """torch.addmm as Conv1D has it, with biases of all shapes that broadcast, scaled or not."""
    x = d.pick(rank=2)
    if x is None:
        return
    into, width, rows = d.shape(x)[-1], d.width(), d.shape(x)[0]
    shapes = [(width,), (width,), (1, width), (1,)] + ([] if d.dynamic else [(rows, width), (rows, 1)])
    w, b = d.parameter(into, width), d.parameter(*d.rng.choice(shapes), letter="b")
    d.layers.append(Layer(w, f"self.{w}", width, into, crosswise=True))
    scaled = d.rng.choice(("", "", ", alpha=2", ", beta=2", ", beta=0.5, alpha=0.25"))
    h, shape = _new(d, x, width)
    d.step("addmm", [x], shape, [f"{h} = torch.addmm(self.{b}, {x}, self.{w}{scaled})"],
           [f"{h} = q.linear('{w}', {x}, self.{w}.t(), self.{b}{scaled})"])  # fmt: skip


@kind(0.7)
def weight_on_the_left(d: Draft) -> None:
    """`W @ x` where the columns of x are the tokens, whose layer no other product confirms."""
    x = d.pick(rank=2)
    if x is None or d.dynamic:
        return
    rows, columns = d.shape(x)
    out = d.width()
    w = d.parameter(out, rows)
    d.layers.append(Layer(w, f"self.{w}", out, rows))
    h = d.name("h")
    d.step("weight_on_the_left", [x], {h: (out, columns)}, [f"{h} = self.{w} @ {x}"],
           [f"{h} = q.linear('{w}', {x}.t(), self.{w}).t()"])  # fmt: skip


@kind(1.2)
def again(d: Draft) -> None:
    """A weight of an earlier layer, in the same or the other direction."""
    fits = [(x, layer, width) for x in d.shapes for layer in d.layers for width in _widths(layer, d.shape(x)[-1])]
    if not fits:
        return
    x, layer, width = d.rng.choice(fits)
    same = width == layer.out and d.shape(x)[-1] == layer.into
    w = layer.weight if same != layer.crosswise else f"{layer.weight}.t()"  # [out, in] of this use
    h, shape = _new(d, x, width)
    code = d.rng.choice((f"F.linear({x}, {w})", f"{x} @ {w}.t()"))
    # Without gradients a graph that multiplies both directions may hold a gradient in disguise.
    policy = "" if same or d.train else ", fprop='may'"
    d.step("again", [x], shape, [f"{h} = {code}"], [f"{h} = q.linear('{layer.name}', {x}, {w}{policy})"])
    if policy:
        _relax(d, layer)


def _widths(layer: Layer, into: int) -> list[int]:
    """The widths that a layer's weight can give a value of width `into`."""
    return [out for out, width in ((layer.out, layer.into), (layer.into, layer.out)) if width == into]


def _relax(d: Draft, layer: Layer) -> None:
    """Let earlier uses of a layer be left alone, too."""
    call = f"q.linear('{layer.name}', "
    for i, step in enumerate(d.steps):
        lines = tuple(_relaxed(line, call) for line in step.oracle)
        d.steps[i] = type(step)(step.kind, step.reads, step.makes, step.code, lines)


def _relaxed(line: str, call: str) -> str:
    return line.replace(call, f"q.may.linear('{call[len('q.linear(') + 1:]}")


@kind(0.8)
def shared_module(d: Draft) -> None:
    """One module applied twice, to its input and to its own result or another value."""
    x = d.pick()
    width = d.shape(x)[-1]
    layer = d.linear(width, width)
    h, shape = _new(d, x, width)
    (once, expected) = _call(d, layer, x)
    (twice, expected_twice) = _call(d, layer, f"F.relu({h})")
    d.step("shared_module", [x], shape, [f"{h} = {once}", f"{h} = {h} + {twice}"],
           [f"{h} = {expected}", f"{h} = {h} + {expected_twice}"])  # fmt: skip


@kind(0.6)
def tied_modules(d: Draft) -> None:
    """Two modules with one weight, which has the name of the first."""
    x = d.pick()
    width = d.shape(x)[-1]
    first, second = d.linear(width, width, bias=False), d.linear(width, width, bias=True)
    d.setup.append(f"self.{second}.weight = self.{first}.weight")
    d.layers.pop()
    h, shape = _new(d, x, width)
    d.step("tied_modules", [x], shape, [f"{h} = self.{second}(F.relu(self.{first}({x})))"],
           [f"{h} = q.linear('{first}', {x}, self.{first}.weight)",
            f"{h} = q.linear('{first}', F.relu({h}), self.{first}.weight, self.{second}.bias)"])  # fmt: skip


@kind(0.5)
def tied_embedding(d: Draft) -> None:
    x = d.pick()
    width, count = d.shape(x)[-1], d.width()
    table = d.parameter(count, width)
    ids = d.name("ids")
    d.setup.append(f"self.register_buffer('{ids}', torch.arange({width}) % {count})")
    h, shape = _new(d, x, count)
    e = f"F.embedding(self.{ids}, self.{table}).sum()"
    d.step("tied_embedding", [x], shape, [f"{h} = F.linear({x}, self.{table}) + {e}"],
           [f"{h} = q.linear('{table}', {x}, self.{table}) + {e}"])  # fmt: skip


# ---------------------------------------------------------------- views of parameters


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
    h, made = _new(d, x, width)
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
    h, made = _new(d, x, width)
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
    h, made = _new(d, x, width)
    weight = f"self.{w}.{cast}.to({x}.dtype)"
    d.step("cast_weight", [x], made, [f"{h} = F.linear({x}, {weight})"],
           [f"{h} = q.linear('{w}', {x}, {weight}, fprop='may', back='may')"])  # fmt: skip


@kind(0.5)
def cast_activation(d: Draft) -> None:
    x = d.pick()
    width = d.width()
    layer = d.linear(d.shape(x)[-1], width)
    h, shape = _new(d, x, width)
    code, oracle = _call(d, layer, f"{x}.half().to({x}.dtype)")
    d.step("cast_activation", [x], shape, [f"{h} = {code}"], [f"{h} = {oracle}"])


@kind(1.2)
def weight_by_function(d: Draft) -> None:
    """A weight that is computed is no parameter: left alone, forward and backward, whatever layer reads x beside it."""
    x = d.pick()
    into, width = d.shape(x)[-1], d.width()
    beside = d.chance(0.7)
    layer = d.linear(into, width) if beside else None
    w = d.parameter(width, into)
    h, made = _new(d, x, width)
    forms = ["self.{0} * 0.5", "self.{0}.flip(0)", "self.{0}.roll(3, 1)", "F.relu(self.{0})", "-self.{0}", "self.{0} + 1"]
    weight = d.rng.choice(forms).format(w)
    code, oracle = [f"{h} = F.linear({x}, {weight})"], [f"{h} = q.function({x}, {weight})"]
    if beside:
        call, expected = _call(d, layer, x)
        code, oracle = [*code, f"{h} = {h} + {call}"], [*oracle, f"{h} = {h} + {expected}"]
    d.step("weight_by_function", [x], made, code, oracle)


@kind(0.4)
def merged_lora(d: Draft) -> None:
    """A product of two parameters, added to a third."""
    x = d.pick()
    into, width, rank = d.shape(x)[-1], d.width(), 32
    w, a, b = d.parameter(width, into), d.parameter(rank, into), d.parameter(width, rank)
    h, made = _new(d, x, width)
    d.step("merged_lora", [x], made, [f"{h} = F.linear({x}, self.{w} + self.{b} @ self.{a})"],
           [f"{h} = q.function({x}, self.{w} + self.{b} @ self.{a})"])  # fmt: skip


# ---------------------------------------------------------------- models' habits


@kind(1)
def teacher(d: Draft) -> None:
    x = d.pick()
    width = d.width()
    into = d.shape(x)[-1]
    s, t = d.linear(into, width), d.linear(into, width)
    h, shape = _new(d, x, width)
    u = d.name("u")
    (student, student_o), (teach, teach_o) = _call(d, s, x), _call(d, t, x)
    first, second = [f"{h} = {student}"], [f"with torch.no_grad(): {u} = {teach}"]
    first_o, second_o = [f"{h} = {student_o}"], [f"with torch.no_grad(): {u} = {teach_o}"]
    if d.chance(0.4):  # two layers deep
        t2 = d.linear(width, width)
        deep, deep_o = _call(d, t2, f"F.relu({u})")
        second.append(f"with torch.no_grad(): {u} = {deep}")
        second_o.append(f"with torch.no_grad(): {u} = {deep_o}")
    if d.chance(0.5):
        first, second, first_o, second_o = second, first, second_o, first_o
    last = [f"{h} = {h} {d.rng.choice('-*')} {u}"]
    d.step("teacher", [x], shape, first + second + last, first_o + second_o + last)


@kind(1)
def lora(d: Draft) -> None:
    """Adapters beside a frozen base."""
    x = d.pick()
    width, rank = d.width(), d.rng.choice((8, 16, 32, 48))
    into = d.shape(x)[-1]
    base = d.linear(into, width, frozen=True)
    a, b = d.linear(into, rank, bias=False), d.linear(rank, width, bias=False)
    h, shape = _new(d, x, width)
    u = d.name("u")
    (base_c, base_o), (a_c, a_o), (b_c, b_o) = _call(d, base, x), _call(d, a, x), _call(d, b, u)
    d.step("lora", [x], shape, [f"{u} = {a_c}", f"{h} = {base_c} + {b_c} * 2"],
           [f"{u} = {a_o}", f"{h} = {base_o} + {b_o} * 2"])  # fmt: skip


@kind(0.8)
def checkpointed(d: Draft) -> None:
    x = d.pick()
    into, inner = d.shape(x)[-1], d.width()
    name = d.name("c")
    d.setup.append(f"self.{name} = torch.nn.Sequential(torch.nn.Linear({into}, {inner}), torch.nn.ReLU(), "
                   f"torch.nn.Linear({inner}, {into}, bias=False))")  # fmt: skip
    d.layers += [Layer(f"{name}.0", f"self.{name}[0].weight", inner, into)]
    d.layers += [Layer(f"{name}.2", f"self.{name}[2].weight", into, inner)]
    h, shape = _new(d, x, into)
    d.step("checkpointed", [x], shape,
           [f"{h} = torch.utils.checkpoint.checkpoint(self.{name}, {x}, use_reentrant=False)"],
           [f"{h} = q.linear('{name}.0', {x}, self.{name}[0].weight, self.{name}[0].bias)",
            f"{h} = q.linear('{name}.2', F.relu({h}), self.{name}[2].weight)"])  # fmt: skip


@kind(1)
def pieces(d: Draft) -> None:
    """chunk, split and unbind of an activation, a layer on each piece: pieces are different values."""
    x = d.pick()
    into, width = d.shape(x)[-1], d.width()
    one, two = d.name("p"), d.name("p")
    form = d.rng.choice(("chunk", "split", "unbind", "slice"))
    wide = d.linear(into, 2 * width)
    call, expected = _call(d, wide, x)
    cut = {
        "chunk": f".chunk(2, -1)",
        "split": f".split({width}, -1)",
        "unbind": f".unflatten(-1, (2, {width})).unbind(-2)",
        "slice": "",
    }[form]
    h, u = d.name("h"), d.name("u")
    out = d.width()
    layers = [d.linear(width, out), d.linear(width, out)]
    take = [f"{one}, {two} = {u}{cut}"] if cut else [f"{one}, {two} = {u}[..., :{width}], {u}[..., {width}:]"]
    calls = [_call(d, layer, piece) for layer, piece in zip(layers, (one, two), strict=True)]
    d.step("pieces", [x], {h: (*d.shape(x)[:-1], out)},
           [f"{u} = {call}", *take, f"{h} = {calls[0][0]} * {calls[1][0]}"],
           [f"{u} = {expected}", *take, f"{h} = {calls[0][1]} * {calls[1][1]}"])  # fmt: skip


@kind(1)
def gated(d: Draft) -> None:
    """down(relu(gate(x)) * up(x)), gate and up apart or one wide layer."""
    x = d.pick()
    width, inner = d.shape(x)[-1], d.width()
    h, shape = _new(d, x, width)
    u, v = d.name("u"), d.name("u")
    if d.chance(0.5):
        gate, up = _call(d, d.linear(width, inner), x), _call(d, d.linear(width, inner), x)
        code, oracle = [f"{u}, {v} = {gate[0]}, {up[0]}"], [f"{u}, {v} = {gate[1]}, {up[1]}"]
    else:
        both = _call(d, d.linear(width, 2 * inner), x)
        code, oracle = [f"{u}, {v} = {both[0]}.chunk(2, -1)"], [f"{u}, {v} = {both[1]}.chunk(2, -1)"]
    down = _call(d, d.linear(inner, width), f"F.relu({u}) * {v}")
    d.step("gated", [x], shape, [*code, f"{h} = {down[0]}"], [*oracle, f"{h} = {down[1]}"])


@kind(0.8)
def in_place(d: Draft) -> None:
    x = d.pick()
    width = d.width()
    h, shape = _new(d, x, width)
    call, expected = _call(d, d.linear(d.shape(x)[-1], width), x)
    change, changed = d.rng.choice((
        ("{0}.relu_()", "{0} = F.relu({0})"), ("{0}.mul_(2)", "{0} = {0} * 2"), ("{0} += 1", "{0} = {0} + 1"),
        ("{0}[..., :16] = 1", "{0} = torch.cat([torch.ones_like({0}[..., :16]), {0}[..., 16:]], -1)"),
    ))  # fmt: skip
    d.step("in_place", [x], shape, [f"{h} = {call}", change.format(h)], [f"{h} = {expected}", changed.format(h)])


@kind(0.5)
def autocast(d: Draft) -> None:
    x = d.pick()
    width = d.width()
    layer = d.linear(d.shape(x)[-1], width)
    has_bias = "bias=True" in d.setup[-1]
    h, shape = _new(d, x, width)
    last = f", self.{layer}.bias.bfloat16()" if has_bias else ""
    d.step("autocast", [x], shape,
           [f"with torch.autocast({x}.device.type, dtype=torch.bfloat16): {h} = self.{layer}({x})",
            f"{h} = {h}.to({x}.dtype)"],
           [f"{h} = q.linear('{layer}', {x}.bfloat16(), self.{layer}.weight.bfloat16(){last}).to({x}.dtype)"])  # fmt: skip


@kind(0.6)
def detached(d: Draft) -> None:
    """A layer whose input, or whose weight, takes no gradient here."""
    x = d.pick()
    width = d.width()
    layer = d.linear(d.shape(x)[-1], width, bias=False)
    h, shape = _new(d, x, width)
    a, w = d.rng.choice(((f"{x}.detach()", f"self.{layer}.weight"), (x, f"self.{layer}.weight.detach()")))
    d.step("detached", [x], shape, [f"{h} = F.linear({a}, {w})"], [f"{h} = q.linear('{layer}', {a}, {w})"])


# ---------------------------------------------------------------- products that are no layer's


@kind(1)
def attention(d: Draft) -> None:
    x = d.pick()
    width, head = d.shape(x)[-1], d.width()
    h, shape = _new(d, x, width)
    a, b, c, s = (d.name("u") for _ in range(4))
    calls = [_call(d, d.linear(width, head, bias=False), x) for _ in range(3)]
    out = _call(d, d.linear(head, width), h)
    d.step("attention", [x], shape,
           [f"{a}, {b}, {c} = {', '.join(code for code, _ in calls)}", f"{s} = F.relu({a} @ {b}.transpose(-2, -1))",
            f"{h} = {s} @ {c}", f"{h} = {out[0]}"],
           [f"{a}, {b}, {c} = {', '.join(oracle for _, oracle in calls)}",
            f"{s} = F.relu(q.attention({a}, {b}.transpose(-2, -1)))", f"{h} = q.attention({s}, {c})",
            f"{h} = {out[1]}"])  # fmt: skip


@kind(1)
def with_itself(d: Draft) -> None:
    """x @ x.T beside a linear of x: its gradients are gradient x x, and no layer's."""
    x = d.pick()
    width = d.shape(x)[-1]
    h, shape = _new(d, x, width)
    gram, y = d.name("u"), d.name("u")
    call, expected = _call(d, d.linear(width, width), x)
    code = [f"{gram} = {x} @ {x}.transpose(-2, -1)", f"{y} = {call}"]
    oracle = [f"{gram} = q.attention({x}, {x}.transpose(-2, -1))", f"{y} = {expected}"]
    if d.chance(0.5):
        code, oracle = code[::-1], oracle[::-1]
    d.step("with_itself", [x], shape, [*code, f"{h} = {gram} @ {x} + {y}"],
           [*oracle, f"{h} = q.attention({gram}, {x}) + {y}"])  # fmt: skip


@kind(0.7)
def broadcast(d: Draft) -> None:
    """Batched products with a parameter: the layer that matmul repeats, one that only has its shape, experts."""
    x = d.pick(rank=3)
    if x is None:
        return
    batch, rows, into = d.shape(x)
    width = d.width()
    h, made = _new(d, x, width)
    forms = ["repeated", "experts", "view"] + (["each"] * 3 if batch == into else [])
    form = d.rng.choice(forms)
    w = d.parameter(*{"experts": (batch, into, width)}.get(form, (into, width)))
    weight = {
        "repeated": f"self.{w}.expand({batch}, {into}, {width})",
        "view": f"self.{w}.unsqueeze(0).expand({batch}, {into}, {width})",
        "experts": f"self.{w}",
        "each": f"self.{w}.unsqueeze(1).expand({batch}, {into}, {width})",  # the row of each batch, repeated
    }[form]
    code = [f"{h} = torch.bmm({x}, {weight})"]
    layer = form in ("repeated", "view")
    oracle = [f"{h} = q.linear('{w}', {x}, self.{w}.t(), fprop='may', back='may')"] if layer else None
    d.step(f"broadcast ({form})", [x], made, code, oracle)


@kind(0.6)
def strided(d: Draft) -> None:
    """A layer on an input whose leading dimensions are swapped: matmul may repeat the weight."""
    x = d.pick(rank=3)
    if x is None:
        return
    width = d.width()
    layer = d.linear(d.shape(x)[-1], width, bias=False)
    h, made = _new(d, x, width)
    call = f"F.linear({x}.transpose(0, 1), self.{layer}.weight)" if d.chance(0.5) else f"{x}.transpose(0, 1) @ self.{layer}.weight.t()"
    d.step("strided", [x], made, [f"{h} = ({call}).transpose(0, 1).contiguous()"],
           [f"{h} = q.linear('{layer}', {x}.transpose(0, 1), self.{layer}.weight, fprop='may', back='may')",
            f"{h} = {h}.transpose(0, 1).contiguous()"])  # fmt: skip


@kind(0.5)
def gradient_inside(d: Draft) -> None:
    """torch.func.grad in a graph without tangents: forward and backward look alike, and are left alone."""
    x = d.pick()
    if d.train:
        return
    width = d.width()
    layer = d.linear(d.shape(x)[-1], width, bias=False)
    d.layers.pop()
    h, made = _new(d, x, d.shape(x)[-1])
    u = d.name("u")
    d.step("gradient_inside", [x], made,
           [f"{h} = torch.func.grad(lambda v: (self.{layer}(v) * self.{layer}(v)).sum())({x})"],
           [f"{u} = F.linear({x}, self.{layer}.weight)", f"{h} = ({u} + {u}) @ self.{layer}.weight"])  # fmt: skip


@kind(0.6)
def own_function(d: Draft) -> None:
    """A torch.autograd.Function that multiplies: by a parameter as a linear does, or by what is none."""
    x = d.pick(rank=2)
    if x is None:
        return
    into, width = d.shape(x)[-1], d.width()
    name, w = d.name("Own"), d.parameter(width, into)
    factor = d.rng.choice(("dy", "dy", "(dy * 2)"))
    d.outside += [
        f"class {name}(torch.autograd.Function):",
        "    @staticmethod",
        "    def forward(ctx, x, w):",
        "        ctx.save_for_backward(x, w)",
        "        return x @ w.t()",
        "    @staticmethod",
        "    def backward(ctx, dy):",
        "        x, w = ctx.saved_tensors",
        f"        return dy @ w, {factor}.t() @ x",
    ]
    h, made = _new(d, x, width)
    scale = 1 if factor == "dy" else 2
    if d.chance(0.6):
        code = f"{name}.apply({x}, self.{w})"
        oracle = f"q.linear('{w}', {x}, self.{w}, fprop='may', back='may', wgrad_scale={scale})"
    else:
        code, oracle = f"{name}.apply({x}, self.{w} * 2)", f"q.function({x}, self.{w} * 2, {scale})"
    beside = [] if d.chance(0.5) else _call(d, d.linear(into, width), x)
    lines = [[f"{h} = {text}"] + ([f"{h} = {h} + {beside[i]}"] if beside else []) for i, text in enumerate((code, oracle))]
    d.step("own_function", [x], made, *lines)


@kind(0.7)
def outside(d: Draft) -> None:
    """A layer that the module does not own, reached as a global or through a closure."""
    x = d.pick()
    width = d.width()
    name, call = d.name("free"), d.name("call")
    bias = d.chance(0.5)
    d.outside.append(f"{name} = torch.nn.Linear({d.shape(x)[-1]}, {width}, bias={bias})")
    if d.chance(0.5):
        d.outside += [f"def make_{call}(layer):", "    return lambda x: layer(x)", f"{call} = make_{call}({name})"]
    else:
        call = name
    h, made = _new(d, x, width)
    d.step("outside", [x], made, [f"{h} = {call}({x})"],
           [f"{h} = q.linear('?{name}', {x}, {name}.weight, {name}.bias)"])  # fmt: skip
