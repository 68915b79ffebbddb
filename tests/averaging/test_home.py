"""The duty of a home: what it takes in, when it closes, whom it passes over (rules 1, 4, 5, 9)."""

import msgspec
import pytest

from dugnad.averaging import events as ev
from dugnad.averaging import formats as fm
from dugnad.averaging.home import (
    COMMIT_PIECES_MAX,
    INBOX_MAX,
    PER_MAKER_MAX,
    QUERY_S,
    Usable,
    fitting,
)
from dugnad.averaging.lineage import Lineage
from dugnad.averaging.succession import SAMPLES_MIN, home_order
from dugnad.averaging.view import (
    COMMIT_DELAY_FIRST_S,
    COMMIT_DELAY_MAX_S,
    COMMIT_DELAY_MIN_S,
    GRACE_SHARE,
)
from dugnad.dht.ids import PeerId

from .exchange_makers import (  # noqa: TID252  a helper of these tests
    INTERVAL_S,
    RULES,
    RUN,
    A,
    B,
    C,
    D,
    Peer,
    commit,
    contribution,
    listing,
    merged,
    named,
    only,
    root,
    work,
)

ALL = [A, B, C, D]


def at_place(place: int, *, learner: bool = True, makers: list[PeerId] | None = None) -> Peer:
    """The peer that is ``place`` in the order of homes of version 2; all are live."""
    makers = makers or ALL
    scout = Peer(A, [B, C, D])
    scout.advance(makers, A)
    order, _ = home_order(RUN, 0, scout.core.head, [])
    me = order[place]
    peer = Peer(me, [p for p in ALL if p != me], learner=learner)
    peer.advance(makers, A)
    assert peer.core.view.succession() == order
    return peer


def others(peer: Peer) -> list[PeerId]:
    return [p for p in ALL if p != peer.core.view.me]


def arrive(peer: Peer, maker: PeerId, seq: int = 2, base: int = 1) -> list[ev.Action]:
    return peer.tell(ev.ContributionIn(contribution(maker, seq, base), work(8)))


@pytest.fixture
def home() -> Peer:
    """The home of version 2."""
    return at_place(0)


def test_it_closes_as_soon_as_all_live_members_are_there_and_it_is_due(home: Peer) -> None:
    for maker in others(home):
        assert not only(arrive(home, maker), ev.Merge)
    assert not only(home.wait(INTERVAL_S - 0.1), ev.Merge)
    home.wait(0.1)
    made = home.hand_in()
    (merge,) = only(home.actions, ev.Merge)
    expected = sorted([(p, 2) for p in others(home)] + [(made.peer, made.seq)])
    assert list(merge.keys) == expected  # ascending (peer, seq)
    assert (merge.parent, merge.version) == (home.core.head.digest, 2)


def test_it_waits_the_grace_for_one_that_is_late_and_no_longer(home: Peer) -> None:
    late, *punctual = others(home)
    for maker in punctual:
        arrive(home, maker)
    home.wait(INTERVAL_S)
    home.hand_in()
    assert not only(home.actions, ev.Merge)
    actions = home.wait(1.0)  # a quarter of the interval at most
    (merge,) = only(actions, ev.Merge)
    assert late not in {peer for peer, _ in merge.keys}


def test_what_was_made_on_an_older_head_does_not_close_it_before_the_newest_has_come(
    home: Peer,
) -> None:
    """Else everybody's next one would be late again, one version after the other."""
    for maker in others(home):
        arrive(home, maker, seq=2, base=0)
    home.wait(INTERVAL_S)
    home.hand_in()
    assert not only(home.actions, ev.Merge)
    for maker in others(home):
        assert not only(home.wait(0.05), ev.Merge)
        arrive(home, maker, seq=3)
    (merge,) = only(home.actions, ev.Merge)
    assert len(merge.keys) == 2 * len(others(home)) + 1


def test_a_member_that_is_always_a_version_late_holds_it_up_for_a_grace_only(home: Peer) -> None:
    late, *punctual = others(home)
    arrive(home, late, seq=2, base=0)
    for maker in punctual:
        arrive(home, maker)
    home.wait(INTERVAL_S)
    home.hand_in()
    (merge,) = only(home.wait(GRACE_SHARE * INTERVAL_S + 0.01), ev.Merge)
    assert late in {peer for peer, _ in merge.keys}


def test_of_a_grace_that_is_not_learned_yet_a_quarter_of_an_interval_is_given(home: Peer) -> None:
    home.tell(ev.Pace(40.0, 0.0))
    _, *punctual = others(home)
    for maker in punctual:
        arrive(home, maker)
    home.wait(home.core.view.due_at - home.now)
    home.hand_in()
    assert not only(home.wait(9.9), ev.Merge)
    assert only(home.wait(0.2), ev.Merge)
    for delay in (0.1, 0.2, 0.1, 0.2, 0.1):
        home.core.home.grace.add(delay)
    assert home.core.home._close_at(home.core.home.usable()) < home.now


def test_at_version_0_it_waits_for_whoever_is_live() -> None:
    first = Peer(A, [B, C])
    first.wait(INTERVAL_S)
    first.hand_in()
    if first.core.view.current_home() != A:
        first.core.view.passed.update({B, C})
    assert not only(arrive(first, B, seq=1, base=0), ev.Merge)
    (merge,) = only(arrive(first, C, seq=1, base=0) + first.wait(QUERY_S + 0.01), ev.Merge)
    assert len(merge.keys) == 3


def test_it_waits_for_no_member_that_is_lost(home: Peer) -> None:
    lost, *rest = others(home)
    home.tell(ev.PeerDown(lost))
    for maker in rest:
        arrive(home, maker)
    home.wait(INTERVAL_S)
    home.hand_in()
    assert only(home.actions, ev.Merge)


def test_it_waits_for_nobody_when_all_other_members_are_lost(home: Peer) -> None:
    for peer in others(home):
        home.tell(ev.PeerDown(peer))
    home.tell(ev.PeerUp(PeerId(b"n" * 32)))  # a newcomer, of whom nothing is expected yet
    home.wait(INTERVAL_S)
    home.hand_in()
    assert only(home.actions, ev.Merge)


def test_a_minority_that_misses_live_members_waits_three_commit_delays(home: Peer) -> None:
    delay = home.core.view.commit_delay.limit()
    home.wait(INTERVAL_S)
    home.hand_in()  # one of four members, the others live and silent
    close = home.core.home._close_at(home.core.home.usable())
    assert close == pytest.approx(home.now + 3 * delay)


def test_the_header_says_what_follows_from_parent_and_inputs(home: Peer) -> None:
    arrive(home, others(home)[0])
    home.wait(INTERVAL_S)
    made = home.hand_in()
    home.wait(10.0)
    inputs = sorted(
        [listing(made), listing(contribution(others(home)[0], 2, 1))],
        key=lambda i: i.contribution.peer,
    )
    (sign,) = only(home.tell(merged(home.core.head, inputs)), ev.Sign)
    record = fm.CommitRecord(sign.header, sign.inputs)
    assert home.core.view.lineage.judge(record, home.core.view.wall_ms) == ""
    assert sign.header.home == home.core.view.me


def sign_next(home: Peer) -> fm.CommitRecord:
    home.wait(INTERVAL_S)
    made = home.hand_in()
    home.wait(8.0)
    (sign,) = only(home.tell(merged(home.core.head, [listing(made)])), ev.Sign)
    return fm.CommitRecord(sign.header, sign.inputs)


def test_what_is_signed_is_announced_and_becomes_the_head_with_a_witness(home: Peer) -> None:
    record = sign_next(home)
    actions = home.tell(ev.Signed(record, named(record)))
    assert [one.message for one in only(actions, ev.Broadcast)] == [fm.Announce(record)]
    assert home.core.head.version == 1  # nobody vouches yet
    witness = fm.Ack(others(home)[0], 0, 2, named(record))
    assert [a.digest for a in only(home.tell(ev.AckIn(witness)), ev.Adopt)] == [named(record)]


def test_it_signs_once_for_one_parent(home: Peer) -> None:
    record = sign_next(home)
    home.tell(ev.Signed(record, named(record)))
    assert not home.core.view.may_home()
    assert home.core.view.current_home() != home.core.view.me
    assert not only(home.wait(1.0), ev.Merge)


def test_a_refused_signature_passes_the_duty_on(home: Peer) -> None:
    record = sign_next(home)
    home.tell(ev.SignRefused(record.header.parent))
    assert home.core.view.current_home() != home.core.view.me
    assert not only(home.wait(1.0), ev.Sign)


def test_a_merge_that_comes_back_on_an_old_head_is_dropped(home: Peer) -> None:
    old = home.core.head
    home.wait(INTERVAL_S)
    made = home.hand_in()
    home.wait(8.0)
    assert home.core.home.merging == old.digest
    home.advance(others(home), others(home)[0], wait=0.0)
    assert not only(home.tell(merged(old, [listing(made)])), ev.Sign)


def test_bad_inputs_leave_the_inbox_and_the_rest_is_merged_again(home: Peer) -> None:
    bad = others(home)[0]
    arrive(home, bad)
    home.wait(INTERVAL_S)
    home.hand_in()
    home.wait(8.0)
    answer = ev.Merged(home.core.head.digest, (), "", b"", 0, b"", b"", (((bad, 2), "rotten"),))
    actions = home.tell(answer)
    assert ev.DropPayload((bad, 2), "rotten") in actions
    (again,) = only(actions + home.wait(8.0), ev.Merge)
    assert (bad, 2) not in again.keys


# -- what is taken in ------------------------------------------------------------------------------


def refusal(peer: Peer, made: fm.Contribution, pieces: tuple[fm.UnitPiece, ...]) -> str:
    actions = peer.tell(ev.ContributionIn(made, pieces))
    dropped = only(actions, ev.DropPayload)
    assert ((made.peer, made.seq) in peer.core.home.inbox) == (not dropped)
    assert not dropped or peer.core.home.refused[(made.peer, made.seq)] == dropped[0].reason
    return dropped[0].reason if dropped else ""


def test_what_cannot_be_listed_is_refused_with_the_reason(home: Peer) -> None:
    maker = others(home)[0]
    good = contribution(maker, 2, 1)
    replace = msgspec.structs.replace
    assert "already listed" in refusal(home, contribution(maker, 1, 1), work(8))
    assert "not older" in refusal(home, contribution(maker, 2, 6), work(8))
    assert "no work" in refusal(home, replace(good, steps=0), work(8))
    assert "another fragment" in refusal(home, replace(good, fragment=1), work(8))
    assert "do not match their root" in refusal(home, good, work(9))
    assert "do not follow" in refusal(home, replace(good, tokens=5), work(8))
    assert "my own" in refusal(home, contribution(home.core.view.me, 2, 1), work(8))
    assert refusal(home, good, work(8)) == ""
    assert refusal(home, good, work(8)) == ""  # a repetition does no harm
    assert len(home.core.home.inbox) == 1


def test_a_stale_one_is_refused(home: Peer) -> None:
    for _ in range(2):
        home.advance(ALL, A)
    assert "stale" in refusal(home, contribution(A, 9, 1), work(8))


def test_one_that_is_ahead_of_me_is_kept_and_judged_when_i_am_there(home: Peer) -> None:
    maker = others(home)[0]
    made = contribution(maker, 9, 2)
    assert refusal(home, made, work(8)) == ""
    assert (maker, 9) not in home.core.home.usable()
    home.advance(ALL, A)
    assert (maker, 9) in home.core.home.usable()


def test_one_maker_cannot_fill_the_inbox(home: Peer) -> None:
    maker = others(home)[0]
    reasons = [
        refusal(home, contribution(maker, 2 + n, 1), work(8)) for n in range(PER_MAKER_MAX + 1)
    ]
    assert [bool(reason) for reason in reasons] == [False] * PER_MAKER_MAX + [True]


def test_the_inbox_and_the_refusals_are_bounded(home: Peer) -> None:
    makers = [PeerId(root(f"maker {n}")) for n in range(2 * INBOX_MAX + 2)]
    reasons = [refusal(home, contribution(maker, 1, 1), work(8)) for maker in makers]
    assert len(home.core.home.inbox) == INBOX_MAX
    assert reasons[-1] == "the inbox is full"
    assert len(home.core.home.refused) == INBOX_MAX


def test_what_a_new_head_lists_or_outdates_is_dropped(home: Peer) -> None:
    arrive(home, others(home)[0])
    record = home.advance(others(home), others(home)[0])
    assert named(record) == home.core.head.digest
    assert home.core.home.inbox == {}


def test_a_commit_lists_no_more_units_than_fit_oldest_base_first() -> None:
    usable: Usable = {}
    share = COMMIT_PIECES_MAX // 8
    for number in range(12):
        maker = root(f"maker {number}")
        pieces = work(8) * share
        usable[(maker, 1)] = (contribution(maker, 1, number % 2), pieces)
    chosen = fitting(usable)
    assert len(chosen) == 8
    assert [usable[key][0].base for key in chosen] == [0] * 6 + [1] * 2


# -- succession ------------------------------------------------------------------------------------


def due_heir() -> tuple[Peer, PeerId]:
    """The second in the order, when the merge is due and everything is there; and the home."""
    heir = at_place(1)
    first = heir.core.view.current_home()
    assert first is not None
    for maker in others(heir):
        arrive(heir, maker)
    heir.wait(INTERVAL_S)
    heir.hand_in()
    return heir, first


def test_a_lost_home_is_skipped_and_its_heir_asks_first() -> None:
    heir, first = due_heir()
    actions = heir.tell(ev.PeerDown(first))
    assert heir.core.view.current_home() == heir.core.view.me
    (asked,) = only(actions, ev.Broadcast)
    assert isinstance(asked.message, fm.Heads)
    assert asked.message.reply
    assert not only(actions + heir.wait(QUERY_S - 0.05), ev.Merge)
    assert only(heir.wait(0.1), ev.Merge)


def test_an_heir_that_learns_of_a_commit_merges_nothing() -> None:
    heir = at_place(1)
    first = heir.core.view.current_home()
    assert first is not None
    heir.wait(INTERVAL_S)
    heir.hand_in()
    heir.tell(ev.PeerDown(first))
    heir.advance(others(heir), first, wait=0.1)
    assert heir.core.head.version == 2
    assert heir.core.home.merging is None


def test_a_silent_home_is_passed_over_though_it_answers() -> None:
    heir, _ = due_heir()
    delay = heir.core.view.commit_delay.limit()
    assert not only(heir.wait(delay - 0.1), ev.Note)
    assert [note.kind for note in only(heir.wait(0.2), ev.Note)] == ["succession"]
    assert heir.core.view.current_home() == heir.core.view.me
    assert only(heir.wait(QUERY_S + 0.1), ev.Merge)


def test_a_home_that_my_contribution_still_moves_to_is_not_passed_over() -> None:
    heir, first = due_heir()
    delay = heir.core.view.commit_delay.limit()
    for _ in range(4):
        assert not only(heir.wait(delay / 2), ev.Note)
        heir.tell(ev.SendMoves(1, first))
        heir.tell(ev.SendMoves(1, heir.core.view.me))
    assert not only(heir.wait(delay - 0.1), ev.Note)
    assert [note.kind for note in only(heir.wait(0.2), ev.Note)] == ["succession"]


def test_a_home_whose_commit_is_still_coming_in_is_not_passed_over_for_an_interval() -> None:
    heir, first = due_heir()
    view = heir.core.view
    inputs = [listing(contribution(maker, 2, 1)) for maker in others(heir)]
    record = commit(view.lineage, view.head, inputs, first, time_ms=view.wall_ms)
    assert only(heir.tell(ev.CommitIn(first, record)), ev.Obtain)
    assert not only(heir.wait(INTERVAL_S - 0.1), ev.Note)
    assert [note.kind for note in only(heir.wait(0.5), ev.Note)] == ["succession"]


def test_a_home_whose_commit_nobody_serves_is_passed_over() -> None:
    heir = at_place(1)
    first = heir.core.view.current_home()
    assert first is not None
    heir.wait(INTERVAL_S)
    heir.hand_in()
    view = heir.core.view
    inputs = [listing(contribution(maker, 2, 1)) for maker in others(heir)]
    record = commit(view.lineage, view.head, inputs, first, time_ms=view.wall_ms)
    heir.tell(ev.CommitIn(first, record))
    heir.tell(ev.ObtainFailed(named(record), "no answer"))
    assert "succession" in [
        note.kind for note in only(heir.wait(heir.core.home.patience() + 0.6), ev.Note)
    ]


def test_a_home_may_take_as_long_as_it_may_wait_for_contributions() -> None:
    heir = at_place(1)
    home, view = heir.core.home, heir.core.view
    assert home.patience() == COMMIT_DELAY_FIRST_S
    heir.tell(ev.Pace(40.0, 0.0))
    assert home.patience() == GRACE_SHARE * 40.0 + COMMIT_DELAY_MIN_S
    heir.tell(ev.Pace(4000.0, 0.0))
    assert home.patience() == COMMIT_DELAY_MAX_S
    for _ in range(SAMPLES_MIN):
        view.commit_delay.add(0.1)
        home.grace.add(5.0)
    assert home.patience() == 5.0 + COMMIT_DELAY_MIN_S, "arrivals here spread as they do there"
    for _ in range(SAMPLES_MIN):
        view.commit_delay.add(20.0)
        home.grace.add(5.0)
    assert home.patience() > 20.0


def test_a_home_whose_merge_hangs_hands_its_own_work_to_its_heir() -> None:
    home = at_place(0)
    heir = home.core.view.succession()[1]
    for maker in others(home):
        arrive(home, maker)
    home.wait(INTERVAL_S)
    home.hand_in()
    assert home.core.home.merging is not None
    patience = home.core.home.patience()
    assert not only(home.wait(patience - 0.2), ev.SendContribution)
    assert [one.to for one in only(home.wait(0.3), ev.SendContribution)] == [heir]
    inputs = [listing(contribution(maker, 2, 1)) for maker in others(home)]
    late = home.tell(merged(home.core.head, inputs))
    assert only(late, ev.Sign), "late is better than never"
    assert not only(late, ev.CancelSend), "what is on its way to the heir stays so"


def test_a_merge_that_failed_late_is_tried_again_by_the_home_itself() -> None:
    home = at_place(0)
    for maker in others(home):
        arrive(home, maker)
    home.wait(INTERVAL_S)
    home.hand_in()
    home.wait(home.core.home.patience() + 0.1)
    failed = ev.Merged(home.core.head.digest, (), "int8", b"", 0, b"", b"")
    home.tell(failed)
    assert home.core.view.current_home() == home.core.view.me


def test_what_was_sent_to_a_home_that_is_passed_over_goes_to_its_heir_at_once() -> None:
    peer = at_place(3)
    peer.wait(INTERVAL_S)
    peer.hand_in()
    order = peer.core.view.succession()
    assert [one.to for one in only(peer.actions, ev.SendContribution)] == [order[0]]
    assert peer.core.home.pass_at is not None
    actions = peer.tell(ev.Timer(), after=peer.core.home.pass_at - peer.now)
    kinds = [type(one) for one in actions if isinstance(one, ev.Note | ev.SendContribution)]
    assert kinds == [ev.Note, ev.SendContribution]
    assert only(actions, ev.SendContribution)[0].to == order[1]


def test_with_nothing_to_merge_nobody_is_passed_over() -> None:
    heir = at_place(1, learner=False)
    assert not only(heir.wait(60.0), ev.Note)


def test_when_everybody_was_passed_over_it_begins_again() -> None:
    peer = at_place(3)
    arrive(peer, others(peer)[0])
    peer.core.view.promised[peer.core.head.digest] = b"x" * 32  # it cannot be home itself
    delay = peer.core.view.commit_delay.limit()
    peer.wait(INTERVAL_S + 3 * delay + 0.5)
    assert peer.core.view.passed == set(others(peer))
    peer.wait(delay)
    assert peer.core.view.passed != set(others(peer))


def test_a_leaving_peer_takes_on_no_duty() -> None:
    home = at_place(0)
    home.tell(ev.LeaveNow())
    for maker in others(home):
        arrive(home, maker)
    assert not only(home.wait(2 * INTERVAL_S), ev.Merge)
    assert home.core.view.current_home() != home.core.view.me


def test_alone_it_merges_its_own_work_at_once() -> None:
    peer = Peer(A)
    peer.wait(INTERVAL_S)
    peer.hand_in()
    assert only(peer.actions, ev.Merge)
    assert peer.core.head is peer.core.view.lineage.genesis
    assert Lineage(RULES).genesis.digest == peer.core.head.digest
