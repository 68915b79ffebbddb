"""From a manifest and what the disk holds to the exchange's cores, vectors, units and rules."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from dugnad.averaging.buffers import AnchorState
from dugnad.averaging.coverage import CreditRules
from dugnad.averaging.exchange import Exchange
from dugnad.averaging.formats import Checkpoint, header_digest
from dugnad.averaging.lineage import LineageRules
from dugnad.averaging.tree import Vector
from dugnad.averaging.view import ExchangeSettings
from dugnad.averaging.worker import FragmentRules, FragmentWorker
from dugnad.dht.ids import PeerId, RunId
from dugnad.dht.records import RecordError, decode, encode
from dugnad.peer.anchors import AnchorFiles
from dugnad.peer.init import initial_parameters
from dugnad.peer.manifest import (
    Manifest,
    evaluating_need,
    leanest_commit,
    memory_need,
    preparing_need,
)
from dugnad.peer.pastheads import keep_root, past_of
from dugnad.peer.roles import EVALUATE, PREPARE, TRAIN
from dugnad.peer.store import Promise, Store
from dugnad.peer.storethread import StoreThread
from dugnad.peer.units import Contract, UnitPlan, Units

MEMBER_VERSIONS: Final = 8
"""n: who contributed in the last eight versions of a fragment is a member."""
UNIT_ATTEMPTS: Final = 3
"""How often a learner may die over one unit before this peer leaves it to others."""
CHECKPOINT_BYTES_MAX: Final = 8 << 20
CHECKPOINTS_KEPT: Final = 2
"""As many as anchor files per fragment."""
FORWARD_SHARE: Final = 1.0 / 3.0
"""Of the operations of training: 2 forward, 4 backward for each weight and token."""
DTYPES: Final = ("float32",)
"""Formats that a learner may compute in; parameters and hand-ins are float32 everywhere."""


@dataclass(frozen=True, slots=True)
class Who:
    """What of this peer goes into the cores."""

    me: PeerId
    run: RunId
    boot: int
    can_home: bool


@dataclass(frozen=True, slots=True)
class Restored:
    """Where a fragment stood when the daemon ended."""

    point: Checkpoint
    digest: bytes
    anchor: AnchorState


def lineage_rules(manifest: Manifest, run: RunId, p: int) -> LineageRules:
    """The rules by which commits of fragment ``p`` are judged."""
    exchange = manifest.exchange
    return LineageRules(
        run=run,
        fragment=p,
        staleness=exchange.staleness,
        horizon=exchange.horizon,
        member_versions=MEMBER_VERSIONS,
        merge_floor_ms=exchange.merge_floor_ms,
        genesis_theta_root=manifest.v0_roots[p],
        genesis_time_ms=manifest.created_ms,
        sequence_tokens=manifest.data.context,
        token_budget=manifest.token_budget,
    )


def fragment_rules(manifest: Manifest, run: RunId, p: int) -> FragmentRules:
    """How fragment ``p`` is merged."""
    return FragmentRules(
        run=run,
        fragment=p,
        groups=tuple(manifest.table.merge_groups(p)),
        rule=manifest.outer.rule,
        hand_in_codec=manifest.exchange.hand_in_codec,
        commit_codec=manifest.exchange.commit_codec,
        eta_bits=manifest.outer.eta_bits,
        mu_bits=manifest.outer.mu_bits,
        leanest_commit=leanest_commit(manifest),
    )


def credit_rules(manifest: Manifest, run: RunId) -> CreditRules:
    """How work is credited in this run."""
    return CreditRules(
        run=run,
        fragments=len(manifest.table.fragments),
        sequence_tokens=manifest.data.context,
        unit_sequences=manifest.unit_sequences,
        epoch_sequences=manifest.data.held_out_start,
        horizon=manifest.exchange.horizon,
        token_budget=manifest.token_budget,
    )


def contracts(manifest: Manifest) -> dict[str, Contract]:
    """What a unit of this run needs: of training, evaluating, and preparing."""
    flops = manifest.model.flops_per_token() * manifest.unit_sequences * manifest.data.context

    def contract(memory_bytes: int, flops: float) -> Contract:
        return Contract(memory_bytes, DTYPES, flops, splittable=True, attempts=UNIT_ATTEMPTS)

    return {
        TRAIN: contract(memory_need(manifest).total, flops),
        EVALUATE: contract(evaluating_need(manifest).total, FORWARD_SHARE * flops),
        PREPARE: Contract(preparing_need(manifest).total, (), 0.0, True, UNIT_ATTEMPTS),
    }


def make_units(manifest: Manifest, run: RunId, me: PeerId) -> Units:
    """The work core of this run."""
    plan = UnitPlan(run, manifest.data.held_out_start, manifest.unit_sequences)
    contract = contracts(manifest)[TRAIN]
    return Units(me, plan, contract, sequence_tokens=manifest.data.context)


def make_fragment(
    manifest: Manifest, who: Who, p: int, theta: Vector, store: Store, restored: Restored | None
) -> tuple[Exchange, FragmentWorker, str]:
    """Core and vectors of fragment ``p``: at version 0, or where the disk says it stood; and what
    is wrong with the versions below it, or ''."""
    core = Exchange(
        ExchangeSettings(
            me=who.me,
            lineage=lineage_rules(manifest, who.run, p),
            eta_bits=manifest.outer.eta_bits,
            mu_bits=manifest.outer.mu_bits,
            can_home=who.can_home,
            boot=who.boot,
            first_seq=store.last_seq(p) + 1,
            phase=p / len(manifest.table.fragments),
        )
    )
    rules = fragment_rules(manifest, who.run, p)
    promises = store.promises(p)
    core.view.promised.update({one.parent: one.digest for one in promises})
    if restored is None:
        anchor = AnchorState.fresh(theta)
        return core, FragmentWorker.start(rules, who.me, core.head.digest, anchor), ""
    past = past_of(store, who.run, restored.point, restored.digest)
    fault = core.resume(restored.point, restored.digest, past)
    return core, FragmentWorker.start(rules, who.me, restored.digest, restored.anchor), fault


async def make_fragments(
    manifest: Manifest,
    who: Who,
    disk: StoreThread,
    anchors: AnchorFiles,
    note: Callable[[str, str], None],
) -> list[tuple[Exchange, FragmentWorker]]:
    """Core and vectors of each fragment; what the disk holds in vain is noted."""
    table, found = manifest.table, []
    theta = await asyncio.to_thread(initial_parameters, table, manifest.model, manifest.seed)
    for p, (offset, size) in enumerate(zip(table.offsets, table.sizes, strict=True)):
        part = np.ascontiguousarray(theta[offset : offset + size])

        def make(
            store: Store, p: int = p, part: Vector = part
        ) -> tuple[tuple[Exchange, FragmentWorker], Sequence[str]]:
            restored, notes = restore(store, anchors, who.run, p)
            core, worker, fault = make_fragment(manifest, who, p, part, store, restored)
            if fault:
                notes.append(f"fragment {p}: the past of its head is left out: {fault}")
            return (core, worker), notes

        made, notes = await disk.call(make)
        for one in notes:
            note("disk", one)
        found.append(made)
    return found


def unfinished(core: Exchange, store: Store) -> Promise | None:
    """A header that was promised on top of the head and perhaps never left this machine."""
    for promise in store.promises(core.view.settings.lineage.fragment):
        known = core.view.lineage.get(promise.digest) is not None
        if promise.parent == core.head.digest and promise.payload and not known:
            return promise
    return None


def save_point(store: Store, fragment: int, point: Checkpoint) -> None:
    """Keep the tables of a head beside those of the one before."""
    known = _points(store, fragment)
    kept = (*known, point)[-CHECKPOINTS_KEPT:]
    store.keep(f"checkpoints/{fragment}", encode(kept))
    keep_root(store, fragment, point)


def _points(store: Store, fragment: int) -> tuple[Checkpoint, ...]:
    data = store.kept(f"checkpoints/{fragment}")
    if data is None:
        return ()
    try:
        return decode(data, tuple[Checkpoint, ...], CHECKPOINT_BYTES_MAX)
    except RecordError:
        return ()


def restore(
    store: Store, files: AnchorFiles, run: RunId, fragment: int
) -> tuple[Restored | None, list[str]]:
    """Where a fragment stood, if anchors and tables of one head are there; and what was bad."""
    loaded = files.load(fragment)
    notes = [f"{one.path.name} is skipped: {one.reason}" for one in loaded.skipped]
    if loaded.anchor is None:
        return None, notes
    found = loaded.anchor
    for point in reversed(_points(store, fragment)):
        if header_digest(point.commit.header, run) == found.digest:
            anchor = AnchorState.of(found.theta.copy(), found.momentum.copy())
            return Restored(point, found.digest, anchor), notes
    return None, [*notes, f"fragment {fragment}: the anchors have no tables; version 0 is used"]
