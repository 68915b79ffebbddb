"""Frames over a stream that is a buffer."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dugnad.dht.frames import FrameError, read_frame, write_frame
from dugnad.dht.ids import PeerId
from dugnad.dht.ports import StreamEnded


class BufferStream:
    """What is written can be read."""

    peer = PeerId(bytes(32))

    def __init__(self) -> None:
        self.content = bytearray()
        self.writes = 0

    async def read(self, n: int) -> bytes:
        if len(self.content) < n:
            raise StreamEnded("nothing left")
        taken = bytes(self.content[:n])
        del self.content[:n]
        return taken

    async def read_into(self, target: memoryview) -> None:
        target[:] = await self.read(len(target))

    async def write(self, data: bytes | memoryview) -> None:
        self.writes += 1
        self.content += data

    async def close(self) -> None:
        pass

    def abort(self) -> None:
        pass


@given(st.lists(st.binary(max_size=100), max_size=5))
async def test_frames_come_back_in_order(frames: list[bytes]) -> None:
    stream = BufferStream()
    for frame in frames:
        await write_frame(stream, frame)
    assert [await read_frame(stream, 100) for _ in frames] == frames
    with pytest.raises(StreamEnded):
        await read_frame(stream, 100)


async def test_a_frame_has_a_big_endian_length() -> None:
    stream = BufferStream()
    await write_frame(stream, b"abc")
    assert bytes(stream.content) == b"\0\0\0\3abc"
    assert stream.writes == 1


async def test_too_long_a_frame_is_refused_before_its_content_is_read() -> None:
    stream = BufferStream()
    stream.content += b"\xff\xff\xff\xff"
    with pytest.raises(FrameError, match="4294967295 bytes was announced, at most 10"):
        await read_frame(stream, 10)


async def test_wide_memory_views_count_bytes() -> None:
    stream = BufferStream()
    wide: Any = memoryview(bytes(40_000)).cast("f")  # Any: the port speaks of bytes
    await write_frame(stream, wide)
    assert await read_frame(stream, 40_000) == bytes(40_000)
