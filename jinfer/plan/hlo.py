"""Reading optimised HLO text: instructions, which of them always run, and what becomes of a parameter."""

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator

BITS = {"pred": 8, "bf16": 16, "f16": 16, "f64": 64, "c64": 64, "token": 0}  # the others end in their bits, as f8e4m3fn
MOVES = ("bitcast", "copy", "copy-start", "copy-done", "reshape", "transpose", "optimization-barrier")
UPDATES = ("scatter", "dynamic-update-slice")  # which XLA does in place where it can; where not, it adds a copy
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_SHAPE = re.compile(r"([a-z]\w*)\[([\d,]*)\](?:\{([^{}]*)\})?")
_CALLED = re.compile(r"(?:calls|body|to_apply|called_computations)=(?:\{([^}]*)\}|(%?[\w.\-]+))")
_BRANCHES = re.compile(r"(?:branch_computations=\{([^}]*)\}|(?:true|false)_computation=(%?[\w.\-]+))")
_ALIAS = re.compile(r"\{[\d, ]*\}: \((\d+), \{[\d, ]*\}, (?:may|must)-alias\)")


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """An array on one device. vmem: kept on the chip, not in HBM."""

    dtype: str
    dims: tuple[int, ...]
    vmem: bool

    @property
    def bytes(self) -> int:
        bits = BITS.get(self.dtype) or int(re.sub(r"^[a-z]+(\d+).*", r"\1", self.dtype))
        return math.prod(self.dims) * bits // 8


@dataclasses.dataclass(frozen=True, slots=True)
class Instruction:
    """shapes: one, or those of the result's tuple. rest: attributes, as they stand."""

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]
    rest: str
    root: bool

    @property
    def source(self) -> str:
        """The op_name of the program it comes from, or of the parameter it is."""
        found = re.search(r'op_name="([^"]*)"', self.rest)
        return found[1] if found else ""

    @property
    def called(self) -> list[str]:
        """Computations that run with it: fusions, loop bodies, calls."""
        return [name.strip(" %") for many, one in _CALLED.findall(self.rest) for name in (many or one).split(",")]

    @property
    def branches(self) -> list[str]:
        """Computations of which one runs."""
        return [name.strip(" %") for many, one in _BRANCHES.findall(self.rest) for name in (many or one).split(",")]

    def attribute(self, name: str) -> int:
        """An integer attribute, such as the index of a get-tuple-element."""
        found = re.search(rf"\b{name}=(\d+)", self.rest)
        assert found is not None, (self.name, name)
        return int(found[1])


class Module:
    """Computations of a compiled program, by name; each a dict of instructions in their order."""

    def __init__(self, text: str):
        self.computations: dict[str, dict[str, Instruction]] = {}
        self.aliased = {int(number) for number in _ALIAS.findall(text.partition("\n")[0])}
        self.entry = ""
        current: dict[str, Instruction] = {}
        for line in text.splitlines():
            if head := _COMPUTATION.match(line):
                current = self.computations.setdefault(head[2], {})
                if head[1]:
                    self.entry = head[2]
            elif body := _INSTRUCTION.match(line):
                name, shape, opcode, tail = body.groups()
                inside, rest = _split(tail)
                operands = () if opcode in ("parameter", "constant") else tuple(re.findall(r"%([\w.\-]+)", inside))
                if opcode == "parameter":
                    rest += f", number={inside}"
                current[name] = Instruction(name, opcode, tuple(_shapes(shape)), operands, rest,
                                            line.lstrip().startswith("ROOT"))

    def parameters(self) -> dict[int, Instruction]:
        """Of the program, by number."""
        return {i.attribute("number"): i for i in self.computations[self.entry].values() if i.opcode == "parameter"}

    def every(self, *, rare: bool) -> Iterator[Instruction]:
        """Instructions that a call always reaches, inside of fusions and loops too; rare: also those of branches."""
        seen: set[str] = set()
        waiting = [self.entry]
        while waiting:
            name = waiting.pop()
            if name in seen or name not in self.computations:
                continue
            seen.add(name)
            for instruction in self.computations[name].values():
                yield instruction
                waiting += instruction.called
                waiting += instruction.branches if rare else []

    def fate(self, numbers: Iterable[int]) -> list[tuple[Instruction, bool]]:
        """Instructions that read the program's parameters `numbers`, or what only moved them about.

        Followed through fusions, loops, branches and tuples, and through whatever returns its operand whole. The flag
        tells whether an instruction stands inside a fusion.
        """
        seeds: dict[str, set[tuple[int, ...]]] = {
            p.name: {()} for n, p in self.parameters().items() if n in set(numbers)}
        found: dict[int, tuple[Instruction, bool]] = {}
        done: set[tuple[str, frozenset[tuple[str, tuple[int, ...]]]]] = set()
        self._follow(self.entry, seeds, False, found, done)
        return list(found.values())

    def _follow(self, computation: str, held: dict[str, set[tuple[int, ...]]], fused: bool,
                found: dict[int, tuple[Instruction, bool]], done: set) -> None:
        """held: names whose value (or, for tuples, which elements of it) is the parameter."""
        key = computation, frozenset((name, index) for name, indices in held.items() for index in indices)
        if key in done or computation not in self.computations:
            return
        done.add(key)
        for i in self.computations[computation].values():
            reads = [held.get(operand, set()) for operand in i.operands]
            if not any(reads):
                continue
            match i.opcode:
                case "tuple":
                    held[i.name] = {(n, *index) for n, indices in enumerate(reads) for index in indices}
                case "get-tuple-element":
                    n = i.attribute("index")
                    held[i.name] = {index[1:] for index in reads[0] if index[:1] == (n,)}
                case "while":
                    held[i.name] = set(reads[0])
                    for name in i.called:
                        self._enter(name, [reads[0]], fused, found, done)
                case "conditional":
                    for name, indices in zip(i.branches, reads[1:], strict=True):
                        self._enter(name, [indices], fused, found, done)
                case _:
                    found.setdefault(id(i), (i, fused))
                    held[i.name] = self._kept(i, reads)
                    for name in i.called:
                        self._enter(name, reads, fused or i.opcode == "fusion", found, done)

    def _kept(self, i: Instruction, reads: list[set[tuple[int, ...]]]) -> set[tuple[int, ...]]:
        """Which elements of a result are still the operand: moved, laid out otherwise or updated in place."""
        if i.opcode in MOVES:
            return {()}
        aliases = re.findall(r"\{(\d*)\}: \((\d+), \{\}", i.rest) if "output_to_operand_aliasing" in i.rest else []
        roots = [r for name in i.called for r in self.computations.get(name, {}).values() if r.root]
        if i.opcode in UPDATES or (i.opcode == "fusion" and any(r.opcode in UPDATES for r in roots)):
            return {()}
        return {(int(element),) if element else () for element, operand in aliases if reads[int(operand)]}

    def _enter(self, name: str, reads: list[set[tuple[int, ...]]], fused: bool,
               found: dict[int, tuple[Instruction, bool]], done: set) -> None:
        held = {i.name: reads[n] for i in self.computations.get(name, {}).values()
                if i.opcode == "parameter" and (n := i.attribute("number")) < len(reads) and reads[n]}
        if held:
            self._follow(name, held, fused, found, done)


def _split(tail: str) -> tuple[str, str]:
    """'operands), attributes' -> (operands, attributes)."""
    depth = 1
    for n, letter in enumerate(tail):
        depth += (letter in "({[") - (letter in ")}]")
        if depth == 0:
            return tail[:n], tail[n + 1 :]
    return tail, ""


def _shapes(text: str) -> Iterator[Shape]:
    for dtype, dims, layout in _SHAPE.findall(text):
        yield Shape(dtype, tuple(int(d) for d in dims.split(",") if d), "S(1)" in layout)
