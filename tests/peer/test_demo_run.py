"""The whole demo with real peers: a swarm of three that loses one and gains one."""

import json
from pathlib import Path

import psutil
import pytest

from dugnad.peer.demo import main
from dugnad.peer.errors import UserError

pytestmark = pytest.mark.slow  # processes, half a minute of training


def test_a_small_demo_trains_loses_a_peer_gains_one_and_leaves_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "results.json"
    code = main(peers=3, minutes=0.5, churn=True, control=False, seed=1, json_file=file)
    said = capfd.readouterr()
    assert code == 0, said.out + said.err
    found = json.loads(file.read_text())
    assert found["loss_after"] < found["loss_before"] - 0.5
    assert found["digests_equal"] is True
    assert found["units_lost"] == 0
    assert found["left_behind"] == 0
    assert found["merges"] > 4
    assert found["join_to_merge_s"] is not None
    assert "kill -9" in said.out
    assert psutil.Process().children(recursive=True) == []


def test_a_file_that_cannot_be_written_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no folder"):
        main(
            peers=1,
            minutes=0.2,
            churn=False,
            control=False,
            seed=0,
            json_file=tmp_path / "none" / "results.json",
        )
