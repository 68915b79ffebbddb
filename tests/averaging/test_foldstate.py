"""The base of the fold from foreign hands: refused with the reason, whatever is wrong with it."""

import hashlib
from typing import Any

import msgspec
import pytest

from dugnad.averaging.board import FORMULA, Tally
from dugnad.averaging.coverage import CreditRules, UnitMask
from dugnad.averaging.credit import CreditError, CreditFold
from dugnad.averaging.foldstate import (
    EPOCHS_MAX,
    FoldState,
    FragmentState,
    PeerTally,
    decode_state,
    fold_root,
    state_fault,
)
from dugnad.dht.ids import PeerId, RunId
from dugnad.dht.records import RecordError, encode

RUN = RunId(hashlib.sha256(b"fold").digest())
RULES = CreditRules(RUN, fragments=1, sequence_tokens=10, unit_sequences=4, epoch_sequences=10)
PEERS = [PeerId(bytes([n]) * 32) for n in range(1, 4)]
TALLIES = tuple(PeerTally(peer, 50, 0, 3, 1, 10, 20, ((7, 20), (8, 30))) for peer in PEERS[:2])
ROW = FragmentState(
    fragment=0,
    version=9,
    digest=bytes(32),
    time_ms=9000,
    receipts=6,
    refused=0,
    done=1,
    masks=(UnitMask(1, 0, b"\x0f"), UnitMask(1, 2, b"\x01")),
    tallies=TALLIES,
    waiting_home=PEERS[2],
    waiting_tokens=5,
    waiting_days=((8, 5),),
)
GOOD = FoldState(FORMULA, RUN, (ROW,))


def test_a_good_base_is_taken_and_given_on_unchanged() -> None:
    fold = CreditFold.restore(RULES, decode_state(encode(GOOD)))
    assert fold.snapshot() == GOOD
    assert fold_root(fold.snapshot()) == fold_root(GOOD)
    assert fold.tip(0) == (9, bytes(32))
    assert (fold.covered(0, 1), fold.covered(1, 2), fold.covered(1, 1)) == (0b1111, 1, 0)
    assert (fold.board().tokens, fold.board().provisional) == (100, 5)


def test_a_tally_survives_as_a_record() -> None:
    tally = Tally(tokens=9, twice=2, contributions=1, units=1, first_ms=3, last_ms=4, days={5: 9})
    assert PeerTally.of(PEERS[0], tally).tally() == tally


@pytest.mark.parametrize(
    "changes",
    [
        {"version": -1},
        {"fragment": 1},
        {"done": EPOCHS_MAX + 1},
        {"digest": b"short"},
        {"version": 0},
        {"tallies": TALLIES[::-1]},
        {"tallies": (msgspec.structs.replace(TALLIES[0], peer=b"short"),)},
        {"tallies": (msgspec.structs.replace(TALLIES[0], days=((9, 1), (8, 1))),)},
        {"tallies": (msgspec.structs.replace(TALLIES[0], days=((1, 1), (999, 1))),)},
        {"tallies": (msgspec.structs.replace(TALLIES[0], tokens=-5),)},
        {"waiting_home": b""},
        {"masks": (UnitMask(1, 7, b"\x01"),)},
        {"masks": (UnitMask(0, 0, b"\x01"),)},
        {"masks": (UnitMask(1, 0, b"\xff"),)},
        {"masks": (UnitMask(1, 0, b""),)},
        {"masks": (UnitMask(1, 0, b"\x01"), UnitMask(1, 0, b"\x02"))},
        {"masks": (UnitMask(1 << 63, 0, b"\x01"),)},
    ],
)
def test_a_malformed_row_is_refused(changes: dict[str, Any]) -> None:  # Any: fields of all types
    bad = msgspec.structs.replace(GOOD, fragments=(msgspec.structs.replace(ROW, **changes),))
    with pytest.raises(CreditError):
        CreditFold.restore(RULES, bad)


def test_another_formula_or_number_of_fragments_is_refused() -> None:
    assert "formula" in state_fault(msgspec.structs.replace(GOOD, formula="credit/0"), RUN, 1)
    assert "each fragment" in state_fault(GOOD, RUN, 2)
    with pytest.raises(RecordError):
        decode_state(b"\xc1 no msgpack")
