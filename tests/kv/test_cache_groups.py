"""Bytes of the cache by kind of layer, against figures worked out by hand."""

import pytest

from jinfer.config import LatentConfig, LayerConfig, ModelConfig, RopeConfig
from jinfer.kv.cache import CacheGroup, cache_groups, longest_sequence, sequence_numbers


def model(**fields):
    return ModelConfig(**{
        "vocab_size": 10, "hidden_size": 640, "intermediate_size": 2048, "num_layers": 18, "num_heads": 4,
        "num_kv_heads": 1, "head_dim": 256, "max_context": 32768} | fields)


GEMMA3 = model(layers=(LayerConfig(count=5, window=512, local_rope=True), LayerConfig()), local_rope=RopeConfig())


def test_groups():
    assert cache_groups(model(num_kv_heads=4, head_dim=64)) == (CacheGroup(None, 18, 512),)
    assert cache_groups(GEMMA3) == (CacheGroup(None, 3, 512), CacheGroup(512, 15, 512))
    latent = LatentConfig(q_rank=None, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128)
    # one vector, no value beside it
    assert cache_groups(model(latent=latent, head_dim=192, num_layers=60)) == (CacheGroup(None, 60, 576),)


def test_positions_of_a_window():
    group = CacheGroup(512, 1, 1)
    # 512 positions lie on 9 pages of 64 unless the first of them begins one
    assert [group.positions(n, 64) for n in (1, 64, 65, 512, 575, 576, 10_000)] == [64, 64, 128, 512, 576, 576, 576]
    assert CacheGroup(None, 1, 1).positions(10_000, 64) == 10_048


def test_sequence():
    assert sequence_numbers(cache_groups(GEMMA3), 32768, 64) == 512 * (15 * 576 + 3 * 32768)
    assert sequence_numbers(cache_groups(model()), 32768, 64) == 512 * 18 * 32768


@pytest.mark.parametrize("config", [GEMMA3, model()])
@pytest.mark.parametrize("numbers", [0, 10**5, 5 * 10**6, 10**7, 10**8, 10**10])
def test_longest_is_the_last_that_fits(config, numbers):
    groups = cache_groups(config)
    fits = [n for n in range(0, 32769, 64) if sequence_numbers(groups, n, 64) <= numbers]
    assert longest_sequence(groups, numbers, 64, 32768) == fits[-1]


def test_longest_is_no_more_than_the_model_sees():
    assert longest_sequence(cache_groups(GEMMA3), 10**12, 64, 1000) == 1000
