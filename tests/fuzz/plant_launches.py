"""Bugs of launches to plant: strides, masks, grids, scales, seeds. See `plant`; `--plant --launches` runs them.

The first one is the fault that read foreign memory before launches were random: the kernel of codes read the result
that the kernel of the amax had stored, which is contiguous, with the strides of the first operand, a slice.
"""

from tests.fuzz.plant import Plant

_READS_STORED = (
    "            return replace(self, view=matrices_view(self.stored_result.tensor),"
    " prologue=None, operands=(), stored=())"
)

LAUNCH_PLANTS = (
    # strides
    Plant("the stored result read with the strides of the first operand, unchecked", "templates/quantize/source.py",
          _READS_STORED,
          "            view = replace(self.view)\n"
          "            object.__setattr__(view, 'tensor', self.stored_result.tensor)\n"
          "            return replace(self, view=view, prologue=None, operands=(), stored=())"),
    Plant("the stored result read with the strides of the first operand", "templates/quantize/source.py",
          _READS_STORED,
          "            view = replace(self.view, tensor=self.stored_result.tensor)\n"
          "            return replace(self, view=view, prologue=None, operands=(), stored=())"),
    Plant("a stored norm read with the strides of its first operand", "templates/quantize/row_on_chip.py",
          "        view = matrices_view(source.stored_result.tensor)\n",
          "        view = replace(source.view)\n"
          "        object.__setattr__(view, 'tensor', source.stored_result.tensor)\n"),
    Plant("rows of other operands taken for contiguous", "templates/quantize/source.py",
          "for i, stride in self._row_strides.items() if not statically_true(stride == self.cols)}",
          "for i, stride in ()}"),
    Plant("the batch stride of one matrix for all", "templates/quantize/source.py",
          "    batch_stride = 0 if statically_true(batch == 1) else x.stride(0)\n", "    batch_stride = 0\n"),
    Plant("rows that lie apart taken for one run", "templates/quantize/source.py",
          "        one_row = statically_true(self.rows == 1) or statically_true(row_stride == self.cols)",
          "        one_row = True"),
    Plant("what follows the statistics reads the first operand where a sum was stored",
          "templates/quantize/row_on_chip.py",
          "matrices_view(first.tensor) if read[0] else source.view", "source.view"),
    # results of products
    Plant("scales of a quantised result in reverse", "templates/device/quantized_epilogue.py",
          "    shift = 8 * tl.arange(0, 4)[None, None, :]\n", "    shift = 8 * (3 - tl.arange(0, 4))[None, None, :]\n"),
    Plant("the amax of a result's last tile alone", "templates/gemm/block_scaled_sm100.py",
          "amax = tl.maximum(amax, tl.where(col0 < n, found, 0))", "amax = tl.where(col0 < n, found, 0)"),
    Plant("rows of the next group among a group's scales", "templates/gemm/block_scaled_sm100.py",
          "tl.where((row < end) & (first < blocks), scale, 0)", "tl.where(first < blocks, scale, 0)"),
    # masks and grids
    Plant("a column too many is read", "templates/quantize/row.py",
          "    cols_left = tl.minimum(cols - block0 * BLOCK, BLOCKS * BLOCK).to(tl.int32)\n",
          "    cols_left = tl.minimum(cols + 1 - block0 * BLOCK, BLOCKS * BLOCK).to(tl.int32)\n"),
    Plant("a column too many is read down the columns", "templates/quantize/column.py",
          "    cols_left = tl.minimum(cols - col0, col_count)\n",
          "    cols_left = tl.minimum(cols + 1 - col0, col_count)\n"),
    Plant("the last rows have no program", "templates/quantize/row.py",
          "    grid = row_tiles(source, rows, config.rows) * ceil_div(blocks, config.blocks)",
          "    grid = source.batch * max(rows // config.rows, 1) * ceil_div(blocks, config.blocks)"),
    Plant("padding of swizzled scales has no program", "templates/quantize/outputs.py",
          "        return ceil_div(rows, TILE_ROWS) * TILE_ROWS, ceil_div(blocks, TILE_COLS) * TILE_COLS",
          "        return rows, blocks"),
    Plant("padding of swizzled scales is not written", "templates/device/memory.py",
          "        padded = (row < tl.cdiv(rows, 128) * 128) & (block // 4 < tiles)",
          "        padded = (row < rows) & (block // 4 < tiles)"),
    # amaxes and outer scales
    Plant("the outer scale of the first group for all", "templates/quantize/row.py",
          "encode, decode = make_outer_scales(amax_ptr + group, outer_ptr, group, True, first_tile,",
          "encode, decode = make_outer_scales(amax_ptr + group * 0, outer_ptr, group, True, first_tile,"),
    Plant("outer scales of rows and columns changed round", "templates/quantize/amax.py",
          "narrow(0, i * count, count), count) for i in (0, 1))",
          "narrow(0, i * count, count), count) for i in (1, 0))"),
    Plant("one amax for all matrices of a batch", "templates/quantize/amax.py",
          "        if OF == \"matrix\":\n            amax_ptr += group\n", ""),
    Plant("partial maxima that no program writes", "templates/quantize/amax.py",
          "    grid = _amax_grid(source, config)\n    if", "    grid = max(_amax_grid(source, config) - 1, 1)\n    if"),
    # what is stored, seeds, products
    Plant("what is stored has the dtype of the first operand", "formats/prologue.py",
          "first.new_empty(_shape(self.step_kinds[number], first.shape), dtype=dtype)",
          "first.new_empty(_shape(self.step_kinds[number], first.shape))"),
    Plant("rows and columns rounded by one stream of random bits", "templates/quantize/plan.py",
          "layout, columns, rows, seed=seed, stream=1,", "layout, columns, rows, seed=seed, stream=0,"),
    Plant("the last columns of a product have no program", "templates/gemm/dequant_tiles.py",
          "        tiles_m * ceil_div(p.n, config.bn) * (groups if",
          "        tiles_m * max(p.n // config.bn, 1) * (groups if"),
)  # fmt: skip
