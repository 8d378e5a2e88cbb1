"""Steps that are layers of every form, and weights that are used more than once."""

from tests.fuzz.kinds import applied, kind, result
from tests.fuzz.programs import Draft, Layer


@kind(6, large=4)
def linear(d: Draft) -> None:
    x = d.pick()
    width = d.width()
    layer = d.linear(d.shape(x)[-1], width, frozen=d.chance(0.1))
    h, shape = result(d, x, width)
    code, oracle = applied(layer, x)
    d.step("linear", [x], shape, [f"{h} = {code}"], [f"{h} = {oracle}"])


@kind(2, large=3, ragged=5)
def activation(d: Draft) -> None:
    x = d.pick()
    h, shape = result(d, x, d.shape(x)[-1])
    forms = ["F.relu({0})", "-{0}", "{0} * 2", "{0} * (F.relu({0}) + 1)", "{0} + 1", "F.relu({0}) * {0}"]
    if d.style.as_models:
        forms += ["F.silu({0})", "F.gelu({0})", "F.rms_norm({0}, {0}.shape[-1:])", "F.layer_norm({0}, {0}.shape[-1:])"]
    text = d.rng.choice(forms)
    d.step("activation", [x], shape, [f"{h} = {text.format(x)}"])


@kind(2)
def add(d: Draft) -> None:
    x = d.pick()
    others = [name for name, shape in d.shapes.items() if shape == d.shape(x) and name != x]
    if others:
        y = d.rng.choice(others)
        h, shape = result(d, x, d.shape(x)[-1])
        d.step("add", [x, y], shape, [f"{h} = {x} {d.rng.choice('+-*')} {y}"])


@kind(2, large=5)
def several(d: Draft) -> None:
    """Q, K and V, or gate and up: layers that read one value."""
    x = d.pick()
    width = d.width()
    layers = [d.linear(d.shape(x)[-1], width, bias=d.chance(0.3)) for _ in range(d.rng.choice((2, 3)))]
    h, shape = result(d, x, width)
    calls = [applied(layer, x) for layer in layers]
    join = d.rng.choice((" + ", " * "))
    lines = [[f"{h} = {join.join(texts)}"] for texts in zip(*calls, strict=True)]
    d.step("several", [x], shape, *lines)


@kind(1.5)
def bare(d: Draft) -> None:
    """F.linear, matmul, einsum, `W @ x` with a parameter of the module itself."""
    x = d.pick()
    into, width = d.shape(x)[-1], d.width()
    flat = len(d.shape(x)) == 2
    crosswise = d.chance(0.5)
    w = d.parameter(into, width) if crosswise else d.parameter(width, into)
    h, shape = result(d, x, width)
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


@kind(1.5)
def addmm(d: Draft) -> None:
    """torch.addmm as Conv1D has it, and with terms that are no bias."""
    x = d.pick(rank=2)
    if x is None:
        return
    into, width, rows = d.shape(x)[-1], d.width(), d.shape(x)[0]
    shapes = [(width,), (width,), (1, width), (1,)] + ([] if d.dynamic else [(rows, width), (rows, 1)])
    w, term = d.parameter(into, width), d.rng.choice(shapes)
    b = d.parameter(*term, letter="b")
    scaled = d.rng.choice(("", "", ", alpha=2", ", beta=2"))
    is_bias = term == (width,) and not scaled
    h, shape = result(d, x, width)
    added = f"{h} = torch.addmm(self.{b}, {x}, self.{w}{scaled})"
    if is_bias:
        d.layers.append(Layer(w, f"self.{w}", width, into, crosswise=True))
    d.step("addmm", [x], shape, [added],
           [f"{h} = q.linear('{w}', {x}, self.{w}.t(), self.{b})" if is_bias else added])  # fmt: skip


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
    h, shape = result(d, x, width)
    code = d.rng.choice((f"F.linear({x}, {w})", f"{x} @ {w}.t()"))
    # Without gradients a graph that multiplies both directions may hold a gradient in disguise.
    policy = "" if same or d.train else ", fprop='may'"
    d.step("again", [x], shape, [f"{h} = {code}"], [f"{h} = q.linear('{layer.name}', {x}, {w}{policy})"])
    if not d.train and any(
        f"'{layer.name}', " in line and "fprop='may'" in line for each in d.steps for line in each.oracle
    ):
        _relax(d, layer)  # this use, too, where an earlier one had the other direction


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
    return line.replace(call, f"q.may.linear('{call[len('q.linear(') + 1 :]}")


@kind(0.8)
def shared_module(d: Draft) -> None:
    """One module applied twice, to its input and to its own result or another value."""
    x = d.pick()
    width = d.shape(x)[-1]
    layer = d.linear(width, width)
    h, shape = result(d, x, width)
    (once, expected) = applied(layer, x)
    (twice, expected_twice) = applied(layer, f"F.relu({h})")
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
    h, shape = result(d, x, width)
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
    h, shape = result(d, x, count)
    e = f"F.embedding(self.{ids}, self.{table})[0, :1]"
    d.step("tied_embedding", [x], shape, [f"{h} = F.linear({x}, self.{table}) + {e}"],
           [f"{h} = q.linear('{table}', {x}, self.{table}) + {e}"])  # fmt: skip


@kind(4, ragged=6)
def moved_rows(d: Draft) -> None:
    """Layers of rows that an index, a table or a concatenation brings together: as many rows as before, or twice.

    Of programs with gradients most have none here: a weight gradient reads columns, which are quantised where they are.
    """
    x = d.pick()
    rows, columns = d.shape(x)[0], d.shape(x)[-1]
    layers = [d.linear(columns, d.width()) for _ in range(d.rng.choice((1, 1, 2)))]
    twice, at = d.chance(0.5), d.rng.randrange(min(rows, 24))  # of dynamic programs the fewest rows count
    some = f"(({x}.shape[0] + 1) // 2)" if d.chance(0.3) else f"{x}.shape[0]"  # an index may leave out rows
    ids = f"(torch.arange({2 if twice else 1} * {x}.shape[0], device={x}.device) * 7 + {at}) % {some}"
    texts = ["{0}[{1}]", "{0}.index_select(0, {1})"]
    if len(d.shape(x)) == 2:
        texts += ["F.embedding({1}, {0})", "{0}.gather(0, ({1}).view(-1, 1).expand(-1, {0}.shape[-1]))"]
        texts += ["{0}[{1}].masked_fill((({1}) > 5).view(-1, 1), 0.0)"]
    texts += ["torch.cat(({0}, {0}))"] if twice else [f"torch.cat(({{0}}[{at}:], {{0}}[:{at}]))"]
    moved, names = d.name("r"), [d.name("h") for _ in layers]
    ending = ".unflatten(0, (2, -1)).sum(0)" if twice else ""
    detached, read = "with torch.no_grad(): " if d.chance(0.8) else "", d.chance(0.15)
    code, rows_of = [], x
    if d.chance(0.5):  # rows of several sizes, so that moved rows may lack the largest element
        rows_of = d.name("u")
        factors = f"(1 + torch.arange({x}.shape[0], device={x}.device) % 5).to({x}.dtype)"
        code.append(f"{rows_of} = {x} * {factors}.view(-1{', 1' * (len(d.shape(x)) - 1)})")
    code.append(f"{detached}{moved} = {d.rng.choice(texts).format(rows_of, ids)}")
    oracle = list(code)
    for name, (ours, theirs) in zip(names, (applied(layer, moved) for layer in layers), strict=True):
        for lines, call in ((code, ours), (oracle, theirs)):
            lines.append(f"{detached}{name} = {call}{ending}")
            lines += [f"{name} = {name} + {x}[..., :1]"] * bool(detached)  # so that there is a gradient
            lines += [f"{name} = {name} + {moved}{ending}[..., :1]"] * read
    outs = [d.layers[place].out for place in range(-len(layers), 0)]
    shapes = {name: (*d.shape(x)[:-1], out) for name, out in zip(names, outs, strict=True)}
    d.step("moved_rows", [x], shapes, code, oracle)
