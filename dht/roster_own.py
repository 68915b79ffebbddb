"""Ourselves, as the roster shows us to others: boot, incarnation, the signed advert, the wall
clock.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from dugnad.dht.advert import Advert, advert_fault, fitted, sign_advert, verify_advert
from dugnad.dht.ids import PeerId, RunId
from dugnad.dht.messages import Hello
from dugnad.dht.protocol import OLDEST, PROTOCOL, Spoken
from dugnad.dht.records import Signer, Verifier, encode

DUPLICATE_MARGIN_MS: Final = 5_000
"""Our advert from another boot, stamped so long after our start, was not written by our former
life.
"""
MESH_MAX: Final = 64
"""Peers of a full mesh, ourselves included: 63 heartbeats a second are 10 kB/s (schedules.md
section 5).
"""
COMING_MAX: Final = 64
"""Newcomers to a crowd that one peer takes at once; whoever comes then is sent elsewhere."""
REFUTE_S: Final = 1.0
"""We raise our incarnation at most so often, whoever says that we are lost."""


@dataclass(frozen=True, slots=True)
class RosterConfig:
    """What does not change while the daemon runs. `admitted`: only these peers, or None for
    everybody.
    """

    run: RunId
    software: str
    protocol: int = PROTOCOL
    admitted: frozenset[PeerId] | None = None
    oldest: int = OLDEST
    mesh_max: int = MESH_MAX
    """Peers of a full mesh, ourselves included."""
    links: int = 0
    """With more peers each keeps so many streams of its own choice, and about as many that others
    chose; 0: there is no crowd, and newcomers beyond the mesh are refused."""

    @property
    def mesh_low(self) -> int:
        """A crowd of no more than this becomes a mesh again."""
        return self.mesh_max * 3 // 4

    @property
    def links_max(self) -> int:
        """Neighbours of a crowd's member: beyond this it asks whether a stream can end. A small
        mesh (of a test) makes a crowd with fewer."""
        return max(self.links, min(2 * self.links, self.mesh_max - 1))

    @property
    def streams_max(self) -> int:
        """Peers with whom streams are held at once: all others of a mesh, or, where there may be a
        crowd, more, until those that came at once have found other neighbours."""
        return self.mesh_max + COMING_MAX if self.links else self.mesh_max - 1

    @property
    def spoken(self) -> Spoken:
        """The protocol versions that we speak."""
        return Spoken(min(self.oldest, self.protocol), self.protocol)


class Own:
    """Our signed advert and the clock that stamps it."""

    def __init__(
        self, config: RosterConfig, signer: Signer, draft: Advert, verifier: Verifier
    ) -> None:
        """ValueError if the draft cannot be made a valid advert."""
        assert draft.boot, "a daemon draws its boot nonce at start"
        self.peer = signer.peer
        self.config = config
        self.boot = draft.boot
        self.leaving = False
        self.crowded = False
        """Whether the swarm is a crowd, as far as we know."""
        self.bans: Mapping[PeerId, str] = {}
        self._signer = signer
        self._verifier = verifier
        self._incarnation = max(draft.incarnation, draft.at_ms // 1000)
        self._seq = 0
        self._started_ms = draft.at_ms
        self._wall_s: float | None = None  # wall clock minus `now`
        self._refute_at = float("-inf")
        self._draft = draft
        self.advert = self._sign(draft.at_ms)

    @property
    def signer(self) -> Signer:
        """Who signs for us."""
        return self._signer

    @property
    def verifier(self) -> Verifier:
        """What judges signatures."""
        return self._verifier

    def start_clock(self, now: float) -> None:
        """The first event: the wall clock stands where the draft said."""
        if self._wall_s is None:
            self._wall_s = self._started_ms / 1000 - now

    def set_clock(self, wall_ms: int, now: float) -> None:
        """The wall clock as it is now; it may have been set by hand."""
        self._wall_s = wall_ms / 1000 - now

    def wall_ms(self, now: float) -> int:
        """Our wall clock in milliseconds."""
        return max(0, round((now + (self._wall_s or 0.0)) * 1000))

    def admits(self, peer: PeerId) -> bool:
        """Whether the run's admission list has room for the peer, and it is not banned."""
        if peer in self.bans:
            return False
        return self.config.admitted is None or peer in self.config.admitted

    def may_reach(self, advert: Advert) -> bool:
        """Whether a peer of the advert's protocol version can be expected to talk to us."""
        return self.config.spoken.may_reach(advert.protocol)

    def hello(self, now: float) -> Hello:
        """The first message of each stream."""
        return Hello(
            self.config.run,
            self.config.protocol,
            self.config.software,
            self.boot,
            self.advert.incarnation,
            encode(self.advert),
            self.wall_ms(now),
            self.config.spoken.oldest,
        )

    def renew(self, now: float, draft: Advert | None = None) -> None:
        """Signs the advert anew, with new content if there is any. ValueError if that is not
        acceptable.
        """
        before = self._draft
        self._draft = draft or before
        try:
            self.advert = self._sign(self.wall_ms(now))
        except ValueError:
            self._draft = before
            raise

    def outlive(self, incarnation: int, now: float, *, at_once: bool = False) -> bool:
        """Raises our incarnation above one that was called lost, or that a former life used. False:
        too soon.
        """
        if incarnation < self._incarnation or (now < self._refute_at and not at_once):
            return False
        self._refute_at = now + REFUTE_S
        self._incarnation = incarnation + 1
        self.renew(now)
        return True

    def is_double(self, advert: Advert) -> bool:
        """Whether this advert, signed with our key, comes from another daemon that runs now."""
        return (
            advert.boot != self.boot
            and advert.at_ms > self._started_ms + DUPLICATE_MARGIN_MS
            and self.fault(advert) is None
        )

    def fault(self, advert: Advert) -> str | None:
        """Why an advert, ours or foreign, cannot be accepted for this run; None if it can."""
        if not self.may_reach(advert):
            return f"the advert is for protocol {advert.protocol}"
        if not self.admits(advert.peer):
            return "this run admits only named peers"
        fault = advert_fault(advert)
        if fault is None and not verify_advert(advert, self.config.run, self._verifier):
            fault = "the advert is not signed by its peer for this run"
        return fault

    def _sign(self, wall_ms: int) -> Advert:
        self._seq += 1
        stamped = msgspec.structs.replace(
            self._draft,
            peer=self.peer,
            boot=self.boot,
            incarnation=self._incarnation,
            seq=self._seq,
            at_ms=wall_ms,
            software=self.config.software,
            protocol=self.config.protocol,
        )
        return sign_advert(fitted(stamped), self._signer, self.config.run)
