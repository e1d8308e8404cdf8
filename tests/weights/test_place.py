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
from jinfer.weights.convert import convert
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


def test_every_format_gives_the_same_arrays(parts, tmp_path):
    parameters, reader, _ = parts
    convert(PLAIN, tmp_path / "orbax", "orbax")
    layout = Layout.build(LayoutConfig(mesh={"tensor": 2}, rules=dict.fromkeys(("vocab", "kv_heads", "ffn"), "tensor")))
    parameters = Assembly.build(open_checkpoint(PLAIN).config, EngineConfig(), layout).parameters
    for one, other in zip(place(parameters, reader, layout),
                          place(parameters, open_checkpoint(tmp_path / "orbax").reader, layout), strict=True):
        assert one.sharding == other.sharding
        np.testing.assert_array_equal(one, other)


def test_nothing_on_a_device_is_a_view_of_the_file(tmp_path):
    """The file may be replaced while the model runs."""
    convert(PLAIN, tmp_path / "m", "safetensors", dtype="bfloat16")
    checkpoint, layout = open_checkpoint(tmp_path / "m"), Layout.build(LayoutConfig())
    config = EngineConfig(dtype="bfloat16")
    weights = place(Assembly.build(checkpoint.config, config, layout).parameters, checkpoint.reader, layout)
    before = [np.array(w) for w in weights]
    with (tmp_path / "m" / "model.safetensors").open("r+b") as file:
        file.write(b"\xff" * (tmp_path / "m" / "model.safetensors").stat().st_size)
    assert np.isnan(checkpoint.reader.read("model.norm.weight")).all()  # as the reader shows
    for was, now in zip(before, weights, strict=True):
        np.testing.assert_array_equal(was, now)


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
