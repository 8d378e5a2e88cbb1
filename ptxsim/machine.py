"""The machine that executes instructions: the state of its programs, with barriers, memories and pipes."""

from ptxsim.async_groups import AsyncGroups
from ptxsim.barriers import ClusterBarrier, Mbarriers, ProgramBarriers, RegisterPools
from ptxsim.fences import Fences
from ptxsim.global_memory import GlobalMemory
from ptxsim.parse import Program
from ptxsim.state import State
from ptxsim.tensor_maps import TensorMaps
from ptxsim.tensor_memory import TensorMemory
from ptxsim.warpgroup_products import Products


class Machine(State):
    """Some clusters of a launch that run at the same time, with all state that their instructions use."""

    def __init__(
        self, program: Program, memory: GlobalMemory, arguments: list[int], grid: tuple[int, int, int],
        shared_bytes: int, granule: int, first_cluster: int, clusters: int, has_fences: bool,
    ) -> None:  # fmt: skip
        super().__init__(program, memory, arguments, grid, shared_bytes, granule, first_cluster, clusters, has_fences)
        self.fences = Fences(self.clocks)
        self.mbarriers = Mbarriers(self)
        self.barriers = ProgramBarriers(self)
        self.cluster_barrier = ClusterBarrier(self)
        self.register_pools = RegisterPools(self)
        self.cluster_tickets: dict[int, int] = {}  # the phase of the cluster's barrier for which a warp waits
        self.tensor_memory = TensorMemory(self)
        self.tensor_maps = TensorMaps(self)
        self.copy_groups = AsyncGroups(self, self.clocks.copies, fences=False)
        self.bulk_groups = AsyncGroups(self, self.clocks.bulk_stores, self.clocks.bulk_writes, fences=True)
        self.products = Products(self)
        # Registers of each warp that `tcgen05.ld` writes until the warp waits for it.
        self.unready: dict[int, set[str]] = {}
