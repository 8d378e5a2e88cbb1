"""Inline PTX of kernels written one lane at a time, in Triton's interpreter: shared memory, copies, `mma.sync`.

`install()` gives the interpreter's builder what it lacks, `create_inline_asm`. Every instruction is done for all lanes
of a program before the next one, so that copies have arrived at once and barriers have nothing to wait for: what this
shows is which bytes go where and what is computed of them, not that a kernel waits for what it reads.
"""

import re
from types import SimpleNamespace

import numpy as np

from ptxsim.numbers import lop3, prmt, prmt_by_thread
from tests.helpers.ptx_player import bf16, f16, fp8_values, pack_bf16, pack_f16

U32, U64 = np.uint32, np.uint64
_SHARED = np.zeros(2**16, np.uint8)  # of the program that runs
_BASE = 256  # address of `buffers` there


def install() -> None:
    """Let Triton's interpreter run inline PTX; for a process that does nothing else with it."""
    from triton.language import core
    from triton.runtime import interpreter

    def create_inline_asm(self, text, constraints, values, types, is_pure, pack):
        outputs = constraints.count("=")
        shape = np.broadcast_shapes(*(value.data.shape for value in values))
        found = _Lanes([np.broadcast_to(value.data, shape).ravel() for value in values], outputs).play(text)
        made = [handle(x.reshape(shape), kind.scalar) for x, kind in zip(found, types, strict=True)]
        return SimpleNamespace(get_result=made.__getitem__)

    def handle(bits, kind):
        dtype = np.dtype(interpreter._get_np_dtype(kind))
        return interpreter.TensorHandle(bits.astype(f"u{dtype.itemsize}").view(dtype), kind)

    interpreter.InterpreterBuilder.create_inline_asm = create_inline_asm
    core.tuple.__add__ = lambda self, other: core.tuple([*self, *other])  # of either kind of tuple
    core.tuple.__radd__ = lambda self, other: core.tuple([*other, *self])


class _Lanes:
    """The registers of all lanes, uint64 [lanes] each, by name."""

    def __init__(self, inputs: list[np.ndarray], outputs: int) -> None:
        self.outputs = outputs
        self.registers = {f"${outputs + i}": _bits(x) for i, x in enumerate(inputs)}
        self.count = len(inputs[0])

    def play(self, text: str) -> list[np.ndarray]:
        text = re.sub(r"\{([^{};]*)\}", lambda found: "<" + found[1].replace(",", "|").replace(" ", "") + ">", text)
        for line in re.sub(r"[{}]|\.reg[^;]*;|\.shared [^;]*;", "", text).split(";"):
            if line.strip():
                self.do(line.strip())
        return [self.registers[f"${i}"] for i in range(self.outputs)]

    def do(self, line: str) -> None:
        wanted = np.ones(self.count, bool)
        if line[0] == "@":
            predicate, line = line.split(" ", 1)
            wanted = self.registers[predicate[1:]] != 0
        op, _, rest = line.partition(" ")
        if op.startswith(("bar.", "cp.async.commit", "cp.async.wait")):
            return
        args = [word.strip() for word in rest.split(",")]
        if op.startswith("cp.async"):
            self.copy(*args, wanted=wanted)
        elif op.startswith("ld.shared"):
            self.load(op, *args, wanted=wanted)
        elif op.startswith("st.shared"):
            size = 8 if "64" in op else 4
            for i, name in enumerate(_parts(args[1])):
                at = self.address(args[0])[wanted, None] + U64(size * i) + np.arange(size, dtype=U64)
                _SHARED[at] = self.get(name)[wanted].view(np.uint8).reshape(-1, 8)[:, :size]
        elif op.startswith("mma.sync"):
            self.multiply(op, args)
        elif op.startswith("mov") and args[0][0] == "<":
            bits = {"mov.b64": 32, "mov.b32": 16}[op]
            for i, name in enumerate(_parts(args[0])):
                self.registers[name] = self.get(args[1]) >> U64(bits * i) & U64(2**bits - 1)
        elif op.startswith("mov") and args[1][0] == "<":
            bits = {"mov.b64": 32, "mov.b32": 16}[op]
            self.registers[args[0]] = sum(self.get(name) << U64(bits * i) for i, name in enumerate(_parts(args[1])))
        else:
            self.registers[args[0]] = self.value(op, *args[1:])

    def get(self, name: str) -> np.ndarray:
        if name == "buffers":
            _SHARED[:] = 0xFF  # another program's bytes, or none
            return np.full(self.count, _BASE, U64)
        if name[0] == "-" or name[0].isdigit():
            number = int("0x" + name[2:], 0) if name.startswith("0f") else int(name, 0)
            return np.full(self.count, number % 2**32, U64)
        return self.registers[name]

    def words(self, name: str) -> np.ndarray:
        return self.get(name).astype(U32)

    def float(self, name: str) -> np.ndarray:
        return self.words(name).view(np.float32)

    def address(self, text: str) -> np.ndarray:
        name, _, offset = text.strip("[]").partition("+")
        return self.get(name.strip()) + U64(int(offset or 0))

    def copy(self, to: str, source: str, size: str, there: str | None = None, wanted=None) -> None:
        """Bytes from global to shared memory; those beyond the `there` first ones are zeros."""
        from triton._C.libtriton import interpreter

        byte = np.arange(int(size), dtype=U64)
        inside = np.ones((self.count, int(size)), bool) if there is None else byte < self.get(there)[:, None]
        found = interpreter.load(self.address(source)[:, None] + byte, inside & wanted[:, None],
                                 np.zeros(inside.shape, np.uint8), np.dtype(np.uint8))  # fmt: skip
        _SHARED[(self.address(to)[:, None] + byte)[wanted]] = found[wanted]

    def load(self, op: str, into: str, source: str, wanted) -> None:
        size = 8 if "64" in op else 4
        for i, name in enumerate(_parts(into)):
            at = np.where(wanted, self.address(source), U64(0))[:, None] + U64(size * i) + np.arange(size, dtype=U64)
            found = np.ascontiguousarray(_SHARED[at]).view(f"u{size}")[:, 0].astype(U64)
            self.registers[name] = found if wanted.all() else np.where(wanted, found, self.registers[name])

    def multiply(self, op: str, args: list[str]) -> None:
        """mma.sync.m16n8k16, a warp at a time: lane 4 g + q has parts of rows g and g + 8 and of column g."""
        unpack = bf16 if ".bf16." in op else f16
        into, a, b, c = (_parts(arg) for arg in args)
        shape = (self.count // 32, 8, 4, 2)
        a, b = ([unpack(self.words(name)).astype(np.float64).reshape(shape) for name in names] for names in (a, b))
        rows = np.stack([np.concatenate(a[i::2], -2).reshape(shape[0], 8, 16) for i in (0, 1)], 1)  # [warps, 2, 8, k]
        columns = np.concatenate(b, -2).reshape(shape[0], 8, 16)
        product = np.einsum("wigk,wck->wigc", rows, columns).reshape(shape[0], 2, 8, 4, 2)
        for i, (name, start) in enumerate(zip(into, c, strict=True)):
            total = self.float(start) + product[:, i // 2, :, :, i % 2].ravel()
            self.registers[name] = _bits(total.astype(np.float32))

    def value(self, op: str, *args: str) -> np.ndarray:
        with np.errstate(all="ignore"):
            if op.startswith("mov"):
                return self.get(args[0])
            if op == "setp.ne.b32":
                return (self.words(args[0]) != self.words(args[1])).astype(U64)
            if op in ("mul.f32", "add.f32"):
                a, b = map(self.float, args)
                return _bits(a * b if op[0] == "m" else a + b)
            return self.word(op, *args).astype(U64)

    def word(self, op: str, *args: str) -> np.ndarray:
        """The results that are 32-bit words."""
        if op == "cvt.rn.bf16x2.f32":  # the upper one comes first
            return pack_bf16(np.stack([self.float(args[1]), self.float(args[0])], -1).astype(np.float64))
        words = [self.words(arg) for arg in args]
        match op:
            case "cvt.u16.u32":
                return words[0] & U32(0xFFFF)
            case "cvt.f32.f16":
                return f16(words[0])[:, 0].astype(np.float32).view(U32)
            case "cvt.rn.f16x2.e4m3x2":
                return pack_f16(fp8_values(words[0]))
            case "xor.b32":
                return words[0] ^ words[1]
            case "and.b32":
                return words[0] & words[1]
            case "shl.b32":
                return words[0] << words[1]
            case "shr.u32" | "shr.b32":
                return words[0] >> words[1]
            case "lop3.b32":
                return lop3(*words[:3], int(args[3], 0))
            case "prmt.b32" if args[2][0] != "$":
                return prmt(*words[:2], int(args[2], 0))
            case "prmt.b32":
                return prmt_by_thread(*words)
            case "mul.rn.f16x2":
                return pack_f16(f16(words[0]) * f16(words[1]))
            case "fma.rn.bf16x2":
                values = [bf16(each).astype(np.float64) for each in words]
                return pack_bf16(values[0] * values[1] + values[2])
        raise NotImplementedError(op)


def _parts(vector: str) -> list[str]:
    return [part.strip() for part in vector.strip("<>").split("|")]


def _bits(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}").astype(U64)
