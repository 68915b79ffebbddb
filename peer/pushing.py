"""The sending end of a contribution: the offer, the payload as its flow allows, and the answer.

While a payload comes in over libp2p its receiver tells how much of it has arrived (a frame of a 0
byte and a 64-bit count; an answer is printable text, so the two cannot be mistaken): nobody else
can. A receiver of an older release tells nothing; then only the machine's own pace holds.
"""

from __future__ import annotations

import asyncio
from typing import Final

from dugnad.averaging.formats import Contribution, UnitPiece
from dugnad.dht.frames import read_frame, write_frame
from dugnad.dht.ids import PeerId
from dugnad.dht.ports import StreamEnded, Transport, TransportError
from dugnad.dht.records import encode
from dugnad.peer.flow import Meter
from dugnad.peer.transferwire import (
    CONTRIBUTE_PROTOCOL,
    REASON_CHARS_MAX,
    Offer,
    PacedStream,
    Stalled,
    Traffic,
    plain,
)

_TOTAL_BYTES: Final = 8
_WORD_BYTES: Final = 1 + _TOTAL_BYTES
_REASON_BYTES_MAX: Final = 4 * REASON_CHARS_MAX


async def push(
    transport: Transport,
    peer: PeerId,
    contribution: Contribution,
    pieces: tuple[UnitPiece, ...],
    payload: bytes,
    timeout_s: float,
    *,
    traffic: Traffic | None = None,
    meter: Meter | None = None,
    protocol: str = CONTRIBUTE_PROTOCOL,
) -> str:
    """Hand a contribution to `peer`: '' when it was taken, else the reason why not.

    With a `meter` as quickly as the link carries it, else as quickly as the socket takes it.
    TransportError (DialError if it never left) when nobody knows whether it arrived: no answer
    within `timeout_s`, which covers everything, or the stream broke.
    """
    loop = asyncio.get_running_loop()
    traffic = traffic or Traffic()
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                stream = await transport.open(peer, protocol, timeout_s)
                flow = meter.begin(peer) if meter is not None else None
                line, began, taken = PacedStream(stream, timeout_s, traffic), loop.time(), False
                line.flow = flow
                try:
                    each = line.wants_words()
                    offer = encode(Offer(contribution, pieces, each > 0, each))
                    reason = await _Push(line, len(payload)).run(offer, payload)
                    taken = not reason
                    if taken:
                        traffic.push_bytes_per_s = len(payload) / max(loop.time() - began, 1e-4)
                    return reason
                except StreamEnded:
                    if not line.may_be_dead:
                        raise  # else the next one that was kept, or a new one
                finally:
                    line.rest() if taken else line.abort()
                    if meter is not None and flow is not None:
                        meter.end(peer, flow)
    except TimeoutError:
        raise Stalled(f"no answer within {timeout_s:g} s") from None


def word_of(total: int) -> bytes:
    """The content of the frame that says how much of a payload has arrived."""
    return b"\0" + total.to_bytes(_TOTAL_BYTES, "big")


class _Push:
    """One push under way."""

    def __init__(self, line: PacedStream, size: int) -> None:
        self._line, self._size = line, size

    async def run(self, offer: bytes, payload: bytes) -> str:
        """Sends and listens at the same time: a refusal may come long before the last byte is
        sent."""
        sending = asyncio.create_task(self._send(offer, payload), name="contribution out")
        try:
            reason = await self._answer()
            if not reason and not await sending:
                raise TransportError("it was taken before all of it was sent")
            return reason
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    async def _answer(self) -> str:
        line = self._line
        while True:
            data = await read_frame(line, _REASON_BYTES_MAX)
            if len(data) != _WORD_BYTES or data[0]:
                if not data:  # taken, so all of it has arrived
                    self._told(self._size)
                return plain(data.decode("utf-8", "replace"))
            self._told(int.from_bytes(data[1:], "big"))

    def _told(self, total: int) -> None:
        if self._line.flow is not None and total <= self._size:
            self._line.heard(total)

    async def _send(self, offer: bytes, payload: bytes) -> bool:
        """Whether all was sent; if not, the reading side says why."""
        try:
            await write_frame(self._line, offer)
            if self._line.flow is not None:
                self._line.begin_flow()
            await self._line.write(payload)
        except TransportError:
            return False
        return True
