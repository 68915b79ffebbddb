"""A run that never was: events of any size, from a seed, for the dashboard's benchmark."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Iterator

from dugnad.averaging.board import Basis, Board, Tally, make_board
from dugnad.dashboard import events as ev
from dugnad.dht.ids import PeerId, name_of, peer_text

DAY_MS = 86_400_000
FRAGMENTS = 16
DEVICES = ("cuda 24G", "cpu 8 cores", "cuda 12G", "mps 16G", "cpu 4 cores, arm")


def keys(count: int) -> list[PeerId]:
    """Peers with keys from their numbers."""
    return [PeerId(hashlib.sha256(b"fake %d" % n).digest()) for n in range(count)]


def board_of(peers: list[PeerId], receipts: int, now_ms: int, seed: int = 1) -> Board:
    """A board of `receipts` receipts, unevenly spread over `peers`."""
    rng = random.Random(seed)
    tallies: dict[PeerId, Tally] = {peer: Tally() for peer in peers}
    weights = [1 / (n + 3) for n in range(len(peers))]
    for peer in rng.choices(peers, weights, k=receipts):
        tally, age = tallies[peer], int(rng.expovariate(0.2)) % 30
        tokens, at_ms = rng.randrange(2_000, 60_000), now_ms - age * DAY_MS - rng.randrange(DAY_MS)
        tally.settle(tokens, {at_ms // DAY_MS: tokens})
        tally.contributions += 1
        tally.units += rng.randrange(3)
        tally.seen(at_ms, at_ms)
    for tally in tallies.values():
        tally.provisional = rng.randrange(90_000)
    seen = {peer: tally for peer, tally in tallies.items() if tally.contributions}
    versions = tuple(receipts // FRAGMENTS // 20 for _ in range(FRAGMENTS))
    return make_board(seen, Basis(now_ms, receipts, 3, versions, versions))


def run(now_ms: int) -> ev.RunDescribed:
    """What is trained."""
    return ev.RunDescribed(
        at_ms=now_ms,
        run="a" * 52,
        name="Fjord stories",
        purpose="A small model of public-domain stories, trained by neighbours.\n\nIt shows that "
        "machines lent for an hour add up.",
        licence="Apache-2.0; the text is in the public domain",
        organiser="kindly-otter-lamp",
        created_ms=now_ms - 9 * DAY_MS,
        parameters=124_000_000,
        model=(("Layers", "12"), ("Width", "768"), ("Context", "512 bytes")),
        data=(("Data", "1.20 GB of stories, bytes"), ("Held out", "1 %")),
        token_budget=3_000_000_000,
        link="dugnad:" + "a" * 52 + "?peer=/ip4/203.0.113.7/tcp/4001/p2p/" + peer_text(keys(1)[0]),
        fragments=tuple(7_750_000 for _ in range(FRAGMENTS)),
    )


def row(n: int, peer: PeerId, now_ms: int) -> ev.PeerRow:
    """A peer; some are paused, relayed or silent about their machine."""
    paused = n % 9 == 4
    return ev.PeerRow(
        peer=peer_text(peer),
        name=name_of(peer),
        roles=("train", "merge") if n % 3 else ("train", "merge", "relay"),
        device=DEVICES[n % len(DEVICES)],
        tokens_per_s=0.0 if paused else 400.0 + 3571 * (n % 13),
        link="direct" if n % 4 else ("relayed" if n % 8 else "outbound"),
        codec=("int8", "int4", "topk")[n % 3],
        state="paused" if paused else "training",
        reason="on battery" if paused else "",
        since_ms=now_ms - 60_000 * (n % 900 + 3),
        last_seen_ms=now_ms - 400 * (n % 40),
        listed_tokens=1_000_000 // (n + 1),
        version="0.1.0",
    )


def story(peers: list[PeerId], receipts: int, now_ms: int) -> Iterator[ev.AnyEvent]:
    """Nine days of a run that end at `now_ms`."""
    rng = random.Random(7)
    begin = now_ms - 9 * DAY_MS
    yield run(now_ms)
    yield from _measured(rng, begin, now_ms)
    early, late = peers[: len(peers) * 9 // 10], peers[len(peers) * 9 // 10 :]
    for n, peer in enumerate(early):
        at_ms = begin + n * (8 * DAY_MS // max(len(early), 1))
        yield ev.PeerSeen(at_ms=at_ms, row=row(n, peer, now_ms))
    for n, peer in enumerate(late):
        yield ev.PeerSeen(at_ms=now_ms - 3_600_000 + n * 1000, row=row(n, peer, now_ms))
    for n, peer in enumerate(early[2::29]):
        how, why = ("lost", "silent for 3.1 s") if n % 2 else ("left", "")
        yield ev.PeerGone(
            at_ms=now_ms - 900_000 + n * 20_000,
            peer=peer_text(peer),
            how=how,  # type: ignore[arg-type]
            reason=why,
        )
    yield from _merged(rng, peers, now_ms)
    yield ev.UnitsMoved(
        at_ms=now_ms - 42_000, units=3, source=name_of(peers[2]), target=name_of(peers[0])
    )
    yield ev.UnitCounts(at_ms=now_ms, counts=(("open", 120), ("claimed", 44), ("settled", 90_210)))
    yield ev.BoardComputed(
        at_ms=now_ms,
        board=board_of(peers, receipts, now_ms),
        peers_heard=len(peers) - 1,
        peers_known=len(peers),
    )
    yield ev.SampleText(
        at_ms=now_ms - 180_000,
        prompt="The boat came ",
        step=4_812,
        tokens=1_900_000_000,
        text="in late, and the neighbours stood on the quay\nwith lanterns.",
    )
    yield ev.Status(
        at_ms=now_ms - 2_000, peer=peer_text(peers[0]), name=name_of(peers[0]), state="training"
    )


def _measured(rng: random.Random, begin: int, now_ms: int) -> Iterator[ev.AnyEvent]:
    steps = 9 * 24 * 60 * 2
    for n in range(steps):
        at_ms = begin + (now_ms - begin) * n // steps
        tokens = 1_900_000_000 * n // steps
        loss = 2.0 + 3.5 * math.exp(-n / 4000) + rng.gauss(0, 0.03)
        yield ev.TrainLoss(at_ms=at_ms, tokens=tokens, loss=loss)
        if n % 20 == 0:
            held = 2.06 + 3.5 * math.exp(-n / 4000)
            yield ev.HeldOutLoss(at_ms=at_ms, tokens=tokens, loss=held)
            speed = 2_400 * (1 + n / steps) * (1 + 0.2 * math.sin(n / 700)) + rng.gauss(0, 90)
            yield ev.Throughput(at_ms=at_ms, tokens_per_s=speed)


def _merged(rng: random.Random, peers: list[PeerId], now_ms: int) -> Iterator[ev.AnyEvent]:
    for n in range(1200):
        at_ms = now_ms - (1200 - n) * 9 * DAY_MS // 1200
        chosen = rng.sample(peers[: max(12, len(peers) // 8)], k=min(8, len(peers)))
        yield ev.HeadAdopted(
            at_ms=at_ms,
            fragment=n % FRAGMENTS,
            version=n // FRAGMENTS + 1,
            digest=hashlib.sha256(b"%d" % n).hexdigest(),
            home=peer_text(chosen[0]),
            tokens_total=1_900_000_000 * (n + 1) // 1200,
            listed=tuple((peer_text(p), rng.randrange(40_000, 400_000)) for p in chosen),
            sent_bytes=9_000_000,
            plain_bytes=62_000_000,
        )
        yield ev.MergeDue(at_ms=at_ms, fragment=n % FRAGMENTS, due_ms=at_ms + 648_000)
    yield ev.MergeDue(at_ms=now_ms, fragment=3, due_ms=now_ms + 47_000)
