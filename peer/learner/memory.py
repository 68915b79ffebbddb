"""Float32 vectors shared with the learner by file descriptor, with no name that could be left
behind.

On Linux a memfd (no /dev/shm, which containers make small); elsewhere an unlinked temporary file.
"""

import mmap
import os
import tempfile
from typing import Final, Self

import numpy as np
import numpy.typing as npt

FLOAT_BYTES: Final = 4


class Region:
    """A shared vector of `count` float32: `array` is its memory in this process, `fd` its
    descriptor.

    Two processes write the same region by turns, never at once; the learner's protocol says whose
    turn it is. Inherit `fd` (`pass_fds`) and attach in the child. OSError where memory cannot be
    had.
    """

    def __init__(self, fd: int, memory: mmap.mmap) -> None:
        self.fd = fd
        self.array: npt.NDArray[np.float32] = np.frombuffer(memory, np.float32)

    @classmethod
    def create(cls, name: str, count: int) -> Self:
        """Make a region of `count` zeros; `name` shows in /proc/PID/fd."""
        fd = _anonymous_file(name)
        try:
            os.ftruncate(fd, count * FLOAT_BYTES)
            return cls(fd, mmap.mmap(fd, count * FLOAT_BYTES))
        except (OSError, ValueError):
            os.close(fd)
            raise

    @classmethod
    def attach(cls, fd: int, count: int) -> Self:
        """Map a region made by another process. ValueError if it has another size."""
        size = os.fstat(fd).st_size
        if size != count * FLOAT_BYTES:
            raise ValueError(f"shared region has {size} bytes, expected {count * FLOAT_BYTES}")
        return cls(fd, mmap.mmap(fd, size))

    def close(self) -> None:
        """Close the descriptor and let go of the memory, which lives until its last view goes."""
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1
        self.array = np.empty(0, np.float32)


def _anonymous_file(name: str) -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create(f"dugnad-{name}")
    fd, path = tempfile.mkstemp(prefix=f"dugnad-{name}-")
    os.unlink(path)
    return fd
