"""Whether peers that go on merging while they are asked hold the same."""

from dugnad.peer.demosettle import Agreement, board_difference

Shown = tuple[list[int], list[str], str]


def shown(versions: list[int], prefix: str = "", board: str = "") -> Shown:
    """A peer whose digest of version v of fragment f is 'f.v'."""
    return versions, [f"{prefix}{f}.{v}" for f, v in enumerate(versions)], board


def test_equal_heads_at_one_moment_agree() -> None:
    agreement = Agreement(["a", "b"])
    agreement.show({"a": shown([3, 2], board="x"), "b": shown([3, 2], board="x")})
    assert agreement.digests_equal
    assert agreement.board == "x"
    assert agreement.difference() == ""


def test_a_peer_that_lags_agrees_once_it_has_shown_what_the_other_showed_before() -> None:
    agreement = Agreement(["a", "b"])
    agreement.show({"a": shown([3, 2], board="1"), "b": shown([2, 2], board="0")})
    assert agreement.difference() == "not every survivor has reached version 3 of fragment 0"
    agreement.show({"a": shown([4, 2], board="2"), "b": shown([3, 2], board="1")})
    assert agreement.digests_equal
    assert agreement.board == "1"


def test_what_was_equal_long_ago_does_not_count() -> None:
    agreement = Agreement(["a", "b"])
    agreement.show({"a": shown([5]), "b": shown([3])})
    agreement.show({"a": shown([3]), "b": shown([3])})  # below what a had at the first look
    assert not agreement.digests_equal


def test_another_digest_of_the_same_version_is_told_with_its_holders() -> None:
    agreement = Agreement(["a", "b"])
    agreement.show({"a": shown([3, 2]), "b": shown([3, 2], prefix="other ")})
    assert not agreement.digests_equal
    assert agreement.difference() == "version 3 of fragment 0 differs: a 0.3, b other 0."


def test_a_fork_that_was_settled_meanwhile_agrees() -> None:
    agreement = Agreement(["a", "b"])
    agreement.show({"a": shown([3]), "b": shown([3], prefix="fork ")})
    agreement.show({"a": shown([3]), "b": shown([3])})
    assert agreement.digests_equal


def test_nothing_is_agreed_before_everybody_has_answered() -> None:
    agreement = Agreement(["a", "b"])
    agreement.show({"a": shown([1])})
    agreement.show({})
    assert not agreement.digests_equal
    assert agreement.difference() == "not every survivor answered"
    assert agreement.board == ""


def test_boards_that_differ_are_not_called_equal() -> None:
    agreement = Agreement(["a", "b"])
    agreement.show({"a": shown([1], board="x"), "b": shown([1], board="y")})
    assert agreement.digests_equal
    assert agreement.board == ""


def test_where_boards_differ_is_told_in_a_line() -> None:
    one = {"tokens": 5, "rows": [{"units": 1, "name": "x"}]}
    two = {"tokens": 6, "rows": [{"units": 2, "name": "x"}]}
    told = board_difference({"a": one, "b": two})
    assert told == "rows[0].units a: 1, b: 2; tokens a: 5, b: 6"
    assert board_difference({"a": one, "b": dict(one)}) == ""
    many = {"a": {"k": list(range(9))}, "b": {"k": list(range(1, 10))}}
    assert board_difference(many).endswith("and 6 more")
