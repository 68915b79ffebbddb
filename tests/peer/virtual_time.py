"""An event loop whose clock jumps to the next timer instead of waiting for it.

For tests of shells over the in-memory transport: a minute takes a millisecond and is exact. Threads
and sockets are not waited for while a timer is due, so tests with those use the usual loop.
"""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
STUCK_S = 5.0  # of real time
POLL_S = 0.01


class _Selector(selectors.SelectSelector):
    """Counts the time that it was asked to wait, instead of waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0 if timeout is not None else STUCK_S)
        if not ready and timeout is None:
            raise RuntimeError("no timer is set and nothing will ever happen")
        if not ready and timeout is not None:
            self.now += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """See the module."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now


def run_virtual(work: Coroutine[Any, Any, T]) -> T:
    """Runs `work` to its end in virtual time; fails if it leaves a task behind."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:

        async def checked() -> T:
            result = await work
            for _ in range(3):  # handlers of aborted streams end in the next turns of the loop
                await asyncio.sleep(0)
            left = asyncio.all_tasks() - {asyncio.current_task()}
            assert not left, f"tasks are left: {left}"
            return result

        return runner.run(checked())


async def pass_time(seconds: float) -> None:
    """Lets virtual time pass; no test waits for the real one."""
    assert isinstance(asyncio.get_running_loop(), VirtualLoop), "a test does not sleep"
    await _tick(seconds)


async def until(condition: Callable[[], bool], seconds: float = 20.0) -> float:
    """Returns as soon as the condition holds, on any loop; how long that took. Or TimeoutError."""
    clock = asyncio.get_running_loop().time
    start = clock()
    async with asyncio.timeout(seconds):
        while not condition():
            await _tick(POLL_S)
    return clock() - start


async def _tick(seconds: float) -> None:
    loop = asyncio.get_running_loop()
    passed = loop.create_future()
    handle = loop.call_later(seconds, passed.set_result, None)
    try:
        await passed
    finally:
        handle.cancel()
