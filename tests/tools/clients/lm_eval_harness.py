"""lm-eval's local-completions on a task of a local file: log-likelihoods and generations.

Its environment has no tokenizer: the harness asks the server's. The scores are written where run.py compares them
with the model's own.
"""

import json
import os
from pathlib import Path

import lm_eval
from checks import MODEL, URL, run_checks
from lm_eval.tasks import TaskManager

FOLDER = Path(os.environ["CLIENT_FOLDER"])
QUESTIONS = [
    {"question": "Where is it warm?", "choices": [" In Rome.", " In Oslo.", " Nowhere"], "answer": 0},
    {"question": "2+2=", "choices": ["4", "5"], "answer": 0},
    {"question": "Is it cold\nthere?", "choices": [" yes", " no"], "answer": 1},
]
CHOICES = """
task: warm_choices
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: ""
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
TEXTS = """
task: warm_texts
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[answer]}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 8, do_sample: false}}
metric_list: [{{metric: exact_match}}]
"""


def evaluate(task: str, source: str) -> dict:
    data = FOLDER / "questions.jsonl"
    data.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    (FOLDER / f"{task}.yaml").write_text(source.format(data=data))
    arguments = {"model": MODEL, "base_url": f"{URL}/completions", "num_concurrent": 1, "max_retries": 1}
    arguments |= {"batch_size": 2, "max_length": 256}
    found = lm_eval.simple_evaluate(
        "local-completions",
        model_args=arguments,
        tasks=[task],
        task_manager=TaskManager(include_path=str(FOLDER), include_defaults=False),
        bootstrap_iters=0,
    )
    return found["samples"][task]


def check_log_likelihoods() -> None:
    scores = []
    for sample in evaluate("warm_choices", CHOICES):
        texts = [(arguments[0], arguments[1]) for arguments in sample["arguments"]]
        answers = [response[0] for response in sample["resps"]]
        assert len(texts) == len(answers) == len(sample["doc"]["choices"])
        scores += [[*text, float(score), bool(greedy)] for text, (score, greedy) in zip(texts, answers, strict=True)]
    (FOLDER / "log_likelihoods.json").write_text(json.dumps(scores))


def check_generations() -> None:
    texts = [sample["resps"][0][0] for sample in evaluate("warm_texts", TEXTS)]
    assert len(texts) == len(QUESTIONS) and all("\n" not in text for text in texts)


run_checks(globals())
