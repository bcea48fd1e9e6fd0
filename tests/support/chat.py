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
_TURN = "{% for message in messages %}{{ '<start>' + message['role'] + '\n' }}"
_FUNCTION = "call.function.name + ':' + "
_END = "{{ '<eos>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start>assistant\n' }}{% endif %}"
CALL_TEMPLATES = {
    "null content, arguments as text": (  # DeepSeek V3
        _TURN + "{% if message['role'] == 'assistant' and message['content'] is none %}"
        "{% for call in message['tool_calls'] %}{{ " + _FUNCTION + "call['function']['arguments'] }}{% endfor %}"
        "{% endif %}"
        "{% if message['content'] is not none %}{{ message['content'] }}{% endif %}" + _END
    ),
    "any content, arguments as objects": (  # Llama 3.1, Hermes, Mistral
        _TURN + "{% if message.tool_calls is defined and message.tool_calls is not none %}"
        "{% for call in message.tool_calls %}{{ " + _FUNCTION + "(call.function.arguments | tojson) }}{% endfor %}"
        "{% else %}{{ message['content'] | trim }}{% endif %}" + _END
    ),
    "content if there is any, either arguments": (  # Qwen 3
        _TURN + "{% if message.content is string %}{{ message.content }}{% endif %}"
        "{% for call in message.tool_calls or [] %}{% set given = call.function.arguments %}"
        "{{ " + _FUNCTION + "(given if given is string else "
        "given | tojson) }}{% endfor %}" + _END
    ),
    "searches in content, asks for keys": (  # gpt-oss
        _TURN + "{% if 'content' in message and '<start>' in message.content %}{{ raise_exception('no') }}{% endif %}"
        "{% if 'tool_calls' in message %}{% set call = message.tool_calls[0] %}{{ " + _FUNCTION
        + "(call.function.arguments | tojson) }}{% else %}{{ message.content }}{% endif %}" + _END
    ),
    "concatenates content": (
        _TURN + "{{ message.content }}{% set text = '' + message.content %}{% for call in message.tool_calls or [] %}"
        "{{ " + _FUNCTION + "(call.function.arguments | tojson) }}{% endfor %}" + _END
    ),
    "writes arguments as they are": (
        _TURN + "{{ message.content or '' }}{% for call in message.tool_calls or [] %}"
        "{{ call.function.name }}:{{ call.function.arguments }}{% endfor %}" + _END
    ),
}  # fmt: skip
"""Templates that write a call of f as f:{"a": 1}, with what families of models ask of a turn."""


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
