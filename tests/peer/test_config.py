"""The volunteer's settings: where they come from and what is wrong with them."""

import pytest

from dugnad.averaging.codecs import CODECS
from dugnad.peer.config import (
    SETTING_NAMES,
    Endpoint,
    load_settings,
    parse_endpoint,
    usable_cores,
)
from dugnad.peer.errors import UserError
from dugnad.peer.paths import Home
from dugnad.peer.settingparse import CODEC_NAMES


def test_flags_beat_the_environment_which_beats_the_file_which_beats_the_defaults(
    home: Home,
) -> None:
    home.config.write_text('name = "file"\nthreads = 3\ncpu_share = 0.5\nlisten = "127.0.0.1:7"')
    environment = {"DUGNAD_NAME": "environment", "DUGNAD_THREADS": "2", "PATH": "/bin"}
    loaded = load_settings(home, {"name": "flag", "announce": None}, environment)
    settings = loaded.settings
    assert (settings.name, settings.threads, settings.cpu_share) == ("flag", 2, 0.5)
    assert settings.listen == Endpoint("127.0.0.1", 7)
    assert settings.outbound_only is False
    rows = {row.key: (row.value, row.source) for row in loaded.explain()}
    assert rows["name"] == ("flag", "flag")
    assert rows["threads"] == ("2", "DUGNAD_THREADS")
    assert rows["cpu_share"] == ("0.5", str(home.config))
    assert rows["outbound_only"] == ("false", "default")
    assert tuple(rows) == SETTING_NAMES


def test_threads_are_half_of_the_cores_unless_set(home: Home) -> None:
    loaded = load_settings(home, {}, {})
    assert loaded.settings.threads == max(1, usable_cores() // 2)
    assert "core" in loaded.sources["threads"]


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        ("0.0.0.0:4001", Endpoint("0.0.0.0", 4001)),
        ("4001", Endpoint("0.0.0.0", 4001)),
        (":0", Endpoint("0.0.0.0", 0)),
        ("[::]:5", Endpoint("::", 5)),
        ("box.example:65535", Endpoint("box.example", 65535)),
    ],
)
def test_an_endpoint_is_read(text: str, endpoint: Endpoint) -> None:
    assert parse_endpoint(text) == endpoint
    assert parse_endpoint(str(endpoint)) == endpoint


@pytest.mark.parametrize("text", ["", "host", "host:", "host:65536", "host:-1", "a b:1", "a/b:1"])
def test_what_is_no_endpoint_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"port|host"):
        parse_endpoint(text)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("thread = 2", "did you mean 'threads'?"),
        ("threads = 'many'", "'many' is not a number"),
        ("threads = 1.5", "whole number"),
        ("threads = true", "not a number"),
        ("threads = 100000", "not between"),
        ("cpu_share = 0", "nothing to train with"),
        ("cpu_share = nan", "not between"),
        ("cpu_share = inf", "not between"),
        ("threads = inf", "not a number"),
        ("outbound_only = 'perhaps'", "neither true nor false"),
        ("announce = ['1.2.3.4:5']", "not a multiaddr"),
        ("announce = 3", "not a list"),
        ('name = "a\\u202eb"', "invisible"),
        ("listen = 'here'", "port"),
        ("listen", "is not TOML"),
    ],
)
def test_what_is_wrong_in_the_file_is_said(home: Home, content: str, said: str) -> None:
    home.config.write_text(content)
    with pytest.raises(UserError) as caught:
        load_settings(home, {}, {})
    assert caught.value.number == "E002"
    assert said in caught.value.sentence


def test_a_mistyped_variable_is_an_error_with_the_nearest_name(home: Home) -> None:
    with pytest.raises(UserError, match="did you mean 'DUGNAD_THREADS'"):
        load_settings(home, {}, {"DUGNAD_THREDS": "2"})
    load_settings(home, {}, {"DUGNAD_HOME": "/x"})


def test_a_wrong_variable_and_a_wrong_flag_are_named(home: Home) -> None:
    with pytest.raises(UserError, match="DUGNAD_CPU_SHARE"):
        load_settings(home, {}, {"DUGNAD_CPU_SHARE": "half"})
    with pytest.raises(UserError) as caught:
        load_settings(home, {"cpu_share": 2.0}, {})
    assert caught.value.number == "E001"
    assert "--cpu-share" in caught.value.sentence


def test_addresses_in_the_environment_are_separated_by_commas(home: Home) -> None:
    text = "/ip4/203.0.113.7/tcp/1, /dns4/box.example/tcp/2"
    settings = load_settings(home, {}, {"DUGNAD_ANNOUNCE": text}).settings
    assert settings.announce == ("/ip4/203.0.113.7/tcp/1", "/dns4/box.example/tcp/2")


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        ("0.0.0.0:8080", Endpoint("0.0.0.0", 8080)),
        ("[::1]:8080", Endpoint("::1", 8080)),
        ("8080", Endpoint("127.0.0.1", 8080)),
        (":0", Endpoint("127.0.0.1", 0)),
        ("", None),
    ],
)
def test_a_page_is_off_unless_asked_for_and_a_bare_port_is_for_this_machine(
    home: Home, text: str, endpoint: Endpoint | None
) -> None:
    assert load_settings(home, {}, {}).settings.dashboard is None
    assert load_settings(home, {"dashboard": text}, {}).settings.dashboard == endpoint
    loaded = load_settings(home, {}, {"DUGNAD_DASHBOARD": text})
    assert loaded.settings.dashboard == endpoint
    shown = {row.key: row.value for row in loaded.explain()}
    assert shown["dashboard"] == (str(endpoint) if endpoint else "-")


def test_a_wrong_place_for_the_page_is_named(home: Home) -> None:
    with pytest.raises(UserError, match="dashboard") as caught:
        load_settings(home, {"dashboard": "true"}, {})
    assert "for example 0.0.0.0:8080" in caught.value.fix


def test_the_names_of_codecs_are_those_that_there_are() -> None:
    assert tuple(CODECS) == CODEC_NAMES
