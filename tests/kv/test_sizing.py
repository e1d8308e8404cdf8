"""Pages from bytes."""

import pytest

from jinfer.errors import ConfigError
from jinfer.kv import Demand, pages_for, pages_touched, pool_pages


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_pages_for(tokens, pages):
    assert pages_for(tokens, 16) == pages


@pytest.mark.parametrize("page_size", [1, 2, 4])
@pytest.mark.parametrize("tokens", range(1, 12))
def test_pages_touched(page_size, tokens):
    most = max(len({i // page_size for i in range(start, start + tokens)}) for start in range(page_size))
    assert pages_touched(tokens, page_size) == most


def pool(free_bytes, *page_bytes, windows=(None,), **changes):
    demand = {"page_size": 16, "max_rows": 8, "max_context": 512, "decode_steps": 4, "prefill_tokens": 64,
              "max_chunks": 5, **changes}
    return pool_pages(free_bytes, page_bytes or (160,), Demand(windows=windows, **demand))


def test_pool_is_what_memory_holds():
    assert pool(1000 * 160 + 159, max_rows=64) == (1000,)


def test_pool_is_capped_by_full_contexts():
    # 8 rows of 32 pages, and the null page
    assert pool(10**12) == (257,)
    assert pool(10**12, max_context=513) == (265,)


def test_pool_that_holds_exactly_one_sequence():
    assert pool(33 * 160) == (33,)


@pytest.mark.parametrize("free_bytes", [33 * 160 - 1, 160, 0, -5])
def test_pool_too_small_for_a_sequence_is_refused_with_both_numbers(free_bytes):
    with pytest.raises(ConfigError, match="max_context: 512 tokens need 33 KV pages") as error:
        pool(free_bytes)
    assert f"holds {max(0, free_bytes) // 160};" in str(error.value)
    assert "\n" not in str(error.value)


def test_the_context_the_error_proposes_fits():
    with pytest.raises(ConfigError, match="max_context to 144 or less"):
        pool(10 * 160)
    assert pool(10 * 160, max_context=144) == (10,)


# Windows. 43 positions (40 and 3 further steps) touch 4 pages of 16; a call adds 64 / 16 pages and 5 partly filled ones.
WINDOW = 8 * 4 + 4 + 5 + 1


def test_a_window_needs_no_more_than_rows_and_a_call_touch():
    assert pool(10**12, windows=(40,)) == (WINDOW,)
    assert pool(10**12, 160, 160, windows=(None, 40)) == (257, WINDOW)
    assert pool(10**12, windows=(512,)) == pool(10**12, windows=(4096,)) == (257,)  # it sees whole contexts


def test_groups_get_equally_many_pages_until_a_window_has_enough():
    assert pool(40 * (100 + 50) + 149, 100, 50, windows=(None, 40)) == (40, 40)
    assert pool(100 * 100 + WINDOW * 50 + 99, 100, 50, windows=(None, 40)) == (100, WINDOW)
    assert pool(WINDOW * (100 + 50) + 99, 100, 50, windows=(None, 40)) == (WINDOW, WINDOW)


def test_one_sequence_comes_before_equal_shares():
    least = 33 * 100 + 5 * 50
    assert pool(least, 100, 50, windows=(None, 40)) == (33, 5)
    with pytest.raises(ConfigError, match=rf"512 tokens need 33 \+ 5 KV pages \({least} bytes.* holds 32 \+ 5;") as error:
        pool(least - 1, 100, 50, windows=(None, 40))
    assert "max_context to 496 or less" in str(error.value)
    assert pool(least - 1, 100, 50, windows=(None, 40), max_context=496) == (32, 6)


def test_a_windowed_model_takes_contexts_longer_than_its_pool():
    assert pool(5 * 160, windows=(40,), max_context=10**6) == (5,)
    with pytest.raises(ConfigError, match=r"need 5 KV pages .* holds 4; .* max_context to 48 or less"):
        pool(5 * 160 - 1, windows=(40,), max_context=10**6)


def test_explicit_pages_are_those_of_the_largest_group():
    demand = Demand(windows=(None, 40), page_size=16, max_rows=8, max_context=512, decode_steps=4, prefill_tokens=64,
                    max_chunks=5)
    assert demand.explicit(300) == (300, WINDOW)
    assert demand.explicit(20) == (20, 20)
    assert [demand.context(demand.explicit(pages)) for pages in (33, 32, 5, 4)] == [512, 496, 64, 48]
    assert demand.context((33, 4)) == 48
