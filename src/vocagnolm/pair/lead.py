"""How far is the teacher ahead of the student? Both losses over the same text, as a whole and
source by source: where the teacher is hardly better, its guidance has little to say."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vocagnolm.pair.sample_blocks import STRETCH, SampleBlocks


@dataclass(frozen=True)
class Lead:
    """Nats per student token, over the stretches of text that both models predict whole."""

    student: float
    teacher: float

    @property
    def share(self) -> float:
        """Of the student's loss, what the teacher spares; below 0 where it is the worse one."""
        return 1 - self.teacher / self.student


def teachers_lead(read: SampleBlocks, nll: NDArray[np.float32]) -> Lead:
    """Over all of the sample."""
    return _lead(read, nll, np.ones(nll.shape, np.bool_))


def lead_by_source(read: SampleBlocks, nll: NDArray[np.float32]) -> dict[str, Lead] | None:
    if read.named is None:
        return None
    names = sorted({str(name) for name in read.named[read.predicted]})
    return {name: _lead(read, nll, read.named == name) for name in names}


def _lead(read: SampleBlocks, nll: NDArray[np.float32], where: NDArray[np.bool_]) -> Lead:
    stretch_nll = read.guidance[STRETCH]  # the teacher's, of the whole stretch, on each token
    known = where & read.predicted & ~np.isnan(stretch_nll)
    rows, width = read.stretch.shape
    number = (read.stretch + width * np.arange(rows)[:, None])[known]
    _, first = np.unique(number, return_index=True)
    tokens = int(known.sum()) or np.nan
    return Lead(
        student=float(nll[known].sum(dtype=np.float64) / tokens),
        teacher=float(stretch_nll[known][first].sum(dtype=np.float64) / tokens),
    )
