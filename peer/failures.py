"""What goes wrong inside a daemon, as a person should read it."""

from __future__ import annotations

from pathlib import Path

from dugnad.dht.p2pd import SubstrateError
from dugnad.peer.errors import UserError
from dugnad.peer.paths import disk_error
from dugnad.peer.store import StoreError


def as_user_error(error: BaseException) -> UserError:
    """An error of a part as a person should read it."""
    if isinstance(error, UserError):
        return error
    if isinstance(error, StoreError):
        return store_error(error)
    if isinstance(error, OSError):
        return disk_error(error, Path(error.filename or "."))
    if isinstance(error, SubstrateError):
        return substrate_error(error)
    return UserError("E005", f"{type(error).__name__}: {error}", "report this with the lines above")


def store_error(error: StoreError) -> UserError:
    """The store's error as a person should read it."""
    return UserError("E017" if error.disk_full else "E026", error.reason, error.fix)


def substrate_error(error: SubstrateError) -> UserError:
    """Why libp2p did not start."""
    text = str(error)
    if "in use" in text:
        return UserError("E018", text, "choose another port: --listen HOST:PORT")
    return UserError("E027", f"the libp2p daemon did not start: {text}", "see its own words above")


def no_seed_error(reports: list[tuple[str, str]]) -> UserError:
    """No peer of the link answered: each address with its cause."""
    story = "; ".join(f"{address}: {reason}" for address, reason in reports) or "it names nobody"
    return UserError(
        "E016", f"no peer of the link can be reached: {story}", "ask for a fresh link, or try later"
    )
