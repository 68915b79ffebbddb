"""When a newcomer knows enough of the others to begin."""

import pytest

from dugnad.peer.vitals import SILENT_S, enough_heard


def test_a_newcomer_waits_for_all_and_after_a_while_for_most() -> None:
    assert enough_heard(live=5, silent=0, waited_s=0.0)
    assert not enough_heard(live=5, silent=1, waited_s=SILENT_S - 0.1)
    assert enough_heard(live=5, silent=1, waited_s=SILENT_S)


@pytest.mark.parametrize(("live", "silent"), [(1, 1), (2, 1), (4, 2), (5, 3)])
def test_half_of_the_others_is_not_most(live: int, silent: int) -> None:
    assert not enough_heard(live, silent, waited_s=60.0)
