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
from dugnad.peer.transferwire import OthersTurn, PullError

from .transfer_world import HELD  # noqa: TID252  the tests are no installed package
from .virtual_time import pass_time, run_virtual  # noqa: TID252  the same

SIZE = 5000
RNG = np.random.default_rng(4)


def merged(codec: str, mu: float) -> tuple[Header, AnchorState, bytes]:
    """A merge after which momentum was not zero before: header, state and payload."""
    parent = AnchorState.of(
        RNG.standard_normal(SIZE, np.float32), RNG.standard_normal(SIZE, np.float32)
    )
    gradient = RNG.standard_normal(SIZE, np.float32) * np.float32(1e-3)
    gradient[::7] = 0.0
    gradient[::11] = -0.0
    payload = bytes(CODECS[codec].encode(gradient))
    rates = {"eta_bits": bits_of(1.0), "mu_bits": bits_of(mu)}
    state = FragmentBuffers.advance(parent, payload, COMMIT_CODECS[codec], **rates)
    header = msgspec.structs.replace(
        HELD.header,
        kind=MERGE,
        codec=codec,
        payload_bytes=len(payload),
        theta_root=state.theta_root,
        momentum_root=state.momentum_root,
        **rates,
    )
    return header, state, payload


@dataclass
class Donors:
    """Plays a puller; `asked` are the kinds of what was asked for."""

    state: AnchorState
    held: bytes | None
    takes_s: float = 1.0
    asked: list[str] = field(default_factory=list)

    async def payload(self, peers: Sequence[PeerId], header: Header, size: int) -> bytes:
        self.asked.append("payload")
        if self.held is None:
            raise PullError("nobody has it any more")
        return self.held

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


@pytest.mark.parametrize("codec", list(COMMIT_CODECS))
def test_without_outer_momentum_the_payload_gives_what_the_header_calls_momentum(
    codec: str,
) -> None:
    header, state, payload = merged(codec, 0.0)
    donors = Donors(state, payload)
    assert pulled(donors, header) == roots(state)
    assert donors.asked == ["payload", "theta"]


def test_a_run_with_momentum_a_join_and_a_payload_that_is_gone_take_all_of_the_anchors() -> None:
    for header, state, payload, asked in (
        (*merged("int8", 0.5), ["anchors"]),
        (*merged("int8", 0.0)[:2], None, ["payload", "anchors"]),
        (*merged("int8", 0.0)[:2], b"x", ["payload", "anchors"]),
    ):
        donors = Donors(state, payload)
        assert pulled(donors, header) == roots(state)
        assert donors.asked == asked
    header, state, payload = merged("int8", 0.0)
    donors = Donors(state, payload)
    pulled(donors, msgspec.structs.replace(header, kind=JOIN))
    assert donors.asked == ["anchors"]


def test_fragments_come_one_after_the_other_and_who_has_waited_chooses_anew() -> None:
    header, state, payload = merged("int8", 0.0)

    async def story() -> None:
        pull, donors = AnchorPull(), Donors(state, payload, takes_s=5.0)
        first = asyncio.create_task(pull.anchors(cast(Puller, donors), [], header, SIZE))
        await pass_time(1.0)
        with pytest.raises(OthersTurn):
            await pull.anchors(cast(Puller, donors), [], header, SIZE)
        assert first.done()
        assert donors.asked == ["payload", "theta"]
        await first
        await pull.anchors(cast(Puller, donors), [], header, SIZE)

    run_virtual(story())


def test_a_turn_that_does_not_get_on_holds_the_others_up_for_so_long_only() -> None:
    header, state, payload = merged("int8", 0.0)

    async def story() -> None:
        pull, stuck = AnchorPull(), Donors(state, payload, takes_s=10 * TURN_S)
        first = asyncio.create_task(pull.anchors(cast(Puller, stuck), [], header, SIZE))
        await pass_time(1.0)
        quick, began = Donors(state, payload), asyncio.get_running_loop().time()
        await pull.anchors(cast(Puller, quick), [], header, SIZE)
        assert asyncio.get_running_loop().time() - began == pytest.approx(TURN_S + 1.0)
        assert not first.done()
        await first

    run_virtual(story())
