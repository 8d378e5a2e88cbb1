"""`Row`: how one matmul of a compiled graph is computed, and the name that reports show."""

from dataclasses import dataclass, field, replace

PRODUCTS = ("fprop", "dgrad", "wgrad", "attention", "other")
CATEGORIES = ("dense", "experts", "attention", "convolution", "other")


@dataclass(frozen=True)
class Row:
    """One matmul of a compiled graph: [m, k] times [k, n].

    module: fully qualified name of the layer; "" for a matmul outside of every layer.
    product: one of PRODUCTS.
    m, n, k: the dimensions of the matmul; text where they are symbolic, None where they are not known.
    left, right: the format of each operand, or its dtype (such as "bfloat16") where it is not quantised; None where
        the operand is unknown.
    tier: what computes the matmul: "native" (the GPU's block-scaled matrix units), "emulated" (other GPU kernels) or
        "reference" (PyTorch operations, on a CPU); None where the matmul is not quantised.
    reason: why the matmul is not quantised; None where it is quantised.
    flops: floating-point operations of one run. Where a size is symbolic, they are counted at the sizes of the call
        that was captured; None where they are not known.
    saved, saved_plain: for a wgrad, the bytes of packed activation that the forward pass saves for it, and the bytes of
        this activation unquantised. None where nothing is saved for this matmul: the activation is recomputed, or
        saved for another layer that has the same input.
    category: one of CATEGORIES. "experts" are grouped matmuls, and batched matmuls with a parameter.
    name: the layer's name that the recipe's rules match, where it differs from `module`: where a submodule was
        compiled by itself, rules match the name below it.
    note: how a quantised matmul differs from the recipe, and why; None where it does not.
    weight_scales: how the block scales of the weight are chosen, where the recipe's `weight_scales` is not "amax": that
        setting, or "amax (training)" in a graph that computes gradients; None elsewhere.
    fused: the operations in the prologues of its operands' quantisers, such as "silu, mul" (";" separates two
        operands), and the operations of its own epilogue where that quantises its result, or finds its amax for the
        next matmul: "silu, mul, quantize". None without any, and before the graph is compiled.
    node: the matmul's node in the captured graph, as graph dumps show it; None inside of a nested region.
    plain_seconds, seconds: the matmul's predicted time in bf16, and as planned, with its part of launches that several
        matmuls need (`roofline.compiled_graph`). None where no GPU is named, and for matmuls of unknown size.
    shared_seconds: its part of the launches that matmuls of other layers need too; included in `seconds`.
    launches: the launches for the matmul, such as "quantise, rows / 3; wgmma_sm90": a third of a quantiser whose result
        two other matmuls read too, and a kernel of its own.
    weight, weight_plain: for an fprop whose weight is a parameter, the bytes of this weight packed by `pack_` in the
        linear layout (None where it is not quantised), and unquantised. None where the size is unknown.
    again: whether an earlier compilation of the same function has this matmul in other sizes.

    Rows are compared without node, seconds, launches and again.
    """

    module: str
    product: str
    m: int | str | None
    n: int | str | None
    k: int | str | None
    left: str | None
    right: str | None
    tier: str | None
    reason: str | None
    flops: int | None
    saved: int | None = None
    saved_plain: int | None = None
    category: str = "dense"
    name: str | None = None
    note: str | None = None
    weight_scales: str | None = None
    fused: str | None = None
    node: str | None = field(default=None, compare=False)
    plain_seconds: float | None = field(default=None, compare=False)
    seconds: float | None = field(default=None, compare=False)
    shared_seconds: float | None = field(default=None, compare=False)
    launches: str | None = field(default=None, compare=False)
    weight: int | None = None
    weight_plain: int | None = None
    again: bool = field(default=False, compare=False)

    @property
    def quantised(self) -> bool:
        """Whether the matmul is quantised."""
        return self.reason is None


def sizeless(row: Row) -> Row:
    """The row without fields that depend on varying sizes: equal for one matmul in compilations of other sizes."""
    return replace(row, m=None, n=None, k=None, flops=None, saved=None, saved_plain=None, fused=None)


def shown_name(row: Row) -> str:
    """The full name of the layer, with brackets around the part that rules do not match."""
    if row.name is None:
        return row.module or "(top)"
    if is_below(row.name, row.module):
        return f"[{row.module.removesuffix(row.name)}]{row.name}"
    return f"{row.module} [rules: {row.name}]"


def one_line(text: str) -> str:
    """The text with all unprintable characters escaped: newlines, tabs, terminal escapes."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def is_below(name: str, path: str) -> bool:
    """Whether a dotted name is the whole or the last part of a path; true for the empty name."""
    return name in ("", path) or path.endswith(f".{name}")
