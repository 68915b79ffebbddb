"""What a simulated swarm is like: how many peers, how they merge, how bad the network is."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final

from dugnad.averaging.lineage import LineageRules
from dugnad.dht.ids import RunId
from dugnad.dht.roster import MESH_MAX

RUN: Final = RunId(hashlib.sha256(b"simulated run").digest())
SEQUENCE_TOKENS: Final = 16
UNIT_SEQUENCES: Final = 4
"""Sequences of a work unit: a second of one learner's work."""
EPOCH_SEQUENCES: Final = 1024
"""Sequences of an epoch: a scenario passes some, so that their ends are played, too."""
WALL_START_S: Final = 1_700_000_000.0


@dataclass(frozen=True, slots=True)
class Weather:
    """How bad the network and the machines are. Seconds and probabilities."""

    latency_low_s: float = 0.005
    latency_high_s: float = 0.15
    """Each directed link has a median between these ..."""
    jitter: float = 0.0
    """... and each message a log-normal factor on it with this sigma (scenarios: see there)."""
    reorder: float = 0.0
    """A message is held back by one to four medians more."""
    up_bytes_s: float = 0.0
    """A host's uplink in bytes a second, shared by all that it sends; 0: without end."""
    down_bytes_s: float = 0.0
    loss: float = 0.0
    """A control message vanishes (a stream that broke and came back)."""
    duplication: float = 0.0
    send_loss: float = 0.0
    """A contribution's stream breaks; half of the time after the payload arrived."""
    fetch_loss: float = 0.0
    detect_low_s: float = 0.02
    detect_high_s: float = 0.5
    job_high_s: float = 0.1
    """Merging, encoding and signing take up to this long."""


@dataclass(frozen=True, slots=True)
class WorldSettings:
    """One simulated swarm."""

    seed: int
    peers: int = 4
    fragments: int = 1
    size: int = 24
    interval_s: float = 4.0
    merge_floor_s: float = 0.5
    step_s: float = 0.25
    codec: str = "int8"
    commit_codec: str = ""
    """'': int8, or float32 where hand-ins are."""
    rule: str = "mean"
    eta: float = 0.7
    mu: float = 0.5
    staleness: int = 2
    horizon: int = 4
    member_versions: int = 8
    token_budget: int = 0
    roster: bool = False
    """Peers find out with rosters of their own who is there (:class:`Stage` only); else they are
    told, a moment later than it happens."""
    pieces: bool = False
    """Whole anchors come in pieces from several donors (:class:`Stage` only); else from one."""
    mesh_max: int = MESH_MAX
    links: int = 0
    """With more than ``mesh_max`` peers each keeps streams with some (rosters only)."""
    units: bool = False
    """Peers share work by cores of their own (:class:`Stage` only); else units are numbered."""
    weather: Weather = Weather()

    def lineage(self, fragment: int, theta_root: bytes) -> LineageRules:
        """The rules of one fragment whose version 0 has this root."""
        return LineageRules(
            run=RUN,
            fragment=fragment,
            staleness=self.staleness,
            horizon=self.horizon,
            member_versions=self.member_versions,
            merge_floor_ms=int(self.merge_floor_s * 1000),
            genesis_theta_root=theta_root,
            genesis_time_ms=int(WALL_START_S * 1000) - 60_000,
            sequence_tokens=SEQUENCE_TOKENS,
            token_budget=self.token_budget,
        )
