"""The learning rate over the swarm's tokens."""

import msgspec
import pytest

from dugnad.peer.learner.schedule import OptimiserSettings, learning_rate

SETTINGS = OptimiserSettings(total_tokens=1100, learning_rate=1.0, warmup_tokens=100)


def test_the_rate_rises_then_falls_then_stays() -> None:
    rates = [learning_rate(SETTINGS, tokens) for tokens in (0, 50, 100, 600, 1100, 9999)]
    assert rates == pytest.approx([0.0, 0.5, 1.0, 0.55, 0.1, 0.1])


def test_linear_and_no_decay() -> None:
    linear = msgspec.structs.replace(SETTINGS, decay="linear")
    assert learning_rate(linear, 350) == pytest.approx(1 - 0.9 / 4)
    assert learning_rate(msgspec.structs.replace(SETTINGS, decay="none"), 9999) == 1.0


@pytest.mark.parametrize(
    ("field", "value"),
    [("learning_rate", float("nan")), ("beta1", 1.0), ("warmup_tokens", 1101), ("clip_norm", 0)],
)
def test_senseless_settings_are_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(msgspec.ValidationError, match=field):
        msgspec.convert(msgspec.to_builtins(SETTINGS) | {field: value}, OptimiserSettings)
