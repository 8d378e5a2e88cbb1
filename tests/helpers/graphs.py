"""Read compiled graphs as text, and measure what a forward saves for its backward."""

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass

from fp4compile.ops.matmul import SCALED_MM_RESULTS


class Recorder(CustomGraphPass):
    """A user's pass that records the text of every graph and changes none."""

    def __init__(self):
        self.graphs = []

    def __call__(self, graph):
        self.graphs.append(summary(graph))

    def uuid(self):
        return "recorder"


def summary(graph: torch.fx.Graph, everything: bool = False) -> str:
    """Products, quantises and the output, one a line, with the dtypes and shapes of their results.

    everything: show all other operators, too.
    """
    lines = []
    for node in graph.nodes:
        if node.op == "placeholder":
            continue
        if node.op == "output":
            args = torch.utils._pytree.tree_leaves(node.args)
            lines.append("return " + ", ".join(_typed(arg) for arg in args if arg is not None))
        elif everything or _shown(node):
            given = [arg for arg in node.args if not _absent(node, arg)]
            arguments = [*map(str, given), *(f"{name}={value}" for name, value in node.kwargs.items())]
            lines.append(f"{_typed(node)} = {_name(node)}({', '.join(arguments)})")
    return "\n".join(lines)


_SHOWN = ("aten.mm", "aten.addmm", "aten.bmm", "inductor_seeds")


def _shown(node) -> bool:
    name = str(node.target)
    return name.startswith("fp4compile") or any(shown in name for shown in _SHOWN)


def _absent(node, arg) -> bool:
    """Whether an argument is None, or the empty list of a product: formats say which tensors there are."""
    return arg is None or (arg == [] and node.target is SCALED_MM_RESULTS)


def _name(node) -> str:
    return str(node.target).removesuffix(".default")


def _typed(node) -> str:
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor):
        return str(node)
    return f"{node}: {str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


def for_inductor(node):
    """Whether a node is arithmetic that Inductor has to write a kernel for."""
    reduces = any(str(node.target).startswith(f"aten.{name}.") for name in ("mean", "var_mean", "sum", "amax"))
    return node.op == "call_function" and (reduces or torch.Tag.pointwise in getattr(node.target, "tags", ()))


def compile_recorded(model, backend, slot="post_grad_custom_pre_pass", **options):
    """(compiled model, recorder); the recorder sees each graph that reaches the slot."""
    recorder = Recorder()
    return torch.compile(model, backend=backend, options={slot: recorder, **options}), recorder


class Keeping(torch.autograd.graph.saved_tensors_hooks):
    """Records the storages that a forward saves for its backward."""

    def __init__(self):
        self.storages: dict[int, torch.UntypedStorage] = {}
        super().__init__(self._note, lambda tensor: tensor)

    def __enter__(self):
        super().__enter__()
        return self

    def _note(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        self.storages[storage._cdata] = storage
        return tensor

    def size(self, parameters=()) -> int:
        """Bytes that live from forward to backward, without the parameters. A storage that FSDP has freed has none."""
        known = {parameter.untyped_storage()._cdata for parameter in parameters}
        return sum(storage.size() for key, storage in self.storages.items() if key not in known)
