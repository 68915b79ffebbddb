"""Room for bytes that are on their way."""

from __future__ import annotations

import io


class Room:
    """Bytes received in place and then kept as `bytes`, without holding them twice."""

    def __init__(self, size: int) -> None:
        self._file = io.BytesIO(bytes(size))  # zero pages: nothing is touched before it arrives
        self.view = self._file.getbuffer()

    def take(self) -> bytes:
        """The content. No slice of `view` may be written to afterwards."""
        self.view.release()
        return self._file.getvalue()  # the buffer itself, not a copy of it
