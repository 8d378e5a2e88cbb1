"""The error that a kernel's defect raises in the simulator."""


class Fault(Exception):
    """A defect of a kernel: the message names it, and its place in the PTX."""
