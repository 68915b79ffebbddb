"""What training loses while many listen: the arithmetic of the dashboard's benchmark."""

from __future__ import annotations

import pytest
from _underload import Phase, loss_figures


def test_the_loss_is_the_median_of_pairs_so_that_a_disturbed_one_does_not_count() -> None:
    alone = [Phase(1000.0 * n, 2000.0, 0.02) for n in range(1, 10)]
    listened = [Phase(one.speed * 0.99, 1980.0, 0.03) for one in alone]
    listened[4] = Phase(10.0, 100.0, 0.9)
    found = loss_figures(alone, listened)
    assert found["training_loss_under_load"] == pytest.approx(0.01)
    assert found["training_loss_per_cpu"] == pytest.approx(0.01)
    assert found["training_loss_low"] <= 0.0101 <= found["training_loss_high"] + 0.001
    assert (found["daemon_cpu_alone"], found["daemon_cpu_under_load"]) == (0.02, 0.03)
