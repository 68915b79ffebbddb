"""`dugnad demo`: a swarm on this machine trains a small model, loses a peer, gains another, and is
judged.

Everything is done by real peers (`demoswarm`) that are only asked what anybody may ask; the judge
(`demojudge`) measures from outside. Nothing is left behind, whatever ends the demo.
"""

import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dugnad.peer.clock import wall_ms
from dugnad.peer.demojudge import (
    Beginning,
    ControlPlan,
    Judgement,
    Text,
    Vector,
    begin,
    conclude,
    fetch_text,
    final_parameters,
)
from dugnad.peer.demoplan import MERGE_S, DemoPlan, cores, run_file, run_text
from dugnad.peer.demoreport import (
    Results,
    SwarmFigures,
    failures,
    figures,
    print_results,
    results_json,
)
from dugnad.peer.demosettle import Agreement, board_difference
from dugnad.peer.demoswarm import KILLED_S, DemoPeer, DemoSwarm, Look
from dugnad.peer.demoview import DemoView, scene
from dugnad.peer.errors import EXIT_FAILURE, EXIT_OK, UserError
from dugnad.peer.manifest import Manifest
from dugnad.peer.starting import stored_manifest

LINK_S: Final = 60.0
"""From a peer's command to its link: hashing the text and loading torch, on a busy small board."""
LISTED_S: Final = 60.0
"""How long a peer may take beyond its time to be listed once, before something must be wrong."""
LATE_S: Final = 90.0
"""How long the demo is prolonged for the late peer's first listing; it should take less than 20,
and takes longer where the machine is busy with more than the demo."""
SETTLE_S: Final = 15.0
"""How long the survivors have to show the same digests."""
BOARDS_S: Final = 6.0
"""How long, of those, is also waited for equal leaderboards."""
CONTROL_THREADS: Final = 1
"""For a model this small a second thread only waits: on two cores one run of the control took 124 s
with two threads, 47 s the next time; one thread needs about 30 s."""
LEAVE_S: Final = 20.0
"""For handing in what was learned and ending; they leave one after the other."""
POLL_S: Final = 0.5
SETTLE_POLL_S: Final = 0.2
_LINK_POLL_S: Final = 0.1


def main(
    *,
    peers: int,
    minutes: float,
    churn: bool,
    control: bool,
    seed: int,
    json_file: Path | None,
) -> int:
    """Run the demo and print what came of it; the exit code: 1 when it did not show what it should.

    UserError for what stands in the way. With trouble of any kind the peers' logs are kept.
    """
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise UserError("E001", f"--json: there is no folder {json_file.parent}", "make it first")
    # Threads of a learner that wait for each other should sleep: the cores are shared.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    plan = DemoPlan(peers, 60.0 * minutes, churn, control, seed, cores())
    folder = Path(tempfile.mkdtemp(prefix="dugnad-demo-"))
    keep = True
    try:
        results = asyncio.run(_shown(plan, folder))
        print_results(results, sys.stdout, wall_ms())
        if json_file is not None:
            _write(json_file, results_json(results))
        keep = bool(failures(results) or results.left_behind)
        return EXIT_FAILURE if failures(results) else EXIT_OK
    except (KeyboardInterrupt, asyncio.CancelledError):
        keep = False
        print("broken off; every peer was stopped", file=sys.stderr)
        return 128 + signal.SIGINT
    finally:
        if keep and any(folder.glob("*.log")):
            print(f"the peers' logs are in {folder}", file=sys.stderr)
        else:
            shutil.rmtree(folder, ignore_errors=True)


async def _shown(plan: DemoPlan, folder: Path) -> Results:
    """The demo with its view; ends in order on SIGTERM too."""
    task = asyncio.current_task()
    assert task is not None
    with suppress(NotImplementedError):  # no signal handlers on this platform's loop
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    view = DemoView(sys.stdout)
    demo = Demo(plan, folder, view)
    view.open()
    try:
        return await demo.run()
    finally:
        view.close()
        await demo.swarm.stop()


@dataclass(frozen=True, slots=True)
class _Settled:
    """The swarm at the end of its training."""

    figures: SwarmFigures
    digests_equal: bool
    difference: str
    board: str


class Demo:
    """One demo from start to results. `swarm` must be stopped by the caller, whatever happens."""

    def __init__(self, plan: DemoPlan, folder: Path, view: DemoView) -> None:
        self.swarm = DemoSwarm(folder)
        self._plan = plan
        self._folder = folder
        self._view = view
        self._begun = time.monotonic()
        self._zero = self._begun  # when the first link was there
        self._victim: DemoPeer | None = None  # until it is killed
        self._late: DemoPeer | None = None
        self._left_behind = 0

    async def run(self) -> Results:
        """Measure, start, train with churn, settle, leave, judge. UserError when a peer fails."""
        plan, view = self._plan, self._view
        view.say("reading the text and measuring this machine")
        text = await asyncio.to_thread(fetch_text, self._folder / "text")
        beginning = await begin(run_file(plan, 1.0), text)
        view.say(
            f"version 0 has a loss of {beginning.loss:.3f}; "
            f"one free core trains {beginning.tokens_per_s:,.0f} tokens/s"
        )
        await self._start(beginning.tokens_per_s)
        await self._train()
        settled = await self._settle()
        judgement, exit_codes = await self._judge(text, settled.figures)
        return self._results(beginning, settled, judgement, exit_codes)

    async def _start(self, tokens_per_s: float) -> None:
        """The first peer starts the run, the others join by its link."""
        run_path = self._folder / "run.toml"
        run_path.write_text(run_text(self._plan, tokens_per_s))
        first = self.swarm.add()
        await first.launch("start", str(run_path), cpu_share=self._plan.cpu_share)
        link = await self._link_of(first)
        self._zero = time.monotonic()
        self._view.say(f"peer 1 started the run: {link[:60]}…")
        for _ in range(self._plan.peers - 1):
            await self.swarm.add().launch("join", link, cpu_share=self._plan.cpu_share)
        if self._plan.victim is not None:
            self._victim = self.swarm.peers[self._plan.victim]
        if self._plan.peers > 1:
            self._view.say(f"peers 2 to {self._plan.peers} join by its link")

    async def _link_of(self, peer: DemoPeer) -> str:
        """The link that `peer` prints. UserError when it ends, or prints none in time."""
        until = time.monotonic() + LINK_S
        while (link := peer.link()) is None:
            self.swarm.check()
            if time.monotonic() > until:
                raise UserError(
                    "E005",
                    f"peer {peer.number} printed no link within {LINK_S:.0f} s",
                    f"look into {peer.log}",
                )
            await asyncio.sleep(_LINK_POLL_S)
        return link

    async def _train(self) -> None:
        """Watch until the time is over; kill one peer and let one join on the way."""
        while True:
            self._show(await self.swarm.look())
            elapsed = time.monotonic() - self._zero
            if self._victim is not None and self._may_kill(elapsed):
                await self._kill(self._victim)
            elif self._late_is_due(elapsed):
                await self._join_late()
            if elapsed >= self._plan.seconds and not self._waits_for_late(elapsed):
                return
            await asyncio.sleep(POLL_S)

    def _may_kill(self, elapsed: float) -> bool:
        """Once everybody has been listed. UserError when that takes far too long."""
        if elapsed < self._plan.kill_at_s:
            return False
        waiting = [peer for peer in self.swarm.survivors if peer.listed_after_s is None]
        if waiting and elapsed > self._plan.kill_at_s + LISTED_S:
            state = waiting[0].last.status if waiting[0].last else None
            said = f"it says {state.state}: {state.reason}" if state else "it does not answer"
            raise UserError(
                "E005",
                f"nothing of {waiting[0].name} was merged in {elapsed:.0f} s; {said}",
                f"look into {waiting[0].log}",
            )
        return not waiting

    async def _kill(self, victim: DemoPeer) -> None:
        self._victim = None
        organiser = ", who started the run," if victim.number == 1 else ""
        self._view.say(f"kill -9: {victim.name} (peer {victim.number}){organiser} is gone")
        left = await victim.kill()
        self._left_behind += left
        if left:
            self._view.say(f"{left} of its processes still live after {KILLED_S:.0f} s")

    def _late_is_due(self, elapsed: float) -> bool:
        return (
            self._plan.churn
            and self._late is None
            and self._victim is None
            and elapsed >= self._plan.join_at_s
        )

    async def _join_late(self) -> None:
        """A new peer joins by the link of a survivor."""
        host = self.swarm.peers[self._plan.host]
        assert host.last is not None, "a survivor has answered before the late peer's turn"
        self._late = self.swarm.add()
        self._view.say(f"peer {self._late.number} joins late, by the link of {host.name}")
        await self._late.launch("join", host.last.status.link, cpu_share=self._plan.cpu_share)

    def _waits_for_late(self, elapsed: float) -> bool:
        """Whether the late peer has yet to come, or to be listed, and may still take its time."""
        if self._victim is not None or (self._plan.churn and self._late is None):
            return True
        if self._late is None or self._late.listed_after_s is not None:
            return False
        return elapsed < max(self._plan.seconds, self._plan.join_at_s) + LATE_S

    async def _settle(self) -> _Settled:
        """Look at the survivors until all have shown the same digests, for at most SETTLE_S."""
        self._view.say("the time is over: do all survivors hold the same?")
        names = {str(peer.number): peer for peer in self.swarm.survivors}
        agreement = Agreement(list(names))
        begun = time.monotonic()
        while True:
            looks = await self.swarm.look(board=True)
            self._show(looks)
            agreement.show({str(peer.number): _shown_by(look) for peer, look in looks})
            waited = time.monotonic() - begun
            done = agreement.digests_equal and (agreement.board or waited >= BOARDS_S)
            if done or waited >= SETTLE_S:
                break
            await asyncio.sleep(SETTLE_POLL_S)
        statuses = [peer.last.status for peer in names.values() if peer.last is not None]
        if not statuses:
            raise UserError("E005", "no survivor answers", f"look into {self._folder}")
        difference = agreement.difference()
        self._view.say(difference or "all survivors hold the same digests")
        if not agreement.board:
            boards = {p.name: p.last.board for p in names.values() if p.last and p.last.board}
            self._view.say(f"leaderboards differ: {board_difference(boards) or 'never at once'}")
        return _Settled(figures(statuses), agreement.digests_equal, difference, agreement.board)

    async def _judge(
        self, text: Text, swarm: SwarmFigures
    ) -> tuple[Judgement, dict[str, int | None]]:
        """Train the control while the survivors hand in and leave; then measure what they made."""
        manifest = self._manifest()
        control = None
        if self._plan.control:
            control = ControlPlan(swarm.peer_tokens_max, swarm.tokens)
            self._view.say(f"the control: one peer alone, {control.tokens:,} tokens")
        leaving = asyncio.create_task(self._leave())
        final = asyncio.create_task(self._final(leaving, manifest))
        try:
            judgement = await conclude(manifest, text, final, control, CONTROL_THREADS)
            return judgement, await leaving
        finally:
            for task in (final, leaving):
                task.cancel()
            await asyncio.gather(final, leaving, return_exceptions=True)

    def _manifest(self) -> Manifest:
        """The run's manifest, as a survivor keeps it."""
        for peer in self.swarm.survivors:
            for run in peer.home.known_runs():
                if (manifest := stored_manifest(run, peer.home)) is not None:
                    return manifest
        raise UserError("E005", "no survivor keeps the manifest", f"look into {self._folder}")

    async def _leave(self) -> dict[str, int | None]:
        """Everybody hands in and leaves; exit codes by name. What is left of them is counted."""
        survivors = self.swarm.survivors
        codes: list[int | None] = []
        for peer in survivors:  # one after the other: who stays merges what they handed in
            codes.append(await peer.leave(LEAVE_S))
            if peer is not survivors[-1]:
                await asyncio.sleep(MERGE_S)
        left = await asyncio.gather(*(peer.wait_for_family(KILLED_S) for peer in survivors))
        sockets = [peer.sockets_left() for peer in survivors if peer.exit_code is not None]
        self._left_behind += sum(map(len, left)) + sum(sockets)
        self._view.say("the survivors have handed in and left")
        return {peer.name: code for peer, code in zip(survivors, codes, strict=True)}

    async def _final(
        self, leaving: "asyncio.Task[dict[str, int | None]]", manifest: Manifest
    ) -> Vector:
        """The agreed model on the survivors' disks, once they have left."""
        await asyncio.shield(leaving)
        folders = [
            peer.home.run(run) for peer in self.swarm.survivors for run in peer.home.known_runs()
        ]
        theta, _ = await asyncio.to_thread(final_parameters, manifest.table, folders)
        return theta

    def _show(self, looks: Sequence[tuple[DemoPeer, Look]]) -> None:
        """Bring table and events up to date."""
        for peer, look in looks:
            self._view.tell(peer.name, look.events)
        told = [
            (peer.name, "killed" if peer.killed else "starting", None)
            if peer.killed or peer.last is None
            else (peer.name, "", peer.last.status)
            for peer in self.swarm.peers
        ]
        rows = looks[0][1].peers if looks else ()
        elapsed = time.monotonic() - self._zero
        self._view.show(scene(elapsed, self._plan.seconds, told, rows))

    def _results(
        self,
        beginning: Beginning,
        settled: _Settled,
        judgement: Judgement,
        exit_codes: dict[str, int | None],
    ) -> Results:
        plan, swarm = self._plan, settled.figures
        return Results(
            loss_before=beginning.loss,
            loss_after=judgement.loss_after,
            loss_control=judgement.loss_control,
            tokens=swarm.tokens,
            merges=swarm.merges,
            units_covered=swarm.units_covered,
            units_lost=swarm.units_lost,
            units_twice=swarm.units_twice,
            longest_gap_s=swarm.longest_gap_s,
            interval_s=swarm.interval_s,
            takeover_s=swarm.takeover_s,
            join_to_merge_s=self._late.listed_after_s if self._late is not None else None,
            digests_equal=settled.digests_equal,
            left_behind=self._left_behind,
            seconds=time.monotonic() - self._begun,
            boards_equal=bool(settled.board),
            difference=settled.difference,
            exit_codes=exit_codes,
            versions=swarm.versions,
            control_tokens=judgement.control_tokens,
            control_s=judgement.control_s,
            tokens_per_s=beginning.tokens_per_s,
            steps_per_merge=plan.steps_per_merge(beginning.tokens_per_s),
            peers=plan.peers,
            minutes=plan.seconds / 60.0,
            churn=plan.churn,
            control=plan.control,
            seed=plan.seed,
            sample=judgement.sample,
            leaderboard=json.loads(settled.board) if settled.board else {},
        )


def _shown_by(look: Look) -> tuple[Sequence[int], Sequence[str], str]:
    """Versions, heads and board (as text, the same for equal boards) of one look."""
    board = "" if look.board is None else json.dumps(look.board, sort_keys=True)
    return look.status.versions, look.status.heads, board


def _write(path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        raise UserError(
            "E001", f"cannot write {path}: {error.strerror}", "give another file to --json"
        ) from error
