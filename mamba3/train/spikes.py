"""SpikeDetector: whether the loss has jumped above what it was, for good and not in one odd batch.

    m       median of the losses of the last `window` steps
    d       median of their distances from m
    high    m + max(factor d, LEAST); a loss above it is suspicious
    spike   CONFIRM suspicious losses, one after the other

Medians hardly move with a few losses that are far off. A loss that falls lies under m, however fast
it falls; one that is noisy has a large d.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Any

# A batch that is hard passes; what takes several to pass is no matter of the batch.
CONFIRM = 3
# Rises of fewer nats are none to go back for. Where a model knows all there is to know, losses are
# tiny, and their distances tinier.
LEAST = 0.1


class SpikeDetector:
    """Looks at the losses of a run, one step after the other.

    Args:
        window: losses that a new one is compared with. Until there are so many, nothing is a spike.
        factor: how many times the usual distance from the median a loss may be above it. A
            normal distribution passes 12 once in 10^15 times, an exponential one in 1000.
        nonfinite: whether a loss that is not finite is a spike, at once; else it is left out.

    Example:
        >>> detector = SpikeDetector(window=4)
        >>> [detector.update(i, loss) for i, loss in enumerate([2.0, 2.1, 2.0, 2.1, 5, 6, 7])]
        [None, None, None, None, None, None, 4]
    """

    def __init__(self, window: int = 64, factor: float = 12.0, *, nonfinite: bool = False):
        if window < 2:
            raise ValueError(f"window must be at least 2, got {window}")
        if not factor > 1:
            raise ValueError(f"factor must be more than 1, got {factor}")
        self.factor, self.nonfinite = factor, nonfinite
        self._usual: deque[float] = deque(maxlen=window)
        self._suspicious: list[tuple[int, float]] = []

    def update(self, step: int, loss: float) -> int | None:
        """Take a step's loss up.

        Returns:
            The step at which the loss jumped, as soon as that is sure; after it, everything is
            forgotten. Else None.
        """
        if not math.isfinite(loss) and not self.nonfinite:
            return None
        if not math.isfinite(loss) or loss > self.limit:
            self._suspicious.append((step, loss))
            if math.isfinite(loss) and len(self._suspicious) < CONFIRM:
                return None
            first = self._suspicious[0][0]
            self._usual.clear()
            self._suspicious.clear()
            return first
        # What came to nothing belongs to the usual noise.
        self._usual.extend(before for _, before in self._suspicious)
        self._usual.append(loss)
        self._suspicious.clear()
        return None

    @property
    def limit(self) -> float:
        """The loss above which one is suspicious; infinite while few have been seen."""
        if len(self._usual) < self._usual.maxlen:
            return math.inf
        middle = median(self._usual)
        distance = median(abs(loss - middle) for loss in self._usual)
        return middle + max(self.factor * distance, LEAST)

    def state_dict(self) -> dict[str, Any]:
        """The losses that the next ones are compared with, as plain values."""
        return {"usual": list(self._usual), "suspicious": [list(one) for one in self._suspicious]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state; a smaller window keeps the last losses."""
        self._usual.clear()
        self._usual.extend(state["usual"])
        self._suspicious = [(step, loss) for step, loss in state["suspicious"]]
