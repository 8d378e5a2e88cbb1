"""The numeric contract in plain PyTorch: the CPU implementation, and the oracle of every kernel.

All arithmetic is float32 after upcasting, with one rounding for each written operation. The functions create no
constant tensors, so that they can run during the capture of a CUDA graph. The quantised dimension is the last one.

Sources of the formulas: torchao 0.18 `nvfp4_quantize`, `to_mx` and float8 rowwise; Transformer Engine's NVFP4
reference; OCP Microscaling Formats v1.0; cuBLAS block quantisation (rceil); Philox: Salmon et al., "Parallel Random
Numbers: As Easy as 1, 2, 3", SC 2011.

One file, because it is the contract: it is read from top to bottom, together with docs/numerics.md.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
import torch.nn.functional as F

from fp4compile.formats.formats import ELEMENT_MAX, BlockFormat, as_integers
from fp4compile.formats.layouts import ceil_div, from_swizzled, to_swizzled
from fp4compile.formats.operand import Operand

FLT_MAX = torch.finfo(torch.float32).max
E4M3_MAX = 448.0
NVFP4_MAX = 6.0 * E4M3_MAX  # 2688: the largest element times the largest block scale
E4M3_MIN_NORMAL = 2.0**-6
FLOAT8_AMAX_EPS = 1e-12  # torchao float8: the smallest amax of which a scale is made

HADAMARD_SIZE = 16
# Signs before the Hadamard transform: bit i is set where the i-th of 16 elements is negated.
HADAMARD_SIGNS = sum(1 << i for i in (3, 5, 6, 7, 8, 9, 10, 12, 14, 15))

PHILOX_ROUNDS = 7  # the fewest that pass BigCrush

# The number of random bits that round an element stochastically; see `eight_random_bits`.
_random_bits: ContextVar[int] = ContextVar("random_bits", default=16)

MX_EMAX = {"e4m3": 8, "e5m2": 15, "e2m1": 2}
MX_MBITS = {"e4m3": 3, "e5m2": 2, "e2m1": 1}


# ---------------------------------------------------------------- elements and scales


def e2m1_encode(y: torch.Tensor, negative: torch.Tensor) -> torch.Tensor:
    """float32 y, |y| <= 6 -> uint8 E2M1 codes 0..15, round to nearest, ties to the even code; NaN gives 7.

    `negative` is the sign bit. It comes from the value before scaling: a negative value that underflows keeps its sign,
    and -0.0 has none.
    """
    mag = y.abs()
    code = negative.to(torch.uint8) << 3
    for above in (mag > 0.25, mag >= 0.75, mag > 1.25, mag >= 1.75, mag > 2.5, mag >= 3.5, mag > 5.0):
        code += above
    return code.masked_fill_(y.isnan(), 7)  # as in the PTX conversion


def e2m1_encode_stochastic(y: torch.Tensor, negative: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """`e2m1_encode`, but rounded up with probability (|y| - lo) / (hi - lo) between neighbouring values lo and hi.

    noise: int32 in [0, 2^16), of y's shape, in units of 2^-16 of a step. Half a unit is added, to centre it.

    The exponent of a float32 and the first bit of its mantissa are the code. The noise is added below that bit, and may
    carry into it. Below 1, where codes are subnormal, adding 1 to y gives the step 1/2.
    """
    mag = y.abs()
    if _random_bits.get() == 8:
        code = _rounded_by_eight_bits(mag, noise) + 8 * negative
        return code.masked_fill_(y.isnan(), 7).to(torch.uint8)
    subnormal = mag < 1
    bits = torch.where(subnormal, mag + 1.0, mag).view(torch.int32) + (noise << 6) + 32
    code = (bits >> 22) - torch.where(subnormal, 254, 252) + 8 * negative
    return code.masked_fill_(y.isnan(), 7).to(torch.uint8)


@contextmanager
def eight_random_bits() -> Iterator[None]:
    """A context in which the reference rounds stochastically as SM100's conversion to E2M1 does, not as other kernels.

    `cvt.rs.satfinite.e2m1x4` takes a word for four elements: byte i of word j is for element 4 j + i. The fraction of a
    step is cut to eight bits, and the element is rounded up where fraction and random bits together reach a step.
    (PTX ISA, "cvt"; the byte of each element and the cut are taken from its diagram, and no GPU confirmed them.)
    """
    token = _random_bits.set(8)
    try:
        yield
    finally:
        _random_bits.reset(token)


def _rounded_by_eight_bits(mag: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Codes without sign, int32, of float32 magnitudes up to 6 and noise in [0, 2^8)."""
    double, fourfold = (mag >= 2).to(torch.int32), (mag >= 4).to(torch.int32)  # the step is 1/2, 1 or 2
    in_steps = torch.where(mag >= 4, mag * 128, torch.where(mag >= 2, mag * 256, mag * 512))
    return (in_steps.nan_to_num(0.0).to(torch.int32) + noise >> 8) + 2 * (double + fourfold)


def e2m1_decode(codes: torch.Tensor) -> torch.Tensor:
    """uint8 E2M1 codes 0..15 -> float32."""
    mag = (codes & 7).to(torch.int32)
    # Codes 2..7 are the top of a float32 with a rebiased exponent; 0 and 1 are the subnormals 0 and 0.5.
    normal = ((mag << 22) + (126 << 23)).view(torch.float32)
    value = torch.where(mag < 2, mag.float() * 0.5, normal)
    return torch.where(codes > 7, -value, value)


def pack(codes: torch.Tensor) -> torch.Tensor:
    """uint8 codes [..., K] -> [..., K / 2], the even element in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(data: torch.Tensor) -> torch.Tensor:
    """uint8 [..., K / 2] -> codes [..., K]."""
    return torch.stack((data & 15, data >> 4), dim=-1).flatten(-2)


def e2m1_unpack(data: torch.Tensor) -> torch.Tensor:
    """Packed E2M1 uint8 [..., K / 2] -> float32 [..., K]: `unpack` and `e2m1_decode` in one read of the data."""
    every_byte = torch.arange(256, dtype=torch.uint8, device=data.device).unsqueeze(-1)
    pairs = e2m1_decode(unpack(every_byte))
    values = pairs.index_select(0, data.flatten().to(torch.int32))
    return values.view(*data.shape[:-1], 2 * data.shape[-1])


def saturate(y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float32 -> FP8, saturating, ties to even; NaN gives 0x7F, whatever its sign."""
    limit = torch.finfo(dtype).max
    return y.clamp(-limit, limit).nan_to_num_(nan=torch.nan).to(dtype)


def _nan_where_not_finite(scale: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    """E4M3 scales, replaced by 0x7F (NaN) wherever the amax of the block is not finite."""
    return torch.where(amax.isfinite(), scale.view(torch.uint8), 0x7F).view(torch.float8_e4m3fn)


def e8m0_scale(amax: torch.Tensor, element: str, mode: str) -> torch.Tensor:
    """Block amax (float32, not negative) -> E8M0 bytes (uint8) of the power of two that `mode` chooses."""
    finite = amax.isfinite()
    if mode == "rceil":
        bits = (amax * _f32(1.0 / ELEMENT_MAX[element])).view(torch.int32)
        exponent, mantissa = bits >> 23, bits & 0x7FFFFF
        byte = exponent + torch.where(exponent > 0, mantissa > 0, mantissa > 0x400000)
    else:
        bits = amax.view(torch.int32)
        if mode == "even":
            bits = (bits + (1 << (23 - MX_MBITS[element] - 1))) & -(1 << 23)
        exponent = (bits >> 23) - 127 - MX_EMAX[element]
        if mode == "ceil":
            exponent = exponent + ((bits & 0x7FFFFF) > 0)
        byte = exponent.clamp(-127, 128) + 127
    return torch.where(finite, byte, 255).to(torch.uint8)


def e8m0_decode(byte: torch.Tensor) -> torch.Tensor:
    """E8M0 bytes (uint8) -> float32 2^(byte - 127); 255 gives NaN."""
    return torch.where(byte == 255, torch.nan, _exp2(byte.to(torch.int32) - 127))


def _exp2(exponent: torch.Tensor) -> torch.Tensor:
    """int32 in [-149, 127] -> float32 2^exponent, exactly (subnormals too)."""
    normal = (exponent + 127) << 23
    subnormal = 1 << (exponent + 149).clamp(0, 22)
    return torch.where(exponent >= -126, normal, subnormal).to(torch.int32).view(torch.float32)


def _f32(value: float) -> float:
    """A Python float rounded to float32."""
    return torch.tensor(value, dtype=torch.float32).item()


def _divide(a, b) -> torch.Tensor:
    """a / b with one rounding, where either a or b is a Python number.

    PyTorch computes number / tensor, and on CUDA also tensor / number, as a product with a reciprocal: two roundings.
    """
    if isinstance(a, torch.Tensor):
        return a / a.new_full((), b)
    return b.new_full((), a) / b


# ---------------------------------------------------------------- random bits and the Hadamard transform


def philox(seed: torch.Tensor, stream: int, words: int) -> torch.Tensor:
    """`words` random 32-bit words, as int64 [words]: Philox 4x32 with 7 rounds.

    seed: int64 []; its two halves are the key. Word i is output i % 4 of the counter (i // 4 as 64 bits, stream, 0).
    """
    low = 0xFFFFFFFF
    index = torch.arange((words + 3) // 4, dtype=torch.int64, device=seed.device)
    c0, c1, c2, c3 = index & low, index >> 32, torch.full_like(index, stream), torch.zeros_like(index)
    k0, k1 = seed & low, (seed >> 32) & low
    for _ in range(PHILOX_ROUNDS):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # 64 bits, of which the sign is one
        c0, c1, c2, c3 = ((p1 >> 32) & low) ^ c1 ^ k0, p1 & low, ((p0 >> 32) & low) ^ c3 ^ k1, p0 & low
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    return torch.stack((c0, c1, c2, c3), dim=-1).flatten()[:words]


def rounding_noise(seed: torch.Tensor, stream: int, shape: tuple[int, ...]) -> torch.Tensor:
    """16 random bits for each element of `shape` [..., K], K even, as int32; 8 within `eight_random_bits`.

    Each pair of elements has one word of `philox`; the low half is for the even element.
    """
    bits = _random_bits.get()
    words = philox(seed, stream, math.prod(shape) * bits // 32)
    parts = [words >> low & (1 << bits) - 1 for low in range(0, 32, bits)]
    return torch.stack(parts, dim=-1).to(torch.int32).view(shape)


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """The random Hadamard transform along the last dimension, zero-padded to whole groups of 16, in float32.

    Each group times diag(signs) H16 / 4 (Sylvester's H16), by four stages of sums and differences at the distances
    1, 2, 4, 8. The transform is orthogonal: applied to both operands of a matmul, it cancels.
    The factor 1/4 is applied first, so that no sum overflows where the results are finite: each sum is the mean of two
    sums of the next stage. The factor is exact, except for the last bits of float32 numbers below 2^-123.
    """
    pad = -x.shape[-1] % HADAMARD_SIZE
    groups = (F.pad(x, (0, pad)) if pad else x).float().unflatten(-1, (-1, HADAMARD_SIZE))
    index = torch.arange(HADAMARD_SIZE, dtype=torch.int32, device=x.device)
    quarters = groups * 0.25
    y = torch.where((HADAMARD_SIGNS >> index) & 1 == 1, -quarters, quarters)
    for distance in (1, 2, 4, 8):
        first, second = y.unflatten(-1, (-1, 2, distance)).unbind(-2)
        y = torch.stack((first + second, first - second), dim=-2).flatten(-3)
    return y.flatten(-2)


# ---------------------------------------------------------------- quantise


def quantize(
    x: torch.Tensor,
    fmt: BlockFormat,
    outer: torch.Tensor | None = None,
    layout: str = "linear",
    *,
    seed: torch.Tensor | None = None,
    stream: int = 0,
    transform: bool = False,
    amax: torch.Tensor | None = None,
    noise: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Quantise along the last dimension.

    x: [..., R, K] (or [K]) bf16, fp16 or fp32.
    outer: float32 global scale [] or row scales [..., R, 1]; None computes them from x if the format has them.
    layout: layout of the block scales, "linear" or "swizzled".
    seed: int64 [], to round stochastically (E2M1 only) with the random bits of `stream`; None rounds to nearest.
    transform: quantise the Hadamard transform of x, along the last dimension.
    amax: float32, of the global or row scale's shape, of which it is made if `outer` is None; None computes it from x.
    noise: random bits as `rounding_noise` makes them, instead of a seed.

    Returns three tensors.
    data: [..., R, ceil(K / block) * block] codes; E2M1 codes are packed, two in a byte, so the last size is halved.
    block scales: [..., ceil(R / block rows), blocks] linear or [..., swizzled_numel] swizzled; None if there are none.
    global scale or row scales: float32; None if `outer` is None and the format has none.
    """
    if x.dim() == 1:
        row = quantize(x.unsqueeze(0), fmt, outer, layout, seed=seed, stream=stream, transform=transform, amax=amax)
        return drop_row(row)
    x = hadamard(x) if transform else x.float()
    if amax is None and outer is None and fmt.outer is not None:
        amax = largest(x, per_row=fmt.outer == "row")
    if fmt.scale is None:
        return _quantize_unblocked(x, fmt, outer, amax)
    blocks = _blocks(x, fmt)
    block_amax = blocks.abs().amax((-3, -1))  # NaN propagates
    if fmt.scale == "e8m0":
        byte = e8m0_scale(block_amax, fmt.element, fmt.contract)
        scales, factor = byte.view(torch.float8_e8m0fnu), _exp2(127 - byte.to(torch.int32))
    elif fmt.scale == "float32":
        factor, scales = float8_scale(torch.where(block_amax.isfinite(), block_amax, torch.nan), fmt)
    elif fmt.contract == "torchao":
        outer = _torchao_outer(amax) if outer is None and fmt.outer else outer
        scales, factor = _torchao_scales(block_amax, outer)
    else:
        senc, outer = _te_outer(x, fmt, outer, amax)
        scales, factor = _te_scales(block_amax, senc, outer)
    if seed is not None:
        noise = rounding_noise(seed, stream, (*x.shape[:-1], blocks.shape[-2] * blocks.shape[-1]))
    data = _encode(x, blocks, factor[..., :, None, :, None], fmt, noise).contiguous()
    return data, _lay_out(scales, fmt, x.shape[-2], layout), outer


def drop_row(result):
    """Remove the rows' dimension of the result of quantising a vector as a matrix of one row."""
    data, scales, outer = result
    if scales is not None and scales.dim() == data.dim():  # not swizzled
        scales = scales.squeeze(0)
    return data.squeeze(0), scales, outer.squeeze(0) if outer is not None and outer.dim() == 2 else outer


def _blocks(x: torch.Tensor, fmt: BlockFormat) -> torch.Tensor:
    """[..., R, K] -> [..., R / br, br, K / bc, bc], zero-padded to whole blocks."""
    rows, cols = fmt.block
    r, k = ceil_div(x.shape[-2], rows), ceil_div(x.shape[-1], cols)
    pad = (0, k * cols - x.shape[-1], 0, r * rows - x.shape[-2])
    padded = F.pad(x, pad) if any(pad) else x  # F.pad copies even without padding
    return padded.reshape(*x.shape[:-2], r, rows, k, cols)


def _encode(x, blocks, factor, fmt: BlockFormat, noise: torch.Tensor | None) -> torch.Tensor:
    """Elements times their block's encode factor, rounded to codes: [..., R, padded K], packed for E2M1."""
    y = _matrix(blocks * factor, x.shape[-2])
    if not fmt.packed:
        return saturate(y, fmt.data_dtype)
    y, negative = y.clamp(-fmt.element_max, fmt.element_max), _matrix(blocks < 0, x.shape[-2])
    return pack(e2m1_encode(y, negative) if noise is None else e2m1_encode_stochastic(y, negative, noise))


def _matrix(blocks: torch.Tensor, rows: int) -> torch.Tensor:
    """[..., R / br, br, K / bc, bc] -> [..., rows, padded K], without the rows that pad square blocks."""
    return blocks.flatten(-2).flatten(-3, -2)[..., :rows, :]


def _lay_out(scales: torch.Tensor, fmt: BlockFormat, rows: int, layout: str) -> torch.Tensor:
    """Convert linear scales to `layout`, unless the format has only linear scales."""
    if layout == "linear" or not fmt.swizzles:
        return scales.contiguous()
    if fmt.square:  # the matrix units read a scale for each row
        scales = scales_of_rows(scales, fmt, rows)
    return to_swizzled(scales)


def scales_of_rows(scales: torch.Tensor, fmt: BlockFormat, rows: int) -> torch.Tensor:
    """Scales of square blocks, [..., R / br, C] -> a scale for each row, [..., R, C]."""
    repeated = as_integers(scales).repeat_interleave(fmt.block[0], dim=-2)
    return repeated.narrow(-2, 0, rows).view(scales.dtype)


def largest(x: torch.Tensor, per_row: bool) -> torch.Tensor:
    """The largest magnitude of the tensor ([]) or of each row ([..., R, 1]); 0 where it is empty."""
    if x.shape[-1] == 0 or x.numel() == 0:
        return x.new_zeros((*x.shape[:-1], 1) if per_row else ())
    return x.abs().amax(-1, keepdim=True) if per_row else x.abs().amax()


def outer_of(amax: torch.Tensor, fmt: BlockFormat) -> torch.Tensor:
    """The global or row scales of a format. amax: the largest magnitude of the elements that share each scale."""
    if fmt.scale is None:
        return float8_scale(amax, fmt)[1]
    return _torchao_outer(amax) if fmt.contract == "torchao" else 1.0 / _te_encode(amax)


def _torchao_outer(amax: torch.Tensor) -> torch.Tensor:
    """The global scale of contract torchao. amax: the largest magnitude."""
    p = _divide(amax, NVFP4_MAX)
    return torch.where(p == 0, 1.0, p)  # all zero, or so small that p underflows: 0 / 0 would be NaN


def _torchao_scales(amax: torch.Tensor, outer: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """(E4M3 block scales, encode factors) of contract torchao."""
    scale = _divide(amax, 6.0)
    if outer is not None:
        scale = scale / outer
    scales = _nan_where_not_finite(saturate(scale.clamp(min=E4M3_MIN_NORMAL), torch.float8_e4m3fn), amax)
    s = scales.float()
    return scales, (1.0 / s if outer is None else (_encode_scale(outer) / s).clamp(max=FLT_MAX))


def _encode_scale(outer: torch.Tensor) -> torch.Tensor:
    """The reciprocal of a global or row scale, at most FLT_MAX: infinity times 0 is NaN, which has the code 7."""
    return (1.0 / outer).clamp(max=FLT_MAX)


def _te_outer(x, fmt: BlockFormat, outer, amax) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The encode scale of contract te, and the global or row scale; 1 and None for a format with block scales only."""
    if outer is not None:
        return _encode_scale(outer), outer
    if fmt.outer is None:
        return x.new_ones(()), None
    senc = _te_encode(amax)
    return senc, 1.0 / senc


def _te_encode(amax: torch.Tensor) -> torch.Tensor:
    senc = _divide(NVFP4_MAX, amax).clamp(max=FLT_MAX)
    return torch.where((amax == 0) | (senc == 0), 1.0, senc)


def _te_scales(amax: torch.Tensor, senc: torch.Tensor, outer: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """(E4M3 block scales, encode factors) of contract te."""
    scale = (amax * (senc * _f32(1.0 / 6.0))).clamp(max=FLT_MAX)
    scales = _nan_where_not_finite(saturate(scale, torch.float8_e4m3fn), amax)
    s = scales.float()
    return scales, (1.0 / (s if outer is None else s * outer)).clamp(max=FLT_MAX)


def _quantize_unblocked(x: torch.Tensor, fmt: BlockFormat, outer, amax):
    """Quantise to FP8 without block scales: codes, None, and the global or row scale."""
    encode, outer = float8_scale(amax, fmt) if outer is None else (_encode_scale(outer), outer)
    # Saturation would hide an infinite element, which a static scale does not show either.
    y = (x * encode).masked_fill_(x.isinf(), torch.nan)
    return saturate(y, fmt.data_dtype).contiguous(), None, outer


def float8_scale(amax: torch.Tensor, fmt: BlockFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """The encode and decode factors of FP8 elements, float32, of the shape of `amax`.

    Decode is 1 / encode, and encode is the format's largest element / the amax. Contract torchao: divided in float64,
    the amax at least 1e-12. Contract te: at most FLT_MAX, and 1 for an amax of 0. Contract te_pow2: as te, rounded down
    to a power of two.
    """
    if fmt.contract == "torchao":
        encode = (fmt.element_max / amax.double().clamp(min=FLOAT8_AMAX_EPS)).float()
    else:
        encode = _divide(fmt.element_max, amax).clamp(max=FLT_MAX)
        encode = torch.where(amax == 0, 1.0, encode)
    if fmt.contract == "te_pow2":
        power = (encode.view(torch.int32) & 0x7F800000).view(torch.float32)
        encode = torch.where(encode.isnan(), encode, power)
    return encode, 1.0 / encode


# ---------------------------------------------------------------- dequantise and multiply


def dequantize_blocks(data: torch.Tensor, scales: torch.Tensor | None, fmt: BlockFormat) -> torch.Tensor:
    """Codes times block scales in float32, [..., R, padded K]: no global or row scale. Exact if `fmt.exact`.

    scales: linear (as many dimensions as data) or swizzled (one fewer).
    """
    values = e2m1_unpack(data) if fmt.packed else data.float()
    if scales is None:
        return values
    if scales.dim() < data.dim():
        scales = from_swizzled(scales, data.shape[-2], values.shape[-1] // fmt.block_cols)
    elif fmt.square:
        scales = scales_of_rows(scales, fmt, data.shape[-2])
    blocks = values.unflatten(-1, (scales.shape[-1], fmt.block_cols))
    return (blocks * decoded(scales, fmt).unsqueeze(-1)).flatten(-2)


def decoded(scales: torch.Tensor, fmt: BlockFormat) -> torch.Tensor:
    """Block scales in float32, of the same shape."""
    return e8m0_decode(scales.view(torch.uint8)) if fmt.scale == "e8m0" else scales.float()


def values_of(data: torch.Tensor, scales: torch.Tensor | None, fmt: BlockFormat) -> torch.Tensor:
    """`dequantize_blocks`, stored in the 16-bit dtype `fmt.values_dtype`."""
    return dequantize_blocks(data, scales, fmt).to(fmt.values_dtype)


def fake_quantize(
    x: torch.Tensor, fmt: BlockFormat, outer: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`quantize`, then `dequantize_blocks`: float16 dequantised values [..., padded K], and the global or row scale.

    x, outer, and the returned global or row scale are as in `quantize`. fmt must have E4M3 block scales of rows, whose
    dequantised values float16 holds exactly.
    """
    data, scales, outer = quantize(x, fmt, outer)
    return values_of(data, scales, fmt), outer


def dequantize(data, scales, outer, fmt: BlockFormat, cols: int, dtype: torch.dtype) -> torch.Tensor:
    """The represented values, [..., R, cols] in dtype: element * block scale * outer in float32, then cast."""
    if data.dim() == 1:
        if scales is not None and scales.numel() == ceil_div(cols, fmt.block_cols):  # linear, not swizzled
            scales = scales.unsqueeze(0)
        return dequantize(data.unsqueeze(0), scales, outer, fmt, cols, dtype).squeeze(0)
    values = dequantize_blocks(data, scales, fmt)[..., :cols]
    return (values if outer is None else values * outer).to(dtype).contiguous()


def scaled_mm(a: Operand, b: Operand, bias: torch.Tensor | None, out_dtype: torch.dtype) -> torch.Tensor:
    """A @ B^T with both operands' contraction dimension last: [..., M, K] x [..., N, K] -> [..., M, N].

    All matrices of A share a B of two dimensions. A format of None marks a plain floating-point operand, which may also
    have a global or row scale. The float32 product is multiplied once by outer_a * outer_b (a missing scale is 1), then
    the bias [N] is added, then the result is cast to out_dtype.
    `checks.check` has checked the arguments.
    """
    k = min(a.k, b.k)  # the rest of the longer operand is padding, which is zero
    left, right = _values(a), _values(b)
    with torch.autocast(left.device.type, enabled=False):  # float32 under any autocast of the caller
        out = left[..., :k] @ right[..., :k].transpose(-2, -1)
    outer = _outer_product(a.outer, b.outer)
    if outer is not None:
        out = out * outer
    if bias is not None:
        out = out + bias.float()
    return out.to(out_dtype)


def _values(x: Operand) -> torch.Tensor:
    """The dequantised values of an operand in float32, without its global or row scale."""
    return x.data.float() if x.format is None else dequantize_blocks(x.data, x.scales, x.format)


def _outer_product(a_outer, b_outer):
    """outer_a ([] or [..., M, 1]) * outer_b ([] or [..., N, 1], as a row); None counts as 1, and two None give None."""
    if b_outer is not None and b_outer.dim() > 0:
        b_outer = b_outer.transpose(-2, -1)
    if a_outer is None or b_outer is None:
        return b_outer if a_outer is None else a_outer
    return a_outer * b_outer
