"""Statements at one peer: kept on the disk, compared with a random live peer now and then.

What is held is judged by :mod:`dugnad.averaging.statements`; here it is carried. A record that came
reaches everybody in a few looks, as each peer takes what the others hold.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import msgspec

from dugnad.averaging.dispute import Said
from dugnad.averaging.formats import Told
from dugnad.averaging.statements import EXCUSED, StatementSet
from dugnad.dht.ids import PeerId, short
from dugnad.dht.records import RecordError, encode
from dugnad.peer import clock
from dugnad.peer.errors import UserError
from dugnad.peer.ownerfiles import load_bond, load_owned
from dugnad.peer.pull import Puller, PullError
from dugnad.peer.statementsync import KEY as KEY
from dugnad.peer.statementsync import stored_statements, take_statements

if TYPE_CHECKING:
    from dugnad.peer.daemon import Daemon


class StatementKeeper:
    """The statements of one daemon. All methods belong to its event loop."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._rng = random.Random(daemon.boot)
        self.held = StatementSet(daemon.run_id, lambda peer: daemon.ledger.fold.lists(peer))
        self._busy = False
        self._kept = 0
        self._said = (0, Said())

    async def load(self) -> None:
        """Take up what the disk holds; what cannot be read is said and passed over."""
        daemon = self._daemon
        try:
            found = await daemon.store.call(stored_statements)
        except RecordError as error:
            daemon.note("disk", f"the stored statements are not used: {error.reason}")
            found = ()
        now = clock.wall_ms()
        for record in found:
            self.held.take(record, now)
        self._kept = self.held.changes
        if fault := self.look():
            daemon.note("owner", fault)

    async def keep(self) -> None:
        """Write down what is held, if it changed. StoreError as usual."""
        if self._kept == self.held.changes:
            return
        changes, data = self.held.changes, encode(self.held.everything())
        await self._daemon.store.call(lambda store: store.keep(KEY, data))
        self._kept = changes

    def said(self) -> Said:
        """What the board reads by, as far as this peer has heard."""
        if self._said[0] != self.held.changes:
            self._said = (self.held.changes, self.held.said())
        return self._said[1]

    def look(self) -> str:
        """Take up whose machine this is, from the data folder, and which machines its owner's key
        has released; what is wrong with them, or ''.
        """
        home = self._daemon.home
        try:
            bond, owned = load_bond(home), load_owned(home)
        except UserError as error:
            return f"{error.sentence}; {error.fix}"
        fault = self.say(encode(bond)) if bond is not None else ""
        for one in owned.offers:
            held = self.held.bond(PeerId(one.peer)) if one.released else None
            if held is not None and (held.owner, held.number) == (one.owner, one.number):
                ended = msgspec.structs.replace(held, released=one.released)
                self.say(encode(ended))
        return "" if fault in EXCUSED else fault

    def say(self, record: bytes) -> str:
        """Take a record that was made here, and tell it to whoever is live; why not, or ''."""
        fault = self.held.take(record, clock.wall_ms())
        if not fault:
            self._daemon.relay.say(Told(record))
        return fault

    def told(self, sender: PeerId, record: bytes) -> bool:
        """A peer told a record that it, or in a crowd somebody, has made; whether it was taken."""
        fault = self.held.take(record, clock.wall_ms())
        if fault and fault not in EXCUSED:
            self._daemon.happenings.refused(sender, fault)
        return not fault

    async def once(self) -> None:
        """Compare with a random live peer and take what it holds; what goes wrong is noted."""
        daemon, puller = self._daemon, self._daemon.swarm.puller
        live = list(daemon.averager.live())
        if self._busy or puller is None or not live:
            return
        peer = self._rng.choice(live)
        self._busy = True
        try:
            fault = await self.compare(puller, peer)
        except PullError as error:
            fault = error.reason
        finally:
            self._busy = False
        if fault:
            daemon.note("statements", f"{short(peer)} gave no statements: {fault}")
        self.look()

    async def compare(self, puller: Puller, peer: PeerId) -> str:
        """Take from `peer` the statements that are not here; its first fault, or ''. PullError."""
        return await take_statements(self.held, puller, peer, self._rng)
