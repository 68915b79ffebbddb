"""What is remembered of checked signatures. The judging itself is tested through the messenger."""

from dugnad.averaging.formats import NO_DIGEST, Ack
from dugnad.peer.messagecheck import CHECKED_MAX, CheckedRecords

ACK = Ack(NO_DIGEST, 0, 1, NO_DIGEST)


def test_the_memory_of_checked_records_is_bounded() -> None:
    checked = CheckedRecords()
    names = [number.to_bytes(8, "big") for number in range(CHECKED_MAX + 10)]
    checked.add(names[:10])
    assert checked.unknown([(names[0], ACK)]) == []  # used again: it stays
    checked.add(names[10:])
    assert len(checked._names) == CHECKED_MAX
    assert checked.unknown([(names[0], ACK)]) != []
