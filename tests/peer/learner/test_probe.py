"""The measurements themselves, on whatever runs the tests."""

import pytest
import torch

from dugnad.peer.learner import probe
from dugnad.peer.modelconfig import ModelConfig


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "RUN_SECONDS", 0.002)
    monkeypatch.setattr(probe, "SECONDS_MAX", 0.1)
    monkeypatch.setattr(probe, "COPY_BYTES", 1 << 20)
    torch.set_num_threads(1)


def test_a_product_has_a_speed_and_a_spread() -> None:
    speed = probe.product_speed(torch.device("cpu"), torch.float32)
    assert speed is not None
    assert speed.dtype == "float32"
    assert 1e6 < speed.flops_per_s < 1e13
    assert speed.spread >= 0.0


def test_a_format_that_the_device_lacks_has_no_speed() -> None:
    assert probe.product_speed(torch.device("cpu"), torch.bool) is None


def test_copying_has_a_speed() -> None:
    assert probe.copy_speed(torch.device("cpu")) > 1e6


@pytest.mark.slow
def test_equal_devices_are_measured_once_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    two = [torch.device("cpu"), torch.device("cpu")]
    monkeypatch.setattr(probe, "candidates", lambda wish: two)
    (device,) = probe.measure_devices()
    assert device.count == 2
    assert device.kind == "cpu"
    assert device.memory_bytes > 0


@pytest.mark.slow
def test_a_model_has_tokens_a_second() -> None:
    speed = probe.measure_model(ModelConfig(dim=16, layers=1, heads=2, hidden=32, context=16))
    assert speed.tokens_per_s > 0.0
    assert speed.trouble == ""
