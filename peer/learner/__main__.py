"""The training process: `python -m dugnad.peer.learner --fd N`, started by `dugnad.peer.trainer`
only.

It prepares itself (politeness, signals, a leash to its parent) before torch is loaded, which takes
seconds. The daemon alone decides when it ends: by Stop, by closing the socket, or by dying itself.
"""

import argparse
import contextlib
import os
import signal
import socket
import sys
from typing import Final

import psutil

from dugnad.peer.learner.leash import die_with_parent
from dugnad.peer.learner.protocol import (
    EXIT_DISCONNECTED,
    EXIT_OUT_OF_MEMORY,
    EXIT_PROTOCOL,
    EXIT_UNFIT,
    REASON_CHARS_MAX,
    Failed,
    ProtocolError,
)

NICE: Final = 10
"""The daemon, at 0, answers in time however busy the learner is; so does what the volunteer does.
"""


def main() -> int:
    """Run the learner on the socket given by `--fd`; the exit code tells the daemon why it
    ended.
    """
    parser = argparse.ArgumentParser(prog="dugnad-learner")
    parser.add_argument("--fd", type=int, required=True, help="the socket to the daemon")
    parser.add_argument("--cores", default="", help="cores to stay on, separated by commas")
    given = parser.parse_args()
    connection = socket.socket(fileno=given.fd)
    _leash()
    _be_polite()
    cores = _pin({int(core) for core in given.cores.split(",") if core})
    # Imported here: everything above must hold while torch loads.
    from dugnad.peer.learner.loop import Disconnected, Learner, Port, Unfit
    from dugnad.peer.learner.scorer import Scorer
    from dugnad.peer.learner.stepper import OutOfMemory

    if cores:
        os.sched_setaffinity(0, cores)  # loading torch may have reset it
    port = Port(connection)
    try:
        start = port.start()
        (Scorer if start.forward_only else Learner)(port, start).run()
    except Disconnected:
        return EXIT_DISCONNECTED
    except (OutOfMemory, ProtocolError, Unfit, ValueError) as error:
        print(error, file=sys.stderr)
        with contextlib.suppress(Disconnected):
            port.send(Failed(str(error)[:REASON_CHARS_MAX]))
        if isinstance(error, OutOfMemory):
            return EXIT_OUT_OF_MEMORY
        return EXIT_PROTOCOL if isinstance(error, ProtocolError) else EXIT_UNFIT
    return 0


def _leash() -> None:
    """Die when the daemon dies (Linux; elsewhere the closed socket tells), and leave signals to
    it.
    """
    die_with_parent()
    # Ctrl-C and service managers signal the whole group; the daemon hands in, then it ends us.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def _pin(wanted: set[int]) -> set[int]:
    """Stay on the `wanted` cores that this process may use; on all of those when none is. Returns
    them; nothing where the system has no such call."""
    if not hasattr(os, "sched_setaffinity"):
        return set()
    allowed = os.sched_getaffinity(0)
    cores = (wanted & allowed) or allowed
    os.sched_setaffinity(0, cores)
    return cores


def _be_polite() -> None:
    """Yield processor and disk to everything else on the machine, where the system lets us."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, max(NICE, os.getpriority(os.PRIO_PROCESS, 0)))
    with contextlib.suppress(psutil.Error, OSError, AttributeError):
        psutil.Process().ionice(psutil.IOPRIO_CLASS_IDLE)


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # torch takes up to seconds to take itself down, and nothing is left to save
