"""A child that ends with its parent, whatever ends the parent. Loads no torch: call it first."""

import ctypes
import os
import signal
import sys
from typing import Final

PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h


def die_with_parent(parent: int | None = None) -> None:
    """From now on the kernel kills this process when its parent ends (Linux; elsewhere nothing).

    With `parent`, the pid that should be it, a parent that ended before this call counts, too.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os._exit(1)
