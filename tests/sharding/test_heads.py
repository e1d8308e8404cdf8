"""Blocks of pages between meshes: whatever number of heads, copies of heads and devices each side has."""

import itertools
import threading
import time

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jinfer.engine.transfer import BetweenProcesses, InProcess
from jinfer.sharding.heads import HeadPlacement


def placement(kv_heads, tensor, first):
    mesh = Mesh(np.array(jax.devices()[first : first + tensor]), ("tensor",))
    return HeadPlacement(NamedSharding(mesh, PartitionSpec(None, None, "tensor")), max(kv_heads, tensor), kv_heads)


@pytest.fixture(scope="module")
def transfers():
    return InProcess(), BetweenProcesses(jax.devices()[0])


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_every_device_gets_its_heads(transfers, kv_heads):
    heads = np.arange(3 * 2 * kv_heads * 4 * 5, dtype=np.float32).reshape(3, 2, kv_heads, 4, 5)
    for source, target in itertools.product((1, 2, 4), (1, 2, 4)):
        here, there = placement(kv_heads, source, 0), placement(kv_heads, target, 4)
        pages = jax.device_put(np.repeat(heads, here.heads // kv_heads, 2), here.sharding)
        scales = jax.device_put(np.repeat(heads[..., 0], here.heads // kv_heads, 2), here.sharding)
        for transfer in transfers:
            with jax.transfer_guard("disallow"):
                ticket = transfer.send({"k": pages, "v": None, "scales": scales})
                got = transfer.receive(ticket, there)
            assert got["k"].sharding == there.sharding
            want = np.repeat(heads, there.heads // kv_heads, 2)
            np.testing.assert_array_equal(got["k"], want)
            np.testing.assert_array_equal(got["scales"], want[..., 0])
            assert got["v"] is None
            assert ticket.nbytes == pages.nbytes + scales.nbytes


def test_an_offer_is_kept_until_it_is_received_or_released(transfers):
    here = placement(2, 1, 0)
    transfer, _ = transfers
    x = jax.device_put(np.zeros((1, 1, 2, 1, 1), np.float32), here.sharding)
    received, released = transfer.send(x), transfer.send(x)
    transfer.receive(received, here)
    transfer.release(released)
    for ticket in (received, released):
        with pytest.raises(KeyError):
            transfer.receive(ticket, here)


def test_what_does_not_come_becomes_an_error():
    """Not by itself: jaxlib looks for what is overdue when something new is offered."""
    here = placement(2, 1, 0)
    transfer = BetweenProcesses(jax.devices()[0], patience=1.0)
    x = jax.device_put(np.zeros((1, 1, 2, 1, 1), np.float32), here.sharding)
    ticket = transfer.send(x)
    jax.block_until_ready(transfer.receive(ticket, here))
    never = transfer.receive(ticket, here)
    time.sleep(1.1)
    transfer.send(x)
    caught = []

    def wait():
        try:
            jax.block_until_ready(never)
        except Exception as error:
            caught.append(str(error))

    waiting = threading.Thread(target=wait, daemon=True)  # which must not hang with it
    waiting.start()
    waiting.join(20)
    assert caught, "still waiting"
    assert "expired" in caught[0]
