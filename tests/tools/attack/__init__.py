"""Attacks on the engine: kills, Ctrl-C, bad inputs and leaks, each a script of its own.

    python -m tests.tools.attack.recipe_kills      one of them, in its long form
    make attack                                    all, and the page docs/robustness.md

The test suite runs them in a quick form (`tests/integration/test_attack.py`).
"""
