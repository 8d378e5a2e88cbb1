"""The inputs on which quantisers disagree: `hard_input(name, shape, dtype, block)` for each of `NAMES`.

randn alone meets none of the cases that differ between implementations: scale underflow, rounding ties, zero blocks,
scale boundaries, infinities. Values are made on the CPU from a fixed seed, so that every caller sees the same bits.
"""

import math

import torch

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _randn(shape, block, gen):
    return torch.randn(shape, generator=gen)


def _scaled_rows(shape, block, gen):
    """Rows of very different size: under a scale of the whole tensor most block scales underflow."""
    return _randn(shape, block, gen) * torch.exp2(-20.0 * torch.rand((*shape[:-1], 1), generator=gen))


def _outliers(shape, block, gen):
    """1 % of the values are 1000 times larger: the rest of their block rounds to zero."""
    x = _randn(shape, block, gen)
    return torch.where(torch.rand(shape, generator=gen) < 0.01, x * 1000, x)


def _zero_blocks(shape, block, gen):
    """30 % of the blocks are zero."""
    keep = torch.rand(_block_shape(shape, block), generator=gen) > 0.3
    return _randn(shape, block, gen) * _spread(keep, shape, block)


def _ties_fp4(shape, block, gen):
    """Multiples of 0.25 up to 6, 6 in every block: its scale is 1, and many values lie half way between two codes.

    The first of several blocks in a row has 2688, so that global scales are 1 as well.
    """
    x = torch.randint(-24, 25, shape, generator=gen) * 0.25
    top = torch.full(_block_shape(shape, block), 6.0)
    if top.shape[-1] > 1:
        top[..., 0] = 2688.0
    return _lead(x, top, block)


def _ties_fp8(shape, block, gen):
    """Five significant bits, 448 in every block: ties of E4M3 and of E5M2, normal and subnormal codes."""
    x = torch.randint(16, 32, shape, generator=gen) * torch.exp2(torch.randint(-16, 4, shape, generator=gen).float())
    x = torch.where(torch.rand(shape, generator=gen) < 0.5, -x, x)
    return _lead(x, torch.full(_block_shape(shape, block), 448.0), block)


def _zeros(shape, block, gen):
    return torch.zeros(shape)


def _signed_zeros(shape, block, gen):
    """-0.0 among values, and negative values that round to zero."""
    x = _randn(shape, block, gen)
    r = torch.rand(shape, generator=gen)
    return torch.where(r < 0.25, -0.0, torch.where(r < 0.5, -1e-4 * x.abs(), x))


def _tiny(shape, block, gen):
    """Block maxima from 2^-149 (float32 subnormals) to 2^-100: scale arithmetic underflows or overflows."""
    top = torch.exp2(-149.0 + 49.0 * torch.rand(_block_shape(shape, block), generator=gen))
    return (2 * torch.rand(shape, generator=gen) - 1) * _spread(top, shape, block)


def _huge(shape, block, gen):
    """Block maxima up to the largest number of the dtype (clamped there when cast)."""
    top = torch.exp2(128.0 - 16.0 * torch.rand(_block_shape(shape, block), generator=gen))
    return _lead((2 * torch.rand(shape, generator=gen) - 1) * _spread(top, shape, block), top, block)


def _scale_boundary(shape, block, gen):
    """Block maxima at a step of the scale function, and 1 ulp of the dtype (see `hard_input`) on either side.

    Steps of E8M0: powers of two (ceil), 448 and 6 times one (rceil), the carries of `even`. Steps of E4M3: six times
    a power of two's sixteenths, the numbers half way between two scales.
    """
    significands = [1.0, 1.75, 1.5, 1.875, 1.9375, *(6 / 4 * (1 + i / 16) for i in range(16))]
    n = _block_shape(shape, block)
    pick = torch.randint(len(significands), n, generator=gen)
    top = torch.tensor(significands)[pick] * torch.exp2(torch.randint(-12, 12, n, generator=gen).float())
    return _lead((2 * torch.rand(shape, generator=gen) - 1) * _spread(top, shape, block) * 0.99, top, block)


def _one(value):
    def make(shape, block, gen):
        x = _randn(shape, block, gen)
        if x.numel():
            x.view(-1)[x.numel() * 2 // 3] = value
        return x

    return make


_MAKERS = {
    "randn": _randn, "scaled_rows": _scaled_rows, "outliers": _outliers, "zero_blocks": _zero_blocks,
    "ties_fp4": _ties_fp4, "ties_fp8": _ties_fp8, "zeros": _zeros, "signed_zeros": _signed_zeros, "tiny": _tiny,
    "huge": _huge, "scale_boundary": _scale_boundary, "one_nan": _one(math.nan), "one_pos_inf": _one(math.inf),
    "one_neg_inf": _one(-math.inf),
}  # fmt: skip
NAMES = tuple(_MAKERS)
NON_FINITE = ("one_nan", "one_pos_inf", "one_neg_inf")
FINITE = tuple(name for name in NAMES if name not in NON_FINITE)
# Each input in one dtype, and each dtype with every format: what reads numbers as float32 needs no other pair.
IN_ONE_DTYPE = tuple((name, DTYPES[i % len(DTYPES)]) for i, name in enumerate(NAMES))

# Largest magnitudes of a tensor, and global scales, whose reciprocals or what is made of them leave float32's range.
TINY_AMAXES = (1e-45, 1e-40, 1.2e-38, 7.8e-36, 7.9e-36, 8e-36, 4e-34, 6e-34, 1e-30)
TINY_OUTERS = (1e-45, 1e-40, 1.1e-38, 1.2e-38, 1.8e-37, 1.9e-37)


def of_amax(amax: float, shape, dtype=torch.float32) -> torch.Tensor:
    """Values up to `amax`, which comes first, among them zeros of both signs and blocks of 16 that are zero or small.

    Rows and blocks have maxima of their own, down to a 64th.
    """
    gen = torch.Generator().manual_seed(len(shape))
    x = (2 * torch.rand(shape, generator=gen) - 1) * torch.exp2(-3 * torch.rand((*shape[:-1], 1), generator=gen))
    x *= _spread(torch.exp2(-3 * torch.rand(_block_shape(shape, 16), generator=gen)), shape, 16)
    x[..., 1::5], x[..., 3::7] = 0.0, -0.0
    x[..., 16:32] = 0.0
    x[len(x) // 2] = 0.0
    x.view(-1)[0] = 1.0
    return (x * amax).to(dtype)


def hard_input(name: str, shape, dtype=torch.float32, block: int = 16, device="cpu") -> torch.Tensor:
    """One hard input: contiguous, quantised dimension last, its structure aligned to blocks of `block` elements."""
    shape = tuple(shape)
    gen = torch.Generator().manual_seed(NAMES.index(name))
    x = _MAKERS[name](shape, block, gen)
    if name not in NON_FINITE:
        limit = torch.finfo(dtype).max
        x = x.clamp(-limit, limit)
    x = x.to(dtype)
    if name == "scale_boundary" and x.numel():
        x = _nudge(x, block, gen)
    return x.contiguous().to(device)


def stacked(shape, dtype, block: int = 16) -> torch.Tensor:
    """All hard inputs of a shape [rows, columns], one below the other."""
    return torch.cat([hard_input(name, shape, dtype, block) for name in NAMES])


def _block_shape(shape, block):
    return (*shape[:-1], -(-shape[-1] // block))


def _spread(per_block, shape, block):
    """One value a block -> one an element."""
    return per_block.repeat_interleave(block, dim=-1)[..., : shape[-1]]


def _lead(x, per_block, block):
    """x with the first element of every block replaced, sign alternating."""
    sign = 1.0 - 2.0 * (torch.arange(per_block.shape[-1]) % 2)
    x = x.clone()
    x[..., ::block] = per_block * sign
    return x


def _nudge(x, block, gen):
    """The first element of every block moved by -1, 0 or +1 ulp of its dtype."""
    integer = {2: torch.int16, 4: torch.int32}[x.element_size()]
    bits = x.view(integer)
    step = torch.randint(-1, 2, bits[..., ::block].shape, generator=gen).to(integer)
    bits[..., ::block] += step
    return x
