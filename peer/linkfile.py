"""A link in a file: how peers that are started together find the first of them.

The first one writes its link (`--link-file PATH`) when others can join by it; the others are given
`@PATH` instead of a link and wait until the file is there. It is written in one step, so nobody
reads half of it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from dugnad.dht.link import LINK_CHARS_MAX
from dugnad.peer.errors import UserError
from dugnad.peer.paths import disk_error, read_bounded

WAIT_S: Final = 300.0
"""For the first peer to prepare its data and compute version 0 of a large model."""
POLL_S: Final = 0.5
MARK: Final = "@"
_BYTES_MAX: Final = 4 * LINK_CHARS_MAX


def resolve_link(
    text: str,
    wait_s: float = WAIT_S,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> str:
    """``text`` itself, or the link in the file that `@PATH` names, once it is there.

    UserError E013 when it does not come within ``wait_s``, or is too long for a link.
    """
    if not text.startswith(MARK):
        return text
    path, until = Path(text[len(MARK) :]), clock() + wait_s
    while True:
        try:
            found = read_bounded(path, _BYTES_MAX).decode("utf-8").strip()
        except FileNotFoundError:
            found = ""
        except ValueError as error:
            raise UserError(
                "E013", f"{path} holds no link: {error}", "start with the link"
            ) from error
        except OSError as error:
            raise disk_error(error, path) from error
        if found:
            return found
        if clock() >= until:
            raise UserError(
                "E013",
                f"no link came into {path} within {wait_s:g} s",
                "start the first peer with `--link-file` and that path",
            )
        sleep(POLL_S)


def write_link(path: Path, link: str) -> None:
    """Put ``link`` into ``path`` for everybody to read, in one step. UserError when that fails."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.draft")
    try:
        draft.write_text(link + "\n")
        draft.chmod(0o644)
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise disk_error(error, path) from error
