"""How a TPU lays arrays out: registers of 8 sublanes of 128 lanes of 32 bits."""

LANES, SUBLANES = 128, 8


def up(x: int, multiple: int) -> int:
    """x rounded up to a multiple."""
    return -(-x // multiple) * multiple
