"""Grading by the rules of the paper's harness, beside our own."""

import pytest

from vocagnolm.errors import UsageError
from vocagnolm.questions import Grade, grade

# task, output, reference, right and extracted by the paper's rules, right by ours
ROWS = [
    # where nothing is stated, the last number of any output
    ("gsm8k", "She has 3 apples and 5 oranges.", "5", True, "5", False),
    ("gsm8k", "She eats 3 eggs and then she", "3", True, "3", False),
    ("gsm8k", "16 - 3 = 13, so 1,300 in all, is it", "1300", True, "1300", False),
    ("gsm8k", "-4 and then .5", "0.5", True, ".5", False),
    ("gsm8k", "#### 18 is the answer to question 7", "7", True, "7", False),
    ("gsm8k", "I do not know.", "5", False, None, False),
    # what is stated goes to the end of the output
    ("gsm8k", "The answer is 18.", "18", True, "18", True),
    ("gsm8k", "So the answer is: 18", "18", True, "18", True),
    ("gsm8k", "The answer is 5. No, the answer is 6.", "6", True, "6", True),
    ("gsm8k", "The answer is 18. She is happy.", "18", False, "18. She is happy", True),
    ("gsm8k", "The answer is 18.\nNote that 5", "18", False, "18.Note that 5", True),
    ("gsm8k", "The answer is 18 dollars.", "18", False, "18 dollars", True),
    ("gsm8k", "The answer is 18 miles.", "18", True, "18 miles", True),
    ("gsm8k", "The answer is twelve.", "12", True, "twelve", True),
    ("gsm8k", "The answer is $1,234.50.", "1234.5", True, "$1,234.50", True),
    ("gsm8k", "The answer is 9 * 2.", "18", True, "9 * 2", False),
    ("gsm8k", "The answer is 9 * 2 = 18.", "18", False, "9 * 2 = 18", True),
    ("gsm8k", "The answer is 1000(26).", "26000", True, "1000(26)", True),
    ("gsm8k", "\\boxed{4} eggs. The answer is 5.", "4", True, "4", False),
    ("gsm8k", "so \\boxed{18", "18", True, "18", False),
    # one in ten thousand, and a hundredth or a hundredfold
    ("gsm8k", "The answer is 18.001.", "18", True, "18.001", False),
    ("gsm8k", "The answer is 17.6.", "18", False, "17.6", False),
    ("gsm8k", "The answer is 0.18.", "18", True, "0.18", False),
    ("gsm8k", "The answer is 1800.", "18", True, "1800", False),
    ("gsm8k", "The answer is 0.1.", "0", False, "0.1", False),
    ("mawps", "The answer is 0.6667.", 0.6666666667, True, "0.6667", False),
    ("mawps", "The answer is 2/3.", 0.6666666667, True, "2/3", True),
    ("gsm_hard", "The answer is 1e999.", "5", False, "1e999", False),
    ("gsm_hard", "The answer is 5/0.", "5", False, "5/0", False),
    # words
    ("asdiv", "The answer is purple.", "Purple", True, "purple", True),
    ("asdiv", "The answer is blue.", "Purple", False, "blue", False),
    ("asdiv", "The answer is 9.", "9 (apples)", True, "9", True),
    ("tabmwp", "The answer is 2:25 P.M.", "2:35 P.M.", False, "2:25 P.M", False),
    # LaTeX
    ("math500", "The final answer is $24$. I hope. \\boxed{3}", "24", True, "24", False),
    ("math500", "so $\\boxed{4}$, no $\\boxed{5}$", "5", True, "5", True),
    ("math500", "so \\\\boxed{\\\\frac{1}{2}}", "0.5", True, "\\\\frac{1}{2}", True),
    ("math500", "so $\\boxed{(2,5)}$", "[2,5)", True, "(2,5)", False),
    ("math500", "so $\\boxed{(2,6)}$", "[2,5)", False, "(2,6)", False),
    ("math500", "so $\\boxed{0.3333}$", "\\frac13", True, "0.3333", False),
    ("math500", "so $\\boxed{1.41421}$", "\\sqrt{2}", True, "1.41421", False),
    ("math500", "so $\\boxed{(x+1)^2}$", "x^2+2x+1", True, "(x+1)^2", True),
    ("math500", "so $\\boxed{x = 3}$", "3", True, "x = 3", True),
    ("math500", "so $\\boxed{52_9}$", "52_8", False, "52_9", False),
    ("math500", "It is 7, or 8", "8", True, "8", False),
    # letters: the first after "answer is", a word's first letter too; nothing else
    ("mathqa", "The final answer is (B).", "B", True, "B", True),
    ("mathqa", "The answer is (A). No, the answer is (B).", "A", True, "A", False),
    ("mathqa", "The correct choice is b )", "B", True, "B", True),
    ("mathqa", "The answer is a number.", "A", True, "A", False),
    ("mathqa", "Therefore, (B) is correct.", "B", False, None, True),
    ("mathqa", "B", "B", False, None, True),
    ("mathqa", "Hm.\nProblem: Next. The answer is (B).", "B", False, None, False),
]  # fmt: skip


@pytest.mark.parametrize(("task", "output", "gold", "correct", "extracted", "strict"), ROWS)
def test_both_protocols(task, output, gold, correct, extracted, strict):
    assert grade(task, output, gold, protocol="paper") == Grade(correct, extracted)
    assert grade(task, output, gold).correct is strict


def test_an_output_that_breaks_off_counts_in_the_paper():
    tail = "So there are 25 x 35 = 7"
    assert grade("gsm8k", tail, "7", complete=False) == Grade(False, None)
    assert grade("gsm8k", tail, "7", complete=False, protocol="paper") == Grade(True, "7")


def test_there_are_two_protocols():
    with pytest.raises(UsageError, match="protocol must be strict or paper, not 'minerva'"):
        grade("gsm8k", "The answer is 1.", "1", protocol="minerva")
