"""Leaving: the codec of the last hand-in."""

from dugnad.averaging.codecs import CODECS
from dugnad.averaging.linkcontrol import richest


def test_the_last_hand_in_goes_in_the_richest_codec_that_fits() -> None:
    sizes, names = (100_000, 50_000), list(CODECS)
    assert richest(names, sizes, 1e9) == "float32"
    for name in CODECS:
        size = sum(CODECS[name].encoded_size(one) for one in sizes)
        assert richest(names, sizes, size) == name
    assert richest(names, sizes, 0.0) is None
