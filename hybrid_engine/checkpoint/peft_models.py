"""Building peft models without a warning that tells the user nothing."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_renamed_attribute_warning() -> Iterator[None]:
    """For the construction of a `PeftModel`, which reads an attribute that transformers has renamed.

    peft 0.21.2 asks a model for `is_gradient_checkpointing` and transformers 5.23 answers with a FutureWarning. Neither
    can be told to do otherwise: the attribute is a property, and peft asks for it always.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning)
        yield
