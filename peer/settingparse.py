"""How the values of settings are read, whether they come as TOML or as text.

ValueError says what is wrong, in words for the person who wrote them.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

from dugnad.dht.plaintext import text_fault
from dugnad.peer.hours import parse_hours

PROGRAMS_MAX: Final = 32
"""Programs to pause for: a table of games, not of everything."""
CORES_MAX: Final = 1024
DEVICES_MAX: Final = 16
CODEC_NAMES: Final = (
    "float32",
    "float16",
    "int8",
    "int4",
    "topk-25",
    "topk-12.5",
    "topk-6.25",
    "topk-3.12",
    "topk-1.56",
    "topk-0.78",
)
"""As `dugnad.averaging.codecs.CODECS` has them: numpy is not loaded to read settings."""
KERNELS: Final = ("auto", "numpy")
"""What computes the exchange's numbers: compiled kernels where numba is, or numpy alone."""
ROLES: Final = ("train", "evaluate", "prepare")
"""What a peer may do for a run, in the order in which it is shown."""
MESH_LOW: Final = 4
MESH_HIGH: Final = 128
"""Peers of a mesh: with 128 heartbeats alone are 20 kB/s."""
MBIT_MAX: Final = 100_000.0
_TRUE: Final = frozenset({"1", "true", "yes", "on"})
_FALSE: Final = frozenset({"0", "false", "no", "off"})


def as_number(raw: object, kind: type[int] | type[float], low: float, high: float) -> Any:
    """A number from `low` to `high`, also as text; ValueError. Any: an int or a float as `kind`
    says."""
    if isinstance(raw, bool) or not isinstance(raw, str | int | float):
        raise ValueError(f"{raw!r} is not a number")
    try:
        value = kind(raw)
    except (ValueError, OverflowError):
        raise ValueError(f"{raw!r} is not a number of this kind") from None
    if isinstance(raw, float) and math.isfinite(raw) and value != raw:
        raise ValueError(f"{raw} is not a whole number")
    if not low <= value <= high:  # also refuses NaN
        raise ValueError(f"{raw} is not between {low} and {high}")
    return value


def as_bool(raw: object) -> bool:
    """true/false, yes/no, on/off, 1/0; ValueError."""
    if isinstance(raw, bool):
        return raw
    word = str(raw).lower()
    if word in _TRUE | _FALSE:
        return word in _TRUE
    raise ValueError(f"{raw!r} is neither true nor false")


def as_kernels(raw: object) -> str:
    """One of KERNELS; ValueError."""
    if raw not in KERNELS:
        raise ValueError(f"{raw!r} is none of {', '.join(KERNELS)}")
    return str(raw)


def as_share(raw: object) -> float:
    """A share of the time from 0.01 to 1; ValueError."""
    share: float = as_number(raw, float, 0.0, 1.0)
    if share < 0.01:
        raise ValueError(f"{raw} leaves nothing to train with")
    return share


def as_rate(raw: object) -> float:
    """Megabits a second, 0 for no limit; slower than a modem is refused: nothing would arrive."""
    rate: float = as_number(raw, float, 0.0, MBIT_MAX)
    if 0.0 < rate < 0.25:
        raise ValueError(f"{raw} Mbit/s is too slow to hand anything in; 0.25 is the least")
    return rate


def as_pause(raw: object) -> float:
    """Seconds between two things that cost something, 0 for never."""
    seconds: float = as_number(raw, float, 0.0, 1e6)
    if 0.0 < seconds < 1.0:
        raise ValueError(f"{raw} is too often; 1 is the least")
    return seconds


def as_codec(raw: object) -> str:
    """'auto', or the name of a codec."""
    word = str(raw).strip().lower()
    if word not in ("auto", *CODEC_NAMES):
        raise ValueError(f"{raw!r} is neither auto nor a codec")
    return word


def as_words(raw: object) -> tuple[str, ...]:
    """A list of names, or a text with commas."""
    rows = raw.split(",") if isinstance(raw, str) else raw
    if not isinstance(rows, list | tuple) or not all(isinstance(one, str) for one in rows):
        raise ValueError(f"{raw!r} is not a list of names")
    words = tuple(one.strip() for one in rows if one.strip())
    if len(words) > PROGRAMS_MAX:
        raise ValueError(f"{len(words)} names, at most {PROGRAMS_MAX} are allowed")
    for one in words:
        if fault := text_fault(one, 64):
            raise ValueError(f"the name {one[:20]!r} {fault}")
    return words


def as_hours(raw: object) -> str:
    """Hours of the week, kept as they are written."""
    if not isinstance(raw, str):
        raise ValueError(f"{raw!r} is not a text")
    parse_hours(raw)
    return raw.strip()


def as_numbers(raw: object, limit: int = CORES_MAX) -> str:
    """Whole numbers and spans such as '0,2-3', kept as they are written; '' is all."""
    text = str(raw).strip() if isinstance(raw, str | int) and not isinstance(raw, bool) else None
    if text is None:
        raise ValueError(f"{raw!r} is not like '0,2-3'")
    numbers_of(text, limit)
    return text


def numbers_of(text: str, limit: int = CORES_MAX) -> tuple[int, ...]:
    """The numbers in '0,2-3', ascending; ValueError."""
    found: set[int] = set()
    for part in filter(None, (one.strip() for one in text.split(","))):
        first, _, last = part.partition("-")
        if not first.isdecimal() or (last and not last.isdecimal()) or len(part) > 9:
            raise ValueError(f"{part!r} is not a number, nor a span such as 2-3")
        low, high = int(first), int(last or first)
        if high < low or high >= limit:
            raise ValueError(f"{part!r} is not within 0 to {limit - 1}")
        found |= set(range(low, high + 1))
    return tuple(sorted(found))


def as_gpu(raw: object) -> str:
    """'all', 'none', or numbers of devices."""
    text = str(raw).strip().lower()
    if text in ("all", "none"):
        return text
    if not text:
        raise ValueError("it is empty")
    return as_numbers(text, DEVICES_MAX)


def as_roles(raw: object) -> tuple[str, ...]:
    """Some of ROLES, as a list or separated by commas."""
    rows = raw.replace(",", " ").split() if isinstance(raw, str) else raw
    if not isinstance(rows, list | tuple) or not rows:
        raise ValueError(f"{raw!r} is not a list of roles")
    for one in rows:
        if one not in ROLES:
            raise ValueError(f"{one!r} is not a role")
    return tuple(role for role in ROLES if role in rows)


def as_auto(raw: object) -> str:
    """'auto', 'true' or 'false'."""
    if str(raw).strip().lower() == "auto":
        return "auto"
    return "true" if as_bool(raw) else "false"


Parser = Callable[[object], object]
LIMIT_PARSERS: Final[Mapping[str, tuple[Parser, str]]] = {
    "cores": (as_numbers, "core numbers such as 0,2-3, or an empty text for any"),
    "gpu": (as_gpu, "all, none, or device numbers such as 0,1"),
    "gpu_share": (as_share, "a share from 0.01 to 1, for example 0.5"),
    "gpu_only_when_idle": (as_auto, "auto, true or false"),
    "memory_mb": (lambda raw: as_number(raw, float, 0.0, 1e9), "megabytes, or 0 for a quarter"),
    "disk_gb": (lambda raw: as_number(raw, float, 0.0, 1e6), "gigabytes, or 0 for no limit"),
    "keep_free_gb": (lambda raw: as_number(raw, float, 0.0, 1e6), "gigabytes, or 0 for a tenth"),
    "context_s": (as_pause, "seconds such as 60, or 0 to keep no training context"),
    "mesh_max": (
        lambda raw: as_number(raw, int, MESH_LOW, MESH_HIGH),
        f"a number of peers from {MESH_LOW} to {MESH_HIGH}, for example 64",
    ),
    "buddy_s": (as_pause, "seconds such as 5, or 0 for no drafts"),
    "upload_mbit": (as_rate, "megabits a second, or 0 for no limit"),
    "download_mbit": (as_rate, "megabits a second, or 0 for no limit"),
    "quota_gb": (lambda raw: as_number(raw, float, 0.0, 1e6), "gigabytes in 30 days, or 0"),
    "hours": (as_hours, "hours such as 'mon-fri 18-24, sat-sun 0-24', or an empty text for always"),
    "only_when_idle": (as_bool, "true or false"),
    "idle_minutes": (lambda raw: as_number(raw, float, 0.1, 1e5), "minutes, for example 3"),
    "on_battery": (as_bool, "true or false"),
    "cpu_temperature_max": (lambda raw: as_number(raw, float, 0.0, 120.0), "°C, or 0 for none"),
    "gpu_temperature_max": (lambda raw: as_number(raw, float, 0.0, 120.0), "°C, or 0 for none"),
    "pause_while": (as_words, 'names of programs such as ["blender", "steam"]'),
}
"""How each limit is read, and what to give for it."""
