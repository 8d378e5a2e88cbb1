"""Every change that this package makes to classes and functions of other libraries, one named function a change.

Each function says what it replaces, why, and for which versions. Calling one again changes nothing. Where a version of
the library has no such thing to replace, the function does nothing, and results stay right: two of the changes are for
speed alone, and the third one adds names.
"""

import copy
import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch._higher_order_ops.triton_kernel_wrap
import triton
from torch._inductor.codegen.wrapper import PythonWrapperCodegen


def share_kernel_analysis(package: str) -> None:
    """Make torch analyse what a kernel of `package` writes once for each signature, and not for each launch.

    Replaces `identify_mutated_tensors` (torch 2.11) or `identify_accessed_tensors` (torch 2.13), whichever there is, in
    `torch._higher_order_ops.triton_kernel_wrap`. Whenever torch traces or lowers the launch of a user-defined kernel,
    it compiles the kernel to Triton's intermediate code and walks through that, some tenths of a second each time. A
    model has hundreds of launches and few signatures.
    """
    wrap = torch._higher_order_ops.triton_kernel_wrap
    for name in ("identify_mutated_tensors", "identify_accessed_tensors"):
        identify = getattr(wrap, name, None)
        if identify is not None and package not in getattr(identify, "shared", ()):
            setattr(wrap, name, _shared(identify, package))


def _shared(identify: Callable, package: str) -> Callable:
    """`identify`, which keeps its answers for the package's kernels."""
    found: dict[tuple, Any] = {}

    @functools.wraps(identify)
    def shared(kernel: Any, kwargs: dict[str, Any], tma_descriptor_metadata: Any) -> Any:
        # torch passes the number of warps on in an autotuner of one configuration, a new one for each launch.
        tuned = isinstance(kernel, triton.runtime.Autotuner)
        function, arguments = (kernel.fn, kwargs | kernel.configs[0].kwargs) if tuned else (kernel, kwargs)
        if not _belongs(function, package):
            return identify(kernel, kwargs, tma_descriptor_metadata)
        key = (function, tuple((name, _signature(value)) for name, value in arguments.items()))
        if key not in found:
            found[key] = identify(kernel, kwargs, tma_descriptor_metadata)
        return copy.copy(found[key])

    shared.shared = (*getattr(identify, "shared", ()), package)  # type: ignore[attr-defined]
    return shared


def _signature(value: Any) -> tuple:
    """What intermediate code depends on in an argument: a number's value, a tensor's dtype, that a size is symbolic."""
    if value is None or isinstance(value, bool | int | float | str):
        return type(value).__name__, value
    return "tensor or symbol", getattr(value, "dtype", None)


def launch_as_dependents(package: str) -> None:
    """Make Inductor use programmatic dependent launch for the kernels of `package` that have the constant PDL set.

    Replaces `PythonWrapperCodegen.define_user_defined_triton_kernel`; seen working with torch 2.11 and 2.13. Inductor
    launches a kernel so if `launch_pdl` is in the metadata that it writes beside the kernel, but it sets that for
    kernels of its own only. Where the metadata have another form, nothing is replaced in them: such a kernel is then
    launched as usual, and its result is the same. See `templates.device.dependent_launch`.
    """
    define = PythonWrapperCodegen.define_user_defined_triton_kernel
    if package in getattr(define, "dependents_of", ()):
        return

    @functools.wraps(define)
    def defined(self: Any, kernel: Any, configs: Any, kwargs: dict[str, Any], *rest: Any, **more: Any) -> Any:
        if not (_belongs(kernel, package) and kwargs.get("PDL")):
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

    defined.dependents_of = (*getattr(define, "dependents_of", ()), package)  # type: ignore[attr-defined]
    PythonWrapperCodegen.define_user_defined_triton_kernel = defined


def _belongs(kernel: Any, package: str) -> bool:
    return (getattr(kernel, "__module__", None) or "").startswith(f"{package}.")


def accept_in_accelerate(names: Iterable[str]) -> None:
    """Make accelerate accept these names of Dynamo backends, beside the members of its enumeration `DynamoBackend`.

    Sets `DynamoBackend._missing_`, which Python calls for a value that is no member; tried with accelerate 1.15. All
    that accelerate and HuggingFace's `Trainer` do with a member is to pass its name on to `torch.compile`.

    Raises ImportError where accelerate is not installed.
    """
    from accelerate.utils import DynamoBackend

    accepted = frozenset(names)

    def missing(cls: type[DynamoBackend], value: str) -> DynamoBackend | None:
        # accelerate upper-cases the name that it is given, and lower-cases the one that it hands to torch.compile.
        if value.lower() not in accepted:
            return None
        member = str.__new__(cls, value)
        member._name_ = member._value_ = value
        return cls._value2member_map_.setdefault(value, member)

    DynamoBackend._missing_ = classmethod(missing)
