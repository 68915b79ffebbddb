"""Bringing up the learner: the data, shard by shard from whoever has it, then the process."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from dugnad.averaging import events as ev
from dugnad.peer import clock
from dugnad.peer.corpus import CorpusError
from dugnad.peer.errors import UserError
from dugnad.peer.learner.process import LearnerGone
from dugnad.peer.paths import disk_error
from dugnad.peer.pull import PullError

if TYPE_CHECKING:
    from dugnad.peer.daemon import Daemon

SHARDS_AT_ONCE: Final = 4
"""Shards fetched side by side; one where its owner limits the rate: it takes all that is let
through, and with more of them what is small and urgent would wait behind each."""
FETCH_RETRY_S: Final = 2.0
NOBODY_S: Final = 0.2
"""While nobody is there; the first one is met a second or two after the start."""
EARLY_S: Final = 3.0
"""A text that takes longer is not waited for, where prepared units can be had."""
LOOK_S: Final = 0.5
"""How often it is asked whether they can."""


async def bring_up_learner(daemon: Daemon) -> None:
    """Get the data, start the learner; training begins when the anchors are the swarm's."""
    daemon.reason = "its owner's limits stand against it"
    await daemon.steward.free.wait()  # what may not train does not fetch, either
    daemon.state, daemon.reason = "syncing", "fetching the data"
    daemon.own(_fetch_data(daemon), "fetch the data")
    if not daemon.duty.learns:
        await daemon.larder.whole.wait()
        daemon.averager.feed_all(ev.LearnerState(False))
        daemon.state, daemon.reason = "syncing", "waiting for the swarm's state"
        return
    await _something_to_train(daemon)
    daemon.state, daemon.reason = "measuring", "starting the learner"
    try:
        await _start_learner(daemon)
    except (LearnerGone, TimeoutError) as error:
        raise UserError(
            "E005", f"the learner cannot start: {error}", "see the text; free some memory"
        ) from error
    daemon.state, daemon.reason = "syncing", "waiting for the swarm's state"


async def _something_to_train(daemon: Daemon) -> None:
    """Wait for the text, or for units of it that are agreed on, if the text takes longer."""
    larder = daemon.larder
    if not daemon.duty.trains:
        await larder.whole.wait()
    patience = EARLY_S
    if await asyncio.to_thread(_least_s, daemon) > EARLY_S:
        patience = 0.0  # why wait for what is known
    began = clock.now()
    while not larder.whole.is_set():
        if clock.now() - began >= patience and larder.promises():
            await larder.begin()
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                await larder.whole.wait()


def _least_s(daemon: Daemon) -> float:
    """Seconds that the rest of the text takes at the least, by what its owner lets through; 0 when
    they set no limit. Reads the disk: for threads."""
    rate = daemon.swarm.traffic.down.rate
    index = daemon.manifest.data.index
    return sum(map(index.shard_size, daemon.shards.missing())) / rate if rate else 0.0


async def _start_learner(daemon: Daemon) -> None:
    """Start it; one that cannot train is started again to evaluate."""
    try:
        await daemon.training.start()
    except LearnerGone as error:
        if not daemon.duty.trains:
            raise
        daemon.duty.cannot_train(str(error))
        await daemon.larder.whole.wait()  # what is evaluated is in no unit
        if not daemon.duty.learns:
            return
        daemon.training.trainer.plan = daemon.duty.plan()
        await daemon.training.start()


async def _fetch_data(daemon: Daemon) -> None:
    while missing := await asyncio.to_thread(daemon.shards.missing):
        alone = f"{len(missing)} shards of the data are missing and nobody is there"
        while not daemon.averager.live():
            daemon.reason = alone
            await asyncio.sleep(NOBODY_S)
        if daemon.reason == alone:
            daemon.reason = "fetching the data"
        await _fetch_shards(daemon, missing)
    try:
        await daemon.larder.finish()
    except OSError as error:
        raise disk_error(error, daemon.shards.tokens_path) from error


async def _fetch_shards(daemon: Daemon, missing: list[int]) -> None:
    assert daemon.swarm.puller is not None
    puller, hashes = daemon.swarm.puller, daemon.manifest.data.index.hashes
    limited = daemon.swarm.traffic.down.rate > 0.0
    room = asyncio.Semaphore(1 if limited else SHARDS_AT_ONCE)

    async def fetch(number: int) -> None:
        async with room:
            peers = list(daemon.averager.live())  # those of now: a long text outlives its donors
            first = number % max(1, len(peers))
            data = await puller.shard([*peers[first:], *peers[:first]], number, hashes[number])
            await asyncio.to_thread(daemon.shards.put, number, data)
            await daemon.larder.shard_in(number, data)

    results = await asyncio.gather(*(fetch(n) for n in missing), return_exceptions=True)
    for result in results:
        if isinstance(result, PullError | CorpusError):
            daemon.note("data", f"a shard could not be fetched: {result}")
            await asyncio.sleep(FETCH_RETRY_S)
            return
        if isinstance(result, OSError):
            raise disk_error(result, daemon.shards.tokens_path) from result
        if isinstance(result, BaseException):
            raise result
