"""A table of outputs as models write them, right and wrong, for every task.

Columns: output, reference, correct, extracted. `...` in the last column means: something was
extracted, its spelling is no part of the contract.
"""

import threading
import time

import pytest

from vocagnolm.errors import UsageError
from vocagnolm.evaluate import Grade, grade
from vocagnolm.evaluate.suite import TASKS, task_named
from vocagnolm.evaluate.verifier import Verifier

NUMBERS = [
    # the protocol's own form
    ("There are 21 - 15 = 6 trees. The answer is 6.", "6", True, "6"),
    (" Olivia had 23 dollars. 23 - 15 is 8. The answer is 8.", "8", True, "8"),
    ("The answer is 7.", "6", False, "7"),
    ("She sells 9 * 2 = $<<9*2=18>>18.\n#### 18", "18", True, "18"),
    ("She sells 9 * 2 = $18.\n#### 19", "18", False, "19"),
    ("The final answer is 42", "42", True, "42"),
    ("the answer is: 42.", "42", True, "42"),
    ("So the answer is therefore 42.", "42", True, "42"),
    ("Answer: 42", "42", True, "42"),
    ("**Answer:** 42", "42", True, "42"),
    ("**The answer is 42.**", "42", True, "42"),
    ("The answer is **42**.", "42", True, "42"),
    ("The answer is *42*.", "42", True, "42"),
    ("The answer is\n42", "42", True, "42"),
    ("The answer is: \n\n42.", "42", True, "42"),
    ("The answer to the question is 42.", "42", True, "42"),
    ("The answer, in dollars, is 42.", "42", True, "42"),
    ("The answer should be 42 marbles.", "42", True, "42"),
    # separators, money, signs, units
    ("The answer is 1,234.", "1234", True, "1234"),
    ("The answer is 1,234,567.5 meters.", "1234567.5", True, "1234567.5"),
    ("The answer is 1234.", "1,234", True, "1234"),
    ("The answer is 1 234 567.", "1234567", True, "1234567"),
    ("The answer is 1\u202f234.", "1234", True, "1234"),
    ("The answer is $1{,}234$.", "1234", True, "1234"),
    ("The answer is 12,34.", "1234", False, None),
    ("The answer is $18.", "18", True, "18"),
    ("The answer is $18.00.", "18", True, "18"),
    ("The answer is \\$18.50.", "18.5", True, "18.5"),
    ("The answer is $18$.", "18", True, "18"),
    ("The answer is $\\$18$.", "18", True, "18"),
    ("The answer is 18 dollars.", "18", True, "18"),
    ("The answer is 18 dollars per day for 9 eggs.", "18", True, "18"),
    ("The answer is €18.", "18", True, "18"),
    ("The answer is USD 18.", "18", True, "18"),
    ("The answer is Rs. 500.", "500", True, "500"),
    ("The answer is -5.", "-5", True, "-5"),
    ("The answer is \u22125.", "-5", True, "-5"),
    ("The answer is \u20135 degrees.", "-5", True, "-5"),
    ("The answer is -$5.", "-5", True, "-5"),
    ("The answer is $-5$.", "-5", True, "-5"),
    ("The answer is 5.", "-5", False, "5"),
    ("The answer is -5.", "5", False, "-5"),
    ("The answer is 18cm.", "18", True, "18"),
    ("The answer is 18 cm.", "18", True, "18"),
    ("The answer is 30°.", "30", True, "30"),
    ("The answer is $30^\\circ$.", "30", True, "30"),
    ("The answer is 3rd.", "3", False, None),
    ("The answer is 5x.", "5", False, None),
    # percent
    ("The answer is 10%.", "10", True, "10%"),
    ("The answer is 10%.", "0.1", True, "10%"),
    ("The answer is 10\\%.", "0.1", True, "10%"),
    ("The answer is 10 percent.", "10", True, "10%"),
    ("The answer is 0.1.", "10%", True, "0.1"),
    ("The answer is 0.1.", "10", False, "0.1"),
    ("The answer is 10%.", "100", False, "10%"),
    # fractions, decimals, other spellings
    ("The answer is 3/4.", "0.75", True, "3/4"),
    ("The answer is 0.75.", "3/4", True, "0.75"),
    ("The answer is .75.", "0.75", True, "0.75"),
    ("The answer is $\\frac{3}{4}$.", "0.75", True, "3/4"),
    ("The answer is $\\dfrac34$.", "0.75", True, "3/4"),
    ("The answer is 1 1/2.", "1.5", True, "3/2"),
    ("The answer is 1½ hours.", "1.5", True, "3/2"),
    ("The answer is 2 and 1/2.", "2.5", True, "5/2"),
    ("The answer is 18.0.", "18", True, "18"),
    ("The answer is 18.", "18.0", True, "18"),
    ("The answer is 17.6.", "18", False, "17.6"),
    ("The answer is 18.2.", "18", False, "18.2"),
    ("The answer is 5.375.", "5.38", True, "5.375"),
    ("The answer is 5.3.", "5.38", False, "5.3"),
    ("The answer is 1.5 million.", "1500000", True, "1500000"),
    ("The answer is 3 thousand.", "3000", True, "3000"),
    ("The answer is 1.5e6.", "1500000", True, "1500000"),
    ("The answer is $1.5 \\times 10^6$.", "1500000", True, "1500000"),
    ("The answer is twelve.", "12", True, "12"),
    ("The answer is one hundred and twenty-five apples.", "125", True, "125"),
    ("The answer is 5/0.", "5", False, None),
    ("The answer is 3:30.", "3", False, None),
    # expressions
    ("The answer is 9 * 2 = 18.", "18", True, "18"),
    ("The answer is 9 * 2 = $18 per day.", "18", True, "18"),
    ("The answer is 9 * 2.", "18", False, None),
    ("The answer is 20 - 12.", "8", False, None),
    ("The answer is 15 (3 x 5).", "15", True, "15"),
    ("The answer is 20% of 50, which is 10.", "10", True, "10"),
    ("The answer is 20% of 50.", "10", False, None),
    ("The answer is that Janet makes $18 every day.", "18", True, "18"),
    ("The answer is Janet makes 9 eggs and $18.", "18", False, None),
    ("The answer is 5 or 6.", "5", False, None),
    ("The answers are 5 and 6.", "5", False, None),
    ("The answer is 10 to 15.", "10", False, None),
    ("The answer is 5 out of 20.", "5", False, None),
    ("The answer is 2 hours and 30 minutes.", "2", False, None),
    ("The answer is not 5.", "5", False, None),
    ("The answer is 3 dozen.", "3", False, None),
    ("The answer is unknown.", "5", False, None),
    ("The answer is \\boxed{18}.", "18", True, "18"),
    ("So she makes $\\boxed{\\$18}$ a day.", "18", True, "18"),
    ("so $\\boxed{\\text{18 dollars}}$", "18", True, "18"),
    ("so $x = \\boxed{1,\\!234}$", "1234", True, "1234"),
    ("$\\boxed{\\frac{1}{2}}$", "0.5", True, "1/2"),
    ("The total is \\boxed{1", "1", False, None),  # cut off in the middle
    # self-correction and trailing text
    ("The answer is 5. Wait, I made a mistake. The answer is 6.", "6", True, "6"),
    ("The answer is 18. I hope it is correct.", "18", True, "18"),
    ("The answer is 18. She also has 3 eggs left over.", "18", True, "18"),
    ("The answer is 18.\n\nNote that 5 days make a week.", "18", True, "18"),
    # the model goes on with the next example
    ("The answer is 18.\n\nQuestion: Tom has 3 cats.\nAnswer: The answer is 3.", "18", True, "18"),
    ("The answer is 18.\n\n\nQuestion: Tom has 3.\nAnswer: 3", "18", True, "18"),
    ("The answer is 18.\nQ: Tom has 3 cats.\nA: The answer is 3.", "18", True, "18"),
    ("The answer is 18. Question: Tom has 3 cats. Answer: The answer is 3.", "18", True, "18"),
    ("9 * 2 = 18\n\nProblem: Find 3.\nSolution: The answer is 3.", "18", True, "18"),
    ("The answer is 18.</s> The answer is 3.", "18", True, "18"),
    ("The answer is 18.<|im_end|>\n<|im_start|>user The answer is 3.", "18", True, "18"),
    ("Question: how many?\nAnswer: She has 9. The answer is 18.", "18", True, "18"),
    # nothing stated: the last sentence, if it can be read in one way only
    ("She sells 9 eggs.\nShe makes 9 * 2 = $18.", "18", True, "18"),
    ("16 - 3 - 4 = 9\n9 * 2 = 18", "18", True, "18"),
    ("Janet makes $18 every day.", "18", True, "18"),
    ("18", "18", True, "18"),
    ("$18", "18", True, "18"),
    ("18 dollars", "18", True, "18"),
    ("She has 3 apples and 5 oranges.", "5", False, None),
    ("She eats 3 eggs and then she", "3", False, None),
    ("First she has 16 eggs, then she eats 3", "3", False, None),
    ("How many eggs does she have if she eats 3?", "3", False, None),
    ("I do not know.", "5", False, None),
    ("", "5", False, None),
    ("   \n", "5", False, None),
    ("The answer is", "5", False, None),
    ("The answer is the number of apples.", "5", False, None),
    ("The answer is " + "9" * 5000 + ".", "9", False, None),
    ("The answer is 1e999.", "5", False, ...),
]

GSM_HARD = [
    ("The answer is -9867630.", -9867630.0, True, "-9867630"),
    ("The answer is −9,867,630.", -9867630.0, True, "-9867630"),
    ("The answer is 9867630.", -9867630.0, False, "9867630"),
    ("The answer is -9867630.4.", -9867630.0, False, "-9867630.4"),
    ("The answer is 3244047.1.", 3244047.0999999996, True, "3244047.1"),
    ("The answer is 14053029.67.", 14053029.666666666, True, "14053029.67"),
    ("The answer is 14053029.", 14053029.666666666, False, "14053029"),
    ("The answer is 0.0016791648.", 0.0016791648, True, "0.0016791648"),
    ("The answer is 6277334000.", 6277334000.0, True, "6277334000"),
    ("The answer is 6.277334 x 10^9.", 6277334000.0, True, "6277334000"),
]

SVAMP = [
    ("290 / 2 = 145 bananas. The answer is 145.", 145.0, True, "145"),
    ("The answer is 145 bananas in each group.", 145.0, True, "145"),
    ("The answer is 146.", 145.0, False, "146"),
]

MAWPS = [
    ("70 - 27 = 43. The answer is 43.", 43.0, True, "43"),
    ("The answer is 11.50.", 11.5, True, "11.5"),
    ("The answer is 2/3.", 0.6666666667, True, "2/3"),
    ("The answer is 0.6667.", 0.6666666667, False, "0.6667"),
    ("The answer is 0.67.", 0.6666666667, False, "0.67"),
    ("The answer is $1.84.", 1.84, True, "1.84"),
]

ASDIV = [
    ("7 + 2 = 9 apples. The answer is 9.", "9 (apples)", True, "9"),
    ("The answer is 9 apples.", "9 (apples)", True, "9"),
    ("The answer is 8.", "9 (apples)", False, "8"),
    ("The answer is 14.", "14  (seats)", True, "14"),
    ("The answer is 3:30 p.m.", "3:30 p.m.", True, ...),
    ("The answer is 3:30 PM.", "3:30 p.m.", True, ...),
    ("The answer is 4:30 PM.", "3:30 p.m.", False, ...),
    ("The answer is 5:6.", "5:6", True, ...),
    ("The answer is 5 : 6.", "5:6", True, ...),
    ("The answer is 5 to 6.", "5:6", True, ...),
    ("The answer is 6:5.", "5:6", False, ...),
    ("The answer is 5/2.", "5/2", True, "5/2"),
    ("The answer is 2.5.", "5/2", True, "2.5"),
    ("The answer is -1/3.", "-(1/3)", True, "-1/3"),
    ("The answer is 1/3.", "-(1/3)", False, "1/3"),
    ("The answer is Purple.", "Purple", True, "Purple"),
    ("The answer is purple.", "Purple", True, "purple"),
    ("The answer is blue.", "Purple", False, "blue"),
    ("The answer is yes.", "Yes", True, "yes"),
    ("The answer is no.", "Yes", False, "no"),
    ("The answer is the 60th caller.", "The 60th caller.", True, ...),
    ("The answer is Mrs. Hilt.", "Mrs. Hilt", True, "Mrs. Hilt"),
    ("They both run for a long time and it is hard to say who won.", "Mrs. Hilt", False, None),
]

TABMWP = [
    ("The mean is 672 / 8 = 84. The answer is 84.", "84", True, "84"),
    ("The answer is 22,600.", "22,600", True, "22600"),
    ("The answer is $5.38.", "5.38", True, "5.38"),
    ("The answer is 3/10.", "3/10", True, "3/10"),
    ("The answer is 0.3.", "3/10", True, "0.3"),
    ("The answer is 3 minutes per day.", "3", True, "3"),
    ("The answer is -3.", "3", False, "-3"),
    ("The answer is shortage.", "shortage", True, "shortage"),
    ("The answer is a shortage.", "shortage", True, ...),
    ("The answer is surplus.", "shortage", False, "surplus"),
    ("The answer is 'shortage'.", "shortage", True, "shortage"),
    ("The answer is Luna, who has 12 marbles.", "Luna", True, ...),
    ("The answer is Web Page Design class.", "Web Page Design class", True, ...),
    ("The answer is 2:35 P.M.", "2:35 P.M.", True, ...),
    ("The answer is 2:35 pm.", "2:35 P.M.", True, ...),
    ("The answer is 2:25 P.M.", "2:35 P.M.", False, ...),
    ("The answer is 1 hour.", "1 hour", True, "1 hour"),
    ("The answer is linear.", "nonlinear", False, "linear"),
    ("shortage", "shortage", True, "shortage"),
    ("\x05 many\ufffd", "shortage", False, None),
    ("At this price the quantity demanded is greater than the supply so people", "shortage",
     False, None),
]  # fmt: skip

MATH = [
    ("Therefore it is $\\boxed{[2,5)}$.\nFinal Answer: The final answer is $[2,5)$. I hope it is "
     "correct.", "[2,5)", True, "[2,5)"),
    ("Final Answer: The final answer is $24$. I hope it is correct.", "24", True, "24"),
    ("Final Answer: The final answer is $25$. I hope it is correct.", "24", False, "25"),
    ("The final answer is $24$. I hope it is correct.\n\nProblem:\nFind 3.\nSolution: $\\boxed{3}$",
     "24", True, "24"),
    ("so $\\boxed{\\frac{1}{2}}$.", "\\frac12", True, ...),
    ("so $\\boxed{0.5}$.", "\\frac{1}{2}", True, "0.5"),
    ("so $\\boxed{.5}$.", "\\frac{1}{2}", True, ".5"),
    ("so $\\boxed{\\dfrac{1}{2}}$.", "\\frac{1}{2}", True, ...),
    ("so $\\boxed{1/2}$.", "\\frac{1}{2}", True, "1/2"),
    ("so $\\boxed{0.333}$.", "\\frac{1}{3}", False, "0.333"),
    ("so $\\boxed{\\frac{14}{3}}$.", "4\\frac{2}{3}", True, ...),
    ("so $\\boxed{-\\frac{2}{3}}$.", "\\frac{-2}{3}", True, ...),
    ("so $\\boxed{\\frac{2}{3}}$.", "-\\frac{2}{3}", False, ...),
    ("so $\\boxed{\\sqrt{12}}$.", "2\\sqrt{3}", True, ...),
    ("so $\\boxed{\\sqrt2}$.", "\\sqrt{2}", True, ...),
    ("so $\\boxed{1.414}$.", "\\sqrt{2}", False, ...),
    ("so $\\boxed{\\frac{\\sqrt{\\frac{1}{4}}}{2}}$.", "\\frac{1}{4}", True, ...),
    ("so $\\boxed{(x+1)^2}$.", "x^2+2x+1", True, ...),
    ("so $\\boxed{x^2+2x}$.", "x^2+2x+1", False, ...),
    ("so $\\boxed{x = 3}$.", "3", True, ...),
    ("so $\\boxed{3}$.", "x=3", True, ...),
    ("so $\\boxed{y = 2x+3}$.", "y=3+2x", True, ...),
    ("so $\\boxed{1,000}$.", "1000", True, ...),
    ("so $\\boxed{1{,}000}$.", "1000", True, ...),
    ("so $\\boxed{10,\\!000}$.", "10{,}000", True, ...),
    ("so $\\boxed{10\\%}$.", "0.1", True, ...),
    ("so $\\boxed{10\\%}$.", "10", True, ...),
    ("so $\\boxed{10}$.", "10\\%", True, ...),
    ("so $\\boxed{20\\%}$.", "10\\%", False, ...),
    ("so $\\boxed{\u22125}$.", "-5", True, ...),
    ("so $\\boxed{5}$.", "-5", False, ...),
    ("so $\\boxed{\\$18.90}$.", "18.90", True, ...),
    ("so $\\boxed{18.9}$.", "\\$18.90", True, ...),
    ("so $\\boxed{30^\\circ}$.", "30", True, ...),
    ("so $\\boxed{30}$.", "30^{\\circ}", True, ...),
    ("so $\\boxed{30°}$.", "30^\\circ", True, ...),
    ("so $\\boxed{30 \\text{ degrees}}$.", "30^\\circ", True, ...),
    ("so $\\boxed{12 \\text{ cm}^2}$.", "12", True, ...),
    ("so $\\boxed{12}$.", "12\\text{ inches}", True, ...),
    ("so $\\boxed{12 \\mathrm{~cm}}$.", "12", True, ...),
    ("so $\\boxed{12\\text{ inches}}$.", "13\\text{ inches}", False, ...),
    ("The final answer is 12 square units.", "12", True, ...),
    ("so $\\boxed{\\text{Evelyn}}$.", "\\text{Evelyn}", True, ...),
    ("so $\\boxed{Evelyn}$.", "\\text{Evelyn}", True, ...),
    ("The answer is Evelyn.", "\\text{Evelyn}", True, "Evelyn"),
    ("so $\\boxed{\\text{Briana}}$.", "\\text{Evelyn}", False, ...),
    ("so $\\boxed{\\text{odd}}$.", "\\text{even}", False, ...),
    ("so $\\boxed{\\text{on}}$.", "\\text{no}", False, ...),
    ("so $\\boxed{C}$.", "\\text{(C)}", True, ...),
    ("so $\\boxed{(\\text{C})}$.", "\\text{C}", True, ...),
    ("so $\\boxed{\\textbf{(B)}}$.", "\\text{(C)}", False, ...),
    ("so $\\boxed{(2,5)}$.", "[2,5)", False, ...),
    ("so $\\boxed{[2, 5)}$.", "\\left[2,5\\right)", True, ...),
    ("so $\\boxed{(3,\\infty)\\cup(-\\infty,2)}$.", "(-\\infty,2)\\cup(3,\\infty)", True, ...),
    ("so $\\boxed{(-\\infty, 2) \\cup (3, \\infty)}$.", "(-\\infty,2]\\cup(3,\\infty)", False, ...),
    ("so $\\boxed{(2,1)}$.", "(1,2)", False, ...),
    ("so $\\boxed{\\left(3, \\frac{\\pi}{2}\\right)}$.", "(3,\\pi/2)", True, ...),
    ("so $\\boxed{2,1}$.", "1,2", True, ...),
    ("so $\\boxed{2 \\text{ and } 1}$.", "1,2", True, ...),
    ("so the solutions are $\\boxed{1}$ and $\\boxed{2}$.", "1,2", True, ...),
    ("so $\\boxed{2,1}$.", "(1,2)", False, ...),
    ("so $\\boxed{1}$.", "1,2", False, ...),
    ("so $\\boxed{\\{2,1\\}}$.", "\\{1,2\\}", True, ...),
    ("so $\\boxed{\\{2,3\\}}$.", "\\{1,2\\}", False, ...),
    ("so $\\boxed{\\pm 2}$.", "-2,2", True, ...),
    ("so $\\boxed{x=2 \\text{ or } x=3}$.", "2,3", True, ...),
    ("The answers are $2$ and $3$.", "2,3", True, ...),
    ("so $x \\in \\boxed{[2,5)}$.", "[2,5)", True, ...),
    ("The answer is $x \\in [2,5)$.", "[2,5)", True, ...),
    ("**Final Answer**: 42", "42", True, "42"),
    ("**Final Answer**\n\n$$\\boxed{42}$$", "42", True, "42"),
    ("so $\\boxed{\\begin{bmatrix}1&2\\\\3&4\\end{bmatrix}}$.",
     "\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}", True, ...),
    ("so $\\boxed{\\begin{pmatrix}1&2\\\\3&5\\end{pmatrix}}$.",
     "\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}", False, ...),
    ("so $\\boxed{\\begin{array}{cc}1&2\\\\3&4\\end{array}}$.",
     "\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}", True, ...),
    ("so $\\boxed{3+4i}$.", "4i+3", True, ...),
    ("so $\\boxed{3-4i}$.", "4i+3", False, ...),
    ("so $\\boxed{52_8}$.", "52_8", True, ...),
    ("so $\\boxed{52_9}$.", "52_8", False, ...),
    ("so $\\boxed{x \\leq 3}$.", "x\\le 3", True, ...),
    ("so $\\boxed{x < 3}$.", "x\\le 3", False, ...),
    ("so $\\boxed{6\\pi}$.", "6\\pi", True, ...),
    ("so $\\boxed{6π}$.", "6\\pi", True, ...),
    ("so $\\boxed{18.85}$.", "6\\pi", False, ...),
    ("so \\[ x = \\boxed{5}. \\]", "5", True, "5"),
    ("so \\boxed 5", "5", True, "5"),
    ("We get \\fbox{5}.", "5", True, "5"),
    ("first \\boxed{4}, no: \\boxed{5}.", "5", True, "5"),
    ("The answer is $x=5$.", "5", True, ...),
    ("The answer is 5.", "5", True, "5"),
    ("The answer is \\(\\frac{1}{2}\\).", "0.5", True, ...),
    ("The answer is $\\frac{1}{2}$ of the total.", "0.5", True, ...),
    ("Therefore, the sum is $x = 7$.", "7", True, "7"),
    ("Therefore $a = 3$ and $b = 4$.", "4", False, None),
    ("We do not know how to solve this problem because", "4", False, None),
    ("so $\\boxed{\\frac{1}{2", "\\frac12", False, None),
    ("", "4", False, None),
    ("so $\\boxed{}$.", "4", False, None),
    ("\\frac{1}{2}", "0.5", True, ...),
    ("12", "12", True, "12"),
    ("hm let me", "4", False, None),
    ("\x05 many\ufffd", "4", False, None),
    # a whole solution as the reference
    ("so $\\boxed{10}$.", "The difference between 36 and 26 is $\\boxed{10}$.", True, "10"),
]  # fmt: skip

CHOICES = [
    ("Final Answer: The final answer is (B).", "B", True, "B"),
    ("Final Answer: The final answer is (B). I hope it is correct.", "C", False, "B"),
    ("The answer is B.", "B", True, "B"),
    ("The answer is B", "B", True, "B"),
    ("the answer is (b)", "B", True, "B"),
    ("The answer is b.", "B", True, "B"),
    ("The answer is b)", "B", True, "B"),
    ("The answer is [B].", "B", True, "B"),
    ("The answer is **B**.", "B", True, "B"),
    ("The answer is: **(B) 26**", "B", True, "B"),
    ("The correct answer is (B) 26.", "B", True, "B"),
    ("The correct answer is B) 26.", "B", True, "B"),
    ("The correct answer is B. 26", "B", True, "B"),
    ("The correct answer is B: 26", "B", True, "B"),
    ("The correct choice is B.", "B", True, "B"),
    ("The correct option is (B).", "B", True, "B"),
    ("The answer is option B.", "B", True, "B"),
    ("The answer is choice (B).", "B", True, "B"),
    ("The answer is $\\boxed{B}$.", "B", True, "B"),
    ("so $\\boxed{\\text{(B)}}$.", "B", True, "B"),
    ("so $\\boxed{\\textbf{(B) }26}$.", "B", True, "B"),
    ("Answer: B", "B", True, "B"),
    ("answer : b", "B", True, "B"),
    ("Answer: (B) 26", "B", True, "B"),
    ("B", "B", True, "B"),
    ("(B)", "B", True, "B"),
    ("(B) 26", "B", True, "B"),
    ("B. 26", "B", True, "B"),
    ("Therefore, (B) is correct.", "B", True, "B"),
    ("Hence, option B.", "B", True, "B"),
    ("Thus (B).", "B", True, "B"),
    ("The correct choice: B", "B", True, "B"),
    ("the correct option is b )", "B", True, "B"),
    ("The correct answer is therefore B", "B", True, "B"),
    ("The answer is $\\text{B}$.", "B", True, "B"),
    ("Thus (A) and (B) are equal.", "B", False, None),
    ("So A is the area of the square.", "A", False, None),
    ("Therefore, option B is the correct answer.", "B", True, "B"),
    ("The answer is A because x > 0.", "A", True, "A"),
    ("The answer is (A).\n\nProblem:\nNext.\nSolution: The final answer is (B).", "A", True, "A"),
    ("The answer is (A).\nWhat of the following ... (A) 1, (B) 2", "A", True, "A"),
    ("(A) is wrong since x > 2. The final answer is (B).", "B", True, "B"),
    ("The answer is (B) because (A) is negative.", "B", True, "B"),
    # no option, or no clear one
    ("The answer is a number.", "A", False, None),
    ("The answer is A square has four sides.", "A", False, None),
    ("The answer is 26.", "B", False, None),
    ("The answer is $\\boxed{26}$.", "B", False, None),
    ("The answer is (B) or (C).", "B", False, None),
    ("The answer is (B) and (C).", "B", False, None),
    ("The answer is B or C.", "B", False, None),
    ("The answer is not (B).", "B", False, None),
    ("The answer is neither (A) nor (B).", "B", False, None),
    ("The answer is none of the above.", "B", False, None),
    ("The value f(a) is larger than f(b).", "A", False, None),
    ("(A) is wrong.", "A", False, None),
    ("Consider triangle ABC with angle A.", "A", False, None),
    ("", "A", False, None),
]

TABLES = {
    "gsm8k": NUMBERS,
    "svamp": SVAMP,
    "mawps": MAWPS,
    "gsm_hard": GSM_HARD,
    "asdiv": ASDIV,
    "tabmwp": TABMWP,
    "math": MATH,
    "mathqa": CHOICES,
    "mmlu_stem": CHOICES,
    "sat": CHOICES,
}
ROWS = [(task, *row) for task, table in TABLES.items() for row in table]


@pytest.mark.parametrize(("task", "output", "gold", "correct", "extracted"), ROWS)
def test_table(task, output, gold, correct, extracted):
    result = grade(task, output, gold)
    assert result.correct is correct
    if extracted is ...:
        assert result.extracted
    else:
        assert result.extracted == extracted


def test_every_task_has_a_table():
    assert set(TABLES) == set(TASKS)


@pytest.mark.parametrize("task", ["svamp", "mawps", "gsm_hard", "asdiv", "tabmwp"])
def test_numbers_are_read_alike_in_every_word_problem_task(task):
    for output, gold, correct, extracted in NUMBERS:
        result = grade(task, output, gold)
        assert (result.correct, result.extracted is None) == (correct, extracted is None), output


def test_gold_in_the_benchmarks_own_form():
    assert grade("gsm8k", "The answer is 18.", "She sells 9 eggs.\n#### 18").correct
    assert grade("gsm8k", "The answer is 18.", 18).correct
    assert grade("svamp", "The answer is 145.", 145.0).correct
    assert grade("mmlu_stem", "The answer is (C).", 2).correct
    assert grade("mathqa", "The answer is (C).", "c").correct
    assert grade("sat", "The answer is (C).", "(C)").correct
    assert grade("math", "$\\boxed{7}$", 7).correct


# loops of a small model that were broken off at the limit on tokens, as it wrote them
LOOP = "There are 25 girls and 35 boys in each team. So there are 25 x 35 = 780 boys.\n" * 3


@pytest.mark.parametrize(
    "tail",
    [
        "So there are 25 x 35 = 7",
        "So there are 25 x 35 = 7 ",
        "So there are 25 x 35 = 7 boys",
        "So there are 7 = 7 - ",
        "The answer is 7,",  # 7,800?
    ],
)
@pytest.mark.parametrize("task", ["gsm8k", "gsm_hard", "asdiv"])
def test_a_number_may_be_cut_where_a_long_output_breaks_off(task, tail):
    assert grade(task, LOOP + tail, "7") == Grade(False, None)


@pytest.mark.parametrize("task", ["gsm8k", "math"])
def test_a_long_output_that_ends_by_itself_is_read(task):
    assert grade(task, LOOP + "So there are 25 x 35 = 7", "7") == Grade(False, None)
    for end in (".", "\n", "\n\nProblem: Find 3."):
        assert grade(task, LOOP + "So there are 25 x 35 = 7" + end, "7") == Grade(True, "7")
    for end in ("", ", because they play,", ". They play 25, 35,"):
        assert grade(task, LOOP + "The answer is 7" + end, "7").correct, end


def test_fifth_option_exists_in_mathqa_only():
    assert grade("mathqa", "The answer is (E).", "e") == Grade(True, "E")
    assert grade("mmlu_stem", "The answer is (E).", "A") == Grade(False, None)


def test_names():
    assert task_named("GSM8K").name == "gsm8k"
    assert task_named("MMLU-STEM").name == "mmlu_stem"
    assert task_named("sat_math").name == "sat"
    with pytest.raises(UsageError, match="unknown task 'gsm9k'; the tasks are: gsm8k, math"):
        grade("gsm9k", "The answer is 1.", "1")


def test_impossible_references_are_refused():
    with pytest.raises(ValueError, match="options ABCD"):
        grade("sat", "The answer is (A).", "F")
    with pytest.raises(ValueError, match="number answers"):
        grade("gsm8k", "The answer is 1.", "Purple")


def test_hanging_expression_does_not_stop_the_grader():
    verifier = Verifier(timeout_seconds=2)
    try:
        assert verifier.equal("x+1", "1+x")
        started = time.monotonic()
        # a factorial tower: minutes of big-integer arithmetic that no signal interrupts
        assert not verifier.equal("((((9!)!)!)!)!", "1")
        assert time.monotonic() - started < 20
        assert verifier.equal("x+1", "1+x")  # and the next one is answered
    finally:
        verifier.close()


def test_grading_from_a_thread():
    results: list[Grade] = []
    worker = threading.Thread(
        target=lambda: results.append(grade("math", "$\\boxed{(a+1)^2}$", "a^2+2a+1"))
    )
    worker.start()
    worker.join()
    assert results[0].correct
