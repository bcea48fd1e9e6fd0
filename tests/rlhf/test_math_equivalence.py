"""The reward `math` on answers as models write them, beside references as datasets have them."""

import pytest

pytest.importorskip("math_verify", reason="the extra `math` is not installed")

from hybrid_engine.rlhf.rewards.built_in import as_mathematics, load_math_equivalence

RIGHT = {
    "x^2+1": ["$x^2+1$", "x^2+1", "1+x^2", r"\[1+x^2\]", r"\(x^2+1\)", "$$x^{2}+1$$"],
    "1/2": [r"\frac{1}{2}", r"\frac12", r"\dfrac{1}{2}", "0.5", "1/2", r"\(\frac{1}{2}\)", r"\boxed{\tfrac{1}{2}}",
            "50%", r"50\%"],
    r"\[3\]": ["3", "x=3", r"\[x = 3\]", r"\boxed{\boxed{3}}", r"\boxed{\text{3}}", r"\boxed{3", "3 apples", "so 3"],
    r"2\sqrt{3}": ["sqrt(12)", r"\sqrt{12}", "2√3", "2*sqrt(3)", r"The answer is $2\sqrt3$."],
    r"\frac{3\pi}{4}": ["3π/4", "(3/4)*pi", r"\boxed{\frac{3}{4}\pi}"],
    "4": [r"First \boxed{3}, finally \boxed{4}", r"<think>\boxed{3}</think><answer>4</answer>", "3 is bad.\nAnswer: 4",
          "**4**", "2^2"],
    "3,5": [r"\boxed{3}, \boxed{5}", r"\boxed{5} and $\boxed{3}$", "x=3 or x=5", r"3 \text{ or } 5", r"\{3, 5\}"],
    "$[0,1)$": ["[0,1)", r"\left[0, 1\right)"],
    "3/2": ["1 1/2", r"1\frac{1}{2}", "1.5", "1.5e0", r"15\times10^{-1}"],
    "1234": ["1,234", "$1,234", r"\boxed{\$1{,}234}", "1234 cm^2"],
    "A": ["(A)", r"\text{A}", r"\boxed{\textbf{(A)}}", "The answer is (A)."],
    "Yes": ["Yes", r"\boxed{Yes}", r"\text{Yes}"],
    "5 apples": ["5", "5 apples", r"\boxed{5}"],
    "x>3": ["3 < x", "x > 3"],
    "-3": ["\u22123", r"\boxed{-3}"],
    r"\ln 2": ["ln 2", r"\ln(2)"],
    r"$\begin{pmatrix}1\\2\end{pmatrix}$": [r"\begin{pmatrix}1\\2\end{pmatrix}"],
}  # fmt: skip
WRONG = {
    "x^2+1": ["x^2+2", "x^2", "1", ""],
    "1/2": ["1/3", "1", "2", "The answer is 1/2, no: the answer is 1/3."],
    "2": ["2x", "x^2", r"\pm 2", r"\boxed{}", "I do not know"],
    "3": [r"\boxed{3}, finally \boxed{4}", r"<think>\boxed{3}</think><answer>4</answer>", "13", "-3"],
    "(1,2)": ["(2,1)", "[1,2]", "1"],
    "1/3": ["0.333", "0.3"],
    "Yes": ["No"],
    "A": ["B", "(B)"],
}


@pytest.fixture(scope="module")
def is_equal():
    return load_math_equivalence("math", 5.0)


@pytest.mark.parametrize("reference", RIGHT)
def test_right_answers_are_right_however_they_are_written(is_equal, reference):
    assert [answer for answer in RIGHT[reference] if not is_equal(answer, reference)] == []


@pytest.mark.parametrize("reference", WRONG)
def test_wrong_answers_are_wrong(is_equal, reference):
    assert [answer for answer in WRONG[reference] if is_equal(answer, reference)] == []


def test_boxes_in_boxes_are_opened_in_one_pass():
    assert as_mathematics("\\boxed{" * 30_000 + "\\frac{1}{2}" + "}" * 30_000) == "$\\frac{1}{2}$"
