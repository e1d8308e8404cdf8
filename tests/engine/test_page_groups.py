"""Models with windows, alone and beside full attention: greedy ids equal a full forward to the context's last position,
and pages below a window are given back."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jinfer.config import SamplingParams
from jinfer.errors import CapacityError
from jinfer.kv import window_pages
from jinfer.weights import open_checkpoint
from tests.engines import DATA, bold, drain, run
from tests.models.forward import compiled

WINDOW, CONTEXT = 8, 48
COMMON = {"max_context": CONTEXT, "max_rows": 2, "prefill_tokens": 8}
# Pages of the largest group: two mixed requests of 40 tokens do not fit together; a windowed prompt is longer than the pool.
MIXED = {**COMMON, "page_size": 4, "kv_pages": 18}
MIXED_STEPS = {**COMMON, "page_size": 8, "kv_pages": 20, "decode_steps": 3, "prefill_tokens": 32}
WINDOWED = {**COMMON, "page_size": 4, "kv_pages": 8, "decode_steps": 2}
ENGINES = [("gemma2", MIXED), ("gemma2", MIXED_STEPS), ("mistral", WINDOWED)]
TO_THE_END = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)

rng = np.random.default_rng(0)
# Around the edges of pages of 4 and 8, of the window and of chunks of 8; one fills the context but for a token.
PROMPTS = [rng.integers(0, 256, n).tolist() for n in (1, 4, 7, 8, 9, 12, 15, 16, 17, 25, 31, 40, 47)]


@pytest.fixture(scope="module")
def best():
    """best(model)(ids): the most probable token after each of CONTEXT ids, by one forward over all of them."""

    @functools.cache
    def of(name):
        checkpoint = open_checkpoint(DATA / "models" / name)
        logits = compiled(checkpoint.config, checkpoint.reader, [CONTEXT])
        return lambda ids: logits([ids])[0].argmax(-1).tolist()

    return of


@pytest.mark.parametrize(("name", "overrides"), ENGINES, ids=["mixed", "mixed, several steps", "windowed"])
def test_ids_equal_a_full_forward_to_the_end_of_the_context(engines, best, name, overrides):
    """Together and alone, in chunks, preempted; prompts and outputs cross every edge."""
    engine = engines.get(name, **overrides)
    before = engine.metrics.preemptions
    with bold(engine):
        together = [o.completions[0].token_ids for o in run(engine, PROMPTS, TO_THE_END)]
    for prompt, ids in zip(PROMPTS, together, strict=True):
        assert len(prompt + ids) == CONTEXT
        assert ids == best(name)(prompt + ids)[len(prompt) - 1:-1]
    if overrides is MIXED:
        assert engine.metrics.preemptions > before
    for i in (0, 4, 11):
        assert run(engine, [PROMPTS[i]], TO_THE_END)[0].completions[0].token_ids == together[i]


@pytest.mark.parametrize(("name", "overrides"), ENGINES[1:], ids=["mixed", "windowed"])
def test_a_long_decode_holds_a_window_of_pages(engines, name, overrides):
    """The dispatch in flight included: a page is another's as soon as no query to come sees it."""
    engine = engines.get(name, **overrides)
    pools = engine.workers[0].scheduler.pages.pools
    engine.submit(PROMPTS[0], TO_THE_END)
    most = [0] * len(pools)
    deltas = []
    while engine.has_work:
        deltas += engine.step()
        most = [max(peak, pool.held) for peak, pool in zip(most, pools, strict=True)]
        engine.check()
    drain(engine, deltas)
    size, steps = overrides["page_size"], overrides["decode_steps"]
    whole = -(-(CONTEXT - 1) // size)
    bound = window_pages(WINDOW, size, steps)
    assert most == [whole if pool.window is None else bound for pool in pools]
    assert bound < whole


def test_what_cannot_fit_is_refused_with_both_numbers(engines):
    """Only full attention limits the length of a request; a window does not."""
    mixed, windowed = engines.get("gemma2", **{**MIXED, "kv_pages": 9}), engines.get("mistral", **WINDOWED)
    assert (mixed.max_context, windowed.max_context) == (32, CONTEXT)
    with pytest.raises(CapacityError, match="33 tokens are more than the context of 32"):
        mixed.submit(PROMPTS[-1][:33], TO_THE_END)
    groups = engines.get("gemma2", **MIXED).metrics.page_groups
    assert [(g.window, g.total) for g in groups] == [(None, 17), (WINDOW, 2 * 3 + 8 // 4 + 1)]


def test_a_page_given_back_may_hold_anything(engines):
    """Its next owner's values are no number: who gave it back reads nothing of them, nor do later owners."""
    engine = engines.get("mistral", **WINDOWED)
    want = run(engine, PROMPTS[-2:], TO_THE_END)
    ids = [engine.submit(prompt, TO_THE_END) for prompt in PROMPTS[-2:]]
    runner, deltas = engine.workers[0].runner, []
    (count,) = runner.pages
    poison = jax.jit(lambda x, kept: jnp.where(kept[:, None, None, None], x, jnp.nan))
    while engine.has_work:
        deltas += engine.step()
        kept = np.zeros((runner.kv[0].k.data.shape[0] // count, count), bool)  # [layers, P]
        kept[:, [0, *(page for request in engine._by_request for pages in request.pages for page in pages)]] = True
        runner.kv = jax.tree.map(functools.partial(poison, kept=kept.ravel()), runner.kv)
    outputs, _ = drain(engine, deltas)
    assert [outputs[i].completions[0].token_ids for i in ids] == [o.completions[0].token_ids for o in want]
