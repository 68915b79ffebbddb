"""Peers that hold and hand over bulk data, in memory: for the tests of both ends."""

import hashlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from dugnad.averaging.buffers import AnchorState
from dugnad.averaging.codecs import CODECS, leaf_bounds
from dugnad.averaging.formats import (
    FORMAT,
    NO_DIGEST,
    CommitRecord,
    Contribution,
    Header,
    HeadRow,
    UnitPiece,
    header_digest,
    inputs_root,
    pieces_root,
    sign_record,
)
from dugnad.averaging.statements import StatementSet
from dugnad.averaging.tree import LEAF_PARAMS, leaf_hashes, root, root_of
from dugnad.averaging.worker import Commit
from dugnad.dht.identity import Identity
from dugnad.dht.ids import PeerId, RunId
from dugnad.dht.memory import MemoryNetwork, MemoryTransport
from dugnad.dht.ports import Stream
from dugnad.peer.pull import Puller, PullPolicy
from dugnad.peer.transfer import PullServer
from dugnad.peer.transferwire import (
    PULL_PROTOCOL,
    Blame,
    Traffic,
)

RUN = RunId(hashlib.sha256(b"a run").digest())
ME = Identity.ephemeral(b"m" * 32)
HOME = Identity.ephemeral(b"h" * 32)
SIZE = 200_000
WAIT_S = 5.0
QUICK = PullPolicy(open_s=WAIT_S, idle_s=0.05, patience_s=0.02)
CALM = PullPolicy(open_s=WAIT_S, idle_s=WAIT_S, patience_s=WAIT_S)


def identity(number: int) -> Identity:
    return Identity.ephemeral(bytes([number]) * 32)


PIECES = (UnitPiece(0, 3, 0, 8), UnitPiece(0, 4, 2, 5))


def made_payload(size: int = SIZE, codec: str = "int8") -> bytes:
    values = np.random.default_rng(1).standard_normal(size).astype(np.float32)
    return CODECS[codec].encode(values)


def made_contribution(payload: bytes, **changes: object) -> Contribution:
    codec = CODECS["int8"]
    fields: dict[str, object] = {
        "peer": ME.peer,
        "fragment": 0,
        "seq": 7,
        "base": 1,
        "base_digest": b"b" * 32,
        "tokens": 1000,
        "steps": 3,
        "speed_class": 20,
        "eligible": True,
        "codec": "int8",
        "payload_root": root(payload, leaf_bounds(codec, SIZE)),
        "payload_bytes": len(payload),
        "pieces_root": pieces_root(RUN, PIECES),
    }
    made = Contribution(**(fields | changes))  # type: ignore[arg-type]  # a table of mixed types
    return sign_record(made, RUN, ME)


def size_of(fragment: int, codec: str) -> int | None:
    return CODECS[codec].encoded_size(SIZE) if fragment == 0 else None


@dataclass
class Inbox:
    """What a home took and what it refused."""

    answer: str = ""
    taken: list[tuple[Contribution, tuple[UnitPiece, ...], bytes]] = field(default_factory=list)
    refused: list[tuple[PeerId, str]] = field(default_factory=list)

    async def take(self, made: Contribution, pieces: tuple[UnitPiece, ...], payload: bytes) -> str:
        self.taken.append((made, pieces, payload))
        return self.answer

    def refuse(self, peer: PeerId, reason: str) -> None:
        self.refused.append((peer, reason))


async def world(*peers: Identity) -> tuple[MemoryNetwork, list[MemoryTransport]]:
    """Transports of these peers, the first connected to the others."""
    network = MemoryNetwork()
    transports = [network.join(peer.peer) for peer in peers]
    for other in transports[1:]:
        await transports[0].dial(other.peer, await other.addresses(), WAIT_S)
    return network, transports


def made_header(fragment: int = 0, parent: bytes = b"p" * 32, **changes: object) -> Header:
    fields: dict[str, object] = {
        "format": FORMAT,
        "run": RUN,
        "kind": "merge",
        "fragment": fragment,
        "version": 1,
        "parent": parent,
        "home": HOME.peer,
        "boot": 1,
        "time_ms": 1,
        "members_root": NO_DIGEST,
        "inputs_root": inputs_root(RUN, ()),
        "inputs_count": 0,
        "tokens_total": 1,
        "eta_bits": 0,
        "mu_bits": 0,
        "codec": "int8",
        "payload_root": NO_DIGEST,
        "payload_bytes": 0,
        "theta_root": NO_DIGEST,
        "momentum_root": NO_DIGEST,
        "seqs_root": NO_DIGEST,
    }
    header = Header(**(fields | changes))  # type: ignore[arg-type]  # a table of mixed types
    return sign_record(header, RUN, HOME)


@dataclass
class Held:
    """A commit as peers hold it."""

    header: Header
    commit: Commit
    state: AnchorState

    @property
    def digest(self) -> bytes:
        return header_digest(self.header, RUN)


def made_commit(fragment: int = 0, size: int = SIZE) -> Held:
    chance = np.random.default_rng(fragment)
    theta, momentum = chance.standard_normal((2, size)).astype(np.float32)
    state = AnchorState.of(theta, momentum)
    codec = CODECS["int8"]
    payload = codec.encode(momentum)
    leaves = leaf_hashes(payload, leaf_bounds(codec, size))
    header = made_header(
        fragment,
        payload_root=root_of(leaves),
        payload_bytes=len(payload),
        theta_root=state.theta_root,
        momentum_root=state.momentum_root,
    )
    return Held(header, Commit("int8", payload, leaves), state)


class Shelf:
    """A donor that holds what the test gives it."""

    def __init__(self, *held: Held) -> None:
        self.held = {(one.header.fragment, one.digest): one for one in held}
        self.text: bytes | None = None
        self.told: bytes | None = None
        self.shards: dict[int, bytes] = {}
        self.blocks: dict[bytes, bytes] = {}
        self.chain: tuple[CommitRecord, ...] = ()
        self.said = StatementSet(RUN, lambda peer: True)
        self.asked = 0

    def manifest(self) -> bytes | None:
        return self.text

    def heads(self) -> tuple[HeadRow, ...]:
        return tuple(
            HeadRow(fragment, one.header.version, digest)
            for (fragment, digest), one in sorted(self.held.items())
        )

    def news(self) -> bytes | None:
        return self.told

    def commit(self, fragment: int, digest: bytes) -> Commit | None:
        self.asked += 1
        held = self.held.get((fragment, digest))
        return held.commit if held else None

    def anchor(self, fragment: int, digest: bytes) -> AnchorState | None:
        self.asked += 1
        held = self.held.get((fragment, digest))
        return held.state if held else None

    def shard(self, number: int) -> bytes | None:
        self.asked += 1
        return self.shards.get(number)

    def block(self, name: bytes) -> bytes | None:
        self.asked += 1
        return self.blocks.get(name)

    def digests(self, fragment: int, since_ms: int) -> list[bytes]:
        headers = [record.header for record in self.chain]
        mine = [h for h in headers if h.fragment == fragment and h.time_ms >= since_ms]
        return sorted(header_digest(header, RUN) for header in mine)

    def commits(self, fragment: int, digest: bytes, count: int) -> tuple[CommitRecord, ...]:
        return self.chain[:count]

    def statement_names(self) -> Sequence[bytes]:
        return self.said.names()

    def statements(self, names: Sequence[bytes]) -> tuple[bytes, ...]:
        return self.said.get(names)


@dataclass
class Swarm:
    """Me and donors that serve."""

    network: MemoryNetwork
    mine: MemoryTransport
    peers: list[PeerId]
    blame: list[Blame] = field(default_factory=list)
    traffic: Traffic = field(default_factory=Traffic)

    def puller(self, policy: PullPolicy = CALM) -> Puller:
        return Puller(self.mine, RUN, policy, blamed=self.blame.append, traffic=self.traffic)


async def swarm(*donors: Shelf | Callable[[Stream], Awaitable[None]]) -> Swarm:
    """Donors are served by a `PullServer`, handlers as they are."""
    network, (mine, *others) = await world(ME, *(identity(10 + i) for i in range(len(donors))))
    for transport, donor in zip(others, donors, strict=True):
        if isinstance(donor, Shelf):
            await PullServer(transport, RUN, donor, idle_s=WAIT_S).start()
        else:
            await transport.accept(PULL_PROTOCOL, donor)
    return Swarm(network, mine, [transport.peer for transport in others])


HELD = made_commit()
BIG = made_commit(1, 20 * LEAF_PARAMS + 5)
