"""Hours of the week in which this peer may work, as a person writes them.

`mon-fri 18-24, sat-sun 0-24` or `22:30-6` (every day, over midnight). Empty means always. Times are
those of the machine's own clock on the wall.
"""

import re
from dataclasses import dataclass
from typing import Final

DAYS: Final = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
DAY_MINUTES: Final = 24 * 60
WEEK_MINUTES: Final = 7 * DAY_MINUTES
PARTS_MAX: Final = 64
"""Parts of one text: nine a day."""
_PART: Final = re.compile(
    r"(?:(?P<first>[a-z]{3})(?:-(?P<last>[a-z]{3}))?\s+)?"
    r"(?P<from>\d{1,2}(?::\d{2})?)-(?P<to>\d{1,2}(?::\d{2})?)"
)


@dataclass(frozen=True, slots=True)
class Hours:
    """Spans of minutes since Monday 0:00, ascending, apart; none at all means always."""

    spans: tuple[tuple[int, int], ...] = ()

    def allow(self, minute: int) -> bool:
        """Whether the minute of the week is inside."""
        return not self.spans or any(start <= minute < stop for start, stop in self.spans)

    @property
    def minutes(self) -> int:
        """Minutes a week."""
        if not self.spans:
            return WEEK_MINUTES
        return sum(stop - start for start, stop in self.spans)

    def next_change(self, minute: int) -> int:
        """Minutes from `minute` until what `allow` says changes; 0 when it never does."""
        here = self.allow(minute)
        edges = sorted({edge % WEEK_MINUTES for span in self.spans for edge in span})
        waits = sorted((edge - minute) % WEEK_MINUTES for edge in edges)
        return next((w for w in waits if self.allow((minute + w) % WEEK_MINUTES) != here), 0)


def parse_hours(text: str) -> Hours:
    """Hours from their text; ValueError says which part is wrong."""
    parts = [part.strip().lower() for part in text.split(",") if part.strip()]
    if len(parts) > PARTS_MAX:
        raise ValueError(f"{len(parts)} parts, at most {PARTS_MAX} are allowed")
    minutes = bytearray(WEEK_MINUTES)
    for part in parts:
        for start, length in _spans(part):
            for at in range(start, start + length):
                minutes[at % WEEK_MINUTES] = 1
    return Hours(_joined(minutes) if parts else ())


def day_and_time(minute: int) -> str:
    """A minute of the week as people say it: 'tue 18:00'."""
    day, rest = divmod(minute % WEEK_MINUTES, DAY_MINUTES)
    return f"{DAYS[day]} {rest // 60:02d}:{rest % 60:02d}"


def _spans(part: str) -> list[tuple[int, int]]:
    """Start and length of each day's span in one part."""
    match = _PART.fullmatch(part)
    if match is None:
        raise ValueError(f"{part!r} is not like 'mon-fri 18-24' or '22:30-6'")
    begin, end = _minute(match["from"], part), _minute(match["to"], part)
    if begin in (end, DAY_MINUTES):
        raise ValueError(f"{part!r} has no length")
    length = end - begin if end > begin else end + DAY_MINUTES - begin
    first = _day(match["first"] or "mon", part)
    last = _day(match["last"] or match["first"] or "sun", part)
    days = range(first, (last if last >= first else last + 7) + 1)
    return [((day % 7) * DAY_MINUTES + begin, length) for day in days]


def _day(text: str, part: str) -> int:
    if text not in DAYS:
        raise ValueError(f"{text!r} in {part!r} is not a day: {', '.join(DAYS)}")
    return DAYS.index(text)


def _minute(text: str, part: str) -> int:
    hour, _, minute = text.partition(":")
    total = int(hour) * 60 + int(minute or 0)
    if total > DAY_MINUTES or int(minute or 0) > 59:
        raise ValueError(f"{text!r} in {part!r} is not a time from 0 to 24")
    return total


def _joined(minutes: bytearray) -> tuple[tuple[int, int], ...]:
    found: list[tuple[int, int]] = []
    for at, inside in enumerate(minutes):
        if inside and found and found[-1][1] == at:
            found[-1] = (found[-1][0], at + 1)
        elif inside:
            found.append((at, at + 1))
    return tuple(found)
