"""The same state as Prometheus metrics. Labels are bounded: fragments and words of our own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dugnad.dashboard.events import PeerRow
from dugnad.dashboard.layout import View
from dugnad.dashboard.live import Hub

FRAGMENT_LABELS_MAX: Final = 256
LINK_LABELS_MAX: Final = 64
"""A full mesh."""
LINKS: Final = ("direct", "relayed", "outbound", "unknown")


class RunCollector(Collector):
    """Reads a view when asked; no number is kept twice."""

    def __init__(self, view: View, hub: Hub) -> None:
        self._view = view
        self._hub = hub

    def collect(self) -> Iterable[Metric]:
        """All metrics of one run."""
        yield from _gauges(self._view, self._hub)
        yield from _counters(self._view, self._hub)
        yield from _labelled(self._view)


def metrics_text(view: View, hub: Hub) -> bytes:
    """The metrics in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(RunCollector(view, hub))
    return generate_latest(registry)


def _gauges(view: View, hub: Hub) -> Iterator[Metric]:
    state, history = view.state, view.state.history
    yield GaugeMetricFamily("dugnad_peers_live", "Peers that are here", value=state.live)
    yield GaugeMetricFamily("dugnad_stream_readers", "Open event streams", value=hub.readers)
    if state.run is not None and state.run.token_budget:
        budget = state.run.token_budget
        yield GaugeMetricFamily("dugnad_tokens_target", "Tokens to merge", value=budget)
    for name, words, series in (
        ("dugnad_train_loss_nats", "Training loss, nats a token", history.train),
        ("dugnad_held_out_loss_nats", "Held-out loss, nats a token", history.held_out),
        ("dugnad_tokens_per_second", "Tokens a second of the swarm", history.speed),
    ):
        if series.last is not None:  # absent until measured
            yield GaugeMetricFamily(name, words, value=series.last.value)
    if (next_due := state.next_due(view.now_ms)) is not None:
        due = next_due[0] / 1000
        yield GaugeMetricFamily("dugnad_next_merge_time_seconds", "Unix time", value=due)
    if state.as_of_ms:
        as_of = state.as_of_ms / 1000
        yield GaugeMetricFamily("dugnad_newest_event_time_seconds", "Unix time", value=as_of)


def _counters(view: View, hub: Hub) -> Iterator[Metric]:
    state, history = view.state, view.state.history
    for name, words, value in (
        ("dugnad_tokens_merged", "Tokens merged by the run", state.tokens),
        ("dugnad_merges", "Merges of all fragments", state.merges),
        ("dugnad_exchange_sent_bytes", "Bytes of contributions and payloads", history.sent_bytes),
        ("dugnad_exchange_plain_bytes", "The same as float32", history.plain_bytes),
        ("dugnad_stream_resets", "Readers told to fetch again", hub.resets),
    ):
        yield CounterMetricFamily(name, words, value=value)
    if state.board is not None:
        receipts = state.board.receipts
        yield CounterMetricFamily("dugnad_receipts", "Receipts behind the board", value=receipts)


def _labelled(view: View) -> Iterator[Metric]:
    state = view.state
    versions = GaugeMetricFamily(
        "dugnad_fragment_version", "Newest version of a fragment", labels=["fragment"]
    )
    for p in sorted(state.heads)[:FRAGMENT_LABELS_MAX]:
        versions.add_metric([str(p)], state.heads[p].version)
    yield versions
    links = Counter(row.link for row in state.peers.values() if not row.gone_ms)
    peers = GaugeMetricFamily("dugnad_peers_by_link", "Live peers by link", labels=["link"])
    for link in LINKS:
        peers.add_metric([link], links.get(link, 0))
    yield peers
    yield from _links([row for row in state.peers.values() if not row.gone_ms][:LINK_LABELS_MAX])


def _links(rows: Sequence[PeerRow]) -> Iterator[Metric]:
    """What hand-ins over each link of the serving daemon came to; peers by their keys."""
    rate = GaugeMetricFamily("dugnad_link_bytes_per_second", "What the link gave", labels=["peer"])
    bits = GaugeMetricFamily(
        "dugnad_link_bits_per_parameter", "Of the newest hand-in", labels=["peer", "codec"]
    )
    saved = CounterMetricFamily(
        "dugnad_link_saved_bytes", "Of hand-ins, against float32", labels=["peer"]
    )
    for row in rows:
        if row.link_bytes_per_s:
            rate.add_metric([row.peer], row.link_bytes_per_s)
        if row.bits:
            bits.add_metric([row.peer, row.codec], row.bits)
            saved.add_metric([row.peer], row.saved_bytes)
    yield from (rate, bits, saved)
