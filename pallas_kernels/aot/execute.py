"""How often each bundle of a TPU kernel runs, found by running its scalar program: loops, branches, scalar memory.

Vector instructions are skipped and DMAs only counted: what a kernel does next depends on scalars that come with the
call, such as lengths and page tables. So cycles of kernels with dynamic loops need no guess at trip counts.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from pallas_kernels.aot.bundles import Node, branches, split
from pallas_kernels.aot.scalars import Call

MOST_BUNDLES = 400_000_000
GRANULE = 32  # bytes, the unit of a DMA's size

_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
_OPERAND = re.compile(r"inlined_call_operand\.(<no memory space>|\w+) .*index: (\d+)")
_INSTRUCTION = re.compile(r"(?:%(?P<to>\w+) = )?(?P<op>[a-z][\w.]*)(?P<rest>.*)", re.DOTALL)
_PREDICATE = re.compile(r"\((?P<not>!?)%(?P<name>p\w+)(?:, %(?P<otherwise>\w+))?\)")
_VALUE = re.compile(r"%(?P<name>[sp]\w+)|\[#(?P<allocation>allocation\w+)(?: \+ \$(?P<offset>0x[0-9a-f]+))?"
                    r"(?: \+ %(?P<index>s\w+))?\]|(?P<number>-?\d+)|\[%(?P<base>s\w+)(?: \+ (?:%(?P<plus>s\w+)|"
                    r"\$(?P<hex>0x[0-9a-f]+)))?\]")
_ALLOCATION = re.compile(
    r"#(allocation\w+) \[shape = '[^']*', space=(\w+), size = (0x[0-9a-f]+)(?:.*?tag = '([^']*)')?")

# Values are unsigned 32-bit; flipping the top bit makes an unsigned comparison a signed one.
_SIGN, _MASK = 1 << 31, (1 << 32) - 1
_OPS: dict[str, Callable[..., str]] = {
    "smov": lambda a: a,
    "sadd.s32": lambda a, b: f"({a} + {b}) & {_MASK}",
    "ssub.s32": lambda a, b: f"({a} - {b}) & {_MASK}",
    "smul.u32": lambda a, b: f"({a} * {b}) & {_MASK}",
    "smul.s32": lambda a, b: f"({a} * {b}) & {_MASK}",
    "sand.u32": lambda a, b: f"{a} & {b}",
    "sor.u32": lambda a, b: f"{a} | {b}",
    "sxor.u32": lambda a, b: f"{a} ^ {b}",
    "sshll.u32": lambda a, b: f"({a} << {b}) & {_MASK}",
    "sshrl.u32": lambda a, b: f"{a} >> {b}",
    "sshra.s32": lambda a, b: f"((({a} ^ {_SIGN}) - {_SIGN}) >> {b}) & {_MASK}",
    "smin.u32": lambda a, b: f"select({a} < {b}, {a}, {b})",
    "smax.u32": lambda a, b: f"select({a} < {b}, {b}, {a})",
    "smin.s32": lambda a, b: f"select(({a} ^ {_SIGN}) < ({b} ^ {_SIGN}), {a}, {b})",
    "smax.s32": lambda a, b: f"select(({a} ^ {_SIGN}) < ({b} ^ {_SIGN}), {b}, {a})",
    "scalar_select": lambda p, a, b: f"select({p}, {a}, {b})",
    "pmov": lambda a: a,
    "pneg": lambda a: f"{a} ^ True",
    "por": lambda a, b: f"{a} | {b}",
    "pand": lambda a, b: f"{a} & {b}",
    "pnand": lambda a, b: f"({a} & {b}) ^ True",
    "pxor": lambda a, b: f"{a} ^ {b}",
    "sc.u32": lambda a, b: f"{a} + {b} > {_MASK}",
    "vpop.sfrf": lambda: "0",  # a semaphore's value, read where a kernel checks that all is awaited
    "spop": lambda: "0",  # where two cores of a chip meet
}
for _name, _sign in (("lt", "<"), ("le", "<="), ("gt", ">"), ("ge", ">="), ("eq", "=="), ("ne", "!=")):
    _OPS[f"scmp.{_name}.s32.totalorder"] = lambda a, b, sign=_sign: f"({a} ^ {_SIGN}) {sign} ({b} ^ {_SIGN})"
    _OPS[f"scmp.{_name}.u32.totalorder"] = lambda a, b, sign=_sign: f"{a} {sign} {b}"


class Unknown:
    """A scalar nobody can know here (made by a vector, read from memory that only a DMA writes).

    Computing with it gives it again, unless the other operand decides; going somewhere by it raises ValueError.
    """

    def __init__(self, what: str) -> None:
        self.what = what

    def _self(self, *_: Any) -> "Unknown":
        return self

    def _or(self, other: Any) -> Any:
        return True if other is True else self

    def _and(self, other: Any) -> Any:
        return False if other is False else self

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __xor__ = __rxor__ = _self
    __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = __lt__ = __le__ = __gt__ = __ge__ = _self
    __eq__ = __ne__ = _self  # type: ignore[assignment]
    __hash__ = object.__hash__
    __or__ = __ror__ = _or
    __and__ = __rand__ = _and

    def __bool__(self) -> bool:
        raise ValueError(f"where the kernel goes depends on {self.what}")


def _select(predicate: Any, a: Any, b: Any) -> Any:
    return predicate if isinstance(predicate, Unknown) else a if predicate else b


def runs(bundles: str, allocations: str, slots: int, call: Call) -> tuple[list[int], int]:
    """How often each bundle runs, and the bytes of DMAs from and to HBM.

    Args:
      bundles: text of the `packed-bundles-post-ra` dump. allocations: of the `post-ra` one.
      slots: `bundles.delay_slots`. call: the scalars that come with the kernel.

    Raises:
      ValueError: an instruction that decides where to go is not one of those known here; or MOST_BUNDLES ran.
    """
    texts = split(bundles)
    bases, memory = _layout(allocations, call.scalars)
    scalars = [*call.bounds, *call.scalars]
    ways = branches(texts)
    leaders = sorted({0, *ways.values(), *(address + slots + 1 for address in ways)})
    leaders = [address for address in leaders if address < len(texts)]
    blocks = {}
    for first, after in zip(leaders, [*leaders[1:], len(texts)], strict=True):
        lines = [f"def block(e, r, m, d):  # {first:#x}"]
        way, predicate = None, "True"
        for address in range(first, after):
            code, test = _translated(texts[address], bases, scalars)
            lines += [f"    {line}" for line in code]
            if address in ways:
                lines.append(f"    go = {test}")
                way, predicate = ways[address], "go"
        lines.append(f"    return {f'{way} if {predicate} else {after}' if way is not None else after}")
        space: dict[str, Any] = {"Unknown": Unknown, "select": _select}
        exec("\n".join(lines), space)  # the program is a compiler's output, translated to assignments
        blocks[first] = (after - first, space["block"])

    counts = dict.fromkeys(leaders, 0)
    values: dict[str, Any] = {}
    registers: dict[str, Any] = {}
    moved = [0]
    at, total = 0, 0
    while at < len(texts):
        size, block = blocks[at]
        counts[at] += 1
        total += size
        if total > MOST_BUNDLES:
            raise ValueError(f"more than {MOST_BUNDLES} bundles ran")
        try:
            at = block(values, registers, memory, moved)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"bundle {at:#x} and after: {error!r}") from error
    return [counts[first] for first in leaders for _ in range(blocks[first][0])], moved[0] * GRANULE


def trips(tree: Node, counts: Sequence[int]) -> Mapping[str, float]:
    """Runs of each part for a run of its parent, as `Node.cycles` takes them.

    Of a loop that is left from its middle the last, shorter run counts as a whole one.
    """
    found: dict[str, float] = {}

    def visit(node: Node, times: float) -> None:
        for child in node.children:
            own = _own_address(child)
            ran = times * (counts[child.first] > 0) if own is None else counts[own]
            found[child.name] = ran / times if times else 0.0
            visit(child, ran)

    visit(tree, 1)
    return found


def _own_address(node: Node) -> int | None:
    """A bundle of the node that is in none of its children."""
    for address in range(node.first, node.last + 1):
        if not any(child.first <= address <= child.last for child in node.children):
            return address
    return None


def _layout(allocations: str, scalars: Sequence[np.ndarray]) -> tuple[dict[str, int], dict[int, int]]:
    """Where each allocation lies (words in smem; anywhere else it does not matter), and what smem holds at first."""
    bases: dict[str, int] = {}
    memory: dict[int, int] = {}
    at = 1 << 12
    for name, space, size, tag in _ALLOCATION.findall(allocations):
        words = -(-int(size, 16) // 4)
        bases[name] = at
        if tag.endswith("core index"):
            memory[at] = 0  # of a chip whose cores share a kernel, the first is run
        if space == "smem" and (match := re.fullmatch(r"prefetched SMEM operand (\d+)", tag)):
            words_of = _words(np.asarray(scalars[int(match[1])]))
            if words_of.size > words:
                raise ValueError(f"scalar argument {match[1]}, {words_of.size} words, does not fit its {words}")
            memory |= {at + index: int(word) for index, word in enumerate(words_of)}
        at += words + 128
    return bases, memory


def _words(values: np.ndarray) -> np.ndarray:
    """Scalar memory's words of an integer array: rows of 128, narrow types packed along the second last dimension."""
    if values.ndim < 2:
        values = values.reshape(1, -1)
    packed = 4 // values.dtype.itemsize
    padding = [(0, 0)] * (values.ndim - 2) + [(0, -values.shape[-2] % packed), (0, -values.shape[-1] % 128)]
    rows = np.pad(values, padding).reshape(-1, packed, -(-values.shape[-1] // 128) * 128)
    bits = 8 * values.dtype.itemsize
    unsigned = rows.astype(np.int64) & ((1 << bits) - 1)
    return (unsigned << (np.arange(packed) * bits)[:, None]).sum(1).reshape(-1)


def _translated(text: str, bases: Mapping[str, int], scalars: Sequence[np.ndarray]) -> tuple[list[str], str]:
    """Python lines for a bundle's scalar instructions, and the test of its branch if it has one."""
    first, rest, test = [], [], "True"
    body = text[text.index("{") + 1:]
    for piece in body.split(";;"):
        operand = _OPERAND.search(piece)
        match = _INSTRUCTION.match(_COMMENT.sub("", piece).strip().rstrip("}").strip())
        if match is None:
            continue
        to, op, arguments = match["to"], match["op"], match["rest"]
        if op == "sbr.rel":
            predicate = _PREDICATE.search(arguments)
            test = "True" if predicate is None else _truth(predicate)
        elif op == "sst":
            place, _, value = arguments.partition("]]")
            predicate = _PREDICATE.search(value)
            line = f"m[{_address(place + ']]', bases)}] = {_arguments(_PREDICATE.sub('', value), bases)[0]}"
            rest.append(line if predicate is None else f"if {_truth(predicate)}: {line}")
        elif op in ("dma.hbm_to_vmem", "dma.vmem_to_hbm"):
            predicate = _PREDICATE.search(arguments)
            size = _arguments(_PREDICATE.sub("", re.sub(r"\[thread:[^]]*\]", "", arguments)), bases)[1]
            line = f"d[0] += {size}"
            rest.append(line if predicate is None else f"if {_truth(predicate)}: {line}")
        elif to is None or not re.fullmatch(r"[sp]\d+_[sp]\d+|s\d+_s\d+", to):
            continue
        elif op == "sphi":
            first.append(f"e['{to}'] = r.get('{to.rpartition('_')[2]}', Unknown('a register'))")
        else:
            rest.append(_assignment(to, op, arguments, operand, bases, scalars))
    return first + rest, test


def _assignment(to: str, op: str, arguments: str, operand: re.Match[str] | None, bases: Mapping[str, int],
                scalars: Sequence[np.ndarray]) -> str:
    register = to.rpartition("_")[2]
    if operand is not None:
        known = operand[1] == "<no memory space>" and int(operand[2]) < len(scalars)
        return (f"e['{to}'] = r['{register}'] = "
                f"{int(np.asarray(scalars[int(operand[2])]).reshape(-1)[0]) & _MASK if known else 0}")
    predicate = _PREDICATE.search(arguments) if op != "scalar_select" else None
    inputs = _PREDICATE.sub("", arguments) if predicate is not None else arguments
    if op == "sld":
        place = _address(inputs, bases)
        value = f"m[a] if (a := {place}) in m else Unknown('scalar memory that nothing wrote')"
    elif op.startswith(("scalar_lea", "int_to_ptr")):
        parts = _arguments(re.sub(r"\[resolvable[^]]*\]", "", inputs), bases)
        # A pointer into an allocation names it once more, behind the offset.
        value = parts[0] if op.startswith("int_to_ptr") else f"({parts[0]} + {parts[1]}) & {_MASK}"
    elif op in _OPS:
        value = _OPS[op](*([] if op in ("vpop.sfrf", "spop") else _arguments(inputs, bases)))
    else:
        value = f"Unknown({op + arguments!r})"
    if predicate is not None:
        otherwise = (f"e['{predicate['otherwise']}']" if predicate["otherwise"]
                     else f"r.get('{register}', Unknown('a register'))")
        value = f"select({_truth(predicate)}, {value}, {otherwise})"
    return f"e['{to}'] = r['{register}'] = {value}"


def _truth(predicate: re.Match[str]) -> str:
    return f"(e['{predicate['name']}']{' ^ True' if predicate['not'] else ''})"


def _arguments(text: str, bases: Mapping[str, int]) -> list[str]:
    return [_value(match, bases) for match in _VALUE.finditer(text)]


def _address(text: str, bases: Mapping[str, int]) -> str:
    """smem:[..] as an expression in words."""
    return _value(_VALUE.search(text[text.index("smem:") + 5:]), bases)


def _value(match: re.Match[str] | None, bases: Mapping[str, int]) -> str:
    assert match is not None
    if match["name"]:
        return f"e['{match['name']}']"
    if match["number"]:
        return str(int(match["number"]) & _MASK)
    if match["allocation"]:
        base = str(bases[match["allocation"]] + int(match["offset"] or "0", 16))
        return base if match["index"] is None else f"({base} + e['{match['index']}']) & {_MASK}"
    plus = f"e['{match['plus']}']" if match["plus"] else str(int(match["hex"] or "0", 16))
    return f"(e['{match['base']}'] + {plus}) & {_MASK}"
