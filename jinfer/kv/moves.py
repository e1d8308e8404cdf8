"""Moves of pages between the pool and the host tier, and within the pool."""

from typing import NamedTuple


class PageOut(NamedTuple):
    """A page of the pool goes to a slot of the host tier; the pool's page is free for others in the same plan."""

    group: int
    page: int
    slot: int


class PageIn(NamedTuple):
    """A slot of the host tier goes to a page of the pool; the slot keeps what it holds."""

    group: int
    slot: int
    page: int


class PageCopy(NamedTuple):
    """A page of the pool is copied to another one: a fork's partly filled last page."""

    group: int
    source: int
    target: int
