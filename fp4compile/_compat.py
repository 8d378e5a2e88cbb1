"""Where versions of torch and Triton differ, and what they hide."""

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._higher_order_ops.triton_kernel_wrap
import torch._inductor.inductor_prims
import triton
from torch._inductor import config
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.experimental.symbolic_shapes import statically_known_true
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

# Among axes of a load whose addresses do not touch, Triton hands the lanes of a warp to the first axis first up to
# 3.6, to the last axis first in 3.9 (where it changed was not looked up; only speed depends on it).
FIRST_AXIS_FASTEST = tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 8)


# (count, device) -> int64 [count], drawn from the device's default generator at every run of the compiled graph.
RANDOM_SEEDS = torch.ops.prims.inductor_seeds.default


def handed_to_dynamo() -> list[Any]:
    """The backends that `torch.compile` was given since the last `torch.compiler.reset()`, called or not."""
    given = getattr(torch._dynamo.eval_frame, "cached_backends", {}).values()  # private; without it, none is known
    return [getattr(backend, "compiler_fn", backend) for backend in given]


def interpreting() -> bool:
    """Whether Triton runs kernels in its interpreter (TRITON_INTERPRET=1)."""
    return triton.knobs.runtime.interpret


def statically_true(condition) -> bool:
    """A condition on sizes, False where a symbolic size leaves it open; never guards."""
    return statically_known_true(condition)


def tracing() -> bool:
    """Whether calls are being recorded as a graph instead of run."""
    return get_proxy_mode() is not None


def traceable(kernel):
    """A Triton kernel as tracing wants it: launched, it becomes a node that Inductor understands."""
    return torch.library.wrap_triton(kernel)


def pointwise_by_default() -> bool:
    """Whether Inductor computes pointwise operations in float32, by its usual functions, and rounds what it stores."""
    if config.emulate_precision_casts or config.use_fast_math or config.eager_numerics.division_rounding:
        return False
    library = getattr(config.eager_numerics, "use_pytorch_libdevice", False)  # from torch 2.13 on
    return config.triton.codegen_upcast_to_fp32 and not library


def share_analysis(package: str) -> None:
    """Let torch find out what a package's kernel writes once for all launches of one signature.

    torch makes the kernel's intermediate code for that, some tenths of a second each time, whenever it traces or lowers
    a launch, and walks through it; a model has hundreds of launches and few signatures.
    """
    wrap = torch._higher_order_ops.triton_kernel_wrap
    for name in ("identify_mutated_tensors", "identify_accessed_tensors"):  # private, and only speed depends on it
        identify = getattr(wrap, name, None)
        if identify is not None and package not in getattr(identify, "shared", ()):
            setattr(wrap, name, _shared(identify, package))


def _shared(identify: Callable, package: str) -> Callable:
    """`identify`, with its answers for the package's kernels kept."""
    found: dict[tuple, Any] = {}

    @functools.wraps(identify)
    def shared(kernel, kwargs, tma_descriptor_metadata):
        # torch hands on the number of warps by an autotuner of one configuration, a new one for each launch.
        tuned = isinstance(kernel, triton.runtime.Autotuner)
        function, arguments = (kernel.fn, kwargs | kernel.configs[0].kwargs) if tuned else (kernel, kwargs)
        if not _belongs(function, package):
            return identify(kernel, kwargs, tma_descriptor_metadata)
        key = (function, tuple((name, _signature(value)) for name, value in arguments.items()))
        if key not in found:
            found[key] = identify(kernel, kwargs, tma_descriptor_metadata)
        return copy.copy(found[key])

    shared.shared = (*getattr(identify, "shared", ()), package)
    return shared


def _belongs(kernel, package: str) -> bool:
    return (getattr(kernel, "__module__", None) or "").startswith(f"{package}.")


def launch_dependents(package: str) -> None:
    """Let Inductor launch the package's kernels whose constant PDL is set as `templates.device.dependent_launch` says.

    Inductor has this option for kernels of its own, and reads it from what it writes down with any kernel, but has no
    way to ask for it. Where this finds nothing to change, such a kernel is launched as usual, and as right.
    """
    define = PythonWrapperCodegen.define_user_defined_triton_kernel
    if package in getattr(define, "dependents_of", ()):
        return

    @functools.wraps(define)
    def defined(self, kernel, configs, kwargs, *rest, **more):
        if not (_belongs(kernel, package) and kwargs.get("PDL")):
            return define(self, kernel, configs, kwargs, *rest, **more)
        write = self.define_kernel

        def as_dependent(name, body, *others, **options):
            body = body.replace("triton_meta={", "triton_meta={'launch_pdl': True, ", 1)
            return write(name, body, *others, **options)

        self.define_kernel = as_dependent
        try:
            return define(self, kernel, configs, kwargs, *rest, **more)
        finally:
            del self.define_kernel

    defined.dependents_of = (*getattr(define, "dependents_of", ()), package)
    PythonWrapperCodegen.define_user_defined_triton_kernel = defined


def _signature(value) -> tuple:
    """What intermediate code depends on in an argument: a number's value, a tensor's dtype, that a size is symbolic."""
    if value is None or isinstance(value, bool | int | float | str):
        return type(value).__name__, value
    return "tensor or symbol", getattr(value, "dtype", None)


def compile_ahead(kernel, args: dict, constants: dict, num_warps: int, sm: int):
    """Compile a Triton kernel for a GPU that need not be there, specialised as a launch with `args` would be.

    args: tensors and ints by name. Returns Triton's compiled kernel (`.asm`, `.metadata`).
    """
    signature, constexprs, attrs = {}, dict(constants), {}
    for i, name in enumerate(kernel.arg_names):
        value = args.get(name)
        if name in constants or (isinstance(value, int) and value == 1):
            signature[name] = "constexpr"
            constexprs[name] = constants.get(name, 1)
        elif isinstance(value, torch.Tensor):
            signature[name] = "*" + _TYPES[value.dtype]
            attrs[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "i32" if abs(value) < 2**31 else "i64"
            if value % 16 == 0:
                attrs[(i,)] = [["tt.divisibility", 16]]
    constexprs = {(kernel.arg_names.index(name),): value for name, value in constexprs.items()}
    source = ASTSource(kernel, signature, constexprs, attrs)
    return triton.compile(source, target=GPUTarget("cuda", sm, 32), options={"num_warps": num_warps})


def cuda_tool(name: str) -> str:
    """Path of a program of the CUDA toolkit that Triton brings along."""
    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)


_TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
}
