"""The parts of a daemon that its page reads, as plain values."""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from sqlite3 import Connection
from types import SimpleNamespace
from typing import Any, cast

from dugnad.averaging import events as averaging
from dugnad.averaging import formats as fm
from dugnad.averaging.credit import CreditFold
from dugnad.averaging.node import Node
from dugnad.dashboard.events import PeerRow
from dugnad.dashboard.state import State
from dugnad.dht.advert import Advert
from dugnad.dht.identity import Identity
from dugnad.dht.ids import PeerId, name_of, short
from dugnad.dht.roster_table import PeerState
from dugnad.dht.roster_table import State as Standing
from dugnad.peer import clock
from dugnad.peer.assembly import credit_rules
from dugnad.peer.config import Endpoint
from dugnad.peer.corpus import SHARD_BYTES, DataIndex
from dugnad.peer.daemon import Daemon
from dugnad.peer.evaluation import Evaluation
from dugnad.peer.journal import Journal
from dugnad.peer.links import Carried
from dugnad.peer.manifest import Manifest, build_manifest, run_id
from dugnad.peer.pageviews import Moment
from dugnad.peer.preparation import Preparation
from dugnad.peer.publicpage import (
    PublicPage,
    moment,
)
from dugnad.peer.runfile import EXAMPLE_RUN, parse_run_file
from dugnad.peer.scores import HeldOut
from dugnad.peer.store import Receipt as StoredReceipt
from dugnad.peer.store import Store
from dugnad.peer.unitevents import UnitsStatus
from dugnad.peer.unitplan import UnitPlan

ME, A, B = (Identity.ephemeral(bytes([n]) * 32).peer for n in (1, 2, 3))
HOSTILE = '<script>alert(1)</script>\u202e\x1b[2J"'
SMALL = (
    EXAMPLE_RUN.replace("dim = 128 ", "dim = 16 ")
    .replace("layers = 4", "layers = 1")
    .replace("hidden = 352", "hidden = 24")
    .replace("context = 128", "context = 32")
)


@dataclass
class Roster:
    """What the page asks of a roster."""

    adverts: dict[PeerId, Advert] = field(default_factory=dict)
    states: dict[PeerId, PeerState] = field(default_factory=dict)

    def advert(self, peer: PeerId) -> Advert | None:
        return self.adverts.get(peer)

    def state(self, peer: PeerId) -> PeerState:
        return self.states[peer]

    def known(self) -> tuple[PeerId, ...]:
        return tuple(self.states)


async def nothing_waits() -> None:
    """Flush a ledger all of which is written."""


@dataclass
class Memory:
    """A store without a disk, and its thread without a thread."""

    values: dict[str, bytes] = field(default_factory=dict)
    rows: list[StoredReceipt] = field(default_factory=list)
    commits: dict[bytes, fm.CommitRecord] = field(default_factory=dict)
    gate: asyncio.Event | None = None
    tables: Store | None = None

    async def call(self, work: Callable[[Store], Any]) -> Any:  # Any: what the work gives
        if self.gate is not None:
            await self.gate.wait()
        return work(cast(Store, self))

    def keep(self, key: str, value: bytes) -> None:
        self.values[key] = value

    def kept(self, key: str) -> bytes | None:
        return self.values.get(key)

    def batch(self) -> AbstractContextManager[Connection]:
        self.tables = self.tables or Store.open(Path(":memory:"))
        return self.tables.batch()

    def close(self) -> None:
        if self.tables is not None:
            self.tables.close()

    def receipts(self, peer: PeerId, limit: int) -> list[StoredReceipt]:
        return self.rows[:limit]

    def commit(self, digest: bytes) -> fm.CommitRecord | None:
        return self.commits.get(digest)


STATUS = UnitsStatus(
    epoch=1,
    epoch_progress=0.5,
    epoch_sequences=38,
    epoch_listed=19,
    open=7,
    mine=3,
    claimed=2,
    trained=1,
    claimed_sequences=6,
    trained_sequences=4,
    covered_sequences=57,
    twice_sequences=0,
    given_up=0,
    held=12,
)
"""Where the work stands in a world of which nobody asks."""


class Lineage:
    """The chosen versions of one fragment."""

    def __init__(self) -> None:
        self.nodes: dict[bytes, Node] = {}

    def get(self, digest: bytes) -> Node | None:
        return self.nodes.get(digest)

    def ancestors(self, head: Node) -> list[Node]:
        return sorted(self.nodes.values(), key=lambda node: -node.version)


def make_manifest(created_ms: int = 1_000) -> Manifest:
    """A small run's manifest."""
    index = DataIndex(2 * SHARD_BYTES - 5, (b"1" * 32, b"2" * 32))
    return build_manifest(
        parse_run_file(SMALL), Identity.ephemeral(b"o" * 32), index, created_ms=created_ms
    )


class Peer:
    """The parts of a daemon that a page reads, as plain values; `daemon` is them together."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest, self.run = manifest, run_id(manifest)
        self.live: list[PeerId] = []
        self.carried: defaultdict[PeerId, Carried] = defaultdict(
            lambda: Carried("int8", 8.03, 3, 3000, 9000)
        )
        self.roster, self.store, self.journal = Roster(), Memory(), Journal()
        self.lineages = [Lineage() for _ in manifest.table.fragments]
        self.state = ("training", "")
        self.speed = 100.0
        self.notes: list[str] = []
        self.asked: list[int] = []
        self.writes = b"Fellow citizens\n"
        self.fold = CreditFold(credit_rules(manifest, self.run))
        none = Node(b"", 0, b"", 0, 0, (), {})
        self.shells = [
            SimpleNamespace(
                core=SimpleNamespace(head=none, view=SimpleNamespace(lineage=one, due_at=0.0))
            )
            for one in self.lineages
        ]
        self.training = SimpleNamespace(
            tokens_per_s=100.0,
            loss=None,
            steps=0,
            ready=None,
            trainer=SimpleNamespace(sample=self.sample),
        )
        self.vitals = SimpleNamespace(
            swarm_tokens=0,
            anchor_losses=deque[tuple[int, float]](),
            synced=False,
            swarm_tokens_per_s=lambda: self.speed,
        )
        self.averager = self._averager()
        held = HeldOut(manifest.data.held_out_start, 64, manifest.data.context)
        self.preparation = Preparation(ME, self.run, UnitPlan(self.run, 400, 4), 100)
        self.evaluation = Evaluation(ME, self.run, 2, held)
        self.daemon = SimpleNamespace(
            identity=SimpleNamespace(peer=ME),
            settings=SimpleNamespace(name=""),
            started_at=clock.now(),
            manifest=manifest,
            run_id=self.run,
            journal=self.journal,
            store=self.store,
            averager=self.averager,
            swarm=SimpleNamespace(roster=self.roster),
            links=SimpleNamespace(carried_to=self.carried.__getitem__, rate=lambda peer: 250_000.0),
            training=self.training,
            vitals=self.vitals,
            ledger=SimpleNamespace(fold=self.fold, board=self.fold.board, flush=nothing_waits),
            units=SimpleNamespace(status=lambda now: STATUS),
            evaluator=SimpleNamespace(core=self.evaluation),
            preparer=SimpleNamespace(core=self.preparation),
            report=SimpleNamespace(state=lambda: self.state),
            happenings=SimpleNamespace(label=lambda peer: f"{name_of(peer)} ({short(peer)})"),
            leaving=asyncio.Event(),
            note=lambda kind, text: self.notes.append(f"{kind}: {text}"),
        )

    def _averager(self) -> SimpleNamespace:
        live = lambda: tuple(self.live)  # noqa: E731  an attribute of a stand-in
        return SimpleNamespace(fragments=self.shells, live=live, anchors=list)

    async def sample(self, anchors: Any, prompt: bytes, length: int, seed: int) -> bytes:
        """Any: the anchors are of no interest here."""
        self.asked.append(length)
        return self.writes

    def comes(self, peer: PeerId, **said: Any) -> None:
        """A live peer with an advert. Any: fields of all types."""
        self.live.append(peer)
        self.roster.adverts[peer] = Advert(peer=peer, boot=1, **said)
        self.roster.states[peer] = PeerState(Standing.LIVE, "", clock.now(), clock.now())

    def goes(self, peer: PeerId) -> None:
        """It is live no longer."""
        self.live.remove(peer)
        self.roster.states[peer] = PeerState(Standing.LOST, "silent", clock.now(), clock.now())

    def merge(
        self, p: int, version: int, home: PeerId, work: dict[PeerId, int]
    ) -> tuple[averaging.Adopt, fm.CommitRecord]:
        """A new head of fragment `p` with one unit piece a contributor."""
        inputs = tuple(
            fm.Input(
                contribution_of(peer, p, version, tokens), (fm.UnitPiece(0, n, 0, 2),), 1.0, ()
            )
            for n, (peer, tokens) in enumerate(work.items())
        )
        record = fm.CommitRecord(header_of(self.run, p, version, home), inputs)
        digest = fm.header_digest(record.header, self.run)
        weights = {bytes(one): tokens for one, tokens in work.items()}
        node = Node(digest, version, b"", 5, 1000 * version, (), {}, record, weights=weights)
        self.lineages[p].nodes[digest] = node
        self.shells[p].core.head = node
        return averaging.Adopt(digest, version, (), (record,), False), record


def contribution_of(peer: PeerId, p: int, seq: int, tokens: int) -> fm.Contribution:
    return fm.Contribution(
        peer, p, seq, 0, b"0" * 32, tokens, 1, 10, True, "int8", b"r" * 32, 100, b"p" * 32
    )


def header_of(run: bytes, p: int, version: int, home: PeerId) -> fm.Header:
    root = b"x" * 32
    return fm.Header(
        format=1,
        run=run,
        kind="merge",
        fragment=p,
        version=version,
        parent=b"",
        home=home,
        boot=1,
        time_ms=5,
        members_root=root,
        inputs_root=root,
        inputs_count=1,
        tokens_total=1000 * version,
        eta_bits=0,
        mu_bits=0,
        codec="int8",
        payload_root=root,
        payload_bytes=200,
        theta_root=root,
        momentum_root=root,
        seqs_root=root,
    )


def page_of(peer: Peer) -> PublicPage:
    return PublicPage(cast(Daemon, peer.daemon), Endpoint("127.0.0.1", 0))


async def opened(peer: Peer) -> PublicPage:
    page = page_of(peer)
    await page.open()
    return page


async def turn() -> None:
    """What was noted for the next turn of the loop is told."""
    await asyncio.sleep(0)
    await asyncio.sleep(0)


def later(seconds: float) -> Moment:
    at = moment()
    return Moment(at.now + seconds, at.wall_ms + round(1000 * seconds))


def rows(state: State) -> dict[str, PeerRow]:
    return {row.peer: row for row in state.peers.values()}
