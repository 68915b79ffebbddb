"""Runs that never were, with receipts that hold: signed manifests, lineages and stores."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from dugnad.averaging.formats import (
    FORMAT,
    NO_DIGEST,
    CommitRecord,
    Contribution,
    Header,
    Input,
    UnitPiece,
    header_digest,
    inputs_root,
    members_root,
    pieces_root,
    seqs_root,
    sign_record,
)
from dugnad.averaging.lineage import Lineage
from dugnad.averaging.node import seq_rows
from dugnad.dht.identity import Identity
from dugnad.dht.ids import RunId
from dugnad.peer.assembly import lineage_rules
from dugnad.peer.manifest import Manifest, encode_manifest, run_id
from dugnad.peer.paths import Home
from dugnad.peer.store import Store

from .page_world import make_manifest  # noqa: TID252  the world is no installed package

PEOPLE = [Identity.ephemeral(bytes([n]) * 32) for n in range(1, 5)]
STEP_MS = 60_000


class Made:
    """A run whose commits are made one by one, each signed by those whom it names."""

    def __init__(self, manifest: Manifest | None = None) -> None:
        self.manifest = manifest or make_manifest()
        self.run: RunId = run_id(self.manifest)
        self.fragments = len(self.manifest.table.fragments)
        self.lineages = [
            Lineage(lineage_rules(self.manifest, self.run, p)) for p in range(self.fragments)
        ]
        self.tips = [lineage.genesis for lineage in self.lineages]
        self.commits: list[tuple[bytes, CommitRecord]] = []

    def listing(self, who: Identity, p: int, pieces: Sequence[UnitPiece]) -> Input:
        tip, context = self.tips[p], self.manifest.data.context
        made = Contribution(
            peer=who.peer,
            fragment=p,
            seq=tip.version + 1,
            base=tip.version,
            base_digest=tip.digest,
            tokens=sum(one.stop - one.start for one in pieces) * context,
            steps=1,
            speed_class=30,
            eligible=True,
            codec="int8",
            payload_root=NO_DIGEST,
            payload_bytes=0,
            pieces_root=pieces_root(self.run, tuple(pieces)),
        )
        return Input(sign_record(made, self.run, who), tuple(pieces), 1.0, (1.0,))

    def merge(self, p: int, home: Identity, inputs: Sequence[Input]) -> tuple[bytes, CommitRecord]:
        """The next commit of fragment ``p``, by ``home``."""
        tip, lineage = self.tips[p], self.lineages[p]
        rows = tuple(sorted(inputs, key=lambda one: one.contribution.peer))
        header = Header(
            format=FORMAT,
            run=self.run,
            kind="merge",
            fragment=p,
            version=tip.version + 1,
            parent=tip.digest,
            home=home.peer,
            boot=1,
            time_ms=tip.time_ms + STEP_MS,
            members_root=NO_DIGEST,
            inputs_root=inputs_root(self.run, rows),
            inputs_count=len(rows),
            tokens_total=0,
            eta_bits=0,
            mu_bits=0,
            codec="int8",
            payload_root=NO_DIGEST,
            payload_bytes=0,
            theta_root=NO_DIGEST,
            momentum_root=NO_DIGEST,
            seqs_root=NO_DIGEST,
        )
        node = lineage.child(CommitRecord(header, rows), b"", tip)
        header = msgspec.structs.replace(
            header,
            members_root=members_root(self.run, node.members),
            seqs_root=seqs_root(self.run, seq_rows(node)),
            tokens_total=node.tokens_total,
        )
        record = CommitRecord(sign_record(header, self.run, home), rows)
        assert lineage.judge(record, record.header.time_ms) == ""
        digest = header_digest(record.header, self.run)
        self.tips[p] = lineage.add(record, digest)
        self.commits.append((digest, record))
        return digest, record

    def go(self, rounds: int) -> "Made":
        """Merge every fragment ``rounds`` times; everybody contributes, homes change."""
        size = self.manifest.unit_sequences
        for n in range(rounds):
            for p in range(self.fragments):
                inputs = [
                    self.listing(who, p, [UnitPiece(0, (n * len(PEOPLE) + i) % 8, 0, size)])
                    for i, who in enumerate(PEOPLE)
                ]
                self.merge(p, PEOPLE[(n + p) % len(PEOPLE)], inputs)
        return self


def kept(made: Made, root: Path, commits: Sequence[tuple[bytes, CommitRecord]]) -> Home:
    """A data folder that holds the run with these commits, stored in this order."""
    home = Home(root)
    home.create()
    place = home.run(made.run)
    place.create()
    place.manifest.write_bytes(encode_manifest(made.manifest))
    store = Store.open(place.state, made.run)
    store.add_commits(commits)
    store.close()
    return home
