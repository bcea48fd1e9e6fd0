"""Megatron-LM's GPT, dense and with experts: containers and checkpoints equal a plain forward of those layers."""

import copy

import pytest
import torch

import hybrid_engine
from hybrid_engine.containers import InferenceModel
from hybrid_engine.extensions.megatron.gpt import MegatronGPT, MegatronGPTConfig
from hybrid_engine.extensions.megatron.loading import load_megatron_gpt
from hybrid_engine.ops import PrefillBatch
from tests.containers.test_lora import adapt
from tests.support.megatron_model import VOCAB, build_oracle, oracle_generate, save_megatron
from tests.support.models import PAD, padded_prompts

FORMS = {
    "dense": {},
    "old names": {"has_old_names": True},
    "experts, the best one": {"num_experts": (3, 0), "top_k": 1},
    "experts, the best two": {"num_experts": (0, 4), "top_k": 2},
    "experts beside a dense MLP": {"num_experts": (3, 2), "is_residual": True},
}
NEW_TOKENS = 7


class Wrapped(torch.nn.Module):
    """The oracle with what containers ask of any model: a config, and where its embedding and head are."""

    def __init__(self, oracle):
        super().__init__()
        self.language_model = oracle.language_model
        self.config = MegatronGPTConfig(VOCAB, 48, 2, 4, num_experts_per_tok=oracle.top_k)
        self.head = torch.nn.Linear(48, VOCAB, bias=False)
        self.head.weight = oracle.language_model.embedding.word_embeddings.weight

    def get_input_embeddings(self):
        return self.language_model.embedding.word_embeddings

    def get_output_embeddings(self):
        return self.head


def forced_logits(containers, row):
    """Logits `[P, V]` of every place of one row by prefill alone."""
    places = torch.arange(len(row), device=row.device)
    batch = PrefillBatch(
        tokens=row, positions=places, write_blocks=torch.zeros_like(places), write_offsets=places,
        lengths=(len(row),), starts=torch.tensor([0, len(row)], dtype=torch.int32, device=row.device), wanted=places,
        row_lengths=torch.full_like(places, len(row)),
    )  # fmt: skip
    return containers.forward(batch, containers.new_cache(1, len(row)), containers.layers)


@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_layers_known_by_their_names_equal_the_plain_forward(form):
    oracle = build_oracle(**FORMS[form])
    containers = InferenceModel(Wrapped(oracle))
    assert containers.layer_class == "ParallelLayer"
    containers.bind()
    row = torch.randint(0, VOCAB, (12,), generator=torch.Generator().manual_seed(0))
    logprobs, plain = forced_logits(containers, row).log_softmax(-1), oracle(row[None])[0].log_softmax(-1)
    exact = copy.deepcopy(oracle).double()(row[None])[0].log_softmax(-1)
    # Log-probabilities reach -17 here, where the plain forward pass itself is off by 8e-6 to 1e-5, by the CPU.
    own_error = (plain - exact).abs().max()
    assert (logprobs - exact).abs().max() < 3 * own_error and own_error < 1e-6 * exact.abs().max()


@torch.no_grad()
def test_stacked_experts_are_copied_anew_at_every_bind_to_the_same_place():
    oracle = build_oracle(num_experts=(3, 0))
    containers = InferenceModel(Wrapped(oracle))
    containers.bind()
    addresses = containers.addresses()
    for parameter in oracle.parameters():
        parameter.mul_(0.9)
    containers.bind()
    row = torch.arange(9)
    expected = oracle(row[None])[0].log_softmax(-1)
    torch.testing.assert_close(forced_logits(containers, row).log_softmax(-1), expected, atol=1e-5, rtol=0)
    assert containers.addresses() == addresses


def test_a_layer_of_these_names_with_rms_norms_is_not_taken_for_megatrons():
    oracle = build_oracle()
    for layer in oracle.language_model.encoder.layers:
        layer.input_layernorm = torch.nn.RMSNorm(48)
    with pytest.raises(ValueError, match="no policy for ParallelLayer"):
        InferenceModel(Wrapped(oracle))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("version", [None, 0, 1, 2, 3])
@torch.no_grad()
def test_a_checkpoint_gives_the_model_it_was_saved_from(tmp_path, form, num_ranks, version):
    oracle = build_oracle(**FORMS[form])
    # A file without a version is of version 0.
    save_megatron(oracle, tmp_path, num_ranks=num_ranks, version=version or 0)
    if version is None:
        for path in tmp_path.glob("*/*.pt"):
            content = torch.load(path, weights_only=False)
            del content["checkpoint_version"]
            torch.save(content, path)
    model = load_megatron_gpt(tmp_path)
    input_ids = torch.randint(0, VOCAB, (3, 12), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model(input_ids).logits, oracle(input_ids), atol=2e-5, rtol=1e-5)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


@pytest.mark.parametrize("num_ranks", [1, 2])
@torch.no_grad()
def test_deepspeeds_files_of_single_experts_are_read(tmp_path, num_ranks):
    oracle = build_oracle(num_experts=(2, 3), top_k=2)
    save_megatron(oracle, tmp_path / "global_step7", num_ranks=num_ranks, expert_files=True)
    (tmp_path / "latest").write_text("global_step7\n")
    model = load_megatron_gpt(tmp_path)
    assert model.config.num_experts == [2, 3]
    input_ids = torch.arange(20)[None]
    torch.testing.assert_close(model(input_ids).logits, oracle(input_ids), atol=2e-5, rtol=1e-5)


def test_a_chosen_dtype_leaves_routers_in_fp32(tmp_path):
    save_megatron(build_oracle(num_experts=(2, 0)), tmp_path / "iter_0000007")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    model = load_megatron_gpt(tmp_path, torch.bfloat16)
    kinds = {name: parameter.dtype for name, parameter in model.named_parameters()}
    router = "language_model.encoder.layers.0.mlp.deepspeed_moe.gate.wg.weight"
    assert kinds.pop(router) == torch.float32 and set(kinds.values()) == {torch.bfloat16}


def save(folder, oracle, **options):
    save_megatron(oracle, folder, **options)
    return folder


def engine_of(model, **training):
    config = {"train_batch_size": 1, "hybrid_engine": {"enabled": True}, **training}
    engine, *_ = hybrid_engine.initialize(model=model, config=config)
    assert engine.generator.fallback_reason is None
    return engine.eval()


@pytest.mark.parametrize("form", FORMS)
def test_rollouts_of_a_checkpoint_equal_greedy_search_by_the_plain_forward(tmp_path, form):
    oracle = build_oracle(**FORMS[form])
    save_megatron(oracle, tmp_path)
    input_ids, mask = padded_prompts()
    output = engine_of(load_megatron_gpt(tmp_path)).generate(
        input_ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=PAD,
        return_dict_in_generate=True,
    )  # fmt: skip
    for row, prompt in enumerate(input_ids):
        tokens, logprobs = oracle_generate(oracle, prompt[mask[row].bool()].tolist(), NEW_TOKENS)
        assert output.sequences[row, input_ids.shape[1] :].tolist() == tokens
        torch.testing.assert_close(output.logprobs[row], torch.tensor(logprobs), atol=1e-5, rtol=0)


@pytest.mark.parametrize("targets", ["all-linear", ["wg", "dense_4h_to_h", "query_key_value"]], ids=str)
def test_adapters_on_experts_and_routers_reach_the_rollout(tmp_path, targets):
    oracle = build_oracle(num_experts=(3, 0), top_k=2, is_residual=True)
    model = adapt(load_megatron_gpt(save(tmp_path, oracle)), targets)
    input_ids, mask = padded_prompts()
    greedy = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": PAD}
    expected = model.generate(input_ids=input_ids, attention_mask=mask, **greedy)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    engine = engine_of(model)
    assert engine.logprob_difference.max < 1e-4
    assert torch.equal(engine.generate(input_ids, attention_mask=mask, **greedy), expected)
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


@torch.no_grad()
def test_layers_with_experts_on_kernels_equal_the_plain_forward(kernels):
    oracle = build_oracle(num_experts=(2,), top_k=2, is_residual=True)
    model, row = Wrapped(oracle), torch.tensor([5, 9, 17, 2])
    expected = oracle(row[None])[0].log_softmax(-1)
    containers = InferenceModel(model.to(kernels))
    containers.bind()
    logits = forced_logits(containers, row.to(kernels)).cpu()
    torch.testing.assert_close(logits.log_softmax(-1), expected, atol=2e-5, rtol=0)


def test_the_models_own_generate_and_training_work(tmp_path):
    model = load_megatron_gpt(save(tmp_path, build_oracle(num_experts=(2, 0), top_k=2)))
    input_ids, mask = padded_prompts()
    greedy = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": PAD}
    expected = model.generate(input_ids, attention_mask=mask, **greedy)
    engine = engine_of(model, optimizer={"type": "Adam", "params": {"lr": 1e-2}})
    assert torch.equal(engine.generate(input_ids, attention_mask=mask, **greedy), expected)
    engine.train()
    loss = engine(input_ids[:1], labels=input_ids[:1]).loss
    engine.backward(loss)
    engine.step()
    engine.eval()
    with torch.no_grad():
        assert model(input_ids[:1], labels=input_ids[:1]).loss < loss
    after = engine.generate(input_ids, attention_mask=mask, **greedy)  # the stacked experts are the new ones
    assert torch.equal(after, model.generate(input_ids, attention_mask=mask, **greedy))
    assert not torch.equal(after, expected)


def test_the_model_is_saved_and_loaded_as_transformers_models_are(tmp_path):
    model = load_megatron_gpt(save(tmp_path / "megatron", build_oracle(num_experts=(0, 2))))
    model.save_pretrained(tmp_path / "transformers")
    again = MegatronGPT.from_pretrained(tmp_path / "transformers")
    state, expected = again.state_dict(), model.state_dict()
    assert state.keys() == expected.keys() and all(torch.equal(state[name], expected[name]) for name in state)
    assert again.config.num_experts == [0, 2]


def edit(path, change):
    content = torch.load(path, weights_only=False)
    change(content)
    torch.save(content, path)


def stack(content):
    return content["model"]["language_model"]["encoder"]


def drop_final_norm(content):
    del stack(content)["final_layernorm.weight"]


def rename_all_of_a_layer(content):
    state = stack(content)
    for name in [name for name in state if name.startswith("layers.1.")]:
        state[name.replace("layers.1.", "layers.1.rotten_")] = state.pop(name)


def widen_a_norm(content):
    stack(content)["final_layernorm.weight"] = torch.ones(50)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop_final_norm, "1 missing: language_model.encoder.final_layernorm.weight"),
        (rename_all_of_a_layer, "12 missing: .*, ...; 12 extra: .*rotten_input_layernorm.weight"),
        (widen_a_norm, r"1 misshapen: .*final_layernorm.weight \[50\] instead of \[48\]"),
        (lambda content: content.pop("args"), "needs .* args with num_attention_heads"),
        (lambda content: content.pop("model"), "needs the weights under model or module"),
        (lambda content: content["model"]["language_model"]["embedding"].pop("position_embeddings"), "learned pos"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_with_the_names(tmp_path, change, message):
    save_megatron(build_oracle(), tmp_path)
    edit(tmp_path / "mp_rank_00" / "model_optim_rng.pt", change)
    with pytest.raises(ValueError, match=message):
        load_megatron_gpt(tmp_path)


def test_folders_without_all_ranks_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no mp_rank_XX files"):
        load_megatron_gpt(tmp_path)
    save_megatron(build_oracle(), tmp_path, num_ranks=2)
    (tmp_path / "mp_rank_00").rename(tmp_path / "mp_rank_02")
    with pytest.raises(ValueError, match=r"ranks \[1, 2\]"):
        load_megatron_gpt(tmp_path)
    (tmp_path / "mp_rank_02").rename(tmp_path / "mp_rank_00")
    edit(tmp_path / "mp_rank_01" / "model_optim_rng.pt", drop_final_norm)
    with pytest.raises(ValueError, match=r"only one of ranks 0 and 1 has .*final_layernorm.weight"):
        load_megatron_gpt(tmp_path)
    (tmp_path / "mp_rank_01" / "model_optim_rng.pt").write_bytes(b"not a checkpoint")
    with pytest.raises(ValueError, match="is not a file of tensors"):
        load_megatron_gpt(tmp_path)
    (tmp_path / "mp_rank_00_001").mkdir()
    (tmp_path / "mp_rank_00_001" / "model_optim_rng.pt").touch()
    with pytest.raises(ValueError, match=r"ranks \[0 of stage 0, 1 of stage 0, 0 of stage 1\]; .* of every stage"):
        load_megatron_gpt(tmp_path)
