"""Plain text for the terminal: aligned columns, quick to print, safe to paste.

No colour and no markup: what peers call themselves is hostile text, and `dugnad status` has to be
quick.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from dugnad.peer.views import printable

CELL_CHARS_MAX: Final = 56
ROWS_SHOWN_MAX: Final = 200
"""More rows than anybody reads; --json has them all."""

Row = Mapping[str, Any]
"""One JSON object of the control API; Any: its values are whatever JSON holds."""


def table(rows: Sequence[Row], columns: Sequence[str] = ()) -> str:
    """`rows` as aligned columns under their names; numbers to the right. 'none' when there are
    none.
    """
    if not rows:
        return "none"
    names = list(columns) or list(rows[0])
    cells = [[cell(row.get(name)) for name in names] for row in rows[:ROWS_SHOWN_MAX]]
    heads = [_heading(name) for name in names]
    widths = [max(len(line[i]) for line in [heads, *cells]) for i in range(len(names))]
    right = [all(_is_number(row.get(name)) for row in rows) for name in names]
    lines = [
        "  ".join(
            text.rjust(width) if to_right else text.ljust(width)
            for text, width, to_right in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in [heads, *cells]
    ]
    if len(rows) > ROWS_SHOWN_MAX:
        lines.append(f"and {len(rows) - ROWS_SHOWN_MAX} more (--json shows all)")
    return "\n".join(lines)


def pairs(rows: Sequence[tuple[str, str]]) -> str:
    """Rows of (what, text), aligned."""
    width = max(len(what) for what, _ in rows)
    return "\n".join(f"{what:<{width}}  {text}" for what, text in rows)


def cell(value: object) -> str:
    """One value as short text; what is not known is a dash."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.1f}" if abs(value) >= 100 else f"{value:.3g}"
    if isinstance(value, Mapping):
        return printable(", ".join(f"{k} {cell(v)}" for k, v in value.items()), CELL_CHARS_MAX)
    if isinstance(value, list | tuple):
        return printable(" ".join(cell(one) for one in value), CELL_CHARS_MAX)
    return printable(str(value), CELL_CHARS_MAX)


def status_text(status: Row) -> str:
    """The one screen of `dugnad status`, from the JSON of a `Status`."""
    loss, train = status["anchor_loss"], status["train_loss"]
    rows = [
        ("state", f"{cell(status['state'])}" + (f": {r}" if (r := cell(status["reason"])) else "")),
        ("run", f"{cell(status['name'])}  {cell(status['run'])}"),
        ("peer", cell(status["peer"])),
        (
            "speed",
            f"{cell(status['tokens_per_s'])} tokens/s here, "
            f"{cell(status['swarm_tokens_per_s'])} in the swarm of {status['peers_live']}",
        ),
        (
            "done",
            f"{cell(status['tokens'])} tokens here in {cell(status['step'])} steps, "
            f"{cell(status['swarm_tokens'])} in the swarm",
        ),
        ("loss", f"{_loss(loss)} of the agreed model (held out), {_loss(train)} in training here"),
        (
            "merges",
            f"{cell(status['merges'])}, every {_seconds(status['interval_s'])}, "
            f"longest gap {_seconds(status['longest_gap_s'])}",
        ),
        ("codec", _codec(status)),
        ("versions", cell(status["versions"])),
        ("units", cell(status["units"]) or "-"),
        ("network", _network(status)),
        ("this month", f"{_mega(status.get('quota_used', 0))} up and down in 30 days"),
        ("up", f"{_seconds(status['uptime_s'])}, process {status['pid']}"),
        ("version", cell(status["version"])),
        ("link", printable(str(status["link"]), 1000)),
    ]
    if status.get("evaluated_tokens"):
        rows.append(("evaluated", f"{cell(status['evaluated_tokens'])} held-out tokens here"))
    if status.get("prepared_tokens"):
        rows.append(("prepared", f"{cell(status['prepared_tokens'])} tokens for others"))
    if status.get("units_before_text") is not None:
        early = f"not whole yet; {cell(status['units_before_text'])} units came by their hash"
        rows.append(("text", early))
    if status.get("dashboard"):
        rows.append(("page", printable(str(status["dashboard"]), 300)))
    return pairs(rows)


UNIT_STATES: Final = (
    ("open", "in the window and not listed in full, {mine} of them for this peer"),
    ("claimed", "of these in the learner's hand here, or taken out of order by somebody"),
    ("trained", "trained here in whole or part, not listed yet"),
    ("listed", "by the agreed lineage in full, {settled} of them settled for good"),
    ("settled", ""),
    ("twice", "worth of sequences that were listed again"),
    ("lost", "that this peer gave up"),
)
UNIT_COLUMNS: Final = ("unit", "state", "sequences", "listed", "in_hand", "holder", "overdue_s")


def units_text(units: Row) -> str:
    """The screen of `dugnad units`, from the JSON of `dugnad.peer.unitsview.units_view`."""
    if not units.get("epoch_sequences"):
        return "it knows of no work units"
    numbers = {key: cell(value) for key, value in units.items()}
    progress = f"{100.0 * units['epoch_progress']:.1f} % of {numbers['epoch_sequences']} sequences"
    rows = [("epoch", f"{numbers['epoch']}, {progress} listed")]
    for state, text in UNIT_STATES:
        what = f"{numbers[state]:>7}  {text.format(**numbers)}".rstrip()
        rows.append(("done twice" if state == "twice" else state, what))
    return f"{pairs(rows)}\n\n{table(units['rows'], UNIT_COLUMNS)}"


CURVE_SHOWN: Final = 12
"""The newest rounds; --json has them all."""


def evaluation_text(answer: Row) -> str:
    """The screen of `dugnad evaluation`: `dugnad.peer.evaluator` and `preparer` say it."""
    parts = (
        "validation, loss in nats a token",
        table(answer["curve"][-CURVE_SHOWN:]),
        "",
        "evaluated tokens, a credit of its own kind",
        table(answer["earned"]),
        "",
        "prepared tokens, another",
        table(answer.get("prepared", [])),
        *([answer["why"]] if answer.get("why") else []),
    )
    return "\n".join(parts)


def _heading(name: str) -> str:
    """A field's name as a heading, its unit last: `last_seen_s` is 'last seen, s'."""
    words = name.replace("_per_s", "/s").replace("_", " ")
    return words.removesuffix(" s") + ", s" if words.endswith(" s") else words


def _is_number(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _codec(status: Row) -> str:
    """The newest hand-in's codec, what it takes, and why."""
    text = cell(status["codec"])
    if status.get("bits_per_param"):
        text += f", {status['bits_per_param']:.3g} bits a parameter"
        text += f", {_mega(status['bytes_saved'])} saved so far"
    if status.get("codec_reason"):
        text += f" ({printable(str(status['codec_reason']), 120)})"
    return text


def _network(status: Row) -> str:
    text = f"{_mega(status['bytes_sent'])} up, {_mega(status['bytes_received'])} down"
    rates = status.get("up_bytes_per_s"), status.get("down_bytes_per_s")
    if any(rates):
        up, down = (f"{rate * 8e-6:.3g}" if rate else "?" for rate in rates)
        text += f"; the line gave {up} Mbit/s up, {down} down"
    if (late := status.get("control_p99_s")) is not None:
        text += f"; heartbeats within {late * 1000:.0f} ms"
    return text


def _loss(value: float | None) -> str:
    return "not measured yet" if value is None else f"{value:.3f}"


def _mega(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"


def _seconds(value: float) -> str:
    if value < 120:
        return f"{value:.1f} s"
    return f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:.1f} h"
