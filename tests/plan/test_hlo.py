"""Reading HLO: what copies, what moves, what only looks like it."""

from collections import Counter

import pytest

from jinfer.plan import checks
from jinfer.plan.hlo import Module, Shape

HEAD = "HloModule jit_f, is_scheduled=true, input_output_alias={ {0}: (1, {}, may-alias) }, entry_computation_layout={(bf16[8])->bf16[8]}\n\n"


def module(entry: str, *others: str) -> Module:
    return Module(HEAD + "\n\n".join(others) + "\n\nENTRY %main (p: bf16[8]) -> bf16[8] {\n" + entry + "\n}\n")


WEIGHT = '  %w = bf16[512,1024]{1,0:T(8,128)(2,1)} parameter(0), metadata={op_name="weights[0]"}\n'
POOL = '  %kv = bf16[64,1,16,128]{3,2,1,0:T(8,128)(2,1)} parameter(1), metadata={op_name="kv.k.data"}\n'


def test_shapes_and_operands():
    m = module(WEIGHT + "  ROOT %c = (bf16[512,1024]{1,0:T(8,128)(2,1)S(1)}, u32[]{:S(2)}) copy-start(%w), metadata={}")
    c = m.computations["main"]["c"]
    assert c.shapes == (Shape("bf16", (512, 1024), True), Shape("u32", (), False))
    assert c.shapes[0].bytes == 512 * 1024 * 2
    assert c.operands == ("w",)
    assert c.root
    assert m.aliased == {1}
    assert Shape("f8e4m3fn", (16,), False).bytes == 16
    assert Shape("pred", (3,), False).bytes == 3


@pytest.mark.parametrize(("body", "copies"), [
    ("  %a = bf16[512,1024]{0,1:T(8,128)(2,1)} copy(%w)", 1),  # another layout
    ("  %a = bf16[1024,512]{1,0:T(8,128)(2,1)} transpose(%w), dimensions={1,0}", 1),
    ("  %a = bf16[512,1024]{1,0:T(8,128)(2,1)S(1)} copy(%w)", 0),  # a prefetch
    ("  %s = (bf16[512,1024]{1,0:S(1)}, bf16[512,1024]{1,0}, u32[]{:S(2)}) copy-start(%w)\n"
     "  %a = bf16[512,1024]{1,0:T(8,128)(2,1)S(1)} copy-done(%s)", 0),
    ("  %b = bf16[1024,512]{0,1} bitcast(%w)\n  %a = bf16[1024,512]{1,0} copy(%b)", 1),
    ("  %a = bf16[4096,1024]{1,0} all-gather(%w), dimensions={0}", 1),
    ("  %a = f32[512,1024]{1,0} convert(%w)", 1),
    ("  %a = f32[2048,1024]{1,0} fusion(%w), kind=kOutput, calls=%product", 0),  # large, but a product
    ("  %a = f32[64,512]{1,0} fusion(%w), kind=kOutput, calls=%turned", 1),  # the operand is turned inside
    ("  %a = f32[64,512]{1,0} fusion(%w), kind=kOutput, calls=%product", 0),
])
def test_copies_of_a_weight(body: str, copies: int):
    product = ("%product (q: bf16[512,1024]) -> f32[64,512] {\n  %q = bf16[512,1024]{1,0} parameter(0)\n"
               "  ROOT %d = f32[64,512]{1,0} convolution(%x, %q), dim_labels=bf_oi->bf\n}")
    turned = ("%turned (q: bf16[512,1024]) -> f32[64,512] {\n  %q = bf16[512,1024]{1,0} parameter(0)\n"
              "  %t = bf16[512,1024]{0,1} copy(%q)\n  ROOT %d = f32[64,512]{1,0} dot(%x, %t)\n}")
    assert len(checks.weight_copies(module(WEIGHT + body, product, turned), [0], 2**20)) == copies
    assert checks.weight_copies(module(WEIGHT + body, product, turned), [0], 2**21) == []  # too small to matter


def test_a_copy_in_a_loop_is_found():
    loop = ("%body (t: (s32[], bf16[512,1024])) -> (s32[], bf16[512,1024]) {\n"
            "  %t = (s32[], bf16[512,1024]{1,0}) parameter(0)\n"
            "  %e = bf16[512,1024]{1,0} get-tuple-element(%t), index=1\n  %n = s32[] get-tuple-element(%t), index=0\n"
            "  %bad = bf16[512,1024]{0,1} copy(%e)\n  ROOT %r = (s32[], bf16[512,1024]) tuple(%n, %e)\n}")
    entry = ("  %z = s32[] constant(0)\n  %i = (s32[], bf16[512,1024]{1,0}) tuple(%z, %w)\n"
             "  ROOT %l = (s32[], bf16[512,1024]{1,0}) while(%i), condition=%cond, body=%body")
    assert checks.weight_copies(module(WEIGHT + entry, loop), [0], 2**20) == ["weights[0]: copy bf16[512, 1024]"]
    other = loop.replace("index=1", "index=9").replace("%e = bf16", "%e = s32", 1)
    assert checks.weight_copies(module(WEIGHT + entry, other), [0], 2**20) == []


@pytest.mark.parametrize(("body", "copies"), [
    ("  %u = (bf16[64,1,16,128]{3,2,1,0}) custom-call(%x, %kv), custom_call_target=\"tpu_custom_call\", "
     "output_to_operand_aliasing={{0}: (1, {})}\n  %g = bf16[64,1,16,128]{3,2,1,0} get-tuple-element(%u), index=0\n"
     "  %c = bf16[64,1,16,128]{2,3,1,0} copy(%g)", 1),  # updated in place, then copied
    ("  %u = bf16[64,1,16,128]{3,2,1,0} custom-call(%x, %kv), output_to_operand_aliasing={{}: (1, {})}", 0),
    ("  %u = bf16[64,1,16,128]{3,2,1,0} custom-call(%x, %kv)", 1),
    ("  %u = bf16[32,1,16,128]{3,2,1,0} slice(%kv), slice={[0:32]}", 1),  # a layer's part
    ("  %u = bf16[4,1,16,128]{3,2,1,0} slice(%kv), slice={[0:4]}", 0),
    ("  %u = bf16[64,1,16,128]{3,2,1,0} fusion(%kv), kind=kLoop, calls=%write", 0),
])
def test_copies_of_the_pool(body: str, copies: int):
    write = ("%write (q: bf16[64,1,16,128]) -> bf16[64,1,16,128] {\n  %q = bf16[64,1,16,128]{3,2,1,0} parameter(0)\n"
             "  ROOT %s = bf16[64,1,16,128]{3,2,1,0} scatter(%q, %i, %n)\n}")
    assert len(checks.pool_copies(module(POOL + body, write), [1], 32 * 16 * 128 * 2)) == copies


def test_collectives_are_those_of_every_call():
    branch = "%rare (a: f32[8]) -> f32[8] {\n  ROOT %g = f32[64]{0} all-gather(%a), dimensions={0}\n}"
    entry = ("  %a = f32[8]{0} all-reduce(%x), to_apply=%add\n  %s = f32[8]{0} all-reduce-start(%x), to_apply=%add\n"
             "  %d = f32[8]{0} all-reduce-done(%s)\n"
             "  ROOT %c = f32[8]{0} conditional(%p, %x, %x), true_computation=%rare, false_computation=%rare")
    m = module(entry, branch)
    assert checks.collectives(m) == Counter({"all-reduce": 2})
    assert sum(i.opcode == "all-gather" for i in m.every(rare=True)) == 1


def test_what_is_not_donated_is_named():
    assert checks.not_donated(module(WEIGHT + POOL), [0, 1]) == ["weights[0]"]
