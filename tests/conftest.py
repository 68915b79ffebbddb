"""What all tests share: hypothesis without a stopwatch, and the same examples on every CI run."""

import datetime
import os

from hypothesis import settings

# Two busy cores make a per-example deadline a coin toss, so none is set.
settings.register_profile("dugnad", deadline=None, derandomize=os.environ.get("CI") == "true")
settings.load_profile("dugnad")

# Decided once, before the workers start: two of them around midnight must collect the same tests.
os.environ.setdefault("TEST_SEED", str(datetime.date.today().toordinal()))
