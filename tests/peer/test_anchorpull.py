"""Whole anchors over a slow line: whose turn it is, and what need not be fetched."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import msgspec
import numpy as np
import pytest

from dugnad.averaging.buffers import AnchorState, FragmentBuffers
from dugnad.averaging.codecs import CODECS, COMMIT_CODECS
from dugnad.averaging.formats import Header
from dugnad.averaging.join import JOIN, MERGE
from dugnad.averaging.outer import bits_of
from dugnad.averaging.tree import Vector
from dugnad.dht.ids import PeerId
from dugnad.peer.anchorpull import TURN_S, AnchorPull
from dugnad.peer.pull import Puller
from dugnad.peer.transferwire import OthersTurn

from .transfer_world import HELD  # noqa: TID252  the tests are no installed package
from .virtual_time import pass_time, run_virtual  # noqa: TID252  the same

SIZE = 5000
NOTHING = np.zeros(SIZE, np.float32)
RNG = np.random.default_rng(4)


def merged(mu: float, momentum: Vector) -> tuple[Header, AnchorState]:
    """A merge on a version with that momentum: header and state."""
    parent = AnchorState.of(RNG.standard_normal(SIZE, np.float32), momentum)
    gradient = RNG.standard_normal(SIZE, np.float32) * np.float32(1e-3)
    payload = bytes(CODECS["int8"].encode(gradient))
    rates = {"eta_bits": bits_of(1.0), "mu_bits": bits_of(mu)}
    state = FragmentBuffers.advance(parent, payload, COMMIT_CODECS["int8"], **rates)
    roots = {"theta_root": state.theta_root, "momentum_root": state.momentum_root}
    return msgspec.structs.replace(HELD.header, kind=MERGE, codec="int8", **roots, **rates), state


@dataclass
class Donors:
    """Plays a puller; `asked` are the kinds of what was asked for."""

    state: AnchorState
    takes_s: float = 1.0
    asked: list[str] = field(default_factory=list)

    async def theta(self, peers: Sequence[PeerId], header: Header, size: int) -> Vector:
        self.asked.append("theta")
        await pass_time(self.takes_s)
        return self.state.theta

    async def anchors(
        self, peers: Sequence[PeerId], header: Header, size: int
    ) -> tuple[Vector, Vector]:
        self.asked.append("anchors")
        await pass_time(self.takes_s)
        return self.state.theta, self.state.momentum


def pulled(donors: Donors, header: Header) -> tuple[bytes, bytes]:
    """The roots of what comes."""
    pulling = AnchorPull().anchors(cast(Puller, donors), [], header, SIZE)
    return roots(AnchorState.of(*run_virtual(pulling)))


def roots(state: AnchorState) -> tuple[bytes, bytes]:
    return state.theta_root, state.momentum_root


def test_without_outer_momentum_half_of_the_anchors_is_fetched() -> None:
    header, state = merged(0.0, NOTHING)
    donors = Donors(state)
    assert pulled(donors, header) == roots(state)
    assert donors.asked == ["theta"]
    donors = Donors(state)
    assert pulled(donors, msgspec.structs.replace(header, kind=JOIN)) == roots(state)
    assert donors.asked == ["theta"]


@pytest.mark.parametrize("mu", [0.0, 0.5])
def test_a_momentum_that_is_not_zero_is_fetched(mu: float) -> None:
    header, state = merged(mu, RNG.standard_normal(SIZE, np.float32))
    donors = Donors(state)
    assert pulled(donors, header) == roots(state)
    assert donors.asked == ["anchors"]


def test_fragments_come_one_after_the_other_and_who_has_waited_chooses_anew() -> None:
    header, state = merged(0.0, NOTHING)

    async def story() -> None:
        pull, donors = AnchorPull(), Donors(state, takes_s=5.0)
        first = asyncio.create_task(pull.anchors(cast(Puller, donors), [], header, SIZE))
        await pass_time(1.0)
        with pytest.raises(OthersTurn):
            await pull.anchors(cast(Puller, donors), [], header, SIZE)
        assert first.done()
        assert donors.asked == ["theta"]
        await first
        await pull.anchors(cast(Puller, donors), [], header, SIZE)

    run_virtual(story())


def test_a_turn_that_does_not_get_on_holds_the_others_up_for_so_long_only() -> None:
    header, state = merged(0.0, NOTHING)

    async def story() -> None:
        pull, stuck = AnchorPull(), Donors(state, takes_s=10 * TURN_S)
        first = asyncio.create_task(pull.anchors(cast(Puller, stuck), [], header, SIZE))
        await pass_time(1.0)
        quick, began = Donors(state), asyncio.get_running_loop().time()
        await pull.anchors(cast(Puller, quick), [], header, SIZE)
        assert asyncio.get_running_loop().time() - began == pytest.approx(TURN_S + 1.0)
        assert not first.done()
        await first

    run_virtual(story())
