"""Transfer: KV pages from one engine's devices to another's, within a process or between two."""

import dataclasses
import datetime
import itertools
import secrets
from collections.abc import Sequence
from typing import Any, Protocol

import jax
from jax.experimental import transfer
from jax.sharding import SingleDeviceSharding

from jinfer.sharding.heads import HeadPlacement, Piece, pieces_of

Payload = Any  # a pytree of blocks of pages, [n, L, K, S, H]; see page_moves.Payload


@dataclasses.dataclass(frozen=True, slots=True)
class Ticket:
    """Names a payload on offer. Plain data: it may go to another process, which then receives the payload.

    Attributes:
      id: of the offer. address: of the process that has it, empty for this one. nbytes: of the payload.
      offer: the payload with an Offer in place of each array.
    """

    id: int
    nbytes: int
    address: str = ""
    offer: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class Offer:
    """An array elsewhere: the shape of each piece, the first head it holds, and the dtype."""

    shapes: tuple[tuple[int, ...], ...]
    starts: tuple[int, ...]
    dtype: str


class Transfer(Protocol):
    """How payloads travel. No call waits for a device; an error of one that is under way shows in its arrays."""

    def send(self, payload: Payload) -> Ticket:
        """Offers a payload; it is kept until it is received or released."""
        ...

    def receive(self, ticket: Ticket, place: HeadPlacement) -> Payload:
        """The payload on the devices of `place`, or on its way there. The offer ends."""
        ...

    def release(self, ticket: Ticket) -> None:
        """Ends an offer that nobody has received; a call of the sender's."""
        ...


class InProcess:
    """Between meshes of one process: copies from device to device."""

    def __init__(self) -> None:
        self._ids = itertools.count()
        self._payloads: dict[int, Payload] = {}

    def send(self, payload: Payload) -> Ticket:
        ticket = Ticket(next(self._ids), sum(x.nbytes for x in jax.tree.leaves(payload)))
        self._payloads[ticket.id] = payload
        return ticket

    def receive(self, ticket: Ticket, place: HeadPlacement) -> Payload:
        payload = self._payloads[ticket.id]
        if all(_alike(x, place) for x in jax.tree.leaves(payload)):
            arrived = jax.device_put(payload, place.sharding)  # all arrays in one call
        else:
            arrived = jax.tree.map(lambda x: place.place(pieces_of(x)), payload)
        del self._payloads[ticket.id]
        return arrived

    def release(self, ticket: Ticket) -> None:
        self._payloads.pop(ticket.id, None)


class BetweenProcesses:
    """Over the sockets of jax.experimental.transfer, between processes on one host or several; each has one.

    An array travels as the parts its devices hold, so that it may be cut otherwise where it arrives: a pull of whole
    arrays wants as many devices there as here (jaxlib 0.12).
    """

    def __init__(self, device: jax.Device, address: str = "127.0.0.1:0", patience: float = 60.0):
        """Args:
          device: any of this process's.
          address: host and port to listen at; port 0 takes a free one.
          patience: seconds after which an offer lapses and what has not come is an error; jaxlib 0.12 looks for what
            is overdue when something else is offered.
        """
        host = address.rpartition(":")[0]
        self._server = transfer.start_transfer_server(device.client, address, [f"{host}:0"])
        self._device = device
        self._patience = patience
        self._connections: dict[str, Any] = {}

    def send(self, payload: Payload) -> Ticket:
        leaves, treedef = jax.tree.flatten(payload)
        cut = [pieces_of(x) for x in leaves]
        offers = [Offer(tuple(p.data.shape for p in pieces), tuple(p.start for p in pieces), str(x.dtype))
                  for x, pieces in zip(leaves, cut, strict=True)]
        ticket = Ticket(secrets.randbits(62), sum(x.nbytes for x in leaves), self._server.address(),
                        jax.tree.unflatten(treedef, offers))
        self._server.await_pull(ticket.id, [piece.data for pieces in cut for piece in pieces], timeout=self._deadline())
        return ticket

    def receive(self, ticket: Ticket, place: HeadPlacement) -> Payload:
        pulled = self._pull(ticket, place.sharding.mesh.devices.ravel().tolist())
        return jax.tree.map(lambda offer, data: place.place([*map(Piece, offer.starts, data)]), ticket.offer, pulled,
                            is_leaf=_is_offer)

    def release(self, ticket: Ticket) -> None:
        self._pull(ticket, [self._device])  # there is no other way to take an offer back before it lapses

    def _pull(self, ticket: Ticket, devices: Sequence[jax.Device]) -> Any:
        """ticket.offer with a list of arrays, one a piece, in place of each Offer."""
        if ticket.address not in self._connections:
            self._connections[ticket.address] = self._server.connect(ticket.address)
        places = [SingleDeviceSharding(device) for device in devices]
        wanted = jax.tree.map(lambda offer: [
            jax.ShapeDtypeStruct(shape, offer.dtype, sharding=places[i % len(places)])
            for i, shape in enumerate(offer.shapes)], ticket.offer, is_leaf=_is_offer)
        return self._connections[ticket.address].pull(ticket.id, wanted, timeout=self._deadline())

    def _deadline(self) -> datetime.datetime:
        return datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=self._patience)


def _alike(x: jax.Array, place: HeadPlacement) -> bool:
    """Device i there gets what device i here has."""
    if x.shape != place.shape(x.shape):
        return False
    here, there = (sharding.devices_indices_map(x.shape).values() for sharding in (x.sharding, place.sharding))
    return list(here) == list(there)


def _is_offer(x: Any) -> bool:
    return isinstance(x, Offer)
