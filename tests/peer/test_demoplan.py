"""What the demo will do follows from what was asked and from the machine's speed."""

import pytest

from dugnad.peer.demoplan import (
    BATCH_SEQUENCES,
    MERGE_S,
    MODEL,
    STEPS_PER_MERGE_MAX,
    STEPS_PER_MERGE_MIN,
    DemoPlan,
    cores,
    run_file,
)

STEP_TOKENS = BATCH_SEQUENCES * MODEL.context


def plan(peers: int = 4, seed: int = 0, cores: int = 2, churn: bool = True) -> DemoPlan:
    """A demo of a minute and a half."""
    return DemoPlan(peers, 90.0, churn=churn, control=True, seed=seed, cores=cores)


def test_each_seed_kills_another_peer_and_the_organiser_is_not_spared() -> None:
    assert [plan(seed=seed).victim for seed in range(5)] == [0, 1, 2, 3, 0]


def test_the_late_peer_gets_the_link_of_a_survivor() -> None:
    for peers in range(1, 17):
        for seed in range(peers):
            chosen = plan(peers, seed)
            assert chosen.host != chosen.victim
            assert 0 <= chosen.host < peers


def test_nobody_is_killed_without_churn_or_when_nobody_would_be_left() -> None:
    assert plan(churn=False).victim is None
    assert plan(peers=1).victim is None


def test_the_late_peer_comes_after_the_loss_and_well_before_the_end() -> None:
    assert 0.0 < plan().kill_at_s < plan().join_at_s < 0.6 * plan().seconds


def test_learners_share_the_cores_equally_and_leave_some_for_the_rest() -> None:
    assert plan(peers=4, cores=2).cpu_share == pytest.approx(0.475)
    assert plan(peers=2, cores=8).cpu_share == 1.0
    assert plan(peers=16, cores=1).cpu_share * 16 <= 1.0
    assert cores() >= 1


def test_a_fragment_merges_every_few_seconds_on_slow_and_fast_machines() -> None:
    for speed in (1_000.0, 16_000.0, 40_000.0):
        chosen = plan()
        steps = chosen.steps_per_merge(speed)
        seconds = steps * STEP_TOKENS / (speed * chosen.cpu_share)
        assert seconds == pytest.approx(MERGE_S, rel=0.15) or steps == STEPS_PER_MERGE_MIN
    assert plan().steps_per_merge(0.0) == STEPS_PER_MERGE_MIN
    assert plan().steps_per_merge(1e12) == STEPS_PER_MERGE_MAX


def test_the_run_file_is_a_valid_one_at_any_speed() -> None:
    for speed in (0.0, 1.0, 16_000.0, 1e9):
        run = run_file(plan(seed=3), speed)
        assert run.model.config() == MODEL
        assert run.run.seed == 3
        assert run.run.token_budget > 10 * run.decay_tokens()
        assert run.train.batch_sequences == BATCH_SEQUENCES
        assert run.exchange.steps_per_merge == plan().steps_per_merge(speed)


def test_the_learning_rate_ends_with_the_demo() -> None:
    chosen = plan()
    swarm_tokens_per_s = 16_000.0 * chosen.cpu_share * chosen.peers
    seconds = run_file(chosen, 16_000.0).decay_tokens() / swarm_tokens_per_s
    assert 0.5 * chosen.seconds < seconds <= chosen.seconds
