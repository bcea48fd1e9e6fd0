"""What is read never runs as code: datasets, chat templates, models, adapters and checkpoints (docs/data.md)."""

import json
import pickle

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from hybrid_engine.inference.checkpoint import build_empty_model
from hybrid_engine.rlhf.data.encoding import encode_prompt
from hybrid_engine.rlhf.data.reading import read_prompt_rows
from hybrid_engine.rlhf.data.rows import PromptRow
from hybrid_engine.rlhf.experience.answering import with_adapter
from hybrid_engine.rlhf.options.columns import DataSource
from hybrid_engine.rlhf.runs.stages import load_config, load_model, load_tokenizer
from hybrid_engine.serving.web.server import load_tokenizer as load_served_tokenizer
from tests.support.chat import build_chat_tokenizer


class Opens:
    """An object whose pickle makes a file where it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.fixture
def sign(tmp_path):
    """The file that code of a stranger's makes; it must not be there at the end."""
    path = tmp_path / "it_ran"
    pickle.loads(pickle.dumps(Opens(path))).close()  # what would happen
    assert path.exists()
    path.unlink()
    yield path
    assert not path.exists()


def save_model(folder):
    config = LlamaConfig(
        vocab_size=259, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    build_chat_tokenizer().save_pretrained(folder)
    return folder


def test_a_loading_script_in_the_folder_of_a_data_set_is_not_run(tmp_path, sign):
    folder = tmp_path / "games"
    folder.mkdir()
    (folder / "games.py").write_text(f"open({str(sign)!r}, 'w')\n")
    for _ in range(2):
        with pytest.raises(ValueError, match=r"must be a file.*scripts are no longer supported, but found games.py"):
            read_prompt_rows(str(folder))
        (folder / "train.jsonl").write_text('{"prompt": "a"}\n')


def test_a_pickle_is_no_data_set(tmp_path, sign):
    for name in ("data.pkl", "data.pickle", "data.pt"):
        (tmp_path / name).write_bytes(pickle.dumps(Opens(sign)))
        with pytest.raises(ValueError, match=r"a file must end in .jsonl, .json, .csv, .parquet"):
            read_prompt_rows(str(tmp_path / name))


def test_names_of_columns_and_prompt_templates_reach_values_alone(tmp_path):
    (tmp_path / "data.jsonl").write_text('{"prompt": "a", "meta": {"id": 1}}\n')
    path = str(tmp_path / "data.jsonl")
    for inside in ("prompt.__class__", "meta.__class__", "meta.items"):
        with pytest.raises(ValueError, match="has no value in"):
            read_prompt_rows(DataSource(datasets=(path,), prompt_template=f"{{prompt}} {{{inside}}}"))
        with pytest.raises(ValueError, match="--columns="):
            read_prompt_rows(DataSource(datasets=(path,), columns=(f"{inside}=prompt",)))


@pytest.mark.parametrize(
    "template",
    [
        "{{{{ cycler.__init__.__globals__['__builtins__']['open']({path!r}, 'w') }}}}",
        "{{{{ messages.__class__.__base__.__subclasses__() }}}}",
        "{{{{ messages.append({path!r}) }}}}",
    ],
)
def test_a_chat_template_runs_in_a_sandbox(sign, template):
    tokenizer = build_chat_tokenizer(template.format(path=str(sign)))
    with pytest.raises(ValueError, match=r"line 3: the chat template refuses the conversation: .*unsafe"):
        encode_prompt(tokenizer, PromptRow(prompt=[{"role": "user", "content": "a"}], place="line 3"))


def test_weights_that_are_a_pickle_of_something_else_are_refused_and_not_run(tmp_path, sign):
    folder = save_model(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    torch.save({"model.embed_tokens.weight": Opens(sign)}, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"^--model='.*' has weights in a pickle that contains more than tensors"):
        load_model(AutoModelForCausalLM, folder)


def test_an_adapter_that_is_a_pickle_of_something_else_is_refused_and_not_run(tmp_path, sign):
    folder = save_model(tmp_path / "model")
    model = load_model(AutoModelForCausalLM, folder)
    get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")
    (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
    torch.save({"weight": Opens(sign)}, tmp_path / "adapter" / "adapter_model.bin")
    with pytest.raises(ValueError, match=r"^--adapter='.*' has weights in a pickle that contains more than tensors"):
        with_adapter(load_model(AutoModelForCausalLM, folder), str(tmp_path / "adapter"))


@pytest.mark.parametrize("load", [load_config, load_tokenizer, build_empty_model, load_served_tokenizer])
def test_a_model_with_code_of_its_own_is_refused_without_a_question(tmp_path, sign, load, monkeypatch):
    folder = save_model(tmp_path / "model")
    (folder / "own.py").write_text(f"open({str(sign)!r}, 'w')\n")
    for name, entry in (("config.json", "AutoConfig"), ("tokenizer_config.json", "AutoTokenizer")):
        content = json.loads((folder / name).read_text())
        kind = [None, "own.Own"] if entry == "AutoTokenizer" else "own.Own"
        content |= {"auto_map": {entry: kind, "AutoModelForCausalLM": "own.Own"}, "model_type": "own_kind"}
        (folder / name).write_text(json.dumps(content | {"tokenizer_class": "Own"}))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("the user is asked"))
    with pytest.raises(ValueError, match=r"trust_remote_code|custom code"):
        load(str(folder))
