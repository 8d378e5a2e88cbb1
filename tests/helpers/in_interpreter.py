"""Kernel tests run twice: on a GPU where there is one, and in Triton's interpreter in a process of their own."""

import dataclasses
import tempfile
from pathlib import Path

from tests.helpers import kept_shapes, quick_interpreter
from tests.helpers.programs import Program


def assert_passes(test_file: str, *beside: str, variable: str = "TRITON_INTERPRET") -> None:
    """Run a test file again with a variable of the environment set to 1, as before its kernels are imported.

    beside: names of files in its folder that share the process.
    """
    files = [test_file, *(str(Path(test_file).parent / name) for name in beside)]
    # Nobody sees its warnings; for those of destructors all garbage would be collected five times.
    command = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:unraisableexception", *files]
    variables = {variable: "1", "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory() as folder:
        run = Program(command, Path(folder), environment=variables).ended(timeout=1800)
    assert run.status == 0, run.printed + run.said
    assert " passed" in run.printed


def be_quick() -> None:
    """Let Triton's interpreter do what a process needs that does nothing else with it, in a fraction of the time."""
    patch_triton_once()
    kept_shapes.keep_shapes()
    quick_interpreter.reduce_whole_arrays()
    quick_interpreter.keep_type_checks()
    quick_interpreter.call_directly()
    quick_interpreter.keep_types()


def patch_triton_once() -> None:
    """Let the interpreter leave out work of which nothing depends, for a process that does nothing else with it.

    It puts itself into triton.language anew at every call of a device function. It computes every sum and product of
    integers again in 64 bits, for an assertion that is switched off. It makes a table of types for every value, and the
    shape of every value from that of its type. (And of matrices this small several threads have nothing to compute.)
    """
    import torch
    import triton.language as tl
    from triton.runtime import interpreter

    patch, patched, seen, nothing = interpreter._patch_lang, [], set(), interpreter._LangPatchScope()

    def patch_once(kernel):
        if kernel not in seen:
            seen.add(kernel)
            for module in kernel.__globals__.values():
                if (module is tl or module is tl.core) and module not in patched:
                    patched.append(module)
                    patch(kernel)
        return nothing  # no change is taken back

    interpreter._patch_lang = patch_once

    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)

    numpy_type, found = interpreter._get_np_dtype, {}

    def known_numpy_type(dtype):
        if dtype.name not in found:
            found[dtype.name] = numpy_type(dtype)
        return found[dtype.name]

    interpreter._get_np_dtype = known_numpy_type

    make_tensor, fields = tl.core.tensor.__init__, {}

    def make_tensor_of_known_type(self, handle, type):
        name = type.name
        if name not in fields:
            make_tensor(self, handle, type)
            fields[name] = dict(vars(self))
        self.__dict__.update(fields[name])
        self.handle, self.type = handle, type

    tl.core.tensor.__init__ = make_tensor_of_known_type

    torch.set_num_threads(1)
