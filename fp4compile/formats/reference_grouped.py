"""Grouped matmuls in plain PyTorch: the CPU implementation, and the oracle of the grouped kernels.

A group's codes and scales are those of `reference.quantize` of its rows alone, and its matmul is that of
`reference.scaled_mm`. See `formats.grouping` for groups.
"""

from dataclasses import replace

import torch

from fp4compile.formats import reference, reference_scales
from fp4compile.formats.formats import BlockFormat, as_integers
from fp4compile.formats.grouping import Groups, padded_rows
from fp4compile.formats.layouts import TILE_ROWS, ceil_div, from_swizzled, to_swizzled
from fp4compile.formats.operand import Operand
from fp4compile.formats.quantize_spec import ROWS, QuantizeSpec

Quantised = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]


def quantize_along(
    spec: QuantizeSpec, x: torch.Tensor, dim: int, offs: torch.Tensor | None, outer: torch.Tensor | None,
    seed: torch.Tensor | None, amax: torch.Tensor | None = None,
) -> Quantised:  # fmt: skip
    """Quantise x along one dimension by a spec without its prologue: codes or values, block scales, outer.

    outer: the global or row scale. amax: as in the op `quantize`.
    """
    if amax is not None and amax.dim() == 1 and spec.format.outer == "tensor" and not (spec.each_matrix or spec.ragged):
        amax = amax.amax()
    fmt, layout, transform, stream = spec.format, spec.layout, spec.transforms(dim), 0 if dim == ROWS else 1
    if spec.scale_rule != "amax" and spec.each_matrix:
        found = sweep_matrices(x, fmt, dim, outer, layout)
    elif spec.scale_rule != "amax":
        found = reference_scales.quantize(x.movedim(dim, -1), fmt, outer, layout)
    elif spec.each_matrix:
        found = quantize_matrices(x, fmt, dim, outer, layout, seed, transform, amax)
    elif spec.ragged and dim == ROWS:
        found = quantize_rows(x, Groups.of(offs, x.shape[0]), fmt, outer, layout, seed, amax)
    elif spec.ragged:
        found = quantize_columns(x, Groups.of(offs, x.shape[0]), fmt, outer, layout, seed, transform)
    else:
        found = reference.quantize(
            x.movedim(dim, -1), fmt, outer, layout, seed=seed, stream=stream, transform=transform, amax=amax
        )
    return values_of(found, fmt) if dim in spec.values else found


def quantize_matrices(
    x: torch.Tensor, fmt: BlockFormat, dim: int, outer: torch.Tensor | None, layout: str,
    seed: torch.Tensor | None, transform: bool, amax: torch.Tensor | None = None,
) -> Quantised:  # fmt: skip
    """Quantise each matrix of x [G, R, C] separately along `dim` (-1 or -2), the last dimension of the results.

    amax: float32, of the global or row scales' shape, of which they are made; None computes it from x.

    Returns data, block scales and global or row scales as `reference.quantize` does; global scales are [G], one for
    each matrix.
    """
    options = {"outer": outer, "layout": layout, "seed": seed, "stream": 0 if dim == -1 else 1, "transform": transform}
    x = x.movedim(dim, -1)
    if outer is not None or fmt.outer != "tensor":
        return reference.quantize(x, fmt, **options, amax=amax)
    if amax is None:
        amax = largest_of_matrices((reference.hadamard(x) if transform else x).float())
    amax = amax.view(-1, 1, 1)
    data, scales, _ = reference.quantize(x, fmt, **options, amax=amax)
    return data, scales, reference.outer_of(amax, fmt).view(-1)


def sweep_matrices(x: torch.Tensor, fmt: BlockFormat, dim: int, outer: torch.Tensor | None, layout: str) -> Quantised:
    """`quantize_matrices` with the block scales of least error, see `reference_scales`."""
    x = x.movedim(dim, -1)
    if outer is not None or fmt.outer != "tensor":
        return reference_scales.quantize(x, fmt, outer, layout)
    data, scales, computed = reference_scales.quantize(x, fmt, None, layout, largest_of_matrices(x.float()))
    return data, scales, computed.view(-1)


def largest_of_matrices(x: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of each matrix of x [G, R, C], [G, 1, 1]; 0 for an empty matrix."""
    amax = reference.largest(x, per_row=True)
    return amax.amax(-2, keepdim=True) if x.shape[-2] else amax.new_zeros(x.shape[0], 1, 1)


def quantize_rows(
    x: torch.Tensor, groups: Groups, fmt: BlockFormat, outer: torch.Tensor | None, layout: str,
    seed: torch.Tensor | None, amax: torch.Tensor | None = None,
) -> Quantised:  # fmt: skip
    """Quantise grouped rows along K: an operand of a matmul whose groups are rows of the result.

    x: [M, K]. outer: float32 [], a static global scale of all groups; None computes global or row scales if the format
    has them. amax: float32 [G], of which the groups' global scales are made; None takes each group's amax.

    Returns data [M, padded K], where rows outside all groups are arbitrary; block scales, linear [M, blocks], or
    swizzled with each group's rows padded to 128; global scales [] (static) or [G], or row scales [M, 1].
    """
    computed = None
    options = {"outer": outer, "seed": seed}
    if outer is None and fmt.outer == "tensor":
        of_rows = groups.of_rows
        if amax is None:
            amax = _largest_of_groups(reference.largest(x.float(), per_row=True).flatten(), of_rows, groups.count)
        computed = reference.outer_of(amax, fmt)
        options["amax"] = torch.cat((amax, amax.new_zeros(1)))[of_rows].unsqueeze(-1)  # 0 for rows of no group
    data, scales, each = reference.quantize(x, fmt, **options)
    if scales is not None and layout == "swizzled":
        scales = to_swizzled(_padded(scales, groups)[0])
    return data, scales, each if computed is None else computed


def with_maxima(x: torch.Tensor, offs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [M, K] with zeros in the rows of no group, and the amax of each group, float32 [G]."""
    groups = Groups.of(offs, x.shape[0])
    maxima = _largest_of_groups(reference.largest(x.float(), per_row=True).flatten(), groups.of_rows, groups.count)
    return torch.where((groups.of_rows < groups.count).unsqueeze(-1), x, 0), maxima


def lay_out_rows(scales: torch.Tensor, offs: torch.Tensor | None) -> torch.Tensor:
    """Convert linear scales of rows to the swizzled layout in which quantising the rows would have stored them.

    scales: [..., M, blocks]. offs: None, or the groups of the M rows of one matrix; each is padded to 128 rows.
    """
    return to_swizzled(scales if offs is None else _padded(scales, Groups.of(offs, scales.shape[0]))[0])


def quantize_columns(
    x: torch.Tensor, groups: Groups, fmt: BlockFormat, outer: torch.Tensor | None, layout: str,
    seed: torch.Tensor | None, transform: bool,
) -> Quantised:  # fmt: skip
    """Quantise grouped rows along M: an operand of a matmul that contracts the rows of each group.

    x: [M, K]. outer: float32 [], a static global scale of all groups; None computes scales if the format has them.

    Returns data [K, padded rows], the groups one after the other, each padded to whole tiles of 128 rows with zeros;
    block scales [K, padded rows / block], linear or swizzled as a whole, zero where there is no group; global scales []
    (static) or [G], or a scale for each column of each group, [G, K, 1].
    """
    rows, group, filled = _padded(x, groups)
    of_tiles = group[::TILE_ROWS]
    tiles = rows.view(-1, TILE_ROWS, x.shape[1]).transpose(1, 2)  # [T, K, 128]
    options, computed = {"outer": outer, "transform": transform}, outer
    if outer is None and fmt.outer is not None:
        values = (reference.hadamard(tiles) if transform else tiles).float()
        amax = largest_of_matrices(values) if fmt.outer == "tensor" else reference.largest(values, per_row=True)
        amax = _largest_of_groups(amax, of_tiles, groups.count)  # of [T, 1, 1] or [T, K, 1]
        computed = reference.outer_of(amax, fmt)
        computed = computed.view(-1) if fmt.outer == "tensor" else computed
        options["amax"] = amax[of_tiles]
    if seed is not None:
        noise = reference.rounding_noise(seed, 1, (x.shape[1], rows.shape[0]))
        options["noise"] = noise.view(x.shape[1], -1, TILE_ROWS).transpose(0, 1)
    data, scales, _ = reference.quantize(tiles, fmt, **options)
    filled = filled[:: fmt.block_cols]  # whether a block has a row of a group: then its first row is one
    data = _cleared(data.transpose(0, 1).flatten(1), filled)
    if scales is not None:
        # A block of 128 elements has one scale in a tile: then `flatten` copies nothing.
        scales = _cleared(scales.transpose(0, 1).flatten(1), filled).contiguous()
        scales = to_swizzled(scales) if layout == "swizzled" else scales
    return data, scales, computed


def values_of(quantised: Quantised, fmt: BlockFormat) -> tuple[torch.Tensor, None, torch.Tensor | None]:
    """Replace codes and linear scales by dequantised values (`reference.values_of`); keep the global or row scale.

    A plain operand of these values and this global or row scale gives the same result of a matmul as the codes.
    """
    data, scales, outer = quantised
    return reference.values_of(data, scales, fmt), None, outer


def scaled_grouped_mm(a: Operand, b: Operand, offs: torch.Tensor, rows: int, out_dtype: torch.dtype) -> torch.Tensor:
    """The matmuls of all groups, each computed by `reference.scaled_mm`.

    If B has three dimensions, the groups are rows: A [M, K] x B [G, N, K] -> [M, N]; row m is multiplied by the matrix
    of its group, and the result is zero if it has no group. If B has two dimensions, the groups lie along the
    contraction: A [P, W] x B [Q, W] -> [G, P, Q]. W is the number of padded rows for an operand from `quantize_columns`
    or its dequantised values, and the number of rows for a plain operand.
    rows: M, the number of rows, including those of no group.
    """
    groups = Groups.of(offs, rows)
    bounds = list(zip(groups.starts.tolist(), groups.ends.tolist(), groups.padded_starts.tolist(), strict=True))
    if b.data.dim() == 3:
        out = a.data.new_zeros((rows, b.data.shape[1]), dtype=out_dtype)
        a = with_linear_scales(a, groups)
        for g, (start, end, _) in enumerate(bounds):
            out[start:end] = reference.scaled_mm(
                rows_of_group(a, g, start, end), matrix_of_group(b, g), None, out_dtype
            )
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
    """x [M, ...] with its groups padded, the group of each padded row, and whether that row is a row of x."""
    group, row = groups.of_padded()
    filled = row < groups.rows
    if not groups.rows:
        return x.new_zeros((row.shape[0], *x.shape[1:])), group, filled
    taken = as_integers(x)[row.clamp(max=groups.rows - 1)]
    taken[~filled] = 0
    return taken.view(x.dtype), group, filled


def _largest_of_groups(values: torch.Tensor, group: torch.Tensor, count: int) -> torch.Tensor:
    """The maximum over each group of the values [R, ...], [G, ...]; 0 for an empty group. NaN propagates."""
    found = values.new_zeros((count + 1, *values.shape[1:]))  # the last element: rows of no group
    index = group.view(-1, *[1] * (values.dim() - 1)).expand_as(values)
    return found.scatter_reduce_(0, index, values, "amax")[:count]


def _cleared(x: torch.Tensor, filled: torch.Tensor) -> torch.Tensor:
    """Zero codes or block scales [K, ...] in the blocks without a row of a group. filled: bool [blocks]."""
    blocks = as_integers(x).unflatten(1, (filled.shape[0], -1))
    return blocks.mul(filled[:, None]).flatten(1).view(x.dtype)


def with_linear_scales(x: Operand, groups: Groups | None = None) -> Operand:
    """The operand with linear scales. groups: those by which swizzled scales are padded; None without such padding."""
    if x.format is None or x.scales is None or x.scales.dim() > 1:
        return x
    elements = x.data.shape[-1] * (2 if x.format.packed else 1)
    rows = x.data.shape[0] if groups is None else padded_rows(groups.rows, groups.count)
    scales = from_swizzled(x.scales, rows, elements // x.format.block_cols)
    if groups is not None:
        row = torch.arange(groups.rows, device=scales.device)
        group = groups.of_rows.clamp(max=groups.count - 1)
        place = (groups.padded_starts - groups.starts)[group] + row
        scales = as_integers(scales)[place.clamp(max=rows - 1)].view(scales.dtype)
    return replace(x, scales=scales)


def rows_of_group(x: Operand, g: int, start: int, end: int) -> Operand:
    """The rows of group g, from `start` to `end`, of an operand with linear scales."""
    outer = x.outer
    if outer is not None and outer.dim():
        outer = outer[g] if outer.dim() == 1 else outer[start:end]
    return Operand(x.data[start:end], None if x.scales is None else x.scales[start:end], outer, x.format)


def halves(x: Operand) -> list[Operand]:
    """The first half of an operand's matrices, and the second half, as two operands."""

    def half(part: torch.Tensor | None, which: int) -> torch.Tensor | None:
        return part if part is None or not part.dim() else part.chunk(2)[which]

    return [Operand(*(half(part, i) for part in (x.data, x.scales, x.outer)), x.format) for i in range(2)]


def matrix_of_group(x: Operand, g: int) -> Operand:
    """The matrix of group g, with its block scales and its global or row scale."""
    outer = x.outer if x.outer is None or not x.outer.dim() else x.outer[g]
    return Operand(x.data[g], None if x.scales is None else x.scales[g], outer, x.format)


def _run(x: Operand, g: int, start: int, length: int, with_padding: bool) -> Operand:
    """The columns of group g along the contraction: from `start` on, `length` of them rounded up to whole blocks.

    with_padding: round up to 32 elements, or a longer block, so that both operands have one length. After the Hadamard
    transform the padding of a block is not zero.
    """
    block = 1 if x.format is None else x.format.block_cols
    unit = max(32, block) if with_padding else block
    length = ceil_div(length, unit) * unit
    per_byte = 2 if x.format is not None and x.format.packed else 1
    data, scales = x.data[:, start // per_byte : (start + length) // per_byte], x.scales
    if scales is not None:
        scales = scales[:, start // block : (start + length) // block]
    outer = x.outer if x.outer is None or not x.outer.dim() else x.outer[g]
    return Operand(data, scales, outer, x.format)
