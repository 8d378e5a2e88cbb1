"""A snapshot: rows that are quantised before they are gathered, and what happens meanwhile.

Regenerate with EXPECTTEST_ACCEPT=1 and read the difference.
"""

import torch
import torch.distributed._functional_collectives  # shapes of the collectives
from expecttest import TestCase

from fp4compile.passes.quantize_before_gather import quantize_before_gather
from tests.helpers.graphs import summary
from tests.helpers.ranks_in_step import traced

aten, c10d, K = torch.ops.aten, torch.ops._c10d_functional, 64
quantize = torch.ops.fp4compile.quantize


def after(function, pass_, *values):
    graph = traced(function, values)
    pass_(graph)
    graph.lint()
    graph.eliminate_dead_code()
    return summary(graph, everything=True)


def sequences(x):
    """[sequences, tokens, K] of which each process has some tokens of every sequence."""
    started = c10d.all_gather_into_tensor(x, 2, "0")
    meanwhile = x + 1
    rows = aten.cat(list(aten.split(c10d.wait_tensor(started), x.shape[0])), 1)
    return *quantize(rows.view(-1, K), "nvfp4_one_level")[:2], meanwhile


class Snapshots(TestCase):
    maxDiff = None

    def test_sequences(self):
        found = after(sequences, quantize_before_gather, torch.empty(2, 2, K).bfloat16())
        self.assertExpectedInline(
            found,
            """\
quantize_default = fp4compile.quantize(x_1, nvfp4_one_level, [-1])
getitem_5: uint8[2, 2, 32] = <built-in function getitem>(quantize_default, 0)
all_gather_into_tensor_default: uint8[4, 2, 32] = _c10d_functional.all_gather_into_tensor(getitem_5, 2, 0)
getitem_6: float8_e4m3fn[2, 2, 4] = <built-in function getitem>(quantize_default, 1)
view_dtype: uint8[2, 2, 4] = aten.view.dtype(getitem_6, torch.uint8)
all_gather_into_tensor_default_1: uint8[4, 2, 4] = _c10d_functional.all_gather_into_tensor(view_dtype, 2, 0)
add: bfloat16[2, 2, 64] = aten.add.Tensor(x_1, 1)
wait_tensor_default: uint8[4, 2, 32] = _c10d_functional.wait_tensor(all_gather_into_tensor_default)
wait_tensor_default_1: uint8[4, 2, 4] = _c10d_functional.wait_tensor(all_gather_into_tensor_default_1)
split_tensor = aten.split.Tensor(wait_tensor_default, 2)
getitem_7: uint8[2, 2, 32] = <built-in function getitem>(split_tensor, 0)
getitem_8: uint8[2, 2, 32] = <built-in function getitem>(split_tensor, 1)
cat_default: uint8[2, 4, 32] = aten.cat([getitem_7, getitem_8], 1)
reshape_default: uint8[8, 32] = aten.reshape(cat_default, [-1, 32])
split_tensor_1 = aten.split.Tensor(wait_tensor_default_1, 2)
getitem_9: uint8[2, 2, 4] = <built-in function getitem>(split_tensor_1, 0)
getitem_10: uint8[2, 2, 4] = <built-in function getitem>(split_tensor_1, 1)
cat_default_1: uint8[2, 4, 4] = aten.cat([getitem_9, getitem_10], 1)
reshape_default_1: uint8[8, 4] = aten.reshape(cat_default_1, [-1, 4])
view_dtype_1: float8_e4m3fn[8, 4] = aten.view.dtype(reshape_default_1, torch.float8_e4m3fn)
return reshape_default: uint8[8, 32], view_dtype_1: float8_e4m3fn[8, 4], add: bfloat16[2, 2, 64]""",
        )
