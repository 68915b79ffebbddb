"""The swarm's address book: hivemind's DHT node, inside our own event loop and without torch.

This is the only module that knows hivemind's Python code. Importing it is cheap; hivemind itself
(0.25 CPU-seconds, 25 MB) is loaded by `load_hivemind`, through a stub of its package object,
because its own `__init__` pulls in torch (3 CPU-seconds, 280 MB).

Entries are sealed: the expiry, the key and the value are signed by the peer whose sub-key they
fill, and every node checks that before it stores or believes one. Otherwise anybody overwrites
anybody.
"""

import asyncio
import contextlib
import functools
import importlib
import importlib.util
import logging
import sys
import time
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from dugnad.dht import records
from dugnad.dht.ids import KEY_BYTES, PEER_PREFIX, PeerId

log = logging.getLogger(__name__)

# Longest life of an entry: who vanished is forgotten within the hour. Adverts use far less.
DHT_TTL_MAX_S = 3600.0
# Clocks of volunteers' machines differ: an entry may end this much later than allowed.
CLOCK_SLACK_S = 900.0
VALUE_BYTES_MAX = 2048
_SEALED_BYTES_MAX = VALUE_BYTES_MAX + 128
# Bounds of what we keep for others: 256 peers a key (a run has its adverts in shards).
ENTRIES_PER_KEY_MAX = 256
KEYS_MAX = 4096
_CACHED_KEYS_MAX = 512
_VERIFIED_MAX = 4096
# One lookup may meet nodes that died: hivemind gives each 3 s and asks 4 at a time.
LOOKUP_TIMEOUT_S = 10.0
_REMEMBERED_NODES_MAX = 20

_DOMAIN = "dht entry"
# msgpack's head of a 32-byte string: how hivemind writes our sub-keys.
_SUBKEY_HEAD = b"\xc4\x20"


class SealedEntry(msgspec.Struct, frozen=True, array_like=True):
    """What a DHT node stores under (key, peer): the value, until when, and the peer's signature."""

    expires_ms: int
    value: bytes
    signature: bytes


@dataclass(frozen=True, slots=True)
class Hivemind:
    """The classes of hivemind that we use. Any: hivemind ships no types."""

    P2P: Any
    PeerID: Any
    Multiaddr: Any
    DHTNode: Any
    DHTID: Any
    DHTLocalStorage: Any
    RecordValidatorBase: Any


def p2pd_path() -> Path:
    """The libp2p daemon that hivemind brings; FileNotFoundError if hivemind is not installed."""
    path = _package_folder() / "hivemind_cli" / "p2pd"
    if not path.is_file():
        raise FileNotFoundError(f"hivemind is installed without its libp2p daemon ({path})")
    return path


@functools.cache
def load_hivemind() -> Hivemind:
    """Loads hivemind's P2P and DHT without torch. Once a process; takes about 0.25 CPU-seconds."""
    if "hivemind" not in sys.modules:
        package = types.ModuleType("hivemind")
        package.__path__ = [str(_package_folder())]
        sys.modules["hivemind"] = package
        for name, classes in (
            ("mpfuture", ("MPFuture",)),
            ("tensor_descr", ("TensorDescriptor", "BatchTensorDescriptor")),
        ):
            stand_in = types.ModuleType(f"hivemind.utils.{name}")
            for class_name in classes:
                setattr(stand_in, class_name, type(class_name, (), {}))
            sys.modules[stand_in.__name__] = stand_in
    level_name = logging.getLevelName(logging.WARNING)
    p2p = importlib.import_module("hivemind.p2p")
    node = importlib.import_module("hivemind.dht.node")
    _quiet_logging(level_name)
    # Its storages drop what is past its time by *their* clock, also from answers that we read.
    for module in (node, importlib.import_module("hivemind.utils.timed_storage")):
        setattr(module, "get_dht_time", swarm_time)  # noqa: B010
    return Hivemind(
        P2P=p2p.P2P,
        PeerID=p2p.PeerID,
        Multiaddr=importlib.import_module("hivemind.utils.multiaddr").Multiaddr,
        DHTNode=node.DHTNode,
        DHTID=node.DHTID,
        DHTLocalStorage=importlib.import_module("hivemind.dht.storage").DHTLocalStorage,
        RecordValidatorBase=importlib.import_module("hivemind.dht.validation").RecordValidatorBase,
    )


def _package_folder() -> Path:
    if (loaded := sys.modules.get("hivemind")) is not None:
        return Path(next(iter(loaded.__path__)))
    spec = importlib.util.find_spec("hivemind")
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError("hivemind is not installed")
    return Path(next(iter(spec.submodule_search_locations)))


def _quiet_logging(level_name: str) -> None:
    """Undoes what hivemind does to logging at import: its own handler, and another level name."""
    logging.addLevelName(logging.WARNING, level_name)
    switch = importlib.import_module("hivemind.utils.logging").use_hivemind_log_handler
    switch("nowhere")
    # Its warnings tell of single nodes that did not answer, or of foreign bytes: not for a person.
    logging.getLogger("hivemind").setLevel(logging.ERROR)


def swarm_time() -> float:
    """The swarm's time in seconds: our wall clock, corrected by what was measured."""
    return time.time() + _clock.offset_s


def set_clock_offset(seconds: float) -> None:
    """Corrects `swarm_time` for this process (hivemind asks a global function for the time)."""
    _clock.offset_s = seconds


class _Clock:
    offset_s = 0.0


_clock = _Clock()


class EntryRules:
    """Seals our entries and judges those of others. `now` is the swarm's time in seconds."""

    def __init__(self, signer: records.Signer, now: Callable[[], float]) -> None:
        self._signer = signer
        self._now = now
        self._verified = functools.lru_cache(_VERIFIED_MAX)(_verify_entry)

    def seal(self, key: bytes, value: bytes, expires: float) -> bytes:
        """The sealed form of our own entry under `key` (the DHT's hash of the key)."""
        expires_ms = int(expires * 1000)
        signature = self._signer.sign(_entry_message(key, expires_ms, value))
        return records.encode(SealedEntry(expires_ms, value, signature))

    def accepts(self, key: bytes, subkey: bytes, sealed: bytes, expires: float) -> bool:
        """Whether `sealed` is what the peer of `subkey` signed for `key`, not living too long."""
        if not subkey.startswith(_SUBKEY_HEAD) or len(subkey) != len(_SUBKEY_HEAD) + KEY_BYTES:
            return False
        try:
            entry = records.decode(sealed, SealedEntry, _SEALED_BYTES_MAX)
        except records.RecordError:
            return False
        if expires * 1000 > entry.expires_ms + 1 or len(entry.value) > VALUE_BYTES_MAX:
            return False
        if expires > self._now() + DHT_TTL_MAX_S + CLOCK_SLACK_S:
            return False
        return self._verified(PeerId(subkey[len(_SUBKEY_HEAD) :]), key, entry)

    def open(self, sealed: bytes) -> bytes:
        """The value in an entry that was accepted before."""
        return records.decode(sealed, SealedEntry, _SEALED_BYTES_MAX).value


def _entry_message(key: bytes, expires_ms: int, value: bytes) -> bytes:
    return records.framed(_DOMAIN, records.NO_RUN, records.encode((key, expires_ms, value)))


def _verify_entry(peer: PeerId, key: bytes, entry: SealedEntry) -> bool:
    message = _entry_message(key, entry.expires_ms, entry.value)
    return records.verify_ed25519(peer, message, entry.signature)


class DhtBook:
    """An `AddressBook` on hivemind's DHT. `start` with a running p2pd; `close` before it ends."""

    def __init__(self, signer: records.Signer, *, client_only: bool) -> None:
        self._signer = signer
        self._client_only = client_only
        self._rules = EntryRules(signer, swarm_time)
        self._control: str | None = None
        self._p2p: Any = None
        self._node: Any = None
        self._storage: Any = None
        self._lock = asyncio.Lock()

    async def start(self, control_address: str) -> None:
        """Joins the DHT through the p2pd at the multiaddr `control_address` (a Unix socket)."""
        async with self._lock:
            self._control = control_address
            await self._build()

    async def close(self) -> None:
        """Leaves the DHT and ends its tasks. Idempotent."""
        async with self._lock:
            self._control = None
            await self._tear_down()

    async def meet(self, peers: Sequence[PeerId], timeout_s: float) -> int:
        """Makes connected peers known to our DHT node and looks around; how many answered."""
        hivemind = load_hivemind()
        node = await self._ready()
        if node is None:
            return 0
        targets = [hivemind.PeerID(PEER_PREFIX + peer) for peer in peers]
        answered = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                found = await asyncio.gather(*(node.protocol.call_ping(peer) for peer in targets))
                answered = sum(1 for node_id in found if node_id is not None)
                if answered:
                    await node.find_nearest_nodes([node.node_id])
        return answered

    async def store(self, key: str, value: bytes, ttl_s: float) -> bool:
        """Stores our value (≤ 2 KiB) for `ttl_s` (≤ `DHT_TTL_MAX_S`); False if no node took it."""
        assert len(value) <= VALUE_BYTES_MAX, f"a value of {len(value)} bytes is too long"
        expires = swarm_time() + min(ttl_s, DHT_TTL_MAX_S)
        node = await self._ready()
        if node is None:
            return False
        work = node.store(
            key, value, expires, subkey=bytes(self._signer.peer), exclude_self=self._client_only
        )
        return bool(await self._guarded("store", work))

    async def get(self, key: str) -> dict[PeerId, bytes]:
        """The values under `key` by the peer that signed each; empty if none was found in time."""
        node = await self._ready()
        if node is None:
            return {}
        found = await self._guarded("get", node.get(key, latest=True))
        if found is None or not isinstance(found.value, dict):
            return {}
        now = swarm_time()
        return {
            PeerId(subkey): entry.value
            for subkey, entry in found.value.items()
            if entry.expiration_time > now
        }

    async def _guarded(self, what: str, work: Any) -> Any:
        """The result of one DHT call; None if it failed or took too long."""
        try:
            async with asyncio.timeout(LOOKUP_TIMEOUT_S):
                return await work
        except Exception as error:  # hivemind raises whatever a foreign answer makes it raise
            log.info("DHT %s failed: %s: %s", what, type(error).__name__, error)
            return None

    async def _ready(self) -> Any:
        """The DHT node, rebuilt if hivemind's connection to p2pd broke; None when closed."""
        async with self._lock:
            if self._control is not None and (self._node is None or self._broken()):
                await self._tear_down()
                with contextlib.suppress(Exception):  # no p2pd at the moment: the caller gets None
                    await self._build()
            return self._node

    def _broken(self) -> bool:
        """Whether the task that reads p2pd's answers ended.

        hivemind's reader dies of an answer that arrives just as its call is cancelled.
        """
        return bool(self._p2p._client.control._read_task.done())

    async def _build(self) -> None:
        hivemind = load_hivemind()
        self._p2p = await hivemind.P2P.replicate(hivemind.Multiaddr(self._control))
        self._p2p._client.control._read_task.add_done_callback(_retrieve)
        self._node = await hivemind.DHTNode.create(
            p2p=self._p2p,
            node_id=hivemind.DHTID.generate(source=bytes(self._signer.peer)),
            client_mode=self._client_only,
            record_validator=_validator(self._rules),
            strict=False,
            ensure_bootstrap_success=False,
            cache_size=_CACHED_KEYS_MAX,
            cache_locally=False,  # a remembered answer lacks whoever came since
            cache_nearest=0,
            cache_refresh_before_expiry=0,
        )
        protocol = self._node.protocol
        if self._storage is None:
            self._storage = _bounded_storage()
        protocol.storage = self._storage
        plain_check = protocol._validate_dictionary
        protocol._validate_dictionary = lambda key, dictionary: (
            len(dictionary) <= ENTRIES_PER_KEY_MAX and plain_check(key, dictionary)
        )

    @property
    def nodes(self) -> list[PeerId]:
        """Peers in our routing table, to `meet` again after a restart."""
        if self._node is None:
            return []
        table = self._node.protocol.routing_table
        raw = [peer.to_bytes() for peer in list(table.peer_id_to_uid)[:_REMEMBERED_NODES_MAX]]
        return [PeerId(peer[len(PEER_PREFIX) :]) for peer in raw if peer.startswith(PEER_PREFIX)]

    async def _tear_down(self) -> None:
        p2p, node, self._p2p, self._node = self._p2p, self._node, None, None
        if p2p is None:
            return
        if node is not None:
            node.is_alive = False
        link = p2p._client.control
        tasks = [link._read_task, link._write_task, *link._handler_tasks.values()]
        await p2p.shutdown()
        await _end_tasks([task for task in tasks if task is not None])


async def end_stray_tasks() -> None:
    """Ends the tasks that hivemind starts and forgets; only when no other DHT node is in use."""
    folder = str(_package_folder())
    stray = []
    for task in asyncio.all_tasks():
        code = getattr(task.get_coro(), "cr_code", None)
        if code is not None and code.co_filename.startswith(folder):
            stray.append(task)
    await _end_tasks(stray)


async def _end_tasks(tasks: list[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _retrieve(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.info("hivemind's connection to p2pd ended: %s: %s", type(error).__name__, error)


def _validator(rules: EntryRules) -> Any:
    """`rules` as a record validator of hivemind."""

    class Validator(load_hivemind().RecordValidatorBase):  # type: ignore[misc]  # Any as base
        def validate(self, record: Any) -> bool:
            return rules.accepts(record.key, record.subkey, record.value, record.expiration_time)

        def sign_value(self, record: Any) -> bytes:
            value = msgspec.msgpack.decode(record.value, type=bytes)
            return rules.seal(record.key, value, record.expiration_time)

        def strip_value(self, record: Any) -> bytes:
            return msgspec.msgpack.encode(rules.open(record.value))

    return Validator()


def _bounded_storage() -> Any:
    """hivemind's storage with a bound on the entries under one key."""

    class BoundedStorage(load_hivemind().DHTLocalStorage):  # type: ignore[misc]  # Any as base
        def store_subkey(self, key: Any, subkey: Any, value: bytes, expiration_time: float) -> bool:
            present = self.get(key)
            full = present is not None and len(present.value) >= ENTRIES_PER_KEY_MAX
            if full and subkey not in present.value:
                return False
            return bool(super().store_subkey(key, subkey, value, expiration_time))

    return BoundedStorage(maxsize=KEYS_MAX)
