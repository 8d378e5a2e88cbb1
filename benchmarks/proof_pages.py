"""What the generated pages of proofs hold: what was compiled, simulated and compared, without a time. See `pages`."""

from benchmarks import cells, machine_code_tables, mutation_tables, simulation_tables, zoo_tables
from benchmarks.markdown import Table, generated, table


def _machine_code(cells_of: cells.CellsOf) -> Table:
    return table(
        "machine_code.json", cells_of, environment=machine_code_tables.environment, how="Compiled ahead of time:"
    )


def _simulated(cells_of: cells.CellsOf) -> Table:
    return table("simulation.json", cells_of, how="Executed in the simulator, with")


def _mutated(cells_of: cells.CellsOf) -> Table:
    return table("simulated_mutations.json", cells_of, how="Executed in the simulator, with")


def _compiled(cells_of: cells.CellsOf) -> Table:
    return table("reach.json", cells_of, how="Compiled for GPUs that are not there, on")


_MACHINE_CODE = generated(
    "Machine code for Blackwell",
    """
What `python -m fp4compile check-sm100` finds of the kernels, compiled for GPUs that are not there. **None of it is a
time.**

    python -m benchmarks.machine_code --python PYTHON_OF_A_TRITON PYTHON_OF_ANOTHER

Each kernel has bounds (`fp4compile/check/bounds.py`); beyond one the command fails. For block-scaled products on
SM100 they are: the formats' own `tcgen05.mma`, scales by `tcgen05.cp`, operands by TMA, a main loop that overlaps,
16-byte stores, no spills. The `nvdisasm` of Triton 3.6 does not read code for compute capability 10.3: nothing is known
of it, which counts as beyond its bounds. Instructions are counted here under both versions; the command itself judges
their number under the pinned version of Triton alone.
""",
    _machine_code(machine_code_tables.below),
    """
## Block-scaled products on compute capability 10.0

By the first version of Triton. A loop overlaps if no step waits for what it has started: neither for the product that
it issued, nor for the loads that it issued. Where a partition of warps loads for the partition that multiplies, the
loads must have at least two buffers to go to. The rule is read off the loop around the product in PTX
(`fp4compile/check/ptx.py`).
""",
    _machine_code(machine_code_tables.products),
    """
## Quantise kernels on compute capability 10.0

Thread instructions that a kernel executes for 16 elements, on the way through its code that neither slow paths of
divisions nor rare fallbacks take, with swizzled scales where products read them. The budget is what the bandwidth of a
B200 leaves time for: 148 multiprocessors issue 128 thread instructions a clock, at 1.9 GHz, while 8 TB/s bring the
bytes that the kernel reads and writes. Occupancy is the share of a multiprocessor's warps that fit. The ptxas of Triton
3.6 makes more instructions of some newer kernels.
""",
    _machine_code(machine_code_tables.quantizers),
)

_SIMULATION = generated(
    "Kernels for SM100, executed in a simulator",
    """
What `python -m fp4compile check-sm100 --simulate` finds: the PTX of every launch of the gate's table, executed on a CPU
at small shapes with partly filled tiles, empty groups, NaN and infinities. **None of it is a time on a GPU.**
[How SM100 is proven](../../docs/sm100_proof.md) says what this shows and what it cannot show.

    python -m fp4compile check-sm100 --simulate --sm 100 103 --json benchmarks/results/simulation.json
""",
    _simulated(simulation_tables.coverage),
    """
## Cases

Codes, scales and outer scales equal the reference bit for bit. Products have operands whose sums are exact, and equal
the reference bit for bit, too; with a gate behind them they lie within the error of its `exp`. Notes are what the
simulator counts and does not judge.
""",
    _simulated(simulation_tables.cases),
)

_SIMULATED_MODELS = generated(
    "Compiled models for SM100, executed in a simulator",
    """
An MLP (200 and 328 features, biases, GELU) and a Llama block (128 features, grouped queries, rotary embeddings, SwiGLU
with 208 features), compiled by `torch.compile` for a B200 that is not there: Dynamo, AOTAutograd and Inductor whole, as
far as the wrapper. The wrapper runs on a CPU. Its kernels, this package's and Inductor's own, are compiled ahead of
time and executed in the simulator; calls of cuBLASLt go to the reference after a check of their arguments; attention is
PyTorch's own on the CPU. **None of it is a time on a GPU.**

    python -m benchmarks.simulated_models --out benchmarks/results/simulated_models.json

"largest difference" is between the results (in training the loss and all gradients) and those of the reference, which
runs the ops one by one on the CPU, with the same seeds. The tensor that is nearest to its bound is shown.

- In float32 the difference is relative to the tensor's largest element, and the bound is what sums of another order may
  make: no code of a quantised tensor differs.
- In bfloat16 it is relative to the tensor's norm. Inductor's own kernels round where they write to memory, and the
  reference rounds after every operation, so that codes near the boundary of two differ. Where Inductor has no kernel of
  its own, the difference is 0. The bound is twice the difference between the reference and the same model with plain
  ops in float32.

`tests/helpers/compiled_models.py` has the reasons.
""",
    table("simulated_models.json", simulation_tables.models, how="Executed in the simulator on"),
    """
## Kernels

How often the models of each recipe launched each kernel.
""",
    table("simulated_models.json", simulation_tables.kernels_of_models, how="Executed in the simulator on"),
)

_MUTATIONS = generated(
    "Faults planted in kernels for SM100, and what the simulator finds of them",
    """
Each edit changes one thing in the PTX of a kernel, or in the Triton source that it is compiled from. The simulator then
runs the kernel at small shapes, in up to three schedules. An edit counts as found if a schedule ends with a fault or
with wrong values. Without an edit, every kernel here runs clean. [How SM100 is proven](../../docs/sm100_proof.md)
describes the simulator.

    python -m tests.ptxsim.mutate --json benchmarks/results/simulated_mutations.json

Edits of PTX are made mechanically (`tests/ptxsim/ptx_edits.py`): of one kind of statement, at most six edits of a
kernel (two or nine of some), drawn at random, and all of the dense NVFP4 kernel. Edits of Triton source are written by
hand (`tests/ptxsim/source_edits.py`). An edit that changes nothing that anybody could see does not count in the
shares.
""",
    _mutated(mutation_tables.kernels),
    _mutated(mutation_tables.kinds),
    """
The check that found an edit is the one that spoke first. "Unsupported" are descriptors, tensor maps and forms that no
kernel has and that the simulator therefore refuses.
""",
    _mutated(mutation_tables.checks),
    """
## Edits that are not found

These change what the kernel does, though not in the cases that ran.
""",
    _mutated(mutation_tables.not_found),
    """
## Edits that change nothing
""",
    _mutated(mutation_tables.change_nothing),
    """
## Edits that are found
""",
    _mutated(mutation_tables.found),
)

# The generated pages, by name of their file.
_REACH = generated(
    "What models reach",
    """
Which variants compiled models have: one layer of each model family (`benchmarks/families.py`), in its real widths,
compiled under each recipe for compute capability 9.0 and 10.0, as far as code generation. **None of it is a time.**

    python -m benchmarks.reach

The file is of commit 882ba0b. By earlier ones it was decided which variants went: those that saved less than 2 % of
every step. One prologue with several results was one of them: of 125 us it saved 8 by being one launch and not two.

## Prologues

What the prologues of a kind save is predicted by the cost model of `fuse_prologue`, with one launch for each; "least %"
and "most %" are its shares of a step that is predicted, too, with and without Inductor's other kernels. A row has the
run in which they save the largest share.
""",
    _compiled(cells.part_of("prologues")),
    """
## Kernels of products

The kernels that `choose` gives, and in how many runs.
""",
    _compiled(cells.part_of("products")),
    """
The file has every run, the constants that each kernel was launched with, and the kernels that no run launches.
""",
)

_ZOO = generated(
    "Model families",
    """
A small model of each family with random weights in bf16, on a CPU. [Models](../../docs/models.md) has the summary.

    python -m benchmarks.zoo

## What is left alone

Shares of the FLOPs of matrix products, under `nvfp4` in inference and under `nvfp4_train` in training. Attention that
is not fused appears as "no operand is a parameter", and its backward as "batched matmul of a gradient".
""",
    table("zoo_cpu.json", zoo_tables.left_alone, how="Run on"),
    """
## What the figures are read beside

"bf16" is the uncompiled model in bf16, beside float32 as the quantised one is. "Beside the packed model" compares the
compiled model with the same model packed and run uncompiled: two ways to the same bits. A number is there where one of
them quantises what the other does not (experts, whose activations are not quantised uncompiled; layers that `pack_`
leaves alone), and where an operation before a quantiser rounds otherwise in the graph, which moves values to the next
code (Stable Diffusion).
""",
    table("zoo_cpu.json", zoo_tables.beside, how="Run on"),
    """
## Libraries

What `make ecosystem` leaves alone, of the FLOPs of the graphs in the column "products quantised" of
[the models](../../docs/models.md#libraries), and the weights that `pack_` leaves alone, by reason. The file was put
together of several runs on one machine, because each subject can run by itself.
""",
    table("ecosystem.json", zoo_tables.left_in_libraries, how="Run on"),
)

PAGES: dict[str, tuple[str | Table, ...]] = {
    "machine_code.md": _MACHINE_CODE,
    "simulation.md": _SIMULATION,
    "simulated_models.md": _SIMULATED_MODELS,
    "simulated_mutations.md": _MUTATIONS,
    "reach.md": _REACH,
    "zoo.md": _ZOO,
}
