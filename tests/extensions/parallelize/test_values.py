"""Wrong values of the options of `parallelize` and its company: the error says which and what it must be."""

import copy
import json

import pytest
import torch
from torch import Tensor, nn

from hybrid_engine import (
    ComputeConfig,
    Plan,
    broadcast_weights,
    build_optimizer,
    deduped_state_dict,
    load_deduped_state_dict,
    load_merged_state_dicts,
    merge_state_dicts,
    parallelize,
    register_op,
    verify_op,
)
from tests.support.distributed import leave_process_group
from tests.support.parallel_nets import Block, build, sample

SGD = torch.optim.SGD
X = {"x": torch.ones(4, 8)}


@pytest.fixture(scope="module", autouse=True)
def _one_process_alone():
    leave_process_group()


class NeedsSize(Block):
    def __init__(self, size):
        super().__init__()


class TwoSamples(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 1)

    def forward(self, x, y):
        return self.linear(x + y).sum()


def make(folder, module=None, policy="dp", arguments=None, pas_config=None, changes=None, **options):
    settings = {"plan_ngpus": 1, "runtime_ngpus": 1, "pas_config": pas_config or {}} | (changes or {})
    module = Block() if module is None else module
    config = options.pop("compute_config", None) or ComputeConfig(**settings)
    return parallelize(module, X if arguments is None else arguments, policy, config, gen_savedir=folder, **options)


def end_to_end(folder):
    return make(folder, build(), arguments={"sample": sample(0)}, changes={"use_end2end": True})


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("plan_ngpus", (0, -1, "2", 1.5, None, True)),
        ("runtime_ngpus", (0, "2", 1.5, None, True)),
        ("zero_ngroups", (0, "2", 1.0, None, True)),
        *((name, ("yes", 1, 0, None)) for name in ("use_zero", "inference_only", "use_end2end", "constant_folding")),
        *((name, ("yes", 1, 0, None)) for name in ("zero_use_reduce_scatter", "use_async_reducer")),
        ("reducer_bucket_cap_mb", (-1, "25", float("nan"), True)),
        ("trace_strategy", ("gpu", None, ["cpu"])),
        ("lowering", ("hooks", None, ["eager"])),
        *((name, (None, [1], "a=1", {1: 2})) for name in ("pas_config", "user_config")),
    ],
)
def test_a_wrong_value_of_the_config_is_refused_by_name(name, values):
    for value in values:
        with pytest.raises(ValueError, match=f"{name}="):
            ComputeConfig(**{"plan_ngpus": 1, "runtime_ngpus": 1, name: value})


def test_a_config_is_for_all_processes_where_it_does_not_say_how_many():
    assert ComputeConfig(plan_ngpus=1).runtime_ngpus == 1
    with pytest.raises(ValueError, match="runtime_ngpus=1 must be a multiple of plan_ngpus=2"):
        ComputeConfig(plan_ngpus=2)


def never_built():
    raise AssertionError("work was done")


ARGUMENTS = {
    "module_or_module_class": (3, "Block", [Block()], int),
    "arguments": (3, [torch.ones(4, 8)], "x", {1: torch.ones(4, 8)}),
    "policy": (3, ["dp"], Block, "DP", lambda graph: None),
    "compute_config": ({"plan_ngpus": 1}, 3, ComputeConfig),
    "gen_savedir": (None, 3, b"x", ["a"]),
    "instance_name": (3, "../../x", "a/b", "", ".."),
    "load_module": (None, "no", 0, 1),
    "module_dtype": ("bfloat16", 16, torch.int64),
    "module_fn": (3, "Block", lambda: None, lambda size: Block(), TwoSamples),
    "init_module_params": (None, "no", 0, 1),
    "reuse": (None, 3, "MATCH", ["match"]),
    "broadcast_strategy": (None, "ALL", 3),
}
NAMES = {"arguments": "dummy_forward_args", "policy": "pas_policy"}


@pytest.mark.parametrize("name", list(ARGUMENTS))
def test_a_wrong_argument_of_parallelize_is_refused_by_name(tmp_path, name):
    for value in ARGUMENTS[name]:
        given = {"module": Block if name == "module_fn" else Block(), name: value}
        if name == "module_or_module_class":
            given = {"module": value}
        folder = given.pop("gen_savedir", tmp_path)
        with pytest.raises(ValueError, match=f"{NAMES.get(name, name)}="):
            make(folder, **given)
    assert not list(tmp_path.iterdir())


def test_a_class_that_needs_arguments_is_refused_with_the_option_that_builds_it(tmp_path):
    with pytest.raises(ValueError, match="pass module_fn=lambda: NeedsSize"):
        make(tmp_path, NeedsSize)


def test_parameters_without_values_are_refused_unless_they_may_be_empty(tmp_path):
    with pytest.raises(ValueError, match="are on meta and have no values; pass init_module_params=False"):
        make(tmp_path, Block().to("meta"))
    module = make(tmp_path, Block().to("meta"), init_module_params=False)
    source = Block()
    load_merged_state_dicts(module, source.state_dict())
    torch.testing.assert_close(module(**X), source(**X))


WRONG_OPTIONS = [
    ("tp", {"seed": ("a", 1.5, None, True, 3)}),
    ("pp", {"pipeline_nmicros": (0, "4", 1.5, None, True), "pipeline_scheduler": (3, None, ["1f1b"], "1F1B")}),
    ("hybrid", {"pipeline_nmicros": (0, "4", True), "pipeline_scheduler": ("x", "chimera_direct", ["1f1b"])}),
    ("hybrid", {"pipeline_nstages": (0, "1", 1.0, None, True, 2)}),
    ("autodist", dict.fromkeys(("update_freq", "max_partition_degree"), (0, "4", 1.5, True))),
    (
        "autodist",
        {name: (0, "4", True, float("nan"), float("inf")) for name in ("mem_constraint", "transient_mem_coef")},
    ),
    ("autodist", dict.fromkeys(("update_freq", "transient_mem_coef", "recompute_modules", "task_name"), (None,))),
    ("autodist", dict.fromkeys(("use_bf16", "verbose", "re_profile", "explore_pipeline"), ("yes", 1, None))),
    ("autodist", dict.fromkeys(("load_plan_path", "partition_constraints_path"), (3, True, "/nowhere/x.json"))),
    ("autodist", {"save_plan_path": (3, "/nowhere/x.json", "/"), "recompute_modules": (["up"], "nothing.*")}),
    ("autodist", {"generation": ({"num_tokens": True, "tensor_parallel": 1}, [8, 1]), "costs": (3, "h300", "no.json")}),
]


@pytest.mark.parametrize(("policy", "options"), WRONG_OPTIONS, ids=[f"{p}-{next(iter(o))}" for p, o in WRONG_OPTIONS])
def test_a_wrong_option_of_a_policy_is_refused_by_name(tmp_path, policy, options):
    for name, values in options.items():
        for value in values:
            given = {"pipeline_nmicros": 2} if policy == "hybrid" else {}
            with pytest.raises(ValueError, match=rf"{name}\b.*="):
                make(tmp_path, policy=policy, pas_config=given | {name: value})


def test_options_that_make_a_plan_do_not_go_with_one_that_is_loaded(tmp_path):
    for name, value in {"max_partition_degree": 1, "recompute_modules": "up"}.items():
        with pytest.raises(ValueError, match=f"load_plan_path takes the plan as it is, {name}="):
            make(tmp_path, policy="autodist", pas_config={"load_plan_path": "x.json", name: value})


def planned(**fields):
    return lambda graph, config: Plan(**{"graph": graph, "mesh": (1,)} | fields)


WRONG_PLANS = {
    "mesh": ((), ("1",), (True,), 1),
    "splits": (["up"], {"up:linear:0": "n"}, {"up:linear:0": (3,)}),
    "stages": ("up", (("up",), ()), ((3,),)),
    "recompute": ("up", (3,)),
    "num_micro_batches": ("4", 1.5, True, 0),
    "schedule": (None, 3),
    "notes": ([1], {"a": torch.ones(2)}),
}


@pytest.mark.parametrize("name", list(WRONG_PLANS))
def test_a_wrong_field_of_the_plan_that_a_callable_returns_is_refused_by_name(tmp_path, name):
    for value in WRONG_PLANS[name]:
        with pytest.raises((ValueError), match=f"the plan: {name}="):
            make(tmp_path, policy=planned(**{name: value}))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"samples": 3}, "samples=3 must be a list"),
        ({"samples": sample(0)}, "samples=.* must be a list"),
        ({"samples": [sample(0)], "is_dummy_batch": True}, "is_dummy_batch=True must be a list"),
        ({"samples": [sample(0)], "is_dummy_batch": ["x"]}, "is_dummy_batch=.* must be a list"),
        ({"samples": [sample(0)], "scale_fn": 3}, "scale_fn=3 must be a callable"),
        ({"samples": [sample(0)], "scale_fn": lambda: 1}, "scale_fn=.* must be a callable of one argument, the loss"),
        ({"samples": [sample(0)], "scale_fn": lambda loss, unit: loss}, "scale_fn=.* must be a callable of one arg"),
        ({"samples": [sample(0)], "scale_fn": float}, "scale_fn gave .*; it must give a tensor"),
        ({"samples": [sample(0)], "scale_fn": lambda loss: loss.detach()}, "scale_fn gave .*; it must give a tensor"),
    ],
)
def test_a_wrong_argument_of_a_step_is_refused_by_name(tmp_path, options, match):
    with pytest.raises(ValueError, match=match):
        end_to_end(tmp_path).train_step(**options)


def test_a_forward_that_takes_more_than_a_sample_is_not_run_by_steps(tmp_path):
    arguments = {"x": torch.ones(4, 8), "y": torch.ones(4, 8)}
    module = make(tmp_path, TwoSamples(), arguments=arguments, changes={"use_end2end": True})
    with pytest.raises(ValueError, match=r"forward.* must take a sample as its first argument"):
        module.train_step([torch.ones(4, 8)])
    with pytest.raises(ValueError, match=r"forward.*missing a required argument: 'x'"):
        make(tmp_path)(z=1)


def groups_of(make_groups):
    return {"param_groups": make_groups}


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"optimizer_fn": "sgd"}, "optimizer_fn='sgd' must be a callable"),
        ({"optimizer_fn": lambda groups, lr: None}, "optimizer_fn=.* gave None"),
        (groups_of(3), "param_groups=3 must be a callable"),
        (groups_of(lambda named: []), "param_groups' result=.* must be a list of dicts"),
        (groups_of(lambda named: [p for _, p in named]), "param_groups' result=.* must be a list of dicts"),
        (groups_of(lambda named: [{"lr": 1}]), "param_groups' result=.* must be a list of dicts with 'params'"),
        (groups_of(lambda named: [{"params": [nn.Parameter(torch.ones(1))]}]), "which is no trained parameter"),
        (groups_of(lambda named: [{"params": [p for _, p in named]}] * 2), "'up.weight' is there twice"),
    ],
)
def test_a_wrong_argument_of_build_optimizer_is_refused_by_name(tmp_path, options, match):
    with pytest.raises(ValueError, match=match):
        build_optimizer(make(tmp_path), **{"optimizer_fn": SGD} | options, lr=0.1)


@pytest.mark.parametrize(
    ("args", "kwargs", "match"),
    [
        ((), {"lrr": 0.1}, "lrr=0.1 is not an option of optimizer_fn=torch.optim.sgd.SGD; did you mean 'lr'"),
        ((), {"params": []}, r"params=\[\] is not an option of optimizer_fn"),
        ((0.1,), {"lr": 0.2}, "optimizer_fn=torch.optim.sgd.SGD cannot be called with.*multiple values"),
        ((), {"lr": "fast"}, "optimizer_fn=torch.optim.sgd.SGD refuses .*lr='fast'.*correct that option"),
        ((), {"lr": -1.0}, "optimizer_fn=torch.optim.sgd.SGD refuses .*lr=-1.0.*correct that option"),
    ],
)
def test_a_wrong_option_of_the_optimizer_is_refused_by_name(tmp_path, args, kwargs, match):
    with pytest.raises(ValueError, match=match):
        build_optimizer(make(tmp_path), SGD, *args, **kwargs)


def test_a_wrong_argument_of_what_build_optimizer_adds_is_refused_by_name(tmp_path):
    module = end_to_end(tmp_path)
    optimizer = build_optimizer(module, SGD, lr=0.1)
    module.train_step([sample(0)])
    for value in ("a", -1, float("nan"), True):
        with pytest.raises(ValueError, match="max_norm="):
            optimizer.clip_gnorm(value)
    optimizer.sync_shard_grad()
    for value in ("a", None, [1]):
        with pytest.raises(ValueError, match="factor="):
            optimizer.scale_grads(value)
    for register in (optimizer.register_reducer_pre_hook, optimizer.register_reducer_post_hook):
        with pytest.raises(ValueError, match="hook=None must be a callable"):
            register(None)
    with pytest.raises(ValueError, match="module=3 must be"):
        build_optimizer(3, SGD)


def state_of(given):
    return given["optimizer_state_dict"]["state"]


def names_of(given):
    return given["optimizer_state_dict"]["param_groups"][0]["param_names"]


def of_sgd(state):
    """The same parameters, as SGD steps them."""
    parameter = nn.Parameter(torch.ones(1))
    options = SGD([parameter], lr=0.1, momentum=0.9).state_dict()["param_groups"][0]
    (group,) = state["param_groups"]
    return {"state": {}, "param_groups": [options | {key: group[key] for key in ("params", "param_names")}]}


def trained(folder):
    module = end_to_end(folder)
    optimizer = build_optimizer(module, torch.optim.Adam, lr=0.1)
    module.train_step([sample(0)])
    optimizer.step()
    return module, optimizer


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda given: given.update(module=3), "module=3 must be a module"),
        (lambda given: given.update(module_state_dict=3), "module_state_dict=3 must be a state dict"),
        (lambda given: given["module_state_dict"].update(more=torch.ones(1)), "has 'more', which the module lacks"),
        (
            lambda given: given["module_state_dict"].update({"norm.weight": 3}),
            "3 for 'norm.weight'; it must be a tensor",
        ),
        (lambda given: given.update(optimizer=3), "optimizer=3 must be an optimizer"),
        (lambda given: given.update(optimizer_state_dict={}), "optimizer_state_dict={} must be a state dict"),
        (lambda given: given["optimizer_state_dict"]["param_groups"][0]["param_names"].pop(), "param_names for"),
        (
            lambda given: given["optimizer_state_dict"]["state"][0].update(exp_avg=torch.ones(2, 2)),
            "exp_avg of parameter",
        ),
        (
            lambda given: given["module_state_dict"].update({"norm.weight": torch.ones(8, dtype=torch.complex64)}),
            "'norm.weight' has dtype torch.complex64 and the module has torch.float32",
        ),
        (
            lambda given: given["module_state_dict"].update({"norm.weight": torch.ones(8, dtype=torch.int64)}),
            "'norm.weight' has dtype torch.int64 and the module has torch.float32",
        ),
        (
            lambda given: given["module_state_dict"].update({"norm.weight": torch.ones(8, device="meta")}),
            "'norm.weight' must be a dense tensor with values",
        ),
        (lambda given: state_of(given).pop(2), r"has no state of 'blocks.0.up.bias', state\[2\]; .* is {}"),
        (lambda given: state_of(given)[2].pop("exp_avg"), "of 'blocks.0.up.bias' and .* which are of one group"),
        (lambda given: state_of(given)[2].update(exp_avg=None), "exp_avg is None of 'blocks.0.up.bias'"),
        (lambda given: state_of(given)[2].update(exp_avg="x"), "exp_avg is 'x' of 'blocks.0.up.bias'"),
        (lambda given: state_of(given)[2].update(exp_avg=torch.ones(())), "exp_avg is one number of 'blocks.0.up.b"),
        (
            lambda given: state_of(given)[2].update(exp_avg=torch.ones(16, dtype=torch.complex64)),
            "exp_avg of 'blocks.0.up.bias' is complex, and the parameter is not",
        ),
        (lambda given: state_of(given).update({99: {}}), "state has 99, which is in none of its groups"),
        (lambda given: state_of(given).update({1: 3}), "optimizer_state_dict=.* must be a state dict of an optimizer"),
        (lambda given: names_of(given).__setitem__(1, names_of(given)[0]), "parameter 'embed.weight' is in its groups"),
        (
            lambda given: given["optimizer_state_dict"]["param_groups"].append({"params": [99], "param_names": ["x"]}),
            "has parameter 'x', which this optimizer does not train",
        ),
        (
            lambda given: given.update(optimizer_state_dict=of_sgd(given["optimizer_state_dict"])),
            r"is of another optimizer: it has options \[.*'momentum'.*\], and this one has \[.*'betas'",
        ),
        (lambda given: given.update(device="nowhere"), "device='nowhere' must be a device"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_before_anything_is_loaded(tmp_path, change, match):
    module, optimizer = trained(tmp_path)
    state, optimizer_state = merge_state_dicts([module.state_dict()], [optimizer.state_dict()])
    given = {
        "module": module,
        "module_state_dict": {name: value + 1 for name, value in state.items()},
        "optimizer": optimizer,
        "optimizer_state_dict": optimizer_state,
    }
    change(given)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=match):
        load_merged_state_dicts(**given)
    assert str(optimizer.state_dict()) == str(before)
    for name, value in module.state_dict().items():
        assert torch.equal(value, state[name])


def test_what_was_never_stepped_has_an_empty_state_in_a_checkpoint_and_none_after_it(tmp_path):
    module, optimizer = trained(tmp_path)
    merged = merge_state_dicts([module.state_dict()], [optimizer.state_dict()])
    for state, load in (
        (merged, load_merged_state_dicts),
        (deduped_state_dict(module, optimizer), load_deduped_state_dict),
    ):
        state = copy.deepcopy(state)
        state[1]["state"][2] = {}
        other = end_to_end(tmp_path)
        other_optimizer = build_optimizer(other, torch.optim.Adam, lr=0.1)
        load(other, state[0], other_optimizer, state[1])
        stepped = [p for name, p in other.named_parameters() if name != "blocks.0.up.bias"]
        assert {id(p) for p in other_optimizer.state} == {id(p) for p in stepped}
        again = merge_state_dicts([other.state_dict()], [other_optimizer.state_dict()])[1]
        assert again["state"].keys() == merged[1]["state"].keys()
        assert again["state"][2] == {}


def test_what_merge_state_dicts_cannot_merge_is_refused_by_name(tmp_path):
    module, optimizer = trained(tmp_path)
    for wrong in (None, 3, [], [3], module.state_dict()):
        with pytest.raises(ValueError, match=r"module_state_dicts=.* must be a list"):
            merge_state_dicts(wrong)
    for wrong in (3, [], [module.state_dict()], optimizer.state_dict()):
        with pytest.raises(ValueError, match=r"optimizer_state_dicts=.* must be a list"):
            merge_state_dicts([module.state_dict()], wrong)
    state, earlier = module.state_dict(), copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match="optimizer_state_dicts are 1, module_state_dicts 2; give both of all"):
        merge_state_dicts([state, state], [earlier])
    for wrong in (torch.ones(8, dtype=torch.float64), torch.ones(9), 3):
        with pytest.raises(ValueError, match=r"module_state_dicts: norm.weight: .* they are of two models"):
            merge_state_dicts([state, state | {"norm.weight": wrong}])
    earlier["state"][0]["step"] += 2
    with pytest.raises(ValueError, match=r"embed\.weight is after 1 steps in one of them and after 3 in another"):
        merge_state_dicts([state, state], [optimizer.state_dict(), earlier])
    plain = torch.optim.Adam(build().parameters()).state_dict()
    with pytest.raises(ValueError, match="optimizer_state_dicts has groups without param_names"):
        merge_state_dicts([module.state_dict()], [plain])


def test_a_deduped_checkpoint_of_another_process_or_model_is_refused(tmp_path):
    module, optimizer = trained(tmp_path)
    state, optimizer_state = deduped_state_dict(module, optimizer)
    for wrong, match in (
        ({}, "module_state_dict has no 'blocks.0.down.bias'"),
        (state | {"more": torch.ones(1)}, "module_state_dict has 'more'"),
        (state | {"norm.weight": torch.ones(3)}, r"'norm.weight' is all of \[3\], and this process has all of \[8\]"),
        (state | {"norm.weight": None}, "'norm.weight' is None, and this process has all of"),
        (state | {"norm.weight": torch.ones(8, dtype=torch.complex64)}, "'norm.weight' has dtype torch.complex64"),
    ):
        with pytest.raises(ValueError, match=match):
            load_deduped_state_dict(module, wrong, optimizer, optimizer_state)
    for change, match in (
        (lambda found: found["state"].pop(2), r"has no state of 'blocks.0.up.bias', state\[2\]"),
        (lambda found: found["state"][2].pop("exp_avg"), "of 'blocks.0.up.bias' and .* which are of one group"),
        (lambda found: found["state"][2].update(exp_avg=None), "exp_avg of parameter 2 is another process's"),
        (lambda found: found["state"][2].update(exp_avg=torch.ones(())), "exp_avg is one number of 'blocks.0.up.bias'"),
        (
            lambda found: found["state"][2].update(exp_avg=torch.ones(16, dtype=torch.complex64)),
            "exp_avg of 'blocks.0.up.bias' is complex",
        ),
        (lambda found: found["state"].update({99: {}}), "state has 99, which is in none of its groups"),
        (lambda found: found["param_groups"][0]["params"].pop(), "param_names for"),
        (lambda found: found.update(of_sgd(found)), "is of another optimizer: it has options"),
    ):
        wrong_state = copy.deepcopy(optimizer_state)
        change(wrong_state)
        with pytest.raises(ValueError, match=match):
            load_deduped_state_dict(module, state, optimizer, wrong_state)
    with pytest.raises(ValueError, match="module=None must be"):
        deduped_state_dict(None)
    with pytest.raises(ValueError, match="stride='1' must be a number"):
        broadcast_weights(module, "1")
    with pytest.raises(ValueError, match="module has no parallel part"):
        broadcast_weights(Block(), 1)


def product(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight.t()


def test_wrong_arguments_of_register_op_and_verify_op_are_refused_by_name():
    for wrong in (None, 3):
        with pytest.raises(ValueError, match="annotation="):
            register_op(wrong)
        with pytest.raises(ValueError, match="function="):
            register_op("m k+, n k+ -> m n")(wrong)
    op = register_op("m k+, n k+ -> m n")(product)
    for wrong in (None, 3, ["ab", "cd"], [(-4, 6), (8, 6)]):
        with pytest.raises(ValueError, match="shapes="):
            verify_op(op, wrong)
    for wrong in ([(4, 6)], [(4, 6), (8, 7)], [(4, 6), None], [(4, 6), (8, 6), (3, 3)]):
        with pytest.raises(ValueError, match="cannot be called with operands of shapes="):
            verify_op(op, wrong)
    for options in ({"num_parts": 1}, {"num_parts": "2"}, {"tolerance": -1}, {"tolerance": None}):
        with pytest.raises(ValueError, match=f"{next(iter(options))}="):
            verify_op(op, [(4, 6), (8, 6)], **options)


def kept_plan(folder):
    return next(folder.rglob("plan.json"))


@pytest.mark.parametrize(
    ("edit", "match"),
    [
        (lambda text: text[: len(text) // 2], "is no JSON"),
        (lambda text: text.replace('"mesh"', '"mesh": [1], "mesh"', 1), "has the key 'mesh' twice"),
        (lambda text: json.dumps(json.loads(text) | {"mesh": [2]}), "plan is for 2 processes, plan_ngpus=1"),
        (lambda text: json.dumps(json.loads(text) | {"schedule": "gpipe"}), "schedule='gpipe' and no stages"),
    ],
)
@pytest.mark.parametrize("reuse", ["match", "moo"])
def test_a_kept_plan_that_was_edited_wrongly_is_refused_and_stays(tmp_path, edit, match, reuse):
    make(tmp_path)
    edited = edit(kept_plan(tmp_path).read_text())
    kept_plan(tmp_path).write_text(edited)
    with pytest.raises(ValueError, match=rf"plan\.json.*{match}"):
        make(tmp_path, reuse=reuse)
    assert kept_plan(tmp_path).read_text() == edited
