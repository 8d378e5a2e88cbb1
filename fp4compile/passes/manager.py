"""One manager object a pass slot of Inductor: the order of the passes, their cache key, match counts, dumps.

`JointPasses` goes into `joint_custom_pre_pass`, which sees forward and backward of a training graph together, and
inference graphs too; `LowerPasses` into `post_grad_custom_post_pass`, which sees each partition alone. Both first run
the passes that the user had in the slot, on the graph that those expect.
"""

import functools
import hashlib
import itertools
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph

from fp4compile.passes import flops
from fp4compile.passes.fake_quantize import fake_quantize
from fp4compile.passes.find import Gemm, Input, find
from fp4compile.passes.fuse_epilogue import fuse_epilogue
from fp4compile.passes.fuse_horizontal import fuse_horizontal
from fp4compile.passes.inplace import inplace
from fp4compile.passes.lower import lower
from fp4compile.passes.merge_quantize import merge_quantize
from fp4compile.passes.plan import Decision, plan
from fp4compile.passes.rewrite import rewrite
from fp4compile.passes.saved import Saved, saved
from fp4compile.recipe import Recipe
from fp4compile.report import Row

log = logging.getLogger("fp4compile")
_dump_number = itertools.count()

# Where finished graphs report: rows of the products, match counts.
Sink = Callable[[list[Row], dict[str, int]], None]


@dataclass(frozen=True, eq=False)
class JointPasses(CustomGraphPass):
    """find -> plan -> rewrite on a joint or inference graph.

    inputs: what is known of the compiled function's arguments, by position. sink: takes the rows and match counts.
    user_passes: what the slot held before, run first.
    """

    recipe: Recipe
    inputs: tuple[Input, ...]
    sink: Sink
    user_passes: tuple[Callable[[Graph], None], ...] = ()

    def __call__(self, graph: Graph) -> None:
        for user_pass in self.user_passes:
            user_pass(graph)
        start = time.perf_counter()
        decisions = analyse(graph, self.recipe, self.inputs)
        rows = describe(graph, self.inputs, decisions)
        with dumped(graph, "rewrite"):
            rewritten = rewrite(graph, decisions)
        counts = {"find": len(decisions), "rewrite": rewritten}
        log.info("joint graph: %s in %.1f ms", counts, 1e3 * (time.perf_counter() - start))
        for row in rows:
            log.debug("%s", row)
        self.sink(rows, counts)

    def uuid(self) -> tuple | None:
        """Covers recipe, parameter names, device, this package's source and the user's passes; None if theirs is."""
        return _uuid(self.user_passes, self.recipe.digest, names_digest(self.inputs))


@dataclass(frozen=True, eq=False)
class LowerPasses(CustomGraphPass):
    """merge_quantize -> fake_quantize -> fuse_epilogue -> fuse_horizontal -> inplace -> lower on a forward, backward or inference graph.

    On a GPU, ops become kernel launches. sink: takes what a forward graph saves. user_passes: as in `JointPasses`.
    """

    sink: Callable[[list[Saved]], None]
    user_passes: tuple[Callable[[Graph], None], ...] = ()

    def __call__(self, graph: Graph) -> None:
        for user_pass in self.user_passes:
            user_pass(graph)
        self.sink(saved(graph))
        with dumped(graph, "merge_quantize"):
            merged = merge_quantize(graph)
        with dumped(graph, "fake_quantize"):
            expanded = fake_quantize(graph)
        with dumped(graph, "fuse_epilogue"):
            epilogues = fuse_epilogue(graph)
        with dumped(graph, "fuse_horizontal"):
            grouped = fuse_horizontal(graph)
        with dumped(graph, "inplace"):
            reused = inplace(graph)
        with dumped(graph, "lower"):
            lowered = lower(graph)
        counts = {"merge_quantize": merged, "fake_quantize": expanded, "fuse_epilogue": epilogues, "fuse_horizontal": grouped, "inplace": reused,
                  "lower": lowered}  # fmt: skip
        log.info("post-grad graph: %s", counts)

    def uuid(self) -> tuple | None:
        """Covers device, this package's source and the user's passes; None if theirs is."""
        return _uuid(self.user_passes)


def _uuid(user_passes: tuple, *own: str) -> tuple | None:
    theirs = [getattr(p, "uuid", lambda: None)() for p in user_passes]
    if any(key is None for key in theirs):
        return None
    return ("fp4compile", *own, device_key(), source_digest(), *theirs)


def analyse(graph: Graph, recipe: Recipe, inputs: tuple[Input, ...]) -> list[Decision]:
    """find and plan: what would happen to each product of the graph."""
    return plan(find(graph, inputs), recipe, inputs)


def describe(graph: Graph, inputs: tuple[Input, ...], decisions: list[Decision]) -> list[Row]:
    """The report's rows, one a product. Reads the graph, so they are made before the rewrite."""
    known = {decision.gemm.node for decision in decisions}
    uncounted = [Gemm(node, "other", "", unsupported=f"operator {node.target}") for node in flops.others(graph, known)]
    decisions = [*decisions, *(Decision(gemm, gemm.unsupported) for gemm in uncounted)]
    categories = flops.Categories(graph, inputs, [decision.gemm for decision in decisions])
    return [_row(decision, categories.of(decision.gemm)) for decision in decisions]


def _row(decision: Decision, category: str) -> Row:
    gemm = decision.gemm
    m, n, k = (_size(size) for size in gemm.dims) if gemm.dims else (None, None, None)
    return Row(
        module=gemm.module, product=gemm.product, m=m, n=n, k=k,
        left=_operand_format(gemm, "left", decision), right=_operand_format(gemm, "right", decision),
        tier=decision.tier, reason=decision.reason, flops=flops.count(gemm.node), category=category,
        node=gemm.node.name,
    )  # fmt: skip


def _size(size) -> int | str:
    return size if isinstance(size, int) else str(size)


def _operand_format(gemm: Gemm, side: str, decision: Decision) -> str | None:
    treatment, operand = getattr(decision, side), getattr(gemm, side)
    if treatment is not None:
        return treatment.format
    return None if operand is None else str(operand.source.meta["val"].dtype).removeprefix("torch.")


class dumped:
    """Writes the graph before and after a pass to the directory FP4COMPILE_DUMP, if that is set."""

    def __init__(self, graph: Graph, name: str):
        self.graph, self.name = graph, name
        self.directory = os.environ.get("FP4COMPILE_DUMP")

    def __enter__(self):
        if self.directory:
            self.number = next(_dump_number)
            self._write("before")

    def __exit__(self, *exc):
        if self.directory:
            self._write("after")

    def _write(self, when: str) -> None:
        module = torch.fx.GraphModule(self.graph.owning_module or {}, self.graph)
        text = module.print_readable(print_output=False)
        directory = Path(self.directory)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"{os.getpid()}_{self.number:03d}_{self.name}_{when}.py").write_text(text)


def names_digest(inputs: tuple[Input, ...]) -> str:
    return hashlib.sha256(repr([entry.parameter for entry in inputs]).encode()).hexdigest()


def device_key() -> str:
    """The GPU that kernels are specialised for: its compute capability, "cpu" without one."""
    if not torch.cuda.is_available():
        return "cpu"
    return "sm{}{}".format(*torch.cuda.get_device_capability())


@functools.cache
def source_digest() -> str:
    """Hash of this package's source: a changed pass or kernel misses the caches."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
