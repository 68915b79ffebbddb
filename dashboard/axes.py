"""Scales and ticks: from values to places in a drawing, and round numbers along its edges."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from dugnad.dashboard.text import amount, moment

Ticks = list[tuple[float, str]]

_SECOND: Final = 1000
_MINUTE: Final = 60 * _SECOND
_HOUR: Final = 60 * _MINUTE
_DAY: Final = 24 * _HOUR
_TIME_STEPS: Final = (
    *(n * _SECOND for n in (1, 2, 5, 10, 15, 30)),
    *(n * _MINUTE for n in (1, 2, 5, 10, 15, 30)),
    *(n * _HOUR for n in (1, 2, 3, 6, 12)),
    *(n * _DAY for n in (1, 2, 3, 5, 7, 14, 28, 91, 182, 364, 1820, 36_400)),
)
_LOG_DECADES_MIN: Final = 0.8
"""Below this many powers of ten, ticks at 1, 2 and 5 would be fewer than three."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Values from `low` to `high` drawn from `start` to `stop`; by their logarithm if `log`."""

    low: float
    high: float
    start: float
    stop: float
    log: bool = False

    def at(self, value: float) -> float:
        """Where `value` is drawn, held inside the drawing."""
        low, high = self.low, self.high
        if value <= low:
            return self.start
        if value >= high:
            return self.stop
        if self.log:
            value, low, high = math.log(value), math.log(low), math.log(high)
        return self.start + (self.stop - self.start) * ((value - low) / (high - low))

    def all(self, values: Iterable[float]) -> list[float]:
        """Where each of `values` is drawn; many at once cost a third."""
        if self.log:
            return [self.at(value) for value in values]
        low, high, start, stop = self.low, self.high, self.start, self.stop
        share = (stop - start) / (high - low)
        return [
            start if v <= low else stop if v >= high else start + share * (v - low) for v in values
        ]


def fitted(values: list[float], *, log: bool = False, zero: bool = False) -> tuple[float, float]:
    """A lowest and a highest value that hold all `values` with some air, and are not equal.

    `zero` begins at 0. With `log` only values above 0 count.
    """
    kept = [v for v in values if math.isfinite(v) and (v > 0 or not log)]
    low, high = (min(kept), max(kept)) if kept else (1.0, 2.0)
    if log:
        air = (high / low) ** 0.05 if high > low else 1.5
        return low / air, high * air
    if zero:
        return 0.0, high * 1.08 if high > 0 else 1.0
    air = (high - low) * 0.05 or max(abs(high), 1.0) * 0.1
    return low - air, high + air


def number_ticks(low: float, high: float, about: int) -> Ticks:
    """About `about` round numbers from `low` to `high`, with their labels."""
    step = _round_step((high - low) / max(about, 1))
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    if step / 10.0**-digits % 1 > 1e-6:
        digits += 1  # a step of 2.5
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [(n * step, _number_label(n * step, digits)) for n in range(first, last + 1)]


def _number_label(value: float, digits: int) -> str:
    if abs(value) < 1000:
        return f"{value:.{digits}f}"
    number, _, letter = amount(round(value)).partition(" ")
    return f"{number.rstrip('0').rstrip('.') if '.' in number else number} {letter}"


def _round_step(raw: float) -> float:
    power = 10.0 ** math.floor(math.log10(raw))
    return float(next((m * power for m in (1, 2, 2.5, 5) if m * power >= raw * 0.999), 10 * power))


def log_ticks(low: float, high: float, about: int) -> Ticks:
    """Round numbers for a logarithmic scale: 1, 2 and 5 times powers of ten, or evenly spaced
    ones where that would give too few.
    """
    decades = math.log10(high / low)
    if decades < _LOG_DECADES_MIN:
        return number_ticks(low, high, about)
    if decades > about:
        factors: tuple[int, ...] = (1,)
    else:
        factors = (1, 2, 5) if 3 * decades <= 2 * about else (1, 3)
    every = max(1, round(decades / about))
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [10.0**p * f for p in powers if p % every == 0 for f in factors]
    return [
        (v, _number_label(v, max(0, -math.floor(math.log10(v))))) for v in ticks if low <= v <= high
    ]


def time_ticks(low_ms: float, high_ms: float, about: int) -> Ticks:
    """Round moments (UTC) between two times, labelled by clock within days, by date beyond."""
    span = high_ms - low_ms
    step = next((s for s in _TIME_STEPS if span / s <= about), _TIME_STEPS[-1])
    first, last = math.ceil(low_ms / step), math.floor(high_ms / step)
    form = "%H:%M:%S" if step < _MINUTE else "%H:%M" if step < _DAY else "%b %-d"
    if step >= 91 * _DAY:
        form = "%Y-%m"
    labels = []
    for n in range(first, last + 1):
        at = moment(n * step)
        midnight = step < _DAY and n * step % _DAY == 0
        labels.append((float(n * step), f"{at:%b} {at.day}" if midnight else at.strftime(form)))
    return labels
