"""Placing weights: progress, and what an error does to the rest."""

import itertools
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from jinfer.config import EngineConfig, LayoutConfig
from jinfer.engine.assembly import Assembly
from jinfer.errors import CheckpointError
from jinfer.sharding import Layout
from jinfer.weights import open_checkpoint
from jinfer.weights.place import place

PLAIN = Path(__file__).resolve().parents[1] / "data" / "models" / "llama_plain"


@pytest.fixture(scope="module")
def parts():
    checkpoint, layout = open_checkpoint(PLAIN), Layout.build(LayoutConfig())
    return Assembly.build(checkpoint.config, EngineConfig(), layout).parameters, checkpoint.reader, layout


def test_progress_in_the_calling_thread(parts):
    seen = []
    weights = place(*parts, lambda *now: seen.append((*now, threading.current_thread() is threading.main_thread())))
    total = parts[1].nbytes()
    assert len(seen) == len(parts[0])
    assert seen[-1] == (total, total, True)
    assert all(a[0] < b[0] for a, b in itertools.pairwise(seen))
    # in the order of the parameters, whichever was read first
    assert [w.shape for w in weights] == [p.shape for p in parts[0]]


class Failing:
    def __init__(self, reader):
        self.reader, self.reads = reader, 0

    def nbytes(self):
        return self.reader.nbytes()

    def read(self, name, index=()):
        self.reads += 1
        if self.reads > 1:
            time.sleep(0.01)  # long enough for the first error to be seen
        raise CheckpointError(f"tensor {name}: cannot be read")


def test_the_first_error_ends_it(parts):
    parameters, reader, layout = parts
    failing = Failing(reader)
    with pytest.raises(CheckpointError, match="cannot be read"):
        place(parameters * 50, failing, layout)
    assert failing.reads < 25 * len(parameters)


def test_load_figures_reach_the_metrics(engines):
    engine = engines.get("llama_plain")
    assert engine.metrics.load_bytes == open_checkpoint(PLAIN).reader.nbytes()
    assert engine.metrics.load_seconds > 0
    later = engine.metrics.since(engine.metrics.snapshot())
    assert later.load_bytes == engine.metrics.load_bytes
    assert np.isclose(later.load_seconds, engine.metrics.load_seconds)
