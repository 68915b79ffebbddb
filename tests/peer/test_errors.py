"""Numbered errors."""

import re
from pathlib import Path

import pytest

from dugnad.peer.errors import ERRORS, UserError


def test_an_error_prints_its_number_a_sentence_and_the_fix() -> None:
    error = UserError("E012", "heads 3 does not divide dim 128", "try dim 126")
    assert str(error) == "error E012: heads 3 does not divide dim 128\n  fix: try dim 126"
    assert error.exit_code == 12


def test_an_error_outside_the_table_cannot_be_made() -> None:
    with pytest.raises(AssertionError):
        UserError("E999", "x", "y")


def test_each_kind_of_bad_input_has_an_exit_code_of_its_own() -> None:
    codes = [kind.exit_code for kind in ERRORS.values() if kind.exit_code >= 10]
    assert len(codes) == len(set(codes))
    assert all(0 < kind.exit_code < 126 for kind in ERRORS.values())  # 126 up belong to the shell
    assert all(re.fullmatch(r"E\d{3}", number) for number in ERRORS)


ROOT = Path(__file__).resolve().parents[2]


def test_every_error_has_its_section_with_title_exit_code_and_a_fix() -> None:
    page = (ROOT / "ERRORS.md").read_text()
    found = re.findall(r"^## (E\d{3}): (.+)\n\nExit code (\d+)\. (.{20,})$", page, re.MULTILINE)
    written = {number: (title, int(code)) for number, title, code, _ in found}
    assert written == {n: (kind.title, kind.exit_code) for n, kind in ERRORS.items()}


def test_every_error_of_the_table_is_raised_somewhere() -> None:
    source = "".join(path.read_text() for path in (ROOT / "peer").rglob("*.py"))
    assert [n for n in ERRORS if source.count(f'"{n}"') < 2] == []
