"""Frames: a 4-byte big-endian length and that many bytes, on any stream."""

from dugnad.dht.ports import Stream, TransportError

HEADER_BYTES = 4
FRAME_BYTES_MAX = 2**32 - 1
# Up to this much is copied so that it goes in one write.
TOGETHER_BYTES = 16384


class FrameError(TransportError):
    """The other side announced a frame longer than we allow; the stream is of no further use."""


async def read_frame(stream: Stream, limit: int, header: bytes = b"") -> bytes:
    """The next frame; FrameError before reading its content if that exceeds `limit` bytes.

    `header` is what was read of it already: HEADER_BYTES, or nothing.
    """
    size = int.from_bytes(header or await stream.read(HEADER_BYTES), "big")
    if size > limit:
        raise FrameError(f"a frame of {size} bytes was announced, at most {limit} are allowed")
    return await stream.read(size) if size else b""


async def write_frame(stream: Stream, data: bytes | memoryview) -> None:
    """Sends `data` as one frame. FrameError if it does not fit the format."""
    # One write for small frames (one packet on the line), no copy of large ones.
    if memoryview(data).nbytes <= TOGETHER_BYTES:
        await stream.write(framed(data))
        return
    await stream.write(_header(data))
    await stream.write(data)


def framed(data: bytes | memoryview) -> bytes:
    """A frame with this content. FrameError if it does not fit the format."""
    return _header(data) + bytes(data)


def _header(data: bytes | memoryview) -> bytes:
    size = memoryview(data).nbytes
    if size > FRAME_BYTES_MAX:
        raise FrameError(f"{size} bytes do not fit a frame")
    return size.to_bytes(HEADER_BYTES, "big")
