"""What stands around the exchange's shell: learner, network and records, each as a small port."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from dugnad.averaging import events as ev
from dugnad.averaging import formats as fm
from dugnad.averaging.tree import Vector
from dugnad.averaging.worker import Commit, Progress
from dugnad.dht.ids import PeerId, RunId
from dugnad.dht.records import Signer
from dugnad.peer.store import Promise


class LearnerPort(Protocol):
    """What the averager needs of the learner."""

    async def copy_out(self, fragment: int) -> tuple[Vector, int]:
        """The fragment's parameters after a step, and that step. Raises LearnerAway."""
        ...

    async def add_in(self, fragment: int, delta: Vector) -> None:
        """Add to the fragment's parameters. Raises LearnerAway."""
        ...

    def progress(self, fragment: int, seq: int, step: int) -> Progress | None:
        """The work behind contribution ``seq``, copied out after ``step``."""
        ...

    def taken_back(self, fragment: int, seq: int) -> None:
        """Contribution ``seq`` was a draft; its work goes with the next one of that number."""
        ...

    def settled(self, fragment: int, seq: int, share: float) -> None:
        """What became of a contribution's work."""
        ...

    def forgotten(self, fragment: int, seq: int) -> None:
        """A contribution is settled for good."""
        ...


class LearnerAway(Exception):
    """There is no learner at this moment; the fragment's buffers are as they were."""


class NetworkPort(Protocol):
    """What the averager needs of the network."""

    def send(self, peer: PeerId, message: fm.Message) -> None:
        """Queue a control message."""
        ...

    async def push(
        self,
        peer: PeerId,
        contribution: fm.Contribution,
        pieces: tuple[fm.UnitPiece, ...],
        payload: bytes,
    ) -> str:
        """Send a contribution; the refusal or ''. Raises TransportError."""
        ...

    async def payload(self, peers: Sequence[PeerId], header: fm.Header, size: int) -> Commit:
        """A commit's payload. Raises PullError."""
        ...

    async def anchors(
        self, peers: Sequence[PeerId], header: fm.Header, size: int
    ) -> tuple[Vector, Vector]:
        """A commit's parameters and momentum. Raises PullError."""
        ...


class CodecPort(Protocol):
    """What the averager asks before it encodes: the codecs that fit the links."""

    def busy(self, fragment: int) -> bool:
        """Whether the fragment's last contribution is still on its way."""
        ...

    def moving(self, fragment: int, to: PeerId) -> bool:
        """Whether a contribution of the fragment is on its way to this peer, and moving."""
        ...

    def hand_in(self, fragment: int, home: PeerId | None, interval_s: float) -> str:
        """The codec of the next hand-in to this home (None: me); '' for the run's usual one."""
        ...

    def commit(self, fragment: int, members: Iterable[PeerId], interval_s: float) -> str:
        """The codec of a commit for these members; '' for the run's usual one."""
        ...

    def fit_for_home(self, fragment: int, interval_s: float) -> bool:
        """Whether my line is one that a home of this fragment should have."""
        ...

    def listed(self, fragment: int, behind: int) -> None:
        """A contribution of mine was listed so many versions late, or never will be."""
        ...


class UsualCodecs:
    """The run's codecs, whatever the links are."""

    def busy(self, fragment: int) -> bool:
        """No: nobody watches the links."""
        return False

    def moving(self, fragment: int, to: PeerId) -> bool:
        """No: the same."""
        return False

    def hand_in(self, fragment: int, home: PeerId | None, interval_s: float) -> str:
        """The usual one."""
        return ""

    def commit(self, fragment: int, members: Iterable[PeerId], interval_s: float) -> str:
        """The usual one."""
        return ""

    def fit_for_home(self, fragment: int, interval_s: float) -> bool:
        """Yes: the same."""
        return True

    def listed(self, fragment: int, behind: int) -> None:
        """Nothing follows from it."""


class RecordPort(Protocol):
    """What the averager needs to be remembered: on the disk when these return."""

    async def raise_seq(self, fragment: int, listed: int) -> None:
        """Never use numbers up to this one again."""
        ...

    async def promise_header(self, promise: Promise) -> bool:
        """Whether this header may be signed."""
        ...


async def _nothing(fragment: int) -> bool:
    """Nothing is kept, so nothing can be taken up that was handed in."""
    return True


@dataclass(frozen=True, slots=True)
class Ports:
    """Everything around the averager."""

    run: RunId
    signer: Signer
    learner: LearnerPort
    network: NetworkPort
    records: RecordPort
    clock: Callable[[], float]
    on_adopt: Callable[[int, ev.Adopt, fm.Header], None]
    on_note: Callable[[int, ev.Note], None]
    on_fault: Callable[[BaseException], None]
    """A job ended with an error that nobody expected: the exchange cannot go on."""
    on_made: Callable[[int], Awaitable[bool]] = _nothing
    """A fragment's contribution is made and not sent yet: whether it is safe now. A draft that is
    not is not sent; a contribution is sent in either case when this returns."""
    codecs: CodecPort = field(default_factory=UsualCodecs)
    say: Callable[[fm.Message], None] | None = None
    """Tells everybody; None: each live peer is sent it."""
