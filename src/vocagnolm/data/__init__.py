"""Documents, and the packed blocks used for training."""
