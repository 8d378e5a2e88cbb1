"""Edits of Triton source: one fault each, planted in a copy of the package, whose kernels then run in the simulator."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp4compile import _compat

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class SourceEdit:
    """subject: the name of the subject of `subjects` that uses the code. name: what is wrong. path: of the file in the
    package. old: text that is in it once. new: its replacement."""

    subject: str
    name: str
    path: str
    old: str
    new: str


def _edit(subject: str, name: str, path: str, old: str, new: str) -> SourceEdit:
    return SourceEdit(subject, name, f"templates/{path}.py", old, new)


_DENSE, _MX, _POINTERS = "dense NVFP4", "dense MXFP8", "dense NVFP4 without TMA"
_PAIRS, _EXPERTS = "pairs of CTAs", "experts on pairs of CTAs"
_CODES_OF_PAIRS, _BOTH_OF_PAIRS = "quantised results of pairs of CTAs", "gate and up on pairs of CTAs"
_FEW, _ROWS, _ALONG = "few rows, split K", "groups of rows", "groups along K"
_CODES = "results of groups that are quantised"
_AMAXES = "results of groups whose amaxes are found"
_BOTH = "both directions, transform, seed"
_OF_PAIRS = (
    _edit(_PAIRS, "scales of A by tiles of a pair's rows", "gemm/two_cta_kernel_sm100",
          "return self.row // 128", "return self.row // 256"),
    _edit(_PAIRS, "products before the epilogue has read the sums", "gemm/two_cta_kernel_sm100",
          "        mbarrier.wait(sums_empty, sums_phase)\n", ""),
    _edit(_PAIRS, "sums that are given back before all are loaded", "gemm/two_cta_kernel_sm100",
          "(sums.slice(i * PART_COLS, PART_COLS).load(layout),)\n        mbarrier.arrive(sums_empty)\n",
          "(sums.slice(i * PART_COLS, PART_COLS).load(layout),)\n            if i == 0:\n"
          "                mbarrier.arrive(sums_empty)\n"),
    _edit(_PAIRS, "a part written to the buffer that TMA still reads", "gemm/two_cta_kernel_sm100",
          "buffer = output.buffers.index(i % 2)", "buffer = output.buffers.index(0)"),
    _edit(_PAIRS, "operands of the epilogue by the width of a tile", "gemm/two_cta_kernel_sm100",
          "epilogue(part, rows * n + cols,", "epilogue(part, rows * walk.BN + cols,"),
    _edit(_PAIRS, "the phase of the ring never changed", "gemm/two_cta_kernel_sm100",
          "gl.where(last, phase ^ 1, phase)", "gl.where(last, phase, phase)"),
    _edit(_PAIRS, "the first step of a tile added to the sums before", "gemm/two_cta_kernel_sm100",
          "use_acc=step > 0", "use_acc=True"),
    _edit(_EXPERTS, "rows of other groups stored", "gemm/two_cta_kernel_sm100",
          "(out_ptr, [at.end, n], [n, 1]", "(out_ptr, [m, n], [n, 1]"),
    _edit(_EXPERTS, "a descriptor made anew while TMA stores by it", "gemm/two_cta_kernel_sm100",
          "            tma.store_wait(0)\n            here", "            here"),
    _edit(_EXPERTS, "scales of A by rows, without the groups' padding", "gemm/two_cta_kernel_sm100",
          "first = gl.max(passed, 0) + (row - start) // 128", "first = row // 128"),
    _edit(_EXPERTS, "the scales of a group's first tile for all of its tiles", "gemm/two_cta_kernel_sm100",
          "gl.max(passed, 0) + (row - start) // 128", "gl.max(passed, 0)"),
    _edit(_EXPERTS, "the first group's weights for all groups", "gemm/two_cta_kernel_sm100",
          "[at.matrix(), at.col, b_col]", "[0, at.col, b_col]"),
    _edit(_EXPERTS, "the first group's scales of weights for all groups", "gemm/two_cta_kernel_sm100",
          "[at.matrix(), at.col // 128, 2 * col_tile, 0]", "[0, at.col // 128, 2 * col_tile, 0]"),
    _edit(_EXPERTS, "the first group's global scale for all groups", "gemm/two_cta_kernel_sm100",
          "a_outer = a_outer_ptr + at.group", "a_outer = a_outer_ptr"),
    _edit(_EXPERTS, "tiles of groups counted in 128 rows", "gemm/two_cta_kernel_sm100",
          "_, after = ends_of_lanes(offs, self.m, self.BM)",
          "_, after = ends_of_lanes(offs, self.m, 128)"),
    _edit(_EXPERTS, "scales of the groups up to the next one", "gemm/two_cta_kernel_sm100",
          "gl.where(after[i] <= tile_m, scales[i], 0)", "gl.where(after[i] <= tile_m + 1, scales[i], 0)"),
    _edit(_EXPERTS, "offsets of a lane's own groups for those before", "gemm/two_cta_kernel_sm100",
          "group = (lane - 1) * each + i", "group = lane * each + i"),
    _edit(_CODES_OF_PAIRS, "scales behind the last block not cleared", "gemm/two_cta_kernel_sm100",
          "(row + rows_of(byte) < m) & (first + columns_of(byte) < blocks)", "row + rows_of(byte) < m"),
    _edit(_CODES_OF_PAIRS, "scales behind the last row not cleared", "gemm/two_cta_kernel_sm100",
          "(row + rows_of(byte) < m) & (first + columns_of(byte) < blocks)", "first + columns_of(byte) < blocks"),
    _edit(_CODES_OF_PAIRS, "scales by the tiles of a pair", "gemm/two_cta_kernel_sm100",
          "[row // 128, first // 4, 0, 0]", "[row // 256, first // 4, 0, 0]"),
    _edit(_CODES_OF_PAIRS, "codes by elements, not by units of two", "gemm/two_cta_kernel_sm100",
          "                col0 = col0 // 2  # units of two codes\n", ""),
    _edit(_CODES_OF_PAIRS, "parts written while TMA reads the two before", "gemm/two_cta_kernel_sm100",
          "tma.store_wait(1)", "tma.store_wait(3)"),
    _edit(_BOTH_OF_PAIRS, "the sums of gate for those of up", "gemm/two_cta_kernel_sm100",
          "rescale_columns(loaded[parts + i], pair_factor", "rescale_columns(loaded[i], pair_factor"),
    _edit(_BOTH_OF_PAIRS, "the global scale of gate for up", "gemm/two_cta_kernel_sm100",
          "a_outer, b_outer + b_outer_step, rescale", "a_outer, b_outer, rescale"),
    _edit(_BOTH_OF_PAIRS, "scales of up from the second row of tiles on", "gemm/two_cta_kernel_sm100",
          "[b_scale_size, col_tiles * 512, 256, 1]", "[col_tiles * 512, col_tiles * 512, 256, 1]"),
    _edit(_BOTH_OF_PAIRS, "the amax of the last tile alone", "gemm/two_cta_kernel_sm100",
          "amax = gl.maximum(amax, gl.where((row0 + rows_of(found) < m) & (col0 < n), found, 0))",
          "amax = gl.where((row0 + rows_of(found) < m) & (col0 < n), found, 0)"),
    _edit(_BOTH_OF_PAIRS, "the amax of one CTA of a pair", "gemm/two_cta_kernel_sm100",
          "2 * gl.program_id(0) + gl.arange(0, 2, halves.type.layout)",
          "2 * gl.program_id(0) + 0 * gl.arange(0, 2, halves.type.layout)"),
) if _compat.two_cta_products() else ()  # fmt: skip
SOURCE_EDITS = (
    # dense products
    _edit(_DENSE, "rows of B by the height of A's tiles", "gemm/block_scaled_sm100",
          "b_row = b_batch * n + tile_n * tile_cols", "b_row = b_batch * n + tile_n * BM"),
    _edit(_DENSE, "scales of another step", "gemm/block_scaled_sm100",
          "                col_tile = step * (scale_cols // 4)\n", "                col_tile = step\n"),
    _edit(_MX, "scales of B by one tile of 128 rows", "gemm/block_scaled_sm100",
          "b_row_tile = b_batch * row_tiles_b + tile_n * (tile_cols // 128)",
          "b_row_tile = b_batch * row_tiles_b + tile_n"),
    _edit(_DENSE, "the columns of a part stored over the part before", "gemm/block_scaled_sm100",
          "target.store([a_row, col0], part)", "target.store([a_row, tile_n * BN + i], part)"),
    _edit(_MX, "the rows of the last tiles not masked", "gemm/block_scaled_sm100",
          "tl.make_tensor_descriptor(out_ptr, [m, out_cols],",
          "tl.make_tensor_descriptor(out_ptr, [tl.cdiv(m, BM) * BM, out_cols],"),
    _edit(_DENSE, "a group of row tiles taken for full", "device/persistent_grid",
          "return group * GROUP_M + tile % in_group, tile // in_group",
          "return group * GROUP_M + tile % in_group, tile // GROUP_M"),
    _edit(_DENSE, "the global scale of A twice", "device/apply_epilogue",
          "        factor = factor * other if A_OUTER != \"none\" else other\n    return factor",
          "        factor = factor * factor if A_OUTER != \"none\" else other\n    return factor"),
    _edit(_POINTERS, "codes of the next row behind a row's end", "device/block_scaled_tile",
          "mask = mask & (col < per_row)", "mask = mask & (col < per_row + 8)"),
    _edit(_POINTERS, "order of scale bytes: rows and columns of a word", "device/block_scaled_tile",
          "tl.permute(tiles, (0, 3, 2, 1, 4))", "tl.permute(tiles, (0, 2, 3, 1, 4))"),
    *_OF_PAIRS,
    # few rows
    _edit(_FEW, "parts of K that overlap", "gemm/skinny_block_scaled_sm100",
          "steps * (split + 1) // split_k, num_stages", "steps * (split + 1) // split_k + 1, num_stages"),
    _edit(_FEW, "sums of parts over each other", "gemm/skinny_block_scaled_sm100",
          "((split * batches + batch) * m + row) * n + col", "((split + batch) * (m - 1) + row) * n + col"),
    _edit(_FEW, "the last part of K not added", "gemm/split_k",
          "for split in tl.static_range(SPLIT):", "for split in tl.static_range(SPLIT - 1):"),
    # experts
    _edit(_ROWS, "the global scale of the first expert for all", "gemm/block_scaled_sm100",
          "                b_outer += group * b_outer_each\n", ""),
    _edit(_ROWS, "a group's tile stores rows of the next group", "device/group_tiles",
          "of_group(before, group) + tile_m * BM, of_group(ends, group))",
          "of_group(before, group) + tile_m * BM, of_group(ends, group) + 1)"),
    _edit(_ROWS, "the first row of a group counted with the padding", "device/group_tiles",
          "before = starts - (padded_ends - padded) * BM", "before = starts"),
    _edit(_ROWS, "a table read before it is complete", "gemm/block_scaled_sm100",
          "            tl.debug_barrier()  # the table is complete\n", ""),
    _edit(_ALONG, "a group along K begins at the group before", "gemm/block_scaled_sm100",
          "starts_k = ends_k - of_group(padded, group)", "starts_k = ends_k - tl.maximum(of_group(padded, group), 1)"),
    _edit(_ALONG, "results of groups without rows not cleared", "gemm/block_scaled_sm100",
          "rescale(tl.where(empty, 0.0, parts[i]),", "rescale(parts[i],"),
    # experts whose results are quantised
    _edit(_CODES, "codes of the first expert's matrices for all", "gemm/block_scaled_sm100",
          "EVEN_K, matrices, matrix)", "EVEN_K, matrices, matrix * 0)"),
    _edit(_CODES, "scales of the matrix of up for both", "gemm/block_scaled_sm100",
          "tile_cols, scale_cols, TMA, matrices, matrix)", "tile_cols, scale_cols, TMA, matrices, matrix + 1)"),
    _edit(_CODES, "the next group's rows among a group's scales", "gemm/block_scaled_sm100",
          "tl.where((row < end) & (first < blocks), scale, 0)", "tl.where((row < m) & (first < blocks), scale, 0)"),
    _edit(_CODES, "the next group's codes stored by a tile", "gemm/block_scaled_sm100",
          "mask=(row < end) & (col0 + col_of_part < out_cols))", "mask=(row < m) & (col0 + col_of_part < out_cols))"),
    _edit(_CODES, "scales of tiles behind the last group not cleared", "device/group_tiles",
          "    count = (end - start) * words\n", "    count = (end - start - 1) * words\n"),
    _edit(_CODES, "tiles of scales by a group's rows without padding", "gemm/block_scaled_sm100",
          "tile_m * 0 + batch, tile_m, tile_n, m, blocks)",
          "tile_m * 0 + batch, a_row // 128, tile_n, m, blocks)"),
    _edit(_CODES, "the global scale of the first expert for all", "gemm/block_scaled_sm100",
          "                b_outer += group * b_outer_each\n", ""),
    # experts whose amaxes are found
    _edit(_AMAXES, "the amax of the first group for all", "gemm/block_scaled_sm100",
          "raise_maximum(maxima_ptr + group,", "raise_maximum(maxima_ptr,"),
    _edit(_AMAXES, "the next group's rows in a group's amax", "gemm/block_scaled_sm100",
          "tl.where(row < end, amax, 0)", "amax"),
    _edit(_AMAXES, "an amax of a tile's last columns alone", "gemm/block_scaled_sm100",
          "amax = tl.maximum(amax, tl.where(", "amax = tl.maximum(amax * 0, tl.where("),
    _edit(_AMAXES, "rows of no group not cleared", "gemm/block_scaled_sm100",
          "clear_rows(out_ptr, last_of(ends), m,", "clear_rows(out_ptr, last_of(ends) + 1, m,"),
    # one row, dequantised tiles
    _edit("one row", "codes read before they have arrived", "gemm/gemv",
          'token = do_ptx(wait_ptx(0), "r", (token,))', 'token = do_ptx(wait_ptx(1), "r", (token,))'),
    _edit("one row", "a buffer filled while other lanes read it", "gemm/gemv",
          'token = do_ptx(WARP_BARRIER, "r", (token,))  # every', "token = token  # every"),
    _edit("one row", "sums overwritten while other warps read them", "gemm/gemv",
          '        token = do_ptx(BARRIER, "r", (token,))  # the sums have been read and may be overwritten\n', ""),
    _edit("one row", "buffers of warps that overlap", "gemm/gemv_pipeline",
          "BUFFER_BYTES = tl.constexpr(2304)", "BUFFER_BYTES = tl.constexpr(2288)"),
    _edit("dequantised tiles", "a part of K that begins too early", "gemm/dequant_tiles",
          "    start = split * per_split\n", "    start = split * per_split - tl.minimum(split, 1)\n"),
    # quantisers
    _edit("rows", "order of swizzled scale bytes", "device/memory",
          "row % 32 * 16 + row % 128 // 32 * 4 + block % 4", "row % 32 * 16 + row % 4 * 4 + block % 4"),
    _edit("rows", "codes stored a block too far", "quantize/row",
          "    matrix_row = batch.to(tl.int64) * rows + row\n",
          "    matrix_row = batch.to(tl.int64) * rows + row\n    block0 += 1\n"),
    _edit(_BOTH, "the signs of the Hadamard transform shifted", "device/column_tile",
          "(HADAMARD_SIGNS >> i) & 1", "(HADAMARD_SIGNS >> i + 1) & 1"),
    _edit(_BOTH, "random words used twice", "quantize/column",
          "second, second_factor, seed_ptr, call0 + blocks * calls,", "second, second_factor, seed_ptr, call0,"),
    _edit(_BOTH, "rows behind the last one read down the columns", "device/column_tile",
          "mask=(row < rows - i) & inside", "mask=(row < rows) & inside"),
    _edit("a norm", "a mean over the columns of whole tiles", "device/row_prologue",
          "            length, ALIGN, WHOLE, ISA,\n", "            BLOCKS * BLOCK, ALIGN, WHOLE, ISA,\n"),
)  # fmt: skip


def changed(edit: SourceEdit) -> tuple[Path, str]:
    """(the file, its text with the edit)."""
    path = ROOT / "fp4compile" / edit.path
    text = path.read_text()
    if text.count(edit.old) != 1:
        raise ValueError(f"{edit.name}: {edit.path} has {text.count(edit.old)} such places")
    return path, text.replace(edit.old, edit.new)


def line_of(edit: SourceEdit) -> int:
    """The line of the file at which an edit begins."""
    path, _ = changed(edit)
    return path.read_text().split(edit.old)[0].count("\n") + 1


def tried(edit: SourceEdit) -> dict[str, Any]:
    """What the simulator finds of an edit, run in a process of its own: see `mutate.outcome`."""
    path, text = changed(edit)
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        for name in ("fp4compile", "ptxsim", "tests"):
            shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
        (root / path.relative_to(ROOT)).write_text(text)
        command = [sys.executable, "-m", "tests.ptxsim.mutate", "--subject", edit.subject]
        process = subprocess.run(command, cwd=root, env={**os.environ, "PYTHONPATH": directory}, text=True,
                                 capture_output=True)  # fmt: skip
    if process.returncode:
        raise RuntimeError(f"{edit.name}: {process.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return found
