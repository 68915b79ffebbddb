"""Metrics: parseable, with labels that strangers cannot choose."""

from prometheus_client.parser import text_string_to_metric_families

from dugnad.dashboard import events as ev
from dugnad.dashboard.layout import View
from dugnad.dashboard.live import Hub
from dugnad.dashboard.metrics import metrics_text
from dugnad.dashboard.state import State

from .run_world import HOSTILE, NOW_MS, ids, row, view  # noqa: TID252  the world is no installed package


def samples(shown: View) -> dict[str, float]:
    """Metric and labels → value."""
    text = metrics_text(shown, Hub()).decode()
    return {
        sample.name + "".join(sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_the_numbers_are_those_of_the_page() -> None:
    found = samples(view())
    assert found["dugnad_tokens_merged_total"] == 600_000
    assert found["dugnad_tokens_target"] == 2_000_000
    assert found["dugnad_peers_live"] == 2
    assert found["dugnad_fragment_version1"] == 30
    assert found["dugnad_peers_by_linkdirect"] == 2


def test_what_was_not_measured_is_absent() -> None:
    assert "dugnad_train_loss_nats" not in samples(View(State(), NOW_MS))


def test_strangers_make_no_labels() -> None:
    rows = tuple(
        row(peer, words, device=words, state=words)
        for peer, words in zip(ids(len(HOSTILE)), HOSTILE, strict=True)
    )
    assert len(samples(view(ev.PeerChanged(at_ms=NOW_MS, rows=rows)))) < 25


def test_each_link_that_carried_something_has_its_rate_codec_and_saving() -> None:
    used, unused = ids(2)
    rows = (
        row(used, "a", codec="topk-1.56", bits=0.15, saved_bytes=9000, link_bytes_per_s=2.5e5),
        row(unused, "b"),
    )
    found = samples(view(ev.PeerChanged(at_ms=NOW_MS, rows=rows)))
    assert found[f"dugnad_link_bytes_per_second{used}"] == 2.5e5
    assert found[f"dugnad_link_bits_per_parameter{used}topk-1.56"] == 0.15
    assert found[f"dugnad_link_saved_bytes_total{used}"] == 9000
    assert not [name for name in found if unused in name]
