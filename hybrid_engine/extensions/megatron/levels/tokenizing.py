"""What a strategy asks of a tokenizer: transformers' names, or those of Megatron's tokenizers."""

from typing import Any


class Tokenizing:
    """`tokenizer` under one set of names.

    Args:
        tokenizer: of transformers (`encode`, `decode`, `eos_token_id`), or one with `tokenize(text) -> ids`,
            `detokenize(ids)`, `eod` and `vocab_size`.

    Raises:
        ValueError: it has neither, or no end token.
    """

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self._is_megatrons = hasattr(tokenizer, "detokenize") and hasattr(tokenizer, "eod")
        kind = type(tokenizer).__name__
        if not self._is_megatrons and not all(hasattr(tokenizer, name) for name in ("encode", "decode")):
            raise ValueError(
                f"tokenizer is a {kind} without encode() and decode(), and without tokenize(), detokenize() and eod; "
                "pass a tokenizer of transformers"
            )
        end = tokenizer.eod if self._is_megatrons else getattr(tokenizer, "eos_token_id", None)
        if end is None:
            raise ValueError(f"tokenizer: {kind} has no end token; set its eos_token, which ends and pads rows")
        self.end: int = int(end)

    @property
    def vocab_size(self) -> int:
        """Token ids from 0 to below this are text; a model may have more logits, to pad its embedding."""
        return int(self.tokenizer.vocab_size if self._is_megatrons else len(self.tokenizer))

    def encode(self, text: str) -> list[int]:
        """The ids of a prompt, with whatever the tokenizer puts around one."""
        return list(self.tokenizer.tokenize(text) if self._is_megatrons else self.tokenizer.encode(text))

    def decode(self, ids: list[int]) -> str:
        """The text of a sequence, without special tokens."""
        if self._is_megatrons:
            return self.tokenizer.detokenize(ids)
        return self.tokenizer.decode(ids, skip_special_tokens=True)
