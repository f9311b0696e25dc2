"""One vocabulary or two. No torch."""

from vocagnolm.errors import TrainingError


def refuse_other_vocabulary(student: dict[str, int], teacher: dict[str, int]) -> None:
    """kld and rho1 presuppose one vocabulary; the teacher may have more tokens (Llemma's 16)."""
    other = [token for token, index in student.items() if teacher.get(token) != index]
    if other:
        raise TrainingError(
            f"This method needs one vocabulary, but {len(other):,} of the student's "
            f"{len(student):,} tokens are not the teacher's (for example {other[0]!r}). "
            "Use method guided or uld."
        )
