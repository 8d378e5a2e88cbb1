"""How the kernels of products are launched, by sizes: tiles, warps and stages as they measured best on an H200."""

from fp4compile._compat import statically_true
from fp4compile.layouts import ceil_div
from fp4compile.targets import Target
from fp4compile.templates.device.shared_memory import reserved
from fp4compile.templates.gemm.gemv import WIDTH, needed_bytes
from fp4compile.templates.gemm.wgmma_sm90 import needed_bytes as wgmma_bytes

DECODE_ROWS = 8  # rows of A up to which NVFP4 weights are streamed by `gemm_skinny`
WGMMA_ROWS = 64  # rows of A up to which `gemm_wgmma_sm90` serves, on SM90
MULTIPROCESSORS = 132  # of an H200
# Decode, by A (codes or plain 16-bit) and rows: columns of B, units and warps of a step, stages, warps, and how many
# programs make splitting the contraction dimension unnecessary.
DECODE = {
    ("plain", 8): (32, 128, 4, 3, 4, 128), ("packed", 8): (32, 128, 4, 4, 4, 128),
    ("plain", 16): (32, 64, 4, 4, 4, 128), ("packed", 16): (32, 128, 2, 5, 2, 128),
    ("plain", 32): (64, 32, 4, 5, 4, 128), ("packed", 32): (64, 64, 4, 5, 4, 128),
    ("plain", 64): (128, 32, 1, 4, 8, 256), ("packed", 64): (64, 64, 1, 4, 4, 512),
}  # fmt: skip


def few_config(m, n, k, target: Target) -> dict[str, int] | None:
    """Constants of `gemv`, and GRID at most; None for rows that are more than two, or too long for it.

    Found by benchmarks/launches.py, and by decoding with Llama-3-8B. Two programs share a multiprocessor, or three:
    whichever leaves the fewer of them idle in the last round of tiles, when others still have one.
    """
    rows = 1 if statically_true(m == 1) else 2
    warps = 8 if statically_true(k <= 16 * 8 * WIDTH.value) else 16
    steps = ceil_div(k, WIDTH.value * warps)
    # A lane holds all that its warp has of a row on the way to shared memory.
    if not statically_true(m <= 2) or not statically_true(steps <= 16):
        return None
    size = needed_bytes(warps, steps, rows)
    fit = [each for each in (2, 3) if each * warps <= 24 and reserved(size, each, target)]
    if not fit and not reserved(size, 1, target):
        return None
    each = fit[0] if fit else 1
    if fit and isinstance(n, int):
        each = min(fit, key=lambda each: each * ceil_div(ceil_div(n, 16), each * MULTIPROCESSORS))
    return {"WARPS": warps, "STEPS": steps, "ROWS": rows, "GRID": each * MULTIPROCESSORS,
            "SHARED": reserved(size, each, target)}  # fmt: skip


def decode_config(m, n, k) -> dict[str, int]:
    """Constants of `gemm_skinny`, and GRID at most, for the shapes of Llama-3; all must fit shared memory.

    Found by benchmarks/launches.py. With six programs for each multiprocessor some of them take two tiles, and no last
    few have it for themselves. Two chains pay where few warps share a multiprocessor.
    """
    rows = next((rows for rows in (2, 4) if statically_true(m <= rows)), 8)
    tiles, warps, stages = 2, 4, 2
    chains = 1 if rows == 8 else 2
    if statically_true(n >= 8192):
        if rows <= 4 and statically_true(n < 16384):
            stages = 3
    elif rows == 8:
        tiles = 1
    elif statically_true(n <= 2048) or statically_true(k > 8192):
        tiles, warps = 1, 8
    else:
        tiles, stages = 1, 4
    return {"TILES": tiles, "WARPS": warps, "STAGES": stages, "ROWS": rows, "CHAINS": chains,
            "GRID": 6 * MULTIPROCESSORS}  # fmt: skip


def wgmma_config(m, n, k, fused: bool = False) -> dict[str, int]:
    """Constants of `gemm_wgmma_sm90`, and SPLIT, for the shapes of Llama-3.

    Found by benchmarks/launches.py. A program of eight warps for each multiprocessor, or one of 16: that reads fewer
    activations, and pays where they are many and the weights large. Small weights need many small programs, and so do
    large ones that are multiplied by few rows. Partial sums take another launch, so that a program for each
    multiprocessor is enough, unless it has very much to do. fused: what the sums go through takes registers, too,
    which 16 warps do not have.
    """
    rows = 16 if statically_true(m <= 16) else 32 if statically_true(m <= 32) else 64
    few = {"ROWS": rows, "WARPS": 8, "STAGES": 3, "STEPS_PER_STAGE": 2}
    if statically_true(n <= 2048):
        few |= {"WARPS": 4, "STEPS_PER_STAGE": 1}
    elif rows == 16 and statically_true(n >= 16384) and statically_true(k >= 2048):
        return {**few, "WARPS": 4, "STAGES": 2, "SPLIT": 2}
    many = {"ROWS": rows, "WARPS": 16, "STAGES": 2, "STEPS_PER_STAGE": 2}
    config = many if rows == 64 and statically_true(n * k > 2**26) else few
    programs, split = ceil_div(n, 16 * config["WARPS"]), 1
    # The exception is as many parts as before expansion ran beside wgmma: not timed since.
    room = MULTIPROCESSORS * (2 if rows == 16 and statically_true(k > 16384) else 1)
    # A part has at least 512 elements of the contraction dimension.
    while split < 8 and statically_true(2 * programs * split <= room) and statically_true(k >= 1024 * split):
        split *= 2
    return {**(few if fused and split == 1 else config), "SPLIT": split}


def wgmma_shared(config: dict[str, int], programs, target: Target) -> int:
    """Bytes of shared memory to reserve for each of so many programs, of a launch that `wgmma_config` says."""
    size = wgmma_bytes(*(config[name] for name in ("ROWS", "WARPS", "STAGES", "STEPS_PER_STAGE")))
    each = ceil_div(programs, MULTIPROCESSORS) if isinstance(programs, int) else 1
    return next(filter(None, (reserved(size, fewer, target) for fewer in range(each, 0, -1))))


def tile_of(m, n, k, compute: str, a_bytes: int, b_bytes: int, sm: int) -> dict:
    """Tile and launch of `gemm_dequant_tiles`; *_bytes: of a unit."""

    def tile(bm, bn, units, warps, stages, num_warps, split=1):
        return {"BM": bm, "BN": bn, "UNITS": units, "WARPS": warps, "SPLIT": split, "GROUP_M": 8, "STAGES": stages,
                "num_warps": num_warps}  # fmt: skip

    if sm == 0:
        if statically_true(m <= 8):  # in the interpreter as well
            return tile(8, 16, 16, 2, 2, 4, split=2)
        return tile(16, 16, 32, 1, 2, 4)
    if compute == "fp32":
        return tile(32, 32, 16, 1, 2, 4)
    small = sm < 80 or sm in (86, 89, 120, 121)  # about 100 KB of shared memory
    if statically_true(m <= 64):
        bm = (
            8 if statically_true(m <= 8) else 16 if statically_true(m <= 16) else 32 if statically_true(m <= 32) else 64
        )
        bn, units, warps, stages, num_warps, programs = DECODE["packed" if a_bytes == 1 else "plain", bm]
        while bn > 16 and bm < 64 and not statically_true(ceil_div(n, bn) >= 128):
            bn //= 2
        if b_bytes > 1:  # more registers an element
            units //= 2
        budget = 90_000 if small else 216_000
        while units > 32 and (stages - 1) * warps * units * (bm * a_bytes + bn * b_bytes) > budget:
            units //= 2
        split = 1
        while (
            split < 8
            and statically_true(ceil_div(n, bn) * split < programs)
            and statically_true(k >= 4 * split * units * warps)
        ):
            split *= 2
        return tile(bm, bn, units, warps, stages, num_warps, split)
    return tile(64, 128, 32, 1, 2, 8) if small else tile(128, 128, 32, 1, 3, 8)
