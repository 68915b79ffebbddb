"""The configuration file that `dugnad config init` writes."""

import stat

import pytest

from dugnad.peer.config import SETTING_NAMES, load_settings
from dugnad.peer.configfile import SECTIONS, config_text, write_config
from dugnad.peer.errors import UserError
from dugnad.peer.paths import Home


def test_the_file_changes_nothing_as_it_is_and_all_of_it_is_valid_when_uncommented(
    home: Home,
) -> None:
    defaults = load_settings(home, {}, {}).settings
    write_config(home)
    assert stat.S_IMODE(home.config.stat().st_mode) == 0o600
    assert load_settings(home, {}, {}).settings == defaults
    lines = config_text().splitlines()
    keys = tuple(f"# {key} =" for key in SETTING_NAMES)
    home.config.write_text("\n".join(x.removeprefix("# ") for x in lines if x.startswith(keys)))
    loaded = load_settings(home, {}, {})
    assert loaded.settings == defaults
    from_file = [key for key, source in loaded.sources.items() if source == str(home.config)]
    assert sorted([*from_file, "threads"]) == sorted({*SETTING_NAMES})


def test_every_setting_is_described_once() -> None:
    named = [key for section in SECTIONS.values() for key in section]
    assert sorted(named) == sorted(SETTING_NAMES)


def test_a_file_with_choices_in_it_is_not_overwritten(home: Home) -> None:
    home.config.write_text("cpu_share = 0.5")
    with pytest.raises(UserError, match="exists already") as caught:
        write_config(home)
    assert caught.value.exit_code == 34
    assert home.config.read_text() == "cpu_share = 0.5"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('cores = "3-1"', "not within"),
        ('cores = "a"', "not a number"),
        ('gpu = "some"', "not a number"),
        ("upload_mbit = 0.01", "too slow"),
        ("quota_gb = -1", "not between"),
        ('hours = "noon"', "not like"),
        ("hours = 3", "not a text"),
        ("pause_while = 3", "not a list"),
        ("idle_minutes = 0", "not between"),
        ('gpu_only_when_idle = "perhaps"', "neither"),
        ("only_when_idel = true", "did you mean 'only_when_idle'?"),
    ],
)
def test_a_wrong_limit_is_named_with_what_to_give(home: Home, line: str, said: str) -> None:
    home.config.write_text(line)
    with pytest.raises(UserError, match="E002") as caught:
        load_settings(home, {}, {})
    assert said in str(caught.value)


def test_limits_are_read_from_every_place_in_the_same_words(home: Home) -> None:
    home.config.write_text('hours = "sat 0-24"\npause_while = ["steam"]\ncores = 1\ngpu = 0')
    environment = {"DUGNAD_ON_BATTERY": "yes", "DUGNAD_UPLOAD_MBIT": "2.5"}
    settings = load_settings(home, {"only_when_idle": "true"}, environment).settings
    limits = settings.limits()
    assert (limits.hours, limits.pause_while, limits.on_battery) == ("sat 0-24", ("steam",), True)
    assert (settings.cores, settings.gpu, settings.upload_mbit) == ("1", "0", 2.5)
    assert limits.only_when_idle
