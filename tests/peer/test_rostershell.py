"""The roster's shell: a mesh over the in-memory transport in virtual time, and one over libp2p."""

import asyncio
import hashlib
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from dugnad.dht.advert import Advert
from dugnad.dht.frames import read_frame, write_frame
from dugnad.dht.heartbeat import SILENCE_MAX_S
from dugnad.dht.identity import Identity
from dugnad.dht.ids import PeerId, RunId
from dugnad.dht.memory import MemoryNetwork
from dugnad.dht.messages import (
    CONTROL_PROTOCOL,
    MESSAGE_BYTES_MAX,
    Hello,
    decode_message,
    encode_message,
)
from dugnad.dht.p2pd import listen_addresses
from dugnad.dht.ports import Stream, StreamEnded, Transport
from dugnad.dht.roster import Roster, RosterConfig
from dugnad.dht.roster_events import (
    Event,
    Known,
    MyAdvert,
    Note,
    PeerChanged,
    PeerLeft,
    PeerLost,
    PeerUp,
    Send,
    StreamUp,
)
from dugnad.dht.substrate import Substrate, SubstrateConfig
from dugnad.peer import rostershell
from dugnad.peer.rostershell import RosterAction, RosterShell

from .virtual_time import (  # noqa: TID252  a helper of these tests
    pass_time,
    run_virtual,
    until,
)

RUN = RunId(hashlib.sha256(b"roster shell").digest())
MESH_S = 5.0
LOST_S = 1.0


class HangingShell(RosterShell):
    """Can be made to hear, think and say nothing while its streams stay open."""

    hung = False

    def feed(self, event: Event) -> None:
        if not self.hung:
            super().feed(event)


@dataclass
class Member:
    """One peer of a test swarm and what its roster said, with the loop's time."""

    identity: Identity
    transport: Transport
    log: list[tuple[float, RosterAction]] = field(default_factory=list)
    react: Callable[[RosterAction], None] = lambda action: None
    shell: HangingShell = field(init=False)

    def __post_init__(self) -> None:
        roster = Roster(RosterConfig(RUN, "test 1"), self.identity, self.advert(), random.Random(1))
        clock = asyncio.get_running_loop().time
        self.shell = HangingShell(roster, self.transport, self._said, clock, self.wall_ms)

    @property
    def peer(self) -> PeerId:
        return self.identity.peer

    def wall_ms(self) -> int:
        return 1_800_000_000_000 + round(asyncio.get_running_loop().time() * 1000)

    def advert(self, name: str = "", addresses: tuple[str, ...] = ()) -> Advert:
        return Advert(peer=self.peer, boot=7, at_ms=self.wall_ms(), name=name, addresses=addresses)

    def live(self) -> set[PeerId]:
        return set(self.shell.roster.live())

    def said(
        self, kind: type[RosterAction], since: float = 0.0
    ) -> list[tuple[float, RosterAction]]:
        return [(at, one) for at, one in self.log if isinstance(one, kind) and at >= since]

    def _said(self, action: RosterAction) -> None:
        self.log.append((asyncio.get_running_loop().time(), action))
        self.react(action)


async def meet(members: list[Member]) -> None:
    """Everybody knows the first, by address; the mesh is complete when this returns."""
    for member in members:
        addresses = tuple(await member.transport.addresses())
        await member.shell.start()
        member.shell.feed(MyAdvert(member.advert(addresses=addresses)))
    first = tuple(await members[0].transport.addresses())
    for member in members[1:]:
        member.shell.feed(Known(members[0].peer, first, "a link"))
    everybody = {member.peer for member in members}
    await until(lambda: all(one.live() == everybody - {one.peer} for one in members), MESH_S)


@asynccontextmanager
async def swarm(size: int) -> AsyncIterator[tuple[MemoryNetwork, list[Member]]]:
    """A mesh of `size` peers in memory."""
    network = MemoryNetwork(asyncio.get_running_loop().time)
    identities = [Identity.ephemeral(bytes([number]) * 32) for number in range(1, size + 1)]
    members = [Member(one, network.join(one.peer)) for one in identities]
    try:
        await meet(members)
        yield network, members
    finally:
        for member in members:
            await member.shell.close()
            await member.transport.close()


def reason_of(action: RosterAction) -> str:
    assert isinstance(action, PeerLost)
    return action.reason


def test_three_shells_form_a_mesh_and_stay_one() -> None:
    async def scenario() -> None:
        async with swarm(3) as (_, members):
            await pass_time(60)
            for member in members:
                assert len(member.said(PeerUp)) == 2
                assert not member.said(PeerLost)

    run_virtual(scenario())


def test_a_killed_peer_is_lost_on_the_others_within_a_second() -> None:
    async def scenario() -> None:
        async with swarm(3) as (network, (one, two, three)):
            await pass_time(5)
            network.kill(three.peer)
            took = await until(lambda: three.peer not in one.live() | two.live(), LOST_S)
            assert took < LOST_S
            assert one.live() == {two.peer}
            assert reason_of(two.said(PeerLost)[0][1]).startswith("stream ended")

    run_virtual(scenario())


def test_a_hung_peer_is_lost_after_its_silence_and_comes_back() -> None:
    async def scenario() -> None:
        async with swarm(3) as (_, (one, two, three)):
            await pass_time(20)
            three.shell.hung = True
            await until(lambda: three.peer not in one.live() | two.live(), SILENCE_MAX_S + LOST_S)
            assert "silent" in reason_of(one.said(PeerLost)[0][1])
            three.shell.hung = False
            await until(lambda: three.peer in one.live() & two.live(), 120)

    run_virtual(scenario())


def test_leaving_is_told_to_everybody_and_takes_less_than_a_second() -> None:
    async def scenario() -> None:
        async with swarm(3) as (_, (one, two, three)):
            start = asyncio.get_running_loop().time()
            await three.shell.leave()
            await until(lambda: three.peer not in one.live() | two.live(), LOST_S)
            assert asyncio.get_running_loop().time() - start < rostershell.LEAVE_S
            for other in (one, two):
                assert [action for _, action in other.said(PeerLeft)] == [PeerLeft(three.peer)]
                assert not other.said(PeerLost)

    run_virtual(scenario())


@pytest.mark.parametrize(
    ("size", "content"), [(5, b"\xc1junk"), (MESSAGE_BYTES_MAX + 1, b"")], ids=["bytes", "length"]
)
def test_garbage_ends_the_stream_and_names_the_fault(size: int, content: bytes) -> None:
    async def scenario() -> None:
        async with swarm(1) as (network, (one,)):
            stranger = network.join(Identity.ephemeral(b"s" * 32).peer)
            await stranger.dial(one.peer, await one.transport.addresses(), 1.0)
            stream = await stranger.open(one.peer, CONTROL_PROTOCOL, 1.0)
            assert isinstance(decode_message(await read_frame(stream, MESSAGE_BYTES_MAX)), Hello)
            await stream.write(size.to_bytes(4, "big") + content)
            with pytest.raises(StreamEnded):
                await stream.read(1 << 20)
            notes = [action for _, action in one.said(Note)]
            assert any(isinstance(note, Note) and "garbage" in note.text for note in notes)
            await stranger.close()

    run_virtual(scenario())


def test_a_peer_that_does_not_read_is_given_up_when_the_queue_is_full() -> None:
    async def scenario() -> None:
        async with swarm(1) as (network, (one,)):
            stuck = network.join(Identity.ephemeral(b"s" * 32).peer)
            streams: list[Stream] = []

            async def says_hello_only(stream: Stream) -> None:
                streams.append(stream)
                hello = Member(Identity.ephemeral(b"s" * 32), stuck).shell.roster
                await write_frame(stream, hello_of(hello))
                await asyncio.Event().wait()

            await stuck.accept(CONTROL_PROTOCOL, says_hello_only)
            one.shell.feed(Known(stuck.peer, tuple(await stuck.addresses()), "a link"))
            await until(lambda: stuck.peer in one.live(), MESH_S)
            for number in range(3 * rostershell.QUEUE_MAX):
                one.shell.feed(MyAdvert(one.advert(name=f"name {number}")))
                await asyncio.sleep(0)
                if one.said(Note):
                    break
            notes = [action.text for _, action in one.said(Note) if isinstance(action, Note)]
            assert "are unsent" in notes[0]
            with pytest.raises(StreamEnded):
                await streams[0].read(1 << 20)
            await stuck.close()

    run_virtual(scenario())


def hello_of(roster: Roster) -> bytes:
    """The first frame of a peer with this roster."""
    stranger = Identity.ephemeral(b"x" * 32).peer
    (send,) = [a for a in roster.handle(StreamUp(stranger, 1, False), 0.0) if isinstance(a, Send)]
    return encode_message(send.message)


def test_a_dial_that_fails_is_answered_with_the_reason() -> None:
    async def scenario() -> None:
        async with swarm(1) as (_, (one,)):
            nobody = Identity.ephemeral(b"n" * 32).peer
            one.shell.feed(Known(nobody, ("/ip4/127.0.0.1/tcp/1",), "a link"))
            await until(lambda: bool(one.said(Note)), 1.0)
            assert "connection refused" in one.shell.roster.state(nobody).reason

    run_virtual(scenario())


def test_what_the_daemon_raises_or_feeds_back_does_not_disturb_the_roster(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        network = MemoryNetwork(asyncio.get_running_loop().time)
        ids = [Identity.ephemeral(bytes([number]) * 32) for number in (1, 2)]
        one, two = members = [Member(each, network.join(each.peer)) for each in ids]

        def react(action: RosterAction) -> None:
            if isinstance(action, PeerUp):
                one.shell.feed(MyAdvert(one.advert(name="renamed")))
                raise LookupError("a fault of the daemon")

        one.react = react
        await meet(members)
        await until(lambda: bool(two.said(PeerChanged)), 1.0)
        advert = two.shell.roster.advert(one.peer)
        assert advert is not None
        assert advert.name == "renamed"
        for member in members:
            await member.shell.close()
            await member.transport.close()

    run_virtual(scenario())
    assert "the daemon failed over PeerUp" in caplog.text


def test_after_close_nothing_is_done_or_left() -> None:
    async def scenario() -> None:
        async with swarm(3) as (_, (one, two, three)):
            await one.shell.close()
            await one.shell.close()
            await asyncio.sleep(0)
            mine = [task for task in asyncio.all_tasks() if "control" in task.get_name()]
            assert len(mine) == 4  # a reader and a writer of two and of three
            said = len(one.log)
            one.shell.feed(Known(two.peer, ("/ip4/127.0.0.1/tcp/1",)))
            await pass_time(60)
            assert len(one.log) == said
            assert one.peer not in two.live() | three.live()

    run_virtual(scenario())


# --- over libp2p

PEER = textwrap.dedent(
    """
    import asyncio, random, sys, time
    from pathlib import Path
    from dugnad.dht.advert import Advert
    from dugnad.dht.identity import Identity
    from dugnad.dht.ids import RunId, parse_peer
    from dugnad.dht.roster import Roster, RosterConfig
    from dugnad.dht.roster_events import Known
    from dugnad.dht.substrate import Substrate, SubstrateConfig
    from dugnad.dht import substrate as adapter
    from dugnad.peer.rostershell import RosterShell

    everything = adapter.listen_addresses
    adapter.listen_addresses = lambda *places: everything(*places)[::2]  # TCP only

    async def main(folder, run, seed):
        identity = Identity.create(Path(folder) / "key")
        config = SubstrateConfig(
            Path(folder) / "key", Path(folder) / "run", ("127.0.0.1",), address_book=False
        )
        substrate = Substrate(config, identity)
        await substrate.start()
        wall_ms = lambda: time.time_ns() // 1_000_000
        advert = Advert(
            peer=identity.peer, boot=3, at_ms=wall_ms(),
            addresses=tuple(await substrate.addresses()),
        )
        roster = Roster(RosterConfig(RunId(bytes.fromhex(run)), "t"), identity, advert,
                        random.Random(3))
        shell = RosterShell(roster, substrate, lambda action: None, time.monotonic, wall_ms)
        await shell.start()
        shell.feed(Known(parse_peer(seed.rpartition("/")[2]), (seed,), "a link"))
        print(seed, flush=True)
        await asyncio.Event().wait()

    asyncio.run(main(*sys.argv[1:]))
    """
)


class RealMember(Member):
    """With the real wall clock, as the process beside it."""

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000


@pytest.mark.slow
async def test_over_tcp_a_mesh_forms_and_a_killed_process_is_lost_within_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # p2pd connects pairs by itself and then prefers QUIC, where the kernel does not tell of the end
    # of a killed process: that is noticed by silence, after 3 s. This is about streams over TCP.
    monkeypatch.setattr(
        "dugnad.dht.substrate.listen_addresses", lambda *places: listen_addresses(*places)[::2]
    )
    members = []
    for number in (1, 2):
        folder = tmp_path / str(number)
        folder.mkdir()
        identity = Identity.create(folder / "key")
        config = SubstrateConfig(folder / "key", folder / "run", ("127.0.0.1",), address_book=False)
        members.append(RealMember(identity, Substrate(config, identity)))
    process = None
    try:
        for member in members:
            assert isinstance(member.transport, Substrate)
            await member.transport.start()
        await meet(list(members))
        seed = (await members[0].transport.addresses())[0]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", PEER, str(tmp_path), RUN.hex(), seed, stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        async with asyncio.timeout(30):
            assert await process.stdout.readline()
        await until(lambda: all(len(member.live()) == 2 for member in members), MESH_S)
        await asyncio.sleep(2)
        os.kill(process.pid, signal.SIGKILL)
        took = await until(lambda: all(len(member.live()) == 1 for member in members), 10.0)
        assert took < LOST_S, [member.said(PeerLost) for member in members]
    finally:
        if process is not None and process.returncode is None:
            process.kill()
        if process is not None:
            await process.communicate()
        for member in members:
            await member.shell.close()
            await member.transport.close()
