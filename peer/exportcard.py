"""The model card: what a run's exported model is, who made it, and under which licence.

Everything in it that peers or the organiser wrote is foreign text: one line, no control characters,
and nothing that Markdown or YAML would take for markup.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Final

from dugnad.averaging.board import Board
from dugnad.averaging.tree import Vector
from dugnad.dht.ids import RunId, run_text
from dugnad.peer.manifest import Manifest, describe
from dugnad.peer.views import printable

CONTRIBUTORS_SHOWN_MAX: Final = 1000
"""Rows of the card's table; the rest is one line, and the receipts have all of them."""
TEXT_CHARS_MAX: Final = 300
CARD: Final = "README.md"


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """A run's agreed model at one moment: version and tokens of each fragment, and all parameters
    as one flat vector. ``board`` None: the receipts are not known where this was taken."""

    run: RunId
    manifest: Manifest
    versions: tuple[int, ...]
    tokens: int
    theta: Vector
    board: Board | None

    @property
    def finished(self) -> bool:
        """Whether the run has reached its token budget."""
        return self.tokens >= self.manifest.token_budget


def model_card(snapshot: Snapshot) -> bytes:
    """The content of `README.md`, with the metadata block that model hubs read."""
    manifest = snapshot.manifest
    facts = [(what, plain(text)) for what, text in describe(manifest)]
    state = "reached its token budget" if snapshot.finished else "was still being trained"
    lines = [
        "---",
        f"license: {json.dumps(_licence(manifest.licence))}",
        f"license_name: {json.dumps(printable(manifest.licence, TEXT_CHARS_MAX))}",
        "library_name: transformers",
        "pipeline_tag: text-generation",
        "---",
        "",
        f"# {plain(manifest.name)}",
        "",
        f"Trained with dugnad by volunteers' machines. The run {state}: "
        f"{snapshot.tokens:,} of {manifest.token_budget:,} tokens.",
        "",
        f"* run id: `{run_text(snapshot.run)}`",
        f"* versions of its {len(snapshot.versions)} fragments: "
        + ", ".join(str(one) for one in snapshot.versions),
        *(f"* {what}: {text}" for what, text in facts if what != "run"),
        "",
        "Tokens are bytes of UTF-8. The files are in the layout of transformers' Llama:",
        "",
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        'model = AutoModelForCausalLM.from_pretrained(".")',
        'tokenizer = AutoTokenizer.from_pretrained(".")',
        "```",
        "",
        "## Contributors",
        "",
        *_contributors(snapshot.board),
        "",
        f"## Licence\n\n{plain(manifest.licence)}",
        "",
    ]
    return "\n".join(lines).encode()


def plain(text: str) -> str:
    """Foreign text on one line, in which Markdown finds no markup."""
    return re.sub(r"([\\`*_{}\[\]<>()#+!|~$&-])", r"\\\1", printable(text, TEXT_CHARS_MAX))


def _contributors(board: Board | None) -> list[str]:
    if board is None:
        return ["The receipts were not known where this was exported; any peer's board has them."]
    if not board.rows:
        return ["Nothing is credited yet."]
    lines = [
        f"From {board.receipts:,} receipts by the formula {board.formula}; provisional: not settled"
        " yet.",
        "",
        "| contributor | peer | tokens | provisional |",
        "| --- | --- | ---: | ---: |",
    ]
    lines += [
        f"| {plain(row.name)} | `{row.peer}` | {row.tokens:,} | {row.provisional:,} |"
        for row in board.rows[:CONTRIBUTORS_SHOWN_MAX]
    ]
    if len(board.rows) > CONTRIBUTORS_SHOWN_MAX:
        lines += ["", f"and {len(board.rows) - CONTRIBUTORS_SHOWN_MAX:,} more."]
    return lines


def _licence(text: str) -> str:
    """The licence as model hubs name it (lower case), 'other' when it is no short identifier."""
    return text.lower() if re.fullmatch(r"[A-Za-z0-9.+-]{2,40}", text) else "other"
