"""How much one peer may bring in some time."""

from dugnad.dht.allowance import PEERS_MAX, Allowance
from dugnad.dht.ids import PeerId

ONE, OTHER = PeerId(b"1" * 32), PeerId(b"2" * 32)


def test_each_peer_brings_so_much_in_the_time_and_what_was_refused_does_not_count() -> None:
    allowance = Allowance(2, 10.0)
    assert allowance.take(ONE, 0.0)
    assert allowance.take(ONE, 1.0)
    assert not allowance.take(ONE, 9.0)
    assert allowance.take(OTHER, 9.0)
    assert allowance.take(ONE, 10.0)
    assert not allowance.take(ONE, 10.5)
    assert allowance.take(ONE, 11.0)


def test_who_is_gone_begins_anew_and_the_memory_has_an_end() -> None:
    allowance = Allowance(1, 10.0)
    assert allowance.take(ONE, 0.0)
    allowance.forget(ONE)
    assert allowance.take(ONE, 1.0)
    for number in range(PEERS_MAX):
        assert allowance.take(PeerId(number.to_bytes(32)), 2.0)
    assert allowance.take(ONE, 3.0), "the oldest was forgotten"
