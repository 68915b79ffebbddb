"""The manifest: what a run is, signed by its organiser. Its SHA-256 is the run's id.

Whoever joins gets it from a stranger, so `decode` trusts nothing: bounded, typed, canonical (the
bytes must be exactly those that this program would write), signed, and every number in range.
After that the rest of the program may rely on it. What is silent here (which peers there are, how
fast they are) is not part of what a run is.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from dugnad.averaging.codecs import CODECS, commit_codecs
from dugnad.averaging.coverage import UNIT_SEQUENCES_MAX
from dugnad.averaging.fragments import FragmentError, FragmentTable, build_table
from dugnad.averaging.merge import RULES
from dugnad.averaging.outer import OuterError, Rates, bits_of, float_of
from dugnad.averaging.tree import array_root
from dugnad.dht.ids import KEY_BYTES, PeerId, RunId
from dugnad.dht.plaintext import text_fault
from dugnad.dht.protocol import OLDEST, PROTOCOL, Spoken
from dugnad.dht.records import (
    NO_RUN,
    SIGNATURE_BYTES,
    RecordError,
    Signer,
    encode,
    framed,
    verify_ed25519,
)
from dugnad.dht.records import decode as decode_record
from dugnad.peer.corpus import SEQUENCES_MIN, CorpusError, DataIndex, sequence_count, split
from dugnad.peer.errors import UserError
from dugnad.peer.init import initial_parameters
from dugnad.peer.learner.schedule import OptimiserSettings
from dugnad.peer.modelconfig import ModelConfig
from dugnad.peer.runlimits import (
    ADMITTED_MAX,
    LICENCE_CHARS_MAX,
    NAME_CHARS_MAX,
    PURPOSE_CHARS_MAX,
    SEED_MAX,
    STEPS_MAX,
    TOKENS_MAX,
)
from dugnad.peer.views import printable

if TYPE_CHECKING:  # loads pydantic, which the daemon does not need
    from dugnad.peer.runfile import RunFile

FORMAT: Final = 2
"""Version of the layout of a manifest's bytes."""
MANIFEST_BYTES_MAX: Final = 4 << 20
"""The index of 64 GiB of text has 2 MiB, the table of a model of a thousand layers 1 MiB."""
LEANEST_COMMITS: Final = ((2, "int4"), (1, "int8"))
"""The leanest codec of commits by the protocol of the run, from the newest down."""
DATA_KINDS: Final = ("bytes",)
"""Kinds of data: text as bytes, a token each."""
PROCESS_BYTES: Final = 480 << 20
"""Memory of daemon, p2pd and learner before any model: about 100, 65 and 300 MiB."""
DAEMON_BYTES: Final = 180 << 20
"""Of these, what a peer needs without a learner: daemon, p2pd, and a block in work."""
FLOOR_MS_MAX: Final = 3_600_000
STALENESS_MAX: Final = 16
HORIZON_MAX: Final = 64
TIME_MS_MAX: Final = 1 << 48
_DOMAIN: Final = "manifest/1"
_ROOT_BYTES: Final = 32
_NUMBERS_SHOWN_MAX: Final = 1 << 31


class ManifestError(Exception):
    """A manifest that cannot be joined; `reason` says why and is safe to print."""

    def __init__(self, reason: str) -> None:
        self.reason = printable(reason, 300)
        super().__init__(self.reason)


class OtherVersion(ManifestError):
    """The manifest is of another protocol or format version, perhaps a later one."""

    def __init__(self, format: int, protocol: int) -> None:
        self.format = format
        self.protocol = protocol
        super().__init__(
            f"the run speaks protocol {protocol} (manifest format {format}), "
            f"this is protocol {Spoken(OLDEST, PROTOCOL)} (format {FORMAT})"
        )


class OtherRun(ManifestError):
    """The bytes are not those that the run id names."""

    def __init__(self) -> None:
        super().__init__("the manifest is of another run: its hash is not the run id")


class DataPlan(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The text of the run. Sequences [0, held_out_start) are trained on, the rest only measure.

    Sequence i is the context + 1 bytes from byte i × context. `root` is that of `index`.
    """

    kind: str
    root: bytes
    index: DataIndex
    sequences: int
    held_out_start: int
    context: int


class OuterPolicy(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The outer step: learning rate and momentum as the bits of float32, and the merging rule."""

    eta_bits: int
    mu_bits: int
    rule: str


class ExchangePolicy(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """When fragments merge and in what form (DESIGN.md section 8).

    `tokens_per_merge` 0 means: from `steps_per_merge` and the measured speed of the swarm.
    `staleness` is S and `horizon` is F.
    """

    steps_per_merge: int
    merge_floor_ms: int
    tokens_per_merge: int
    staleness: int
    horizon: int
    hand_in_codec: str
    commit_codec: str


class Manifest(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Everything that peers of a run must agree on. Make one with `build_manifest` or `decode`.

    `admission` holds the keys that may take part, ascending; empty means everybody. `v0_roots` are
    the roots of the fragments of version 0, whose momenta are zero. `batch_sequences` is in
    `inner`.
    """

    format: int
    protocol: int
    name: str
    purpose: str
    licence: str
    organiser: bytes
    created_ms: int
    model: ModelConfig
    table: FragmentTable
    data: DataPlan
    inner: OptimiserSettings
    outer: OuterPolicy
    exchange: ExchangePolicy
    unit_sequences: int
    token_budget: int
    admission: tuple[bytes, ...]
    seed: int
    v0_roots: tuple[bytes, ...]
    signature: bytes = b""

    @property
    def batch_sequences(self) -> int:
        """Sequences of one step of one peer."""
        return self.inner.batch_sequences

    def admits(self, peer: PeerId) -> bool:
        """Whether `peer` may take part; the organiser always may."""
        return not self.admission or peer == self.organiser or peer in self.admission


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes that a peer needs to train a model, and what they are for."""

    model: int
    processes: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.model + self.processes


def build_manifest(
    run_file: "RunFile", signer: Signer, index: DataIndex, *, created_ms: int
) -> Manifest:
    """The signed manifest of a new run. Computes version 0, which takes seconds for large models.

    UserError E012 when the run file and the text do not go together.
    """
    model = run_file.model.config()
    try:
        cut = split(index.size, model.context, 100.0 * run_file.data.held_out)
        table = build_table(model.tensor_specs(), run_file.exchange.fragments)
    except CorpusError as error:
        raise UserError("E012", f"[data] {error.reason}", error.fix) from error
    except FragmentError as error:
        raise UserError(
            "E012", f"exchange.fragments: {error.reason}", "ask for fewer fragments"
        ) from error
    exchange = run_file.exchange
    unsigned = Manifest(
        format=FORMAT,
        protocol=PROTOCOL,
        name=run_file.run.name,
        purpose=run_file.run.purpose,
        licence=run_file.run.licence,
        organiser=bytes(signer.peer),
        created_ms=created_ms,
        model=model,
        table=table,
        data=DataPlan(
            kind="bytes",
            root=index.root,
            index=index,
            sequences=cut.held_out.stop,
            held_out_start=cut.held_out.start,
            context=model.context,
        ),
        inner=run_file.optimiser(),
        outer=OuterPolicy(
            bits_of(exchange.outer_lr), bits_of(exchange.outer_momentum), exchange.rule
        ),
        exchange=ExchangePolicy(
            steps_per_merge=exchange.steps_per_merge,
            merge_floor_ms=round(1000 * exchange.merge_floor_s),
            tokens_per_merge=exchange.tokens_per_merge,
            staleness=exchange.staleness,
            horizon=exchange.horizon,
            hand_in_codec=exchange.hand_in_codec,
            commit_codec=exchange.commit_codec,
        ),
        unit_sequences=run_file.train.unit_sequences,
        token_budget=run_file.run.token_budget,
        admission=run_file.run.admitted(),
        seed=run_file.run.seed,
        v0_roots=version_0_roots(table, model, run_file.run.seed),
    )
    manifest = sign(unsigned, signer)
    validate(manifest)
    return manifest


def version_0_roots(table: FragmentTable, model: ModelConfig, seed: int) -> tuple[bytes, ...]:
    """The root of each fragment's parameters at version 0."""
    flat = initial_parameters(table, model, seed)
    return tuple(
        array_root(np.ascontiguousarray(flat[offset : offset + size]))
        for offset, size in zip(table.offsets, table.sizes, strict=True)
    )


def sign(manifest: Manifest, signer: Signer) -> Manifest:
    """`manifest` with the signature of its organiser."""
    assert signer.peer == manifest.organiser, "only the organiser signs a manifest"
    signature = signer.sign(_signed_bytes(manifest))
    return msgspec.structs.replace(manifest, signature=signature)


def encode_manifest(manifest: Manifest) -> bytes:
    """The bytes that the run id names."""
    return encode(manifest)


def run_id(manifest: Manifest) -> RunId:
    """The run's id: SHA-256 of the encoded manifest, its signature included."""
    return RunId(hashlib.sha256(encode_manifest(manifest)).digest())


def decode_manifest(data: bytes, run: RunId | None = None) -> Manifest:
    """The manifest in foreign bytes, fully checked; with `run`, it must be that run's.

    ManifestError with the reason otherwise (OtherRun, or OtherVersion of the protocol).
    """
    if len(data) > MANIFEST_BYTES_MAX:
        raise ManifestError(f"a manifest of {len(data)} bytes, more than {MANIFEST_BYTES_MAX}")
    if run is not None and hashlib.sha256(data).digest() != run:
        raise OtherRun
    _check_versions(data)
    try:
        manifest = decode_record(data, Manifest, MANIFEST_BYTES_MAX)
    except RecordError as error:
        raise ManifestError(error.reason) from error
    if encode_manifest(manifest) != data:
        raise ManifestError("the manifest is not encoded in the one proper way")
    validate(manifest)
    return manifest


def validate(manifest: Manifest) -> None:
    """ManifestError unless every part is in range, fits the others, and all of it is signed."""
    if not _readable(manifest.format, manifest.protocol):
        raise OtherVersion(manifest.format, manifest.protocol)
    for check in _CHECKS:
        if fault := check(manifest):
            raise ManifestError(fault)


def leanest_commit(manifest: Manifest) -> str:
    """No commit of this run may be in a coarser codec: what all its peers can read."""
    return next(codec for since, codec in LEANEST_COMMITS if manifest.protocol >= since)


def memory_need(manifest: Manifest) -> MemoryNeed:
    """What a peer of this run needs."""
    return memory_need_of(manifest.model)


def memory_need_of(model: ModelConfig) -> MemoryNeed:
    """What training `model` takes, with the smallest micro-batch: about 50 bytes a parameter."""
    return MemoryNeed(model=model.memory_bytes(1), processes=PROCESS_BYTES)


def evaluating_need(manifest: Manifest) -> MemoryNeed:
    """What a peer needs that only evaluates: about 40 bytes a parameter."""
    return MemoryNeed(model=manifest.model.evaluating_bytes(), processes=PROCESS_BYTES)


def preparing_need(manifest: Manifest) -> MemoryNeed:
    """What a peer needs that only prepares units: it has no learner."""
    return MemoryNeed(model=manifest.model.merging_bytes(), processes=DAEMON_BYTES)


def check_memory(need: MemoryNeed, have: int) -> None:
    """UserError E021, with both numbers, when `have` bytes are too few."""
    if need.total > have:
        raise UserError(
            "E021",
            f"the model needs {_megabytes(need.total)} of memory, this machine has "
            f"{_megabytes(have)} free",
            "close other programs, or join from a machine with more memory",
        )


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"


def _signed_bytes(manifest: Manifest) -> bytes:
    return framed(_DOMAIN, NO_RUN, encode(msgspec.structs.replace(manifest, signature=b"")))


def _readable(format: int, protocol: int) -> bool:
    """Whether this release takes part in runs of those versions."""
    return format == FORMAT and OLDEST <= protocol <= PROTOCOL


def _check_versions(data: bytes) -> None:
    """Later versions may have another layout: the first two numbers are read before all else."""
    try:
        head = msgspec.msgpack.decode(data, type=list[msgspec.Raw])[:2]
        numbers = [msgspec.msgpack.decode(raw, type=int) for raw in head]
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
        raise ManifestError(f"not a manifest: {error}") from None
    if len(numbers) < 2 or not all(0 <= number < _NUMBERS_SHOWN_MAX for number in numbers):
        raise ManifestError("not a manifest: it does not begin with its versions")
    if not _readable(numbers[0], numbers[1]):
        raise OtherVersion(numbers[0], numbers[1])


# Each check returns '' or a reason. Their order matters: sizes before what is computed from them.


def _text_faults(m: Manifest) -> str:
    bounds = {"name": NAME_CHARS_MAX, "purpose": PURPOSE_CHARS_MAX, "licence": LICENCE_CHARS_MAX}
    for field, limit in bounds.items():
        text = getattr(m, field)
        if fault := text_fault(text, limit):
            return f"its {field} {fault}"
        if not text.strip():
            return f"its {field} is empty"
    return ""


def _key_faults(m: Manifest) -> str:
    if len(m.organiser) != KEY_BYTES:
        return "its organiser is not a key"
    if len(m.admission) > ADMITTED_MAX:
        return f"it admits {len(m.admission)} keys, at most {ADMITTED_MAX} are allowed"
    if any(len(key) != KEY_BYTES for key in m.admission):
        return "its admission list holds something that is not a key"
    if list(m.admission) != sorted(set(m.admission)):
        return "its admission list is not in order"
    return ""


def _number_faults(m: Manifest) -> str:
    return (
        _outside("created_ms", m.created_ms, 0, TIME_MS_MAX)
        or _outside("unit_sequences", m.unit_sequences, 1, UNIT_SEQUENCES_MAX)
        or _outside("token_budget", m.token_budget, 1, TOKENS_MAX)
        or _outside("seed", m.seed, 0, SEED_MAX)
    )


def _table_faults(m: Manifest) -> str:
    try:
        m.table.validate()
    except FragmentError as error:
        return f"its fragment table is wrong: {error.reason}"
    if list(m.table.tensors) != m.model.tensor_specs():
        return "its fragment table is not that of its model"
    if len(m.v0_roots) != len(m.table.fragments):
        return "it does not name a root of version 0 for each fragment"
    if any(len(root) != _ROOT_BYTES for root in m.v0_roots):
        return "a root of version 0 has the wrong length"
    return ""


def _data_faults(m: Manifest) -> str:
    data = m.data
    if data.kind not in DATA_KINDS:
        return f"data of kind {data.kind!r} is unknown"
    if data.root != data.index.root:
        return "its data root is not that of its data index"
    if data.context != m.model.context:
        return "its data is cut for another context than the model's"
    if data.sequences != sequence_count(data.index.size, data.context):
        return "its number of sequences is not that of its data"
    if not SEQUENCES_MIN <= data.held_out_start < data.sequences:
        return "it has too few sequences to train on, or none to measure with"
    return ""


def _exchange_faults(m: Manifest) -> str:
    outer, exchange = m.outer, m.exchange
    try:
        Rates.of_bits(eta_bits=outer.eta_bits, mu_bits=outer.mu_bits)
    except OuterError as error:
        return error.reason
    if outer.rule not in RULES:
        return f"the merging rule {outer.rule!r} is unknown"
    for codec in (exchange.hand_in_codec, exchange.commit_codec):
        if codec not in CODECS:
            return f"the codec {codec!r} is unknown"
    if exchange.commit_codec not in commit_codecs(leanest_commit(m)):
        return f"the codec {exchange.commit_codec!r} is too coarse for commits"
    return (
        _outside("steps_per_merge", exchange.steps_per_merge, 1, STEPS_MAX)
        or _outside("merge_floor_ms", exchange.merge_floor_ms, 1, FLOOR_MS_MAX)
        or _outside("tokens_per_merge", exchange.tokens_per_merge, 0, TOKENS_MAX)
        or _outside("staleness", exchange.staleness, 1, STALENESS_MAX)
        or _outside("horizon", exchange.horizon, exchange.staleness, HORIZON_MAX)
    )


def _signature_faults(m: Manifest) -> str:
    if len(m.signature) != SIGNATURE_BYTES:
        return "it is not signed"
    if not verify_ed25519(PeerId(m.organiser), _signed_bytes(m), m.signature):
        return "its organiser's signature does not hold"
    return ""


def _outside(name: str, value: int, low: int, high: int) -> str:
    return "" if low <= value <= high else f"its {name} {value} is not between {low} and {high}"


_CHECKS: Final[tuple[Callable[[Manifest], str], ...]] = (
    _text_faults,
    _key_faults,
    _number_faults,
    _table_faults,
    _data_faults,
    _exchange_faults,
    _signature_faults,
)


def describe(manifest: Manifest) -> list[tuple[str, str]]:
    """What a person should know of a run before joining: rows of (what, text)."""
    data, exchange = manifest.data, manifest.exchange
    return [
        ("run", manifest.name),
        ("purpose", manifest.purpose),
        ("licence", manifest.licence),
        ("model", f"{manifest.table.total:,} parameters, context {manifest.model.context}"),
        ("data", f"{_megabytes(data.index.size)} of text in {len(data.index.hashes)} shards"),
        ("budget", f"{manifest.token_budget:,} tokens"),
        (
            "merging",
            f"{len(manifest.table.fragments)} fragments, every {exchange.steps_per_merge} steps, "
            f"{manifest.outer.rule}, outer rate {float_of(manifest.outer.eta_bits):.3g}, "
            f"momentum {float_of(manifest.outer.mu_bits):.3g}",
        ),
        ("admission", f"{len(manifest.admission)} keys" if manifest.admission else "open"),
    ]
