"""Is the answer in what a model wrote right? `grading` is the door.

Standard library only, and math-verify (in a process of its own) for LaTeX.
"""
