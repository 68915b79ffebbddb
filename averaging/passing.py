"""Passing messages on along the links of a crowd, where nobody has a stream with everybody.

What a peer makes goes to its neighbours, and what comes from one goes on to the others, once: each
message crosses a link at most once each way. A peer passes on only what it found good itself, so
whatever its maker must have signed is checked at each step, and rubbish ends at the first honest
peer. Where the sender is the maker (claims), a signed form takes the place of the stream's proof.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from typing import Annotated, Final

import msgspec

from dugnad.dht.allowance import Allowance
from dugnad.dht.ids import KEY_BYTES, PeerId, RunId
from dugnad.dht.records import SIGNATURE_BYTES, Signer, Verifier, encode, framed

PASSED_MAX: Final = 1 << 14
"""Messages remembered as passed on, 2 MB: some minutes of 8 fragments of a thousand peers."""
CLAIMED_MAX: Final = 64
"""Units of one message, as :data:`dugnad.averaging.formats.CLAIMS_MAX`."""
AGE_MS: Final = 120_000
"""Older claims, or claims from so far in the future, are not taken: nobody can play them again."""
MAKER_MAX: Final = 32
MAKER_S: Final = 60.0
"""Claims of one peer that are passed on in this time: it makes one when it runs out of units."""
DOMAIN: Final = "claims/1"

_Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 62) - 1)]


class PeerClaims(msgspec.Struct, frozen=True, array_like=True, tag="v"):
    """``peer`` takes these work units, (epoch, index), out of the computed order."""

    peer: Annotated[PeerId, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
    at_ms: _Number
    units: Annotated[tuple[tuple[_Number, _Number], ...], msgspec.Meta(max_length=CLAIMED_MAX)]
    signature: Annotated[bytes, msgspec.Meta(max_length=SIGNATURE_BYTES)] = b""


def sign_claims(
    units: Iterable[tuple[int, int]], wall_ms: int, run: RunId, signer: Signer
) -> PeerClaims:
    """My claims, for those who have no stream with me."""
    bare = PeerClaims(signer.peer, wall_ms, tuple(units))
    signature = signer.sign(framed(DOMAIN, run, encode(bare)))
    return msgspec.structs.replace(bare, signature=signature)


def claims_fault(claims: PeerClaims, wall_ms: int, run: RunId, verify: Verifier) -> str:
    """Why claims cannot be believed, or ''."""
    if abs(claims.at_ms - wall_ms) > AGE_MS:
        return "claims of another time"
    bare = msgspec.structs.replace(claims, signature=b"")
    if not verify(claims.peer, framed(DOMAIN, run, encode(bare)), claims.signature):
        return "claims that are not signed by their maker"
    return ""


def name_of_message(message: msgspec.Struct) -> bytes:
    """What tells two messages apart."""
    return hashlib.sha256(encode(message)).digest()


class Passing:
    """Which messages went by already, and how many claims of each peer."""

    def __init__(self) -> None:
        self._passed: OrderedDict[bytes, None] = OrderedDict()
        self._claims = Allowance(MAKER_MAX, MAKER_S)

    def known(self, name: bytes) -> bool:
        """Whether a message was taken before."""
        return name in self._passed

    def take(self, name: bytes) -> None:
        """A message was found good, or is our own: it is not passed on again."""
        self._passed[name] = None
        if len(self._passed) > PASSED_MAX:
            self._passed.popitem(last=False)

    def heard(self, message: msgspec.Struct, take: Callable[[], bool]) -> bool:
        """Whether a message goes on: it is new, and ``take`` finds it good. What is not found good
        is not remembered: what it lacked (a parent, a member) may come."""
        name = name_of_message(message)
        if self.known(name) or not take():
            return False
        self.take(name)
        return True

    def claims(
        self,
        claims: PeerClaims,
        here: Collection[PeerId],
        verify: Verifier,
        run: RunId,
        *,
        wall_ms: int,
        now: float,
    ) -> str:
        """Counts claims that came along the links; why they are not taken, or ''. The cheapest
        first, and only claims that are signed use up their maker's allowance."""
        if claims.peer not in here:
            return "claims of somebody who is not here"
        fault = claims_fault(claims, wall_ms, run, verify)
        if not fault and not self._claims.take(claims.peer, now):
            fault = "its maker claims too often"
        return fault
