"""Options of recipes: dataclasses that need no torch. `shared.py` has what several recipes take."""
