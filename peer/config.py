"""The volunteer's settings: one frozen value, from flags, environment, file and defaults, in that
order.

A setting has the same name everywhere: `cpu_share` in `config.toml`, `--cpu-share`,
`DUGNAD_CPU_SHARE`. Unknown names are errors that say which known name is nearest. `explain` tells
where each value came from.
"""

import difflib
import os
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Final

from dugnad.dht.plaintext import text_fault
from dugnad.peer.errors import UserError
from dugnad.peer.limits import Limits
from dugnad.peer.paths import HOME_VARIABLE, Home, read_bounded
from dugnad.peer.settingparse import (
    CODEC_NAMES,
    KERNELS,
    LIMIT_PARSERS,
    ROLES,
    as_bool,
    as_codec,
    as_kernels,
    as_number,
    as_roles,
    as_share,
    numbers_of,
)
from dugnad.peer.views import NAME_CHARS_MAX

ENVIRONMENT_PREFIX: Final = "DUGNAD_"
PATH_CHARS_MAX: Final = 1024
"""Above what the usual systems take for a path in practice."""
ANNOUNCE_MAX: Final = 8
"""Addresses that an owner may announce by hand; an advert has room for about that many."""
THREADS_MAX: Final = 1024
_CONFIG_BYTES_MAX: Final = 1 << 16
_PORT_MAX: Final = 65535


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A host (a name or an address) and a port; port 0 takes a free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything a volunteer can set. The defaults are gentle (volunteers.md 4.4)."""

    listen: Endpoint = Endpoint("0.0.0.0", 0)  # an Endpoint is frozen
    """Where other peers reach this one; port 0 takes a free one."""
    announce: tuple[str, ...] = ()
    """Multiaddrs to tell others instead of the ones found, for a forwarded port."""
    threads: int = 0
    """CPU threads of the learner; 0 is replaced by half of the cores when the settings are loaded.
    """
    cpu_share: float = 1.0
    """Share of the time that the learner's threads may be busy, above 0 and at most 1."""
    name: str = ""
    """A label that others see; empty means three words from the key."""
    mesh_max: int = 64
    """Peers up to which each holds a stream with every other; with more, with a few of them."""
    outbound_only: bool = False
    """Take no connections: contribute over streams that this peer opens, never be a home."""
    quic: bool = False
    """Also listen on QUIC, for networks that block TCP; it is slower, and losses are seen later."""
    lan: bool = True
    """Find peers of the same run on the local network, and be found there."""
    control_port: int = 0
    """Port of the control API on 127.0.0.1; 0 takes a free one."""
    dashboard: Endpoint | None = None
    """Where to serve the public page of the run; None (an empty text) serves none."""
    link_file: str = ""
    """A file to write the link into once others can join by it; empty writes none."""
    yes: bool = False
    """Do not ask before the first run."""
    cores: str = ""
    """Cores that the learner is kept on, such as `0,2-3`; empty means any."""
    gpu: str = "all"
    """GPUs that may be used: `all`, `none`, or their numbers."""
    gpu_share: float = 1.0
    """Share of the time that a GPU may be busy."""
    gpu_only_when_idle: str = "auto"
    """Leave the GPU alone while somebody uses the machine; `auto`: where that can be told."""
    memory_mb: float = 0.0
    """Memory of daemon and learner together; 0 is a quarter of the machine's, at most 4 GiB."""
    disk_gb: float = 5.0
    """Disk that the data folder may take; 0 is no limit."""
    keep_free_gb: float = 0.0
    """Disk that stays free; 0 is a tenth of it, at most 10 GB."""
    context_s: float = 60.0
    """Seconds between two captures of the training context, or more where they cost much; 0 keeps
    none."""
    buddy_s: float = 0.0
    """Seconds between two drafts of what is not handed in yet, which a neighbour keeps and hands in
    if this machine dies; 0 sends none."""
    upload_mbit: float = 10.0
    """Upload of bulk data, megabits a second; 0 is no limit."""
    download_mbit: float = 20.0
    """Download of bulk data, megabits a second; 0 is no limit."""
    codec: str = "auto"
    """What contributions are encoded with: `auto` follows what each link carries, or a codec's
    name."""
    kernels: str = "auto"
    """What computes the exchange's numbers: `auto` is compiled kernels where numba is installed,
    `numpy` does without; the results are the same."""
    quota_gb: float = 0.0
    """Traffic up and down in 30 days; 0 is no limit."""
    hours: str = ""
    """Hours of the week in which it may train; empty means always."""
    roles: tuple[str, ...] = ("train",)
    """What it does for the run: `train`, `evaluate`, `prepare`. A machine that cannot train
    evaluates, or prepares units where it cannot do that, either."""
    only_when_idle: bool = False
    """Train only when nobody uses the machine."""
    idle_minutes: float = 3.0
    """Without keyboard and mouse for so long, nobody uses it."""
    on_battery: bool = False
    """Train on battery, too."""
    cpu_temperature_max: float = 90.0
    """Pause above so many °C of the processor; 0 is no ceiling."""
    gpu_temperature_max: float = 85.0
    """Pause above so many °C of the GPU; 0 is no ceiling."""
    pause_while: tuple[str, ...] = ()
    """Pause while one of these programs runs."""

    def gpus(self) -> tuple[int, ...] | None:
        """Numbers of the GPUs that may be used; None: all."""
        if self.gpu == "all":
            return None
        return () if self.gpu == "none" else numbers_of(self.gpu)

    def limits(self) -> Limits:
        """The settings that the rules look at."""
        return Limits(**{field.name: getattr(self, field.name) for field in fields(Limits)})


@dataclass(frozen=True, slots=True)
class Explained:
    """One effective setting: its name, its value as text, and where it came from."""

    key: str
    value: str
    source: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """The effective settings and where each came from."""

    settings: Settings
    sources: Mapping[str, str]

    def explain(self) -> list[Explained]:
        """A row for each setting, in their order."""
        return [
            Explained(key, _shown(getattr(self.settings, key)), self.sources[key])
            for key in SETTING_NAMES
        ]


SETTING_NAMES: Final = tuple(field.name for field in fields(Settings))


def load_settings(
    home: Home,
    flags: Mapping[str, object] | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Loaded:
    """The effective settings: `flags` (those that are not None), then `environment`, then the
    config file.

    UserError E001 for a wrong flag, E002 for anything wrong in the file or the environment.
    """
    values: dict[str, object] = {}
    sources = dict.fromkeys(SETTING_NAMES, "default")
    layers = [
        ("E002", str(home.config), _from_file(home)),
        ("E002", "environment", _from_environment(environment)),
        ("E001", "flag", {k: v for k, v in (flags or {}).items() if v is not None}),
    ]
    for number, source, layer in layers:
        for key, raw in layer.items():
            values[key] = _parse(key, raw, number, source)
            sources[key] = _variable(key) if source == "environment" else source
    if not values.get("threads"):
        cores = usable_cores()
        values["threads"] = max(1, cores // 2)
        sources["threads"] = f"half of {cores} cores" if cores > 1 else "the only core"
    return Loaded(Settings(**values), sources)  # type: ignore[arg-type]  # _parse gave each its type


def usable_cores() -> int:
    """Physical cores that this process may use, at least 1."""
    import psutil  # only here: 25 ms that no other command needs

    allowed = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return max(1, min(psutil.cpu_count(logical=False) or allowed, allowed))


def parse_endpoint(text: str) -> Endpoint:
    """`host:port`, `[v6]:port`, `:port` or `port`; ValueError with the reason."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") if colon else ""
    if not port.isascii() or not port.isdigit() or int(port) > _PORT_MAX:
        raise ValueError(f"{text!r} does not end in a port from 0 to {_PORT_MAX}")
    if any(c.isspace() or c == "/" for c in host):
        raise ValueError(f"{host!r} is not a host")
    return Endpoint(host or "0.0.0.0", int(port))


def nearest(name: str, known: Sequence[str]) -> str:
    """The known name most like `name`, as a hint: ' (did you mean …?)', or '' when none is near."""
    found = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f" (did you mean {found[0]!r}?)" if found else ""


def _variable(key: str) -> str:
    return ENVIRONMENT_PREFIX + key.upper()


def _from_file(home: Home) -> dict[str, object]:
    try:
        text = read_bounded(home.config, _CONFIG_BYTES_MAX).decode("utf-8")
        table: dict[str, object] = tomllib.loads(text)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise UserError(
            "E002", f"cannot read {home.config}: {error.strerror}", "make it readable, or delete it"
        ) from error
    except ValueError as error:  # TOMLDecodeError and UnicodeDecodeError are ValueErrors
        raise UserError(
            "E002", f"{home.config} is not TOML: {error}", "correct or delete the file"
        ) from error
    for key in table:
        _check_known(key, SETTING_NAMES, str(home.config))
    return table


def _from_environment(environment: Mapping[str, str]) -> dict[str, object]:
    names = {_variable(key): key for key in SETTING_NAMES}
    layer: dict[str, object] = {}
    for variable, text in environment.items():
        if not variable.startswith(ENVIRONMENT_PREFIX) or variable == HOME_VARIABLE:
            continue
        _check_known(variable, (*names, HOME_VARIABLE), "the environment")
        layer[names[variable]] = text
    return layer


def _check_known(key: str, known: Sequence[str], place: str) -> None:
    if key not in known:
        raise UserError(
            "E002",
            f"{key!r} in {place} is not a setting{nearest(key, known)}",
            f"remove or correct it; the settings are {', '.join(known)}",
        )


def _parse(key: str, raw: object, number: str, source: str) -> object:
    try:
        return _PARSERS[key](raw)
    except ValueError as error:
        place = _variable(key) if source == "environment" else f"--{key.replace('_', '-')}"
        where = f"{key} in {source}" if number == "E002" and source != "environment" else place
        raise UserError(number, f"{where}: {error}", f"give {_WANTED[key]}") from error


def _as_endpoint(raw: object) -> Endpoint:
    if not isinstance(raw, str | int) or isinstance(raw, bool):
        raise ValueError(f"{raw!r} is not HOST:PORT")
    return parse_endpoint(str(raw))


def parse_page(raw: object) -> Endpoint | None:
    """As an endpoint, or None for ''. A bare port serves this machine only: a page that everybody
    can read is opened on purpose."""
    if raw == "":
        return None
    endpoint = _as_endpoint(raw)
    bare = str(raw).removeprefix(":").isdigit()
    return Endpoint("127.0.0.1", endpoint.port) if bare else endpoint


def _as_announce(raw: object) -> tuple[str, ...]:
    rows = [one.strip() for one in raw.split(",")] if isinstance(raw, str) else raw
    if not isinstance(rows, list | tuple) or not all(isinstance(one, str) for one in rows):
        raise ValueError(f"{raw!r} is not a list of addresses")
    if len(rows) > ANNOUNCE_MAX:
        raise ValueError(f"{len(rows)} addresses, at most {ANNOUNCE_MAX} are allowed")
    for one in rows:
        if not one.startswith("/") or text_fault(one, 256) or any(c.isspace() for c in one):
            raise ValueError(f"{one!r} is not a multiaddr such as /ip4/203.0.113.7/tcp/4001")
    return tuple(rows)


def _as_name(raw: object) -> str:
    if not isinstance(raw, str):
        raise ValueError(f"{raw!r} is not a text")
    if fault := text_fault(raw, NAME_CHARS_MAX):
        raise ValueError(f"the name {fault}")
    return raw.strip()


def _as_path(raw: object) -> str:
    if not isinstance(raw, str) or text_fault(raw, PATH_CHARS_MAX):
        raise ValueError(f"{raw!r} is not a path")
    return raw


def _shown(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, tuple):
        return ", ".join(value) or "-"
    return str(value).lower() if isinstance(value, bool) else str(value) or "-"


_PARSERS: Final[Mapping[str, Callable[[object], object]]] = {
    "listen": _as_endpoint,
    "announce": _as_announce,
    "threads": lambda raw: as_number(raw, int, 0, THREADS_MAX),
    "cpu_share": as_share,
    "name": _as_name,
    "outbound_only": as_bool,
    "roles": as_roles,
    "quic": as_bool,
    "codec": as_codec,
    "kernels": as_kernels,
    "lan": as_bool,
    "control_port": lambda raw: as_number(raw, int, 0, _PORT_MAX),
    "dashboard": parse_page,
    "link_file": _as_path,
    "yes": as_bool,
} | {key: parser for key, (parser, _) in LIMIT_PARSERS.items()}
_WANTED: Final[Mapping[str, str]] = {
    "listen": "HOST:PORT, for example 0.0.0.0:4001",
    "announce": "multiaddrs separated by commas, for example /ip4/203.0.113.7/tcp/4001",
    "threads": f"a number of threads from 1 to {THREADS_MAX}, or 0 for half of the cores",
    "cpu_share": "a share from 0.01 to 1, for example 0.5",
    "name": f"a name of at most {NAME_CHARS_MAX} visible characters",
    "outbound_only": "true or false",
    "roles": f'some of {", ".join(ROLES)}, for example ["train", "evaluate"]',
    "quic": "true or false",
    "codec": "auto, or one of " + ", ".join(CODEC_NAMES),
    "kernels": " or ".join(KERNELS),
    "lan": "true or false",
    "control_port": f"a port from 0 to {_PORT_MAX}",
    "dashboard": "HOST:PORT, for example 0.0.0.0:8080, or an empty text for no page",
    "link_file": "the path of a file, or an empty text for none",
    "yes": "true or false",
} | {key: wanted for key, (_, wanted) in LIMIT_PARSERS.items()}
