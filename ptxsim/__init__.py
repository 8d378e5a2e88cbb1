"""A simulator of compiled kernels: it executes the PTX of a launch on the CPU and checks every access to memory."""

from ptxsim.fault import Fault
from ptxsim.forms import UnknownForm
from ptxsim.kernel_launch import Apart, Compiled, Simulator
from ptxsim.run import LOCKSTEP, Schedule
from ptxsim.virtual_gpu import gpu

__all__ = ["LOCKSTEP", "Apart", "Compiled", "Fault", "Schedule", "Simulator", "UnknownForm", "gpu"]
