"""The ledger's history: fetched down the chain, each commit signed by its home."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from dugnad.averaging.coverage import unit_fragment
from dugnad.averaging.formats import Ack, CommitRecord, UnitPiece, sign_record
from dugnad.dht.ids import PeerId
from dugnad.peer.assembly import credit_rules
from dugnad.peer.creditrows import credits_of
from dugnad.peer.ledger import Ledger
from dugnad.peer.storethread import StoreThread

from .receipt_world import PEOPLE, Made  # noqa: TID252  the world is no installed package


async def caught_up(made: Made, path: Path, served: dict[bytes, CommitRecord]) -> Ledger | None:
    """The ledger of a peer that holds the newest commit alone, after it was caught up."""
    store = StoreThread()
    await store.open(path, made.run)
    mine = [row for row in made.commits if row[1].header.fragment == 0]
    digest, newest = mine[-1]
    await store.call(lambda one: one.add_commits([(digest, newest)]))
    ledger = Ledger(credit_rules(made.manifest, made.run), store, lambda change: None)

    async def fetch(
        peers: Sequence[PeerId], fragment: int, name: bytes, count: int
    ) -> tuple[CommitRecord, ...]:
        found: list[CommitRecord] = []
        while name in served:
            found.append(served[name])
            name = found[-1].header.parent
        return tuple(found)

    done = await ledger.catch_up(0, (digest, newest.header.parent), [PEOPLE[1].peer], fetch)
    held = await store.call(lambda one: [one.commit(name) for name, _ in mine])
    await store.close()
    assert all(one is None or not one.acks for one in held)
    return ledger if done else None


async def test_history_is_fetched_down_to_version_1_and_folded(tmp_path: Path) -> None:
    made = Made().go(4)
    ledger = await caught_up(made, tmp_path / "state", dict(made.commits))
    assert ledger is not None
    assert ledger.fold.tip(0) == (4, made.tips[0].digest)


async def test_acks_that_do_not_hold_are_not_kept_with_the_history(tmp_path: Path) -> None:
    made = Made().go(4)
    served = {
        name: CommitRecord(one.header, one.inputs, (Ack(b"a" * 32, 0, 1, name, b"s" * 64),))
        for name, one in made.commits
    }
    assert await caught_up(made, tmp_path / "state", served) is not None


async def test_history_that_a_home_has_not_signed_is_refused(tmp_path: Path) -> None:
    made = Made().go(4)
    served = dict(made.commits)
    name, record = next(row for row in made.commits if row[1].header.version == 2)
    other = sign_record(record.header, made.run, PEOPLE[0])
    bad = msgspec.structs.replace(record.header, signature=other.signature[::-1])
    served[name] = CommitRecord(bad, record.inputs)
    assert await caught_up(made, tmp_path / "state", served) is None


async def test_what_each_receipt_was_credited_is_kept_as_long_as_the_receipt(
    tmp_path: Path,
) -> None:
    made = Made()
    size = made.manifest.unit_sequences
    index = next(n for n in range(8) if unit_fragment(made.run, 0, n, made.fragments) == 0)
    first, second = PEOPLE[:2]
    for who, stop in ((first, size // 2), (second, size)):
        made.merge(0, PEOPLE[2], [made.listing(who, 0, [UnitPiece(0, index, 0, stop)])])
    store = StoreThread()
    await store.open(tmp_path / "state", made.run)
    await store.call(lambda one: one.add_commits(made.commits))
    ledger = Ledger(credit_rules(made.manifest, made.run), store, lambda change: None)
    head = made.tips[0]
    ledger.adopted(0, made.lineages[0], head)
    await ledger.flush()
    ledger.adopted(0, made.lineages[0], head)
    await ledger.flush()
    context, names = made.manifest.data.context, [name for name, _ in made.commits]

    async def known(who: PeerId) -> list[tuple[int, int]]:
        found = await store.call(lambda one: credits_of(one, who, names))
        return [(row.tokens, row.twice) for row in found.values()]

    assert await known(first.peer) == [(size // 2 * context, 0)]
    assert await known(second.peer) == [(size // 2 * context, size // 2 * context)]
    await ledger.keep(1 << 60)
    kept = await store.call(lambda one: [one.commit(name) for name in names])
    left = len(await known(first.peer)) + len(await known(second.peer))
    assert left == sum(one is not None for one in kept)
    await store.close()
