"""Two of three ranks move codes, compare recipes, compute under tensor parallelism, and lose each other.

`main` is what each rank runs, and tests/distributed/test_ranks.py compares what it finds.

The ranks meet at the file OUTPUT.store. Ranks 1 and 2 form the groups, so that no group is the whole world, and each
writes what it finds to OUTPUT.RANK.pt. By gloo, rank 2 does not come to one collective, and ends before another. NCCL
ends a process that waits in vain. What ranks agree about, or tell each other in vain, depends on no device.
"""

import copy
import functools
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import nn
from torch._inductor import config
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import fp4compile
from fp4compile.distributed import gather_quantized_
from tests.helpers import moving_worker, process_groups, without_codegen

MEMBERS, TOKENS, WIDTH, HIDDEN = (1, 2), 16, 64, 96
KINDS = ("sequences", "tokens", "frozen")  # steps by tensor parallelism, over parts of sequences or whole ones
# Without global scales, a shard's codes are those of the whole tensor.
ONE_LEVEL = {"recipe": "nvfp4_one_level", **dict.fromkeys(("dgrad_dy", "dgrad_w", "wgrad_dy", "wgrad_x"),
                                                          "nvfp4_one_level")}  # fmt: skip
MOVED = ("mxfp8", "nvfp4_one_level", "nvfp4_rowwise", "nvfp4")
# A weight's codes along the columns are its codes along the rows, transposed. Nothing is drawn.
SQUARE = {"recipe": "nvfp4", "fprop_w": "nvfp4_16x16", "dgrad_w": "nvfp4_16x16"}
SIZES = {"min_m": 1, "min_n": 1, "min_k": 1}
UNLIKE = (
    ({"recipe": "mxfp8"}, {"recipe": "nvfp4"}),
    ({"recipe": "mxfp8"}, {"recipe": "mxfp8", "rules": [("*", "skip")]}),
)


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        return self.down(self.up(x).relu())


def whole(device="cpu") -> tuple[Mlp, torch.Tensor, torch.Tensor]:
    """The model, two sequences of tokens, and the gradient of its result: the last rank's are the largest.

    Half of each layer's weight is larger, too.
    """
    model = Mlp()
    with torch.no_grad():
        model.up.weight[HIDDEN // 2 :] *= 5
        model.down.weight[:, HIDDEN // 2 :] *= 3
    generator = torch.Generator().manual_seed(1)
    x, gradient = (torch.randn(2, 2 * TOKENS, WIDTH, generator=generator) for _ in range(2))
    x[:, TOKENS:] *= 7
    gradient *= 2.0 ** torch.arange(WIDTH).fmod(5)
    return model.to(device), x.to(device), gradient.to(device)


@contextmanager
def captured_graphs(device) -> Iterator[None]:
    """Captured graphs run as they are, without Inductor's kernels: on a GPU, by the package's ops, which launch theirs.

    Otherwise each graph would compile kernels of its own.
    """
    with pytest.MonkeyPatch.context() as patch:
        without_codegen.install(patch)
        if device == "cuda":
            patch.setattr(fp4compile.config, "disabled_passes", ("inplace", "lower"))
        yield


def compiled(model, recipe):
    torch._dynamo.reset()
    backend = (
        fp4compile.backend(recipe, **SIZES) if isinstance(recipe, str) else fp4compile.backend({**recipe, **SIZES})
    )
    return torch.compile(model, backend=backend), backend


def step(model, x, gradient, recipe) -> dict:
    """The result, the gradients of the input and of the parameters, and what the report says was fused."""
    x = x.detach().clone(memory_format=torch.contiguous_format).requires_grad_()
    function, backend = compiled(model, recipe)
    y = function(x)
    y.backward(gradient)
    trained = {name: one.grad for name, one in model.named_parameters() if one.requires_grad}
    found = {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in trained.items()}
    told = {f"{row.module} {row.product}": row.fused for row in backend.report.rows}
    return {"y": y.detach(), "x": x.grad, **found, "told": told}


def steps_of_one_process(device) -> dict[str, dict]:
    """What ranks are compared with, by the kind of their step."""
    with captured_graphs(device):
        plain = step(*whole(device), ONE_LEVEL)
        gathers = {kind: step(*whole(device), recipe) for kind, recipe in (("rows", "nvfp4"), ("again", SQUARE))}
    return dict.fromkeys((*KINDS, "inference"), plain) | gathers


def sharded(model, mesh, sequences: bool):
    """The model on the ranks of a mesh. sequences: whether each rank has a part of the sequences between layers."""
    shard = Shard(1)
    plans = {"up": ColwiseParallel(input_layouts=shard) if sequences else ColwiseParallel(),
             "down": RowwiseParallel(output_layouts=shard) if sequences else RowwiseParallel()}  # fmt: skip
    return parallelize_module(copy.deepcopy(model), mesh, plans)


def gathered(model, mesh, again=False):
    """The model with parameters of which each rank has some rows, and which its forward pass gathers.

    As torchtitan's SimpleFSDP has it: the graph has the gathers. gloo has no means, so gradients are sums over ranks.
    again: whether the backward pass gathers the parameters again, and saves none.
    """

    def replicated(value):
        return value.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])

    def whole_of(layer, name):
        value = layer._parameters[name]
        return (
            checkpoint(replicated, value, use_reentrant=False, context_fn=GATHERED_AGAIN)
            if again
            else replicated(value)
        )

    model = copy.deepcopy(model)
    for layer in (model.up, model.down):
        for name, value in list(layer.named_parameters()):
            shards = distribute_tensor(value.detach(), mesh, [Shard(0)], src_data_rank=None)
            layer._parameters[name] = nn.Parameter(shards)
        names = {name: property(functools.partial(whole_of, name=name)) for name in layer._parameters}
        layer.__class__ = type("Gathered", (type(layer),), names)
    return model


def _of_a_gather(context, function, *args, **kwargs) -> CheckpointPolicy:
    c10d = torch.ops._c10d_functional
    again = function in (c10d.all_gather_into_tensor.default, c10d.wait_tensor.default)
    return CheckpointPolicy.MUST_RECOMPUTE if again else CheckpointPolicy.MUST_SAVE


GATHERED_AGAIN = functools.partial(create_selective_checkpoint_contexts, _of_a_gather)


def of_gathered(model, x, gradient, mesh) -> dict[str, dict]:
    """Steps and evaluations of the model whose graph gathers its parameters, by the kind of step."""
    found = {}
    for kind, recipe, again in (("rows", "nvfp4", False), ("again", SQUARE, True)):
        found[kind] = step(gathered(model, mesh, again), x, gradient, recipe)
        with torch.no_grad():
            found[kind]["evaluated"] = compiled(gathered(model, mesh), recipe)[0](x)
    return found


def parallel(rank: int, mesh: DeviceMesh) -> dict:
    """A step of the sharded model by the captured graphs, and results by Inductor's kernels."""
    device = mesh.device_type
    model, x, gradient = whole(device)
    mine = slice(rank * TOKENS, (rank + 1) * TOKENS)
    found = {}
    with captured_graphs(device):
        found["sequences"] = step(sharded(model, mesh, True), x[:, mine], gradient[:, mine], ONE_LEVEL)
        found["tokens"] = step(sharded(model, mesh, False), x, gradient, ONE_LEVEL)
        found["gathered"] = of_gathered(model, x, gradient, mesh)
        model.requires_grad_(False)
        found["frozen"] = step(sharded(model, mesh, True), x[:, mine], gradient[:, mine], ONE_LEVEL)
    with torch.no_grad():
        function, backend = compiled(sharded(model, mesh, True), ONE_LEVEL)
        found["inference"] = function(x[:, mine].contiguous())
        found["told"] = {row.module: row.fused for row in backend.report.rows}
    return found


def summed(recipe, group):
    """A compiled function that sums a layer's results over the ranks of a group."""
    return compiled(lambda x: collectives.all_reduce(nn.functional.linear(x, x), "sum", group), recipe)[0]


def unlike(place: int, groups) -> list[str]:
    """What ranks are told of other recipes, of a recipe that quantises nothing, and of other gathers of weights."""
    said = []
    for group, recipes in zip(groups, UNLIKE, strict=False):
        with pytest.raises(Exception, match="different settings") as error:
            summed(recipes[place], group)(torch.ones(64, 64))
        said.append(str(error.value))
    layer = fully_shard(nn.Linear(WIDTH, HIDDEN), mesh=DeviceMesh.from_group(groups[-1], "cpu"))
    with pytest.raises(RuntimeError) as error:
        gather_quantized_(layer, "mxfp8", recompute=place == 1)
    return [*said, str(error.value)]


def without_the_other(group) -> str:
    """What a rank is told that calls a collective alone."""
    fp4compile.config.agreement_seconds = 0.1
    with pytest.raises(Exception) as error:  # noqa: PT011  whatever gloo raises
        summed("mxfp8_32x32", group)(torch.ones(64, 64))
    return f"{type(error.value).__name__}: {error.value}"


def wait_for(file: str) -> None:
    """Return when another rank has made the file; `process_groups.run_ranks` ends ranks that wait in vain."""
    while not os.path.exists(file):
        time.sleep(0.1)


def main(rank: int, output: str, device: str = "cpu") -> None:
    torch.set_num_threads(1)
    config.fx_graph_cache = False  # graphs are compiled anew, and the ranks share what a C++ compiler makes of them
    torch._functorch.config.enable_autograd_cache = False
    if device == "cuda":  # its links count as slow, so that codes are gathered
        os.environ["NCCL_P2P_DISABLE"] = "1"
    if device == "cuda":  # or a mesh would choose a device, and refuses three ranks on two
        torch.cuda.set_device(MEMBERS.index(rank) if rank in MEMBERS else 0)
        torch.cuda.init()
    process_groups.begin(f"{output}.store", rank, 3, "nccl" if device == "cuda" else "gloo")
    mesh = DeviceMesh(device, list(MEMBERS))
    *groups, left = [dist.new_group(list(MEMBERS), timeout=timedelta(seconds=each)) for each in (20, 20, 20, 20, 2)]
    if rank in MEMBERS:
        place = MEMBERS.index(rank)
        found = parallel(place, mesh)
        found["moved"] = moved(place, groups[3], device)
        if device == "cpu":
            found["unlike"] = unlike(place, groups[:3])
        torch.save(on_cpu(found), f"{output}.{rank}.pt")
        dist.barrier(groups[3])
    else:  # a rank that ended now could break the connections that the members still make to all ranks
        for member in MEMBERS:
            wait_for(f"{output}.{member}.pt")
    if rank in MEMBERS and device == "cpu":
        if rank == MEMBERS[-1]:
            wait_for(f"{output}.hung")
            os._exit(0)
        hung = without_the_other(left)
        open(f"{output}.hung", "x").close()
        torch.save([hung, without_the_other(groups[3])], f"{output}.lost.pt")
    os._exit(0)  # a group that has lost a rank cannot be ended


def moved(place: int, group, device: str) -> dict:
    """What `moving_worker` finds by each recipe: for the first by Inductor's kernels, then by captured graphs."""
    first, *others = MOVED
    found = {first: moving_worker.run(place, first, group, device)}
    with captured_graphs(device):
        return found | {recipe: moving_worker.run(place, recipe, group, device) for recipe in others}


def on_cpu(found: Any) -> Any:
    return torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, found)
