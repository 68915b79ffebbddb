"""A run as its receipts tell it: followed as they come, in whatever order, and over restarts."""

from pathlib import Path

from dugnad.averaging.board import board_json
from dugnad.averaging.creditchain import UNDO_MAX
from dugnad.averaging.formats import CommitRecord, UnitPiece
from dugnad.averaging.setboard import board_of
from dugnad.peer.assembly import credit_rules, lineage_rules
from dugnad.peer.runwatch import RunWatch, Standing
from dugnad.peer.store import Store

from .receipt_world import PEOPLE, Made  # noqa: TID252  the world is no installed package


def opened(made: Made, path: Path) -> Store:
    return Store.open(path / "state", made.run)


def board(made: Made) -> bytes:
    rules = [lineage_rules(made.manifest, made.run, p) for p in range(made.fragments)]
    return board_json(board_of(credit_rules(made.manifest, made.run), rules, dict(made.commits)))


def seen(watch: RunWatch, store: Store) -> Standing:
    found = watch.refresh(store)
    assert found is not None
    return found


def test_what_comes_is_told_once_and_the_board_is_that_of_the_set(tmp_path: Path) -> None:
    made = Made().go(3)
    store, watch = opened(made, tmp_path), RunWatch(made.manifest, made.run)
    assert watch.refresh(store) is None
    store.add_commits(made.commits)
    first = seen(watch, store)
    assert board_json(first.board) == board(made)
    assert len(first.merges) == len(made.commits)
    assert first.versions == [3] * made.fragments
    assert [n.digest if n else b"" for n in first.heads] == [tip.digest for tip in made.tips]
    assert watch.refresh(store) is None
    before = len(made.commits)
    made.go(1)
    store.add_commits(made.commits[before:])
    second = seen(watch, store)
    assert {(one.fragment, one.node.version) for one in second.merges} == {
        (p, 4) for p in range(made.fragments)
    }
    assert board_json(second.board) == board(made)
    store.close()


def test_history_that_comes_newest_first_is_understood_in_the_end(tmp_path: Path) -> None:
    made = Made().go(5)
    store, watch = opened(made, tmp_path), RunWatch(made.manifest, made.run)
    store.add_commits(made.commits[-2 * made.fragments :])
    partial = seen(watch, store)
    assert partial.starts == (3,) * made.fragments
    for row in made.commits[: -2 * made.fragments][::-1]:
        store.add_commits([row])
    found = seen(watch, store)
    assert found.starts == (0,) * made.fragments
    assert board_json(found.board) == board(made)
    store.close()


def test_a_switch_to_a_heavier_lineage_is_followed(tmp_path: Path) -> None:
    made = Made().go(2)
    fork = made.tips[0]
    pieces = [UnitPiece(0, 7, 0, 1)]
    light: list[tuple[bytes, CommitRecord]] = [
        made.merge(0, PEOPLE[n], [made.listing(PEOPLE[0], 0, pieces)]) for n in range(2)
    ]
    store, watch = opened(made, tmp_path), RunWatch(made.manifest, made.run)
    store.add_commits(made.commits)
    assert seen(watch, store).versions[0] == 4
    made.tips[0] = fork
    heavy = [
        made.merge(0, PEOPLE[n], [made.listing(who, 0, pieces) for who in PEOPLE]) for n in range(3)
    ]
    store.add_commits(heavy)
    found = seen(watch, store)
    assert found.heads[0] is not None
    assert found.heads[0].digest == heavy[-1][0]
    assert board_json(found.board) == board(made)
    assert [one.node.version for one in found.merges] == [5]  # older versions were told before
    assert light[0][0] not in {node.digest for node in found.chains[0].values()}
    store.close()


def test_what_was_forgotten_stays_credited_by_the_base_that_was_kept(tmp_path: Path) -> None:
    made = Made().go(UNDO_MAX + 2)
    store, watch = opened(made, tmp_path), RunWatch(made.manifest, made.run)
    store.add_commits(made.commits)
    whole = seen(watch, store)
    watch.keep(store, 0)
    with store._transaction():  # what pruning does after a week
        store._db.execute("DELETE FROM commits WHERE version <= 1")
    again = seen(RunWatch(made.manifest, made.run), store)
    assert again.starts == (2,) * made.fragments
    assert board_json(again.board) == board_json(whole.board)
    store.close()
