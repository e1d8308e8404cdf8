"""Long random lives of a scheduler: 100,000 operations, everything that must hold looked at after each."""

from collections import Counter
from random import Random

import pytest

from jinfer.scheduler.policy import POLICIES
from tests.scheduler.life import ENDS, VOCAB, WINDOWS, Life

OPERATIONS = {"add": 30, "again": 6, "step": 50, "collect": 6, "cancel": 5, "hand_over": 20, "restart": 3, "pin": 3,
              "unpin": 2, "drain": 1}


# Windows of several groups, prefixes shared by many, pages kept for whoever was evicted once.
SHORT = {"page_size": 8, "windows": (None, 3, 16), "pages": [20, 12, 5], "rows": 6, "decode_rows": 1, "steps": 1, "share": 0.0,
         "evictions": 1, "host": None, "policy": "priority", "step_tokens": None, "keys": None, "pair": False}


def new_life(random: Random, **fixed) -> Life:
    windows = random.choice(WINDOWS)
    return Life(**{
        "page_size": random.choice([1, 2, 4, 8]), "windows": windows, "pages": [random.randint(4, 24) for _ in windows],
        "rows": random.randint(1, 6), "prefill_tokens": random.choice([1, 5, 16, 64]), "max_chunks": random.randint(1, 4),
        "steps": random.randint(1, 4), "decode_first": random.random() < 0.5, "share": random.choice([0.0, 0.0, 0.3, 1.0]),
        "evictions": random.randint(0, 4), "host": random.choice([None, 0, 3, 12, 100]), "policy": random.choice(sorted(POLICIES)),
        "decode_rows": random.choice([None, None, 1, 3]), "step_tokens": random.choice([None, None, 2, 20]),
        "itl_target": random.choice([None, 0.01, 1.0]), "keys": random.choice([None, None, 1, 5, 40]), "pair": random.random() < 0.3} | fixed)


def live(life: Life, random: Random, operations: int) -> Counter[str]:
    """A life of so many operations, to its end. Returns which they were."""
    names = list(OPERATIONS)
    done = random.choices(names, OPERATIONS.values(), k=operations)
    for name in done:
        anybody = random.choice(life.requests) if life.requests else None
        if name == "add" and life.scheduler.waiting < 12:
            life.add(prompt=random.randint(1, 40), kind=random.randint(0, 3), n=random.randint(1, 3), seed=random.randint(0, 99),
                     max_tokens=random.choice([None, random.randint(0, 40)]), ends=random.choice(ENDS),
                     host_stop=random.choice([None, random.randrange(VOCAB)]), priority=random.randint(-1, 2),
                     cache=random.random() < 0.7, cache_salt=random.choice(["", "", "a"]),
                     timeout=random.choice([None, None, None, random.uniform(0.5, 60.0)]),
                     itl_target=random.choice([None, None, random.random() + 0.01]))
        elif name == "step":
            for _ in range(random.randint(1, 6)):
                life.step(random)
        elif name == "collect":
            life.collect()
        elif name == "drain":
            life.drain()
        elif name == "unpin" and life.pins:
            life.unpin(*random.choice(life.pins))
        elif anybody is not None and name == "cancel":
            life.end(anybody, random.choice(["cancelled", "cancelled", "error"]))
        elif anybody is not None and name == "hand_over":
            for request in life.live():
                life.hand_over(request)
        elif anybody is not None and name in ("again", "restart", "pin"):
            getattr(life, name)(anybody)
        life.check()
    life.finish(random)
    return Counter(done)


@pytest.mark.parametrize("seed", range(16))
def test_some_lives(seed):
    random = Random(seed)
    live(new_life(random), random, 60)


@pytest.mark.parametrize("seed", range(6))
def test_lives_short_of_pages_of_a_window(seed):
    random = Random(seed)
    live(new_life(random, **SHORT), random, 100)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_hundred_thousand_operations():
    random, done = Random(2026), Counter()
    while done.total() < 100_000:
        done += live(new_life(random), random, random.choice([20, 60, 150, 400]))
    assert min(done[name] for name in OPERATIONS) > 500
