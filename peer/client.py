"""Asks the running daemon of a data folder: what `dugnad status` and the other short commands do.

Only the standard library is imported here, so that `dugnad status` answers in a blink.
"""

import http.client
import json
import os
from typing import Any, Final

from dugnad.peer.errors import UserError
from dugnad.peer.paths import DaemonFile, Home, read_bounded

TIMEOUT_S: Final = 5.0
"""The daemon answers from memory in milliseconds; on a machine under full load, in a second."""
REPLY_BYTES_MAX: Final = 64 << 20
_TOKEN_BYTES_MAX: Final = 256


class Client:
    """Speaks to the daemon of `home`. Each call is one short connection.

    `get` and `post` return decoded JSON. UserError E030 (exit 4) when no daemon runs, E031 when it
    does not answer as it should.
    """

    def __init__(self, home: Home, timeout_s: float = TIMEOUT_S) -> None:
        self._home = home
        self._timeout_s = timeout_s

    def daemon(self) -> DaemonFile:
        """Where the daemon is; UserError E030 when there is none, or only the traces of a dead
        one.
        """
        found = DaemonFile.read(self._home)
        if found is None:
            raise self._not_running("no daemon is running")
        if not process_alive(found.pid):
            raise self._not_running(
                f"no daemon is running (process {found.pid} ended without leaving)"
            )
        return found

    def get(self, path: str) -> Any:
        """The JSON that GET `path` answers; Any: what it holds is in `dugnad.peer.views`."""
        return self._ask("GET", path, None)

    def post(self, path: str, body: dict[str, object]) -> Any:
        """The JSON that POST `path` answers to `body`; Any: as for `get`."""
        return self._ask("POST", path, json.dumps(body).encode())

    def _ask(self, method: str, path: str, body: bytes | None) -> Any:
        daemon = self.daemon()
        headers = {"Authorization": f"Bearer {self._token()}", "Content-Type": "application/json"}
        connection = http.client.HTTPConnection("127.0.0.1", daemon.port, timeout=self._timeout_s)
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            content = answer.read(REPLY_BYTES_MAX)
        except ConnectionRefusedError as error:
            raise self._not_running(f"no daemon listens on port {daemon.port}") from error
        except (OSError, http.client.HTTPException) as error:
            raise _silent(daemon, str(error) or type(error).__name__) from error
        finally:
            connection.close()
        return _judge(answer.status, content, daemon)

    def _token(self) -> str:
        try:
            return read_bounded(self._home.control_token, _TOKEN_BYTES_MAX).decode("ascii").strip()
        except FileNotFoundError as error:
            raise self._not_running("no daemon is running (it just stopped)") from error
        except (OSError, ValueError) as error:
            raise UserError(
                "E031",
                f"cannot read {self._home.control_token}",
                "run this as the user who runs the daemon",
            ) from error

    def _not_running(self, sentence: str) -> UserError:
        return UserError(
            "E030",
            f"{sentence} in {self._home.root}",
            "start one with `dugnad start` or `dugnad join`",
        )


def process_alive(pid: int) -> bool:
    """Whether there is a process `pid`, ours or not."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _judge(status: int, content: bytes, daemon: DaemonFile) -> Any:
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise _silent(daemon, "its answer is not JSON") from error
    if status == http.client.OK:
        return value
    said = value.get("error") if isinstance(value, dict) else None
    raise _silent(daemon, f"it says {str(said)[:200]!r} ({status})")


def _silent(daemon: DaemonFile, why: str) -> UserError:
    return UserError(
        "E031",
        f"the daemon (process {daemon.pid}, port {daemon.port}) does not answer well: {why}",
        f"try again; if it stays so, stop it with `kill {daemon.pid}` and start it anew",
    )
