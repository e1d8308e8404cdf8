"""Records of rows and what the sampler sees of them."""

import jax.numpy as jnp
import numpy as np

from jinfer.config import SamplingParams
from jinfer.engine.state import record, record_width, row_params
from jinfer.sampling.sampler import _edited, _filtered, _greedy
from jinfer.scheduler import Request


def test_rows_that_emit_nothing_ask_for_nothing():
    """Padding rows and chunks that end before their prompt must not take a batch off the sampler's fast paths."""
    width = record_width(4)
    asking = SamplingParams(temperature=1.0, top_p=0.5, repetition_penalty=1.5, logit_bias={3: 1.0}, min_tokens=9, logprobs=2)
    request = Request("a", 0, [1, 2], asking, 20, stop_ids=(5,))
    rows = jnp.asarray(np.stack([record(request, width), record(request, width), np.zeros(width, np.int32)]))
    params = row_params(rows, jnp.full(3, 2, jnp.int32), jnp.full((3, 2), 3, jnp.int32), jnp.ones((3, 2)),
                        jnp.array([True, False, False]))
    assert _edited(params).tolist() == [True, False, False]
    assert _filtered(params).tolist() == [True, False, False]
    assert _greedy(params).tolist() == [False, True, True]
    assert (np.asarray(params.logprobs) >= 0).tolist() == [True, False, False]
