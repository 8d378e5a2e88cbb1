"""Less work for Triton's interpreter: shapes are made and checked once, not at every operation.

No value that a kernel computes passes through this. Shapes are a third of the interpreter's time.
"""


def keep_shapes() -> None:
    """Let Triton keep what it has found out about a shape, for a process that only interprets kernels."""
    from triton.language import core

    make_type, compare, shapes = core.block_type.__init__, core.tuple.__eq__, {}

    def init(self, element_ty, shape):
        key = tuple([size.value if type(size) is core.constexpr else size for size in shape])
        if key not in shapes:
            make_type(self, element_ty, shape)  # which refuses a wrong shape
            shapes[key] = self.shape, self.numel, str(self.shape)
        self.element_ty = element_ty
        self.shape, self.numel, text = shapes[key]
        self.name = f"<{text}, {element_ty}>"

    def equal(self, other):
        if self is other:
            return core.constexpr(True)
        if type(other) is list:  # not made a tuple of Triton's first
            return core.constexpr(self.values == other)
        return compare(self, other)

    core.block_type.__init__, core.tuple.__eq__ = init, equal
