"""The ledger's history: fetched down the chain, each commit signed by its home."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from dugnad.averaging.formats import Ack, CommitRecord, sign_record
from dugnad.dht.ids import PeerId
from dugnad.peer.assembly import credit_rules
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
