"""Block sizes of the TPU kernel of paged_attention, and the tables that may improve on them."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import tuning
from pallas_kernels.chips import CHIPS
from pallas_kernels.paged_attention.blocks import VMEM_SHARE, choose

TPUS = {kind: chip for kind, chip in CHIPS.items() if "TPU" in kind}
ARGUMENTS = {"heads": 32, "kv_heads": 8, "head_dim": 128, "value_dim": 128, "page_size": 64, "table_width": 128, "chunk": (512, 4),
             "bytes_each": (2, 2, 2), "chip": CHIPS["TPU v6 lite"], "tuned": {}}


@settings(max_examples=200, deadline=None, derandomize=True)
@given(kv_heads=st.sampled_from([1, 2, 3, 8, 16, 32]), group=st.sampled_from([1, 3, 4, 8, 16]), head_dim=st.sampled_from([128, 256]),
       page_size=st.sampled_from([16, 32, 64, 128]), table_width=st.sampled_from([1, 7, 2048]),
       chunk=st.sampled_from([None, (16, 1), (48, 1), (112, 1), (320, 64), (512, 16), (8192, 1)]), width=st.sampled_from([(2, 2, 2), (4, 4, 4), (2, 1, 1)]),
       kind=st.sampled_from(list(TPUS)))
def test_every_shape_gets_sizes_that_fit(kv_heads, group, head_dim, page_size, table_width, chunk, width, kind):
    if kv_heads * group > 64 or kv_heads * head_dim * max(width[1], 2) > 8192:  # more than a device has
        return
    chip = TPUS[kind]
    sizes = choose(heads=kv_heads * group, kv_heads=kv_heads, head_dim=head_dim, value_dim=head_dim, page_size=page_size, table_width=table_width,
                   chunk=chunk, bytes_each=width, chip=chip, tuned={})
    assert sizes.vmem(*width) <= chip.vmem * VMEM_SHARE
    assert sizes.pages <= table_width
    assert kv_heads % sizes.together == 0
    assert sizes.decode == (chunk is None)
    assert sizes.decode or sizes.queries % 16 == 0


def test_a_shape_that_cannot_fit_is_named():
    with pytest.raises(ValueError, match="512 kv heads of 512 and pages of 128 need"):
        choose(**{**ARGUMENTS, "heads": 512, "kv_heads": 512, "head_dim": 512, "value_dim": 512, "page_size": 128, "chip": CHIPS["TPU v4"]})


def test_long_chunks_get_wide_windows_and_many_short_ones_narrow_ones():
    assert choose(**{**ARGUMENTS, "chunk": (2048, 1)}).queries == 128
    assert choose(**{**ARGUMENTS, "chunk": (320, 64)}).queries == 16  # verification of five tokens a row


def test_a_table_improves_sizes_that_fit_and_no_others():
    plain = choose(**ARGUMENTS)
    assert choose(**{**ARGUMENTS, "tuned": {"pages": 16, "queries": 64}}).pages == 16
    assert choose(**{**ARGUMENTS, "tuned": {"pages": 16, "queries": 2**14}}) == plain


def test_a_table_is_read_for_the_device_at_hand(tmp_path, monkeypatch):
    (tmp_path / "tuned.json").write_text(json.dumps({"TPU v6 lite": {"a key": {"pages": 4}}}))
    module = str(tmp_path / "tpu.py")
    monkeypatch.setattr(tuning, "device_kind", lambda: "TPU v6 lite")
    assert tuning.tuned(module, "a key") == {"pages": 4}
    assert tuning.tuned(module, "another") == {}
    monkeypatch.setattr(tuning, "device_kind", lambda: "TPU v4")
    assert tuning.tuned(module, "a key") == {}
    assert tuning.tuned(str(tmp_path / "elsewhere" / "tpu.py"), "a key") == {}
