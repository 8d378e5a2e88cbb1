"""Edits of compiled PTX, made mechanically: each changes one thing that a compiler or an author could get wrong.

Of statements that a kernel has dozens of, a fixed random sample is edited. Left alone are statements that do not run,
and instructions whose effect the simulator does not model: `griddepcontrol` (launches run one after the other) and
`setmaxnreg` (ptxas gives registers).
"""

import random
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ptxsim.descriptors import KINDS
from ptxsim.parse import Address, Immediate, Instruction, Pair, Register, Vector, parse


@dataclass(frozen=True)
class Change:
    """The text that stands for a statement. nth: which of equal statements of its line, from 0 on."""

    line: int
    nth: int
    statement: str
    new: str

    def applied(self, line: str) -> str:
        pattern = r"\s+".join(map(re.escape, self.statement.split())) + r"\s*;"
        found = list(re.finditer(pattern, line))[self.nth]
        return line[: found.start()] + self.new + line[found.end() :]


@dataclass(frozen=True)
class Edit:
    """An edit of a kernel's PTX. name: unique among the kernel's edits. kind: what it is an edit of."""

    name: str
    changes: tuple[Change, ...]
    kind: str = ""

    @property
    def statement(self) -> str:
        """The first statement that changes."""
        return self.changes[0].statement

    def applied(self, ptx: str) -> str:
        lines = ptx.split("\n")
        for change in self.changes:
            lines[change.line - 1] = change.applied(lines[change.line - 1])
        return "\n".join(lines)


class Code:
    """A kernel's PTX and its statements. executed: the indices of those that run."""

    def __init__(self, ptx: str, executed: Collection[int]) -> None:
        program = parse(ptx)
        self.name, self.instructions = program.name, program.instructions
        self.executed = [self.instructions[i] for i in sorted(executed)]

    @cached_property
    def _nth(self) -> dict[int, int]:
        """Of each statement, by identity: how many equal ones its line has before it."""
        seen: Counter[tuple[int, str]] = Counter()
        found = {}
        for one in self.instructions:
            found[id(one)] = seen[one.line, one.text]
            seen[one.line, one.text] += 1
        return found

    @cached_property
    def writers(self) -> dict[str, list[Instruction]]:
        """Of each register, the instructions that write it."""
        found: dict[str, list[Instruction]] = {}
        for one in self.instructions:
            for name in _written(one):
                found.setdefault(name, []).append(one)
        return found

    def find(self, *prefixes: str) -> list[Instruction]:
        """The statements that run and whose opcode begins with one of these."""
        return [one for one in self.executed if one.opcode.startswith(prefixes)]

    def is_sign(self, register: str) -> bool:
        """Whether a register is a number's sign, by which a division rounds negative numbers up: sizes have none."""
        return any(one.opcode.startswith("shr.s") and operands_of(one)[2] in ("31", "63")
                   for one in self.writers.get(register, []))  # fmt: skip

    def replaced(self, name: str, *pairs: tuple[Instruction, str]) -> Edit:
        """An edit that puts texts in the place of statements; "" removes one."""
        return Edit(name, tuple(Change(one.line, self._nth[id(one)], one.text, new) for one, new in pairs))

    def constant(self, text: str) -> int | None:
        """The value of an operand: of a constant, or of a register that only one `mov` of a constant writes."""
        if re.fullmatch(r"-?(0x)?[0-9a-fA-F]+", text):
            return int(text, 0)
        writers = self.writers.get(text, [])
        if len(writers) == 1 and writers[0].opcode.startswith("mov.") and writers[0].guard is None:
            source = writers[0].operands[1]
            return source.bits if isinstance(source, Immediate) else None
        return None


def _written(one: Instruction) -> list[str]:
    first = one.operands[0] if one.operands else None
    if one.opcode.startswith(("st.", "red.", "bra", "mbarrier.init", "tcgen05.st", "cp.", "bar")):
        return []
    parts = (first.first, first.second) if isinstance(first, Pair) else getattr(first, "parts", (first,))
    return [part.name for part in parts if isinstance(part, Register)]


# ---------------------------------------------------------------- the text of a statement


def _split(one: Instruction) -> tuple[str, list[str]]:
    """(guard and opcode, operands) of a statement."""
    found = re.fullmatch(r"((?:@\S+ )?\S+)\s*(.*)", one.text)
    assert found is not None
    operands = re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,\[\]{}]+)+", found[2])
    return found[1], [each.strip() for each in operands if each.strip()]


def operands_of(one: Instruction) -> list[str]:
    return _split(one)[1]


def with_operands(one: Instruction, new: dict[int, str]) -> str:
    """The statement with other operands, by index."""
    head, operands = _split(one)
    return f"{head} {', '.join(new.get(i, each) for i, each in enumerate(operands))};"


def with_opcode(one: Instruction, old: str, new: str) -> str:
    """The statement with a part of its opcode replaced."""
    head, operands = _split(one)
    return f"{head.replace(old, new)} {', '.join(operands)};"


def unguarded(one: Instruction) -> str:
    return re.sub(r"^@\S+ ", "", one.text) + ";"


def computed(one: Instruction, index: int, operation: str, constant: int) -> str:
    """The statement after an operation, such as "add.s32", on the register or constant in one of its operands.

    Braces keep the changed register from the rest of the kernel. In a vector, the last register is changed.
    """
    text, registers = operands_of(one)[index], _registers(one.operands[index])
    source, bits = text, 64 if operation.endswith("64") else 32
    if registers:
        source, bits = registers[-1].name.split(".")[0], registers[-1].bits
    kind, number = operation.split(".")
    operation = f"{kind}.{number[0]}{bits}"
    changed = "edited".join(re.split(rf"{source}\b(?!.*{source}\b)", text))
    begin = f"{{ .reg .b{bits} edited; {operation} edited, {source}, {constant};"
    return f"{begin} {with_operands(one, {index: changed})} }}"


def _registers(operand: object) -> list[Register]:
    match operand:
        case Register():
            return [operand]
        case Address():
            return [*_registers(operand.base), *_registers(operand.coordinates)]
        case Vector():
            return [each for part in operand.parts for each in _registers(part)]
    return []


def _sample(found: Sequence[Instruction], most: int) -> list[tuple[str, Instruction]]:
    """("2 of 7", statement) of at most so many statements, always the same ones."""
    chosen = range(len(found))
    if len(found) > most:
        chosen = sorted(random.Random(len(found)).sample(chosen, most))
    return [(f"{i + 1} of {len(found)}", found[i]) for i in chosen]


Edits = Iterator[Edit]
_GENERATORS: list[Callable[[Code], Edits]] = []


def _generator(function: Callable[[Code], Edits]) -> Callable[[Code], Edits]:
    _GENERATORS.append(function)
    return function


def edits(ptx: str, executed: Collection[int], most: int) -> list[Edit]:
    """The edits of a kernel. executed: the indices of the statements that run. most: how many edits of each kind."""
    code, found = Code(ptx, executed), []
    for generator in _GENERATORS:
        kind = generator.__name__.strip("_").replace("_", " ")
        made = [replace(edit, kind=kind) for edit in generator(code) if edit.applied(ptx) != ptx]
        seed = f"{code.name} {kind} {len(made)}"
        found += made if len(made) <= most else random.Random(seed).sample(made, most)
    names = Counter(edit.name for edit in found)
    assert len(names) == len(found), names.most_common(3)
    return found


def _removed(code: Code, what: str, most: int, *prefixes: str) -> Edits:
    for which, one in _sample(code.find(*prefixes), most):
        yield code.replaced(f"{what} {which} removed", (one, ""))


# ---------------------------------------------------------------- waits, barriers and fences


@_generator
def _waits(code: Code) -> Edits:
    waits = code.find("mbarrier.try_wait")
    for which, one in _sample(waits, 6):
        again = code.instructions[code.instructions.index(one) + 1]
        yield code.replaced(f"mbarrier wait {which} removed", (one, ""), (again, ""))
        yield code.replaced(f"mbarrier wait {which}: parity flipped", (one, computed(one, 2, "xor.b32", 1)))
        yield code.replaced(f"mbarrier wait {which}: at the mbarrier behind", (one, computed(one, 1, "add.s32", 8)))


@_generator
def _barriers(code: Code) -> Edits:
    barriers = code.find("bar.sync", "barrier.sync")
    for which, one in _sample(barriers, 10):
        yield code.replaced(f"barrier {which} removed", (one, ""))
    yield from _removed(code, "bar.warp.sync", 4, "bar.warp.sync")


@_generator
def _fences(code: Code) -> Edits:
    yield from _removed(code, "fence.proxy.async", 12, "fence.proxy.async")
    yield from _removed(code, "acquire of a tensor map", 5, "fence.proxy.tensormap")
    yield from _removed(code, "release of a tensor map", 2, "tensormap.cp_fenceproxy")
    yield from _removed(code, "tcgen05.wait::st", 5, "tcgen05.wait::st")
    yield from _removed(code, "tcgen05.wait::ld", 2, "tcgen05.wait::ld")


@_generator
def _arrivals(code: Code) -> Edits:
    for which, one in _sample(code.find("tcgen05.commit"), 4):
        yield code.replaced(f"commit {which} removed", (one, ""))
        yield code.replaced(f"commit {which}: to the mbarrier behind", (one, computed(one, 0, "add.s32", 8)))
    for which, one in _sample(code.find("mbarrier.arrive."), 4):
        yield code.replaced(f"arrival {which} removed", (one, ""))
        if "expect_tx" in one.opcode:
            for tile in (2048, -2048):
                count = str(int(operands_of(one)[2]) + tile)
                yield code.replaced(f"arrival {which}: {tile:+d} bytes", (one, with_operands(one, {2: count})))
    for which, one in _sample(code.find("mbarrier.init"), 4):
        yield code.replaced(f"mbarrier init {which} removed", (one, ""))
        more = str(int(operands_of(one)[1]) + 1)
        yield code.replaced(f"mbarrier init {which}: one arrival more", (one, with_operands(one, {1: more})))
    yield from _removed(code, "mbarrier inval", 2, "mbarrier.inval")


@_generator
def _clusters(code: Code) -> Edits:
    """Of kernels whose programs have several CTAs: what reaches the other one."""
    arrivals = code.find("barrier.cluster.arrive")
    for which, one in _sample(arrivals, 4):
        wait = code.instructions[code.instructions.index(one) + 1]
        yield code.replaced(f"cluster barrier {which} removed", (one, ""), (wait, ""))
    casts = [one for one in code.executed if ".multicast::cluster" in one.opcode]
    for which, one in _sample(casts, 4):
        mask = len(operands_of(one)) - 1
        for rank in (0, 1):
            new = with_operands(one, {mask: str(1 << rank)})
            yield code.replaced(f"multicast {which}: to CTA {rank} alone", (one, new))
    masks = ((one, code.constant(operands_of(one)[2]) or 0) for one in code.find("and.b32"))
    ranks = [one for one, mask in masks if mask & 0xFFFFFFF0 == 0xFEFFFFF0]
    for which, one in _sample(ranks, 6):
        yield code.replaced(f"address in the first CTA {which}: in the own one", (one, with_operands(one, {2: "-1"})))


@_generator
def _groups(code: Code) -> Edits:
    for which, one in _sample(code.find("cp.async.wait_group"), 4):
        more = str(int(operands_of(one)[0]) + 1)
        yield code.replaced(f"cp.async wait {which}: one group fewer", (one, with_operands(one, {0: more})))
        yield code.replaced(f"cp.async wait {which} removed", (one, ""))
    yield from _removed(code, "cp.async commit", 6, "cp.async.commit_group")
    yield from _removed(code, "bulk wait", 8, "cp.async.bulk.wait_group")
    yield from _removed(code, "bulk commit", 4, "cp.async.bulk.commit_group")


# ---------------------------------------------------------------- matrix units


@_generator
def _instruction_descriptors(code: Code) -> Edits:
    products = [one for one in code.find("tcgen05.mma") if code.constant(operands_of(one)[3]) is not None]
    of_value: dict[int, list[Instruction]] = {}
    for one in products:
        of_value.setdefault(code.constant(operands_of(one)[3]) or 0, []).append(one)
    for value, having in of_value.items():
        kind, at = KINDS[having[0].opcode.split(".kind::")[1]], 0
        number = f"{list(of_value).index(value) + 1} of {len(of_value)}"
        for name, bits in kind.fields:
            new = value ^ 1 << at
            pairs = [(one, with_operands(one, {3: str(new)})) for one in having]
            what = "reserved" if name == "-" else name
            yield code.replaced(f"instruction descriptor {number}: {what}, bit {at} flipped", *pairs)
            at += bits


@_generator
def _matrix_descriptors(code: Code) -> Edits:
    for one in code.find("tcgen05.mma")[:1]:
        for name, index in (("A", 1), ("B", 2)):
            if isinstance(one.operands[index], Register):  # in shared memory
                for what, new in _of_descriptor(one, index, swizzled=True):
                    yield code.replaced(f"descriptor of {name} of the first product: {what}", (one, new))
    for which, one in _sample(code.find("tcgen05.cp"), 1):
        for what, new in _of_descriptor(one, 1, swizzled=False):
            yield code.replaced(f"descriptor of copy of scales {which}: {what}", (one, new))


def _of_descriptor(one: Instruction, index: int, *, swizzled: bool) -> Iterator[tuple[str, str]]:
    layouts = ((0, "no swizzle"), (2, "swizzle of 128 bytes"), (4, "swizzle of 64 bytes"), (6, "swizzle of 32 bytes"))
    for what, operation, constant in (
        ("start 16 bytes later", "add.s64", 1), ("start 32 bytes later", "add.s64", 2),
        ("leading offset", "xor.b64", 1 << 16), ("stride 16 bytes more", "add.s64", 1 << 32),
        ("version", "xor.b64", 1 << 46), ("base offset", "xor.b64", 1 << 49), ("absolute address", "xor.b64", 1 << 52),
        *((what, "xor.b64", (layout ^ (2 if swizzled else 0)) << 61) for layout, what in layouts
          if layout != (2 if swizzled else 0)),
    ):  # fmt: skip
        yield what, computed(one, index, operation, constant)


@_generator
def _products(code: Code) -> Edits:
    products = code.find("tcgen05.mma")
    for which, one in _sample(products, 3):
        operands = operands_of(one)
        yield code.replaced(f"product {which} removed", (one, ""))
        if len(operands) == 7:
            swapped = with_operands(one, {4: operands[5], 5: operands[4]})
            yield code.replaced(f"product {which}: scales of A and B swapped", (one, swapped))
            for name, index in (("A", 4), ("B", 5)):
                moved = computed(one, index, "add.s32", 1)
                yield code.replaced(f"product {which}: scales of {name} 32 rows further", (one, moved))
        yield code.replaced(f"product {which}: sums 8 columns further", (one, computed(one, 0, "add.s32", 8)))
        flipped = f"{{ .reg .pred edited; not.pred edited, {operands[-1]}; " + \
            with_operands(one, {len(operands) - 1: "edited"}) + " }"  # fmt: skip
        yield code.replaced(f"product {which}: adds where it must not, and the reverse", (one, flipped))
    for one in products[:1]:
        if one.guard is not None:
            yield code.replaced("first product: by all threads", (one, unguarded(one)))


@_generator
def _tensor_memory(code: Code) -> Edits:
    for which, one in _sample(code.find("tcgen05.cp"), 2):
        yield code.replaced(f"copy of scales {which} removed", (one, ""))
        yield code.replaced(f"copy of scales {which}: 32 rows further", (one, computed(one, 0, "add.s32", 1)))
        yield code.replaced(f"copy of scales {which}: from the next 512 bytes", (one, computed(one, 1, "add.s64", 32)))
    for which, one in _sample(code.find("tcgen05.ld"), 3):
        yield code.replaced(f"load of sums {which}: 16 columns further", (one, computed(one, 1, "add.s32", 16)))
        yield code.replaced(f"load of sums {which}: 32 lanes further", (one, computed(one, 1, "add.s32", 32 << 16)))
    for which, one in _sample(code.find("tcgen05.st"), 3):
        yield code.replaced(f"store to tensor memory {which} removed", (one, ""))
        further = computed(one, 0, "add.s32", 16)
        yield code.replaced(f"store to tensor memory {which}: 16 columns further", (one, further))
    for one in code.find("tcgen05.alloc"):
        half = str(int(operands_of(one)[1]) // 2)
        yield code.replaced("half of tensor memory allocated", (one, with_operands(one, {1: half})))
    yield from _removed(code, "tcgen05.dealloc", 2, "tcgen05.dealloc")


# ---------------------------------------------------------------- the tensor memory accelerator


@_generator
def _tensor_maps(code: Code) -> Edits:
    fields = code.find("tensormap.replace.tile.")
    by_name: dict[str, list[Instruction]] = {}
    for one in fields:
        by_name.setdefault(one.opcode.split(".")[3], []).append(one)
    for name, having in by_name.items():
        for which, one in _sample(having, 3):
            for what, operation, constant in _MAP_CHANGES[name]:
                new = computed(one, len(one.operands) - 1, operation, constant)
                yield code.replaced(f"tensor maps' {name} {which}: {what}", (one, new))
        for which, one in _sample(having, 1):
            yield code.replaced(f"tensor maps' {name} {which}: not set", (one, ""))
    for which, one in _sample([one for one in code.find("st.shared::cta.b32") if "%tid" not in one.text][:5], 2):
        yield code.replaced(f"tensor maps' clearing {which} removed", (one, ""))


_MAP_CHANGES: dict[str, tuple[tuple[str, str, int], ...]] = {
    "global_address": (("16 bytes later", "add.s64", 16),),
    "rank": (("one less", "add.s32", -1),),
    "box_dim": (("halved", "shr.b32", 1),),
    "global_dim": (("one less", "add.s32", -1), ("one more", "add.s32", 1)),
    "global_stride": (("16 bytes more", "add.s64", 16),),
    "element_stride": (("2", "add.s32", 1),),
    "elemtype": (("another type", "xor.b32", 1),),
    "swizzle_mode": (("another mode", "xor.b32", 1), ("none", "and.b32", 0)),
}  # fmt: skip


@_generator
def _tensor_copies(code: Code) -> Edits:
    loads = [one for one in code.find("cp.async.bulk.tensor") if "complete_tx" in one.opcode]
    for which, one in _sample(loads, 3):
        yield code.replaced(f"tensor copy {which} removed", (one, ""))
        for rows in (16, 1):
            yield code.replaced(f"tensor copy {which}: last coordinate + {rows}", (one, _coordinate(one, rows)))
        yield code.replaced(f"tensor copy {which}: to 128 bytes later", (one, computed(one, 0, "add.s32", 128)))
        behind = computed(one, 2, "add.s32", 8)
        yield code.replaced(f"tensor copy {which}: completes on the mbarrier behind", (one, behind))
    for one in loads[:1]:
        yield code.replaced("first tensor copy: by all threads", (one, unguarded(one)))
    stores = [one for one in code.find("cp.async.bulk.tensor") if ".bulk_group" in one.opcode]
    for which, one in _sample(stores, 2):
        yield code.replaced(f"tensor store {which} removed", (one, ""))
        yield code.replaced(f"tensor store {which}: from 128 bytes later", (one, computed(one, 1, "add.s32", 128)))


def _coordinate(one: Instruction, by: int) -> str:
    """The statement with the last coordinate moved."""
    index = next(i for i, each in enumerate(operands_of(one)) if "{" in each)
    return computed(one, index, "add.s32", by)


@_generator
def _thread_copies(code: Code) -> Edits:
    for which, one in _sample(code.find("cp.async.ca", "cp.async.cg"), 3):
        size = int(operands_of(one)[2], 0)
        yield code.replaced(f"cp.async {which} removed", (one, ""))
        yield code.replaced(f"cp.async {which}: to {size} bytes later", (one, computed(one, 0, "add.s32", size)))
        yield code.replaced(f"cp.async {which}: from {size} bytes later", (one, computed(one, 1, "add.s64", size)))
        if len(operands_of(one)) == 4:
            yield code.replaced(f"cp.async {which}: unmasked", (one, with_operands(one, {3: str(size)})))


# ---------------------------------------------------------------- loads, stores and masks of threads


@_generator
def _accesses(code: Code) -> Edits:
    for space in ("global", "shared"):
        for base, index in (("ld", 1), ("st", 0)):
            found = [one for one in code.find(f"{base}.{space}") if "global_smem" not in one.text]
            for which, one in _sample(found, 3):
                if f"{base}.shared::cta.b32" in one.text and code.find("tensormap"):
                    continue  # the clearing of a tensor map
                size = int(one.opcode[-2:].lstrip("bfsu")) // 8 * int((re.findall(r"\.v(\d)", one.opcode) or [1])[0])
                new = computed(one, index, "add.s64" if space == "global" else "add.s32", size)
                yield code.replaced(f"{base}.{space} {which}: {size} bytes further", (one, new))
                values = operands_of(one)[1 - index]
                if values.count(",") == 3 and len(set(values.strip("{} ").split(", "))) == 4:
                    parts = [each.strip() for each in values.strip("{}").split(",")]
                    swapped = "{" + ", ".join([parts[1], parts[0], *parts[2:]]) + "}"
                    new = with_operands(one, {1 - index: swapped})
                    yield code.replaced(f"{base}.{space} {which}: two registers swapped", (one, new))
                if base == "st" and space == "global":
                    yield code.replaced(f"st.global {which} removed", (one, ""))
    for which, one in _sample(code.find("stmatrix", "ldmatrix"), 2):
        index = 0 if one.opcode.startswith("st") else 1
        yield code.replaced(f"matrix of a warp {which}: 16 bytes further", (one, computed(one, index, "add.s32", 16)))


_NEGATED = {"lt": "ge", "ge": "lt", "le": "gt", "gt": "le", "eq": "ne", "ne": "eq"}
_NEIGHBOUR = {"lt": "le", "le": "lt", "gt": "ge", "ge": "gt"}


@_generator
def _masks(code: Code) -> Edits:
    guarding = _guards_of_accesses(code)
    for which, one in _sample(guarding, 6):
        compare = one.opcode.split(".")[1]
        negated = with_opcode(one, f"setp.{compare}", f"setp.{_NEGATED[compare]}")
        yield code.replaced(f"mask {which}: inverted", (one, negated))
        if compare in _NEIGHBOUR:
            neighbour = with_opcode(one, f"setp.{compare}", f"setp.{_NEIGHBOUR[compare]}")
            yield code.replaced(f"mask {which}: {compare} -> {_NEIGHBOUR[compare]}", (one, neighbour))


def _guards_of_accesses(code: Code) -> list[Instruction]:
    """The comparisons that decide whether or how many bytes threads access in global memory."""
    waiting, seen = [], set()
    for one in code.find("ld.global", "st.global", "red.global", "cp.async.ca", "cp.async.cg"):
        if one.guard is not None:
            waiting.append(one.guard.name)
        if one.opcode.startswith("cp.async") and len(one.operands) == 4 and isinstance(one.operands[3], Register):
            waiting.append(one.operands[3].name)
    found = []
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        for one in code.writers.get(name, []):
            if one.opcode.startswith("setp.") and one.opcode.split(".")[1] in _NEGATED and one not in found:
                found.append(one)
            elif one.opcode.startswith(("and.pred", "or.pred", "not.pred", "selp.b32", "mov.pred")):
                waiting += [each.name for each in one.operands[1:] if isinstance(each, Register)]
    return sorted(found, key=lambda one: one.line)


# ---------------------------------------------------------------- exchange between threads, arithmetic


@_generator
def _exchanges(code: Code) -> Edits:
    for which, one in _sample(code.find("shfl.sync.bfly", "shfl.sync.up"), 4):
        distance = int(operands_of(one)[2], 0)
        other = str(distance // 2 or 2)
        yield code.replaced(f"shuffle {which}: distance {distance} -> {other}", (one, with_operands(one, {2: other})))
    for which, one in _sample(code.find("redux.sync"), 3):
        operation = one.opcode.split(".")[2]
        new = {"max": "min", "min": "max", "add": "max"}[operation]
        yield code.replaced(f"redux {which}: {operation} -> {new}", (one, with_opcode(one, operation, new)))


@_generator
def _arithmetic(code: Code) -> Edits:
    """Constants by which numbers are scaled and rounded."""
    having = [one for one in code.executed if re.search(r"\b0f(?!00000000)[0-9A-F]{8}", one.text)]
    for which, one in _sample(having, 8):
        constants = re.findall(r"\b0f(?!00000000)[0-9A-F]{8}", one.text)
        value = int(constants[0][2:], 16)
        for what, new in (("one bit up", value + 1), ("doubled", value + 0x00800000)):
            if new < 0x7F800000:
                text = one.text.replace(constants[0], f"0f{new:08X}") + ";"
                yield code.replaced(f"float constant {which}: {what}", (one, text))
    for which, one in _sample(code.find("max.NaN", "max.u32", "min.NaN", "max.f32"), 4):
        yield code.replaced(f"maximum or minimum {which}: the other", (one, _other_extreme(one)))
    for which, one in _sample(code.find("cvt.rn.satfinite", "cvt.rs.satfinite"), 3):
        operands = operands_of(one)
        if len(operands) > 2 and not operands[1].startswith("{"):
            swapped = with_operands(one, {1: operands[2], 2: operands[1]})
            yield code.replaced(f"conversion {which}: operands swapped", (one, swapped))
        elif operands[1].startswith("{"):
            parts = [each.strip() for each in operands[1].strip("{}").split(",")]
            reverse = "{" + ", ".join(parts[::-1]) + "}"
            yield code.replaced(f"conversion {which}: operands reversed", (one, with_operands(one, {1: reverse})))
    for which, one in _sample(code.find("prmt.b32"), 3):
        selector = operands_of(one)[3].rstrip("U")
        if re.fullmatch(r"0x[0-9a-fA-F]+", selector):
            new = f"0x{int(selector, 16) ^ 1:04x}U"
            yield code.replaced(f"permutation {which}: another byte", (one, with_operands(one, {3: new})))


def _other_extreme(one: Instruction) -> str:
    old = "max" if "max" in one.opcode else "min"
    return with_opcode(one, old, "min" if old == "max" else "max")


# ---------------------------------------------------------------- whole numbers


@_generator
def _tile_order(code: Code) -> Edits:
    """Constants of the walk over tiles, and of rings of buffers."""
    for which, one in _sample([one for one in code.find("min.s32") if operands_of(one)[2].isdigit()], 4):
        last = with_operands(one, {2: str(max(int(operands_of(one)[2]) // 2, 1))})
        yield code.replaced(f"bound of a walk {which} halved", (one, last))
    walks = [one for one in code.find("rem.s32", "div.s32")]
    for which, one in _sample(walks, 4):
        operands = operands_of(one)
        other = "div" if one.opcode.startswith("rem") else "rem"
        new = with_opcode(one, one.opcode.split(".")[0], other)
        yield code.replaced(f"walk over tiles {which}: {one.opcode[:3]} -> {other} of {operands[2][:1]}", (one, new))
    for which, one in _sample(_wraps(code), 6):
        bound = int(operands_of(one)[2])
        for new in (bound + 1, bound - 1):
            yield code.replaced(f"ring of buffers {which}: {bound} -> {new}", (one, with_operands(one, {2: str(new)})))


def _wraps(code: Code) -> list[Instruction]:
    """Comparisons that send an index of a ring back to 0."""
    selected = {one.operands[3].name for one in code.find("selp.b32")
                if operands_of(one)[1] == "0" and isinstance(one.operands[3], Register)}  # fmt: skip
    return [one for one in code.find("setp.eq.b32", "setp.gt.s32")
            if operands_of(one)[2].isdigit() and operands_of(one)[0] in selected]  # fmt: skip


@_generator
def _whole_numbers(code: Code) -> Edits:
    having = [one for one in code.find("add.s32", "add.s64", "shl.b32", "shr.u32", "bfe.u32", "and.b32", "or.b32",
                                       "mad.lo.s32", "mul.lo.s32", "mul.wide", "mad.wide", "xor.b32")
              if re.fullmatch(r"-?\d+", operands_of(one)[2]) and not code.is_sign(operands_of(one)[1])]  # fmt: skip
    for which, one in _sample(having, 8):
        value = int(operands_of(one)[2])
        new = value + _other(one.opcode, value)
        edited = with_operands(one, {2: str(new)})
        yield code.replaced(f"whole number {which}: {one.opcode} by {value} -> {new}", (one, edited))


def _other(opcode: str, value: int) -> int:
    """What is added to a constant: the least that matters, for the instruction that has it."""
    if opcode.startswith("add") and value > 0 and value & (value + 1) == 0:
        return -value  # it rounds a size up
    if opcode.startswith("add") and value % 16 == 0:
        return 16
    lowest = value & -value
    if opcode.startswith(("and", "or", "xor")) and value:
        return lowest if value > 0 else -lowest  # -128 keeps all but 7 bits, -256 all but 8
    return 1
