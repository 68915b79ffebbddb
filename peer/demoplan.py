"""What the demo will do: how many peers, who is killed and when, and the run file that they train.

Pure arithmetic. The sizes are constants with their reasons; what depends on the machine (how often
to merge, where the learning rate ends) follows from the speed that was measured on it.
"""

import os
from dataclasses import dataclass
from typing import Final

import msgspec

from dugnad.peer.modelconfig import ModelConfig
from dugnad.peer.runfile import RunFile, parse_run_file

MODEL: Final = ModelConfig(dim=96, layers=3, heads=4, hidden=256, context=64)
"""357 k parameters: half of a core trains about 9,000 tokens/s on it, so a minute brings a byte
model from noise to words, and a fragment of 90 kB (int8) is large enough to be worth pulling."""
BATCH_SEQUENCES: Final = 4
"""256 tokens a step, some 30 steps a second on half of a core. Small batches are where a swarm
helps: with 256 tokens and 1,600 steps four peers were 0.10 to 0.15 nats below one of them alone,
with 1,024 tokens and 400 steps 0.02 (benchmarks/learns.py)."""
UNIT_SEQUENCES: Final = 128
"""8,192 tokens, about a second of a peer's work: a killed peer leaves little to do again."""
FRAGMENTS: Final = 4
MERGE_S: Final = 2.0
"""A fragment merges about this often, so that the swarm merges one every half second; each learner
takes dozens of steps between two."""
STEPS_PER_MERGE_MIN: Final = 8
"""On a slow machine: below this the exchange would cost more than it carries."""
STEPS_PER_MERGE_MAX: Final = 400
LEARNING_RATE: Final = 3e-3
"""Half a million parameters stand 3e-3 with warm-up and clipping; less learns less in a minute."""
MIN_LEARNING_RATE: Final = 3e-4
WARMUP_SHARE: Final = 0.05
"""Of the decay's tokens; dozens of steps of each peer."""
SPEED_SHARE: Final = 0.8
"""What the swarm merges beside what its learners could train, alone and without a pause: start-up,
evaluations and what the daemons take. The learning rate should end with the demo, not before."""
BUDGET_FACTOR: Final = 100
"""The run must not end by its own budget before the demo's time is over."""
MACHINE_SHARE: Final = 0.95
"""Of the cores, for all learners together; the rest is for daemons, p2pds and this process."""
SHARE_MIN: Final = 0.01
"""The smallest cap that `--cpu-share` takes."""
KILL_AT: Final = 0.40
"""Part of the time after which a peer is killed: everybody has merged by then."""
JOIN_AT: Final = 0.55
"""Part of the time after which the late peer joins: the loss has been dealt with by then."""


@dataclass(frozen=True, slots=True)
class DemoPlan:
    """What was asked for. `seconds` of training, counted from the first peer's link."""

    peers: int
    seconds: float
    churn: bool
    control: bool
    seed: int
    cores: int

    @property
    def victim(self) -> int | None:
        """Which peer is killed, counted from 0 (the organiser); None: nobody. A lone peer is
        spared, since nobody would be left to go on. It is another one with every seed.
        """
        return self.seed % self.peers if self.churn and self.peers > 1 else None

    @property
    def host(self) -> int:
        """The survivor whose link the late peer gets."""
        return 0 if self.victim is None else (self.victim + 1) % self.peers

    @property
    def cpu_share(self) -> float:
        """Cap of each learner's one thread, so that peers which share the machine are equal."""
        share = self.cores / self.peers * MACHINE_SHARE
        return max(SHARE_MIN, min(1.0, round(share, 3)))

    @property
    def kill_at_s(self) -> float:
        """When the victim is killed, in seconds from the first link."""
        return KILL_AT * self.seconds

    @property
    def join_at_s(self) -> float:
        """When the late peer's command is given, in seconds from the first link."""
        return JOIN_AT * self.seconds

    def steps_per_merge(self, tokens_per_s: float) -> int:
        """Steps of a peer in MERGE_S, on a machine where one free thread trains `tokens_per_s`."""
        step_s = BATCH_SEQUENCES * MODEL.context / max(1.0, tokens_per_s * self.cpu_share)
        return min(STEPS_PER_MERGE_MAX, max(STEPS_PER_MERGE_MIN, round(MERGE_S / step_s)))

    def decay_tokens(self, tokens_per_s: float) -> int:
        """Tokens that the swarm will have merged at the end, at that speed; at least a step."""
        swarm = tokens_per_s * self.cpu_share * self.peers * SPEED_SHARE
        return max(BATCH_SEQUENCES * MODEL.context, round(swarm * self.seconds))


def cores() -> int:
    """Processors that this process may use."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    return len(allowed) if allowed else os.cpu_count() or 1


def run_text(plan: DemoPlan, tokens_per_s: float) -> str:
    """The run file, TOML, for a machine where one free thread trains `tokens_per_s`."""
    decay = plan.decay_tokens(tokens_per_s)
    sizes = {k: v for k, v in msgspec.structs.asdict(MODEL).items() if k in _WRITTEN_SIZES}
    model = "\n".join(f"{key} = {value}" for key, value in sizes.items())
    return f"""\
[run]
name = "Demo: State of the Union"
purpose = "Shows on one machine how a swarm trains a small model of presidential speeches."
licence = "CC0-1.0"
token_budget = {decay * BUDGET_FACTOR}
admission = "open"
seed = {plan.seed}

[model]
{model}

[data]
source = "sotu"
held_out = 0.02

[train]
batch_sequences = {BATCH_SEQUENCES}
unit_sequences = {UNIT_SEQUENCES}
learning_rate = {LEARNING_RATE}
min_learning_rate = {MIN_LEARNING_RATE}
warmup_tokens = {int(decay * WARMUP_SHARE)}
decay_tokens = {decay}

[exchange]
fragments = {FRAGMENTS}
steps_per_merge = {plan.steps_per_merge(tokens_per_s)}
merge_floor_s = 0.5
"""


def run_file(plan: DemoPlan, tokens_per_s: float) -> RunFile:
    """What `run_text` says, checked."""
    return parse_run_file(run_text(plan, tokens_per_s), "the demo's run file")


_WRITTEN_SIZES: Final = ("dim", "layers", "heads", "hidden", "context")
