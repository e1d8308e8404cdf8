"""What a compiled step may not do: copy weights or a layer's KV, or exchange more than its layout asks for."""

from collections import Counter
from collections.abc import Iterable

from jinfer.plan.hlo import Instruction, Module

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute",
               "collective-broadcast", "ragged-all-to-all")
PRODUCTS = ("dot", "convolution", "custom-call", "gather")  # may read a whole weight and return something as large
FREE = ("parameter", "bitcast", "tuple", "get-tuple-element", "while", "conditional", "optimization-barrier")


def collectives(module: Module) -> Counter[str]:
    """Exchanges between devices that a call always makes, by kind; those in a loop's body count once."""
    kinds = (i.opcode.removesuffix("-start") for i in module.every(rare=False))
    return Counter(kind for kind in kinds if kind in COLLECTIVES)


def weight_copies(module: Module, weights: Iterable[int], smallest: int) -> list[str]:
    """Instructions that write a weight of at least `smallest` bytes again, in HBM or, fused, in another layout.

    weights: numbers of the program's parameters. A prefetch into the chip's own memory as it stands is none.
    """
    parameters = module.parameters()
    found = []
    for number in weights:
        size = sum(s.bytes for s in parameters[number].shapes)
        if size >= smallest:
            found += [f"{parameters[number].source}: {describe(i)}" for i, fused in module.fate([number])
                      if _rewrites(module, i, fused, size)]
    return found


def pool_copies(module: Module, pool: Iterable[int], layer_bytes: int) -> list[str]:
    """Instructions that write at least `layer_bytes` of the KV pool anew instead of in place."""
    found = []
    for i, fused in module.fate(pool):
        large = any(s.bytes >= layer_bytes for s in i.shapes)
        if large and not fused and i.opcode not in FREE and not _in_place(module, i):
            found.append(describe(i))
    return found


def not_donated(module: Module, numbers: Iterable[int]) -> list[str]:
    """Parameters among `numbers` whose memory no result takes over."""
    parameters = module.parameters()
    return [parameters[n].source for n in numbers if n not in module.aliased]


def describe(i: Instruction) -> str:
    shape = i.shapes[0] if i.shapes else None
    where = f"{shape.dtype}{list(shape.dims)}" if shape else ""
    return f"{i.opcode} {where} ({i.source})" if i.source else f"{i.opcode} {where}"


def _rewrites(module: Module, i: Instruction, fused: bool, size: int) -> bool:
    large = [s for s in i.shapes if s.bytes >= size]
    if not large or i.opcode in FREE or i.opcode.endswith("-start"):  # a start names its operand among its results
        return False
    if fused:  # a product's operand turned on its way in
        return i.opcode in ("copy", "transpose")
    if i.opcode in ("copy-done", "copy") and all(s.vmem for s in large):
        return False
    return not any(r.opcode in PRODUCTS for r in (i, *_inside(module, i)))


def _inside(module: Module, i: Instruction) -> list[Instruction]:
    found = []
    for name in i.called:
        for inner in module.computations.get(name, {}).values():
            found += [inner, *_inside(module, inner)]
    return found


def _in_place(module: Module, i: Instruction) -> bool:
    if "output_to_operand_aliasing" in i.rest:
        return True
    roots = [r for name in i.called for r in module.computations.get(name, {}).values() if r.root]
    return i.opcode in ("scatter", "dynamic-update-slice") or any(
        r.opcode in ("scatter", "dynamic-update-slice") for r in roots)
