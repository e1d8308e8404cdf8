"""The loop nest of a compiled TPU kernel, read from the compiler's dump of its scheduled instruction bundles.

A bundle is what a TensorCore issues in one cycle, and latencies are scheduled into them as empty bundles; what is not:
waiting for DMAs, bank conflicts. So bundles x trips is what a kernel costs where memory keeps up. The dump to read is
`packed-bundles-post-ra`: in the final one, later, runs of empty bundles are compressed into one that takes as long.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

# Columns of the dump's table of units, in its order; a bundle has this many slots (TPU v6e) of each.
UNITS = ("MXU", "XLU", "VALU", "VPOP", "EUP", "VLOAD", "fill", "VSTORE", "spill", "SALU")
_BUNDLE = re.compile(r"^ *(0x[0-9a-f]+|0) +([A-Z]{2})? *: *[> ]*\{", re.MULTILINE)
_LOOP = re.compile(r" *0x[0-9a-f]+ +L[BH]:")
_BRANCH = re.compile(r"sbr\.rel (?P<predicate>\(!?%\w+\) )?target bundleno = (?P<target>\d+)")
_EXIT = re.compile(r"= scmp\.\w+\.s32\.totalorder %\w+, (\d+) /\* loop exit test")
_ALLOCATION = re.compile(r"#allocation\w+ \[shape = '[^']*', space=(\w+), size = (0x[0-9a-f]+)")


@dataclasses.dataclass(slots=True)
class Node:
    """A part of the program: the kernel itself, a loop, or what a branch may skip.

    Attributes:
      name: 'kernel', or L1, L2, .. (loops), I1, .. (skipped by a branch), E1, .. (what runs instead of it), numbered
        in program order.
      first, last: its bundles' addresses, inclusive.
      trips: how often it runs for each run of its parent as far as the compiler shows it: a constant loop bound,
        None where that is dynamic, 1 for an I; an E has 0.
      units: uses of each of UNITS by its bundles, children excluded. bundles: how many there are of those.
    """

    name: str
    first: int
    last: int
    trips: int | None
    units: list[int] = dataclasses.field(default_factory=lambda: [0] * len(UNITS))
    bundles: int = 0
    children: list["Node"] = dataclasses.field(default_factory=list)

    def walk(self, depth: int = 0) -> Iterator[tuple[int, "Node"]]:
        """(depth, node) of itself and all below, in program order."""
        yield depth, self
        for child in self.children:
            yield from child.walk(depth + 1)

    def cycles(self, trips: Mapping[str, float]) -> float:
        """Bundles issued by one run, with `trips` by name; a dynamic loop without an entry counts once."""
        return self.bundles + sum(
            child.cycles(trips) * trips.get(child.name, 1 if child.trips is None else child.trips)
            for child in self.children)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "Node":
        return cls(**{**fields, "children": [cls.from_json(child) for child in fields["children"]]})

    def total(self, unit: str) -> int:
        """Uses of a unit, everything below counted once."""
        return sum(node.units[UNITS.index(unit)] for _, node in self.walk())


def delay_slots(device_kind: str) -> int:
    """Bundles after a branch that run whether it is taken or not."""
    return 6 if device_kind == "TPU7x" else 4


def nest(bundles: str, utilization: str, slots: int) -> Node:
    """The kernel's tree.

    Args:
      bundles, utilization: texts of its `packed-bundles-post-ra` and `pre-delay_hlo-static-per-bundle-utilization`
        dumps. slots: `delay_slots`.

    Raises:
      ValueError: the two do not describe the same bundles, or a loop has no branch back: the dump has another form.
    """
    texts = split(bundles)
    lines = utilization.partition("UTILIZATION:")[2].splitlines()
    units = [list(map(int, line.split())) for line in lines if line.strip()]
    if len(units) != len(texts):
        raise ValueError(f"{len(texts)} bundles and {len(units)} lines of units: not the dump this was written for")
    root = Node("kernel", 0, len(texts) - 1, 1)
    for node in _named(sorted(_spans(texts, slots), key=lambda span: (span[1], -span[2], span[0] == "L"))):
        _insert(root, node)
    for address, used in enumerate(units):
        node = _innermost(root, address)
        node.bundles += 1
        node.units = [a + b for a, b in zip(node.units, used, strict=True)]
    return root


def memory(text: str) -> dict[str, int]:
    """Bytes a kernel allocates by memory space (vmem, smem, ..), spills included, from a dump after allocation.

    The sum of all allocations: an upper bound where their scopes do not overlap.
    """
    sizes: dict[str, int] = {}
    for space, size in _ALLOCATION.findall(text):
        sizes[space] = sizes.get(space, 0) + int(size, 16)
    return sizes


def split(bundles: str) -> list[str]:
    """The dump's text of each bundle, by address.

    Raises:
      ValueError: addresses do not count from 0.
    """
    matches = list(_BUNDLE.finditer(bundles))
    if [int(m[1], 16) for m in matches] != list(range(len(matches))):
        raise ValueError("addresses of bundles do not count from 0: not the dump this was written for")
    ends = [m.start() for m in matches[1:]] + [len(bundles)]
    return [bundles[m.start():end] for m, end in zip(matches, ends, strict=True)]


def branches(texts: Sequence[str]) -> dict[int, int]:
    """Where each bundle that has a branch may go to."""
    return {address: int(branch["target"]) for address, text in enumerate(texts) for branch in _BRANCH.finditer(text)}


def _spans(texts: Sequence[str], slots: int) -> list[tuple[str, int, int, int | None]]:
    """(L, I or E; first; last; trips) of every loop and every stretch that a branch may skip."""
    loops: dict[int, int] = {}
    skips: list[tuple[str, int, int]] = []
    for address, target in branches(texts).items():
        after = address + slots
        if target <= address:
            loops[target] = max(loops.get(target, 0), min(after, len(texts) - 1))
        elif target > after + 1:
            branch = _BRANCH.search(texts[address])
            skips.append(("I" if branch and branch["predicate"] else "E", after + 1, target - 1))
    if missed := [hex(address) for address, text in enumerate(texts) if _LOOP.match(text) and address not in loops]:
        raise ValueError(f"no branch goes back to the loops at {', '.join(missed)}: not the dump this was written for")
    spans: list[tuple[str, int, int, int | None]] = []
    for first, last in loops.items():
        bounds = _EXIT.findall("".join(texts[first:last + 1]))
        inner = any(first < other <= last for other in loops)
        spans.append(("L", first, last, int(bounds[-1]) if bounds and not inner else None))
    spans += [(kind, first, last, kind == "I") for kind, first, last in skips]
    return spans


def _named(spans: Sequence[tuple[str, int, int, int | None]]) -> Iterator[Node]:
    count = {"L": 0, "I": 0, "E": 0}
    for kind, first, last, trips in spans:
        count[kind] += 1
        yield Node(f"{kind}{count[kind]}", first, last, None if trips is None else int(trips))


def _insert(node: Node, new: Node) -> None:
    """Puts `new` into the innermost node that has its first bundle; a way out of a loop ends with the loop."""
    for child in node.children:
        if child.first <= new.first <= child.last:
            return _insert(child, new)
    new.last = min(new.last, node.last)
    node.children.append(new)
    return None


def _innermost(node: Node, address: int) -> Node:
    for child in node.children:
        if child.first <= address <= child.last:
            return _innermost(child, address)
    return node
