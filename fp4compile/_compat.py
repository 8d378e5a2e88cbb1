"""Differences between versions of torch and Triton, and all uses of their private interfaces."""

import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

# Whether FSDP2 takes frozen parameters of integers. torch 2.5 lets its shards require gradients, which raises for
# integers; 2.13 does not, and casts integers by no mixed precision. The versions between were not checked.
SHARDS_INTEGERS = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13)


# Inductor, Dynamo, sympy and Triton take seconds to import, and `import fp4compile` needs none of them: the functions
# below import them.


def triton_version() -> tuple[int, ...]:
    """Major and minor version of Triton."""
    import triton

    return tuple(int(part) for part in triton.__version__.split(".")[:2])


def first_axis_fastest() -> bool:
    """Whether Triton gives the lanes of a warp to the first axis first where no axis of a load has adjacent addresses.

    Triton 3.6 does, and Triton 3.9 begins with the last axis. The version of the change between them was not looked up:
    only speed depends on it.
    """
    return triton_version() < (3, 8)


def launch_errors() -> tuple[type[Exception], ...]:
    """The errors of a failed launch of a kernel or a library, out-of-memory errors included.

    OutOfResources, PTXASError and CompilationError are TritonErrors; a failed compiler pass raises RuntimeError.
    """
    from triton.errors import TritonError

    return TritonError, RuntimeError


def random_seeds() -> Any:
    """The op (count, device) -> int64 [count], drawn from the device's generator at every run of a compiled graph."""
    import torch._inductor.inductor_prims

    return torch.ops.prims.inductor_seeds.default


def handed_to_dynamo() -> list[Any]:
    """The backends passed to `torch.compile` since the last `torch.compiler.reset()`, called or not.

    Empty where torch no longer has the private dictionary that holds them.
    """
    given = getattr(torch._dynamo.eval_frame, "cached_backends", {}).values()
    return [getattr(backend, "compiler_fn", backend) for backend in given]


def reset_with_dynamo(backend: Any) -> None:
    """Make the next `torch.compiler.reset()` reset a backend.

    Dynamo knows a backend from `torch.compile` to the next reset. A function that was compiled before a reset keeps its
    backend, which the second reset would not reach.
    """
    known = getattr(torch._dynamo.eval_frame, "cached_backends", {})
    known.setdefault(id(backend), backend)


def compiled_with(model: Any) -> dict[str, Any]:
    """The changes of Inductor's configuration by a compiled module's mode and options; none for unknown modes."""
    from torch._inductor import list_mode_options

    given = getattr(getattr(model, "dynamo_ctx", None), "callback", None)
    for name in ("_torchdynamo_orig_backend", "_torchdynamo_orig_callable"):  # newer and older versions of torch
        while hasattr(given, name):
            given = getattr(given, name)
    if isinstance(given, torch._TorchCompileInductorWrapper):
        return dict(given.config)
    if isinstance(given, torch._TorchCompileWrapper):
        return {**list_mode_options().get(given.kwargs.get("mode"), {}), **given.kwargs.get("options", {})}
    return {}


def cuda_graphs(settings: dict[str, Any]) -> bool:
    """Whether Inductor makes CUDA graphs. settings: a compilation's changes of its configuration."""
    from torch._inductor import config

    return bool(settings.get("triton.cudagraphs", config.triton.cudagraphs))


def lazy_graph_modules() -> Any:
    """A context in which a graph module generates its code only when it is called."""
    from torch.fx._lazy_graph_module import _use_lazy_graph_module

    return _use_lazy_graph_module(True)


def interpreting() -> bool:
    """Whether Triton runs kernels in its interpreter (TRITON_INTERPRET=1)."""
    import triton

    return triton.knobs.runtime.interpret


def store_of(group: Any) -> Any:
    """The key-value store of a process group's rendezvous; None where its backend has none."""
    return torch.distributed.distributed_c10d._get_process_group_store(group)


def process_group(name: str) -> Any:
    """The process group of a name; None where there is none at present."""
    groups = torch.distributed.distributed_c10d._world.pg_map
    return next((group for group in groups if group.group_name == name), None)


def nvlinks(device: int) -> list[int]:
    """The number of NVLinks between a CUDA device and each visible one; empty where torch cannot tell."""
    from torch._C import _autograd, _distributed_c10d

    try:
        found = _distributed_c10d._detect_dma_connectivity(_autograd.DeviceType.CUDA, "nvlink")  # type: ignore
        return found.matrix[device]
    except (AttributeError, RuntimeError):  # torch without CUDA or with another interface, no NVML
        return []


def statically_true(condition: Any) -> bool:
    """Whether a condition on sizes holds; False where a symbolic size leaves it open. Never adds a guard."""
    if isinstance(condition, bool):
        return condition
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)


def transformed(gradients_only: bool) -> bool:
    """Whether a transform of torch.func, such as vmap or grad, is active while Dynamo traces the caller.

    gradients_only: count only the transforms that take gradients.
    """
    levels = torch._C._functorch.get_interpreter_stack() or []
    return any(not gradients_only or level.key() == torch._C._functorch.TransformType.Grad for level in levels)


vars(transformed)["_dynamo_marked_constant"] = True  # `assume_constant_result`, which imports the compiler


def tracing() -> bool:
    """Whether calls are being recorded as a graph instead of run."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    return get_proxy_mode() is not None


def stores_graphs() -> bool:
    """Whether torch is going to store compiled graphs in a file (`aot_compile`, `caching_precompile`)."""
    from torch._dynamo import config as dynamo
    from torch._functorch import config as functorch

    # Neither exists in every version of torch.
    return getattr(functorch, "bundled_autograd_cache", False) or getattr(dynamo, "caching_precompile", False)


def pointwise_by_default() -> bool:
    """Whether Inductor computes pointwise operations in float32 with its usual functions, and rounds as it stores."""
    from torch._inductor import config

    if config.emulate_precision_casts or config.use_fast_math or config.eager_numerics.division_rounding:
        return False
    library = getattr(config.eager_numerics, "use_pytorch_libdevice", False)  # from torch 2.13 on
    return config.triton.codegen_upcast_to_fp32 and not library


def walks_rows(cols: Any) -> bool:
    """Whether Inductor's Triton kernels reduce rows of `cols` elements in loops; otherwise a kernel holds a whole row.

    The limit comes from `InductorChoices.should_use_persistent_reduction`.
    """
    from torch._inductor import config

    limit = 1024 * (16 if config.triton.multi_kernel else 1)
    return not (config.triton.persistent_reductions and statically_true(cols <= limit))


def times_products() -> bool:
    """Whether Inductor times its own templates for a matmul besides the library (`max_autotune`).

    Codes are views of bytes. torch 2.11 times every choice on bytes, refuses all of them, and does not compile. In
    torch 2.13 its templates still read bytes, and only the library remains.
    """
    from torch._inductor import config

    return config.max_autotune or config.max_autotune_gemm


@contextmanager
def scratch_memory(device: torch.device) -> Iterator[None]:
    """Let Triton allocate a launch's scratch memory (for descriptors) from torch, unless the user set an allocator.

    Inductor's wrappers set an allocator themselves.
    """
    from triton.runtime import _allocation

    if not isinstance(_allocation._allocator.get(), _allocation.NullAllocator):
        yield
        return
    token = _allocation._allocator.set(
        lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device=device)
    )
    try:
        yield
    finally:
        _allocation._allocator.reset(token)


def compile_ahead(
    kernel: Any,
    args: dict[str, Any],
    constants: dict[str, Any],
    num_warps: int,
    sm: int,
    num_stages: int = 3,
    num_ctas: int = 1,
) -> Any:
    """Compile a kernel of Triton or Gluon for a GPU, local or not, specialised as for a launch with `args`.

    args: tensors (meta tensors too), ints and None, by name; tensors count as aligned to 16 bytes. constants: the
    constexpr arguments by name. sm: the compute capability, 90 for 9.0. num_warps, num_stages, num_ctas: launch
    options.

    Returns Triton's compiled kernel, with its code in `.asm` and the resources that it needs in `.metadata`.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    signature, constexprs, attrs = {}, dict(constants), {}
    for i, name in enumerate(kernel.arg_names):
        value: Any = args.get(name)
        if name in constants or value is None or (isinstance(value, int) and value == 1):
            signature[name] = "constexpr"
            constexprs[name] = constants.get(name, value)
        elif isinstance(value, torch.Tensor):
            signature[name] = "*" + _TYPES[value.dtype]
            attrs[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "i32" if abs(value) < 2**31 else "i64"
            if value % 16 == 0:
                attrs[(i,)] = [["tt.divisibility", 16]]
    by_index = {(kernel.arg_names.index(name),): value for name, value in constexprs.items()}
    source = _source_type(kernel)(kernel, signature, by_index, attrs)
    options = {"num_warps": num_warps, "num_stages": num_stages, "num_ctas": num_ctas}
    return triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)


def cuda_tool(name: str) -> str:
    """The path of a program of the CUDA toolkit that is installed with Triton, such as "nvdisasm"."""
    import triton

    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)


_TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
}


def in_gluon(kernel: Any) -> bool:
    """Whether a kernel is written in Gluon, not in Triton."""
    return getattr(kernel, "is_gluon", lambda: False)()


def _source_type(kernel: Any) -> Any:
    """The class of sources of Triton, or of Gluon, that compile a kernel."""
    if not in_gluon(kernel):
        from triton.compiler import ASTSource

        return ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource  # not in every version of Triton

    return GluonASTSource


@functools.cache
def two_cta_products() -> bool:
    """Whether Gluon supports `templates.gemm.two_cta_kernel_sm100`: block-scaled 2-CTA matmuls.

    Triton 3.8.0 and 3.9.0 have it, 3.6.0 and 3.7.0 do not. Versions are not compared: 3.8.0 was built from several
    states of the source.
    """
    try:
        from triton.experimental.gluon import language
        from triton.experimental.gluon.language.nvidia import blackwell
        from triton.experimental.gluon.language.nvidia.blackwell import mbarrier, tma

        wanted = {
            blackwell.tcgen05_mma_scaled: {"multicast", "mbarriers"},
            blackwell.tcgen05_commit: {"barrier"},
            blackwell.TensorMemoryLayout: {"cga_layout", "two_ctas"},
            blackwell.TensorMemoryScalesLayout: {"cga_layout"},
            language.barrier: {"cluster"},
            blackwell.fence_async_shared: {"cluster"},
            blackwell.tensor_memory_descriptor.get_reg_layout: {"num_warps"},
            mbarrier.allocate_mbarrier.fn: {"batch", "two_ctas"},
            mbarrier.expect: {"bytes_per_cta"},
            tma.make_tensor_descriptor: {"layout"},
            tma.async_load: {"multicast"},
            tma.async_store: {"src"},
        }
        return all(names <= inspect.signature(each).parameters.keys() for each, names in wanted.items())
    except (ImportError, AttributeError):
        return False


def two_cta_products_of_groups() -> bool:
    """Whether Triton compiles `templates.gemm.two_cta_kernel_sm100` for groups, too.

    A scan (`tl.associative_scan`) returns a list in the Gluon of Triton 3.8, and a tensor in Gluon 3.9.
    """
    return two_cta_products() and triton_version() >= (3, 9)
