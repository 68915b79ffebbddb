"""The style sheet and the script: legible in light and dark, and at home."""

import re

import pytest

from dugnad.dashboard.assets import assets
from dugnad.dashboard.svgstyle import SVG_STYLE

CSS = assets()["css"].data.decode()
JS = assets()["js"].data.decode()
INKS = ("ink", "dim", "link", "good", "s1", "s2", "s3", "s4", "s5", "s6", "s7")


def palettes(text: str) -> list[dict[str, str]]:
    """The blocks of variables, in order."""
    blocks = re.findall(r"\{([^{}]*--ink:[^{}]*)\}", text)
    return [dict(re.findall(r"--([a-z0-9-]+):\s*(#[0-9a-f]{3,6})", block)) for block in blocks]


def luminance(colour: str) -> float:
    """Relative luminance, as WCAG 2 defines it."""
    digits = colour[1:] if len(colour) == 7 else "".join(2 * c for c in colour[1:])
    parts = [int(digits[n : n + 2], 16) / 255 for n in (0, 2, 4)]
    linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """Contrast of two colours, 1 to 21."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_every_ink_has_contrast_on_every_paper_in_light_and_dark() -> None:
    light, dark, chosen_dark = palettes(CSS)
    assert dark == chosen_dark
    for palette in (light, dark):
        for ink in INKS:
            for paper in ("paper", "card", "mark"):
                if ink.startswith("s") and paper == "mark":
                    continue  # charts are drawn on cards
                assert contrast(palette[ink], palette[paper]) >= 4.5, (ink, paper, palette[ink])
        assert contrast(palette["warn"], palette["warn-paper"]) >= 4.5


def test_charts_that_stand_alone_have_contrast_too() -> None:
    for palette in palettes(SVG_STYLE):
        for ink in set(palette) - {"paper", "rule"}:
            assert contrast(palette[ink], palette["paper"]) >= 4.5, ink


@pytest.mark.parametrize("text", [CSS, JS])
def test_nothing_is_loaded_from_elsewhere(text: str) -> None:
    found = [one for one in re.findall(r"https?://[^\s\"'`)]+", text) if "www.w3.org" not in one]
    assert found == []
    assert "@import" not in text


def test_motion_is_only_for_those_who_want_it() -> None:
    before, _, after = CSS.partition("@media (prefers-reduced-motion: no-preference)")
    assert "animation" not in before
    assert "transition" not in before
    assert "animation" in after


def test_the_script_puts_no_text_in_as_markup() -> None:
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert word not in JS


def test_names_change_with_the_content() -> None:
    assert re.fullmatch(r"[0-9a-f]{16}\.css", assets()["css"].name)
