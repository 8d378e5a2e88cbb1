"""The model of Inductor's kernels against Inductor's scheduler, on graphs for a GPU that is not there.

In the process of `test_generated_wrapper.py`: torch remembers what it once found out about the GPU.
"""

import os

import pytest
import torch
import torch.nn.functional as F
from torch._inductor import config
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.post_grad import post_grad_passes
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import Scheduler
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fp4compile.roofline import inductor_kernels
from tests.helpers.absent_gpu import pretend

PRETENDING = os.environ.get("FP4COMPILE_PRETENDING") == "1"
pretending = pytest.mark.skipif(not PRETENDING, reason="run in a process apart")


def norm(x, scale):
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).bfloat16() * scale


def block(x, scale, w, up, down):
    """A norm before a product, a residual and a norm after it, and a gate: the sum is read twice, and written once."""
    x = x + norm(x, scale) @ w
    y = norm(x, scale)
    return x + (F.silu(y @ up) * (y @ up)) @ down


def rotated(x, w, cos, sin):
    heads = (x @ w).view(64, 4, 64).transpose(0, 1)
    turned = torch.cat((-heads.narrow(-1, 32, 32), heads.narrow(-1, 0, 32)), -1)
    return torch.bmm(heads * cos + turned * sin, heads.transpose(1, 2))


def gate_gradients(dy, gate, up, w):
    """Two results of the same inputs, in one kernel."""
    dh = dy @ w
    wide = gate.float()
    sigmoid = torch.sigmoid(wide)
    return dh * up * (sigmoid * (1 + wide * (1 - sigmoid))).bfloat16() @ w.t(), dh * F.silu(gate) @ w.t()


def softmax(x, w):
    return torch.softmax((x @ w).float(), -1).bfloat16() @ w.t()


def summed(x, w):
    """A sum of columns has a kernel of its own, and one that adds up its parts, whose bytes the model leaves out."""
    y = x @ w
    return y.float().sum(0), (y * 2) @ w.t()


def residuals(x, scale, w):
    """A sum that many later norms read: Inductor stores it, because its expression would have too many loads.

    x: batches of rows. From torch 2.14 on, a matmul of a matrix adds the sum itself (`addmm`).
    """
    for _ in range(8):
        x = x + norm(x, scale) @ w
    return norm(x, scale)


CASES = [
    (residuals, (1, 64, 256), (256,), (256, 256)),
    (block, (1, 64, 256), (256,), (256, 256), (256, 512), (512, 256)),
    (rotated, (64, 256), (256, 256), (64, 64), (64, 64)),
    (gate_gradients, (64, 256), (64, 512), (64, 512), (256, 512)),
    (softmax, (64, 256), (256, 512)), (summed, (512, 256), (256, 512)),
]  # fmt: skip


@pretending
@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0].__name__)
def test_kernels_move_what_those_of_inductor_move(case, monkeypatch):
    function, *shapes = case
    pretend(monkeypatch, 90)
    with FakeTensorMode() as mode:
        values = [torch.empty(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]
        module = make_fx(function, decomposition_table=select_decomp_table())(*values)
    kernels = inductor_kernels.kernels(module.graph)
    own = sorted(kernel.moved for kernel in kernels)
    found = []
    codegen = Scheduler.codegen

    def noted(self):
        found.extend(node.get_read_write_buffers_sizes() for node in self.nodes if not node.is_extern())
        return codegen(self)

    monkeypatch.setattr(Scheduler, "codegen", noted)
    with V.set_fake_mode(mode), V.set_debug_handler(DebugContext()), config.patch(compile_threads=1):
        post_grad_passes(module, is_inference=True)
        lowering = GraphLowering(module, example_inputs=values, is_inference=True)
        with V.set_graph_handler(lowering), mode:
            lowering.run(*values)
            lowering.codegen()
    if function is summed:
        assert sum(kernel.launches for kernel in kernels) == len(found)
        assert sum(own) == pytest.approx(sum(found), rel=0.02)
    else:
        assert own == sorted(found) and len(own) > 0
