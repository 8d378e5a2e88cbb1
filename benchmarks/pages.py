"""What the generated pages in benchmarks/results hold: texts and tables, one page a subject.

Pages of what was timed; `benchmarks/proof_pages.py` has the pages of what was compiled, simulated and compared.

Texts say what was measured, how, and what a column means. They hold no figure that a table has.

One file, because it is a list: a page's entry is read without the others.
"""

from benchmarks import cells, proof_pages
from benchmarks.markdown import Table, generated, table


def _earlier(content: dict) -> dict:
    return content["earlier"]["environment"]


def _predicted(cells_of: cells.CellsOf) -> Table:
    return table("roofline_h200.json", cells_of, how="Predicted; measured on")


_ACCURACY = generated(
    "Accuracy of inference",
    """
Cosine similarity between the sentence embeddings of all-MiniLM-L6-v2 in bf16 under each recipe, and the embeddings of
the same weights in float32. 64 sentences. All linear layers are quantised, weights and activations;
`nvfp4_weight_only` quantises weights. Only `nvfp4_static` is calibrated.

    python -m benchmarks.minilm
""",
    table("minilm_cpu.json", cells.minilm),
    """
The distance from 1 belongs to the formats, not to the compiler: where the operands of each layer are quantised eagerly,
it is the same to 0.0003. The last two blocks and the first layers of the MLPs cost most.

## Settings of NVFP4 inference

The same model, sentences and measure with packed layers (`pack_`), run eagerly: NVFP4 weights with each way to choose
their block scales, activations with each way to scale them. SQNR is the power of all packed weights over the power of
their quantisation error. In the last two columns the three layers that `fp4compile.sensitivity` ranks worst are in
MXFP8: the first layers of the MLPs of blocks 0, 4 and 1. Calibration and ranking used other sentences.

    python -m benchmarks.minilm_settings
""",
    table("minilm_settings_cpu.json", cells.minilm_settings),
    """
Block scales of least squared error have the highest mean in every group. Static scales of the largest magnitude cost
nothing here. Clipping does: most for a percentile, a little for `"mse"`, which lowers the error of each activation and
not of the embeddings. Over 64 sentences, means that differ by 0.002 say little.
""",
)

_COMPILE_TIME = generated(
    "Compile time",
    """
A Llama-style model of four layers, forward and backward, with empty caches. Every run is a fresh process. The ratio is
below one because Inductor has nothing to generate for a product that is one call of PyTorch.

    python -m benchmarks.compile_time
""",
    table("compile_time_cpu.json", cells.compile_time),
    """
## Llama-3-8B on a GPU

The first call of the model (32 layers) with packed weights: 2048 tokens, then one token, with `mode="reduce-overhead"`
and all caches off. A time includes running once.
""",
    table("compile_time_h200.json", cells.compile_time_llama),
    """
First steps of an MLP block in training are [with its times](mlp_block.md), first calls in an earlier run of Llama-3-8B
[with its decoding](llama_decode.md), and blocks with and without fused prologues [with theirs](producers.md).

## The host's check of weights

In inference without `pack_`, each call checks on the host that no weight has changed. No script measures this; it was
measured once.
""",
    table("weight_check_h200.json", cells.weight_check),
)

_QUANTIZE = generated(
    "Quantising",
    """
bf16 input, static shapes. "Of copy's rate" compares with a device copy of the same number of bytes: each input read
once (twice where a tensor scale or a row scale is computed from a tensor that does not stay on chip), each output
written once. The torchao column is torchao's quantiser for the same format, compiled, in the same run. Other GPUs of
the host were at work.

    python -m benchmarks.quantize
""",
    table("quantize_h200.json", cells.quantize),
    """
Below 0.8, arithmetic takes the time. On Hopper the logic operations, minima and permutations of E2M1 rounding issue at
half rate, and a tensor scale needs products in float32. "Transformed" is the random Hadamard transform of the
[weight gradient's operands](../../docs/training.md).

## Small tensors

Microseconds; in brackets, what exceeds the launch of an empty kernel and the copy of as many bytes. `nvfp4` computes
its tensor scale here.
""",
    table("quantize_h200.json", cells.quantize_small),
)

_PRODUCERS = generated(
    "Norms and activations before a quantiser",
    """
A norm, a gate or a residual sum before a quantiser, 8192x8192 in bf16: in the quantiser's kernels ("fused"), in
Inductor's kernels ("apart"), and in Inductor's kernels with torchao's quantisers. Microseconds of the device in a call,
by the profiler, inside compiled functions. "Copy" moves as many bytes as one kernel would that reads each input once
and writes each output once.

    python -m benchmarks.producers

## Codes along rows
""",
    table("producers_h200.json", cells.part_of("rows")),
    """
NVFP4 with a scale of the tensor (`nvfp4`) gains least: the gate or the norm is computed twice.

## Dequantised values along rows

For products that multiply dequantised values (`fake_quantize`), as NVFP4 products do on Hopper.
""",
    table("producers_h200.json", cells.part_of("values")),
    """
## Both directions

An earlier run, in which rows were not prefetched. Hopper gains nothing by fusing a norm before `nvfp4` in both
directions, and loses by fusing a gate. The statistics of a norm are computed by a kernel of Inductor's, and "copy" has
no second read for them.
""",
    table("producers_h200.json", cells.part_of("both", "earlier"), environment=_earlier),
    """
## A Llama-3-8B block: decode

Forward of one token, in a CUDA graph. "In all": seconds to compile and to measure; the first recipe's include what
starts once in a process. "us" is from one call to the next, which the host bounds in part; "device us" is the time of
the kernels, and is compared where it is there.
""",
    table("producers_h200.json", cells.part_of("decode")),
    """
## A Llama-3-8B block: prefill

Forward of 8192 tokens.
""",
    table("producers_h200.json", cells.part_of("prefill")),
    """
## A Llama-3-8B block: training step

Forward and backward of 8192 tokens. Training quantises activations in both directions, which Hopper does not fuse
(`SINCE` in `templates/quantize/prologue_cost.py`). So a step under `nvfp4` has no prologue.
""",
    table("producers_h200.json", cells.part_of("train")),
    """
An earlier run with the pass on everywhere is why. No step got faster. Times are from one call to the next, in which the
host has a part: the last row says little of the kernels.
""",
    table("producers_h200.json", cells.part_of("train", "earlier"), environment=_earlier),
)

_LINEAR = generated(
    "Linear layers",
    """
One linear layer, in microseconds, everything in one run. The weights are rotated so that the cache does not hold them.
W4A4 (`nvfp4` weights and activations) counts quantising the activations; "product alone" does not. Other GPUs of the
host were at work; runs of the same kernels differ by up to 10 %.

    python -m benchmarks.linear
""",
    table("linear_h200.json", cells.linear),
    """
Weight-only, no shape with up to 64 tokens is slower than bf16. W4A4 is slower than bf16 where N and K are small. At
8192 tokens both are slower than bf16: Hopper has no FP4 matrix units, so codes are dequantised to 16 bits. In this
run that was done in memory; today it is done in the registers of the product's kernel, as below.

## From 64 tokens on

As above, one product by itself. "In memory": weight-only as it was before, with weights that are dequantised in memory
and multiplied by the library.

    python -m benchmarks.many_rows
""",
    table("many_rows_h200.json", cells.many_rows),
    """
Weight-only is faster than bf16, or as fast, up to 512 tokens, except where the tiles of the result fill the last round
of multiprocessors badly. With more tokens it is slower: each round of tiles has a start and an end in which the matrix
units wait, and activations are first written in the order in which the kernel reads them. In a compiled model a norm or
silu(gate) * up writes that order itself ([prefill](llama_decode.md)).

## Horizontal fusion

In a compiled graph, products of the same activations are fused horizontally into one launch (Q, K and V; gate and up).
Llama-3-8B's sizes.
""",
    table("linear_h200.json", cells.linear_together),
)

_CEILINGS = generated(
    "Copies and library products",
    """
What other figures are to be read beside: copies of the device, torch's `mm` in bf16, and its `_scaled_mm` of E4M3 with
a scale a row, float32 sums without fast accumulation. Operands rotate.

    python -m benchmarks.ceilings

## Copies
""",
    table("ceilings_h200.json", cells.ceilings_copies),
    "## Products",
    table("ceilings_h200.json", cells.ceilings),
)

_LLAMA_DECODE = generated(
    "Decoding and prefill",
    """
Random weights, batch 1, transformers 5.17, `mode="reduce-overhead"`. Decoding starts after 128 tokens in a static cache
of 324. "First" times include compiling.

## Llama-3-8B

Prefill has 2048 tokens, and is timed among prefills that follow each other: both models are bound by the power that the
card may draw, and after a pause bf16 runs at a higher clock for some prefills.

    python -m benchmarks.llama_decode
""",
    table("llama_decode_h100.json", cells.llama_decode),
    """
## Qwen3-30B-A3B

8 of its 48 layers, prefill of 512 tokens. Experts are multiplied by index or by groups.

    python -m benchmarks.llama_decode --model qwen3-30b-a3b --layers 8 --prompt 512
""",
    table("qwen3_moe_decode_h200.json", cells.qwen3_moe_decode),
)

_PACKING = generated(
    "Packing",
    """
Random weights of Llama-3-8B, packed in place (`nvfp4_weight_only`).

    python -m benchmarks.packing
""",
    table("packing_h200.json", cells.part_of("rows")),
    """
Saved in shards and loaded by `from_pretrained` in a process of its own:
""",
    table("packing_h200.json", cells.part_of("load")),
)

_SCALE_SWEEP = generated(
    "The FP8 scale sweep",
    """
The block scales of a weight by least squared error, beside the kernel of ModelOpt 0.47, which tries all 126 scales.
"Sweep": the maxima of blocks alone; "mse" and "4/6": codes and scales by both rules of `weight_scales`; "plain": by the
largest element. "Error": the squared error of "mse" over the error of "plain".

    python -m benchmarks.scale_sweep
""",
    table("scale_sweep_h200.json", cells.part_of("rows")),
    """
Where the two choose another scale, their errors in float64 are nearly equal ("ties"), but in five blocks of float32.
There ModelOpt's error is the larger one ("better"): both add up in float32. "Worse" would be the opposite.
""",
    table("scale_sweep_h200.json", cells.part_of("values")),
)

_MLP_BLOCK = generated(
    "A training step of an MLP block",
    """
Forward and backward of a Llama-3-8B MLP block in bf16, 8192 tokens. "Saved" is what lives from forward to backward;
"packed over its bf16 size" compares what is saved of the inputs of linear layers with their bf16 size. MXFP8 and NVFP4
are emulated on this GPU, for numbers and memory and not for speed. Other benchmarks ran on the host's other GPUs.

    python -m benchmarks.mlp_block
""",
    table("mlp_block_h100.json", cells.mlp_block),
    """
On an H200, with kernels of an earlier version, with which [predicted times](roofline.md) are compared:
""",
    table("mlp_block_h200.json", cells.mlp_block),
)

_ADAPTERS = generated(
    "Adapters on a frozen base",
    """
A Llama-3-8B with random weights, LoRA of rank 16 on all linear layers of its blocks (peft, adapters in bf16), AdamW, 2
texts of 2048 tokens a step. Blocks are compiled one by one and checkpointed; the loss is computed for an eighth of the
tokens at a time. Embedding and head are in bf16 in every row: 1.96 GiB. The peak is that of the allocator.

While this ran, other models were compiled on the same host. In the run of the losses below, with nothing beside it and
before there was the pass `scale_results`, the step took 387 ms in bf16, 415 ms packed and 415 ms in NF4.

    python -m benchmarks.adapters --losses
""",
    table("adapters_h100.json", cells.adapters),
    """
## Losses

A Llama of 4 layers, 512 wide, trained for 600 steps on one half of the standard library's sources; then adapters on
this base, in bf16 or packed, for 200 steps on the other half, of the same texts in the same order.
""",
    table("adapters_h100.json", cells.adapters_losses),
)

_TRAINING_STEP = generated(
    "A training step",
    """
Forward and backward pass of the first 4 layers of a Llama-3-8B with random bf16 weights, embedding and head, 4 texts of
2048 tokens, without an optimiser, compiled as a whole. "fast": FP8 matrix units keep the sums of forward products in
fewer bits, as in torchao's (`fast_accumulation`). "Device": the kernels' times, one after the other. "Host": until all
of a step is issued. The first three steps include compiling, beside three other benchmarks on the same host.

    python -m benchmarks.training_step
""",
    table("training_step_h100.json", cells.training_step),
    """
Two rounds of one run on an H200:

    python -m benchmarks.training_step --cases bf16 mxfp8 bf16 mxfp8
""",
    table("training_step_mxfp8_h200.json", cells.training_step),
)

_SHARDED_STEP = generated(
    "A training step under FSDP2",
    """
Forward and backward pass of the first 4 layers of a Llama-3-8B with random weights, on two GPUs of one host, each with
2 texts of 2048 tokens, without an optimiser. Blocks are compiled one by one and sharded (`fully_shard`); parameters are
float32 and gathered in bf16, gradients are reduced in float32. ", codes": the weights of the blocks are gathered as
codes (`gather_quantized_`, or torchao's FP8 all-gather). "Sent": what a rank contributes to the gathers of weights;
1051 MB of it are embedding and head, in bf16 in every row. Equal losses show equal bits: with codes a loss is that of
the same recipe without.

    python -m benchmarks.sharded_step --ranks 2

Over NVLink, with another benchmark on one of the host's other GPUs. The run was ended before `mxfp8` without codes:
""",
    table("sharded_step_h100.json", cells.sharded_step),
    """
With `NCCL_P2P_DISABLE=1`, through the host's memory, which the reduction of float32 gradients takes most of, whatever
the weights are gathered as. This and the next table are of an earlier version of the gathers, and of a model that waits
for the device at each step (see `benchmarks.sharded_step`):
""",
    table("sharded_step_slow_h200.json", cells.sharded_step),
    """
The same link, in a step whose gradients are accumulated and not reduced, so that weights alone are on the wire:

    python -m benchmarks.sharded_step --accumulated
""",
    table("sharded_step_accumulated_h100.json", cells.sharded_step),
)

_TENSOR_PARALLEL = generated(
    "Tensor and sequence parallelism",
    """
A forward pass of two blocks of a Llama-3-8B on two GPUs of one host, 2 texts of 2048 tokens, cut by `ColwiseParallel`,
`RowwiseParallel` and `SequenceParallel`. ", codes": with the pass `quantize_before_gather`, which gathers codes and
block scales in place of activations; since these figures were measured it leaves gathers over NVLink as they are.
"Sent": what a rank sends in a pass, where collectives are rings.

    python -m benchmarks.tensor_parallel --kind inference --cases bf16 mxfp8 "mxfp8, codes" ...

Over NVLink:
""",
    table("tensor_parallel_h200.json", cells.tensor_parallel),
    """
With `NCCL_P2P_DISABLE=1`, through the host's memory:
""",
    table("tensor_parallel_slow_h200.json", cells.tensor_parallel),
    """
64 tokens, as in decoding, over NVLink and with CUDA graphs. ", kept": under `weight_cache="always"`, which quantises
weights once. Without it a process group lets every pass quantise them again.

    python -m benchmarks.tensor_parallel --kind inference --graphs --batch 1 --length 64 --cases bf16 "mxfp8, kept" ...
""",
    table("tensor_parallel_decode_h100.json", cells.tensor_parallel_time),
)

_EXPERT_DISPATCH = generated(
    "Tokens with several experts",
    """
Prefill of gate and up of a layer of experts with the sizes of Qwen3-30B-A3B: 16384 tokens, 8 of 128 experts each.
Tokens are gathered in the order of their experts, and multiplied. ", codes": with the pass `quantize_before_index`,
which quantises each token once and not once for each of its experts. Where a product of packed weights reads 16-bit
values, the values are gathered.

    python -m benchmarks.expert_dispatch
""",
    table("expert_dispatch_h200.json", cells.expert_dispatch),
)

_TRAINING_LOSS = generated(
    "Training loss",
    """
A Llama-style model with 103 M parameters in its blocks and 65 M in embedding and head (32000 tokens in the vocabulary),
trained on docstrings. No text is seen twice. 12288 tokens a step, 1000 steps, seeds 0 and 1; each row compares with
bf16 of the same seed and data.

    python -m benchmarks.training_loss
""",
    table("training_loss_h200.json", cells.training_loss),
    """
![Training loss of seed 0 over the steps: bf16, mxfp8 and nvfp4_train](training_loss_h200.png)

A second run of the same settings, with the forward products of the last 200 steps in bf16 as a variant:
""",
    table("training_loss_h200.json", cells.training_loss_again),
    """
## With the head quantised

Neither stochastic rounding nor the Hadamard transform shows in these losses. The head is in bf16, as the recipes leave
it, and without it no gradient has elements that need them. The gradient of the head's output does: it is softmax minus
one-hot, a value near -1 among small ones. These runs quantise the head, too. Their vocabulary has 512 tokens, so that
each token is frequent; blocks and number of steps are the same (`--shape 100M-512`).
""",
    table("training_loss_512_h200.json", cells.training_loss),
    """
![Training loss of seed 0 over the steps, with the head quantised](training_loss_512_h200.png)

Stochastic rounding pays. The transform pays where rounding is to nearest; with stochastic rounding it brings nothing.
With 32000 tokens in the vocabulary, 800 steps and one seed, the differences are smaller than one seed can tell:
""",
    table("training_loss_with_head_h200.json", cells.training_loss),
    """
## Other texts

The distance from bf16 grows with what the model knows of the text. It is larger where text is seen again or is easier
to predict.
""",
    table("training_loss_h200.json", cells.training_loss_texts),
    """
## With experts

Each token takes two experts. On the H200 six blocks with eight experts each, 128 M parameters, 400 steps, and on a CPU
two blocks with four experts each, 250 steps.

    python -m benchmarks.training_loss --shape experts --steps 400 --rate 1e-3
    python -m benchmarks.training_loss --shape tiny-experts
""",
    *(table(f"training_loss_experts_{device}.json", cells.training_loss) for device in ("h200", "cpu")),
)

_GRADIENT_ERROR = generated(
    "Gradient error",
    """
||g_q - g|| / ||g|| of the gradients against the uncompiled model's, after 400 steps, with the forward pass in bf16 and
the head quantised (32000 tokens in the vocabulary, one seed). The last column says how far training on from the same
weights for 60 steps, four times, leaves the held-out loss above bf16's.

    python -m benchmarks.gradient_error
""",
    table("gradient_error_h200.json", cells.gradient_error),
    """
![Gradient error over the number of seeds and batches averaged](gradient_error_h200.png)

With stochastic rounding the head's error falls over batches; with rounding to nearest it grows, and there the Hadamard
transform makes a third of it. In the blocks, rounding to nearest has the smaller error of one gradient and the larger
error of the mean.
""",
)

_GROUPED_MM = generated(
    "Experts",
    """
## Decode steps

NVFP4 beside torch's bf16: some tokens for each expert, so that all weights are read, or tokens that take an expert by
index. "Of copy": the time of a device copy of the packed bytes over the time of "weight-only". Weights rotate, so that
the L2 cache does not hold them.

    python -m benchmarks.grouped_mm --parts decode tokens
""",
    table("grouped_mm_h200.json", cells.part_of("decode")),
    """
## 16384 tokens

Compiled. "Forward": the product alone, with weights packed once and tokens quantised in the time. "Both": all three
products of training, whose operands are all quantised in the time. On an H200, which has no FP4 matrix units, `nvfp4`
and `mxfp8` multiply in bf16, so that quantising and dequantising is all that they add.
""",
    table("grouped_mm_h200.json", cells.part_of("tokens")),
    """
`float8_rowwise`, which multiplies on Hopper's FP8 units, in an earlier run:
""",
    table("grouped_mm_h200.json", cells.part_of("tokens", "earlier"), environment=_earlier),
    """
## Quantising the weights

MXFP8 in three shapes of block (`--parts weights`), in that run.
""",
    table("grouped_mm_h200.json", cells.part_of("weights", "earlier"), environment=_earlier),
    """
## More and more experts

16640 tokens over experts of 8192x5120 (`--parts growth`). The launches do not grow. The time does, beside bf16's: a
step dequantises, and in training quantises, the weights of all experts, and the last row has 64 times as many of them
for as many tokens. On matrix units of FP4 nothing is dequantised; that was not measured.
""",
    table("grouped_mm_h200.json", cells.part_of("growth")),
    """
## Launch configurations

NVFP4 by tokens an expert: by tiles that dequantise weights in the main loop, and by operands that are dequantised in
memory (`--parts configurations --kernels tiles`). The product takes tiles up to 128 tokens, and operands from 129 on.
""",
    table("grouped_mm_h200.json", cells.part_of("configurations")),
    """
## Packed NVFP4 experts from 65 tokens on

One product, in microseconds. `grouped_wgmma_sm90` reads the codes. "Without this kernel": weight-only by
the kernels above, which dequantise in the main loop or in memory. "Sizes": the tokens of an expert are equal, or drawn
at random once. "Tile": tokens and rows of weights of a tile. All tiles were timed, and the kernel's table was fitted to
these times and chooses the tile by the average number of tokens; the weight-only time is that of its choice.

    python -m benchmarks.packed_experts
""",
    table("packed_experts_h200.json", cells.packed_experts),
    """
Weight-only is faster than bf16 while the weights' bytes bind. From 256 tokens on with a short K it is slower: tokens
are first written in the order in which the kernel reads them, and a tile has few steps, so that its start and end, in
which the matrix units wait, weigh more.

In a compiled layer tokens are gathered, and silu(gate) * up is computed, by kernels that write that order themselves.
Microseconds of a layer: tokens are gathered in the order of their experts, multiplied by gate and up, and after
silu(gate) * up by down. The routing is drawn at random before.

    python -m benchmarks.packed_layer
""",
    table("packed_layer_h100.json", cells.packed_layer),
)

_ROOFLINE = generated(
    "Predicted and measured",
    """
[Predicted times](../../docs/roofline.md) beside measured ones of linear layers, quantise kernels, experts and library
products. Errors are without sign, but for the largest: a negative one is a time predicted too short. The model's shares
were fitted to half of the times; the last columns are of the other half.

    python -m benchmarks.roofline --plot

The command measures nothing.
""",
    _predicted(cells.roofline),
    """
![Predicted over measured times](roofline_h200.png)

The dotted lines are 15 % off.

## Blocks

Whole graphs, predicted by `explain`: the MLP block of [training](mlp_block.md) and the Llama-3-8B block of
[norms and activations](producers.md), whose pages say when they were measured. Nothing was fitted to these times but
attention's share, to the forward pass under `float8_rowwise`. When they were measured, another kernel than now computed
NVFP4's products of many rows.
""",
    _predicted(cells.roofline_blocks),
    """
The Llama-3-8B block on an H100, for which shares fitted on an H200 are assumed:

    python -m benchmarks.llama_block --out benchmarks/results/llama_block_h100.json
    python -m benchmarks.llama_block --compare benchmarks/results/llama_block_h100.json --save
""",
    table("llama_block_h100.json", cells.roofline_blocks, how="Predicted; measured on"),
    """
The functions of [norms and activations](producers.md), along rows, by separate kernels and by the quantiser's. Nothing
was fitted to them.
""",
    _predicted(cells.roofline_functions),
)

PAGES: dict[str, tuple[str | Table, ...]] = {
    "accuracy.md": _ACCURACY,
    "training_loss.md": _TRAINING_LOSS,
    "gradient_error.md": _GRADIENT_ERROR,
    "llama_decode.md": _LLAMA_DECODE,
    "linear.md": _LINEAR,
    "grouped_mm.md": _GROUPED_MM,
    "mlp_block.md": _MLP_BLOCK,
    "adapters.md": _ADAPTERS,
    "sharded_step.md": _SHARDED_STEP,
    "tensor_parallel.md": _TENSOR_PARALLEL,
    "expert_dispatch.md": _EXPERT_DISPATCH,
    "training_step.md": _TRAINING_STEP,
    "quantize.md": _QUANTIZE,
    "producers.md": _PRODUCERS,
    "packing.md": _PACKING,
    "scale_sweep.md": _SCALE_SWEEP,
    "compile_time.md": _COMPILE_TIME,
    "ceilings.md": _CEILINGS,
    "roofline.md": _ROOFLINE,
    **proof_pages.PAGES,
}
