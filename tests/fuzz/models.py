"""Steps as models are made of: teachers, adapters, gates, attention, and products that are no layer's."""

from tests.fuzz.kinds import applied, kind, result
from tests.fuzz.programs import Draft, Layer


@kind(1)
def teacher(d: Draft) -> None:
    x = d.pick()
    width = d.width()
    into = d.shape(x)[-1]
    s, t = d.linear(into, width), d.linear(into, width)
    h, shape = result(d, x, width)
    u = d.name("u")
    (student, student_o), (teach, teach_o) = applied(s, x), applied(t, x)
    first, second = [f"{h} = {student}"], [f"with torch.no_grad(): {u} = {teach}"]
    first_o, second_o = [f"{h} = {student_o}"], [f"with torch.no_grad(): {u} = {teach_o}"]
    if d.chance(0.4):  # two layers deep
        t2 = d.linear(width, width)
        deep, deep_o = applied(t2, f"F.relu({u})")
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
    h, shape = result(d, x, width)
    u = d.name("u")
    (base_c, base_o), (a_c, a_o), (b_c, b_o) = applied(base, x), applied(a, x), applied(b, u)
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
    h, shape = result(d, x, into)
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
    called, expected = applied(wide, x)
    cut = {
        "chunk": ".chunk(2, -1)",
        "split": f".split({width}, -1)",
        "unbind": f".unflatten(-1, (2, {width})).unbind(-2)",
        "slice": "",
    }[form]
    h, u = d.name("h"), d.name("u")
    out = d.width()
    layers = [d.linear(width, out), d.linear(width, out)]
    take = [f"{one}, {two} = {u}{cut}"] if cut else [f"{one}, {two} = {u}[..., :{width}], {u}[..., {width}:]"]
    calls = [applied(layer, piece) for layer, piece in zip(layers, (one, two), strict=True)]
    d.step("pieces", [x], {h: (*d.shape(x)[:-1], out)},
           [f"{u} = {called}", *take, f"{h} = {calls[0][0]} * {calls[1][0]}"],
           [f"{u} = {expected}", *take, f"{h} = {calls[0][1]} * {calls[1][1]}"])  # fmt: skip


@kind(1, large=5, ragged=8)
def gated(d: Draft) -> None:
    """down(relu(gate(x)) * up(x)), gate and up apart or one wide layer."""
    x = d.pick()
    width, inner = d.shape(x)[-1], d.width()
    h, shape = result(d, x, width)
    u, v = d.name("u"), d.name("u")
    if d.chance(0.5):
        gate, up = applied(d.linear(width, inner), x), applied(d.linear(width, inner), x)
        code, oracle = [f"{u}, {v} = {gate[0]}, {up[0]}"], [f"{u}, {v} = {gate[1]}, {up[1]}"]
    else:
        both = applied(d.linear(width, 2 * inner), x)
        code, oracle = [f"{u}, {v} = {both[0]}.chunk(2, -1)"], [f"{u}, {v} = {both[1]}.chunk(2, -1)"]
    function = d.rng.choice(("relu", "silu", "gelu")) if d.style.as_models else "relu"
    down = applied(d.linear(inner, width), f"F.{function}({u}) * {v}")
    d.step("gated", [x], shape, [*code, f"{h} = {down[0]}"], [*oracle, f"{h} = {down[1]}"])


@kind(0, ragged=6)
def residual(d: Draft) -> None:
    """A sum that is kept, its norm, and layers that read the norm: what a block of a model begins with."""
    x = d.pick()
    width, (h, made) = d.shape(x)[-1], result(d, x, d.shape(x)[-1])
    part = d.chance(0.3)  # a slice of a wider product, as the norms of Q and K read
    first = [text + f"[..., {width}:]" * part
             for text in applied(d.linear(width, 2 * width if part else width, bias=False), x)]  # fmt: skip
    added = "" if part and d.chance(0.5) else f"{x} + "
    after = [applied(d.linear(width, width, bias=d.chance(0.3)), "n") for _ in range(d.rng.choice((1, 2)))]
    scale = f", self.{d.parameter(width)}" if d.chance(0.5) else ""
    norm = d.rng.choice((f"n = F.rms_norm(s, ({width},){scale})", f"n = F.layer_norm(s, ({width},){scale})"))
    lines = [[f"s = {added}{one}", norm, f"{h} = s + {' * '.join(rest)}"]
             for one, rest in zip(first, zip(*after, strict=True), strict=True)]  # fmt: skip
    d.step("residual", [x], made, *lines)


@kind(0.8)
def in_place(d: Draft) -> None:
    x = d.pick()
    width = d.width()
    h, shape = result(d, x, width)
    called, expected = applied(d.linear(d.shape(x)[-1], width), x)
    change, changed = d.rng.choice((
        ("{0}.relu_()", "{0} = F.relu({0})"), ("{0}.mul_(2)", "{0} = {0} * 2"), ("{0} += 1", "{0} = {0} + 1"),
        ("{0}[..., :16] = 1", "{0} = torch.cat([torch.ones_like({0}[..., :16]), {0}[..., 16:]], -1)"),
    ))  # fmt: skip
    d.step("in_place", [x], shape, [f"{h} = {called}", change.format(h)], [f"{h} = {expected}", changed.format(h)])


@kind(0.5)
def autocast(d: Draft) -> None:
    x = d.pick()
    width = d.width()
    layer = d.linear(d.shape(x)[-1], width)
    has_bias = "bias=True" in d.setup[-1]
    h, shape = result(d, x, width)
    operands = f"{x}.bfloat16(), self.{layer}.weight.bfloat16()" + f", self.{layer}.bias.bfloat16()" * has_bias
    d.step("autocast", [x], shape,
           [f"with torch.autocast({x}.device.type, dtype=torch.bfloat16): {h} = self.{layer}({x})",
            f"{h} = {h}.to({x}.dtype)"],
           [f"{h} = q.linear('{layer}', {operands}).to({x}.dtype)"])  # fmt: skip


@kind(0.6)
def detached(d: Draft) -> None:
    """A layer whose input, or whose weight, takes no gradient here."""
    x = d.pick()
    width = d.width()
    layer = d.linear(d.shape(x)[-1], width, bias=False)
    h, shape = result(d, x, width)
    a, w = d.rng.choice(((f"{x}.detach()", f"self.{layer}.weight"), (x, f"self.{layer}.weight.detach()")))
    d.step("detached", [x], shape, [f"{h} = F.linear({a}, {w})"], [f"{h} = q.linear('{layer}', {a}, {w})"])


@kind(1, large=2)
def attention(d: Draft) -> None:
    x = d.pick()
    width, head = d.shape(x)[-1], d.width()
    h, shape = result(d, x, width)
    a, b, c, s = (d.name("u") for _ in range(4))
    calls = [applied(d.linear(width, head, bias=False), x) for _ in range(3)]
    out = applied(d.linear(head, width), h)
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
    h, shape = result(d, x, width)
    gram, y = d.name("u"), d.name("u")
    called, expected = applied(d.linear(width, width), x)
    code = [f"{gram} = {x} @ {x}.transpose(-2, -1)", f"{y} = {called}"]
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
    h, made = result(d, x, width)
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
    if form == "experts":
        each = f"q.experts('{w}', {x}.flatten(0, 1), self.{w}.transpose(1, 2), {x}.shape[1])"
        oracle = [f"{h} = {each}.unflatten(0, {x}.shape[:2])"]
    d.step(f"broadcast ({form})", [x], made, code, oracle)


@kind(0.7, ragged=5)
def grouped(d: Draft) -> None:
    """Experts as a grouped product, whose groups may be empty, and whose last rows may belong to none.

    Or as gate and up, in one weight or in two, and down.
    """
    x = d.pick(rank=2)
    if x is None:
        return
    rows, into = d.shape(x)
    if into % 8 or rows < 2:  # torch's product takes rows of whole 16 bytes, and of one row no other strides
        return
    width, experts = d.width(8), d.rng.choice((1, 3, 4))
    h, made = result(d, x, width)
    w = d.parameter(experts, into, width)
    # Of dynamic programs the fewest rows count. Some cuts are equal.
    ends = sorted(d.rng.choices(range(min(rows, 24) + 1), k=experts))
    # The operator leaves rows of no expert as they were in memory, in the result and in the gradient of x.
    own = f"torch.arange({x}.shape[0], device={x}.device)[:, None] < {ends[-1]}"
    before, behind = f"{h} = torch.where({own}, {x}, 0).bfloat16()", f"{h} = torch.where({own}, {h}.to({x}.dtype), 0)"
    if not d.dynamic and d.chance(0.4):  # every row belongs to an expert, for which an index gathers it
        ends[-1], at = rows, f"(torch.arange({x}.shape[0], device={x}.device) * 7 + 3) % {x}.shape[0]"
        before, behind = f"{h} = {x}.bfloat16()[{at}]", f"{h} = {h}.to({x}.dtype)"
    offs = f"offs = torch.tensor({ends}, dtype=torch.int32, device={x}.device)"
    forms = "F.grouped_mm({0}, {1}, offs=offs)", f"q.experts('{{2}}', {{0}}, {{1}}.transpose(1, 2), {ends})"
    lines = [[before, f"{h} = {form.format(h, f'self.{w}.bfloat16()', w)}", behind] for form in forms]
    if d.chance(0.4):
        lines = [[before, *gated, behind] for gated in _gated_experts(d, h, experts, into, width, forms)]
    d.step("grouped", [x], made, [offs, *lines[0]], lines[1])


def _gated_experts(d: Draft, h: str, experts: int, into: int, width: int, forms: tuple[str, str]) -> list[list[str]]:
    """Lines that replace h by experts' results, for each form of a grouped product."""
    inner, whole = 128, d.chance(0.6)
    weights = [d.parameter(experts, into, 2 * inner)] if whole else [d.parameter(experts, into, inner) for _ in "12"]
    down = d.parameter(experts, inner, width)
    found = []
    for form in forms:
        products = [form.format(h, f"self.{w}.bfloat16()", w) for w in weights]
        both = f"{products[0]}.chunk(2, -1)" if whole else ", ".join(products)
        found.append([f"gate, up = {both}", f"{h} = F.relu(gate) * up",
                      f"{h} = {form.format(h, f'self.{down}.bfloat16()', down)}"])  # fmt: skip
    return found


@kind(0.6)
def strided(d: Draft) -> None:
    """A layer on an input whose leading dimensions are swapped: matmul may repeat the weight."""
    x = d.pick(rank=3)
    if x is None:
        return
    width = d.width()
    layer = d.linear(d.shape(x)[-1], width, bias=False)
    h, made = result(d, x, width)
    turned, weight = f"{x}.transpose(0, 1)", f"self.{layer}.weight"
    called = d.rng.choice((f"F.linear({turned}, {weight})", f"({turned} @ {weight}.t())"))
    d.step("strided", [x], made, [f"{h} = {called}.transpose(0, 1).contiguous()"],
           [f"{h} = q.linear('{layer}', {turned}, {weight}, fprop='may', back='may')",
            f"{h} = {h}.transpose(0, 1).contiguous()"])  # fmt: skip


@kind(0.5)
def gradient_inside(d: Draft) -> None:
    """torch.func.grad in a graph without tangents: its forward product is a layer's, its gradient is left alone."""
    x = d.pick()
    if d.train:
        return
    width = d.width()
    layer = d.linear(d.shape(x)[-1], width, bias=False)
    d.layers.pop()
    h, made = result(d, x, d.shape(x)[-1])
    d.step("gradient_inside", [x], made,
           [f"{h} = torch.func.grad(lambda v: self.{layer}(v).square().sum())({x})"],
           [f"{h} = 2 * q.linear('{layer}', {x}, self.{layer}.weight) @ self.{layer}.weight"])  # fmt: skip


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
    h, made = result(d, x, width)
    scale = 1 if factor == "dy" else 2
    if d.chance(0.6):
        code = f"{name}.apply({x}, self.{w})"
        oracle = f"q.linear('{w}', {x}, self.{w}, fprop='may', back='may', wgrad_scale={scale})"
    else:
        code, oracle = f"{name}.apply({x}, self.{w} * 2)", f"q.function({x}, self.{w} * 2, {scale})"
    called, expected = applied(d.linear(into, width), x)
    d.step("own_function", [x], made, [f"{h} = {code} + {called}"], [f"{h} = {oracle} + {expected}"])


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
    h, made = result(d, x, width)
    d.step("outside", [x], made, [f"{h} = {call}({x})"],
           [f"{h} = q.linear('?{name}', {x}, {name}.weight, {name}.bias)"])  # fmt: skip


@kind(0.6)
def multihead_attention(d: Draft) -> None:
    """nn.MultiheadAttention of a value with itself, or with another, for which its input weight is split."""
    x = d.pick(rank=3)
    if x is None or d.shape(x)[-1] % 2:
        return
    width, heads = d.shape(x)[-1], 2
    name, (h, made) = d.name("m"), result(d, x, width)
    weight, bias = f"self.{name}.in_proj_weight", f"self.{name}.in_proj_bias"
    d.setup.append(f"self.{name} = torch.nn.MultiheadAttention({width}, {heads}, batch_first=True)")
    d.layers += [Layer(f"{name}.in_proj_weight", weight, 3 * width, width)]
    d.layers += [Layer(f"{name}.out_proj", f"self.{name}.out_proj.weight", width, width)]

    def projected(value: str, part: str = "") -> str:
        return f"q.linear('{name}.in_proj_weight', {value}, {weight}{part}, {bias}{part})"

    # torch's module goes through the tokens place by place, the batch inside: blocks along the tokens show it.
    first = f"{x}.transpose(0, 1)"
    if d.chance(0.6):
        code = [f"{h} = self.{name}({x}, {x}, {x}, need_weights=False)[0]"]
        oracle = [f"a, b, c = {projected(first)}.chunk(3, -1)"]
    else:
        code = [f"y = F.relu({x})", f"{h} = self.{name}({x}, y, y, need_weights=False)[0]"]
        oracle = [f"a = {projected(first, f'[:{width}]')}",
                  f"b, c = {projected(f'F.relu({first})', f'[{width}:]')}.chunk(2, -1)"]  # fmt: skip
    split = f"[y.unflatten(-1, ({heads}, -1)).permute(1, 2, 0, 3) for y in (a, b, c)]"
    oracle += [f"{h} = F.scaled_dot_product_attention(*{split}).permute(2, 0, 1, 3).flatten(-2)",
               f"{h} = {applied(f'{name}.out_proj', h)[1]}.transpose(0, 1)"]  # fmt: skip
    d.step("multihead_attention", [x], made, code, oracle)
