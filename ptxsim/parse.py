"""Parse the PTX of one kernel into instructions with typed operands.

The grammar is the part of the PTX ISA (https://docs.nvidia.com/cuda/parallel-thread-execution) that Triton emits.
Registers and labels that inline assembly declares within braces are renamed, so that every name is unique.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Register:
    """A register of every thread. bits: its width; 1 for a predicate. negated: whether the operand is `!%p`."""

    name: str
    bits: int
    negated: bool = False


@dataclass(frozen=True)
class Immediate:
    """A constant. bits: its two's complement in 64 bits; a `0f` or `0d` constant has the bits of the float."""

    bits: int


@dataclass(frozen=True)
class Special:
    """A special register, such as `%tid.x`."""

    name: str


@dataclass(frozen=True)
class Symbol:
    """A parameter of the kernel, or the address of an array."""

    name: str


@dataclass(frozen=True)
class Label:
    """A place in the code, or a table of them."""

    name: str


@dataclass(frozen=True)
class Vector:
    """Operands in braces."""

    parts: tuple["Operand", ...]


@dataclass(frozen=True)
class Address:
    """`[base + offset]`; with coordinates, `[base, {x, y}]`: an element of a tensor map."""

    base: "Operand"
    offset: int = 0
    coordinates: Vector | None = None


@dataclass(frozen=True)
class Pair:
    """`a|b`: two results, or a result and a predicate."""

    first: "Operand"
    second: "Operand"


@dataclass(frozen=True)
class Unused:
    """`_`: a discarded result."""


Operand = Register | Immediate | Special | Symbol | Label | Vector | Address | Pair | Unused


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    line: its line in the PTX, from 1 on. guard: its predicate. source: "file:line" of the source that it comes from,
    with those of the functions into which that was inlined; empty if the PTX does not say.
    """

    line: int
    text: str
    opcode: str
    operands: tuple[Operand, ...]
    guard: Register | None = None
    source: str = ""

    def __str__(self) -> str:
        return f"line {self.line}: {self.text}" + (f", of {self.source}" if self.source else "")


@dataclass(frozen=True)
class Parameter:
    """A parameter of a kernel. is_float: whether it is declared as a float of 32 or 64 bits."""

    name: str
    nbytes: int
    is_float: bool


@dataclass(frozen=True)
class Program:
    """A kernel.

    parameters: in order. threads: threads of a program. cluster: programs of a cluster. static_shared,
    local: the declared arrays in shared memory, and in every thread's local memory, as bytes by name.
    constants: the contents of the module's arrays in global memory, by name. registers: of a thread at the start; 0 if
    the PTX does not say. labels: indices into `instructions`. tables: the labels of each branch table. leaders: the
    indices at which basic blocks begin.
    """

    name: str
    parameters: tuple[Parameter, ...]
    threads: int
    cluster: int
    static_shared: dict[str, int]
    local: dict[str, int]
    constants: dict[str, bytes]
    registers: int
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]
    tables: dict[str, tuple[str, ...]]
    leaders: frozenset[int]

    @cached_property
    def has_tensor_fences(self) -> bool:
        """Whether the kernel has any `tcgen05.fence`."""
        return any(one.opcode.startswith("tcgen05.fence") for one in self.instructions)

    @cached_property
    def widths(self) -> dict[str, int]:
        """The bits of each register, by name."""
        return {each.name: each.bits for one in self.instructions for each in operand_registers(one)}


# Instructions after which a warp may be at another instruction, or has to wait.
_ENDS_BLOCK = ("bra", "brx", "ret", "exit", "bar", "barrier", "mbarrier", "setmaxnreg")
_OF_PAIRS = re.compile(r"tcgen05\.(alloc|dealloc|relinquish_alloc_permit)\.cta_group::2")


def operand_registers(one: Instruction) -> list[Register]:
    """The registers of an instruction, including those in addresses, vectors and its guard."""
    found: list[Register] = []
    waiting: list[Operand] = [*one.operands, *([one.guard] if one.guard else [])]
    while waiting:
        match waiting.pop():
            case Register() as register:
                found.append(register)
            case Vector(parts=parts):
                waiting += parts
            case Address(base=base, coordinates=coordinates):
                waiting += [base, *([coordinates] if coordinates else [])]
            case Pair(first=first, second=second):
                waiting += [first, second]
    return found


def parse(text: str) -> Program:
    """Parse PTX with one entry function. Raises ValueError, naming the line, for anything else."""
    found = re.search(r"\.entry (\w+)\(([^)]*)\)([^{]*)\{", text)
    if found is None:
        raise ValueError("the PTX has no .entry function")
    sizes = {"8": 1, "16": 2, "32": 4, "64": 8}
    parameters = [
        Parameter(name, int(count) if count else sizes[bits], kind == "f")
        for kind, bits, name, count in re.findall(r"\.param .*?\.(\w)(\d+)(?: [^\n]*?)? (\w+)(?:\[(\d+)\])?\s*(?:,|$)",
                                            found[2], re.M)
    ]  # fmt: skip
    threads = re.search(r"\.(?:req|max)ntid (\d+)", found[3])
    cluster = re.search(r"\.reqnctapercluster (\d+)", found[3])
    registers = re.search(r"\.maxnreg (\d+)", found[3])
    if threads is None:
        raise ValueError(f"{found[1]} has no .reqntid")
    constants = {
        name: bytes(map(int, values.split(","))).ljust(int(count), b"\0")
        for name, count, values in _CONSTANT.findall(text, 0, found.start())
    }
    body = _Body(text, found.end(), {each.name for each in parameters} | constants.keys())
    targets = {one.operands[0] for one in body.instructions if one.opcode in ("bra", "bra.uni")}
    named = {target.name for target in targets if isinstance(target, Label)}.union(*body.tables.values())
    leaders = {0, *(body.labels[name] for name in named)}
    for index, one in enumerate(body.instructions):
        if one.opcode.split(".")[0] in _ENDS_BLOCK or _OF_PAIRS.match(one.opcode):
            leaders |= {index, index + 1} if one.opcode.startswith("mbarrier.try_wait") else {index + 1}
    return Program(found[1], tuple(parameters), int(threads[1]), int(cluster[1]) if cluster else 1,
                   body.shared, body.local, constants, int(registers[1]) if registers else 0,
                   tuple(body.instructions), body.labels, body.tables, frozenset(leaders))  # fmt: skip


_WIDTH = re.compile(r"\.(?:[busf](\d+)(x2)?|bf16(x2)?|(pred))$")


def _bits(kind: str) -> int:
    """The width of a register's declared type."""
    found = _WIDTH.match(kind)
    if found is None:
        raise ValueError(f"a register of type {kind}")
    if found[4]:
        return 1
    return int(found[1] or 16) * (2 if found[2] or found[3] else 1)


class _Body:
    """The statements of the function whose text begins at `start`, after its opening brace."""

    def __init__(self, text: str, start: int, symbols: set[str]) -> None:
        self.instructions: list[Instruction] = []
        self.labels: dict[str, int] = {}
        self.tables: dict[str, tuple[str, ...]] = {}
        self.shared: dict[str, int] = {}
        self.local: dict[str, int] = {}
        self.symbols = symbols | {"global_smem"}
        # An entry for each open brace: the registers and the labels that it declares, by the name in the text.
        self.scopes: list[dict[str, Register]] = [{}]
        self.local_labels: list[dict[str, str]] = [{}]
        self.opened = 0  # the number of scopes opened so far
        self.sources = _Sources(text)
        for line, statement in self._statements(text, start):
            try:
                self._statement(line, statement)
            except (ValueError, KeyError) as error:
                raise ValueError(f"line {line}: {statement}: {error}") from error

    def _statements(self, text: str, start: int) -> Iterator[tuple[int, str]]:
        """(line, statement) for declarations and instructions; opens and closes scopes, and places labels."""
        at, line = start, text.count("\n", 0, start) + 1
        while True:
            blank = _BLANK.match(text, at)
            assert blank is not None
            line += text.count("\n", at, blank.end())
            self.sources.pass_over(blank[0])
            at = blank.end()
            if at == len(text):
                raise ValueError(f"line {line}: the function has no closing brace")
            if text[at] == "{":
                self.opened += 1
                self.scopes.append({})
                self.local_labels.append(self._labels_of_scope(text, at + 1))
                at += 1
            elif text[at] == "}":
                self.scopes.pop()
                self.local_labels.pop()
                at += 1
                if not self.scopes:
                    return
            elif label := _LABEL.match(text, at):
                name = self.local_labels[-1].get(label[1], label[1])
                at = label.end()
                if table := _TABLE.match(text, at):
                    self.tables[name] = tuple(re.findall(r"[$\w]+", table[1]))
                    line += text.count("\n", at, table.end())
                    at = table.end()
                else:
                    self.labels[name] = len(self.instructions)
            else:
                end = text.index(";", at)
                statement = _COMMENT.sub(" ", text[at:end])
                yield line, " ".join(statement.split())
                line += text.count("\n", at, end)
                at = end + 1

    def _labels_of_scope(self, text: str, start: int) -> dict[str, str]:
        """The labels that a nested scope declares -> unique names."""
        depth, found = 0, {}
        for token in _SCOPE_TOKEN.finditer(text, start):
            if token[1]:
                if depth == 0:
                    found[token[1]] = f"{token[1]}.{self.opened}"
            elif token[0] in "{}":
                depth += 1 if token[0] == "{" else -1
                if depth < 0:
                    break
        return found

    def _statement(self, line: int, statement: str) -> None:
        if statement.startswith(".reg"):
            _, kind, names = statement.split(None, 2)
            for name in names.split(","):
                count = re.fullmatch(r"(.+)<(\d+)>", name.strip())
                every = [f"{count[1]}{i}" for i in range(int(count[2]))] if count else [name.strip()]
                for one in every:
                    unique = one if len(self.scopes) == 1 else f"{one}.{self.opened}"
                    self.scopes[-1][one] = Register(unique, _bits(kind))
            return
        if array := _ARRAY.fullmatch(statement):
            (self.shared if array[1] == "shared" else self.local)[array[2]] = int(array[3])
            self.symbols.add(array[2])
            return
        if declared := _PARAMETER.fullmatch(statement):
            self.symbols.add(declared[1])
            return
        if statement.startswith("."):
            raise ValueError("an unknown directive")
        text, guard = statement, None
        if statement[0] == "@":
            name, statement = statement[1:].split(None, 1)
            found_guard = self._operand(name)
            assert isinstance(found_guard, Register)
            guard = found_guard
        opcode, _, rest = statement.partition(" ")
        if opcode in ("call", "call.uni"):  # of a function without results, with the names of its parameters
            rest = rest.replace("(", "{").replace(")", "}")
        operands = tuple(self._operand(each) for each in _split(rest))
        if opcode in ("bra", "bra.uni"):
            operands = (Label(self._label(rest.strip())),)
        elif opcode == "brx.idx":
            operands = (operands[0], Label(rest.split(",")[1].strip()))
        self.instructions.append(Instruction(line, text, opcode, operands, guard, self.sources.present))

    def _label(self, name: str) -> str:
        for scope in reversed(self.local_labels):
            if name in scope:
                return scope[name]
        return name

    def _operand(self, text: str) -> Operand:
        text = text.strip()
        if text == "_":
            return Unused()
        if text[0] == "{":
            return Vector(tuple(self._operand(each) for each in _split(text[1:-1])))
        if text[0] == "[":
            inner = _split(text[1:-1])
            base, _, offset = inner[0].partition("+")
            coordinates = self._operand(inner[1]) if len(inner) > 1 else None
            assert coordinates is None or isinstance(coordinates, Vector)
            return Address(self._operand(base), int(offset or "0", 0), coordinates)
        if "|" in text:
            first, second = text.split("|")
            return Pair(self._operand(first), self._operand(second))
        if text[0] == "!":
            register = self._operand(text[1:])
            assert isinstance(register, Register)
            return Register(register.name, register.bits, negated=True)
        if text.startswith(("0f", "0d")):
            return Immediate(int(text[2:], 16))
        if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)U?", text):
            return Immediate(int(text.rstrip("U"), 0) % 2**64)
        for scope in reversed(self.scopes):
            if text in scope:
                return scope[text]
        if text[0] == "%":
            return Special(text)
        if text in self.symbols:
            return Symbol(text)
        return Label(text)


class _Sources:
    """The place in the source of the instructions that follow. present: as of `Instruction.source`."""

    def __init__(self, text: str) -> None:
        self.present = ""
        self._files = {number: path.rpartition("/")[2] for number, path in _FILE.findall(text)}
        self._of: dict[tuple[str, str], str] = {}  # the whole chain of each place, which others are inlined at

    def pass_over(self, text: str) -> None:
        """Read the last `.loc` of what lies between two statements."""
        for found in _LOC.finditer(text):
            file, line, outer_file, outer_line = found.groups()
            place = f"{self._files.get(file, file)}:{line}"
            if outer_file:
                outer = self._of.get(
                    (outer_file, outer_line), f"{self._files.get(outer_file, outer_file)}:{outer_line}"
                )
                place = outer if outer.startswith(f"{place} ") else f"{place} in {outer}"
            self._of[file, line] = self.present = place


_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', re.M)
_LOC = re.compile(r"\.loc\s+(\d+) (\d+) \d+(?:, function_name [^,]*, inlined_at (\d+) (\d+))?")
_COMMENT = re.compile(r"//[^\n]*|^\s*\.loc\s[^\n]*$", re.M)
_PARAMETER = re.compile(r"\.param (?:\.align \d+ )?\.b\d+ (\w+)")  # of a call
_ARRAY = re.compile(r"\.(shared|local) (?:\.align \d+ )?\.b8 (\w+)\[(\d+)\]")
_CONSTANT = re.compile(r"^\.global (?:\.align \d+ )?\.b8 ([$\w]+)\[(\d+)\] = \{([\d, ]+)\};", re.M)
_BLANK = re.compile(r"(?:\s+|//[^\n]*|\.loc\s[^\n]*|\.pragma[^\n]*)*")
_SCOPE_TOKEN = re.compile(r"//[^\n]*|[{}]|\b([A-Za-z_]\w*):(?!:)")
_LABEL = re.compile(r"(\$?[A-Za-z_]\w*):(?!:)")
_TABLE = re.compile(r"\s*\.branchtargets([^;]*);")


def _split(text: str) -> list[str]:
    """The operands of a list, cut at commas outside of brackets and braces."""
    parts, depth, at = [], 0, 0
    for i, letter in enumerate(text):
        depth += (letter in "{[") - (letter in "}]")
        if letter == "," and depth == 0:
            parts.append(text[at:i].strip())
            at = i + 1
    return [*parts, text[at:].strip()] if text.strip() else []
