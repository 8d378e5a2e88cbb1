"""The launches of a quantiser: its kernels, and the views of tensors that are their arguments.

`plan` is pure: it allocates the results, returns the launches that fill them, and launches nothing. It takes concrete
and symbolic sizes, real, fake and meta tensors, so that one plan is run eagerly, traced into a graph, compiled ahead of
time, interpreted and simulated. Results have the bits of `formats.reference`.

Each kernel has its own file, with its tile sizes and the function that makes its launch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from fp4compile._compat import statically_true
from fp4compile.formats import reference, reference_grouped
from fp4compile.formats.formats import BlockFormat
from fp4compile.formats.prologue import apply
from fp4compile.formats.quantize_spec import COLUMNS, ROWS, QuantizeSpec
from fp4compile.hardware import Target
from fp4compile.templates import scale_sweep
from fp4compile.templates.launch import Launch, target_of
from fp4compile.templates.quantize import both, squares
from fp4compile.templates.quantize.amax import outer_of, outers_of
from fp4compile.templates.quantize.column import columns_launch
from fp4compile.templates.quantize.outputs import Outer, Output, empty_output
from fp4compile.templates.quantize.prologues import takes_prologue
from fp4compile.templates.quantize.row import rows_launch
from fp4compile.templates.quantize.row_on_chip import (
    after_first_launch,
    finds_row_scales,
    in_one_launch,
    whole_rows_launch,
    with_statistics,
)
from fp4compile.templates.quantize.source import Source, lies_transposed, source_of
from fp4compile.templates.view import View

# Codes (or dequantised values), block scales, and global or row scales, as `reference.quantize` returns them.
Quantized = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]


@dataclass(frozen=True, eq=False)
class Plan:
    """Launches and their results: an output, and global or row scales, for each dimension of a spec; in order."""

    launches: tuple[Launch, ...]
    outputs: tuple[Output, ...]
    outers: tuple[torch.Tensor | None, ...]

    def results(self) -> tuple[Quantized, ...]:
        """The results for callers, valid once the launches have run."""
        return tuple((*output.typed(), outer) for output, outer in zip(self.outputs, self.outers, strict=True))


def quantize(
    spec: QuantizeSpec,
    x: torch.Tensor,
    operands: Sequence[torch.Tensor] = (),
    offs: torch.Tensor | None = None,
    outer: torch.Tensor | None = None,
    seed: torch.Tensor | None = None,
    amax: torch.Tensor | None = None,
) -> tuple[tuple[Quantized, ...], tuple[torch.Tensor, ...]]:
    """The results along each dimension, and the stored results of the prologue, for arguments of the op `quantize`.

    On SM100 the hardware rounds stochastically: results equal the reference's only in distribution.
    """
    written: tuple[torch.Tensor, ...] = ()
    if spec.prologue is not None:
        taken = takes_prologue(spec, [each.dtype for each in (x, *operands)], x.shape[-1])
        if not taken or statically_true(x.numel() == 0):
            x, computed = apply(spec.prologue, (x, *operands))
            spec, operands, written = replace(spec, prologue=None), (), tuple(computed)
    if spec.scale_rule != "amax" or _by_reference(spec, x):
        return tuple(_without_plan(spec, x, dim, offs, outer, seed, amax) for dim in spec.dims), written
    if x.dim() == 1:
        ((row, *_), _) = quantize(spec, x.unsqueeze(0), (), None, outer, seed, amax)
        return (reference.drop_row(row),), written
    stored = () if spec.prologue is None else spec.prologue.empty_stored(x)
    target = target_of(x.device)
    found = plan(spec, x, target, operands=operands, stored=stored, offs=offs, outer=outer, seed=seed, amax=amax)
    for launch in found.launches:
        launch.run()
    return found.results(), (*stored, *written)


def _by_reference(spec: QuantizeSpec, x: torch.Tensor) -> bool:
    """Whether there is no kernel: for stochastically rounded square blocks, which no recipe uses, and for empty tensors
    (a grid cannot be empty, and its program would read and write)."""
    return (spec.format.square and spec.seeded) or (not spec.ragged and statically_true(x.numel() == 0))


def _without_plan(spec: QuantizeSpec, x, dim: int, offs, outer, seed, amax) -> Quantized:
    """The results along a dimension, computed by PyTorch operations or by the kernels of the scale sweep."""
    fmt = spec.format
    if spec.scale_rule != "amax" and fmt.scale == "e4m3" and not statically_true(x.numel() == 0):
        each = spec.each_matrix and outer is None and fmt.outer == "tensor"
        return scale_sweep.quantize(x.movedim(dim, -1), fmt, outer, spec.layout, each_matrix=each)
    return reference_grouped.quantize_along(spec, x, dim, offs, outer, seed, amax)


def plan(
    spec: QuantizeSpec,
    x: torch.Tensor,
    target: Target,
    *,
    operands: Sequence[torch.Tensor] = (),
    stored: Sequence[torch.Tensor] = (),
    offs: torch.Tensor | None = None,
    outer: torch.Tensor | None = None,
    seed: torch.Tensor | None = None,
    amax: torch.Tensor | None = None,
) -> Plan:
    """The launches of a quantiser by the rule "amax".

    x: of two dimensions or more; the first operand of the prologue, if there is one, which `takes_prologue` accepts.
    stored: tensors for the stored results of the prologue. The others are arguments of the op `quantize`.
    Raises RuntimeError if a launch would address memory beyond the storage of a tensor, and for a prologue that no
    kernel takes.
    """
    if spec.prologue is not None:
        dtypes = [each.dtype for each in (x, *operands)]
        if amax is not None or not takes_prologue(spec, dtypes, x.shape[-1]):
            raise RuntimeError(f"prologue: no kernel of {spec.format.name} along {spec.dims} computes it")
    along = x.movedim(spec.dims[0], -1)
    down = _reads_down(spec, along, given=amax is not None)
    source = source_of(along.transpose(-2, -1) if down else along, target, spec.prologue, operands, stored)
    if amax is not None:
        source = replace(source, amax_bits=View.flat(amax.reshape(-1).view(torch.int32), amax.numel()))
    # Rows with linear scales and row scales, or static scales, do not depend on their groups. The host never reads the
    # offsets: grids are as large as any offsets need.
    if spec.ragged and (spec.dims != (ROWS,) or spec.swizzled or (outer is None and spec.format.outer == "tensor")):
        source = replace(source, offs=View.flat(offs.contiguous(), offs.shape[0]))
    if spec.both:
        return _both(spec, x, source, outer, seed)
    if down or spec.format.square:
        return _columns(spec, along, source, down, outer, seed)
    return _rows(spec, along.shape, source, outer, seed)


def _reads_down(spec: QuantizeSpec, x: torch.Tensor, given: bool) -> bool:
    """Whether the last dimension of x, which is quantised, is read as columns of x transposed.

    A transposed view is read in its memory layout. The Hadamard transform, groups along their rows and given amaxes of
    columns need such a view, and copy any other x. Square blocks of any other x are read by rows.
    """
    if spec.both or (spec.ragged and spec.dims == (ROWS,)):
        return False
    if spec.ragged or spec.hadamard:
        return True
    if given and not spec.format.square:
        return spec.dims == (COLUMNS,)
    return spec.prologue is None and lies_transposed(x)


def _columns(spec: QuantizeSpec, x: torch.Tensor, source: Source, down: bool, static, seed) -> Plan:
    """The plan that quantises the last dimension of x by a kernel for columns or square blocks.

    source: x or, with `down`, x transposed.
    """
    fmt, layout, each_matrix = spec.format, spec.layout, _each_matrix(spec)
    shape = (source.cols, source.padded_rows) if source.groups else x.shape
    output = empty_output(source, shape, fmt, layout, columns=down, values=bool(spec.values))
    if squares.serves(source, fmt):
        outer = outer_of(source, fmt, static, each_matrix)
        launch = squares.squares_launch(source, fmt, outer, layout, None if down else output, output if down else None)
        return Plan((*outer.launches, launch), (output,), (outer.result,))
    outers = outers_of(source, fmt, static, with_rows=False, transform=spec.hadamard, each_matrix=each_matrix)
    launch = columns_launch(
        source, fmt, outers, layout, output, seed=seed, stream=_stream(spec.dims[0]), transform=spec.hadamard
    )
    return Plan((*outers[1].launches, launch), (output,), (_shaped(outers[1], shape, source.groups),))


def _both(spec: QuantizeSpec, x: torch.Tensor, source: Source, static, seed) -> Plan:
    fmt, layout = spec.format, spec.layout
    transposed = (source.cols, source.padded_rows) if source.groups else x.transpose(-2, -1).shape
    rows = empty_output(source, x.shape, fmt, layout, values=ROWS in spec.values)
    columns = empty_output(source, transposed, fmt, layout, columns=True, values=COLUMNS in spec.values)
    if fmt.square:
        outer = outer_of(source, fmt, static, _each_matrix(spec))
        launch = squares.squares_launch(source, fmt, outer, layout, rows, columns)
        return Plan((*outer.launches, launch), (rows, columns), (outer.result, outer.result))
    outers = outers_of(source, fmt, static, with_rows=True, transform=spec.hadamard)
    if both.serves(source, fmt, outers[0], seeded=spec.seeded, transform=spec.hadamard):
        launches = (both.both_launch(source, fmt, layout, rows, columns),)
    elif _separately(source, fmt, outers[0]):
        along = rows_launch(source, fmt, rows, outers[0], layout, seed, _stream(ROWS))
        if squares.serves(source, fmt):
            down = squares.squares_launch(source, fmt, outers[1], layout, None, columns)
        else:
            down = columns_launch(source, fmt, outers, layout, columns, seed=seed, stream=1, transform=spec.hadamard)
        launches = (along, down)
    else:
        launches = (
            columns_launch(source, fmt, outers, layout, columns, rows, seed=seed, stream=1, transform=spec.hadamard),
        )
    found = _shaped(outers[0], x.shape), _shaped(outers[1], transposed, source.groups)
    return Plan((*outers[1].launches, *launches), (rows, columns), found)


def _separately(source: Source, fmt: BlockFormat, outer: Outer) -> bool:
    """Whether rows and columns take two launches: for long blocks, and from float32 to NVFP4 without global scale.

    For the latter, ptxas 12.8 (of Triton 3.6) loses the factors of the rows in the kernel for both directions on SM90.
    Its code without optimisation is right, as is the PTX in the simulator.
    """
    if source.prologue is not None or source.groups:
        return False
    wide = source.tensor.dtype.itemsize == 4 and fmt.scale == "e4m3" and outer.mode == "none"
    return squares.serves(source, fmt) or (wide and source.target.isa == 90)


def _rows(spec: QuantizeSpec, shape: Sequence, source: Source, static, seed) -> Plan:
    """The plan of kernels for rows. shape: of the tensor that is quantised along its last dimension."""
    fmt, layout, stream = spec.format, spec.layout, _stream(spec.dims[0])
    output = empty_output(source, shape, fmt, layout, values=bool(spec.values))
    launches: tuple[Launch, ...] = ()
    if source.prologue is not None and source.prologue.reductions:
        in_one = in_one_launch(source, fmt, static)
        if not in_one:
            source, launch = with_statistics(source, fmt, static)
            launches = (launch,)
        if in_one or after_first_launch(source, fmt):
            outer, launch = whole_rows_launch(source, fmt, output, static, layout, seed, stream)
            launches = (*launches, *outer.launches, launch)
            return Plan(launches, (output,), (_found(outer, static, spec, shape),))
    if finds_row_scales(source, fmt, static):
        outer, launch = whole_rows_launch(source, fmt, output, None, layout, seed, stream)
        return Plan((*launches, launch), (output,), (_found(outer, None, spec, shape),))
    outer = outer_of(source, fmt, static, _each_matrix(spec))
    launch = rows_launch(source, fmt, output, outer, layout, seed, stream)
    return Plan((*launches, *outer.launches, launch), (output,), (_shaped(outer, shape),))


def _found(outer: Outer, static, spec: QuantizeSpec, shape: Sequence) -> torch.Tensor | None:
    """The global or row scales of a kernel of whole rows, in the shape of results."""
    if static is not None or outer.scale is None:
        return outer.result
    scale = outer.scale.tensor
    return scale.view(()) if spec.format.outer == "tensor" else scale.view(*shape[:-1], 1)


def _each_matrix(spec: QuantizeSpec) -> bool:
    """Whether each matrix has its own global scale."""
    return spec.each_matrix and spec.format.outer == "tensor"


def _stream(dim: int) -> int:
    """The stream of random bits of a dimension: the directions of one gradient must be rounded independently."""
    return 0 if dim == ROWS else 1


def _shaped(outer: Outer, shape: Sequence, groups: int = 0) -> torch.Tensor | None:
    """Row scales as [..., R, 1], or those of each group's result as [G, R, 1]; None, or global scales of the tensor, of
    matrices or groups, unchanged."""
    found = outer.result
    if found is None or found.dim() == 0 or outer.mode == "matrix amax":
        return found
    return found.view(*([groups] if groups else []), *shape[:-1], 1)
