"""The checks of products that `check-sm100` runs on a GPU and in the simulator.

A product of operands for which every sum is exact in float32 must equal the reference in every bit. A product of hard
operands is compared with float64, within the error of a float32 sum, and so is a product whose epilogue has an
approximate function.
A result that the kernel quantises must equal the reference's for the result of the same kernel without that step; of
groups, for the results of the dense kernel for each group alone.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F

from fp4compile.check.cases import Machine
from fp4compile.check.product_table import TWO_CTAS, Product
from fp4compile.check.values import BF16, ENDS, GROUP_ROWS, SEED, finite, product_differences, same_bits
from fp4compile.formats.epilogue import AMAX, Epilogue
from fp4compile.formats.groups import Groups
from fp4compile.formats.layouts import to_swizzled
from fp4compile.formats.operand import Arguments, Operand
from fp4compile.formats.quantize_spec import QuantizeSpec
from fp4compile.formats.reference_grouped import (
    halves,
    matrix_of_group,
    rows_of_group,
    with_linear_scales,
    with_maxima,
)
from fp4compile.ops.functional import quantize
from fp4compile.ops.matmul import SCALED_GROUPED_MM, SCALED_MM
from fp4compile.ops.quantize import QUANTIZE
from fp4compile.templates.choose import Choice, candidates, choose, to_time
from fp4compile.templates.launch import target_of
from fp4compile.templates.multiply import multiply, multiply_amax, multiply_quantized, scaled_mm_group
from fp4compile.templates.problem import problem_of

Made = Callable[[tuple[int, ...]], torch.Tensor]


def by_every_kernel(product: Product, machine: Machine, made: Made | None = None) -> dict[str, Any]:
    """The kernels that may compute a product, and what is wrong with their values.

    made: makes the activations; None takes operands of which every sum is exact.
    """
    x = exact_arguments(product) if made is None else _hard_arguments(product, machine, made)
    problem = problem_of(_moved(x, machine), machine.target)
    if product.result and not candidates(problem):
        return {"kernels": "", "wrong": []}
    choices = [choose(problem)]
    if product.groups and not product.result:
        choices += to_time(problem)
    if product.weights == 1:
        choices += [choose(problem, name) for name in candidates(problem)]
        choices = [one for one in choices if x.epilogue is None or one.takes_epilogue]
    wrong = [f"{one.kernel}: {what}" for one in dict.fromkeys(choices)
             for what in differences(product, x, one, machine, made is None)]  # fmt: skip
    return {"kernels": ", ".join(dict.fromkeys(one.kernel for one in choices)), "wrong": wrong}


def differences(product: Product, x: Arguments, choice: Choice, machine: Machine, exact: bool = True) -> list[str]:
    """What is wrong with a product. exact: whether every sum is exact.

    choice: the kernel; not of several weights.
    """
    there = _moved(x, machine)
    if product.weights > 1 and not product.groups:
        members = [replace(x, b=exact_operand(x.b, i)) for i in range(product.weights)]
        with machine.running():
            found = scaled_mm_group(there.a, [(_moved(one, machine).b, None) for one in members], BF16)
        return [f"weight {i}: {what}" for i, (got, one) in enumerate(zip(found, members, strict=True))
                for what in _from_reference(got, one, exact)]  # fmt: skip
    with machine.running():
        if product.result == AMAX:
            return amax_differences(there, choice)
        if product.result:
            return quantised_differences(there, choice)
        got = multiply(there, choice)
    return _from_reference(got, x, exact)


def _from_reference(got: torch.Tensor, x: Arguments, exact: bool) -> list[str]:
    a, b = x.a.in_schema, x.b.in_schema
    if x.offs is not None:
        expected = SCALED_GROUPED_MM(*a, *b, x.offs, x.rows, x.out_dtype)
        expected += 0.0  # a kernel's sums begin with +0, the reference's of a group of one row with its product
        if got.dim() == 2:  # rows of no group mean nothing
            got, expected = got[: x.offs[-1]], expected[: x.offs[-1]]
        return same_bits(got, expected)
    if exact and x.epilogue is None:
        return same_bits(got, SCALED_MM(*a, *b, x.bias, x.out_dtype))
    return product_differences(got, x)


# ---------------------------------------------------------------- operands


def reduced(product: Product) -> Product:
    """A product with partly filled tiles in each direction where the table's has whole ones, and few of them.

    The remainders by 16, which decide how rows are loaded and stored, stay.
    """
    n = 288 if product.result == AMAX else 272 - (-product.n % 16)
    if product.result and product.kernel == TWO_CTAS:  # whole parts, rows of codes of whole 16 bytes, and whole blocks
        n = 320 if product.result == AMAX else 288 - (-product.n % 32)
    if product.epilogue == "pair":  # whole tiles of both matrices
        n = 384
    k = 1536 - (-product.k % 256)
    if product.groups:
        rows = GROUP_ROWS * (2 if product.kernel == TWO_CTAS else 1)  # its tiles are as high
        m, k = (144, rows) if product.along_k else (rows, 512)
        return replace(product, groups=len(ENDS), m=m, n=n, k=k)
    return replace(product, m=product.m if product.m <= 64 else 144, n=n, k=k)


def exact_arguments(product: Product) -> Arguments:
    """Arguments of a product for which every sum is exact in float32."""
    x = product.arguments()
    ends = torch.tensor(ENDS, dtype=torch.int32)
    if not product.along_k:
        ends *= max(product.m // GROUP_ROWS, 1)
    generator = torch.Generator().manual_seed(SEED)

    def whole(shape: Sequence[int]) -> torch.Tensor:
        return torch.randint(-3, 4, tuple(shape), generator=generator).to(BF16)

    a, b = exact_operand(x.a, 100), exact_operand(x.b, 0)
    if product.along_k:
        a, b = _without_padding(a, product.k), _without_padding(b, product.k)
    return replace(
        x, a=a, b=b, bias=None if x.bias is None else whole(x.bias.shape),
        auxiliaries=[whole(each.shape) for each in x.auxiliaries],
        # Block scales of sums, and of products of two sums, are then seldom the largest or the least number.
        result_outer=None if x.result_outer is None else torch.tensor(64.0),
        offs=None if x.offs is None else ends,
    )  # fmt: skip


_SCALES = {"e4m3": (0x30, 0x38, 0x40), "e8m0": (126, 127, 128)}  # 1/2, 1, 2
_MAGNITUDES = {"e2m1": (0, 1, 2, 3, 4, 5), "e4m3": (0x00, 0x30, 0x38, 0x40, 0x44), "e5m2": (0x00, 0x38, 0x3C, 0x40)}


def exact_operand(x: Operand, seed: int) -> Operand:
    """An operand like one on the meta device: small elements, block scales 1/2, 1 and 2, outer scales alike."""
    generator = torch.Generator().manual_seed(SEED + seed)

    def chosen(values: Sequence[float], shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype)[torch.randint(len(values), tuple(shape), generator=generator)]

    if x.format is None:
        # A kernel that scales by the largest magnitude of a thread's elements must not have the same one everywhere.
        sizes = torch.where(torch.arange(x.data.shape[-1]) % 256 < 128, 1.0, 1 / 16).to(BF16)
        return replace(x, data=chosen(range(-3, 4), x.data.shape, BF16) * sizes)
    fmt = x.format

    def codes(sign: int) -> torch.Tensor:
        signs = chosen((0, sign), x.data.shape, torch.uint8)
        return chosen(_MAGNITUDES[fmt.element], x.data.shape, torch.uint8) | signs

    data = (codes(8) | codes(8) << 4 if fmt.packed else codes(128)).view(fmt.data_dtype)
    scales = None
    if x.scales is not None and fmt.scale is not None:
        scales = chosen(_SCALES[fmt.scale], x.scales.shape, torch.uint8).view(fmt.scale_dtype)
    outer = None if x.outer is None else chosen((0.5, 1.0, 2.0), x.outer.shape, torch.float32)
    return Operand(data, scales, outer, fmt)


def _without_padding(x: Operand, rows: int) -> Operand:
    """An operand of groups along K with zeros behind each group, as quantisers write them."""
    if x.format is None:
        return x
    per_byte = 2 if x.format.packed else 1
    _, column = Groups.of(torch.tensor(ENDS), rows).of_padded()
    kept = (column < rows).unflatten(0, (-1, per_byte))
    masks = sum(kept[:, i].to(torch.uint8) * (15 << 4 * i if per_byte == 2 else 255) for i in range(per_byte))
    return replace(x, data=(x.data.view(torch.uint8) & masks).view(x.data.dtype))


def _hard_arguments(product: Product, machine: Machine, made: Made) -> Arguments:
    """Arguments of a product of hard operands, quantised, with scales in the layout that the GPU's products read."""
    x, native = exact_arguments(product), machine.target.block_scaled_matrix_units
    a = made((*x.a.data.shape[:-1], product.k))
    b = finite((*x.b.data.shape[:-1], product.k), SEED + 1)
    return replace(x, a=operand(product.a, a, native), b=operand(product.b, b, native))


def operand(name: str | None, x: torch.Tensor, native: bool) -> Operand:
    """An operand of a format, or a plain one. native: whether matrix units read its scales."""
    if name is None:
        return Operand(x.to(BF16))
    found = quantize(x.to(BF16), name, layout="swizzled" if native else "linear")
    return Operand(found.data, found.scales, found.outer, found.format)


def _moved(x: Arguments, machine: Machine) -> Arguments:
    """The arguments on the device of the kernels."""

    def there(part: Any) -> Any:
        if isinstance(part, Operand):
            return replace(part, data=there(part.data), scales=there(part.scales), outer=there(part.outer))
        return part if part is None else part.to(machine.device)

    return replace(x, a=there(x.a), b=there(x.b), bias=there(x.bias), auxiliaries=[*map(there, x.auxiliaries)],
                   result_outer=there(x.result_outer), offs=there(x.offs))  # fmt: skip


# ---------------------------------------------------------------- results that are quantised


def _multiplied_plainly(x: Arguments) -> torch.Tensor:
    problem = replace(problem_of(x, target_of(x.a.data.device)), epilogue=True)
    return multiply(x, choose(problem, "block_scaled_sm100"))


def _halves(x: Operand) -> list[Operand]:
    """The two operands whose rows lie one below the other."""
    if x.outer is None or x.outer.dim() != 1:
        return halves(x)
    return [replace(half, outer=x.outer[i]) for i, half in enumerate(halves(x))]


def _stored_plainly(x: Arguments) -> torch.Tensor:
    """What a kernel with the epilogue's steps alone stores; zeros in rows of no group.

    The second product of a pair is then another tensor that the first one's epilogue reads. Each group is a product by
    itself.
    """
    if x.offs is not None:
        stored = [_stored_plainly(one) for one in _of_each_group(x, Groups.of(x.offs.cpu(), x.a.data.shape[0]))]
        return F.pad(torch.cat(stored), (0, 0, 0, x.a.data.shape[0] - sum(map(len, stored))))
    epilogue = cast(Epilogue, x.epilogue)
    plain = replace(x, epilogue=replace(epilogue, quantize=None, amax=False), result_outer=None)
    if epilogue.pair:
        first, second = _halves(x.b)
        other = _multiplied_plainly(replace(plain, b=second, epilogue=None))
        steps = [step.renamed({"pair": "aux0"}) for step in epilogue.steps]
        epilogue = Epilogue(tuple(steps), epilogue.product_dtype, epilogue.dtype)
        plain = replace(plain, b=first, epilogue=epilogue, auxiliaries=[other])
    return _multiplied_plainly(plain)


def _of_each_group(x: Arguments, groups: Groups) -> Iterator[Arguments]:
    """The product of each group that has rows, by itself."""
    a = with_linear_scales(x.a, groups)
    for g, (start, end) in enumerate(zip(groups.starts.tolist(), groups.ends.tolist(), strict=True)):
        if start < end:
            own = rows_of_group(a, g, start, end)
            scales = None if own.scales is None else to_swizzled(own.scales)
            yield replace(x, a=replace(own, scales=scales), b=_weights_of_group(x, g), offs=None, rows=None,
                          auxiliaries=[each[start:end] for each in x.auxiliaries])  # fmt: skip


def _weights_of_group(x: Arguments, g: int) -> Operand:
    """The matrix of a group; of two weights, the first one's above the second one's."""
    if not x.two_weights:
        return matrix_of_group(x.b, g)
    one, other = (matrix_of_group(half, g) for half in halves(x.b))
    outer = None if one.outer is None else torch.stack if not one.outer.dim() else torch.cat
    parts = zip((one.data, one.scales), (other.data, other.scales), strict=True)
    data, scales = (torch.cat([each.view(torch.uint8) for each in both]).view(both[0].dtype) for both in parts)
    return Operand(data, scales, outer if outer is None else outer((one.outer, other.outer)), one.format)


def quantised_differences(x: Arguments, choice: Choice | None = None) -> list[str]:
    """Differences between a kernel that quantises its result, and the reference for what it stores without that step.

    Both kernels compute the same steps, so codes and scales must be equal in every bit. Codes of rows of no group mean
    nothing. For `x` on a GPU or in a simulator. choice: the kernel; None takes the one that `choose` names.
    """
    spec = cast(QuantizeSpec, x.result_spec)
    data, scales = multiply_quantized(x, choice)
    value = _stored_plainly(x)
    outer, offs = (None if each is None else each.cpu() for each in (x.result_outer, x.offs))
    expected = QUANTIZE(value.cpu(), spec.format.name, [-1], offs=offs, layout="swizzled", outer=outer)
    end = None if offs is None else int(offs[-1])
    return same_bits([data[:end], scales, torch.empty(0)], [expected[0][:end], expected[1], torch.empty(0)])


def amax_differences(x: Arguments, choice: Choice | None = None) -> list[str]:
    """Differences between a kernel that finds the amax of its result, and one that does not.

    The results must be equal in every bit. The largest of the partial maxima must be the amax of the result; with
    groups, each maximum must be the amax of its group. choice: the kernel; None takes the one that `choose` names.
    """
    got, maxima = multiply_amax(x, choice)
    value = _stored_plainly(x).cpu()
    if x.offs is None:
        found, expected = maxima.amax().cpu(), value.float().abs().amax()
    else:
        found, expected = maxima.cpu(), with_maxima(value, x.offs.cpu())[1]
    wrong = [] if torch.equal(found, expected) else [f"amax: {found}, expected {expected}"]
    return same_bits(got, value) + wrong
