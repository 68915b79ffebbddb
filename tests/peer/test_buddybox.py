"""Others' drafts are kept within bounds, the newest of each maker and fragment."""

import pytest

from dugnad.averaging.formats import Contribution
from dugnad.averaging.worker import Kept
from dugnad.dht.ids import PeerId
from dugnad.peer.buddybox import MAKERS_MAX, BuddyBox


def draft(maker: int = 1, seq: int = 1, tokens: int = 8, size: int = 10, fragment: int = 0) -> Kept:
    made = Contribution(
        peer=bytes([maker]) * 32,
        fragment=fragment,
        seq=seq,
        base=0,
        base_digest=b"b" * 32,
        tokens=tokens,
        steps=1,
        speed_class=0,
        eligible=True,
        codec="int8",
        payload_root=b"r" * 32,
        payload_bytes=size,
        pieces_root=b"p" * 32,
    )
    return Kept(made, (), bytes(size))


def maker(number: int) -> PeerId:
    return PeerId(bytes([number]) * 32)


def test_a_newer_draft_takes_the_place_of_an_older_one_and_never_the_other_way() -> None:
    box = BuddyBox()
    for one in (draft(tokens=8), draft(tokens=16), draft(seq=2, tokens=4)):
        assert box.keep(one) == ""
    assert box.bytes == 10
    for old in (draft(tokens=99), draft(seq=2, tokens=4)):
        assert "newer draft" in box.keep(old)
    assert box.take(maker(1)) == (draft(seq=2, tokens=4),)
    assert box.take(maker(1)) == ()
    assert box.bytes == 0


def test_each_fragment_has_its_own_draft() -> None:
    box = BuddyBox()
    assert box.keep(draft(fragment=0)) == box.keep(draft(fragment=1)) == ""
    assert {one.contribution.fragment for one in box.take(maker(1))} == {0, 1}


def test_so_many_makers_and_no_more() -> None:
    box = BuddyBox()
    for number in range(1, MAKERS_MAX + 1):
        assert box.keep(draft(number)) == ""
    assert f"drafts of {MAKERS_MAX} others" in box.keep(draft(9))
    box.take(maker(1))
    assert box.keep(draft(9)) == ""
    assert maker(9) in box.makers()


@pytest.mark.parametrize(("size", "kept"), [(60, True), (61, False)])
def test_its_memory_is_bounded(size: int, kept: bool) -> None:
    box = BuddyBox(bytes_max=100)
    assert box.keep(draft(1, size=40)) == ""
    assert (box.keep(draft(2, size=size)) == "") is kept
    assert box.keep(draft(1, seq=2, size=40)) == "", "it takes the room of the one before"
    assert box.bytes <= 100
