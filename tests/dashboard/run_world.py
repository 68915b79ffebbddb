"""A small run for the tests of the dashboard: fixed keys and times, friendly and hostile peers."""

import hashlib
from html.parser import HTMLParser

from dugnad.averaging.board import Basis, Board, Tally, make_board
from dugnad.dashboard import events as ev
from dugnad.dashboard.layout import View
from dugnad.dashboard.state import State, apply
from dugnad.dht.ids import PeerId, peer_text

NOW_MS = 1_796_007_600_000  # 2026-11-30 03:00:00 UTC
MINUTE_MS = 60_000
HOUR_MS = 3_600_000
DAY_MS = 86_400_000

HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onmouseover='alert(1)",
    "\u202egnp.exe\u202c",
    "a\x00b\x1b[31mred\r\nSet-Cookie: x=1",
    "https://evil.example/login",
    "javascript:alert(1)",
    "=HYPERLINK(1)",
    "x" * 5000,
    "\u200b\u200b\ufeff",
    "ﷺ" * 40,
    "e" + "\u0301" * 200,
    "{{7*7}}${7*7}",
    "\ud800",
    "]]>--></style></svg>",
)

VOID = frozenset({"br", "col", "hr", "input", "link", "meta"})


def keys(count: int) -> list[PeerId]:
    """Peers with keys from their numbers."""
    return [PeerId(hashlib.sha256(b"peer %d" % n).digest()) for n in range(count)]


def ids(count: int) -> list[str]:
    """Their text forms."""
    return [peer_text(key) for key in keys(count)]


def row(peer: str, name: str = "kind-otter", **changes: object) -> ev.PeerRow:
    """A peer that trains."""
    facts = {
        "roles": ("train",),
        "device": "cpu 4 cores",
        "tokens_per_s": 120.0,
        "link": "direct",
        "codec": "int8",
        "state": "training",
        "since_ms": NOW_MS - HOUR_MS,
        "last_seen_ms": NOW_MS - 1000,
        "listed_tokens": 1000,
        "version": "0.1.0",
    }
    return ev.PeerRow(peer=peer, name=name, **{**facts, **changes})  # type: ignore[arg-type]


def described(**changes: object) -> ev.RunDescribed:
    """What is trained."""
    facts = {
        "run": "a" * 52,
        "name": "Fjord stories",
        "purpose": "To see it work.",
        "licence": "Apache-2.0",
        "parameters": 400_000,
        "model": (("Layers", "4"),),
        "data": (("Data", "1 MB"),),
        "token_budget": 2_000_000,
        "link": "dugnad:" + "a" * 52 + "?peer=/ip4/203.0.113.7/tcp/1/p2p/" + ids(1)[0],
        "fragments": (200_000, 200_000),
    }
    return ev.RunDescribed(at_ms=NOW_MS, **{**facts, **changes})  # type: ignore[arg-type]


def board(peers: list[PeerId], now_ms: int = NOW_MS) -> Board:
    """A board on which the first peer has most."""
    tallies = {}
    for n, peer in enumerate(peers):
        tokens = 100_000 // (n + 1)
        tally = Tally(provisional=500, contributions=3, units=2)
        tally.settle(tokens, {now_ms // DAY_MS: tokens})
        tally.seen(now_ms - 2 * DAY_MS, now_ms - n * MINUTE_MS)
        tallies[peer] = tally
    return make_board(tallies, Basis(now_ms, 3 * len(peers), 0, (5, 4), (4, 3)))


def folded(*events: ev.AnyEvent, state: State | None = None) -> State:
    """The state after `events`."""
    state = state or State()
    for event in events:
        state = apply(state, event)
    return state


def story(names: tuple[str, ...] = ("kind-otter", "calm-birch", "kind-otter")) -> list[ev.AnyEvent]:
    """A run of three hours with a peer for each name."""
    peers = ids(len(names))
    begin = NOW_MS - 3 * HOUR_MS
    events: list[ev.AnyEvent] = [described()]
    for n, (peer, name) in enumerate(zip(peers, names, strict=True)):
        at_ms = begin + n * MINUTE_MS
        events.append(ev.PeerSeen(at_ms=at_ms, row=row(peer, name, reason=name, device=name)))
    for n in range(60):
        at_ms, tokens = begin + n * 3 * MINUTE_MS, 10_000 * (n + 1)
        events.append(ev.TrainLoss(at_ms=at_ms, tokens=tokens, loss=2 + 3 / (n + 1)))
        events.append(ev.HeldOutLoss(at_ms=at_ms, tokens=tokens, loss=2.1 + 3 / (n + 1)))
        events.append(ev.Throughput(at_ms=at_ms, tokens_per_s=100.0 + n))
        events.append(merge(n, peers[n % len(peers)], at_ms, tokens))
    events.append(ev.MergeDue(at_ms=NOW_MS, fragment=1, due_ms=NOW_MS + 30_000))
    events.append(ev.UnitsMoved(at_ms=NOW_MS, units=2, source=names[-1], target=names[0]))
    gone = peers[-1]
    events.append(ev.PeerGone(at_ms=NOW_MS - 5000, peer=gone, how="lost", reason=names[-1]))
    events.append(ev.BoardComputed(at_ms=NOW_MS, board=board(keys(len(names)))))
    events.append(ev.SampleText(at_ms=NOW_MS, prompt="Once ", text=names[0], step=60, tokens=9))
    events.append(ev.Status(at_ms=NOW_MS, peer=peers[0], name=names[0], state="training"))
    return events


def merge(n: int, home: str, at_ms: int, tokens: int) -> ev.HeadAdopted:
    """The n-th merge, of two fragments in turn."""
    return ev.HeadAdopted(
        at_ms=at_ms,
        fragment=n % 2,
        version=n // 2 + 1,
        digest=hashlib.sha256(b"%d" % n).hexdigest(),
        home=home,
        tokens_total=tokens,
        listed=((home, 10_000),),
        sent_bytes=1000,
        plain_bytes=4000,
    )


def view(*events: ev.AnyEvent, base: str = "") -> View:
    """A view of `events`, or of the story."""
    return View(folded(*(events or story())), NOW_MS, base)


class Checker(HTMLParser):
    """Reads a page and notes what is wrong with it, its elements and its text."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.faults: list[str] = []
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        names = [name for name, _ in attrs]
        if len(set(names)) != len(names):
            self.faults.append(f"{tag} has an attribute twice: {names}")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.faults.append(f"</{tag}> closes nothing")

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def of(self, tag: str) -> list[dict[str, str]]:
        """The attributes of each element of that kind."""
        return [attributes for name, attributes in self.elements if name == tag]

    @property
    def text(self) -> str:
        """All text."""
        return " ".join(" ".join(self.words).split())


def checked(page: str) -> Checker:
    """The page, read; an AssertionError when it is not well formed."""
    checker = Checker()
    checker.feed(page)
    checker.close()
    assert checker.faults == []
    assert checker.open == []
    ids_seen = [a["id"] for _, a in checker.elements if "id" in a]
    assert len(set(ids_seen)) == len(ids_seen), "ids repeat"
    return checker
