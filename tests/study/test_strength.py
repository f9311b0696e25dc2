"""The warning about a teacher that is not clearly better than the student."""

import pytest

from vocagnolm.train.strength import CLEARLY_BETTER, teacher_warning


@pytest.mark.parametrize(
    ("teacher", "student", "warned"),
    [
        (0.83, 1.02, False),
        (1.11, 1.02, True),
        (1.0, 1.0, True),
        (CLEARLY_BETTER, 1.0, False),
        (None, 1.0, False),
        (1.0, None, False),
    ],
)
def test_warns_unless_clearly_better(
    teacher: float | None, student: float | None, warned: bool
) -> None:
    message = teacher_warning(teacher, student)
    assert (message is not None) == warned
    if message is not None:
        assert "bits per byte" in message
