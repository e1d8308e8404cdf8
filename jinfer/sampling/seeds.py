"""The seed of each choice of a request, made on the host."""

import secrets

_MASK = 2**64 - 1


def choice_seed(seed: int | None, choice: int) -> int:
    """The 32-bit seed of choice `choice` of a request with this seed: the same every time, or fresh if None.

    SplitMix64's finaliser (Steele et al. 2014) over seed + (choice + 1) * golden ratio: all 64 bits of the
    seed count, and choices (or seeds) next to each other get unrelated streams.
    """
    if seed is None:
        return secrets.randbits(32)
    x = (seed + (choice + 1) * 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return (x ^ (x >> 31)) >> 32
