"""A tokenizer of bytes with a chat template, marked for training or not, without anything fetched."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIALS = ["<pad>", "<eos>", "<start>"]
PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ '<start>' + message['role'] + '\n' + message['content'] + '<eos>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<start>assistant\n' }}{% endif %}"
)
MARKED_TEMPLATE = (
    "{% for message in messages %}{{ '<start>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<eos>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<eos>' }}{% endif %}{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<start>assistant\n' }}{% endif %}"
)


def build_chat_tokenizer(template: str | None = PLAIN_TEMPLATE) -> PreTrainedTokenizerFast:
    """One token for every byte, and `SPECIALS`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*SPECIALS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIALS)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        additional_special_tokens=["<start>"],
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )
