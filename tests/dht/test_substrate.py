"""The substrate with real processes: seeds, death and restart of p2pd, nothing left behind."""

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import uvloop

from dugnad.dht.addresses import parse_address
from dugnad.dht.book import swarm_time
from dugnad.dht.identity import Identity
from dugnad.dht.ids import peer_text
from dugnad.dht.ports import DialError, Stream, StreamEnded
from dugnad.dht.substrate import SEED_TIMEOUT_S, Substrate, SubstrateConfig, SubstrateError

pytestmark = pytest.mark.slow

ECHO = "/dugnad/test/echo/1"
WAIT_S = 10.0
ORPHAN_S = 3.0
RSS_MAX_BYTES = 90e6

Make = Callable[..., Substrate]


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Make]:
    """Makes substrates on loopback and closes them at the end."""
    made: list[Substrate] = []

    def build(**changes: object) -> Substrate:
        folder = tmp_path / str(len(made))
        folder.mkdir()
        identity = Identity.create(folder / "key")
        config = SubstrateConfig(folder / "key", folder / "run", hosts=("127.0.0.1",))
        made.append(Substrate(replace(config, **changes), identity))  # type: ignore[arg-type]
        return made[-1]

    yield build
    await asyncio.gather(*(substrate.close() for substrate in made))


async def echo(stream: Stream) -> None:
    while True:
        await stream.write(await stream.read(1))


async def says_echo(substrate: Substrate, other: Substrate) -> None:
    stream = await substrate.open(other.peer, ECHO, WAIT_S)
    await stream.write(b"e")
    async with asyncio.timeout(WAIT_S):
        assert await stream.read(1) == b"e"
    await stream.close()


async def test_a_third_peer_joins_through_a_dead_and_a_live_seed(make: Make) -> None:
    first = make()
    await first.start()
    live = (await first.addresses())[0]
    second = make(seeds=(live,))
    await second.start()
    nobody = peer_text(Identity.ephemeral(b"n" * 32).peer)
    dead = f"/ip4/127.0.0.1/tcp/1/p2p/{nobody}"
    wrong = f"{live.rpartition('/')[0]}/{nobody}"
    third = make(seeds=(dead, live, wrong, "/ip4/127.0.0.1/tcp/1", "not an address"))
    reports = await third.start()
    assert [report.ok for report in reports] == [False, True, False, False, False]
    texts = [report.reason for report in reports]
    assert "refused" in texts[0]
    assert "wrong peer id" in texts[2]
    assert "does not end in the /p2p/ id" in texts[3]
    assert "starts with a slash" in texts[4]
    assert await second.store("key", b"value", 120)
    assert await third.get("key") == {second.peer: b"value"}


async def test_a_seed_that_answers_nothing_holds_nobody_up_once_another_answers(make: Make) -> None:
    first = make()
    await first.start()
    live = (await first.addresses())[0]
    with socket.create_server(("127.0.0.1", 0)) as frozen:  # the kernel takes its connections
        nobody = peer_text(Identity.ephemeral(b"n" * 32).peer)
        mute = f"/ip4/127.0.0.1/tcp/{frozen.getsockname()[1]}/p2p/{nobody}"
        second = make(seeds=(mute, live))
        async with asyncio.timeout(SEED_TIMEOUT_S - 2.0):
            reports = await second.start()
    assert [report.ok for report in reports] == [False, True]
    assert "no answer" in reports[0].reason


async def test_only_dead_seeds_do_not_stop_a_start(make: Make) -> None:
    dead = f"/ip4/127.0.0.1/tcp/1/p2p/{peer_text(Identity.ephemeral(b'n' * 32).peer)}"
    substrate = make(seeds=(dead,))
    assert [report.ok for report in await substrate.start()] == [False]
    assert await substrate.store("key", b"value", 60)
    assert await substrate.get("key") == {substrate.peer: b"value"}


async def test_quic_works_beside_tcp(make: Make) -> None:
    first, second = make(), make()
    await asyncio.gather(first.start(), second.start())
    await first.accept(ECHO, echo)
    tcp, quic = await first.addresses()
    assert "/tcp/" in tcp
    assert "/quic-v1/" in quic
    await second.dial(first.peer, [quic], WAIT_S)
    await says_echo(second, first)


async def test_an_outbound_only_peer_has_no_address_and_stores_elsewhere(make: Make) -> None:
    first = make()
    await first.start()
    hidden = make(outbound_only=True, seeds=tuple((await first.addresses())[:1]))
    assert [report.ok for report in await hidden.start()] == [True]
    assert await hidden.addresses() == []
    assert await hidden.store("key", b"mine", 60)
    assert await first.get("key") == {hidden.peer: b"mine"}
    await hidden.accept(ECHO, echo)
    await says_echo(first, hidden)


async def test_a_taken_port_is_named(make: Make) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(SubstrateError, match=f"port {port} is already in use: 127.0.0.1"):
            await make(port=port).start()


async def test_a_port_that_p2pd_would_share_is_refused(make: Make) -> None:
    first = make()
    await first.start()
    with pytest.raises(SubstrateError, match=f"port {first.port} is already in use"):
        await make(port=first.port).start()


async def test_p2pds_own_words_tell_why_it_failed(make: Make) -> None:
    substrate = make()
    substrate.config.identity.write_bytes(b"garbage")
    with pytest.raises(SubstrateError, match="p2pd failed to start: 2"):
        await substrate.start()


async def test_death_of_p2pd_is_seen_and_a_restart_keeps_key_port_and_entries(make: Make) -> None:
    first, second = make(), make()
    await first.start()
    await first.accept(ECHO, echo)
    await second.start()
    await second.dial(first.peer, await first.addresses(), WAIT_S)
    await second.meet([first.peer])
    await says_echo(second, first)
    assert await second.store("key", b"value", 120)
    before = await first.addresses()
    stream = await second.open(first.peer, ECHO, WAIT_S)
    os.kill(first.p2pd_pid, signal.SIGKILL)
    async with asyncio.timeout(1.0):
        assert "status -9" in await first.died
        with pytest.raises(StreamEnded):
            await stream.read(1)
    stream.abort()
    with pytest.raises(DialError, match="not running"):
        await first.open(second.peer, ECHO, 1.0)
    with pytest.raises(DialError, match="refused"):
        await second.open(first.peer, ECHO, 0.3)
    await first.restart()
    assert await first.addresses() == before
    assert await first.get("key") == {second.peer: b"value"}
    await says_echo(second, first)


async def test_a_stopped_p2pd_does_not_hold_up_its_caller(make: Make) -> None:
    first, second = make(), make()
    await asyncio.gather(first.start(), second.start())
    await first.dial(second.peer, await second.addresses(), WAIT_S)
    process = psutil.Process(first.p2pd_pid)
    process.suspend()
    await until(lambda: process.status() == psutil.STATUS_STOPPED, WAIT_S)
    try:
        async with asyncio.timeout(1.5):
            with pytest.raises(DialError, match="no answer"):
                await first.open(second.peer, ECHO, 0.3)
    finally:
        process.resume()


async def test_fifty_failed_dials_leave_no_descriptor(make: Make) -> None:
    first, second = make(), make()
    await asyncio.gather(first.start(), second.start())
    await first.dial(second.peer, await second.addresses(), WAIT_S)
    process = psutil.Process()
    for attempt in range(51):
        stranger = Identity.ephemeral().peer
        with pytest.raises(DialError):
            await first.dial(stranger, ["/ip4/127.0.0.1/tcp/1"], 1.0)
        with pytest.raises(DialError):
            await first.open(second.peer, "/dugnad/none/1", WAIT_S)
        with pytest.raises(DialError):
            await first.open(stranger, ECHO, 0.01)
        if attempt == 0:
            before = process.num_fds()
    assert process.num_fds() <= before


async def test_a_forged_entry_is_refused_by_every_node(make: Make) -> None:
    """The forger signs for itself, stores under the victim's sub-key, and replays an old entry."""
    first = make()
    await first.start()
    seeds = tuple((await first.addresses())[:1])
    victim, forger = make(seeds=seeds), make(seeds=seeds)
    await asyncio.gather(victim.start(), forger.start())
    assert await victim.store("key", b"true", 60)
    node = forger._book._node
    lies = [
        node.store("key", b"false", swarm_time() + 100, subkey=bytes(victim.peer)),
        node.store("key", b"false", swarm_time() + 100, subkey=b"no peer"),
        node.store("key", b"false", swarm_time() + 100),
        node.store("key", b"mine", swarm_time() + 100_000, subkey=bytes(forger.peer)),
    ]
    assert [await lie for lie in lies] == [False] * len(lies)
    assert await first.get("key") == {victim.peer: b"true"}
    assert await forger.store("key", b"mine", 60)
    assert await first.get("key") == {victim.peer: b"true", forger.peer: b"mine"}


async def test_a_broken_connection_to_p2pd_heals(make: Make) -> None:
    """hivemind's reader ends for good when an answer meets a call that was just cancelled."""
    first = make()
    await first.start()
    second = make(seeds=tuple((await first.addresses())[:1]))
    await second.start()
    assert await first.store("key", b"value", 60)
    second._book._p2p._client.control._read_task.cancel()
    await asyncio.sleep(0)
    await second.meet([first.peer])
    assert await second.get("key") == {first.peer: b"value"}


async def test_a_close_leaves_no_task_process_or_socket(make: Make) -> None:
    before = asyncio.all_tasks()
    first = make()
    await first.start()
    second = make(seeds=tuple((await first.addresses())[:1]))
    await second.start()
    await second.store("key", b"value", 60)
    pids = [first.p2pd_pid, second.p2pd_pid]
    await asyncio.gather(first.close(), second.close())
    assert asyncio.all_tasks() == before
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert list(first.config.runtime.iterdir()) == []


async def test_leftover_sockets_are_swept_and_the_folder_is_private(make: Make) -> None:
    substrate = make()
    substrate.config.runtime.mkdir(mode=0o755)
    (substrate.config.runtime / "old.sock").touch()
    await substrate.start()
    assert not (substrate.config.runtime / "old.sock").exists()
    assert substrate.config.runtime.stat().st_mode & 0o777 == 0o700


async def test_unspecified_addresses_become_those_of_the_interfaces(make: Make) -> None:
    substrate = make(hosts=("0.0.0.0",))
    await substrate.start()
    hosts = {parse_address(text).value("ip4") for text in await substrate.addresses()}
    mine = {
        entry.address
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family == socket.AF_INET
    }
    outside = {host for host in mine if not host.startswith("127.")}
    assert hosts == (outside or mine)


async def test_announced_addresses_replace_our_own(make: Make) -> None:
    substrate = make(announce=("/dns4/peer.example/tcp/4001",))
    await substrate.start()
    assert await substrate.addresses() == [
        f"/dns4/peer.example/tcp/4001/p2p/{peer_text(substrate.peer)}"
    ]


def test_the_same_works_on_uvloop(tmp_path: Path) -> None:
    async def story() -> None:
        substrates = []
        for number in range(2):
            folder = tmp_path / str(number)
            folder.mkdir()
            identity = Identity.create(folder / "key")
            config = SubstrateConfig(folder / "key", folder / "run", hosts=("127.0.0.1",))
            substrates.append(Substrate(config, identity))
        first, second = substrates
        await first.start()
        await first.accept(ECHO, echo)
        await second.start()
        await second.dial(first.peer, await first.addresses(), WAIT_S)
        await second.meet([first.peer])
        await says_echo(second, first)
        assert await second.store("key", b"value", 60)
        assert await first.get("key") == {second.peer: b"value"}
        await asyncio.gather(first.close(), second.close())
        assert asyncio.all_tasks() == {asyncio.current_task()}

    uvloop.run(story())


CHILD = """
import asyncio, logging, os, pathlib, sys, time
import psutil
from dugnad.dht.identity import Identity
import dugnad.dht.substrate as module
assert "hivemind" not in sys.modules and "google" not in sys.modules
handlers = list(logging.getLogger().handlers)

async def main(folder, *seeds):
    identity = Identity.create(folder / "key")
    config = module.SubstrateConfig(
        folder / "key", folder / "run", hosts=("127.0.0.1",), seeds=seeds, CONFIG
    )
    substrate = module.Substrate(config, identity)
    await substrate.start()
    BODY

folder = pathlib.Path(sys.argv[1])
folder.mkdir()
asyncio.run(main(folder, *sys.argv[2:]))
"""


def child(body: str, config: str = "", before: str = "") -> str:
    """The text of a program that starts a substrate and then does `body`."""
    text = CHILD.replace("BODY", textwrap.indent(textwrap.dedent(body), "    ").strip())
    return before + text.replace("CONFIG", config)


async def test_a_daemon_loads_no_torch_and_stays_small(make: Make, tmp_path: Path) -> None:
    body = """
    assert await substrate.store("k", b"v", 60)
    assert "torch" not in sys.modules
    assert logging.getLogger().handlers == handlers
    assert logging.getLogger("hivemind").handlers == []
    assert logging.getLevelName(logging.WARNING) == "WARNING"
    print(psutil.Process().memory_info().rss)
    await substrate.close()
    """
    code = child(body)
    out = await run_python(code, str(tmp_path / "child"))
    logging.getLogger(__name__).info("daemon RSS %s", out)
    assert float(out) < RSS_MAX_BYTES


async def test_kill_9_of_a_daemon_leaves_no_p2pd(tmp_path: Path) -> None:
    code = child("print(substrate.p2pd_pid, flush=True)\nawait asyncio.Event().wait()")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, str(tmp_path / "child"), stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    pid = int(await process.stdout.readline())
    assert psutil.pid_exists(pid)
    process.kill()
    await process.wait()
    await until(lambda: gone(pid), ORPHAN_S)


async def until(condition: Callable[[], bool], limit_s: float) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110  # another process has no event for us
            await asyncio.sleep(0.02)


def gone(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


async def test_a_clock_ten_minutes_off_is_corrected_by_its_offset(
    make: Make, tmp_path: Path
) -> None:
    first = make()
    await first.start()
    assert await first.store("key", b"from first", 120)
    shift = "import time\nreal = time.time\ntime.time = lambda: real() + 600\n"
    body = """
    assert await substrate.store("key", b"from child", 120)
    print(len(await substrate.get("key")))
    await substrate.close()
    """
    code = child(body, "clock_offset_s=-600.0", shift)
    seed = (await first.addresses())[0]
    assert await run_python(code, str(tmp_path / "child"), seed) == "2"
    assert len(await first.get("key")) == 2


async def run_python(code: str, *arguments: str) -> str:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, *arguments, stdout=subprocess.PIPE
    )
    async with asyncio.timeout(30):
        out, _ = await process.communicate()
    assert process.returncode == 0
    return out.decode().strip()
