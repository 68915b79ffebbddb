"""The two clocks of a daemon: one that only goes forward, and the wall's."""

import time
from typing import Final

_ID: Final = getattr(time, "CLOCK_BOOTTIME", None)


def now() -> float:
    """Monotonic seconds that go on while the machine sleeps, where the system has such a clock."""
    return time.clock_gettime(_ID) if _ID is not None else time.monotonic()


def wall_ms() -> int:
    """Wall clock in milliseconds since 1970; may jump when somebody sets it."""
    return time.time_ns() // 1_000_000
