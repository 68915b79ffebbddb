"""How others average: hivemind's DecentralizedAverager and torch.distributed's gloo, as peers."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Final

import torch
from _fleet import sampled, vector_of

MATCHMAKING_S: Final = 3.0
POLL_S: Final = 0.005
MATCHMAKING_TIMEOUT_S: Final = 60.0


class HivemindPeer:
    """Its averager with a group of all peers; matchmaking is over before a round begins."""

    def __init__(self, rank: int, peers: int, params: int, codec: str, host: str) -> None:
        self._rank, self._peers, self._codec = rank, peers, codec
        self._maddrs = [f"/ip4/{host}/tcp/0"]
        self._tensor = torch.zeros(params)
        self._before: list[float] = []
        self._dht: Any = None
        self._averager: Any = None
        self._step: Any = None

    async def start(self) -> dict[str, Any]:
        """Start the DHT node alone."""
        import multiprocessing

        multiprocessing.set_start_method("fork", force=True)  # its averager knows no other way
        import hivemind

        torch.set_num_threads(1)
        self._dht = hivemind.DHT(host_maddrs=self._maddrs, nat_port_map=False, start=True)
        return {"addresses": [str(one) for one in self._dht.get_visible_maddrs()]}

    async def meet(self, others: list[dict[str, Any]]) -> None:
        """Make the averager in a DHT of all."""
        import hivemind
        from hivemind import compression

        if self._rank:
            self._dht.shutdown()
            self._dht = hivemind.DHT(
                initial_peers=others[0]["addresses"],
                host_maddrs=self._maddrs,
                nat_port_map=False,
                start=True,
            )
        codecs = {
            "float32": compression.NoCompression,
            "float16": compression.Float16Compression,
            "8bit": compression.Uniform8BitQuantization,
        }
        self._averager = hivemind.DecentralizedAverager(
            [self._tensor],
            self._dht,
            prefix="bench",
            target_group_size=self._peers,
            min_group_size=self._peers,
            min_matchmaking_time=MATCHMAKING_S,
            compression=codecs[self._codec](),
            start=True,
        )

    async def prepare(self, number: int) -> None:
        """Fill the tensor and find the group."""
        from hivemind.averaging.control import AveragingStage

        fresh = vector_of(self._rank, number, self._tensor.numel())
        with self._averager.get_tensors() as tensors:
            tensors[0].copy_(torch.from_numpy(fresh))
        self._before = sampled(fresh)
        self._step = self._averager.step(wait=False, require_trigger=True, timeout=60.0)
        deadline = time.monotonic() + MATCHMAKING_TIMEOUT_S
        while self._step.stage is not AveragingStage.AWAITING_TRIGGER:
            if self._step.done() or time.monotonic() > deadline:
                raise RuntimeError(f"no group was found: {self._step.stage}")
            await asyncio.sleep(POLL_S)

    async def run(self) -> None:
        """The all-reduce alone."""
        self._step.allow_allreduce()
        self._step.result()

    def sample(self, before: bool) -> list[float]:
        """Elements of the averager's tensor."""
        if before:
            return self._before
        with self._averager.get_tensors() as tensors:
            return sampled(tensors[0].numpy())

    async def close(self) -> None:
        """Ask both to stop; the fleet kills what stays."""
        if self._averager is not None:
            self._averager.shutdown()
        if self._dht is not None:
            self._dht.shutdown()


class GlooPeer:
    """``all_reduce`` of torch.distributed in float32: no encryption, no faults borne."""

    def __init__(
        self, rank: int, peers: int, params: int, folder: str, interface: str = "lo"
    ) -> None:
        self._rank, self._peers, self._folder = rank, peers, folder
        self._interface = interface
        self._tensor = torch.zeros(params)
        self._before: list[float] = []

    async def start(self) -> dict[str, Any]:
        """Nothing to do alone."""
        torch.set_num_threads(1)
        return {}

    async def meet(self, others: list[dict[str, Any]]) -> None:
        """Join the process group through a file."""
        import os

        import torch.distributed as dist

        os.environ["GLOO_SOCKET_IFNAME"] = self._interface
        dist.init_process_group(
            "gloo", f"file://{self._folder}/gloo", rank=self._rank, world_size=self._peers
        )

    async def prepare(self, number: int) -> None:
        """Fill the tensor."""
        fresh = vector_of(self._rank, number, self._tensor.numel())
        self._tensor.copy_(torch.from_numpy(fresh))
        self._before = sampled(fresh)

    async def run(self) -> None:
        """The sum of all, divided."""
        import torch.distributed as dist

        dist.all_reduce(self._tensor)
        self._tensor.div_(self._peers)

    def sample(self, before: bool) -> list[float]:
        """Elements of the tensor."""
        return self._before if before else sampled(self._tensor.numpy())

    async def close(self) -> None:
        """Leave the group."""
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()
