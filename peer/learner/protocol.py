"""What the daemon and its learner say to each other over a socket pair, as typed, bounded messages.

Each message is msgpack behind a 4-byte big-endian length. Both directions keep order, and the
learner sends the Step messages of all steps up to t before a Copied or Added that names step t.
Verbs take effect at step boundaries, in the order they came. Whoever hears something malformed ends
the conversation.
"""

import struct
from typing import Final, Literal

import msgspec

from dugnad.averaging.fragments import FragmentTable
from dugnad.peer.learner.schedule import OptimiserSettings
from dugnad.peer.modelconfig import ModelConfig

FRAME_BYTES_MAX: Final = 8 << 20
"""A Start with the fragment table of a deep model has about 1 MB; nothing else comes near."""
WORK_SEQUENCES_MAX: Final = 1 << 16
"""Sequences of one unit: a minute's work of a machine that does 140 k tokens/s at context 128."""
QUEUED_SEQUENCES_MAX: Final = 1 << 18
"""Sequences queued in the learner: four units of the largest size, 2 MB of numbers."""
EVALUATE_SEQUENCES_MAX: Final = 4096
"""Sequences of one evaluation: training stands still meanwhile, so ask for what takes seconds."""
PROMPT_BYTES_MAX: Final = 4096
SAMPLE_BYTES_MAX: Final = 4096
"""Text to write in one go: each byte costs a forward pass while training stands still."""
PROVE_CHAINS_MAX: Final = 64
"""Chains of one Prove (``averaging.trial``)."""
PROVE_SEQUENCES_MAX: Final = 1 << 16
"""Sequences of one Prove: a second's work at 8 M tokens/s and context 128."""
REASON_CHARS_MAX: Final = 2000
RANDOM_BYTES_MAX: Final = 1 << 16
"""State of a random generator: torch's on the CPU takes 5056 bytes."""
VECTORS_CAPTURED: Final = 3
"""Parameters and Adam's two moments."""

EXIT_DISCONNECTED: Final = 10
"""The socket was closed: the daemon is gone."""
EXIT_OUT_OF_MEMORY: Final = 11
"""Not even one sequence at a time fits."""
EXIT_PROTOCOL: Final = 12
"""The daemon sent something malformed."""
EXIT_UNFIT: Final = 13
"""Start cannot be met, or the loss is no longer finite: start again from the anchors."""

DeviceChoice = str
"""`auto` (the fastest measured), `cpu`, `cuda`, `cuda:1`, `mps`, `xpu`."""
DtypeChoice = Literal["auto", "float32", "bfloat16"]
"""`auto`: float32, and bfloat16 autocast only where it was measured faster."""


class ProtocolError(Exception):
    """The other side broke the protocol: the text says how."""


class RegionFds(msgspec.Struct, frozen=True):
    """Descriptors of the shared vectors, inherited under the same numbers.

    The learner writes `out` (Copied), reads `inward` (AddIn) and `anchor` (Start, Evaluate,
    Sample). `capture` holds parameters and Adam's two moments one after the other; the learner
    writes it (Captured) and reads the moments from it (Start.resume). -1: there is none.
    """

    out: int
    inward: int
    anchor: int
    capture: int = -1


class InnerState(msgspec.Struct, frozen=True):
    """The small part of a learner's state; the large part lies in the capture region.

    `random` is torch's CPU generator. No device is part of the format: `device`, `dtype` and
    `micro_batch` say how it was trained, and are used again where the machine offers the same.
    """

    optimiser_steps: int
    swarm_tokens: int
    random: bytes
    device: str
    dtype: str
    micro_batch: int

    def __post_init__(self) -> None:
        if self.optimiser_steps < 0 or self.swarm_tokens < 0 or self.micro_batch < 1:
            raise ValueError("a learner's state with a number out of range")
        if len(self.random) > RANDOM_BYTES_MAX:
            raise ValueError(f"more than {RANDOM_BYTES_MAX} bytes of a random generator")


class Start(msgspec.Struct, frozen=True, tag="start"):
    """First message: all that the learner works with. Its parameters come from the anchor region.

    `tokens_fd` is a file of bytes; sequence i starts at byte i × context. `micro_batch` 0 means
    probe, no further than `micro_batch_max` where that is not 0. `forward_only`: it only evaluates,
    and takes no memory for training. `cpu_share` caps the CPU time used per thread, `gpu_share` a
    device's time, by resting after each step. With `resume` it goes on from a captured state, whose
    moments lie in the capture region.
    """

    config: ModelConfig
    table: FragmentTable
    optimiser: OptimiserSettings
    regions: RegionFds
    tokens_fd: int
    threads: int = 1
    device: DeviceChoice = "auto"
    dtype: DtypeChoice = "auto"
    micro_batch: int = 0
    micro_batch_max: int = 0
    forward_only: bool = False
    cpu_share: float = 1.0
    gpu_share: float = 1.0
    seed: int = 0
    first_step: int = 0
    resume: InnerState | None = None


class Work(msgspec.Struct, frozen=True, tag="work"):
    """Train on these sequences of unit (epoch, index), the first of them at position `start` in it.

    `swarm_tokens`: tokens that the whole swarm has merged, for the learning rate.
    """

    epoch: int
    index: int
    start: int
    sequences: list[int]
    swarm_tokens: int

    def __post_init__(self) -> None:
        if len(self.sequences) > WORK_SEQUENCES_MAX:
            raise ValueError(f"more than {WORK_SEQUENCES_MAX} sequences in one Work")


class CopyOut(msgspec.Struct, frozen=True, tag="copy_out"):
    """Copy a fragment's parameters to the out region; answered by Copied."""

    ticket: int
    fragment: int


class AddIn(msgspec.Struct, frozen=True, tag="add_in"):
    """Add the fragment's part of the inward region to the parameters; answered by Added."""

    ticket: int
    fragment: int


class Capture(msgspec.Struct, frozen=True, tag="capture"):
    """Copy the whole training state to the capture region; answered by Captured."""

    ticket: int


class Evaluate(msgspec.Struct, frozen=True, tag="evaluate"):
    """Loss of the parameters in the anchor region; answered by Evaluated. Training is not
    disturbed.
    """

    ticket: int
    sequences: list[int]

    def __post_init__(self) -> None:
        if not 1 <= len(self.sequences) <= EVALUATE_SEQUENCES_MAX:
            raise ValueError(f"evaluate 1 to {EVALUATE_SEQUENCES_MAX} sequences")


class Sample(msgspec.Struct, frozen=True, tag="sample"):
    """Continue `prompt` by `length` bytes with the parameters in the anchor region."""

    ticket: int
    prompt: bytes
    length: int
    seed: int

    def __post_init__(self) -> None:
        if len(self.prompt) > PROMPT_BYTES_MAX or not 1 <= self.length <= SAMPLE_BYTES_MAX:
            raise ValueError(f"prompt ≤ {PROMPT_BYTES_MAX}, length 1 to {SAMPLE_BYTES_MAX} bytes")


class Prove(msgspec.Struct, frozen=True, tag="prove"):
    """Train each of these chains from the anchor region with fresh moments, `steps` steps each,
    beside what is being trained; answered by Proved. The anchor region must stay until then.
    """

    ticket: int
    chains: list[list[int]]
    steps: int

    def __post_init__(self) -> None:
        sizes = [len(chain) for chain in self.chains]
        if not 1 <= len(sizes) <= PROVE_CHAINS_MAX or sum(sizes) > PROVE_SEQUENCES_MAX:
            raise ValueError(f"prove 1 to {PROVE_CHAINS_MAX} chains")
        if self.steps < 1 or any(not size or size % self.steps for size in sizes):
            raise ValueError("a chain has equally many sequences in each of its steps")


class Pause(msgspec.Struct, frozen=True, tag="pause"):
    """Train no further; verbs are still answered and the queue is kept."""


class Resume(msgspec.Struct, frozen=True, tag="resume"):
    """Undo Pause."""


class SetMicroBatch(msgspec.Struct, frozen=True, tag="set_micro_batch"):
    """Use this many sequences at a time from the next step on."""

    sequences: int

    def __post_init__(self) -> None:
        if self.sequences < 1:
            raise ValueError("a micro-batch has at least one sequence")


class SetCpuShare(msgspec.Struct, frozen=True, tag="set_cpu_share"):
    """Change the cap of Start.cpu_share from the next step on."""

    share: float

    def __post_init__(self) -> None:
        if not 0.0 < self.share <= 1.0:
            raise ValueError("cpu_share must lie between 0 (exclusive) and 1")


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """End the process after the messages before this one."""


ToLearner = (
    Start
    | Work
    | CopyOut
    | AddIn
    | Capture
    | Evaluate
    | Sample
    | Prove
    | Pause
    | Resume
    | SetMicroBatch
    | SetCpuShare
    | Stop
)


class Piece(msgspec.Struct, frozen=True):
    """Positions start to stop (exclusive) of unit (epoch, index)."""

    epoch: int
    index: int
    start: int
    stop: int


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Answer to Start: what was chosen by measurement. `tokens_per_s` is forward and backward
    only.
    """

    device: str
    dtype: str
    micro_batch: int
    tokens_per_s: float
    threads: int


class Spent(msgspec.Struct, frozen=True):
    """Seconds besides training steps: serving the exchange, other work that it was asked for,
    resting to keep to its owner's share, and without work to do."""

    served: float = 0.0
    asked: float = 0.0
    rested: float = 0.0
    starved: float = 0.0

    def __add__(self, other: "Spent") -> "Spent":
        return Spent(
            self.served + other.served,
            self.asked + other.asked,
            self.rested + other.rested,
            self.starved + other.starved,
        )


class Step(msgspec.Struct, frozen=True, tag="step"):
    """One optimiser step is done. `step` counts them from first_step + 1; `loss` is in nats a
    token.

    `skipped`: the loss or gradient was not finite, so nothing was learned and `tokens` is 0; the
    pieces were taken from the queue all the same. `queued_sequences`: left to train on. `spent`:
    since the step before, or since Ready.
    """

    step: int
    tokens: int
    loss: float
    seconds: float
    pieces: tuple[Piece, ...]
    queued_sequences: int
    learning_rate: float
    micro_batch: int
    skipped: bool = False
    spent: Spent = Spent()


class Copied(msgspec.Struct, frozen=True, tag="copied"):
    """The out region holds the fragment as it was after `step`; training stood still for
    `seconds`.
    """

    ticket: int
    fragment: int
    step: int
    seconds: float


class Added(msgspec.Struct, frozen=True, tag="added"):
    """The fragment was added to between `step` and the next; training stood still for `seconds`."""

    ticket: int
    fragment: int
    step: int
    seconds: float


class Captured(msgspec.Struct, frozen=True, tag="captured"):
    """The capture region holds the state after `step`; training stood still for `seconds`."""

    ticket: int
    step: int
    inner: InnerState
    seconds: float


class Evaluated(msgspec.Struct, frozen=True, tag="evaluated"):
    """Mean loss in nats a token over `tokens`; training stood still for `seconds`."""

    ticket: int
    loss: float
    tokens: int
    seconds: float


class Sampled(msgspec.Struct, frozen=True, tag="sampled"):
    """What the model wrote, without the prompt."""

    ticket: int
    text: bytes


class Proved(msgspec.Struct, frozen=True, tag="proved"):
    """The last loss and gradient norm of each chain; none when memory did not suffice, or when the
    learner is paused.
    """

    ticket: int
    values: tuple[tuple[float, float], ...]


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The learner cannot go on and ends after this message."""

    reason: str


class Idle(msgspec.Struct, frozen=True, tag="idle"):
    """The queue is empty; said once until work comes."""


FromLearner = (
    Ready | Step | Copied | Added | Captured | Evaluated | Sampled | Proved | Failed | Idle
)

_LENGTH: Final = struct.Struct(">I")
_encoder: Final = msgspec.msgpack.Encoder()
_to_learner: Final = msgspec.msgpack.Decoder(ToLearner)
_from_learner: Final = msgspec.msgpack.Decoder(FromLearner)


def pack(message: ToLearner | FromLearner) -> bytes:
    """One frame. ProtocolError if the message is too large to be accepted."""
    body = _encoder.encode(message)
    if len(body) > FRAME_BYTES_MAX:
        raise ProtocolError(f"{type(message).__name__} of {len(body)} bytes is too large")
    return _LENGTH.pack(len(body)) + body


def unpack_to_learner(body: bytes) -> ToLearner:
    """Decode a frame's body in the learner. ProtocolError on anything else."""
    try:
        return _to_learner.decode(body)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"the daemon sent a malformed message: {error}") from error


def unpack_from_learner(body: bytes) -> FromLearner:
    """Decode a frame's body in the daemon. ProtocolError on anything else."""
    try:
        return _from_learner.decode(body)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"the learner sent a malformed message: {error}") from error


class FrameReader:
    """Cuts a byte stream into frame bodies; holds at most one frame and one read."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Bodies that are complete now. ProtocolError on a frame above FRAME_BYTES_MAX."""
        self._buffer += data
        bodies: list[bytes] = []
        at = 0
        while len(self._buffer) >= at + _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, at)
            if length > FRAME_BYTES_MAX:
                raise ProtocolError(f"frame of {length} bytes is too large")
            stop = at + _LENGTH.size + length
            if len(self._buffer) < stop:
                break
            bodies.append(bytes(self._buffer[at + _LENGTH.size : stop]))
            at = stop
        del self._buffer[:at]
        return bodies
