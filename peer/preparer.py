"""Preparing as a duty: makes the blocks of units that are soon to be trained, says which they are,
and collects what others say (`preparation` is the core)."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from dugnad.averaging.formats import PREPARED_MAX, Prepares
from dugnad.dht.allowance import Allowance
from dugnad.dht.ids import PeerId, name_of, peer_text
from dugnad.dht.records import RecordError, verify_ed25519
from dugnad.peer import clock
from dugnad.peer.duty import others_with
from dugnad.peer.keeping import keep, recall
from dugnad.peer.preparation import (
    BATCHES_MAX,
    OPEN_MAX,
    Denied,
    Made,
    Memory,
    Preparation,
    Preparers,
    Standing,
)
from dugnad.peer.preparedunits import (
    BATCH_UNITS,
    BLOCK_BYTES_MAX,
    Prepared,
    block_bytes,
    block_of,
    name_of_block,
    read_prepared,
    signed,
    tokens_in,
    units_of,
)
from dugnad.peer.roles import PREPARE

if TYPE_CHECKING:
    from dugnad.peer.daemon import Daemon

LOOK_S: Final = 0.5
"""Between two looks for a batch, when there was none."""
SAVE_S: Final = 60.0
KEY: Final = "preparation"
MEMORY_BYTES_MAX: Final = 1 << 18
"""A thousand peers have 60 KB."""
RATE_ROWS: Final = 2 * BATCHES_MAX
RATE_S: Final = 10.0
"""Statements that one peer may send in so many seconds: all that are open, twice."""


class Preparer:
    """The prepared units of one daemon. Belongs to its event loop, but for `block`."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self.plan, self.context = daemon.larder.plan, daemon.larder.context
        self.core = Preparation(daemon.identity.peer, daemon.run_id, self.plan, self.context)
        self.tokens = 0
        """Tokens that this daemon prepared since it started."""
        self._text: int | None = None
        """The open file of the text."""
        self._heard = Allowance(RATE_ROWS, RATE_S)
        self._chance = random.Random(daemon.boot)

    @property
    def prepares(self) -> bool:
        """Whether that is among its duties, and possible in this run."""
        small = block_bytes(self.plan, 0, self.context) <= BLOCK_BYTES_MAX
        return small and PREPARE in self.daemon.duty.duties

    # -- what happens --------------------------------------------------------------------------

    def peers_changed(self) -> None:
        """Somebody came, went, or does something else now."""
        found = others_with(PREPARE, self.daemon)
        if self.prepares and PREPARE in self.daemon.duty.advertised():
            found.append(self.daemon.identity.peer)
        self.core.handle(Preparers(tuple(sorted(found))))

    def met(self, peer: PeerId) -> None:
        """Tell somebody who has just come what I said."""
        rows = [signed(one, self.daemon.run_id, self.daemon.identity) for one in self.core.own()]
        for at in range(0, len(rows), PREPARED_MAX):
            self.daemon.swarm.send(peer, Prepares(tuple(rows[at : at + PREPARED_MAX])))

    def gone(self, peer: PeerId) -> None:
        """A peer is lost or left."""
        self._heard.forget(peer)
        self.peers_changed()

    def heard(self, sender: PeerId, message: Prepares) -> bool:
        """Statements from a peer, its own or others'; whether all were taken."""
        now = clock.now()
        for row in message.rows:
            if not self._heard.take(sender, now):
                return False
            try:
                said = read_prepared(row, self.daemon.run_id, verify_ed25519)
            except RecordError as error:
                self.daemon.happenings.refused(sender, error.reason)
                return False
            if not self.core.hear(said) and said.peer != self.daemon.identity.peer:
                self._check(said, self._any())
        return True

    def _any(self) -> int:
        """One unit of a batch, by chance: a preparer cannot know which one is looked at."""
        return self._chance.randrange(BATCH_UNITS)

    def _check_taken(self) -> None:
        """The text has come: look at every unit that I trained on before, and at one of each batch
        of which I trained none."""
        taken: dict[int, list[int]] = {}
        for position in self.daemon.larder.taken:
            taken.setdefault(position // BATCH_UNITS, []).append(position % BATCH_UNITS)
        for said in self.core.others():
            for at in taken.get(said.batch) or [self._any()]:
                self._check(said, at)

    def _check(self, said: Prepared, at: int) -> None:
        """Whoever has the text compares a statement with it."""
        if self._text is None:
            return
        block = block_of(self._text, self.plan, units_of(said.batch)[at], self.context)
        if name_of_block(block) == said.digests[at]:
            return
        peer = PeerId(said.peer)
        self.core.handle(Denied(peer, said.batch))
        epoch, index = self.plan.unit(units_of(said.batch)[at])
        self.daemon.happenings.refused(peer, f"its block of unit {epoch}/{index} is not the text's")

    # -- what is to be done --------------------------------------------------------------------

    async def run(self) -> None:
        """Prepare what is mine, whenever its owner lets it, until cancelled."""
        await self._restore()
        while not self.daemon.larder.whole.is_set():
            self._look()  # what is said of batches that are over is let go
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self.daemon.larder.whole.wait()
        self._text = os.open(self.daemon.shards.tokens_path, os.O_RDONLY | os.O_CLOEXEC)
        self._check_taken()
        self.peers_changed()
        saved = clock.now()
        while True:
            self._look()
            if self.prepares:
                await self.daemon.steward.free.wait()
                spent = await self._prepare_one()
            else:
                spent = 0.0
            if clock.now() - saved >= SAVE_S:
                saved = clock.now()
                await self.save()
            await asyncio.sleep(rest_s(spent, self.daemon.settings.cpu_share))

    def _look(self) -> None:
        """Where the swarm stands, once that is known."""
        if self.daemon.vitals.synced:
            table = self.daemon.units.sight(clock.now()).table
            self.core.handle(Standing(tuple(table.open_batches(BATCH_UNITS, OPEN_MAX))))

    async def _prepare_one(self) -> float:
        """Prepare the next batch; seconds that it took, 0 when there was none."""
        batch = self.core.next_batch()
        if batch is None or self._text is None:
            return 0.0
        began = clock.now()
        digests = await asyncio.to_thread(self._make, self._text, batch)
        for said in self.core.handle(Made(batch, digests)):
            self.tokens += tokens_in(self.plan, units_of(batch), self.context)
            row = signed(said, self.daemon.run_id, self.daemon.identity)
            self.daemon.relay.say(Prepares((row,)))
        return max(clock.now() - began, 0.001)

    def _make(self, text: int, batch: int) -> tuple[bytes, ...]:
        blocks = (block_of(text, self.plan, unit, self.context) for unit in units_of(batch))
        return tuple(name_of_block(block) for block in blocks)

    def block(self, name: bytes) -> bytes | None:
        """A block that somebody speaks of, made from the text that is here. For threads."""
        position = self.core.position_of(name)
        if position is None or self._text is None:
            return None
        if block_bytes(self.plan, position, self.context) > BLOCK_BYTES_MAX:
            return None
        try:
            block = block_of(self._text, self.plan, position, self.context)
        except OSError:
            return None
        return block if name_of_block(block) == name else None

    # -- disk ----------------------------------------------------------------------------------

    async def _restore(self) -> None:
        memory = await recall(self.daemon, KEY, Memory, MEMORY_BYTES_MAX, "what others prepared")
        if memory is not None:
            self.core.restore(memory)

    async def save(self) -> None:
        """Write down what was earned."""
        await keep(self.daemon, KEY, self.core.memory())

    # -- what people see -----------------------------------------------------------------------

    def view(self) -> Mapping[str, object]:
        """What preparers earned, as the control API answers it."""
        return {
            "preparing": self.prepares,
            "prepared_here": self.tokens,
            "blocks_fetched": self.daemon.larder.blocks,
            "prepared": [
                {
                    "name": name_of(PeerId(one.peer)),
                    "peer": peer_text(PeerId(one.peer)),
                    "prepared_tokens": one.confirmed,
                    "pending": one.pending,
                    "disputed": one.disputed,
                }
                for one in self.core.earned()
            ],
        }


def rest_s(spent: float, share: float) -> float:
    """Seconds to rest after work of `spent` seconds, for an owner who lends `share` of the time;
    LOOK_S after none."""
    return spent * (1.0 / share - 1.0) if spent else LOOK_S
