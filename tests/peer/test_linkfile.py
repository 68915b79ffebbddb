"""A link in a file: whole or not there, and waited for."""

from pathlib import Path

import pytest

from dugnad.peer.errors import UserError
from dugnad.peer.linkfile import POLL_S, resolve_link, write_link


def test_a_link_is_taken_as_it_is() -> None:
    assert resolve_link("dugnad:abc") == "dugnad:abc"


def test_a_file_is_waited_for_and_read_once_it_is_there(tmp_path: Path) -> None:
    path, waits = tmp_path / "run", list[float]()

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            write_link(path, "dugnad:abc")

    assert resolve_link(f"@{path}", 60.0, lambda: 0.0, sleep) == "dugnad:abc"
    assert waits == [POLL_S] * 3
    assert [one.name for one in tmp_path.iterdir()] == ["run"]


def test_a_file_that_never_comes_is_said_with_what_to_do(tmp_path: Path) -> None:
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    with pytest.raises(UserError, match=r"within 5 s") as error:
        resolve_link(f"@{tmp_path / 'run'}", 5.0, lambda: now[0], sleep)
    assert error.value.number == "E013"
    assert "--link-file" in error.value.fix


def test_a_link_that_cannot_be_written_is_an_error_of_the_disk(tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        write_link(tmp_path / "none" / "run", "dugnad:abc")
    assert error.value.number == "E026"
