"""What taking part will use of this machine, and the question whether it may.

`check_machine` refuses what cannot work (memory, disk) with both numbers; `offer` are the rows
that a person reads before the first run; `agree` asks. A run that was joined before is not asked
about again.
"""

import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from dugnad.averaging.codecs import CODECS
from dugnad.peer.config import Settings, usable_cores
from dugnad.peer.errors import UserError
from dugnad.peer.limits import faults
from dugnad.peer.manifest import Manifest, check_memory, describe, memory_need, preparing_need
from dugnad.peer.paths import Home

RECEIPTS_BYTES: Final = 64 << 20
"""Headers and inputs of a week, as SQLite: guess, to be measured."""
ANCHOR_BYTES_PER_PARAMETER: Final = 16
"""Anchor and momentum, float32, the old file beside the new one while it is replaced."""
TEXT_COPIES: Final = 2
"""Shards as they came, and the text put together from them, before the shards are dropped."""
_CGROUP: Final = Path("/sys/fs/cgroup")
_CGROUP_BYTES_MAX: Final = 64

Row = tuple[str, str]


def memory_available() -> int:
    """Bytes of memory that this process may still take: the machine's, or its container's."""
    import psutil  # only here: 25 ms that no other command needs

    available: int = psutil.virtual_memory().available
    with suppress(OSError, ValueError):  # no cgroup v2 here, or no limit ("max")
        limit = int((_CGROUP / "memory.max").read_text()[:_CGROUP_BYTES_MAX])
        used = int((_CGROUP / "memory.current").read_text()[:_CGROUP_BYTES_MAX])
        available = min(available, max(0, limit - used))
    return available


def disk_need(manifest: Manifest) -> int:
    """Bytes of disk that a peer of this run needs: text, anchors, receipts."""
    text = TEXT_COPIES * manifest.data.index.size
    return text + ANCHOR_BYTES_PER_PARAMETER * manifest.table.total + RECEIPTS_BYTES


def disk_free(home: Home) -> int:
    """Bytes free where the data folder is, or will be."""
    folder = home.root
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def check_machine(manifest: Manifest, home: Home) -> None:
    """UserError E021 (memory) or E017 (disk), with need and have, when nothing of the run fits
    here."""
    check_memory(preparing_need(manifest), memory_available())
    need, have = disk_need(manifest), disk_free(home)
    if need > have:
        raise UserError(
            "E017",
            f"the run needs {_size(need)} of disk, {home.root} has {_size(have)} free",
            "free some space, or choose another folder with --home",
        )


def offer(manifest: Manifest | None, settings: Settings, home: Home) -> list[Row]:
    """What taking part will use; without a manifest (its peers are not asked yet), the limits
    only.
    """
    share = "" if settings.cpu_share == 1.0 else f", {settings.cpu_share:.0%} of the time"
    threads = f"{settings.threads} of {usable_cores()} cores{share}, at low priority"
    if manifest is None:
        return [
            ("processor", threads),
            ("memory", f"at most what is free: {_size(memory_available())} now"),
            ("disk", f"in {home.root}, {_size(disk_free(home))} free"),
            ("network", "model updates and training text, to and from other volunteers"),
            *limit_rows(settings),
        ]
    need = memory_need(manifest)
    return [
        *describe(manifest),
        ("processor", threads),
        ("memory", f"{_size(need.total)} of {_size(memory_available())} free"),
        ("disk", f"{_size(disk_need(manifest))} of {_size(disk_free(home))} free, in {home.root}"),
        ("network", _traffic(manifest)),
        *limit_rows(settings),
        ("to fetch", f"{_size(manifest.data.index.size + 4 * manifest.table.total)} at first"),
    ]


def limit_rows(settings: Settings) -> list[Row]:
    """The limits that hold, in words."""
    limits = settings.limits()
    rates = [
        f"{name} {rate:g} Mbit/s" if rate else f"{name} unlimited"
        for name, rate in (("up", settings.upload_mbit), ("down", settings.download_mbit))
    ]
    quota = [f"{limits.quota_gb:g} GB in 30 days"] if limits.quota_gb else []
    when = [limits.hours or "at all hours"]
    when += [f"only after {limits.idle_minutes:g} min without use"] if limits.only_when_idle else []
    when += ["on battery, too" if limits.on_battery else "not on battery"]
    when += [f"not while {name} runs" for name in limits.pause_while]
    ceilings = [
        f"{name} {degrees:g} °C"
        for name, degrees in (
            ("CPU", limits.cpu_temperature_max),
            ("GPU", limits.gpu_temperature_max),
        )
        if degrees
    ]
    gpu = (
        "not used"
        if settings.gpu == "none"
        else f"{settings.gpu}, {settings.gpu_share:.0%} of the time"
    )
    if settings.gpu != "none" and limits.gpu_only_when_idle != "false":
        gpu += ", not while somebody uses the machine"
    return [
        (
            "roles",
            " and ".join(settings.roles) + "; a machine that cannot train evaluates or prepares",
        ),
        ("GPU", gpu),
        ("at most", ", ".join(rates + quota)),
        ("when", ", ".join(when)),
        ("not above", ", ".join(ceilings) or "no ceiling"),
        ("to change", "`dugnad config init`, or --set NAME=VALUE"),
    ]


def check_limits(settings: Settings, home: Home) -> None:
    """UserError E032 for limits that cannot be kept on this machine, or that leave no time."""
    from dugnad.peer.readings import senses

    wrong = faults(settings.limits(), senses(home.root))
    if wrong:
        raise UserError(
            "E032", "; ".join(wrong), "change them in config.toml; `dugnad config` shows each"
        )


def agree(rows: Sequence[Row], *, yes: bool, ask: Callable[[str], str] | None = None) -> None:
    """Prints `rows` and asks. UserError E004 when the answer is no, E003 when nobody can answer.

    `ask` is `input`, for tests to replace; None means `input` if there is a terminal.
    """
    width = max(len(what) for what, _ in rows)
    print("Taking part will use:")
    for what, text in rows:
        print(f"  {what:<{width}}  {text}")
    if yes:
        return
    if ask is None:
        if not (sys.stdin.isatty() and sys.stdout.isatty()):
            raise UserError(
                "E003",
                "the first run asks before it starts, and there is no terminal to ask on",
                "read the lines above and add --yes",
            )
        ask = input
    try:
        answer = ask("Take part? You can stop at any time with Ctrl-C. [y/N] ")
    except EOFError:
        answer = ""
    if answer.strip().lower() not in ("y", "yes"):
        raise UserError("E004", "nothing was started", "answer y, or add --yes")


def _traffic(manifest: Manifest) -> str:
    """An estimate from the manifest alone: what is sent depends on how fast the peers are."""
    exchange, sizes = manifest.exchange, manifest.table.sizes
    up = sum(CODECS[exchange.hand_in_codec].encoded_size(size) for size in sizes)
    down = sum(CODECS[exchange.commit_codec].encoded_size(size) for size in sizes)
    fastest = 8000 * (up + down) / exchange.merge_floor_ms / 1e6
    return (
        f"about {_size(up)} up and {_size(down)} down for every {exchange.steps_per_merge} steps, "
        f"never above {fastest:,.3g} Mbit/s unless this peer merges for others"
    )


def _size(size: float) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"
