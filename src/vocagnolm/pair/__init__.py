"""A student and its teacher over some text, before anything is trained: how their tokens lie over
each other (`preflight`, `fit`)."""

from vocagnolm.pair.preflight import Pair, WideToken, compare
from vocagnolm.pair.sample import SAMPLE, STRESS

__all__ = ["SAMPLE", "STRESS", "Pair", "WideToken", "compare"]
