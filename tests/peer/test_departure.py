"""Leaving: the codec of the last hand-in."""

from dugnad.averaging.codecs import CODECS
from dugnad.peer.departure import richest


def test_the_last_hand_in_goes_in_the_richest_codec_that_fits() -> None:
    sizes = (100_000, 50_000)
    assert richest(sizes, 1e9) == "float32"
    for name in CODECS:
        size = sum(CODECS[name].encoded_size(one) for one in sizes)
        assert richest(sizes, size) == name
    assert richest(sizes, 0.0) == list(CODECS)[-1]
