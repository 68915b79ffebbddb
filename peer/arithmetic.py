"""What computes the numbers of the exchange in this daemon: compiled kernels, or numpy until then.

They may come into use at any moment, since the results are the same bits. What brings them blocks,
for seconds where they must be compiled first, and ends with the process at the latest; so it has a
thread that nobody waits for.
"""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from dugnad.peer import kernelload
from dugnad.peer.config import Settings
from dugnad.peer.limits import memory_cap

if TYPE_CHECKING:
    from dugnad.peer.daemon import Daemon

CAP_MIN: Final = 800_000_000
"""Bytes that the owner must have given: the compiler takes 210 MB while the learner starts, which
would be made smaller for good. What was compiled takes about 10 MB."""


async def bring_kernels(daemon: Daemon) -> None:
    """Bring the compiled kernels, if they are wanted; `daemon.kernels` says what came of it."""
    if why := against(daemon.settings):
        daemon.kernels = f"numpy: {why}"
        return
    loop = asyncio.get_running_loop()
    done: asyncio.Future[str] = loop.create_future()

    def arrived(words: str) -> None:
        if not done.done():
            done.set_result(words)

    def bring() -> None:
        words = kernelload.serve()
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(arrived, words)

    threading.Thread(target=bring, name="kernels", daemon=True).start()
    daemon.kernels = await done
    if not kernelload.missing():
        daemon.note("kernels", daemon.kernels)


def against(settings: Settings) -> str:
    """Why kernels are not to be brought; '' when they are."""
    if settings.kernels == "numpy":
        return "as set"
    import psutil  # only here: 25 ms

    cap = memory_cap(settings.limits(), psutil.virtual_memory().total)
    if cap and cap < CAP_MIN:
        return f"compiling needs memory, {cap / 1e6:,.0f} MB are allowed"
    return ""
