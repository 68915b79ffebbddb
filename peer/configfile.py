"""The configuration file, written for a person: every setting, what it does, and its default.

The lines are comments: what is not changed follows the defaults of later versions.
"""

from collections.abc import Mapping
from typing import Final

from dugnad.peer.config import Settings
from dugnad.peer.errors import UserError
from dugnad.peer.paths import Home, write_private

_HEAD: Final = """\
# What this machine lends, and when. Take away the "# " of a line to change a setting.
# The environment (DUGNAD_CPU_SHARE=0.5) and the command line (--set cpu_share=0.5) come before
# this file; `dugnad config` shows what holds and why. Read again when the daemon starts.
"""
SECTIONS: Final[Mapping[str, Mapping[str, str]]] = {
    "Processor and GPU": {
        "threads": "CPU threads of the learner; 0 is half of the cores",
        "cpu_share": "share of the time that they may be busy, 0.01 to 1 (quieter and cooler)",
        "cores": 'cores to stay on, such as "0,2-3"; empty is any',
        "kernels": '"auto": compiled arithmetic where numba is; "numpy": none, the same results',
        "gpu": '"all", "none", or device numbers such as "0,1"',
        "gpu_share": "share of the time that a GPU may be busy, 0.01 to 1",
        "gpu_only_when_idle": '"true", "false", or "auto": where use of the machine can be told',
    },
    "Memory and disk": {
        "memory_mb": "megabytes of memory in all; 0 is a quarter of the machine's, at most 4 GiB",
        "disk_gb": "gigabytes that the data folder may take; 0 is no limit",
        "keep_free_gb": "gigabytes of the disk that stay free; 0 is a tenth of it, at most 10",
        "context_s": "seconds between two captures of the training state; 0 keeps none",
    },
    "Network": {
        "mesh_max": "with more peers than this each speaks with six of them, and those pass it on",
        "buddy_s": "seconds between two drafts that a neighbour keeps for you; 0 sends none",
        "upload_mbit": "megabits a second at most; 0 is no limit",
        "download_mbit": "megabits a second at most; 0 is no limit",
        "codec": '"auto" follows what each link carries; or a codec such as "int4"',
        "quota_gb": "gigabytes up and down in 30 days; 0 is no limit",
        "listen": "where other peers reach this one; port 0 takes a free one",
        "announce": "multiaddrs to tell others instead, for a forwarded port",
        "outbound_only": "take no connections from others",
        "lan": "find peers of the run on the local network, and be found there (zeroconf)",
        "quic": "listen on QUIC, too, for networks that block TCP",
    },
    "When": {
        "roles": 'what it does: "train", "evaluate", "prepare" (units for those that train)',
        "hours": 'such as "mon-fri 18-24, sat-sun 0-24"; empty is always',
        "only_when_idle": "only when nobody uses this machine",
        "idle_minutes": "without keyboard and mouse for so long, nobody uses it",
        "on_battery": "train on battery, too",
        "cpu_temperature_max": "pause above so many °C; 0 is no ceiling",
        "gpu_temperature_max": "pause above so many °C; 0 is no ceiling",
        "pause_while": 'pause while one of these programs runs, such as ["blender", "steam"]',
    },
    "This peer": {
        "name": "what others see; empty is three words from the key",
        "dashboard": 'where to serve the public page, such as "0.0.0.0:8080"; empty is nowhere',
        "link_file": "a file to write the link of the run into; empty is none",
        "control_port": "port of the control API on 127.0.0.1; 0 takes a free one",
        "yes": "do not ask before the first run",
    },
}
"""Every setting once, and what it does in a line."""


def config_text() -> str:
    """The whole file."""
    defaults = Settings()
    lines = [_HEAD]
    for title, settings in SECTIONS.items():
        lines.append(f"# --- {title}\n")
        for key, text in settings.items():
            lines += [f"# {text}", f"# {key} = {_toml(getattr(defaults, key))}", ""]
    return "\n".join(lines)


def write_config(home: Home) -> None:
    """Writes the file; UserError E034 when there is one: it may hold somebody's choices."""
    if home.config.exists():
        raise UserError(
            "E034", f"{home.config} exists already", "edit it, or move it away to get a new one"
        )
    home.create()
    write_private(home.config, config_text().encode())


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, tuple):
        return "[" + ", ".join(f'"{one}"' for one in value) + "]"
    return '""' if value is None else f'"{value}"'
