"""The error that a kernel's defect raises in the simulator."""


class Fault(Exception):
    """A kernel did what it must not do: the message says what, and where in the PTX."""
