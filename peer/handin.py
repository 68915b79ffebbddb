"""Making contributions: a fragment's progress is copied out, encoded, signed, and written down.

A *draft* is a contribution that is not sent to a home: a neighbour keeps it (`peer.buddy`), and
hands it in if its maker dies. It carries the number that the next contribution will have. When that
one is due, or another draft, the draft is taken back and made again with what was learned since; so
of all that carries one number a lineage can list one only, and progress is in one place at a time.
Everything here runs in the fragment's learner lane.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dugnad.averaging import events as ev
from dugnad.averaging import formats as fm
from dugnad.averaging.buffers import BuffersError
from dugnad.averaging.contributor import Own
from dugnad.averaging.worker import Kept
from dugnad.peer.exchangeports import LearnerAway, Ports
from dugnad.peer.store import StoreError

if TYPE_CHECKING:
    from dugnad.peer.averager import FragmentShell

Thread = Callable[..., Awaitable[Any]]  # Any: whatever the work in the thread returns


@dataclass(slots=True)
class Draft:
    """The draft of one fragment: its number, and the learner's step that it holds."""

    seq: int
    step: int


@dataclass(frozen=True, slots=True)
class HandIns:
    """Makes the contributions of one peer."""

    ports: Ports
    thread: Thread

    async def due(self, shell: FragmentShell, action: ev.HandIn) -> Kept | None:
        """The contribution that the core asked for; None when there is no progress. StoreError
        when its number cannot be written down."""
        draft = shell.draft
        if draft is not None and draft.seq != action.seq:
            self.release(shell)
        try:
            return await self._make(shell, action, "")
        except LearnerAway:
            if shell.draft is None:
                return None
        shell.draft = None  # nobody can add to it now: it goes as it is
        return shell.worker.inbox.get((self.ports.signer.peer, action.seq))

    async def draft(self, shell: FragmentShell, codec: str) -> Kept | None:
        """A draft of what the next contribution will hold; None when there is nothing new, or it
        could not be written down."""
        core, contributor = shell.core, shell.core.contributor
        busy = contributor.making is not None or self.ports.codecs.busy(shell.worker.rules.fragment)
        if busy or core.view.leaving or core.view.ended() or not contributor.ready:
            return None
        contributor.skip_listed()
        if shell.draft is not None and shell.draft.seq != contributor.next_seq:
            self.release(shell)
        action = ev.HandIn(contributor.next_seq, core.head.version, core.head.digest)
        try:
            return await self._make(shell, action, codec)
        except LearnerAway:
            return None

    def release(self, shell: FragmentShell) -> None:
        """The draft's number is used up (a neighbour had it listed, or no learner was there when it
        was due): it is a contribution like any other."""
        draft, shell.draft = shell.draft, None
        kept = shell.worker.inbox.get((self.ports.signer.peer, draft.seq)) if draft else None
        if kept is not None:
            shell.core.contributor.adopt(Own(kept.contribution, kept.pieces))

    def _codec(self, shell: FragmentShell) -> str:
        """What the line to the home carries."""
        view, me = shell.core.view, self.ports.signer.peer
        home = view.current_home()
        to = home if home != me else None
        return self.ports.codecs.hand_in(shell.worker.rules.fragment, to, view.interval_s)

    async def _make(self, shell: FragmentShell, action: ev.HandIn, codec: str) -> Kept | None:
        ports, worker = self.ports, shell.worker
        p, seq = worker.rules.fragment, action.seq
        theta, step = await ports.learner.copy_out(p)
        again = shell.draft is not None and shell.draft.seq == seq
        if codec and shell.draft is not None and shell.draft.step == step:
            return None
        if again:
            shell.draft = None
            await self.thread(worker.take_back, seq)
            ports.learner.taken_back(p, seq)
        progress = ports.learner.progress(p, seq, step)
        if progress is None:
            return None
        if not ports.codecs.fit_for_home(p, shell.core.view.interval_s):
            progress = replace(progress, eligible=False)
        try:
            if not again:
                await ports.records.raise_seq(p, seq)
            used = codec or self._codec(shell)
            made = await self.thread(worker.hand_in, action, theta, progress, used, not codec)
        except StoreError:
            ports.learner.settled(p, seq, 1.0)  # its work goes with the next contribution
            raise
        except BuffersError as fault:
            ports.learner.settled(p, seq, 1.0)
            ports.on_note(p, ev.Note("fault", f"a contribution could not be made: {fault.reason}"))
            return None
        worker.signed_own(fm.sign_record(made, ports.run, ports.signer))
        if codec:
            shell.draft = Draft(seq, step)
        written = await ports.on_made(p)
        return worker.inbox[(ports.signer.peer, seq)] if written or not codec else None
