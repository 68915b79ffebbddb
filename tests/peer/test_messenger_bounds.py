"""The messenger's bounds, without a network: pace of reading, faults, the queue to a peer."""

import pytest

from dugnad.peer import messenger as limits
from dugnad.peer.messenger import Conduct, Outbox


def test_the_pace_counts_messages_bytes_and_signatures() -> None:
    conduct = Conduct()
    conduct.spend(10.0, messages=round(limits.MESSAGES_PER_S))
    assert conduct.wait_s(10.0) == 0
    conduct.spend(10.0, size=round(3 * limits.BYTES_PER_S))
    assert conduct.wait_s(10.0) == pytest.approx(2)
    conduct.spend(10.5, signatures=round(5 * limits.SIGNATURES_PER_S))
    assert conduct.wait_s(10.5) == pytest.approx(4)
    assert conduct.wait_s(14.5) == pytest.approx(0)


def test_faults_far_apart_are_forgiven() -> None:
    conduct = Conduct()
    apart = limits.FAULTS_WINDOW_S / limits.FAULTS_MAX + 0.1
    assert not any(conduct.fault(apart * number) for number in range(100))
    assert any(conduct.fault(2000.0) for _ in range(limits.FAULTS_MAX + 1))


async def test_a_full_outbox_drops_the_oldest_heads_and_acks_first() -> None:
    outbox = Outbox()
    assert not outbox.put(b"commit", light=False)
    dropped = sum(outbox.put(b"heads %d" % number, light=True) for number in range(2000))
    assert dropped == 2001 - limits.QUEUE_MAX
    assert len(outbox) == limits.QUEUE_MAX
    assert await outbox.first() == b"commit"
    assert await outbox.first() == b"heads %d" % dropped


async def test_a_full_outbox_of_commits_drops_the_oldest_and_keeps_its_bytes_bounded() -> None:
    outbox = Outbox()
    size = limits.QUEUE_BYTES_MAX // 4
    drops = [outbox.put(bytes([number]) * size, light=False) for number in range(6)]
    assert drops == [0, 0, 0, 0, 1, 1]
    assert outbox.put(b"heads", light=True) == 1  # itself: commits are worth more
    assert len(outbox) == 4
    assert (await outbox.first())[0] == 2
