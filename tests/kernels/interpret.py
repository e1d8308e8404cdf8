"""Running a kernel in the full TPU interpreter."""

import numpy as np
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu


def run_detecting_races(run):
    """run(interpret) with copies that land when awaited, NaN for memory nobody wrote, and races as errors."""
    params = pltpu.InterpretParams(detect_races=True, dma_execution_mode="on_wait", uninitialized_memory="nan")
    got = np.asarray(run(params).astype("float32"))
    races = getattr(interpret_pallas_call, "races", None)  # jax 0.11 only notes them
    assert not getattr(races, "races_found", False), "the interpreter found a race"
    return got
