"""How many KV pages fit: plain arithmetic on bytes, tokens and pages."""

from jinfer.errors import ConfigError


def pages_for(tokens: int, page_size: int) -> int:
    """Pages that hold `tokens` positions."""
    return -(-tokens // page_size)


def pool_pages(free_bytes: int, *, token_bytes: int, page_size: int, max_rows: int, max_context: int) -> int:
    """P, the null page included: what `free_bytes` holds, but no more than max_rows full contexts use.

    Args:
      free_bytes: memory for the pool on one device.
      token_bytes: bytes of a token position on that device, in all layers, keys and values.

    Raises:
      ConfigError: one sequence of max_context tokens would not fit; carries both numbers.
    """
    sequence = pages_for(max_context, page_size)
    fits = max(0, free_bytes) // (token_bytes * page_size)
    if fits < sequence + 1:
        tokens = max(0, fits - 1) * page_size
        raise ConfigError(
            f"max_context: {max_context} tokens need {sequence + 1} KV pages "
            f"({(sequence + 1) * page_size * token_bytes} bytes, the null page included), but the memory "
            f"left ({max(0, free_bytes)} bytes) holds {fits}; give the pool more memory or set "
            f"max_context to {tokens} or less")
    return min(fits, max_rows * sequence + 1)
