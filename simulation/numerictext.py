"""Text made in code for the numeric scenarios: words, their frequencies, and which follow which.

A vocabulary of words made of syllables, with frequencies that fall as 1/rank, and for each word a
few others that mostly follow it. A model learns first the letters, then the spelling, then the
words; so its loss falls for as long as with real text, and the text needs no file and no network.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

SYMBOLS: Final = 27
"""A space and 26 letters."""
WORDS: Final = 300
FOLLOWERS: Final = 8
FOLLOWING: Final = 0.75
"""Share of words that are one of the followers of the word before them."""
_VOWELS: Final = np.array([1, 5, 9, 15, 21])
_CONSONANTS: Final = np.array([n for n in range(1, SYMBOLS) if n not in (1, 5, 9, 15, 21)])


def made_text(length: int, seed: int) -> npt.NDArray[np.int64]:
    """``length`` symbols (0 is the space, 1 to 26 the letters), the same for the same seed.

    The language, its words and which follow which, is the same for all seeds.
    """
    words, followers = _language()
    rng = np.random.default_rng([seed, 2])
    count = length // 2 + 1  # no word is shorter than a letter and a space
    common = 1.0 / np.arange(1, WORDS + 1)
    anywhere = rng.choice(WORDS, count, p=common / common.sum())
    follows = rng.random(count) < FOLLOWING
    which = np.minimum(rng.geometric(0.4, count) - 1, FOLLOWERS - 1)
    text: list[npt.NDArray[np.int64]] = []
    word, made = 0, 0
    for number in range(count):
        word = int(followers[word, which[number]] if follows[number] else anywhere[number])
        text.append(words[word])
        made += words[word].size
        if made >= length:
            break
    return np.concatenate(text)[:length]


def _language() -> tuple[list[npt.NDArray[np.int64]], npt.NDArray[np.int64]]:
    """The words, each with a space at its end, and the followers of each."""
    rng = np.random.default_rng([1814, 1])
    words = []
    for _ in range(WORDS):
        syllables = rng.integers(1, 4)
        letters: list[int] = []
        for _ in range(syllables):
            letters += [int(rng.choice(_CONSONANTS)), int(rng.choice(_VOWELS))]
            if rng.random() < 0.3:
                letters.append(int(rng.choice(_CONSONANTS)))
        words.append(np.array([*letters, 0], np.int64))
    return words, rng.integers(0, WORDS, (WORDS, FOLLOWERS))
