"""Pages from bytes."""

import pytest

from jinfer.errors import ConfigError
from jinfer.kv import pages_for, pool_pages


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_pages_for(tokens, pages):
    assert pages_for(tokens, 16) == pages


def test_pool_is_what_memory_holds():
    assert pool_pages(1000 * 160 + 159, token_bytes=10, page_size=16, max_rows=64, max_context=512) == 1000


def test_pool_is_capped_by_full_contexts():
    # 8 rows of 32 pages, and the null page
    assert pool_pages(10**12, token_bytes=10, page_size=16, max_rows=8, max_context=512) == 257
    assert pool_pages(10**12, token_bytes=10, page_size=16, max_rows=8, max_context=513) == 265


def test_pool_that_holds_exactly_one_sequence():
    assert pool_pages(33 * 160, token_bytes=10, page_size=16, max_rows=8, max_context=512) == 33


@pytest.mark.parametrize("free_bytes", [33 * 160 - 1, 160, 0, -5])
def test_pool_too_small_for_a_sequence_is_refused_with_both_numbers(free_bytes):
    with pytest.raises(ConfigError, match="max_context: 512 tokens need 33 KV pages") as error:
        pool_pages(free_bytes, token_bytes=10, page_size=16, max_rows=8, max_context=512)
    assert f"holds {max(0, free_bytes) // 160};" in str(error.value)
    assert "\n" not in str(error.value)


def test_the_context_the_error_proposes_fits():
    with pytest.raises(ConfigError, match="max_context to 144 or less"):
        pool_pages(10 * 160, token_bytes=10, page_size=16, max_rows=8, max_context=512)
    assert pool_pages(10 * 160, token_bytes=10, page_size=16, max_rows=8, max_context=144) == 10
