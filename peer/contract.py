"""A work unit's contract: what a machine must have to take it, and how often it may be tried."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

UNIT_SECONDS_MAX: Final = 600.0
"""A unit that would take longer than this on a machine is not for it: ten times the minute that the
design gives a slow machine. Larger work wants a smaller unit, not a longer wait."""


@dataclass(frozen=True, slots=True)
class Contract:
    """What a unit of this run needs.

    `memory_bytes` of the machine; `dtypes` that are accepted (by their torch names, such as
    "float32"), any one is enough, none where nothing is computed; `flops`
    floating point operations for the whole unit; `splittable` whether a part of a unit may be
    trained and handed in; `attempts` how often one peer may try it; `devices` the kinds that are
    accepted ("cpu", "cuda"), empty for any.
    """

    memory_bytes: int
    dtypes: tuple[str, ...]
    flops: float
    splittable: bool
    attempts: int
    devices: tuple[str, ...] = ()


class Capabilities(Protocol):
    """The part of an advert, or of a probe, that a contract asks about. None means unknown."""

    @property
    def memory_bytes(self) -> int | None:
        """Memory that the owner lets us use, in bytes."""
        ...

    @property
    def flops(self) -> Mapping[str, float]:
        """Measured speed per dtype, in operations a second; what is absent is not usable. Empty on
        a machine that was never measured: then trying tells."""
        ...

    @property
    def kinds(self) -> Collection[str]:
        """Kinds of its devices; empty: unknown."""
        ...


def can_take(contract: Contract, capabilities: Capabilities) -> tuple[bool, str]:
    """Whether such a machine can take a unit, and why not (or with which dtype)."""
    memory = capabilities.memory_bytes
    if memory is None:
        return False, "its memory is unknown"
    if memory < contract.memory_bytes:
        need, have = _megabytes(contract.memory_bytes, memory)
        return False, f"needs {need} MB of memory, has {have} MB"
    kinds = capabilities.kinds
    if contract.devices and kinds and not set(kinds) & set(contract.devices):
        return False, f"needs {' or '.join(contract.devices)}, has {', '.join(sorted(kinds))}"
    measured = capabilities.flops
    if not contract.dtypes:
        return True, "it needs no arithmetic"
    if not measured:
        return True, "it was never measured, so trying will tell"
    usable = [d for d in contract.dtypes if measured.get(d, 0.0) > 0.0]
    if not usable:
        return False, f"none of {', '.join(contract.dtypes)} was measured on it"
    dtype = max(usable, key=lambda d: measured[d])
    seconds = contract.flops / measured[dtype]
    if seconds > UNIT_SECONDS_MAX and not contract.splittable:
        return False, f"a unit would take {seconds:.0f} s, more than {UNIT_SECONDS_MAX:.0f} s"
    return True, f"about {seconds:.2g} s a unit in {dtype}"


def _megabytes(need: int, have: int) -> tuple[str, str]:
    """Both in megabytes, with as many digits as tell them apart."""
    for digits in range(6):
        found = f"{need / 1e6:.{digits}f}", f"{have / 1e6:.{digits}f}"
        if found[0] != found[1]:
            break
    return found
