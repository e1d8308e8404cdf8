"""Reading and running the compiler's dump of bundles, on a small one written by hand: no compiler needed."""

import numpy as np
import pytest

from pallas_kernels.aot.bundles import memory, nest
from pallas_kernels.aot.execute import runs, trips
from pallas_kernels.aot.scalars import Call

# A loop over scalar argument 0, whose turns 2, 3, .. also run four bundles more and fetch 64 bytes.
DUMP = """
= control target key start
LH: loop header
= control target key end

     0   :  { %s1_s0 = smov 0 /* materialized constant */  ;;  %s2_s1 = smov [#allocation1] }
   0x1   :  { %s3_s2 = sld [smem:[#allocation1]] /* how often */ }
   0x2 LB: > { %s4_s0 = sphi %s1_s0, %s5_s0 /* phi copy */  ;;  %p1_p0 = scmp.lt.s32.totalorder %s4_s0, 2 }
   0x3   : > { %9 = sbr.rel (%p1_p0) target bundleno = 12 (0xc), region = 5 }
   0x4   :  {}
   0x5   :  {}
   0x6   :  {}
   0x7   :  {} /* End region 3 */
   0x8   : > { %10 = dma.hbm_to_vmem [thread:$0]  /*hbm=*/%s1_s0, /*size_in_granules=*/2, /*vmem=*/%s2_s1, [#allocation2] }
   0x9   : > { %v1_v0 = vld [vmem:[#allocation3] sm:$0xff] }
   0xa   : > { %v2_v1 = vadd.f32 %v1_v0, %v1_v0 /* a
comment of two lines */ }
   0xb   : > {}
   0xc PF: > { %s5_s0 = sadd.s32 1, %s4_s0 }
   0xd   : > { %p2_p1 = scmp.ge.s32.totalorder %s5_s0, %s3_s2 /* loop exit test */ }
   0xe   : > { %11 = sbr.rel (!%p2_p1) target bundleno = 2 (0x2), region = 4 }
   0xf   :  {}
  0x10   :  {}
  0x11   :  {}
  0x12   :  {}
  0x13   :  { %12 = vsyncpa [#allocation2], 1 }
"""
UNITS = "== CAPACTIY:\nMXU, XLU\n    2     2\n== UTILIZATION:\n" + "\n".join(
    "0 0 1 0 0 0 0 0 0 0" if address == 10 else "0 0 0 0 0 0 0 0 0 1" for address in range(20)) + "\n"
ALLOCATIONS = """
  #allocation1 [shape = 'u8[512]{0}', space=smem, size = 0x200, scoped, tag = 'prefetched SMEM operand 0']
  #allocation2 [shape = 's32[1]{0}', space=sflag, size = 0x4, scoped, tag = 'scratch operand']
  #allocation3 [shape = 'f32[8,128]{1,0}', space=vmem, size = 0x1000, scoped, tag = 'scratch operand']
  #allocation4_spill [shape = 'f32[8,128]{1,0}', space=vmem, size = 0x1000, scoped, tag = 'spilled vreg']
"""


def test_the_loop_nest_is_read():
    tree = nest(DUMP, UNITS, 4)
    parts = [(depth, node.name, node.first, node.last, node.bundles) for depth, node in tree.walk()]
    assert parts == [(0, "kernel", 0, 19, 3), (1, "L1", 2, 18, 13), (2, "I1", 8, 11, 4)]
    assert tree.total("VALU") == 1
    assert tree.cycles({}) == 20
    assert tree.cycles({"L1": 10, "I1": 0.5}) == 3 + 10 * (13 + 2)


@pytest.mark.parametrize("turns", [1, 2, 3, 50])
def test_the_scalar_program_is_run(turns):
    counts, moved = runs(DUMP, ALLOCATIONS, 4, Call("", [], [np.array([turns], np.int32)]))
    more = max(turns - 2, 0)
    assert sum(counts) == 3 + 13 * turns + 4 * more
    assert moved == 64 * more
    tree = nest(DUMP, UNITS, 4)
    assert trips(tree, counts) == {"L1": turns, "I1": pytest.approx(more / turns)}
    assert tree.cycles(trips(tree, counts)) == pytest.approx(sum(counts))


def test_deciding_by_what_nobody_knows_is_an_error():
    dump = DUMP.replace("sld [smem:[#allocation1]]", "vpop.something %v1_v0")
    with pytest.raises(ValueError, match=r"depends on vpop\.something"):
        runs(dump, ALLOCATIONS, 4, Call("", [], [np.array([1], np.int32)]))


def test_memory_is_summed_by_space():
    assert memory(ALLOCATIONS) == {"smem": 512, "sflag": 4, "vmem": 8192}


def test_another_form_of_dump_is_an_error():
    with pytest.raises(ValueError, match="lines of units"):
        nest(DUMP, UNITS.replace("0 0 1 0 0 0 0 0 0 0\n", ""), 4)
    with pytest.raises(ValueError, match="no branch goes back"):
        nest(DUMP.replace("target bundleno = 2 (0x2)", "target bundleno = 19 (0x13)"), UNITS, 4)
