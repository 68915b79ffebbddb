"""The text of the run at a peer that has just come: what of it is here, and the units that come
before it.

The shards come from whoever has them, in any order, and most of a large text is of no use to the
next minute of training. So a trainer may begin with the units that it is given: each is fetched as
one block by its hash, once two preparers say the same of it (`preparation`), and is trained while
the shards still come. When they are all here, everything is the manifest's own text again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dugnad.dht.ids import PeerId, short
from dugnad.peer.parttext import PartText
from dugnad.peer.paths import disk_error
from dugnad.peer.preparedunits import BLOCK_BYTES_MAX, block_bytes
from dugnad.peer.pull import PullError
from dugnad.peer.unitplan import Unit, UnitPlan

if TYPE_CHECKING:
    from dugnad.peer.daemon import Daemon

BLOCKS_AT_ONCE: Final = 4
"""Blocks fetched side by side, as shards are."""
WANTED_MAX: Final = 256
"""Units that may be waited for; a learner has a second of work in hand, and that is less."""
TAKEN_MAX: Final = 1 << 16
"""Units that came in blocks and are known by position, 6 MB; an older one would come again."""
RETRY_S: Final = 1.0
"""After this long a block that could not be had, or was not agreed on, is asked for again."""


class Larder:
    """What of the text is here. Belongs to the event loop of its daemon."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        data = daemon.manifest.data
        self.plan = UnitPlan(daemon.run_id, data.held_out_start, daemon.manifest.unit_sequences)
        self.context = data.context
        self.text = PartText(daemon.shards)
        self.whole = asyncio.Event()
        """The assembled text is here."""
        self.blocks = 0
        """Blocks that came before the text did."""
        self.taken: dict[int, None] = {}
        """Units that came in blocks."""
        self._wanted: dict[int, None] = {}
        self._asked = asyncio.Event()
        self._turn = asyncio.Lock()
        """A text is not opened in parts while it becomes whole."""
        self._begun = False
        """Training began with blocks, or was to."""
        self._said = False
        """Once that a block could not be had: it is tried again each second."""

    def has(self, unit: Unit) -> bool:
        """Whether my learner can train on a unit now; if not, it is wanted."""
        position = self.plan.position(*unit)
        if self.whole.is_set() or position in self.taken:
            return True
        if len(self._wanted) < WANTED_MAX:
            self._wanted[position] = None
            self._asked.set()
        return False

    def promises(self) -> bool:
        """Whether training can begin with blocks: some are agreed on, and the learner can take
        them."""
        small = block_bytes(self.plan, 0, self.context) <= BLOCK_BYTES_MAX
        return small and self.daemon.preparer.core.any_agreed()

    async def begin(self) -> None:
        """From now on units may be trained on that came in blocks, unless the text is here."""
        async with self._turn:
            if self.whole.is_set():
                return
            try:
                self._learn_from(await asyncio.to_thread(self.text.open))
            except OSError as error:
                raise disk_error(error, self.text.path) from error
            self._begun = True
        self.daemon.note("data", "it begins with prepared units while the text still comes")
        self.daemon.own(self._run(), "fetch prepared units")

    async def shard_in(self, number: int, data: bytes) -> None:
        """A verified shard has come."""
        await asyncio.to_thread(self.text.put_shard, number, data)

    async def finish(self) -> None:
        """All shards are here."""
        async with self._turn:
            await asyncio.to_thread(self.text.fill)
            self.text.publish()
            self._learn_from(self.daemon.shards.tokens_path)
            await asyncio.to_thread(self.daemon.shards.assemble)
            self.whole.set()
        if self._begun:
            self.daemon.note("data", f"the text is whole; {self.blocks} units came before it")
        self._wanted.clear()
        self._asked.set()
        self.daemon.training.arrived()

    def _learn_from(self, path: Path) -> None:
        """The next learner maps this file; one that runs has mapped what becomes it."""
        trainer = self.daemon.training.trainer
        trainer.plan = replace(trainer.plan, tokens=path)

    # -- blocks --------------------------------------------------------------------------------

    async def _run(self) -> None:
        while not self.whole.is_set():
            agreed = self.daemon.preparer.core.agreed
            batch = [one for one in self._wanted if agreed(one) is not None][:BLOCKS_AT_ONCE]
            came = sum(await asyncio.gather(*(self._fetch(one) for one in batch)))
            if came:
                self.daemon.training.arrived()
                continue
            for position in batch:  # the others first, next time
                if position in self._wanted:
                    del self._wanted[position]
                    self._wanted[position] = None
            self._asked.clear()
            try:
                async with asyncio.timeout(RETRY_S):
                    await (self.whole if batch else self._asked).wait()
            except TimeoutError:
                continue

    async def _fetch(self, position: int) -> bool:
        """Get the block of a unit; whether it is here now."""
        core, puller = self.daemon.preparer.core, self.daemon.swarm.puller
        name = core.agreed(position)
        donors = self._donors(core.makers(position), position)
        if name is None or not donors or puller is None:
            return False
        size = block_bytes(self.plan, position, self.context)
        try:
            block = await puller.block(donors, name, size)
        except PullError as error:
            if not self._said:
                self.daemon.note("data", f"a prepared unit could not be fetched: {error}")
            self._said = True
            return False
        numbers = self.plan.sequences_of(*self.plan.unit(position))
        try:
            await asyncio.to_thread(self.text.put_block, numbers, self.context, block)
        except ValueError as error:
            makers = ", ".join(short(peer) for peer in core.makers(position))
            self.daemon.note("refused", f"{makers}: {error}")
            return False
        except OSError as error:
            raise disk_error(error, self.text.path) from error
        self._wanted.pop(position, None)
        self.taken[position] = None
        while len(self.taken) > TAKEN_MAX:
            del self.taken[next(iter(self.taken))]
        self.blocks += 1
        return True

    def _donors(self, makers: Sequence[PeerId], position: int) -> list[PeerId]:
        """Those of the makers that are here, another one first for each unit."""
        live = [peer for peer in self.daemon.averager.live() if peer in set(makers)]
        first = position % len(live) if live else 0
        return [*live[first:], *live[:first]]
