"""Why edits are not found: most of these change nothing that anybody could see.

Numbers of statements belong to the PTX of the pinned version of Triton.
"""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Explained:
    """subject, kernel, edit: regular expressions that match the whole names.

    reason: why the simulator does not find the edits. equivalent: whether they change nothing.
    """

    subject: str
    kernel: str
    edit: str
    reason: str
    equivalent: bool = True

    def explains(self, subject: str, kernel: str, edit: str) -> bool:
        pairs = ((self.subject, subject), (self.kernel, kernel), (self.edit, edit))
        return all(re.fullmatch(pattern, name) for pattern, name in pairs)


_ANY = ".*"
_GEMM = "gemm_.*"
_OF = r" \d+ of \d+"
_LOADERS = (
    "Both warps of the loads wait for the buffer themselves, one of them issues all copies, and the phase "
    "cannot complete before the arrival that expects its bytes."
)
_EMPTY = "It stands behind the release of a tensor map, which is no bulk copy: the group is empty."
_TOGETHER = "The lanes of the warp have not diverged there; what follows is uniform or waits itself."
_ZEROS = "It stores zeros, and the first product of each tile overwrites the sums instead of adding."
_POSITIVE = "The block's factor is 0 otherwise; any tiny positive one gives the same codes."
_ALL_HOLD = "All threads hold the value: those that did not store it do, instead of the one that did."
_ROW_INSIDE = "The grid has as many programs as rows and parts of rows, so that the row is always inside."
_SCALE_ROWS = "Scales have whole tiles of 128 rows to read, and sums of rows beyond the last one are not stored."
_ROUNDS = "It matters where a program finds the groups of its tiles in several rounds, and the case has few tiles."
EXPLAINED: tuple[Explained, ...] = (
    # ---------------------------------------- waits, barriers and fences
    Explained("dense NVFP4|dense MXFP8|groups along K|results of groups .*", _GEMM, r"mbarrier wait 1 of 6 removed",
              "A new mbarrier counts the phase before its first one as complete, so that this wait passes."),
    Explained("dense NVFP4", _GEMM, r"barrier (17|18|20) of 45 removed",
              _LOADERS),
    Explained("dense MXFP8", _GEMM, r"barrier 20 of 37 removed", _LOADERS),
    Explained("dense MXFP8", _GEMM, r"barrier 7 of 37 removed",
              "The next barrier of these warps, where mbarriers are made, comes before any use of the map."),
    Explained("dense NVFP4 without TMA", _GEMM, r"barrier (22|25) of 26 removed",
              "Each warp waits at the mbarrier of the product itself, and meets the others at the next barrier, before "
              "anybody reads what is written then."),
    Explained("few rows, split K", _GEMM, r"barrier [47] of 11 removed",
              "One warp issues the copies of scales and the products, and tensor memory has them in this order."),
    Explained("few rows, split K", _GEMM, r"barrier 8 of 11 removed",
              "Each warp waits at the mbarrier of the last product itself, and a barrier follows."),
    Explained("few rows, split K", _GEMM, r"barrier 11 of 11 removed",
              "The barrier before it already comes after all loads from the tensor memory that is freed."),
    Explained("groups .*", _GEMM, r"bar.warp.sync 8 of 11 removed",
              "The warp meets at the copy of the tensor map, too, which is `.sync.aligned`."),
    Explained("pairs of CTAs", _GEMM, r"bar.warp.sync 14 of 17 removed", _TOGETHER),
    Explained("experts on pairs of CTAs", _GEMM, r"barrier 7 of 38 removed",
              "The next barrier of these warps, where mbarriers are made, comes before any use of the map."),
    Explained("experts on pairs of CTAs", _GEMM, r"bulk wait 7 of 13 removed",
              "It stands before the first store of a tile, and each tile begins with a wait for all stores."),
    Explained("experts on pairs of CTAs", _GEMM, r"ring of buffers [124] of 5: 0 -> -1",
              "It is in a scan over lanes: the first lane gets its own number from itself, and keeps the larger one."),
    Explained("(dense|groups|results of groups) .*", _GEMM, r"bar.warp.sync (11|13) of 1[13] removed",
              _TOGETHER),
    Explained("dense NVFP4|results of groups .*", _GEMM, r"fence.proxy.async 1 of (10|2) removed",
              "Tensor copies wrote all that the products read, so that there are no writes of threads to order."),
    Explained("dense NVFP4", _GEMM, r"arrival 3 of 3 removed", "Nobody waits at this mbarrier after the last tile."),
    Explained("dense NVFP4|few rows, split K|groups .*|dequantised tiles", _GEMM,
              r"mbarrier inval (1 of 10|10 of 10|4 of 18|2 of 2|4 of 4) removed",
              "The program ends, and nothing else is put into these bytes of shared memory."),
    Explained("dense (NVFP4|MXFP8)|(.* on )?pairs of CTAs", _GEMM, r"bulk (wait|commit) [1-5] of \d+ removed", _EMPTY),
    Explained("quantised results of pairs of CTAs", _GEMM, r"bulk (wait|commit) [1-6] of 11 removed", _EMPTY),
    Explained("(results of )?groups .*", _GEMM, r"bulk (wait|commit) [1-4] of 4 removed", _EMPTY),
    Explained("dequantised tiles", _GEMM, r"tcgen05.wait::st [124] of 5 removed",
              "The same warps wait for their stores again before the barrier behind which the product reads them."),
    Explained("dequantised tiles", _GEMM, r"cp.async commit 1 of 10 removed",
              "The copies join the next group, and the wait that leaves four groups then waits for that one."),
    Explained("few rows, split K", _GEMM, r"cp.async wait 3 of 3: one group fewer",
              "The last group fills a buffer beyond the end of K, which nobody uses any more."),
    # ---------------------------------------- matrix units
    Explained(_ANY, _GEMM, r"descriptor of [AB] of the first product: leading offset",
              "Where rows run along K and are swizzled, hardware ignores this field (PTX ISA, matrix descriptor)."),
    Explained(_ANY, _GEMM, rf"descriptor of copy of scales{_OF}: leading offset",
              "The field leads to the next 16 bytes of a row, and the rows that are copied have 16 bytes."),
    Explained(_ANY, _GEMM, rf"descriptor of copy of scales{_OF}: base offset",
              "The PTX ISA defines the field by the pattern of a swizzled layout, which scales lack; Triton sets it "
              "to 4 in every other copy."),
    Explained(_ANY, "gemm_.*(scaled|quantized).*", rf"store to tensor memory{_OF} removed",
              _ZEROS),
    Explained("few rows, split K", _GEMM, r"store to tensor memory 1 of 1: 16 columns further", _ZEROS),
    # ---------------------------------------- Triton source
    Explained("groups of rows", r"templates/gemm/.*", "a table read before it is complete",
              "The warps of the loads begin behind a barrier of all warps, before anybody reads the table."),
    # ---------------------------------------- tensor maps
    Explained(_ANY, _GEMM, r"tensor maps' global_dim (10 of 14|5 of 12|9 of 12): one more",
              "Along this dimension the box begins at 0 and is as long as the tensor: it never reaches further."),
    Explained("results of groups .*", _GEMM, r"tensor maps' clearing [24] of 4 removed",
              "The map that was made there before has no field beyond this map's dimensions, which are all set."),
    # ---------------------------------------- masks
    Explained("results of groups .*", _GEMM, r"mask 7 of 8: lt -> le",
              "It compares columns with their number: a pair has whole tiles of columns, and none begins at the end."),
    Explained("dense NVFP4 without TMA", _GEMM, r"mask 19 of 40: lt -> le",
              "It compares rows 0 to 15 of a tile with their number, here a multiple of 16 and not 0."),
    Explained("few rows, split K", "split_k_reduction", r"mask 1 of 2: lt -> le",
              _ROW_INSIDE),
    Explained("few rows, split K", "split_k_reduction", r"whole number 5 of 6: mad.wide.s32 by 4 -> 5",
              "The factor multiplies a register that is always 0; it only orders the load after griddepcontrol.wait."),
    Explained("few rows, split K", _GEMM, r"mask [68] of 22: lt -> le",
              "It compares numbers of rows from 32 on with at most 16 tokens."),
    Explained("few rows, split K", _GEMM, r"whole number 89 of 157: shl.b32 by 9 -> 10",
              "It bounds the scales of a step, and K has whole steps in this specialisation."),
    Explained("few rows, split K", _GEMM, r"cp.async 38 of 40: from 16 bytes later",
              "It copies rows 96 to 127 of at most 16 tokens: it always fills zeros."),
    # ---------------------------------------- quantisers
    Explained("rows", "tensor_amax", rf"ld.global{_OF}: two registers swapped", "The maximum is the same."),
    Explained("rows", "tensor_amax", rf"shuffle{_OF}: distance .*",
              "The maximum over four lanes comes before the maximum over all lanes, by redux, which suffices."),
    Explained("rows", "tensor_amax", r"mask 3 of 3: inverted",
              _ALL_HOLD),
    Explained("rows", "quantize_rows", r"float constant 34 of 34: .*",
              _POSITIVE),
    Explained("a norm", "quantize_reduced_rows", r"float constant 15 of 15: doubled", _POSITIVE),
    Explained("results of groups .*", _GEMM, r"float constant 6 of 20: doubled",
              "It corrects the last bit of amax / 6. An amax of eight bits gives an exact tie of two scales, or none."),
    Explained("both .*", "quantize_columns", r"float constant 25 of 54: doubled", _POSITIVE),
    Explained("rows", "quantize_rows", r"float constant 23 of 34: one bit up",
              "The constant is the least normal scale: the conversion to E4M3 rounds its neighbour to it."),
    Explained("a norm", "quantize_reduced_rows", r"(float constant 11 of 15: doubled|maximum or minimum 11 of 13: .*)",
              "It belongs to a second block of the thread, which this kernel computes and does not use."),
    Explained("a norm", "quantize_reduced_rows", r"mask 4 of 7: inverted", _ALL_HOLD),
    Explained("a norm", "quantize_reduced_rows", r"mask 3 of 7: lt -> le",
              "It compares an odd number with an eighth of the columns, which is even for this specialisation."),
    # ---------------------------------------- dequantised tiles, one row
    Explained("dequantised tiles", _GEMM, r"first product: by all threads",
              "Only the lanes of one warp get there, and the product overwrites the sums: all write the same."),
    Explained("dequantised tiles", _GEMM, r"float constant [24] of 36: one bit up",
              "Its product with a scale of four significant bits is rounded to bfloat16, which has eight."),
    Explained("dequantised tiles", _GEMM, r"ring of buffers 1 of 2: 1 -> 0",
              "It alternates two mbarriers of a product: with one mbarrier, whose phases alternate, the waits are the "
              "same."),
    Explained("dequantised tiles", _GEMM, r"whole number 102 of 204: shl.b32 by 4 -> 5",
              "Nothing reads the register that gets the result."),
    Explained("dequantised tiles", "split_k_reduction", r"mask 1 of 2: lt -> le", _ROW_INSIDE),
    Explained("one row", "gemv", r"cp.async 6 of 18: unmasked", _SCALE_ROWS),
    # ---------------------------------------- edits that change something
    Explained("(experts on )?pairs of CTAs", _GEMM, r"cluster barrier 1 of 4 removed",
              "Both CTAs wait for each other before they allocate tensor memory; here each CTA allocates for itself.",
              equivalent=False),
    Explained("(.* of )?pairs of CTAs", _GEMM, r"mask ([269] of 9|12 of 129): lt -> le",
              "It matters where the columns end at the part of a tile that it belongs to; the case's end at another.",
              equivalent=False),
    Explained("((gate .* on|.* of) )?pairs of CTAs", _GEMM, r"bound of a walk [12] of 2 halved",
              "It matters where there are more rows of tiles than a walk takes together, and the case has two.",
              equivalent=False),
    Explained("experts on pairs of CTAs", _GEMM,
              r"tensor store 5 of 5: from 128 bytes later|st.shared 24 of 26: 16 bytes further",
              "It stores zeros in rows of no group, which mean nothing and are not compared.", equivalent=False),
    Explained("experts on pairs of CTAs", _GEMM, r"ring of buffers 2 of 5: 0 -> 1",
              "It matters where an offset is smaller than the one before, and the case's offsets only grow.",
              equivalent=False),
    Explained("dequantised tiles", _GEMM, r"(cp.async 9 of 15: unmasked|mask 6 of 18: lt -> le)",
              "It matters where a part of K has fewer steps than are loaded ahead, which the case's parts have not.",
              equivalent=False),
    Explained("few rows, split K", _GEMM, r"mask 15 of 22: lt -> le",
              "It matters where a part of K has as many steps as are loaded ahead, three, and the case's have five.",
              equivalent=False),
    Explained("one row", "gemv", r"mask 10 of 11: lt -> le",
              "It masks one of four copies, and the case's rows of B end at another one.", equivalent=False),
    Explained("groups along K", _GEMM, r"mask 1[01] of 13: lt -> le",
              "It matters where the columns end at the part of a tile that it belongs to; the case's end at the first.",
              equivalent=False),
    Explained("groups along K", _GEMM, r"redux 2 of 2: add -> max",
              "It adds what the warps of a program count, and only the first one has tiles to count in the case.",
              equivalent=False),
    Explained("groups along K", _GEMM, r"bound of a walk [12] of 2 halved",
              "It bounds how many rows of tiles are walked together: at four, and the case has two.", equivalent=False),
    Explained("both .*", "columns_amax", r"ld.global 15 of 16: two registers swapped",
              "It exchanges columns in one row of 16, and the transform of others has the largest value in the case.",
              equivalent=False),
    Explained("both .*", "columns_amax", r"whole number (77|152) of 185: .*",
              "It clears the last bit of one of many values: no value with this bit is the largest in the case.",
              equivalent=False),
    Explained("both .*", "quantize_columns", r"mask 17 of 39: lt -> le",
              "It matters where one row is left behind whole blocks of 16, and the case has no such number of rows.",
              equivalent=False),
    Explained("rows", "quantize_rows", r"whole number 28 of 148: .*",
              "The case has two tiles of 128 rows, and rounding up to 256 rows gives the same.", equivalent=False),
    Explained("a norm", "quantize_reduced_rows", r"float constant 4 of 15: one bit up",
              "It is the scale of a row with an infinity, and a norm of such a row is NaN.", equivalent=False),
    Explained("groups .*", _GEMM, r"ring of buffers 1 of 3: 0 -> -1",
              "It is in a sum over groups, and doubles the rows of the first group: the case has none in it.",
              equivalent=False),
    Explained("results of groups whose .*", _GEMM, r"maximum or minimum 22 of 35: the other",
              "It belongs to words that have no group's largest magnitude.", equivalent=False),
    Explained("results of groups whose .*", _GEMM, r"barrier 19 of 43 removed",
              _ROUNDS, equivalent=False),
    Explained("results of groups that .*", _GEMM, r"barrier 7 of 43 removed", _ROUNDS, equivalent=False),
    Explained("results of groups .*", _GEMM, r"whole number (47|61) of 291: shl.b32 by 3 -> 4",
              "It belongs to tiles behind the second one of a thread, and the case has few.", equivalent=False),
    Explained("results of groups .*", _GEMM, r"whole number 247 of 291: .*",
              "It clears the last bit of one of many values, which in the case is rounded to the same code.",
              equivalent=False),
    Explained("groups of rows", _GEMM, r"whole number \d+ of \d+: or.b32 by (160 -> 192|224 -> 256)",
              "It numbers tiles behind the 160th of a program, and the case has few.", equivalent=False),
    Explained("one row", "gemv", r"bound of a walk 1 of 2 halved",
              "It bounds the factor by which activations are scaled; only tiny ones reach it.", equivalent=False),
    Explained("one row", "gemv", r"maximum or minimum 1 of 1: the other",
              "It finds the factor by which activations are scaled: another power of two is as exact for the case's.",
              equivalent=False),
)  # fmt: skip


def explanation(subject: str, kernel: str, edit: str) -> Explained | None:
    """Why an edit is not found; None for one that is."""
    return next((one for one in EXPLAINED if one.explains(subject, kernel, edit)), None)
