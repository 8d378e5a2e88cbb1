"""The passes in their order, one manager object for each pass slot of Inductor, and their cache keys.

`JointPasses` goes into `joint_custom_pre_pass`. It runs on the joint graph, forward and backward, in training, and on
inference graphs. `LowerPasses` goes into `post_grad_custom_post_pass` and runs on each graph after the partitioner:
forward, backward or inference. Both first run the passes that the user had put into the slot. `hoist`, the pass on
inference graphs between the two, has no slot: `hoist.hoisting` runs it around Inductor's `inner_compile`.

To add a pass, write its function in a file of its own and add it to `JOINT` or `POST_GRAD`.
"""

import functools
import hashlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph

from fp4compile import config
from fp4compile.analysis import flops
from fp4compile.analysis.find import find
from fp4compile.analysis.gemm import Gemm, GemmOperand, Input
from fp4compile.analysis.gradients import is_nested
from fp4compile.analysis.plan import Decision, Treatment, plan
from fp4compile.formats import formats
from fp4compile.hardware import Gpu, gathers_through_host
from fp4compile.passes.fake_quantize import fake_quantize
from fp4compile.passes.fuse_epilogue import fuse_epilogue
from fp4compile.passes.fuse_horizontal import fuse_horizontal
from fp4compile.passes.fuse_prologue import fuse_prologue
from fp4compile.passes.fuse_quantize import fuse_quantize
from fp4compile.passes.hoist import hoist
from fp4compile.passes.inplace import inplace
from fp4compile.passes.lib.base import run_passes, summary
from fp4compile.passes.lib.notes import Saved, fused, saved
from fp4compile.passes.lower import lower
from fp4compile.passes.merge_quantize import merge_quantize
from fp4compile.passes.quantize_before_gather import quantize_before_gather
from fp4compile.passes.quantize_before_index import quantize_before_index
from fp4compile.passes.rank_tokens import rank_tokens
from fp4compile.passes.recompute import recompute
from fp4compile.passes.rewrite import rewrite
from fp4compile.passes.scale_results import scale_results
from fp4compile.recipe import Recipe
from fp4compile.report.report import PassRun, Row
from fp4compile.templates.launch import cuda_target

log = logging.getLogger("fp4compile")

JOINT = (rewrite, recompute)
FUSING = (
    merge_quantize,
    quantize_before_gather,  # before `fake_quantize` makes 16-bit numbers of codes
    fake_quantize,  # before the fusing passes, which depend on the operands that it leaves
    quantize_before_index,
    fuse_quantize,  # before fuse_epilogue: it takes the same operations
    fuse_epilogue,
    scale_results,
    fuse_prologue,  # after fuse_epilogue: a quantiser need not compute a matmul's epilogue
    rank_tokens,
)
# `fuse_horizontal` runs after the names of fused operations are read. It runs before `inplace`, because it moves nodes,
# which is only allowed while no memory is overwritten.
POST_GRAD = (*FUSING, fuse_horizontal, inplace, lower)
ALL = (*JOINT, hoist, *POST_GRAD)
SWITCHED_OFF = "the pass rewrite is switched off (fp4compile.config.disabled_passes)"


def switched_off_passes() -> frozenset[str]:
    """Names of the passes that `fp4compile.config` or the environment switches off now.

    Raises ValueError for an unknown name, TypeError if the setting is no collection of names.
    """
    return config.switched_off([one.__name__ for one in ALL])


@dataclass(frozen=True, eq=False)
class JointPasses(CustomGraphPass):
    """find -> plan -> `JOINT` on a joint or inference graph.

    inputs: one entry for each argument of the compiled function. sink: takes the report's rows and the passes' runs.
    user_passes: the passes that were in the slot before; they run first, on the graph that they expect. disabled:
    names of the passes that do not run.
    """

    recipe: Recipe
    inputs: tuple[Input, ...]
    sink: Callable[[list[Row], dict[str, PassRun]], None]
    user_passes: tuple[Callable[[Graph], None], ...] = ()
    disabled: frozenset[str] = field(default_factory=switched_off_passes)

    def __call__(self, graph: Graph) -> None:
        for user_pass in self.user_passes:
            user_pass(graph)
        if is_nested(graph):  # Inductor also runs its passes on bodies; the graph around a body lists its matmuls
            return
        start = time.perf_counter()
        decisions = analyse(graph, self.recipe, self.inputs)
        if "rewrite" in self.disabled:
            decisions = [_left_alone(decision) for decision in decisions]
        runs = {"find": PassRun(len(decisions), time.perf_counter() - start)}
        rows = describe(graph, self.inputs, decisions)
        runs |= run_passes(JOINT, graph, decisions, disabled=self.disabled)
        log.info("joint graph: %s", summary(runs))
        for row in rows:
            log.debug("%s", row)
        self.sink(rows, runs)

    def uuid(self) -> tuple | None:
        """The cache key; None, for graphs that must not be cached, if a user's pass has none.

        Covers the recipe; the parameters' names and positions among the inputs, whether they lie in blocks or are an
        adapter's or a head's, and their shards; the switched off passes, the GPU, this package's source and the user's
        passes.
        """
        known = [(entry.parameter, entry.in_block, entry.shards, entry.adapter, entry.head) for entry in self.inputs]
        digest = hashlib.sha256(repr(known).encode()).hexdigest()
        return _uuid(self.user_passes, self.disabled, self.recipe.digest, digest)


@dataclass(frozen=True, eq=False)
class LowerPasses(CustomGraphPass):
    """`POST_GRAD` on a forward, backward or inference graph after the partitioner.

    sink: takes the packed activations that a forward graph saves, the operations fused into quantisers by matmul name,
    and the passes' runs. It is called once for each graph. A backward graph may be compiled only when it first runs,
    long after the compilation of the forward.
    user_passes, disabled: as in `JointPasses`.
    """

    sink: Callable[[list[Saved], dict[str, str], dict[str, PassRun]], None]
    user_passes: tuple[Callable[[Graph], None], ...] = ()
    disabled: frozenset[str] = field(default_factory=switched_off_passes)

    def __call__(self, graph: Graph) -> None:
        for user_pass in self.user_passes:
            user_pass(graph)
        kept = saved(graph)
        runs, prologues = fuse(graph, self.disabled)
        runs |= run_passes((inplace, lower), graph, disabled=self.disabled)
        log.info("post-grad graph: %s", summary(runs))
        self.sink(kept, prologues, runs)

    def uuid(self) -> tuple | None:
        """The cache key, as for `JointPasses`, of switched off passes, GPU, this package's source and user's passes."""
        return _uuid(self.user_passes, self.disabled)


def fuse(graph: Graph, disabled: frozenset[str]) -> tuple[dict[str, PassRun], dict[str, str]]:
    """Run the fusing passes on a graph. Returns their runs, and the operations that quantisers compute (`fused`)."""
    runs = run_passes(FUSING, graph, disabled=disabled)
    operations = fused(graph)
    return runs | run_passes([fuse_horizontal], graph, disabled=disabled), operations


def _uuid(user_passes: tuple, disabled: frozenset[str], *own: str) -> tuple | None:
    theirs = [getattr(p, "uuid", lambda: None)() for p in user_passes]
    if any(key is None for key in theirs):
        return None
    machine = device_key(), gathers_through_host()
    return ("fp4compile", *own, tuple(sorted(disabled)), *machine, source_digest(), *theirs)


def _left_alone(decision: Decision) -> Decision:
    """The decision about a matmul when `rewrite` is off; a matmul of packed weights is quantised already."""
    if (decision.reason is not None and not decision.dequantised) or decision.gemm.packed is not None:
        return decision
    return Decision(decision.gemm, SWITCHED_OFF)


def analyse(graph: Graph, recipe: Recipe, inputs: tuple[Input, ...], meta: Gpu | None = None) -> list[Decision]:
    """find and plan: the recipe's decision about each matmul of the graph. Never changes the graph.

    meta: the GPU that tensors on the meta device represent; None leaves their matmuls unquantised.
    """
    return plan(find(graph, inputs), recipe, inputs, meta)


def describe(graph: Graph, inputs: tuple[Input, ...], decisions: list[Decision]) -> list[Row]:
    """The report's rows, one for each matmul, including matmuls that only torch's FLOP counter finds.

    Reads the matmuls' nodes, so call it before the rewrite.
    """
    listed = {decision.gemm.node for decision in decisions}
    uncounted = [Gemm(node, "other", "", unsupported=f"operator {node.target}") for node in flops.others(graph, listed)]
    decisions = [*decisions, *(Decision(gemm, gemm.unsupported) for gemm in uncounted)]
    categories = flops.Categories(graph, inputs, [decision.gemm for decision in decisions])
    return [_row(decision, categories.of(decision.gemm), graph) for decision in decisions]


def _row(decision: Decision, category: str, graph: Graph) -> Row:
    gemm = decision.gemm
    own = gemm.node.graph is graph  # a nested region has nodes of the same names
    sizes = (size if isinstance(size, int) else str(size) for size in gemm.dims)
    m, n, k = sizes if gemm.dims else (None, None, None)
    return Row(
        module=gemm.module, product=gemm.product, m=m, n=n, k=k,
        left=_operand_format(gemm.a, decision.a), right=_operand_format(gemm.b, decision.b),
        tier=decision.tier, reason=decision.reason, flops=flops.count(gemm.node), category=category,
        note=decision.note, weight_scales=decision.weight_scales, node=gemm.node.name if own else None,
        **_weight_bytes(decision),
    )  # fmt: skip


def _weight_bytes(decision: Decision) -> dict[str, int | None]:
    """`Row.weight` and `Row.weight_plain` of a forward matmul with one parameter, or one parameter of experts."""
    gemm = decision.gemm
    if gemm.product != "fprop":
        return {}
    for operand, treatment in ((gemm.a, decision.a), (gemm.b, decision.b)):
        if operand is None or operand.role != "fprop_w" or operand.parameter is None or operand.packed:
            continue
        value = operand.source.meta["val"]
        shape = value.shape[operand.repeated :]
        if not all(isinstance(size, int) for size in shape):
            continue
        *matrices, rows, cols = shape
        if operand.transposed != (operand is gemm.b):  # [in, out]
            rows, cols = cols, rows
        packed = None if treatment is None else formats.get(treatment.format).nbytes(rows, cols, prod(matrices))
        return {"weight": packed, "weight_plain": prod(shape) * value.element_size()}
    return {}


def _operand_format(operand: GemmOperand | None, treatment: Treatment | None) -> str | None:
    """The format of a quantised operand, the dtype of any other operand; None where the operand is unknown."""
    if treatment is not None:
        return treatment.format
    return None if operand is None else str(operand.source.meta["val"].dtype).removeprefix("torch.")


def device_key() -> str:
    """The GPUs of this machine, for which kernels and grids are made: one entry if all are alike; "cpu" without any."""
    if not torch.cuda.is_available():
        return "cpu"
    targets = [cuda_target(index) for index in range(torch.cuda.device_count())]
    return repr(targets if len(set(targets)) > 1 else targets[:1])


@functools.cache
def source_digest() -> str:
    """Hash of this package's source, so that a changed pass or kernel misses the caches."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
