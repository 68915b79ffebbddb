"""Copies between the daemon and the memory that it shares with its learner."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

from dugnad.averaging.tree import Vector
from dugnad.peer import trainer

WAIT_S = 10.0


async def test_a_large_copy_is_made_beside_the_event_loop_and_never_left_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, go = threading.Event(), threading.Event()

    def slow(target: Vector, source: Vector) -> None:
        begun.set()
        assert go.wait(WAIT_S)
        np.copyto(target, source)

    monkeypatch.setattr(trainer, "_fill", slow)
    target = np.zeros(trainer.INLINE_COPY_MAX + 1, np.float32)
    copying = asyncio.create_task(trainer._filled(target, np.ones_like(target)))
    assert await asyncio.to_thread(begun.wait, WAIT_S)
    copying.cancel()
    for _ in range(3):
        await asyncio.sleep(0)
    assert not copying.done()  # else the next to use this memory would write beside it
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await copying
    assert target.all()


async def test_a_vector_of_another_size_is_refused_whatever_its_size() -> None:
    for size in (3, trainer.INLINE_COPY_MAX + 1):
        with pytest.raises(ValueError, match=f"expected {size} float32"):
            await trainer._filled(np.zeros(size, np.float32), np.zeros(size + 1, np.float32))
