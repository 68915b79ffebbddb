"""Shared vectors: two mappings of one memory, and nothing left of them."""

import os

import pytest

from dugnad.peer.learner.memory import Region


def test_what_one_side_writes_the_other_reads() -> None:
    ours = Region.create("test", 10)
    theirs = Region.attach(os.dup(ours.fd), 10)
    ours.array[3] = 2.5
    assert theirs.array.tolist() == [0, 0, 0, 2.5, 0, 0, 0, 0, 0, 0]
    theirs.close()
    ours.close()
    ours.close()


def test_a_region_of_another_size_is_refused() -> None:
    region = Region.create("test", 10)
    with pytest.raises(ValueError, match="40 bytes, expected 44"):
        Region.attach(region.fd, 11)
    region.close()


def test_views_outlive_the_region() -> None:
    region = Region.create("test", 4)
    view = region.array[1:]
    region.close()
    view[:] = 1.0
    assert view.sum() == 3.0
