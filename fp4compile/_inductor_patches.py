"""Every change that this package makes to classes and functions of other libraries, one function per change.

Each docstring names the replaced object, the reason and the versions. Calling a function again with the same arguments
has no effect, nor has a function whose object the library's version lacks. Only `watch_process_groups` matters for
right results; it returns whether it replaced its property.
"""

import functools
import inspect
import re
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch._dynamo.eval_frame
import torch._dynamo.exc
import torch._higher_order_ops.triton_kernel_wrap
import torch.distributed
import triton
from torch._C._dynamo.eval_frame import set_code_exec_strategy
from torch._dynamo import convert_frame
from torch._dynamo.types import FrameAction, FrameExecStrategy
from torch._higher_order_ops.triton_kernel_wrap import (
    kernel_side_table,
    triton_kernel_wrapper_functional,
    triton_kernel_wrapper_mutation,
)
from torch._inductor import config as inductor_config
from torch._inductor import fx_utils
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._inductor.fx_passes import post_grad
from torch.fx import Graph, Node
from torch.nn.parallel import DistributedDataParallel
from torch.utils._ordered_set import OrderedSet


@functools.cache
def declare_writes() -> None:
    """Tell torch what this package's kernels write, as they say themselves (`templates.writes`).

    Replaces `identify_mutated_tensors` (torch 2.11) or `identify_accessed_tensors` (torch 2.13), whichever there is, in
    `torch._higher_order_ops.triton_kernel_wrap`. Whenever torch traces or lowers the launch of another kernel, it
    compiles the kernel to Triton's intermediate code and analyses that, some tenths of a second each time.
    """
    wrap = torch._higher_order_ops.triton_kernel_wrap
    for name, of_names in (("identify_mutated_tensors", list), ("identify_accessed_tensors", _accesses)):
        identify = getattr(wrap, name, None)
        if identify is not None:
            setattr(wrap, name, _declared(identify, of_names))


def _declared(identify: Callable, of_names: Callable) -> Callable:
    """`identify`, which asks kernels what they write. of_names: the result for declared arguments."""

    @functools.wraps(identify)
    def declared(kernel: Any, kwargs: dict[str, Any], tma_descriptor_metadata: Any) -> Any:
        # torch passes the number of warps on in an autotuner of one configuration, a new one for each launch.
        tuned = isinstance(kernel, triton.runtime.Autotuner)
        function, arguments = (kernel.fn, kwargs | kernel.configs[0].kwargs) if tuned else (kernel, kwargs)
        if not hasattr(function, "written"):
            return identify(kernel, kwargs, tma_descriptor_metadata)
        written = function.written(arguments)
        return of_names([name for name in function.arg_names if name in written])

    return declared


def _accesses(names: list[str]) -> Any:
    """The result of `identify_accessed_tensors` of a kernel that writes these arguments.

    Inductor must fuse no epilogue into the kernel, and never asks which arguments a kernel reads.
    """
    from torch._inductor.dependencies import ReadWrites, StarDep

    writes = OrderedSet(map(StarDep, names))
    return torch._higher_order_ops.triton_kernel_wrap.TensorAccesses(
        ReadWrites(reads=OrderedSet(), writes=writes, index_exprs=OrderedSet()), can_fuse_epilogue=False
    )


@functools.cache
def launch_as_dependents() -> None:
    """Make Inductor use programmatic dependent launch for this package's kernels that have the constant PDL set.

    Replaces `PythonWrapperCodegen.define_user_defined_triton_kernel`; seen working with torch 2.11 and 2.13. Inductor
    uses dependent launch for a kernel whose metadata has `launch_pdl`, which it sets only for its own kernels. Metadata
    of another form is not changed: the kernel is launched as usual, with the same result. See
    `templates.device.dependent_launch`.
    """
    define = PythonWrapperCodegen.define_user_defined_triton_kernel

    @functools.wraps(define)
    def defined(self: Any, kernel: Any, configs: Any, kwargs: dict[str, Any], *rest: Any, **more: Any) -> Any:
        if not (_is_ours(kernel) and kwargs.get("PDL")):
            return define(self, kernel, configs, kwargs, *rest, **more)
        write = self.define_kernel

        def as_dependent(name: str, body: str, *others: Any, **options: Any) -> Any:
            body = body.replace("triton_meta={", "triton_meta={'launch_pdl': True, ", 1)
            return write(name, body, *others, **options)

        self.define_kernel = as_dependent
        try:
            return define(self, kernel, configs, kwargs, *rest, **more)
        finally:
            del self.define_kernel

    PythonWrapperCodegen.define_user_defined_triton_kernel = defined


@functools.cache
def define_kernels_once() -> None:
    """Make Inductor define one kernel for launches of this package's kernels that differ in sizes alone.

    Replaces `PythonWrapperCodegen.define_user_defined_triton_kernel`; seen working with torch 2.11, 2.13 and 2.15. The
    original defines a kernel with configurations anew for other values of its arguments, because sizes may decide which
    configuration is the fastest. This package's kernels have one configuration, so a definition serves all sizes for
    which Triton compiles the same code (`_of_same_kind`). The forward and the backward graph of a Llama in nvfp4_train
    had 57 definitions; they have 25 now.
    """
    define = PythonWrapperCodegen.define_user_defined_triton_kernel

    @functools.wraps(define)
    def defined(self: Any, kernel: Any, configs: Any, kwargs: dict[str, Any], *rest: Any, **more: Any) -> Any:
        if _is_ours(kernel) and len(configs) == 1:
            constants = {parameter.name for parameter in kernel.params if parameter.is_constexpr}
            kwargs = {name: value if name in constants else _of_same_kind(value) for name, value in kwargs.items()}
        return define(self, kernel, configs, kwargs, *rest, **more)

    PythonWrapperCodegen.define_user_defined_triton_kernel = defined


def _of_same_kind(value: Any) -> Any:
    """An integer above 1 that stands for all for which Triton compiles the same code as for `value`.

    Triton asks whether an argument is 1, whether it is a multiple of 16, and whether it needs more than 32 bits. Other
    values, such as tensors, symbolic sizes and numbers up to 1, are returned unchanged.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value <= 1:
        return value
    return (16 if value % 16 == 0 else 2) + (0 if value < 2**31 else 2**31)


@functools.cache
def decompose_launches_directly() -> None:
    """Make Inductor decompose the launches of this package's kernels without tracing each of them.

    Replaces `decompose_triton_kernel_wrapper_functional` in `torch._inductor.fx_passes.post_grad`; seen in torch 2.11
    and 2.13. The original turns a functional launch into clones of the tensors that must not be overwritten and a
    mutating launch. It traces a function for each launch, which takes 17 ms: 7.5 of the 50 seconds in which Llama-3-8B
    with packed weights compiled on an H200. The package's kernels write only to fresh memory, so nothing has to be
    cloned and each launch becomes a mutating one directly. The original function decomposes all other launches.
    """
    decompose = getattr(post_grad, "decompose_triton_kernel_wrapper_functional", None)
    if decompose is None:
        return

    @functools.wraps(decompose)
    def decomposed(graph: Graph) -> Any:
        for node in graph.find_nodes(op="call_function", target=triton_kernel_wrapper_functional):
            kernel = kernel_side_table.get_kernel(node.kwargs["kernel_idx"])
            function = kernel.fn if isinstance(kernel, triton.runtime.Autotuner) else kernel
            if _is_ours(function) and not node.kwargs["tensors_to_clone"] and not node.users:
                _launch_in_place(graph, node)
        return decompose(graph)

    post_grad.decompose_triton_kernel_wrapper_functional = decomposed


@functools.cache
def compare_sparse_values() -> None:
    """Make Inductor accept sparse tensors below a changed node, such as the gradient of `nn.Embedding(sparse=True)`.

    Replaces `get_storage` in `torch._inductor.fx_utils`; seen in torch 2.13. After the post-grad passes Inductor
    compares the storages of old and new values, and a sparse tensor has none, which raises NotImplementedError. It
    counts as another one.
    """
    get_storage = getattr(fx_utils, "get_storage", None)
    if get_storage is None:
        return

    @functools.wraps(get_storage)
    def storage(tensor: torch.Tensor) -> int:
        return get_storage(tensor) if torch._C._has_storage(tensor) else id(tensor)

    fx_utils.get_storage = storage


@functools.cache
def assert_finite_formats() -> None:
    """Make the code of `torch._inductor.config.nan_asserts` ask no tensor for infinities whose format has none.

    Replaces `PythonWrapperCodegen.generate`; seen in torch 2.13. With this setting (TORCHINDUCTOR_NAN_ASSERTS=1) the
    code asks inputs, results and outputs `isnan()` and `isinf()`. E4M3 and E8M0 have the first one alone, so that every
    graph with codes or scales among these ended with NotImplementedError, whatever its numbers were. Inductor's C++
    wrapper asks in C++, and still ends so.
    """
    generate = PythonWrapperCodegen.generate
    asked = re.compile(r"assert not (\w+)\.isinf\(\)")
    finite = r"assert \1.dtype.itemsize == 1 and \1.dtype != torch.float8_e5m2 or not \1.isinf()"

    @functools.wraps(generate)
    def generated(self: Any, is_inference: bool) -> Any:
        wrapper, *rest = generate(self, is_inference)
        if inductor_config.nan_asserts:
            wrapper.value = asked.sub(finite, wrapper.value)
        return wrapper, *rest

    PythonWrapperCodegen.generate = generated


def _launch_in_place(graph: Graph, node: Node) -> None:
    """Replace a functional launch whose results nobody reads by a launch that writes to its arguments."""
    kwargs = {name: value for name, value in node.kwargs.items() if name != "tensors_to_clone"}
    with graph.inserting_before(node):
        launch = graph.call_function(triton_kernel_wrapper_mutation, (), kwargs)
    launch.meta = {name: value for name, value in node.meta.items() if name not in ("val", "eager_input_vals")}
    launch.meta["val"] = None
    if "eager_input_vals" in node.meta:
        args, eager = node.meta["eager_input_vals"]
        launch.meta["eager_input_vals"] = args, {name: v for name, v in eager.items() if name != "tensors_to_clone"}
    graph.erase_node(node)


def _is_ours(kernel: Any) -> bool:
    """Whether a Triton kernel is one of this package's."""
    return (getattr(kernel, "__module__", None) or "").startswith(f"{__package__}.")


_DATA = torch._C.TensorBase.data


def set_data(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """torch's own `tensor.data = data`, without the call that `watch_data` adds."""
    _DATA.__set__(tensor, data)


@functools.cache
def watch_data(
    read: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    assigned: Callable[[torch.Tensor, torch.Tensor, int], object],
) -> None:
    """Make `tensor.data` return the result of `read`, and call `assigned` after `tensor.data = value`.

    Adds a property `data` to `torch.Tensor`, above that of its base class in C++; seen in torch 2.11 to 2.15. Dynamo
    supports the attribute by its name. read: takes the tensor and torch's result. assigned: takes both tensors, and the
    address of the storage object that the first one had before, 0 where it had none. Subclasses of tensors and modes
    with a `__torch_function__` receive torch's own calls alone.
    """
    unseen = torch._C.DisableTorchFunction

    def get(tensor: torch.Tensor) -> torch.Tensor:
        data = _DATA.__get__(tensor)
        with unseen():
            return read(tensor, data)

    def set(tensor: torch.Tensor, value: torch.Tensor) -> None:
        with unseen():
            before = tensor.untyped_storage()._cdata if torch._C._has_storage(tensor) else 0
        _DATA.__set__(tensor, value)
        if torch._C._has_storage(tensor):
            with unseen():
                assigned(tensor, value, before)

    # torch's own property runs no Python code that Dynamo could capture, such as below a call of `module.half()`.
    for function in (get, set):
        set_code_exec_strategy(function.__code__, FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP))
    torch.Tensor.data = property(get, set, doc=_DATA.__doc__)


@functools.cache
def watch_process_groups(told: Callable[[], object]) -> bool:
    """Make torch.distributed call `told` whenever its default process group is set or destroyed.

    Replaces the property `default_pg` of `torch.distributed.distributed_c10d._World`; seen in torch 2.11 to 2.15. After
    `destroy_process_group`, torch.distributed has no record of the group. Returns False where the property is missing,
    so that `told` is never called.
    """
    if not torch.distributed.is_available():
        return True
    world = getattr(torch.distributed.distributed_c10d, "_World", None)
    known = getattr(world, "default_pg", None)
    if not isinstance(known, property) or known.fset is None:
        return False
    set_group = known.fset

    @functools.wraps(set_group)
    def set_and_tell(self: Any, group: Any) -> None:
        set_group(self, group)
        told()

    world.default_pg = property(known.fget, set_and_tell, known.fdel, known.__doc__)  # type: ignore[union-attr]
    return True


@functools.cache
def watch_recompile_limits(told: Callable[[Any, CodeType, str, str | None], object]) -> None:
    """Make Dynamo call `told` where a limit of recompilations leaves a function uncompiled.

    Replaces `_compile` in `torch._dynamo.convert_frame`; seen in torch 2.11 to 2.15. Dynamo itself calls no backend
    then, and only writes a line to its log. `told` takes the backend, the function's code, the name of the limit in
    `torch._dynamo.config`, and the failed guard, or None. An exception of `told` reaches the caller of the compiled
    function.
    """
    compile_frame = getattr(convert_frame, "_compile", None)
    if compile_frame is None:
        return
    signature = inspect.signature(compile_frame)

    @functools.wraps(compile_frame)
    def compile_or_tell(*args: Any, **kwargs: Any) -> Any:
        try:
            return compile_frame(*args, **kwargs)
        except torch._dynamo.exc.Unsupported as error:
            if getattr(error, "gb_type", None) == "Dynamo recompile limit exceeded":
                given = signature.bind(*args, **kwargs).arguments
                limit = re.search(r"Limit type: (\w+)", str(error))
                told(
                    _innermost(given["compiler_fn"]), given["code"], limit.group(1) if limit else "recompile_limit",
                    _reason_of(error),
                )  # fmt: skip
            raise

    convert_frame._compile = compile_or_tell


def _reason_of(error: Exception) -> str | None:
    """The guard that failed, from Dynamo's variable `recompile_reason`, which it only logs."""
    trace = error.__traceback__
    while trace is not None:
        found = trace.tb_frame.f_locals.get("recompile_reason")
        if isinstance(found, str):
            # "0/1: tensor 'x' size mismatch at index 0. expected 2, actual 3  # where the guard was made"
            return re.sub(r"^\d+/\d+: ", "", found.strip().splitlines()[0]).split("  # ")[0].strip()
        trace = trace.tb_next
    return None


@functools.cache
def forget_parameters_after_compiling(ours: Callable[[Any], bool]) -> None:
    """Make Dynamo drop its weak references to the parameters once a backend that `ours` accepts has compiled them.

    Replaces `_is_registered_backend` in `torch._dynamo.convert_frame`; seen in torch 2.11 to 2.15. Dynamo drops the
    references only for the backends of its registry, because a custom backend might compile its graph later. Weak
    references forbid `torch.utils.swap_tensors`.
    """
    registered = getattr(convert_frame, "_is_registered_backend", None)
    if registered is None:
        return

    @functools.wraps(registered)
    def registered_or_ours(compiler_fn: Any) -> bool:
        return ours(_innermost(compiler_fn)) or registered(compiler_fn)

    convert_frame._is_registered_backend = registered_or_ours


def _innermost(compiler_fn: Any) -> Any:
    """The backend passed to `torch.compile`, inside Dynamo's wrappers."""
    backend = torch._dynamo.eval_frame.innermost_backend(compiler_fn)
    return getattr(backend, "compiler_fn", backend)


@functools.cache
def leave_buffers_out_of_ddp(constant: type[torch.nn.Module]) -> None:
    """Make DistributedDataParallel not broadcast the buffers of modules of a class, which never change.

    It broadcasts all buffers before every forward pass, here whole weights, except the names in the attribute
    `_ddp_params_and_buffers_to_ignore` of the module that it wraps (torch 2.11 to 2.13).
    """
    wrapped = DistributedDataParallel.__init__

    @functools.wraps(wrapped)
    def init(self: DistributedDataParallel, module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        found = {
            f"{path}.{name}".removeprefix(".")
            for path, child in module.named_modules(remove_duplicate=False)
            if isinstance(child, constant)
            for name in child._buffers
        }
        if found:
            known = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, [*known, *found])
        wrapped(self, module, *args, **kwargs)

    DistributedDataParallel.__init__ = init


@functools.cache
def compile_in_place(ours: Callable[[Any], bool], inner: Callable[[torch.nn.Module], torch.nn.Module]) -> None:
    """Make `torch.compile(module, backend=...)` compile and return the module itself, for backends that are ours.

    So calls of the module itself run the compiled one, for example in `Trainer`'s evaluation. inner: the module inside
    of wrappers, which is compiled. torch's own modules are compiled unchanged, because Dynamo skips their code where
    they are compiled in place. Replaces `torch.compile` (torch 2.11 to 2.13).
    """
    compiling = torch.compile

    @functools.wraps(compiling)
    def compile(model: Any = None, **options: Any) -> Any:
        module = inner(model) if isinstance(model, torch.nn.Module) and ours(options.get("backend")) else None
        if module is None or type(module).__module__.startswith("torch.nn."):
            return compiling(model, **options)
        module.compile(**options)
        return model

    torch.compile = compile
