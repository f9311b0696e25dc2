"""Causal language models that provide one number per token: -log p."""

from vocagnolm.model.load import ModelFiles, load_causal_lm, open_model
from vocagnolm.model.nll import NllModel, token_nll

__all__ = ["ModelFiles", "NllModel", "load_causal_lm", "open_model", "token_nll"]
