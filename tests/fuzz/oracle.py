"""What a program must compute: every layer's products by the roles that the recipe gives, composed eagerly.

Nothing here asks `fp4compile.passes`: rules, limits and roles are written down a second time, and numbers come from
`fp4compile.formats.reference` alone. A program's oracle text calls

    q.linear(name, x, w, bias)    a layer: x [..., in], w [out, in], whatever view of the parameter `name` w is
    q.experts(name, x, w, ends)   a layer of experts: rows of x up to ends[0] by w[0], then up to ends[1] by w[1], ...
    q.attention(a, b)             a product of two activations, [..., m, k] x [..., k, n]

and plain operators for all that must be left alone. Each product notes what was quantised (`Oracle.products`), to be
compared with the report.
"""

from collections import Counter
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch

from fp4compile.formats import formats, reference
from fp4compile.formats.operand import Operand
from fp4compile.recipe import Recipe, named
from fp4compile.report.report import Row

MUST = "must"  # a layer's product: quantised wherever the recipe says so
MAY = "may"  # the compiler may leave it alone; where it does not, roles, formats and numbers are as for MUST
NEVER = "never"  # left alone
ANY_NAME = "?"  # begins the name of a layer without a place in the model: the report may call it anything but ""
_HEADS = ("lm_head",)

Key = tuple[str, str, tuple[int, ...], tuple[str, ...]]


def key_of(row: Row, rows_symbolic: bool) -> Key:
    """What identifies a quantised product, whichever operand is on the left."""
    known = row.product != "attention" or not rows_symbolic
    return _key(row.module, row.product, (row.m, row.n, row.k) if known else (), (row.left, row.right))


def _key(module: str, product: str, dims: tuple, names: tuple) -> Key:
    plain = ("float32", "bfloat16", "float16", None)
    # A symbolic size is a text: it may be any number of rows.
    sizes = tuple(sorted(size for size in dims if isinstance(size, int)))
    return module, product, sizes, tuple(sorted("plain" if name in plain else name for name in names))


@dataclass
class Oracle:
    """rows: of the report, read only for the products that MAY be left alone. rows_symbolic: whether the number of
    rows is a symbol there. noise: relative, on every product; what rounding in another order may do to the results is
    seen by comparing with and without it."""

    recipe: Recipe
    rows: list[Row]
    rows_symbolic: bool = False
    noise: float = 0.0
    noise_seed: int = 0
    products: Counter = field(default_factory=Counter)

    def __post_init__(self):
        self.generator = torch.Generator().manual_seed(self.noise_seed)
        self.quantised_rows = Counter((row.module, row.product) for row in self.rows if row.quantised)
        self.attention_rows = [row for row in self.rows if row.product == "attention"]

    # ------------------------------------------------------------ what program texts call

    def linear(self, name, x, w, bias=None, *, fprop=MUST, back=MUST, wgrad_scale=1):
        """x @ w.T + bias as a layer; `fprop` and `back` say whether its products MUST be quantised or MAY.

        wgrad_scale: what the gradient is multiplied by before the weight's is computed of it.
        """
        layer = _Layer(self, name, (x.numel() // x.shape[-1], *w.shape), fprop, back, wgrad_scale)
        y = _Linear.apply(layer, x.reshape(-1, x.shape[-1]), w, bias)
        return y.reshape(*x.shape[:-1], w.shape[0])

    def experts(self, name, x, w, ends):
        """x[rows of expert e] @ w[e].T for each e, as one layer; x [tokens, in], w [experts, out, in]."""
        rows = ("fprop_x", "dgrad_dy") if isinstance(ends, int) else ("fprop_x", "dgrad_dy", "wgrad_dy", "wgrad_x")
        layer = _Layer(self, name, (x.shape[0], *w.shape[1:]), MUST, MUST, 1, never_square=rows,
                       rows=ends if isinstance(ends, int) else None)  # fmt: skip
        return _Experts.apply(layer, x, w, ends)

    @property
    def may(self):
        """The same, for layers whose forward products may be left alone."""
        return _Lenient(self)

    def function(self, x, w, wgrad_scale=1):
        """x @ w.T with a computed weight: no layer, and left alone."""
        y = self._unnamed(x.reshape(-1, x.shape[-1]), w.transpose(-2, -1), NEVER, wgrad_scale)
        return y.reshape(*x.shape[:-1], w.shape[0])

    def attention(self, a, b, scale=1):
        """a @ b of two activations, which may be left alone; its gradients are. scale: of the gradient, for b's."""
        return self._unnamed(a, b, MAY, scale)

    def _unnamed(self, a, b, policy, scale):
        return _Attention.apply(_Layer(self, "", (a.shape[-2], b.shape[-1], a.shape[-1]), policy, MAY, scale), a, b)

    # ------------------------------------------------------------ decisions

    def layer_recipe(self, name: str, dims: tuple[int, int, int]) -> Recipe | None:
        """The recipe that gives a layer's formats; None where rules, limits or its place leave it alone."""
        chosen = self.recipe
        rule = next((rule for rule in self.recipe.rules if fnmatchcase(name, rule.pattern)), None)
        if rule is None:
            if self.recipe.skip_lm_head and name.split(".")[-1] in _HEADS:
                return None
        elif rule.action == "skip":
            return None
        elif rule.action != "quantize":
            chosen = named(rule.action)
        limits = (self.recipe.min_m, self.recipe.min_n, self.recipe.min_k)
        # Of dynamic programs the rows are a symbol, which counts as large enough.
        checked = zip(dims[self.rows_symbolic :], limits[self.rows_symbolic :], strict=True)
        return None if any(size < limit for size, limit in checked) else chosen

    def report_has(self, name: str, product: str) -> bool:
        """Whether the report says that such a product was quantised."""
        if name.startswith(ANY_NAME):
            return any(kind == product for _, kind in self.quantised_rows)
        return self.quantised_rows[name, product] > 0

    def attention_is_quantised(self, dims: tuple[int, int, int]) -> bool:
        """What the report says of the next product of two activations that has such sizes, as far as they are known."""
        for place, row in enumerate(self.attention_rows):
            if all(isinstance(size, str) or size == own for size, own in zip((row.m, row.n, row.k), dims, strict=True)):
                return self.attention_rows.pop(place).quantised
        return False

    def multiply(self, layer: "_Layer", product, left, right, roles, bias=None, sizes=None):
        """left @ right (+ bias), quantised as the recipe says. sizes: (m, n, k) of the report; () is not counted."""
        treatments = self._treatments(layer, product, roles)
        if treatments is None:
            return self._plain(left, right, bias)
        a, b = left, right.transpose(-2, -1)
        operands, names = [], []
        for x, role, treatment in zip((a, b), roles, treatments, strict=True):
            if not role.endswith("_w"):  # several operators stand before it, each with a rounding more or less
                x = self._perturbed(x, 2)
            if treatment is None:
                operands.append(Operand(x))
                names.append("plain")
            else:
                fmt, outer, hadamard = treatment
                outer = None if outer is None else torch.full((), outer, device=x.device)
                operands.append(Operand(*reference.quantize(x, fmt, outer, transform=hadamard), fmt))
                names.append(fmt.name)
        if sizes != ():
            m, n, k = sizes or (left.shape[-2], right.shape[-1], left.shape[-1])
            self.products[_key(layer.name, product, self._sizes(m, n, k, layer, product), tuple(names))] += 1
        out = reference.scaled_mm(*operands, None if self.noise else bias, torch.float32 if self.noise else left.dtype)
        if self.noise:
            out = self._perturbed(out)
            out = (out if bias is None else out + bias.float()).to(left.dtype)
        return out

    def _plain(self, left, right, bias):
        """left @ right (+ bias). Noise comes before the result is rounded: half of a unit in the last place of bfloat16
        is more than the noise, so that most of it would not be seen after that."""
        if not self.noise:
            return left @ right if bias is None else torch.addmm(bias, left, right)
        out = self._perturbed(left.float() @ right.float())
        return (out if bias is None else out + bias.float()).to(left.dtype)

    def _sizes(self, m, n, k, layer: "_Layer", product: str) -> tuple:
        if not self.rows_symbolic:
            return m, n, k
        return {"fprop": (n, k), "dgrad": (n, k), "wgrad": (m, n), "attention": ()}[product]

    def _treatments(self, layer: "_Layer", product: str, roles: tuple[str, str]):
        """(format, static global scale, hadamard) or None for both operands; None where the product is left alone."""
        if product == "attention":  # which of its sizes are symbols, and so no limit's matter, the report knows
            if layer.fprop == NEVER or not self.attention_is_quantised(layer.dims):
                return None
            recipe = self.recipe
        else:
            recipe = self.layer_recipe(layer.name, layer.dims)
        if recipe is None or not any(getattr(recipe, role) for role in roles):
            return None
        if any(role in layer.never_square and getattr(recipe, role) and formats.get(getattr(recipe, role)).square
               for role in roles):  # fmt: skip
            return None
        policy = MUST if product == "attention" else layer.fprop if product == "fprop" else layer.back
        if product == "wgrad" and (layer.rows or layer.dims[0]) == 1:  # of one token: to Inductor an outer product
            policy = MAY
        if policy == MAY and not self.report_has(layer.name, product):
            return None
        chosen = []
        for role in roles:
            name, outer = getattr(recipe, role), None
            if role == "fprop_x" and recipe.activation_scale == "static":
                outer = dict(self.recipe.static_scales).get(layer.name)
            chosen.append(None if name is None else (formats.get(name), outer, product in recipe.hadamard))
        return chosen

    def _perturbed(self, out, times=1):
        if not self.noise:
            return out
        noise = torch.randn(out.shape, generator=self.generator).to(out.device)
        return (out.float() * (1 + times * self.noise * noise)).to(out.dtype)


@dataclass(frozen=True)
class _Lenient:
    oracle: Oracle

    def linear(self, *args, **options):
        return self.oracle.linear(*args, **(options | {"fprop": MAY}))


@dataclass(frozen=True)
class _Layer:
    """dims: (tokens, out features, in features).

    never_square: roles of rows of several groups or matrices, which square blocks would mix. rows: that a product for
    the weight's gradient contracts, where these are not all tokens.
    """

    oracle: Oracle
    name: str
    dims: tuple[int, int, int]
    fprop: str
    back: str
    wgrad_scale: float
    never_square: tuple[str, ...] = ()
    rows: int | None = None

    def multiply(self, product, left, right, roles, bias=None, sizes=None):
        return self.oracle.multiply(self, product, left, right, roles, bias, sizes)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, layer: _Layer, x, w, bias):
        ctx.layer = layer
        ctx.save_for_backward(x, w)
        return layer.multiply("fprop", x, w.t(), ("fprop_x", "fprop_w"), bias)

    @staticmethod
    def backward(ctx, dy):
        (x, w), layer = ctx.saved_tensors, ctx.layer
        dx = dw = db = None
        if ctx.needs_input_grad[1]:
            dx = layer.multiply("dgrad", dy, w, ("dgrad_dy", "dgrad_w"))
        if ctx.needs_input_grad[2]:
            scaled = _scaled(dy, layer.wgrad_scale).t()
            dw = layer.multiply("wgrad", scaled, x, ("wgrad_dy", "wgrad_x"))
        if ctx.needs_input_grad[3]:
            db = dy.sum(0)
        return None, dx, dw, db


class _Experts(torch.autograd.Function):
    """One layer of experts. ends: what is behind each expert's last row; an int where all have as many rows."""

    @staticmethod
    def forward(ctx, layer: _Layer, x, w, ends):
        ctx.layer, ctx.batched = layer, isinstance(ends, int)
        ctx.ends = list(range(ends, x.shape[0] + 1, ends)) if ctx.batched else ends
        ctx.save_for_backward(x, w)
        return _each(ctx, "fprop", x, w.transpose(1, 2), ("fprop_x", "fprop_w"))

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        dx = dw = None
        if ctx.needs_input_grad[1]:
            dx = _each(ctx, "dgrad", dy, w, ("dgrad_dy", "dgrad_w"))
        if ctx.needs_input_grad[2]:
            n, k = w.shape[1:]
            rows = ctx.ends[0] if ctx.batched else x.shape[0]
            dw = torch.stack([
                ctx.layer.multiply("wgrad", dy[start:end].t(), x[start:end], ("wgrad_dy", "wgrad_x"),
                                   sizes=() if expert else (n, k, rows))
                for expert, (start, end) in enumerate(_spans(ctx.ends))
            ])  # fmt: skip
        return None, dx, dw, None


def _spans(ends):
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _each(ctx, product, x, w, roles):
    """The rows of each expert times its matrix w [experts, k, n]; zero behind the last."""
    out = x.new_zeros(x.shape[0], w.shape[-1])
    for expert, (start, end) in enumerate(_spans(ctx.ends)):
        sizes = () if expert else (x.shape[0], w.shape[-1], w.shape[-2])
        out[start:end] = ctx.layer.multiply(product, x[start:end], w[expert], roles, sizes=sizes)
    return out


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, layer: _Layer, a, b):
        ctx.layer = layer
        ctx.save_for_backward(a, b)
        return layer.multiply("attention", a, b, ("attention_a", "attention_b"))

    @staticmethod
    def backward(ctx, dy):
        (a, b), perturbed = ctx.saved_tensors, ctx.layer.oracle._perturbed
        scaled = _scaled(dy, ctx.layer.wgrad_scale)
        return None, perturbed(dy @ b.transpose(-2, -1)), perturbed(a.transpose(-2, -1) @ scaled)


def _scaled(dy, scale):
    return dy if scale == 1 else dy * scale
