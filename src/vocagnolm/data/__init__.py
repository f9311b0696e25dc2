"""Documents, and the packed blocks that training reads."""
