"""The paper's analyses and tables."""
