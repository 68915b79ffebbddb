"""The merging weights of Decoupled DiLoCo, tokens² / steps, beside ours: for `parity.py` only.

In the mean of the progress, which already grows with steps, they make an input count with the
square of its tokens.
"""

from __future__ import annotations

from typing import Any

from dugnad.averaging import merge


def add_quadratic() -> None:
    """Make the rule "quadratic" known to this process."""
    merge.RULES["quadratic"] = _quadratic


def _quadratic(problem: Any, g: int) -> Any:
    """Weights tokens · tokens/steps; Any: the problem is the merging module's own."""
    weights = problem.tokens * problem.per_step
    return weights * problem.clips / weights.sum()
