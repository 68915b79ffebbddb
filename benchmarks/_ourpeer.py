"""Our averaging as one peer of a benchmark does it: the daemon's parts without the exchange core.

Every fragment goes the real way: hand-in (error feedback, codec, leaf hashes, signature), push to
its home, checks there, merge with outer step and roots, signed header to all, payload pulled piece
by piece under its root, outer step again, roots compared, adopted. Fragment p's home is peer p
modulo their number, so all are homes at once. What the core would add is when to do it.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import numpy as np
from _fleet import sampled, sampled_at, vector_of
from _plainworker import PlainWorker

from dugnad.averaging import formats as fm
from dugnad.averaging.buffers import AnchorState
from dugnad.averaging.codecs import CODECS, commit_codecs
from dugnad.averaging.events import HandIn, Merge, Merged
from dugnad.averaging.fragments import FragmentTable, TensorSpec, build_table
from dugnad.averaging.outer import bits_of
from dugnad.averaging.pages import PAGES
from dugnad.averaging.tree import Vector
from dugnad.averaging.worker import Commit, FragmentRules, FragmentWorker, Progress
from dugnad.dht.direct import DirectTransport
from dugnad.dht.frames import read_frame, write_frame
from dugnad.dht.identity import Identity
from dugnad.dht.ids import PeerId, RunId
from dugnad.dht.ports import Stream, StreamEnded
from dugnad.dht.records import decode, encode, verify_ed25519
from dugnad.dht.substrate import Substrate, SubstrateConfig
from dugnad.peer import kernelload
from dugnad.peer.arithmetic import against
from dugnad.peer.averager import THREADS
from dugnad.peer.config import Settings
from dugnad.peer.pull import Puller
from dugnad.peer.pushing import push
from dugnad.peer.transfer import ContributionServer, PullServer
from dugnad.peer.transferwire import CONTRIBUTE_PROTOCOL, PULL_PROTOCOL

T = TypeVar("T")

RUN: Final = RunId(bytes(range(32)))
COMMITS_PROTOCOL: Final = "/dugnad-bench/commits/1"
TIMEOUT_S: Final = 60.0
TENSOR_WIDTH: Final = 1000
LAYERS: Final = 16
"""Tensors of the model that is averaged: rows of a thousand."""
PIECES: Final = (fm.UnitPiece(0, 0, 0, 1),)
DONE: Final = Progress(tokens=1000, steps=10, pieces=PIECES, speed_class=20, eligible=True)


def table_of(params: int, fragments: int) -> FragmentTable:
    """Matrices of ``params`` elements in all, in fragments."""
    rows = params // (TENSOR_WIDTH * LAYERS)
    specs = [TensorSpec(f"layer.{i}", (rows, TENSOR_WIDTH), "matrix") for i in range(LAYERS)]
    if rest := params - rows * TENSOR_WIDTH * LAYERS:
        specs.append(TensorSpec("rest", (rest,), "vector"))
    return build_table(specs, fragments)


@dataclass(slots=True)
class _Fragment:
    """One fragment at one peer, and what it waits for in this round."""

    worker: FragmentWorker | PlainWorker
    head: bytes
    home: PeerId
    version: int = 0
    theta: Vector = field(default_factory=lambda: np.zeros(0, np.float32))
    before: Vector = field(default_factory=lambda: np.zeros(0, np.float32))
    keys: list[tuple[PeerId, int]] = field(default_factory=list)
    all_in: asyncio.Event = field(default_factory=asyncio.Event)
    commits: asyncio.Queue[fm.CommitRecord] = field(default_factory=asyncio.Queue)


class OurPeer:
    """A substrate of its own, the servers and clients of `dugnad.peer.transfer`, and workers."""

    def __init__(
        self,
        folder: Path,
        *,
        rank: int,
        peers: int,
        params: int,
        fragments: int,
        codec: str,
        direct: bool,
        alone: bool,
        host: str,
    ) -> None:
        """`folder` is the fleet's own, and short: sockets lie in it. `direct`: TLS beside p2pd.
        `alone`: without error feedback, outer step and roots."""
        self._rank, self._peers, self._codec, self._alone = rank, peers, codec, alone
        self._table = table_of(params, fragments)
        self._folder = folder / str(rank)
        self._folder.mkdir()
        self._identity = Identity.create(self._folder / "key")
        config = SubstrateConfig(
            self._folder / "key", self._folder / "run", hosts=(host,), address_book=False
        )
        self._substrate = Substrate(config, self._identity)
        self._transport = DirectTransport(
            self._substrate,
            self._identity,
            self._folder / "run",
            protocols=(CONTRIBUTE_PROTOCOL, PULL_PROTOCOL) if direct else (),
            hosts=(host,),
        )
        self._puller = Puller(self._transport)
        self._pool = ThreadPoolExecutor(THREADS, "numbers")
        self._fragments: list[_Fragment] = []
        self._streams: list[Stream] = []
        self._whole = np.empty(params, np.float32)
        self._before: list[float] = []
        self._seq = 0

    # -- Peer ----------------------------------------------------------------------------------

    async def start(self) -> dict[str, Any]:
        """Start p2pd and serve."""
        if not against(Settings(kernels=os.environ.get("DUGNAD_KERNELS", "auto"))):
            print(await asyncio.to_thread(kernelload.serve), file=sys.stderr, flush=True)
        await self._substrate.start()
        await self._transport.start()
        transport = self._transport
        sizes = self._table.sizes
        await ContributionServer(
            transport,
            RUN,
            lambda p, codec: CODECS[codec].encoded_size(sizes[p]) if p < len(sizes) else None,
            self._take,
            verify_ed25519,
            roots=False,  # the worker looks
        ).start()
        await PullServer(transport, RUN, self).start()
        await transport.accept(COMMITS_PROTOCOL, self._hear)
        return {"peer": transport.peer.hex(), "addresses": await transport.addresses()}

    async def meet(self, others: list[dict[str, Any]]) -> None:
        """Connect to all and open the streams on which commits are announced."""
        ids = [PeerId(bytes.fromhex(one["peer"])) for one in others]
        for p, size in enumerate(self._table.sizes):
            anchor = AnchorState.fresh(vector_of(1000, p, size))
            head = fm.genesis_digest(RUN, p, anchor.theta_root)
            rules = FragmentRules(
                run=RUN,
                fragment=p,
                groups=tuple(self._table.merge_groups(p)),
                rule="mean",
                hand_in_codec=self._codec,
                commit_codec=self._codec if self._codec in commit_codecs("int8") else "int8",
                eta_bits=bits_of(1.0),
                mu_bits=bits_of(0.0),
            )
            worker: FragmentWorker | PlainWorker = (
                PlainWorker(rules, self._substrate.peer, size)
                if self._alone
                else FragmentWorker.start(rules, self._substrate.peer, head, anchor)
            )
            self._fragments.append(_Fragment(worker, head, ids[p % self._peers]))
        for rank, other in enumerate(others):
            if rank != self._rank:
                await self._substrate.dial(ids[rank], other["addresses"], TIMEOUT_S)
                stream = await self._substrate.open(ids[rank], COMMITS_PROTOCOL, TIMEOUT_S)
                await write_frame(stream, b"")
                self._streams.append(stream)

    async def prepare(self, number: int) -> None:
        """Let the learner be ahead of the anchors by this round's vector."""
        whole = vector_of(self._rank, number, self._table.total, self._whole)
        self._before = sampled(whole)
        self._seq += 1
        for p, one in enumerate(self._fragments):
            start = self._table.offsets[p]
            progress = whole[start : start + self._table.sizes[p]]
            if isinstance(one.worker, PlainWorker):
                one.theta = progress
            else:
                one.theta = PAGES.vector(progress.size)
                np.subtract(one.worker.buffers.ref, progress, out=one.theta)
                one.theta.flags.writeable = False  # as the learner's copy is
                one.before = one.worker.buffers.anchor.theta
            one.keys.clear()
            one.all_in.clear()

    async def run(self) -> None:
        """All fragments at once."""
        async with asyncio.timeout(TIMEOUT_S), asyncio.TaskGroup() as group:
            for p in range(len(self._fragments)):
                group.create_task(self._average(p))

    def sample(self, before: bool) -> list[float]:
        """Elements of the learner's progress, or of what the anchors moved by."""
        if before:
            return self._before
        where, starts = sampled_at(self._table.total), np.asarray(self._table.offsets)
        of = np.searchsorted(starts, where, side="right") - 1
        moved = []  # nothing of a fragment's size: it would count as ours
        for p, one in enumerate(self._fragments):
            at = where[of == p] - starts[p]
            if isinstance(one.worker, PlainWorker):
                moved.append(one.worker.result[at])
            else:
                moved.append(one.before[at] - one.worker.buffers.anchor.theta[at])
        found: list[float] = np.concatenate(moved).tolist()
        return found

    async def close(self) -> None:
        """Stop p2pd."""
        await self._transport.close()

    # -- one fragment --------------------------------------------------------------------------

    async def _average(self, p: int) -> None:
        one = self._fragments[p]
        made = await self._thread(
            one.worker.hand_in, HandIn(self._seq, one.version, one.head), one.theta, DONE
        )
        one.theta = np.zeros(0, np.float32)
        signed = fm.sign_record(made, RUN, self._identity)
        one.worker.signed_own(signed)
        if one.home == self._substrate.peer:
            self._arrived(p, signed)
            await one.all_in.wait()
            digest = await self._merge(p)
        else:
            payload = one.worker.inbox[(self._substrate.peer, self._seq)].payload
            transport = self._transport
            reason = await push(transport, one.home, signed, PIECES, payload, TIMEOUT_S)
            if reason:
                raise RuntimeError(f"a home refused fragment {p}: {reason}")
            digest = await self._follow(p)
        await self._thread(one.worker.adopt, digest, (), (digest,))
        one.worker.forget(self._seq)
        for key in one.keys:
            one.worker.drop_payload(key)
        one.worker.drop_state(one.head)
        one.head, one.version = digest, one.version + 1

    async def _thread(self, work: Callable[..., T], *args: object) -> T:
        """As the exchange's shell does it: two threads for numbers."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work, *args)

    def _arrived(self, p: int, made: fm.Contribution) -> None:
        one = self._fragments[p]
        one.keys.append((PeerId(made.peer), made.seq))
        if len(one.keys) == self._peers:
            one.all_in.set()

    async def _take(
        self, made: fm.Contribution, pieces: tuple[fm.UnitPiece, ...], payload: bytes
    ) -> str:
        one = self._fragments[made.fragment]
        await self._thread(one.worker.keep, made, pieces, payload)
        self._arrived(made.fragment, made)
        return ""

    async def _merge(self, p: int) -> bytes:
        """The home's part; the digest of its commit."""
        one = self._fragments[p]
        action = Merge(one.head, one.version + 1, tuple(sorted(one.keys)))
        merged = await self._thread(one.worker.merge, action)
        if merged.bad:
            raise RuntimeError(f"inputs of fragment {p} cannot be merged: {merged.bad}")
        header = fm.sign_record(self._header(p, merged), RUN, self._identity)
        digest = fm.header_digest(header, RUN)
        one.worker.sealed(digest, header)
        record = encode(fm.CommitRecord(header, merged.inputs))
        await asyncio.gather(*(write_frame(stream, record) for stream in self._streams))
        return digest

    def _header(self, p: int, merged: Merged) -> fm.Header:
        one = self._fragments[p]
        draft = fm.Header(
            format=fm.FORMAT,
            run=RUN,
            kind="merge",
            fragment=p,
            version=one.version + 1,
            parent=merged.parent,
            home=self._substrate.peer,
            boot=0,
            time_ms=one.version + 1,
            members_root=fm.NO_DIGEST,
            inputs_root=fm.inputs_root(RUN, merged.inputs),
            inputs_count=len(merged.inputs),
            tokens_total=0,
            eta_bits=one.worker.rules.eta_bits,
            mu_bits=one.worker.rules.mu_bits,
            codec=merged.codec,
            payload_root=merged.payload_root,
            payload_bytes=merged.payload_bytes,
            theta_root=merged.theta_root,
            momentum_root=merged.momentum_root,
            seqs_root=fm.NO_DIGEST,
        )
        total = sum(each.contribution.tokens for each in merged.inputs)
        return msgspec.structs.replace(draft, tokens_total=total)

    async def _follow(self, p: int) -> bytes:
        """Everybody else's part: raises unless the same roots come out."""
        one = self._fragments[p]
        header = (await one.commits.get()).header
        digest = fm.header_digest(header, RUN)
        size = self._table.sizes[p]
        got = await self._puller.payload([one.home], header, size)
        await self._thread(one.worker.advance, digest, header, got.payload, got.leaves)
        return digest

    async def _hear(self, stream: Stream) -> None:
        """Commits of one other peer, until it ends."""
        while True:
            try:
                data = await read_frame(stream, fm.MESSAGE_BYTES_MAX)
            except StreamEnded:
                return
            if not data:
                continue  # only there to open the stream
            record = decode(data, fm.CommitRecord, fm.MESSAGE_BYTES_MAX)
            if not fm.signature_holds(record.header, RUN, verify_ed25519):
                raise RuntimeError("a commit with a wrong signature")
            self._fragments[record.header.fragment].commits.put_nowait(record)

    # -- Donor ---------------------------------------------------------------------------------

    def manifest(self) -> bytes | None:
        """None: there is no run."""
        return None

    def heads(self) -> tuple[fm.HeadRow, ...]:
        """Nothing: no observer watches a benchmark."""
        return ()

    def commit(self, fragment: int, digest: bytes) -> Commit | None:
        """A commit's payload."""
        return self._fragments[fragment].worker.commits.get(digest)

    def anchor(self, fragment: int, digest: bytes) -> AnchorState | None:
        """None: nobody is behind."""
        return None

    def shard(self, number: int) -> bytes | None:
        """None: there is no text."""
        return None

    def block(self, name: bytes) -> bytes | None:
        """There is no text."""
        return None

    def commits(self, fragment: int, digest: bytes, count: int) -> tuple[fm.CommitRecord, ...]:
        """Nothing: nobody is behind."""
        return ()

    def news(self) -> bytes | None:
        """Nobody watches."""
        return None

    def statement_names(self) -> Sequence[bytes]:
        """None: nobody owns several machines here."""
        return ()

    def statements(self, names: Sequence[bytes]) -> tuple[bytes, ...]:
        """None."""
        return ()

    def digests(self, fragment: int, since_ms: int) -> tuple[bytes, ...]:
        """Nothing: nobody asks for receipts."""
        return ()
