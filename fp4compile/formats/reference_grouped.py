"""Grouped products in plain PyTorch: the CPU implementation, and the oracle of the grouped kernels.

All is defined group by group: a group's codes, scales and outer scale are those that `reference.quantize` gives of the
group's rows alone, and a group's product is that of `reference.scaled_mm`. See `groups` for what a group is.
"""

from dataclasses import replace

import torch

from fp4compile.formats import reference, reference_scales
from fp4compile.formats.formats import BlockFormat
from fp4compile.formats.groups import Groups, padded_rows
from fp4compile.formats.layouts import TILE_ROWS, ceil_div, from_swizzled, to_swizzled
from fp4compile.formats.operand import Operand

Quantised = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]


def quantize_matrices(
    x: torch.Tensor, fmt: BlockFormat, dim: int, outer: torch.Tensor | None, layout: str,
    seed: torch.Tensor | None, transform: bool,
) -> Quantised:  # fmt: skip
    """Quantise each matrix of x [G, R, C] by itself along `dim`, -1 or -2, which is the last of the results.

    Returns what `reference.quantize` does; the outer scale of a format that has one a tensor is one a matrix, [G].
    """
    options = {"outer": outer, "layout": layout, "seed": seed, "stream": 0 if dim == -1 else 1, "transform": transform}
    x = x.movedim(dim, -1)
    if outer is not None or fmt.outer != "tensor":
        return reference.quantize(x, fmt, **options)
    amax = largest_of_matrices((reference.hadamard(x) if transform else x).float())
    data, scales, _ = reference.quantize(x, fmt, **options, amax=amax)
    return data, scales, reference.outer_of(amax, fmt).view(-1)


def sweep_matrices(
    x: torch.Tensor, fmt: BlockFormat, dim: int, outer: torch.Tensor | None, layout: str, rule: str
) -> Quantised:
    """`quantize_matrices` with block scales of another rule than "amax", see `reference_scales`."""
    x = x.movedim(dim, -1)
    if outer is not None or fmt.outer != "tensor":
        return reference_scales.quantize(x, fmt, outer, layout, rule)
    data, scales, computed = reference_scales.quantize(x, fmt, None, layout, rule, largest_of_matrices(x.float()))
    return data, scales, computed.view(-1)


def largest_of_matrices(x: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of each matrix of x [G, R, C], [G, 1, 1]; 0 of an empty one."""
    amax = reference.largest(x, per_row=True)
    return amax.amax(-2, keepdim=True) if x.shape[-2] else amax.new_zeros(x.shape[0], 1, 1)


def quantize_rows(
    x: torch.Tensor, groups: Groups, fmt: BlockFormat, outer: torch.Tensor | None, layout: str,
    seed: torch.Tensor | None,
) -> Quantised:  # fmt: skip
    """Quantise grouped rows along their elements: the operand of a product whose groups are rows of its result.

    x: [M, K]. outer: float32 [], for all groups; None computes one for each group, or each row, if the format has one.

    Returns data [M, padded K], whose rows of no group mean nothing; block scales, linear [M, blocks], or swizzled with
    each group's rows padded to 128; the outer scale: [] as given, [G] of each group, or [M, 1] of each row.
    """
    computed = None
    options = {"outer": outer, "seed": seed}
    if outer is None and fmt.outer == "tensor":
        of_rows = groups.of_rows
        amax = _largest_of_groups(reference.largest(x.float(), per_row=True).flatten(), of_rows, groups.count)
        computed = reference.outer_of(amax, fmt)
        options["amax"] = torch.cat((amax, amax.new_zeros(1)))[of_rows].unsqueeze(-1)  # 0 for rows of no group
    data, scales, each = reference.quantize(x, fmt, **options)
    if scales is not None and layout == "swizzled":
        scales = to_swizzled(_padded(scales, groups)[0])
    return data, scales, each if computed is None else computed


def quantize_columns(
    x: torch.Tensor, groups: Groups, fmt: BlockFormat, outer: torch.Tensor | None, layout: str,
    seed: torch.Tensor | None, transform: bool,
) -> Quantised:  # fmt: skip
    """Quantise grouped rows along the rows: an operand of a product that contracts the rows of each group.

    x: [M, K]. outer: as in `quantize_rows`.

    Returns data [K, padded rows], the groups one after the other, each padded to whole tiles of 128 rows with zeros;
    block scales [K, padded rows / block], linear or swizzled as a whole, zero where there is no group; the outer scale:
    [] as given, [G] of each group, or [G, K, 1] of each column of each group.
    """
    rows, group, filled = _padded(x, groups)
    of_tiles = group[::TILE_ROWS]
    tiles = rows.view(-1, TILE_ROWS, x.shape[1]).transpose(1, 2)  # [T, K, 128]
    options, computed = {"outer": outer, "transform": transform}, outer
    if outer is None and fmt.outer is not None:
        values = (reference.hadamard(tiles) if transform else tiles).float()
        amax = reference.largest(values, per_row=True)  # [T, K, 1]
        if fmt.outer == "tensor":
            amax = amax.amax(-2, keepdim=True) if x.shape[1] else amax.new_zeros(amax.shape[0], 1, 1)
        amax = _largest_of_groups(amax, of_tiles, groups.count)
        computed = reference.outer_of(amax, fmt)
        computed = computed.view(-1) if fmt.outer == "tensor" else computed
        options["amax"] = amax[of_tiles]
    if seed is not None:
        noise = reference.rounding_noise(seed, 1, (x.shape[1], rows.shape[0]))
        options["noise"] = noise.view(x.shape[1], -1, TILE_ROWS).transpose(0, 1)
    data, scales, _ = reference.quantize(tiles, fmt, **options)
    filled = filled[:: fmt.block_cols]  # whether a block has a row of a group: its first then is one
    data = _cleared(data.transpose(0, 1).flatten(1), filled)
    if scales is not None:
        scales = _cleared(scales.transpose(0, 1).flatten(1), filled)
        scales = to_swizzled(scales) if layout == "swizzled" else scales
    return data, scales, computed


def values_of(quantised: Quantised, fmt: BlockFormat) -> tuple[torch.Tensor, None, torch.Tensor | None]:
    """What the functions above returned, of linear scales, with `reference.values_of` in the place of codes and scales.

    As a plain operand with that outer scale they make the product that codes and scales make.
    """
    data, scales, outer = quantised
    return reference.values_of(data, scales, fmt), None, outer


def scaled_grouped_mm(a: Operand, b: Operand, offs: torch.Tensor, rows: int, out_dtype: torch.dtype) -> torch.Tensor:
    """The products of all groups, each as `reference.scaled_mm` has it.

    With a B of three dimensions the groups are rows: A [M, K] x B [G, N, K] -> [M, N], row m by the matrix of its
    group, zero where it has none. With two, the groups lie along the contraction: A [P, W] x B [Q, W] -> [G, P, Q].
    W counts the padded rows of an operand that `quantize_columns` made, or of its values, and the rows of a plain one.
    rows: how many rows there are in groups and beyond, M.
    """
    groups = Groups.of(offs, rows)
    bounds = list(zip(groups.starts.tolist(), groups.ends.tolist(), groups.padded_starts.tolist(), strict=True))
    if b.data.dim() == 3:
        out = a.data.new_zeros((rows, b.data.shape[1]), dtype=out_dtype)
        a = with_linear_scales(a, groups)
        for g, (start, end, _) in enumerate(bounds):
            out[start:end] = reference.scaled_mm(_rows(a, g, start, end), _matrix(b, g), None, out_dtype)
        return out
    out = a.data.new_zeros((groups.count, a.data.shape[0], b.data.shape[0]), dtype=out_dtype)
    a, b = with_linear_scales(a), with_linear_scales(b)
    # There are always more padded rows than rows.
    a_padded, b_padded = (x.format is not None or x.data.shape[-1] != rows for x in (a, b))
    for g, (start, end, padded) in enumerate(bounds):
        runs = [_run(x, g, padded if padding else start, end - start, a_padded and b_padded)
                for x, padding in ((a, a_padded), (b, b_padded))]  # fmt: skip
        out[g] = reference.scaled_mm(*runs, None, out_dtype)
    return out


def _padded(x: torch.Tensor, groups: Groups) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(x [M, ...] with its groups padded, the group of each padded row, whether the padded row is a row of it)."""
    group, row = groups.of_padded()
    filled = row < groups.rows
    if not groups.rows:
        return x.new_zeros((row.shape[0], *x.shape[1:])), group, filled
    taken = _bytes(x)[row.clamp(max=groups.rows - 1)]
    taken[~filled] = 0
    return taken.view(x.dtype), group, filled


def _largest_of_groups(values: torch.Tensor, group: torch.Tensor, count: int) -> torch.Tensor:
    """The largest of the values [R, ...] of each group, [G, ...]; 0 of an empty group. NaN propagates."""
    found = values.new_zeros((count + 1, *values.shape[1:]))  # the last is for rows of no group
    index = group.view(-1, *[1] * (values.dim() - 1)).expand_as(values)
    return found.scatter_reduce_(0, index, values, "amax")[:count]


def _cleared(x: torch.Tensor, filled: torch.Tensor) -> torch.Tensor:
    """Codes or block scales [K, ...] of padded rows, zero in the blocks [blocks] that have no row of a group."""
    blocks = _bytes(x).unflatten(1, (filled.shape[0], -1))
    return blocks.mul(filled[:, None]).flatten(1).view(x.dtype)


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """x, as bytes where it is of one byte: torch moves those of 8-bit floats, and does no arithmetic with them."""
    return x.view(torch.uint8) if x.element_size() == 1 else x


def with_linear_scales(x: Operand, groups: Groups | None = None) -> Operand:
    """The operand with linear scales. groups: where their rows are padded, the scales are then those of the rows."""
    if x.format is None or x.scales is None or x.scales.dim() > 1:
        return x
    elements = x.data.shape[-1] * (2 if x.format.packed else 1)
    rows = x.data.shape[0] if groups is None else padded_rows(groups.rows, groups.count)
    scales = from_swizzled(x.scales, rows, elements // x.format.block_cols)
    if groups is not None:
        row = torch.arange(groups.rows, device=scales.device)
        group = groups.of_rows.clamp(max=groups.count - 1)
        place = (groups.padded_starts - groups.starts)[group] + row
        scales = _bytes(scales)[place.clamp(max=rows - 1)].view(scales.dtype)
    return replace(x, scales=scales)


def _rows(x: Operand, g: int, start: int, end: int) -> Operand:
    """The rows of group g."""
    outer = x.outer
    if outer is not None and outer.dim():
        outer = outer[g] if outer.dim() == 1 else outer[start:end]
    return Operand(x.data[start:end], None if x.scales is None else x.scales[start:end], outer, x.format)


def _matrix(x: Operand, g: int) -> Operand:
    """The matrix of group g."""
    outer = x.outer if x.outer is None or not x.outer.dim() else x.outer[g]
    return Operand(x.data[g], None if x.scales is None else x.scales[g], outer, x.format)


def _run(x: Operand, g: int, start: int, length: int, with_padding: bool) -> Operand:
    """The columns `start` and on: group g along the contraction, as many whole blocks as hold `length` of them.

    with_padding: of 32 elements, the longest blocks that there are, whatever the operand's are: the other one has as
    many. The Hadamard transform leaves no zeros in the padding of a block.
    """
    unit = 32 if with_padding else 1 if x.format is None else x.format.block_cols
    length = ceil_div(length, unit) * unit
    per_byte = 2 if x.format is not None and x.format.packed else 1
    data, scales = x.data[:, start // per_byte : (start + length) // per_byte], x.scales
    if scales is not None:
        block = x.format.block_cols
        scales = scales[:, start // block : (start + length) // block]
    outer = x.outer if x.outer is None or not x.outer.dim() else x.outer[g]
    return Operand(data, scales, outer, x.format)
