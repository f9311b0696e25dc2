"""The built-in sample: text of the kinds that a mathematical web corpus is made of."""

# ruff: noqa: E501  (the sample's lines are as long as they are)

SAMPLE: tuple[str, ...] = (
    """Probability, Uncertainty

A bag holds 3 red marbles and 5 blue ones. We draw two marbles without putting the first one back.
What is the probability that both are blue? The first marble is blue with probability 5/8. If it
was, 4 of the remaining 7 marbles are blue, so the answer is 5/8 x 4/7 = 20/56 = 5/14, or about
35.7%. Notice that the two draws are not independent: what we learn from the first changes what we
expect of the second.
""",
    r"""\begin{theorem}[Bayes]
Let $A$ and $B$ be events with $\Pr(B) > 0$. Then
\[
  \Pr(A \mid B) = \frac{\Pr(B \mid A)\,\Pr(A)}{\Pr(B)} .
\]
\end{theorem}
\begin{proof}
Both sides, multiplied by $\Pr(B)$, equal $\Pr(A \cap B)$. \qedhere
\end{proof}
For a partition $A_1, \dots, A_n$ of the sample space, $\Pr(B) = \sum_{i=1}^{n} \Pr(B \mid A_i)\Pr(A_i)$,
and with $\lambda = 0.5$ we get $\int_0^\infty \lambda e^{-\lambda x}\,dx = 1$.
""",
    """Question: A shop sells pencils in boxes of 12. Lena buys 7 boxes and gives 19 pencils away. How
many pencils does she have left?
Answer: 7 boxes hold 7 * 12 = <<7*12=84>>84 pencils. After giving 19 away, 84 - 19 = <<84-19=65>>65
pencils are left.
#### 65
""",
    """import math

def newton_sqrt(a: float, tolerance: float = 1e-12) -> float:
    \"\"\"Square root by Newton's method.\"\"\"
    x = max(a, 1.0)
    while abs(x * x - a) > tolerance * a:
        x = 0.5 * (x + a / x)
    return x

assert math.isclose(newton_sqrt(2), 1.41421356237, rel_tol=1e-9)
""",
    """<div class="post"><p>Posted by <b>euler_fan_1707</b> &middot; 3 hours ago</p>
<p>Can somebody check this? I get ∫₀¹ x² dx = ⅓, but the book says 0,33… 🤔</p>
<a href="/t/4711?page=2#reply">Reply</a> | Share | Report</div>
  * * *
Cookie settings    Privacy    © All rights reserved
""",
    """Soit f une fonction dérivable sur [a, b]. D'après le théorème des accroissements finis, il existe c
tel que f(b) − f(a) = f′(c)(b − a). Für stetige Funktionen gilt der Zwischenwertsatz.
数学の問題：三角形の内角の和は180度である。 α + β + γ = π, ∀ε > 0 ∃δ > 0.
""",
    """| n | n! | 2^n |
|---|---:|---:|
| 0 | 1 | 1 |
| 5 | 120 | 32 |
| 10 | 3,628,800 | 1,024 |
| 20 | 2,432,902,008,176,640,000 | 1,048,576 |
""",
)

# Texts on which tokenizers part ways with their own input. They decide `exact` or `lossy`; they
# are no part of the measured shares.
STRESS: tuple[str, ...] = (
    " leading and trailing ",
    "runs   of    spaces\t\ttabs\r\nand lines\n\n\n",
    "e\u0301 A\u030a \u1112\u1161\u11ab \u0958 \u212b",  # decomposed, Hangul jamo, excluded, Ångström sign
    "\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1f0 \u2581literal \u2581\u2581 <0x0A> </s> <|endoftext|>",
    "\ufeffbyte order mark, NUL \x00, bell \x07",
)
