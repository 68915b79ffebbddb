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

if TYPE_CHECKING:
    from dugnad.peer.daemon import Daemon

MEMORY_MIN: Final = 2_000_000_000
"""Bytes of a machine whose owner may leave the choice to us: the compiler takes 250 MB for a few
seconds, what it made about 20 MB for good."""


async def bring_kernels(daemon: Daemon) -> None:
    """Bring the compiled kernels, if they are wanted; `daemon.kernels` says what came of it."""
    if why := against(daemon.settings.kernels):
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


def against(setting: str) -> str:
    """Why kernels are not to be brought; '' when they are."""
    if setting == "numpy":
        return "as set"
    import psutil  # only here: 25 ms

    if psutil.virtual_memory().total < MEMORY_MIN:
        return f"this machine has less than {MEMORY_MIN / 1e9:.0f} GB of memory"
    return ""
