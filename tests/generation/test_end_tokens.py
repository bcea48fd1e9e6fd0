"""What ends an answer: what tokenizer, configs and chat template say together, where it is drawn and where learned."""

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

import hybrid_engine
from hybrid_engine.generation.detokenize import answer_ends, end_token_ids, turn_end
from hybrid_engine.rlhf.data.encoding import encode_completion, encode_pair, encode_scored
from hybrid_engine.rlhf.data.rows import CompletionRow, ConversationRow, PreferenceRow, PromptRow
from hybrid_engine.rlhf.experience.evaluation import evaluate
from hybrid_engine.rlhf.experience.rollout import AnswerSampling, sample
from hybrid_engine.rlhf.runs.stages import save_stage
from tests.support.chat import build_chat_tokenizer

# As the models' own templates end a turn, tools and system prompts left out.
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}{% set role = 'model' if m['role'] == 'assistant' else m['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
PHI3 = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
LLAMA3 = (
    "{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim + "
    "'<|eot_id|>' }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
GPT_OSS = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ '<|start|>assistant<|channel|>final<|message|>' + "
    "m['content'] }}{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}{% else %}"
    "{{ '<|start|>' + m['role'] + '<|message|>' + m['content'] + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
LLAMA2 = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + ' ' + eos_token }}{% endif %}{% endfor %}"
)
GLM4 = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
TEXT = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"


def tokenizer_with(template, *specials, eos="<|endoftext|>", is_special=True):
    tokenizer = build_chat_tokenizer(None)
    tokenizer.add_special_tokens({"eos_token": eos, "bos_token": "<start>"})
    tokenizer.add_tokens(list(specials), special_tokens=is_special)
    tokenizer.chat_template = template
    return tokenizer


def ids_of(tokenizer, *tokens):
    return tokenizer.convert_tokens_to_ids(list(tokens))


@pytest.mark.parametrize(
    ("template", "specials", "end"),
    [
        (CHATML, ("<|im_start|>", "<|im_end|>"), "<|im_end|>"),
        (GEMMA, ("<start_of_turn>", "<end_of_turn>"), "<end_of_turn>"),
        (PHI3, ("<|user|>", "<|assistant|>", "<|end|>"), "<|end|>"),
        (LLAMA3, ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"), "<|eot_id|>"),
        (GPT_OSS, ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>"), "<|return|>"),
        (LLAMA2, (), "<|endoftext|>"),
        (GLM4, ("<|user|>", "<|assistant|>"), None),  # its generation_config.json names <|user|>
        (TEXT, (), None),
        (CHATML, (), None),  # no tokens of its own: letters end nothing
        ("{{ raise_exception('no') }}", (), None),
        (None, (), None),
    ],
)
@pytest.mark.parametrize("is_special", [True, False])
def test_a_turn_ends_with_the_first_special_token_that_the_template_writes_after_it(
    template, specials, end, is_special
):
    tokenizer = tokenizer_with(template, *specials, is_special=is_special)
    assert turn_end(tokenizer) == (None if end is None else tokenizer.convert_tokens_to_ids(end))


def test_another_template_has_another_end():
    tokenizer = tokenizer_with(PHI3, "<|end|>", "<|im_end|>")
    assert [turn_end(tokenizer)] == ids_of(tokenizer, "<|end|>")
    tokenizer.chat_template = CHATML
    assert [turn_end(tokenizer)] == ids_of(tokenizer, "<|im_end|>")


def small_llama(tokenizer, **options):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    ends = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": 0}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes, **ends | options)).eval()


def test_ends_are_the_union_of_generation_config_config_tokenizer_and_template_within_the_vocabulary():
    tokenizer = tokenizer_with(CHATML, "<|im_start|>", "<|im_end|>", "<|call|>")
    end, call, eos = ids_of(tokenizer, "<|im_end|>", "<|call|>", "<|endoftext|>")
    model = small_llama(tokenizer)
    assert end_token_ids(model, tokenizer) == [eos, end]
    model.generation_config = GenerationConfig(eos_token_id=[call, 10**6])
    model.config.eos_token_id = 7
    assert end_token_ids(model, tokenizer) == [call, 7, eos, end]
    assert answer_ends(tokenizer) == [eos, end]
    model.generation_config, tokenizer.chat_template = GenerationConfig(eos_token_id=eos), None
    assert end_token_ids(model, tokenizer) == [eos, 7]


QUESTION = [{"role": "user", "content": "Hi"}]


def drawn_tokens(model, tokenizer, **options):
    """What transformers draws after the question, the likeliest token each time."""
    inputs = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    tokens = model.generate(**inputs, do_sample=False, pad_token_id=0, max_new_tokens=8, **options)
    return tokens[0, inputs["input_ids"].shape[1] :].tolist()


@pytest.mark.parametrize("place", ["generation_config", "config", "template"])
def test_rollouts_evaluations_and_saved_models_stop_where_transformers_does(place, tmp_path):
    """The end is the token that the model draws third, whoever names it."""
    tokenizer = tokenizer_with(CHATML, "<|im_start|>", "<|im_end|>")
    model = small_llama(tokenizer)
    drawn = drawn_tokens(model, tokenizer)
    end = drawn[2]
    assert end not in drawn[:2] and len(drawn) == 8
    if place == "generation_config":
        model.generation_config.eos_token_id = [tokenizer.eos_token_id, end]
        assert drawn_tokens(model, tokenizer) == drawn[:3]
    elif place == "config":
        model.config.eos_token_id = end
    else:
        text = tokenizer.convert_ids_to_tokens(end)
        tokenizer.add_tokens([text], special_tokens=True)
        tokenizer.chat_template = CHATML.replace(
            "'<|im_end|>\n'", f"('{text}' if m['role'] == 'assistant' else '<|im_end|>\n')"
        )
    config = {"train_batch_size": 1, "optimizer": {"type": "AdamW"}, "hybrid_engine": {"enabled": True}}
    actor, *_ = hybrid_engine.initialize(model=model, config=config)
    actor.eval()
    row, options = PromptRow(prompt=QUESTION), AnswerSampling(max_prompt_tokens=64, max_new_tokens=8, temperature=1e-4)
    rollout = sample(actor, tokenizer, [row], options, seed=0)
    assert rollout.answers.response_ids == [drawn[:3]] and rollout.answers.is_cut_off == [False]
    assert rollout.answers.responses == [tokenizer.decode(drawn[:2], skip_special_tokens=True)]
    evaluation = evaluate(actor, tokenizer, [row], None, options)
    assert evaluation.figures["cut_off_share"] == 0 and evaluation.figures["length"] == 3
    save_stage(actor, tokenizer, tmp_path / "actor")
    saved = LlamaForCausalLM.from_pretrained(tmp_path / "actor")
    assert drawn_tokens(saved, tokenizer) == drawn[:3]


ANSWER = [{"role": "assistant", "content": "Yes."}]
OTHER = [{"role": "assistant", "content": "No."}]


@pytest.mark.parametrize(
    ("template", "specials", "end"),
    [
        (CHATML, ("<|im_start|>", "<|im_end|>"), "<|im_end|>"),
        (PHI3, ("<|user|>", "<|assistant|>", "<|end|>"), "<|end|>"),
        (LLAMA2, (), " <|endoftext|>"),
        (TEXT, (), "\n"),  # nothing ends it
    ],
)
def test_what_is_learned_of_a_conversation_ends_where_a_rollout_stops(template, specials, end):
    tokenizer = tokenizer_with(template, *specials)
    pair = encode_pair(tokenizer, PreferenceRow(prompt=QUESTION, chosen=ANSWER, rejected=OTHER))
    rows = CompletionRow(prompt=QUESTION, completion=ANSWER), ConversationRow(messages=QUESTION + ANSWER)
    encoded = [pair.chosen, encode_scored(tokenizer, rows[0]), *(encode_completion(tokenizer, row) for row in rows)]
    texts = [tokenizer.decode(one.response_ids).lstrip() for one in encoded]
    assert texts == [f"{'assistant: ' * (template is TEXT)}Yes.{end}"] * 4
    assert tokenizer.decode(pair.rejected.response_ids).endswith(f"No.{end}")


def test_the_last_of_several_turns_is_the_one_that_ends_a_completion():
    tokenizer = tokenizer_with(CHATML, "<|im_start|>", "<|im_end|>")
    encoded = encode_completion(tokenizer, CompletionRow(prompt=QUESTION, completion=[*ANSWER, *QUESTION, *OTHER]))
    answer = tokenizer.decode(encoded.response_ids)
    assert answer.startswith("Yes.<|im_end|>\n<|im_start|>user") and answer.endswith("No.<|im_end|>")
    empty = CompletionRow(prompt=QUESTION, completion=[{"role": "assistant", "content": ""}])
    assert tokenizer.decode(encode_completion(tokenizer, empty).response_ids) == "<|im_end|>"
