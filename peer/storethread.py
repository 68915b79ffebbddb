"""The store on a thread of its own: SQLite waits for the disk, the event loop must not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from dugnad.averaging.formats import CommitRecord, HeadRow
from dugnad.dht.ids import RunId
from dugnad.peer.store import Promise, Store

T = TypeVar("T")


class StoreThread:
    """One store, one thread. Methods raise StoreError."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._store: Store | None = None

    async def open(self, path: Path, run: RunId) -> None:
        """Open the file of a run."""
        self._store = await self._call(Store.open, path, run)

    async def close(self) -> None:
        """Write what is left and close."""
        if self._store is not None:
            await self._call(self._store.close)
        self._pool.shutdown(wait=True)

    async def call(self, work: Callable[[Store], T]) -> T:
        """Run ``work`` with the store, after everything that was asked before."""
        assert self._store is not None, "the store is not open"
        return await self._call(work, self._store)

    def commit_now(self, digest: bytes) -> CommitRecord | None:
        """A stored commit; blocks, so call it from a thread that may wait."""
        if self._store is None:
            return None
        return self._pool.submit(self._store.commit, digest).result()

    def digests_now(self, fragment: int, since_ms: int) -> list[bytes]:
        """Names of stored commits; blocks, so call it from a thread that may wait."""
        if self._store is None:
            return []
        return self._pool.submit(self._store.digests, fragment, since_ms).result()

    async def _call(self, work: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work, *args)

    async def raise_seq(self, fragment: int, listed: int) -> None:
        """Never use numbers up to this one again."""
        await self.call(lambda store: store.raise_seq(fragment, listed))

    async def promise_header(self, promise: Promise) -> bool:
        """Whether this header may be signed; if so it is promised on the disk."""
        return await self.call(lambda store: store.promise_header(promise))

    async def adopted(
        self, commits: Iterable[tuple[bytes, CommitRecord]], heads: tuple[HeadRow, ...]
    ) -> None:
        """Keep the commits of a new head, and the heads."""
        rows = list(commits)

        def work(store: Store) -> None:
            store.add_commits(rows)
            store.set_heads(heads)

        await self.call(work)
