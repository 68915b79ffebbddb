"""How a peer leaves: with everything that it learned in other hands, if the time allows."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final

from dugnad.averaging import events as ev
from dugnad.averaging.codecs import CODECS
from dugnad.averaging.linkcontrol import richest
from dugnad.dht.advert import SLOW_BYTES_PER_S
from dugnad.peer import clock
from dugnad.peer.lifecycle import Input

if TYPE_CHECKING:
    from dugnad.peer.daemon import Daemon

LEAVE_S: Final = 10.0
"""The last hand-in gets this long (DESIGN.md promise 5; `--drain` and `finish` wait longer)."""
DRAIN_S: Final = 300.0
SENDING_SHARE: Final = 0.4
"""Of the time to leave that sending may take by what was measured: a step must end first, and a
line can be slower than it was."""


def request_leave(daemon: Daemon, drain: bool) -> None:
    """Start to leave; a second request goes at once, and so does one before the beginning."""
    if not daemon.takes_part:
        daemon.cancel()  # nothing was learned yet
        return
    daemon.steward.say(Input.DRAIN if drain else Input.LEAVE)


async def leave(daemon: Daemon) -> None:
    """Hand in what there is, tell the others, and say what could not be sent."""
    if daemon.steward.life.stays:  # a fault, and nobody's wish
        daemon.steward.say(Input.LEAVE)
    daemon.state, daemon.reason = "leaving", "handing in what was learned"
    daemon.vitals.remember_peers()
    daemon.training.disable()
    if daemon.training.ready is not None:
        choose_codec(daemon)
        daemon.happenings.keep_for_me()
        daemon.averager.feed_all(ev.LeaveNow())
        await _handed_over(daemon)
    share = daemon.vitals.residual_share()
    text = f"{share:.1%} of the last progress could not be sent"
    daemon.note("leave", text, share=share)
    print(f"left the swarm; {text}", flush=True)
    daemon.steward.save_traffic()
    await daemon.evaluator.save()
    await daemon.preparer.save()
    if not daemon.forced:
        daemon.steward.say(Input.HANDED_OVER)
    await daemon.swarm.leave()


async def _handed_over(daemon: Daemon) -> None:
    """Until all is in other hands, or the time is up; `--drain` said meanwhile prolongs it."""
    began = clock.now()
    while not daemon.averager.handed_over.is_set():
        left = (DRAIN_S if daemon.drain else LEAVE_S) - (clock.now() - began)
        if left <= 0.0:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(left):
                await daemon.averager.handed_over.wait()


def choose_codec(daemon: Daemon) -> None:
    """Let the last hand-ins go in the richest codec that fits the time: what it rounds away is
    lost for good."""
    settings, traffic = daemon.settings, daemon.swarm.traffic
    rate = traffic.push_bytes_per_s or float(SLOW_BYTES_PER_S)
    if settings.upload_mbit:
        rate = min(rate, traffic.up.rate)
    seconds = DRAIN_S if daemon.drain else LEAVE_S
    names = list(CODECS)
    budget = min(rate * seconds, daemon.steward.quota_left()) * SENDING_SHARE
    codec = richest(names, daemon.manifest.table.sizes, budget) or names[-1]
    for shell in daemon.averager.fragments:
        shell.worker.last_codec = codec
    daemon.note("leave", f"the last hand-in goes as {codec}")
