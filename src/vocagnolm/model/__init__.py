"""Causal language models as a source of one number per token: -log p."""

from vocagnolm.model.head import token_nll
from vocagnolm.model.load import ModelFiles, load_causal_lm, open_model
from vocagnolm.model.nll import NllModel

__all__ = ["ModelFiles", "NllModel", "load_causal_lm", "open_model", "token_nll"]
