"""Coefficients are found again in times made from them, and in an engine that computes."""

import numpy as np
import pytest

from jinfer.bench.profile import Profiler, fit


def test_fit_finds_the_coefficients_in_spite_of_disturbances():
    rng = np.random.default_rng(0)
    terms = np.column_stack([np.ones(200), rng.integers(1, 64, 200), rng.integers(10, 50_000, 200)])
    truth = np.array([3e-3, 2e-4, 1e-7])
    seconds = terms @ truth * rng.normal(1.0, 0.01, 200)
    seconds[::5] *= 5  # another process had the processor
    assert fit(np.column_stack([terms, seconds]).tolist()) == pytest.approx(truth, rel=0.03)


def test_no_coefficient_is_negative():
    rng = np.random.default_rng(1)
    terms = np.column_stack([np.ones(50), rng.integers(1, 9, 50), rng.integers(1, 99, 50)])
    assert min(fit(np.column_stack([terms, 1.0 - 0.05 * terms[:, 1]]).tolist())) >= 0.0


def test_calls_of_an_engine_are_seen_with_what_they_computed(engines):
    engine = engines.get("llama_plain")
    profiler = Profiler(engine)
    profiler.measure(rows=[1, 3], lengths=[5, 40], outputs=3, repeat=2, vocab=60)
    buckets = engine.workers[0].runner.catalog.buckets
    tokens, rows = ([call[1] for call in calls] for calls in (profiler.prefill, profiler.decode))
    assert set(tokens) <= set(buckets.prefill), "not as they are padded"
    assert set(rows) <= set(buckets.decode)
    assert 4 in rows  # three rows
    assert sum(tokens) >= 2 * (1 + 3) * (5 + 40)
    assert sum(rows) >= 2 * 2 * (1 + 3) * 2
    assert min(call[3] for call in profiler.prefill + profiler.decode) > 0
    before = len(profiler.decode)
    engine.submit([1, 2, 3])
    while engine.has_work:
        engine.step()
    assert len(profiler.decode) == before
    profile = profiler.profile()
    assert len(profile.prefill) == len(profile.decode) == 3
