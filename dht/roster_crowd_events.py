"""What goes into a crowd's core (`roster_crowd`) and what comes out of it. Peers are slots."""

from dataclasses import dataclass

from dugnad.dht.roster_rumours import CrowdMessage

# --- events


@dataclass(frozen=True, slots=True)
class LinkUp:
    """A stream with a member is open; `outgoing` if we dialled it, `kept` if it was there before
    there was a crowd.
    """

    slot: int
    outgoing: bool
    kept: bool = False


@dataclass(frozen=True, slots=True)
class LinkDown:
    """It ended, not by our `Close`."""

    slot: int


@dataclass(frozen=True, slots=True)
class Unreached:
    """A `Dial` led to nothing."""

    slot: int


@dataclass(frozen=True, slots=True)
class Lost:
    """A neighbour is gone: whoever watches the streams has looked for it in vain."""

    slot: int


@dataclass(frozen=True, slots=True)
class Parted:
    """The stream with a neighbour is no more; nobody says that the neighbour is gone."""

    slot: int


@dataclass(frozen=True, slots=True)
class Heard:
    """A message from a neighbour."""

    slot: int
    message: CrowdMessage


@dataclass(frozen=True, slots=True)
class Named:
    """Addresses of these are known from a link or the address book."""

    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Tick:
    """The deadline passed."""


@dataclass(frozen=True, slots=True)
class Leave:
    """Say good-bye."""


CrowdEvent = LinkUp | LinkDown | Unreached | Lost | Parted | Heard | Named | Tick | Leave

# --- actions


@dataclass(frozen=True, slots=True)
class Dial:
    """Open a stream; answer with `LinkUp` or `Unreached` within `deadline_s`."""

    slot: int
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Tell:
    """Send a message on the stream with a member."""

    slot: int
    message: CrowdMessage


@dataclass(frozen=True, slots=True)
class Close:
    """Send what was queued, then close."""

    slot: int


@dataclass(frozen=True, slots=True)
class Changed:
    """Members of whom we have newer word: (slot << 32 | order), those gone with an odd order."""

    codes: tuple[int, ...]


CrowdAction = Dial | Tell | Close | Changed
