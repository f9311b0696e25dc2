"""Studies: the paper's analyses, tables and figures, and questions of our own.

A study is a grid of recipes that ends in one table and one figure (`run_study`, or the command
`vocagnolm study run`). This package imports `vocagnolm` and is never imported by it; the command
line finds `study` by its entry point. The public names are loaded on first use.
"""

from typing import TYPE_CHECKING

from vocagnolm.errors import lazy_names

_PUBLIC = {"design": ("Study", "load_study", "shipped_studies"), "run": ("run_study",)}

if TYPE_CHECKING:
    from vocagnolm_studies.design import Study, load_study, shipped_studies
    from vocagnolm_studies.run import run_study

__all__ = ["Study", "load_study", "run_study", "shipped_studies"]

__getattr__, __dir__ = lazy_names(__name__, _PUBLIC)
