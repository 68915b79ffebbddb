"""What a daemon tells all, and passes on: in a mesh directly, in a crowd along its links."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from dugnad.averaging import formats as fm
from dugnad.averaging.passing import sign_claims
from dugnad.dht.identity import Identity
from dugnad.dht.ids import PeerId, RunId
from dugnad.dht.memory import MemoryNetwork
from dugnad.dht.ports import DialError
from dugnad.peer import clock
from dugnad.peer.crowdrelay import CrowdRelay
from dugnad.peer.daemon import Daemon
from dugnad.peer.fartransport import FarTransport

RUN = RunId(b"r" * 32)
ME = Identity.ephemeral(b"\x01" * 32)
MAKER = Identity.ephemeral(b"\x02" * 32)
HERE = Identity.ephemeral(b"\x03" * 32)
NEAR = [PeerId(bytes([n]) * 32) for n in (1, 2, 3)]
FAR = PeerId(b"f" * 32)


def relay(*, crowded: bool) -> tuple[CrowdRelay, list[tuple[PeerId, fm.Message]]]:
    sent: list[tuple[PeerId, fm.Message]] = []
    daemon: Any = SimpleNamespace(  # Any: stands in for a daemon
        run_id=RUN,
        identity=ME,
        averager=SimpleNamespace(live=lambda: (*NEAR, HERE.peer, FAR), fragments=[]),
        swarm=SimpleNamespace(
            roster=SimpleNamespace(crowded=crowded, neighbours=lambda: tuple(NEAR)),
            send=lambda peer, message: sent.append((peer, message)),
        ),
    )
    return CrowdRelay(cast(Daemon, daemon)), sent


def test_in_a_mesh_all_are_told_and_nothing_is_passed_on() -> None:
    one, sent = relay(crowded=False)
    claims = fm.Claims(((0, 1),))
    one.say(claims)
    assert sent == [(peer, claims) for peer in (*NEAR, HERE.peer, FAR)]
    sent.clear()
    one.hear(NEAR[0], fm.Told(b"x"), lambda sender, message: True)
    assert sent == []


def test_in_a_crowd_claims_go_signed_to_the_neighbours() -> None:
    one, sent = relay(crowded=True)
    one.say(fm.Claims(((0, 1),)))
    assert [peer for peer, _ in sent] == NEAR
    message = sent[0][1]
    assert isinstance(message, fm.PeerClaims)
    assert (message.peer, message.units) == (ME.peer, ((0, 1),))
    one.hear(NEAR[1], message, lambda sender, message: True)
    assert len(sent) == 3, "our own word that comes back is not passed on"


def test_what_was_found_good_goes_on_once_and_not_back() -> None:
    one, sent = relay(crowded=True)
    taken: list[PeerId] = []

    def take(sender: PeerId, message: fm.Message) -> bool:
        taken.append(sender)
        return True

    message = sign_claims([(0, 1)], clock.wall_ms(), RUN, MAKER)
    for sender in (NEAR[1], NEAR[0], NEAR[1]):
        one.hear(sender, message, take)
    assert taken == [NEAR[1]]
    assert [peer for peer, _ in sent] == [NEAR[0], NEAR[2]]
    assert one.passed == 2


def test_claims_count_when_their_maker_signed_them_and_is_here() -> None:
    one, _ = relay(crowded=True)
    claims = sign_claims([(0, 1)], clock.wall_ms(), RUN, HERE)
    assert one.claims(claims) == ""
    assert "not signed" in one.claims(msgspec.structs.replace(claims, units=((0, 2),)))
    assert "not here" in one.claims(sign_claims([(0, 1)], clock.wall_ms(), RUN, MAKER))


def test_what_is_refused_ends_here_and_may_come_again() -> None:
    one, sent = relay(crowded=True)
    answers = iter((False, True))
    for sender in NEAR[:2]:
        one.hear(sender, fm.Scores((b"x",)), lambda sender, message: next(answers))
    assert [peer for peer, _ in sent] == [NEAR[0], NEAR[2]]


def test_heads_and_answers_are_nobody_elses_business() -> None:
    one, sent = relay(crowded=True)
    heard: list[fm.Message] = []
    heads = fm.Heads((), True)

    def take(sender: PeerId, message: fm.Message) -> bool:
        heard.append(message)
        return True

    for _ in range(2):
        one.hear(NEAR[0], heads, take)
    assert heard == [heads, heads]
    assert sent == []


async def test_a_far_member_is_dialled_when_a_stream_to_it_is_wanted() -> None:
    network = MemoryNetwork()
    mine, theirs = network.join(NEAR[0]), network.join(FAR)
    served: list[PeerId] = []

    async def serve(stream: Any) -> None:  # Any: a stream of the in-memory transport
        served.append(stream.peer)

    await theirs.accept("/x", serve)
    places: Sequence[str] = ()
    far = FarTransport(mine, lambda peer: places)
    with pytest.raises(DialError, match="not connected"):  # in a mesh
        await far.open(FAR, "/x", 1.0)
    places = await theirs.addresses()
    stream = await far.open(FAR, "/x", 1.0)
    assert stream.peer == FAR
    stream.abort()
    await far.close()
    await theirs.close()
