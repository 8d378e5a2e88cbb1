"""Compiled models, end to end, for a GPU that is not there: `tests/helpers/compiled_models.py` says what is compared.

In a process of its own: torch remembers what it once found out about the GPU. `benchmarks.simulated_models` runs all
combinations of model, recipe, run and dtype, which takes ten minutes.
"""

import os
from collections import Counter
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl

import fp4compile
from fp4compile import _compat, config
from fp4compile.check.products import TWO_CTAS
from fp4compile.check.simulator import LaunchSimulator
from fp4compile.distributed import compiled
from fp4compile.distributed.arrival import swizzle, transpose
from fp4compile.distributed.codes import Direction, magnitudes_of
from fp4compile.distributed.shard import encode
from fp4compile.distributed.whole import GatheredFormat
from fp4compile.hardware import Target
from fp4compile.ops.quantize import QUANTIZE
from fp4compile.passes import lower, quantize_before_index
from fp4compile.passes.lib import arranged_operands
from fp4compile.templates.choose import choose
from ptxsim.fault import Fault
from ptxsim.kernel_launch import Compiled
from tests.helpers import in_interpreter, without_codegen
from tests.helpers.compiled_models import BOUND, RUNS, Case, compared, difference, expected_of
from tests.helpers.simulated_gpu import Gpu, simulated

PRETENDING = os.environ.get("FP4COMPILE_PRETENDING") == "1"
pretending = pytest.mark.skipif(not PRETENDING, reason="run in a process of its own")
ONE_TOKEN, ROWS, TRAINING = RUNS
BY_GROUPS = "gemm_block_scaled_sm100"


@pretending
@pytest.mark.parametrize(("case", "kernels"), [
    (Case("MLP", "nvfp4", TRAINING, torch.float32),  # Inductor copies a global scale that nothing wrote
     {"quantize_columns", "quantize_rows", "gemm_skinny_block_scaled_sm100", "gemm_block_scaled_sm100"}),
    (Case("Llama block", "nvfp4", ROWS, torch.bfloat16, 120),  # no library
     {"row_statistics", "quantize_rows", "gemm_block_scaled_sm100"}),
    (Case("Llama block", "float8_block", ROWS, torch.bfloat16, 90),
     {"quantize_rows", "quantize_squares", "gemm_float8_tiles"}),
], ids=lambda value: str(value) if isinstance(value, Case) else "kernels")  # fmt: skip
def test_model(case, kernels):
    found = compared(case)
    assert found.largest.found <= found.largest.bound, found.differences
    assert kernels <= {name for counts in found.launches.values() for name in counts}


class Experts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.randn(4, 72, 128) / 128**0.5)

    def forward(self, x, offs):
        return F.grouped_mm(x, self.w.mT, offs=offs)


@pretending
def test_packed_experts(monkeypatch):
    """On Hopper: tokens become values in one kernel, and the packed codes are multiplied; bits of the reference."""
    torch.manual_seed(0)
    model, x = Experts().bfloat16(), torch.randn(65, 128).bfloat16()
    offs = torch.tensor([0, 33, 34, 62], dtype=torch.int32)
    fp4compile.pack_(model, "nvfp4", contracted={"w": -1})
    backend = fp4compile.backend("nvfp4", strict=True)
    with torch.no_grad(), simulated(monkeypatch, 90) as gpu:
        torch._dynamo.reset()
        got = torch.compile(model, backend=backend)(x, offs)
    assert gpu.counted()["package"] == {
        "tensor_amax": 1, "quantize_rows": 1, "swizzle_a_sm90": 1, "gemm_wgmma_sm90": 1
    }  # fmt: skip
    with torch.no_grad():
        torch._dynamo.reset()
        expected = torch.compile(model, backend=backend)(x, offs)
    assert torch.equal(got, expected) and got[:62].abs().amin(-1).gt(0).all() and not got[62:].any()


@pretending
@pytest.mark.parametrize(("sm", "name"), [(100, "nvfp4"), (120, "mxfp8")])
def test_rows_of_no_group(monkeypatch, sm, name):
    """The quantiser leaves their codes unwritten, and tiles of the product copy and multiply them: no fault."""
    torch.manual_seed(0)
    model, x = Experts().bfloat16(), torch.randn(65, 128).bfloat16()
    offs, results = torch.tensor([0, 33, 34, 50], dtype=torch.int32), []
    backend = fp4compile.backend(name, strict=True, min_m=1, min_n=1)
    for context in (simulated(monkeypatch, sm), nullcontext()):
        with torch.no_grad(), context:
            torch._dynamo.reset()
            results.append(torch.compile(model, backend=backend)(x, offs)[:50])
    assert torch.equal(*results) and results[0].abs().amin(-1).gt(0).all()


@pretending
@pytest.mark.parametrize("name", ["float8_rowwise", "float8_tensor", "float8_block"])
def test_experts_train_on_fp8_units(monkeypatch, name):
    """On Hopper: results and both gradients, of sums in another order; one block along K, and rows of no group."""
    torch.manual_seed(0)
    model, x = Experts().bfloat16(), torch.randn(65, 128).bfloat16()
    offs, results = torch.tensor([0, 33, 34, 50], dtype=torch.int32), []
    backend = fp4compile.backend(name, strict=True, min_m=1, min_n=1)
    for context in (simulated(monkeypatch, 90), nullcontext()):
        rows = x.clone().requires_grad_()
        with context as gpu:
            torch._dynamo.reset()
            got = torch.compile(model, backend=backend)(rows, offs)
            torch.autograd.backward(got[:50], torch.ones(50, 72).bfloat16())
        results.append((got.detach()[:50], rows.grad[:50], model.w.grad))
        if gpu is not None:
            launched = gpu.counted()["package"]
        model.w.grad = None
    assert launched["gemm_float8_sm90"] == (3 if name == "float8_block" else 2)  # 72 is no multiple of 16
    for got, expected in zip(*results, strict=True):
        got, expected = got.float(), expected.float()
        # Two float32 sums may round to neighbours in bf16. Where products cancel, the sums' own difference is larger.
        bound = 2.0**-7 * expected.abs() + 2.0**-20 * expected.abs().amax()
        assert expected.any() and ((got - expected).abs() <= bound).all()


class GatedExperts(torch.nn.Module):
    def __init__(self, inner=64):
        super().__init__()
        self.gate_up = torch.nn.Parameter(torch.randn(4, 2 * inner, 128) / 128**0.5)
        self.down = torch.nn.Parameter(torch.randn(4, 128, inner) / 8)

    def forward(self, x, order, offs):
        gate, up = F.grouped_mm(x[order], self.gate_up.mT, offs=offs).chunk(2, dim=-1)
        return F.grouped_mm(F.silu(gate) * up, self.down.mT, offs=offs)


@pretending
def test_inductor_writes_the_operand_of_packed_experts(monkeypatch):
    """On Hopper: silu(gate) * up. The kernel that copies the tokens gathers them. The bits are those of copies."""
    torch.manual_seed(0)
    model, x, results = GatedExperts().bfloat16(), torch.randn(40, 128).bfloat16(), []
    inputs = x, torch.arange(70) * 7 % 40, torch.tensor([0, 33, 34, 62], dtype=torch.int32)
    fp4compile.pack_(model, "nvfp4_weight_only", contracted={"gate_up": -1, "down": -1})
    for few, swizzled in ((64, 1), (70, 2)):
        monkeypatch.setattr(arranged_operands, "FEW_ROWS", few)
        with torch.no_grad(), simulated(monkeypatch, 90) as gpu:
            torch._dynamo.reset()
            results.append(torch.compile(model, backend=fp4compile.backend("nvfp4_weight_only", strict=True))(*inputs))
        assert gpu.counted()["package"] == {"gemm_wgmma_sm90": 2, "swizzle_a_sm90": swizzled}
        assert gpu.counted()["Inductor"].total() == 1  # silu(gate) * up; no kernel gathers
    assert torch.equal(*results) and results[0][:62].abs().amin(-1).gt(0).all() and not results[0][62:].any()


@pretending
def test_codes_of_shards_are_made_by_the_quantisers_alone(monkeypatch):
    """What FSDP2's host thread runs at a gather. One launch more for each direction fills up the global scales."""
    both = tuple(Direction("nvfp4_16x16", dim, (96, 80)) for dim in (-1, -2))
    sent = both, both[:1]
    stacks = torch.randn(2, 48, 80).bfloat16(), torch.randn(1, 48, 80).bfloat16()
    tensors = []
    for stack, directions in zip(stacks, sent, strict=True):
        tensors += [stack, *(magnitudes_of([(one, stack)])[0] for one in directions)]
    with simulated(monkeypatch, 90) as gpu, torch.no_grad():
        monkeypatch.setattr(compiled, "compile_fx_inner", gpu.compile_inner)
        found = compiled.compiled(partial(encode, sent), tensors)(*tensors)
    assert len(found) == 9 and all(map(torch.equal, found, encode(sent, *tensors)))
    counted = gpu.counted()
    assert counted["package"] == {"quantize_squares": 3} and counted["Inductor"].total() == 3
    assert not counted["PyTorch"]


@pretending
def test_weights_of_square_blocks_are_finished_by_compiled_functions(monkeypatch):
    """Scales are swizzled, codes and scales are transposed: what is compiled writes where the weight's tensors lie."""
    rows, columns = (Direction("nvfp4_16x16", dim, (96, 80), "swizzled") for dim in (-1, -2))
    form, ranks = GatheredFormat(rows, columns, torch.bfloat16, recompute=True), 2
    weight = torch.randn(96, 80)
    codes, whole = ([*QUANTIZE(weight, "nvfp4_16x16", dim, layout="swizzled")] for dim in (-1, -2))
    arriving = [part for shard in weight.chunk(ranks) for part in rows.encode(shard[None], weight.abs().amax())[1]]
    swizzling = partial(swizzle, [(rows, ranks)]), [torch.empty_like(codes[1]), torch.cat(arriving)]
    transposing = partial(transpose, [form]), [*codes, *map(torch.empty_like, whole)]
    with simulated(monkeypatch, 100) as gpu, torch.no_grad():
        monkeypatch.setattr(compiled, "compile_fx_inner", gpu.compile_inner)
        for function, tensors in (swizzling, transposing):
            assert compiled.compiled(function, tensors)(*tensors) == []
    written = swizzling[1][0], *transposing[1][-3:]
    for found, expected in zip(written, (codes[1], *whole), strict=True):
        assert torch.equal(found.view(-1).view(torch.uint8), expected.view(-1).view(torch.uint8))
    assert gpu.counted()["Inductor"] and not gpu.counted()["PyTorch"]


class GatedMlp(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = (torch.nn.Linear(128, 128, bias=False) for _ in range(3))

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class NormedMlp(GatedMlp):
    def forward(self, x):
        return x + super().forward(F.rms_norm(x, (128,)))


@pretending
def test_inductor_writes_the_operands_of_packed_weights(monkeypatch):
    """On Hopper: the norm and silu(gate) * up are written in the order in which products read them; else gate and up
    share the copy of the norm. The bits stay."""
    torch.manual_seed(0)
    model, x, results = NormedMlp().bfloat16(), torch.randn(2, 35, 128).bfloat16(), []
    fp4compile.pack_(model, "nvfp4_weight_only")
    for few, swizzled in ((64, 0), (70, 2)):
        monkeypatch.setattr(arranged_operands, "FEW_ROWS", few)
        backend = fp4compile.backend("nvfp4_weight_only", strict=True, min_n=1)
        with torch.no_grad(), simulated(monkeypatch, 90) as gpu:
            torch._dynamo.reset()
            results.append(torch.compile(model, backend=backend)(x))
        assert gpu.counted()["package"] == Counter({"gemm_wgmma_sm90": 3, "swizzle_a_sm90": swizzled})
        # Statistics of the norm, its end, silu(gate) * up; else all is done by the norm's kernel and by epilogues.
        assert len(gpu.counted()["Inductor"]) == (1 if swizzled else 3)
    assert torch.equal(*results) and results[0].isfinite().all() and results[0].any()


@pretending
def test_gate_and_up_write_the_operand_of_down(monkeypatch):
    """One launch for both, whose weights are joined, by each kernel that timing may choose; the bits are those of
    separate kernels."""
    torch.manual_seed(0)
    model, x, results, launches = GatedMlp().bfloat16(), torch.randn(260, 128).bfloat16(), [], []
    by_pairs = [
        TWO_CTAS
    ] * _compat.two_cta_products()  # an op of the graph returns the codes and scales that down reads
    for off, kernel in ((("fuse_quantize",), None), *(((), name) for name in (None, *by_pairs))):
        of_gate = lambda product, name=kernel: choose(product.problem, name if product.problem.spec.pair else None)  # noqa: E731
        monkeypatch.setattr(lower, "fastest", of_gate)
        monkeypatch.setattr(config, "disabled_passes", off)
        backend = fp4compile.backend("mxfp4", strict=True)
        with torch.no_grad(), simulated(monkeypatch, 100) as gpu:
            torch._dynamo.reset()
            results.append(torch.compile(model, backend=backend)(x))
        launches.append(gpu.counted()["package"])
        fused = {row.module: row.fused for row in backend.report.rows}
        assert fused["gate"] == (None if off else "silu, mul, quantize") and fused["up"] is None
    assert all(torch.equal(results[0], each) for each in results) and results[0].isfinite().all() and results[0].any()
    # The quantisers of weights run once.
    separate, together, *pairs = launches
    assert separate == {"quantize_rows": 3 + 2, "gemm_block_scaled_sm100": 3}
    assert together == {"quantize_rows": 1, "gemm_block_scaled_sm100": 2}
    assert all(each["gemm_block_scaled_two_ctas_sm100"] == each["gemm_block_scaled_sm100"] == 1 for each in pairs)


class ExpertsOfTwoWeights(GatedExperts):
    def __init__(self, inner):
        super().__init__(inner)
        self.gate_up, self.up = (torch.nn.Parameter(half.contiguous()) for half in self.gate_up.chunk(2, 1))

    def forward(self, x, order, offs):
        tokens = x[order]
        gate, up = (F.grouped_mm(tokens, w.mT, offs=offs) for w in (self.gate_up, self.up))
        return F.grouped_mm(F.silu(gate) * up, self.down.mT, offs=offs)


@pretending
def test_gate_and_up_of_experts_write_the_operand_of_down(monkeypatch):
    """Of two weights of each expert, in one launch, with the bits of separate kernels: the product's kernel finds the
    amaxes of which a quantiser makes each expert's global scale."""
    torch.manual_seed(0)
    model, x, results, launches = ExpertsOfTwoWeights(128).bfloat16(), torch.randn(40, 128).bfloat16(), [], []
    inputs = x, torch.arange(160) * 7 % 40, torch.tensor([0, 33, 34, 160], dtype=torch.int32)
    for off in ((), ("fuse_quantize",)):
        monkeypatch.setattr(config, "disabled_passes", off)
        backend = fp4compile.backend("nvfp4", strict=True, min_m=1)
        no_assertions = torch._inductor.config.patch(assert_indirect_indexing=False)  # the simulator has none
        with no_assertions, torch.no_grad(), simulated(monkeypatch, 100) as gpu:
            torch._dynamo.reset()
            results.append(torch.compile(model, backend=backend, dynamic=True)(*inputs))
        launches.append(gpu.counted()["package"])
        fused = {row.module: row.fused for row in backend.report.rows}
        moved = "quantised after index: its global scale is made of all moved rows"
        assert (fused["gate_up"], fused["down"]) == (moved if off else f"silu, mul, amax; {moved}", None)
        assert fused.get("up") == (moved if off else None)
    assert torch.equal(*results) and results[0].isfinite().all() and results[0].abs().amin(-1).gt(0).all()
    # The quantisers of the three weights run once.
    assert launches == [{"tensor_amax": 4, "quantize_rows": 3 + 2, BY_GROUPS: 2},
                        {"tensor_amax": 2, "quantize_rows": 2, BY_GROUPS: 3}]  # fmt: skip


@pretending
def test_tokens_that_are_quantised_before_an_index(monkeypatch):
    """On SM100: codes and scales are moved by Inductor's kernels, and scales are laid out; bits of the reference."""
    torch.manual_seed(0)
    model, x, index = Experts().bfloat16(), torch.randn(20, 128).bfloat16(), torch.randperm(160) // 8
    offs = torch.tensor([0, 33, 34, 160], dtype=torch.int32)
    monkeypatch.setattr(quantize_before_index, "LAUNCH_BYTES", 0)
    backend = fp4compile.backend("mxfp8", strict=True, min_m=1, min_n=1)
    routed = lambda x, index, offs: model(x[index], offs)  # noqa: E731
    no_assertions = torch._inductor.config.patch(assert_indirect_indexing=False)  # the simulator has none
    with no_assertions, torch.no_grad(), simulated(monkeypatch, 100) as gpu:
        torch._dynamo.reset()
        got = torch.compile(routed, backend=backend)(x, index, offs)
    package = gpu.counted()["package"]
    assert package["lay_out_scales"] == 1 and package["quantize_rows"] == 2  # tokens once each, and the weights
    operands = [fp4compile.quantize(x[index], "mxfp8", offs=offs), fp4compile.quantize(model.w.detach(), "mxfp8")]
    expected = fp4compile.scaled_grouped_mm(*operands, offs=offs, out_dtype=torch.bfloat16)
    assert torch.equal(got, expected) and got.abs().amin(-1).gt(0).all()


@pretending
def test_one_other_code_is_found():
    """A weight that is rounded up instead of down is beyond the bound."""
    case = Case("MLP", "mxfp8", ONE_TOKEN, torch.float32)
    model, x, target = case.made()
    before = expected_of(case, model, x, target)["result"]
    with torch.no_grad():
        model.up.weight[7, 5] *= 1.125  # one step of E4M3, in a block whose largest element is another one
    after = expected_of(case, model, x, target)["result"]
    found = difference("result", after, before, None)
    assert found.found > 2 * found.bound


@triton.jit
def copy(x_ptr, y_ptr):
    i = tl.arange(0, 8)
    tl.store(y_ptr + i, tl.load(x_ptr + i))


@pretending
def test_a_copy_of_what_nothing_wrote():
    """It holds no value: Inductor's copy goes on, and whatever reads it is found."""
    gpu = Gpu(LaunchSimulator(Target(100)))
    x, y = torch.arange(8.0), torch.full((8,), 9.0)
    written = torch.arange(32).numpy() < 12  # three numbers
    gpu.simulator.unwritten |= {x.data_ptr(): written, y.data_ptr(): written & False}
    made = _compat.compile_ahead(copy, {"x_ptr": x, "y_ptr": y}, {}, 1, 100, 1)
    launch = Compiled.of(made), (x, y), (1, 1, 1)
    with pytest.raises(Fault, match="that nothing wrote"):
        gpu.execute("package", *launch)
    gpu.execute("Inductor", *launch)
    assert y[:3].tolist() == [0, 1, 2]
    assert all((gpu.simulator.unwritten[each.data_ptr()] == written).all() for each in (x, y))


class TwoOfOne(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = (torch.nn.Linear(512, 128, bias=False) for _ in range(2))

    def forward(self, x):
        return self.one(x) * self.other(x)


@pretending
def test_inductor_calls_the_library_for_fp8_blocks(monkeypatch):
    """On Hopper, where scales need no padding; one launch transposes those of the input that both matmuls read."""
    torch.manual_seed(0)
    model, x, found = TwoOfOne().bfloat16(), torch.randn(68, 512).bfloat16(), []
    backend = fp4compile.backend("float8_block", strict=True, min_m=1, min_n=1)
    for context in (simulated(monkeypatch, 90), nullcontext()):
        with torch.no_grad(), context as gpu:
            torch._dynamo.reset()
            found.append(torch.compile(model, backend=backend)(x))
        if gpu is not None:
            counted = gpu.counted()
    assert counted["library"] == {"_scaled_mm": 2} and counted["Inductor"].total() == 2, counted
    assert found[1].any() and torch.equal(*found)


POWERS, SQUARES = "e4m3:1x128:float32:-:te_pow2", "e4m3:128x128:float32:-:te_pow2"
AS_MX = {"fprop_x": POWERS, "fprop_w": SQUARES, "dgrad_dy": POWERS, "dgrad_w": SQUARES, "wgrad_dy": POWERS,
         "wgrad_x": POWERS}  # fmt: skip


@pretending
def test_training_with_blocks_whose_scales_are_powers_of_two(monkeypatch):
    """All matmuls are native: the library's with whole 16 columns, else a kernel; two launches convert the scales."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(200, 144, bias=False), torch.nn.ReLU(), torch.nn.Linear(144, 72))
    x = torch.randn(90, 200)

    def step(tier):
        backend = fp4compile.backend("float8_block", strict=True, **AS_MX)
        torch._dynamo.reset()
        model.zero_grad()
        torch.compile(model, backend=backend)(x).square().sum().backward()
        assert [row.tier for row in backend.report.rows[-5:]] == 5 * [tier]
        return [each.grad.clone() for each in model.parameters()]

    with monkeypatch.context() as patch:
        without_codegen.install(patch)
        expected = step("reference")
    with simulated(monkeypatch, 100) as gpu:
        got = step("native")
    counted = gpu.counted()
    assert counted["package"]["lay_out_scales"] == 2 * 5
    assert counted["package"]["gemm_block_scaled_sm100"] + counted["library"].total() == 5
    assert counted["library"].total() and counted["package"]["gemm_block_scaled_sm100"], counted
    for one, other in zip(got, expected, strict=True):
        assert (one - other).norm() <= BOUND * other.norm()


class ExpertsAndLinear(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = torch.nn.Parameter(torch.randn(4, 128, 128) / 128**0.5)
        self.linear = torch.nn.Linear(128, 64)

    def forward(self, x, offs):
        return self.linear(F.silu(F.grouped_mm(x, self.experts.mT, offs=offs)))


@pretending
def test_gradients_of_dequantised_operands(monkeypatch):
    """Every bit of the reference, from swizzled scales. Two activations and two weights are dequantised."""
    torch.manual_seed(0)
    model, offs = ExpertsAndLinear().bfloat16(), torch.tensor([0, 33, 34, 48], dtype=torch.int32)
    x, dy = torch.randn(48, 128).bfloat16().requires_grad_(), torch.randn(48, 64).bfloat16()
    fields = {"dgrad_dy": None, "dgrad_w": "forward", "wgrad_dy": None, "wgrad_x": "forward", "skip_lm_head": False}

    def step():
        torch._dynamo.reset()
        y = torch.compile(model, backend=fp4compile.backend("nvfp4", **fields))(x, offs)
        return y.detach(), *torch.autograd.grad(y, [x, *model.parameters()], dy)

    with monkeypatch.context() as patch:
        without_codegen.install(patch)
        expected = step()
    with simulated(monkeypatch, 100) as gpu:
        got = step()
    assert gpu.counted()["package"]["dequantize_rows"] == 4
    assert dict(gpu.counted()["PyTorch"]) == {"mm": 2, "_grouped_mm": 2}
    assert all(map(torch.equal, got, expected))


@pytest.mark.skipif(PRETENDING, reason="is that process")
@pytest.mark.slow
def test_in_a_process_of_its_own():
    in_interpreter.assert_passes(__file__, variable="FP4COMPILE_PRETENDING")
