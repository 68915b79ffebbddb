"""Which codec a hand-in or a commit goes in."""

from __future__ import annotations

import random

import pytest

from dugnad.averaging.codecs import CODECS
from dugnad.averaging.linkcontrol import GAMMA, HOME_SHARE, LINKS_MAX, SHARE_MIN, LinkControl
from dugnad.averaging.linkrate import Delivery
from dugnad.dht.advert import SLOW_BYTES_PER_S
from dugnad.dht.ids import PeerId

HOME, OTHER = PeerId(bytes([1]) * 32), PeerId(bytes([2]) * 32)
SIZES = (400_000, 200_000)
SECONDS = 10.0


def size_of(codec: str, fragment: int = 0) -> int:
    return CODECS[codec].encoded_size(SIZES[fragment])


def rate_for(codec: str, fragment: int = 0) -> float:
    """The rate at which hand-ins of `fragment` in this codec just fit."""
    share = GAMMA * SECONDS * SIZES[fragment] / sum(SIZES)
    return size_of(codec, fragment) / share * 1.001


def control(rate: float = 0.0, **options: str) -> LinkControl:
    made = LinkControl(SIZES, **options)
    if rate:
        made.delivered(HOME, Delivery(int(rate), 1.0))
    return made


def test_codecs_are_named_from_the_richest_down() -> None:
    sizes = [codec.encoded_size(100_000) for codec in CODECS.values()]
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("codec", CODECS)
def test_the_richest_codec_that_fits_wins(codec: str) -> None:
    names = list(CODECS)
    assert control(rate_for(codec)).hand_in(0, HOME, SECONDS).codec == codec
    leaner = control(rate_for(codec) * 0.99).hand_in(0, HOME, SECONDS)
    expected = names[min(names.index(codec) + 1, len(names) - 1)]
    assert leaner.codec == expected
    assert leaner.fits == (codec != names[-1])


def test_fragments_share_the_time_until_the_next_hand_in_by_their_sizes() -> None:
    made = control(rate_for("int8"))
    chosen = [made.hand_in(p, HOME, SECONDS) for p in range(len(SIZES))]
    assert [one.codec for one in chosen] == ["int8", "int8"]
    assert sum(one.size for one in chosen) <= GAMMA * made.rate_to(HOME) * SECONDS


def test_an_unknown_link_is_slow_unless_the_peer_says_better_and_ours_is_known() -> None:
    made = control()
    assert made.rate_to(OTHER, 5e6) == SLOW_BYTES_PER_S
    made.delivered(HOME, Delivery(2_000_000, 1.0))
    assert made.rate_to(OTHER) == SLOW_BYTES_PER_S
    assert made.rate_to(OTHER, 5e6) == 2e6
    assert made.rate_to(OTHER, 1e6) == 1e6


def test_the_owners_limit_bounds_a_quick_link() -> None:
    made = control(1e7)
    made.up_limit = rate_for("int4")
    assert made.hand_in(0, HOME, SECONDS).codec == "int4"


def test_what_else_the_uplink_carries_is_taken_off_but_never_everything() -> None:
    rate = rate_for("int8")
    alone = control(rate).hand_in(0, HOME, SECONDS)
    busy = control(rate).hand_in(0, HOME, SECONDS, other=0.1 * rate)
    full = control(rate).hand_in(0, HOME, SECONDS, other=5.0 * rate)
    assert alone.budget > busy.budget > full.budget
    assert full.budget == pytest.approx(SHARE_MIN * alone.budget)


def test_contributions_that_are_listed_late_lower_the_density_until_they_are_not() -> None:
    made = control(rate_for("topk-6.25"))
    for _ in range(3):
        made.listed(0, 1)
    late = made.hand_in(0, HOME, SECONDS)
    assert late.codec == "topk-3.12"
    assert "late" in late.reason
    assert made.hand_in(1, HOME, SECONDS).codec == "topk-6.25", "another fragment is not late"
    for _ in range(20):
        made.listed(0, 0)
    assert made.hand_in(0, HOME, SECONDS).codec == "topk-6.25"


def test_the_run_may_set_the_richest_and_the_owner_the_only_codec() -> None:
    assert control(1e9, richest="int8").hand_in(0, HOME, SECONDS).codec == "int8"
    assert control(1.0, fixed="float16").hand_in(0, HOME, SECONDS).codec == "float16"


def test_what_stays_on_this_machine_needs_no_link() -> None:
    assert control(richest="int8").hand_in(0, None, SECONDS).codec == "int8"


def test_only_so_many_links_are_remembered_and_the_newest_are_kept() -> None:
    made = control()
    peers = [PeerId(n.to_bytes(32, "big")) for n in range(2 * LINKS_MAX)]
    for peer in peers:
        made.delivered(peer, Delivery(1000, 0.001))
        made.delivered(peers[0], Delivery(1000, 0.001))
    assert len(made.up) == LINKS_MAX
    assert peers[0] in made.up


def test_a_commit_follows_the_slowest_quarter_and_names_who_cannot() -> None:
    made = control()
    rates = [rate_for("float16")] * 6 + [rate_for("float32")] * 4
    rates[0] = 1.0
    downs = {PeerId(bytes([n]) * 32): rate for n, rate in enumerate(rates)}
    chosen = made.commit(0, downs, SECONDS)
    assert chosen.codec == "float16"
    assert chosen.behind == (PeerId(bytes(32)),)
    richer = dict.fromkeys(list(downs)[1:], rate_for("float32"))
    assert made.commit(0, {**downs, **richer}, SECONDS).codec == "float32"


def test_a_commit_is_never_coarser_than_its_codecs_nor_richer_than_the_run() -> None:
    downs = {HOME: 1.0}
    assert control().commit(0, downs, SECONDS).codec == "int8"
    assert control(leanest_commit="int4").commit(0, downs, SECONDS).codec == "int4"
    assert control().commit(0, downs, SECONDS).behind == (HOME,)
    assert control(richest_commit="int8").commit(0, {HOME: 1e9}, SECONDS).codec == "int8"
    assert control().commit(0, {}, SECONDS).codec == "float32"


def test_only_who_cannot_fetch_a_commit_before_the_next_is_called_too_slow() -> None:
    made = control(leanest_commit="int4")
    size = CODECS["int4"].encoded_size(SIZES[0])
    just = size * sum(SIZES) / (SIZES[0] * SECONDS)
    assert made.commit(0, {HOME: 1.01 * just}, SECONDS).behind == ()
    assert made.commit(0, {HOME: 0.99 * just}, SECONDS).behind == (HOME,)


def test_a_member_of_unknown_downlink_counts_as_slow_and_is_not_called_so() -> None:
    made = control()
    unknown = made.commit(0, {HOME: 0.0}, SECONDS / 10.0)
    slow = made.commit(0, {HOME: float(SLOW_BYTES_PER_S)}, SECONDS / 10.0)
    assert (unknown.codec, unknown.reason) == (slow.codec, slow.reason)
    assert (unknown.behind, slow.behind) == ((), (HOME,))


@pytest.mark.parametrize("seed", range(8))
def test_a_line_that_halves_and_doubles_is_followed_within_two_hand_ins(seed: int) -> None:
    """Each hand-in takes what the line at that time needs, with a tenth of noise."""
    rng = random.Random(seed)
    made = control()
    rate = rng.uniform(2.5e5, 5e6)
    since = 0
    for number in range(120):
        if number and number % 6 == 0:
            rate *= rng.choice([0.5, 2.0]) if 1e5 < rate < 1e7 else (2.0 if rate < 1e6 else 0.5)
            since = 0
        chosen = made.hand_in(0, HOME, SECONDS)
        made.delivered(HOME, Delivery(chosen.size, chosen.size / (rate * rng.uniform(0.9, 1.1))))
        since += 1
        if since < 2:
            continue
        following = made.hand_in(0, HOME, SECONDS)
        assert made.rate_to(HOME) == pytest.approx(rate, rel=0.25)
        taken = following.size / rate
        assert taken <= SECONDS * SIZES[0] / sum(SIZES), "it is there before the next is due"
        names = list(CODECS)
        best = control(rate).hand_in(0, HOME, SECONDS).codec
        assert abs(names.index(following.codec) - names.index(best)) <= 1


def test_our_own_line_bounds_every_link_and_helps_those_that_are_unknown() -> None:
    made = control(1e6)
    made.line = 4e5
    assert made.rate_to(HOME) == 4e5
    assert made.rate_to(OTHER, 2e6) == 4e5
    assert made.rate_to(OTHER) == SLOW_BYTES_PER_S
    assert made.uplink == 4e5


def test_whoever_takes_long_to_serve_a_payload_leaves_a_homes_duty_to_better_lines() -> None:
    made = control(richest_commit="int8")
    size = CODECS["int8"].encoded_size(SIZES[0])
    made.line = 0.9 * 3 * size / (HOME_SHARE * SECONDS)
    better, like, worse = 2.0 * made.line, made.line, 0.5 * made.line
    assert not made.fit_for_home(0, SECONDS, [better, better, worse])
    assert made.fit_for_home(0, SECONDS, [like, like, like]), "on equal lines everybody"
    assert made.fit_for_home(0, SECONDS, [better, like, worse]), "the better half at least"
    assert made.fit_for_home(0, SECONDS, [0.0, 0.0, better]), "of unknown lines nothing is expected"
    made.line *= 1.2
    assert made.fit_for_home(0, SECONDS, [better, better, better]), "in time is good enough"


def test_of_any_swarm_at_least_half_are_fit_for_home() -> None:
    rng = random.Random(3)
    for _ in range(50):
        rates = [rng.choice([1e4, 3e4, 1e5, 1e6, 1e7]) for _ in range(rng.randint(1, 12))]
        fit = 0
        for at, rate in enumerate(rates):
            made = control(richest_commit="int8")
            made.line = rate
            fit += made.fit_for_home(0, SECONDS, rates[:at] + rates[at + 1 :])
        assert fit * 2 >= len(rates)


def test_a_peer_that_knows_nothing_of_its_line_or_is_limited_by_its_owner() -> None:
    made = control(richest_commit="int8")
    assert made.fit_for_home(0, SECONDS, [1e9, 1e9])
    made.line, made.up_limit = 1e9, 10.0
    assert not made.fit_for_home(0, SECONDS, [1e9, 1e9])
    assert made.fit_for_home(0, SECONDS, [])
