"""Speed classes: a peer's speed as a small whole number that seldom changes.

Work is shared out, and contributions are capped, by class instead of by tokens a second: a measured
speed wobbles by a few percent all the time, and if shares followed it, units would move between
peers although nobody came or went. A class step is a factor of √2, and a peer changes its class
only when its speed is clearly another one.
"""

import math
from typing import Final

CLASS_MIN: Final = -64
CLASS_MAX: Final = 128
"""The classes that records may carry (``averaging.formats``): 2^-32 to 2^64 tokens a second."""

HYSTERESIS: Final = 0.75
"""A class is kept until the speed is further off than this part of a class. Rounding alone changes
at 0.5; the quarter beyond is ±9 % of speed, about the spread of a busy desktop's measurements."""

WEIGHT_BITS: Final = 48
"""Class 0 has the weight 2^48, so that the lowest class still has 2^16 and odd classes (times √2)
are rounded by less than one part in 10^4."""

_ROOT_2: Final = 1.4142135623730951
_SLACK: Final = 2.0 ** (HYSTERESIS / 2)


def speed_class(tokens_per_s: float, previous: int | None) -> int:
    """The class of a speed: c stands for about 2^(c/2) tokens a second.

    `previous` is the class that the peer had (None at first); it is kept unless the speed is off by
    more than HYSTERESIS of a class. Speeds that are not positive numbers have the lowest class.
    """
    if not tokens_per_s > 0.0:
        return CLASS_MIN
    exact = 2.0 * math.log2(min(tokens_per_s, 2.0**64))
    if previous is not None and abs(exact - previous) <= HYSTERESIS:
        return _bounded(previous)
    return _bounded(round(exact))


def class_speed(speed_class: int) -> float:
    """Tokens a second that a class stands for. The same float on every machine: a power of two,
    times the constant √2 for odd classes, without any library function that could round
    differently."""
    half, odd = divmod(_bounded(speed_class), 2)
    return math.ldexp(_ROOT_2 if odd else 1.0, half)


def class_speed_max(speed_class: int) -> float:
    """The highest speed that an honest peer of this class can have, thanks to the hysteresis: 1.30
    times `class_speed`. A cap on claimed tokens has to leave this room."""
    return class_speed(speed_class) * _SLACK


def class_weight(speed_class: int) -> int:
    """The exact whole number, proportional to `class_speed`, with which a class shares work."""
    return math.isqrt(1 << (_bounded(speed_class) + 2 * WEIGHT_BITS))


def _bounded(speed_class: int) -> int:
    return max(CLASS_MIN, min(CLASS_MAX, speed_class))
