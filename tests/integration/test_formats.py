"""Files that commit c1c4c22 wrote load and go on: checkpoints, exports, adapters, runs, journals, plans.

The values are those that the files were written from. Steps after them are compared with what that commit did next: to
the bit where torch, transformers and CPU are the ones that it ran with, else within what these may round otherwise.
"""

import json
import shutil
import tarfile
import traceback

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import hybrid_engine
from hybrid_engine.cli import cli
from hybrid_engine.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from tests.support.distributed import leave_process_group, run_distributed
from tests.support.paths import DATA
from tests.tools import write_formats
from tests.tools.write_formats import CLIENT_STATE, ENGINES, FINISHED, GENERATE, NUM_NEXT_STEPS, NUM_STEPS, PLANS, RUNS

ARCHIVE = DATA / "formats" / "c1c4c22.tar.xz"
OTHER_ROUNDING = 1e-3
"""Relative; of bf16 steps on another CPU or release of torch."""
MEASURED = ("seconds", "bytes", "per_second", "memory", "mfu", "step_time")
"""Parts of the names of figures that are another one at each run."""


@pytest.fixture(scope="module")
def goldens(tmp_path_factory):
    """A folder of all goldens, which nothing may write into."""
    folder = tmp_path_factory.mktemp("formats")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.fixture(scope="module")
def is_same_arithmetic(goldens):
    about = json.loads((goldens / "about.json").read_text())
    return all(about[name] == version for name, version in write_formats.versions_of().items() if name != "python")


@pytest.fixture(autouse=True)
def _one_process_alone():
    leave_process_group()


def check_values(found, expected):
    """To the bit, in the same dtypes and shapes."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name


def check_steps(found, expected, is_same_arithmetic):
    if is_same_arithmetic:
        assert found == expected
    else:
        for name, values in expected.items():
            assert found[name] == pytest.approx(values, rel=OTHER_ROUNDING, abs=1e-6), name


def go_on(engine, folder):
    """What the engine of the checkpoint holds, and what it does next."""
    state = engine.load_checkpoint(folder)[1]
    num_micro = engine.gradient_accumulation_steps()
    steps = range(NUM_STEPS * num_micro, (NUM_STEPS + NUM_NEXT_STEPS) * num_micro)
    found = {"state": state, "saved": write_formats.values_of(engine)}
    found["next"] = write_formats.take_steps(engine, steps)
    return found | {"after": write_formats.values_of(engine)}


def check_goes_on(found, expected, is_same_arithmetic):
    check_values(found["saved"], expected["saved"])
    assert found["state"].keys() == CLIENT_STATE.keys()
    for name, value in CLIENT_STATE.items():
        same = torch.equal if isinstance(value, torch.Tensor) else lambda a, b: a == b
        assert same(found["state"][name], value), name
    check_steps(found["next"], expected["next"], is_same_arithmetic)
    if is_same_arithmetic:
        check_values(found["after"], expected["after"])


@pytest.mark.parametrize("name", [name for name, (world_size, _) in ENGINES.items() if world_size == 1])
def test_a_checkpoint_of_one_process_loads_and_goes_on(name, goldens, is_same_arithmetic):
    expected = torch.load(goldens / "engines" / name / "expected-0.pt")
    found = go_on(write_formats.build_engine(name, seed=1), goldens / "engines" / name)
    check_goes_on(found, expected, is_same_arithmetic)


@pytest.mark.parametrize("name", ENGINES)
def test_the_masters_of_a_checkpoint_are_read_without_an_engine(name, goldens):
    expected = torch.load(goldens / "engines" / name / "expected-0.pt")["saved"]
    found = get_fp32_state_dict_from_zero_checkpoint(str(goldens / "engines" / name))
    for key, value in found.items():
        assert torch.equal(value, expected["embed.weight" if key == "head.weight" else key]), key
    assert found.keys() >= {"embed.weight", "up.weight", "up.bias", "norm.weight"}


@pytest.mark.parametrize("name", [name for name, (world_size, _) in ENGINES.items() if world_size == 2])
def test_a_checkpoint_of_two_processes_loads_on_one_of_another_stage(name, goldens):
    engine = write_formats.build_engine("stage 0" if "3" in name else "stage 3", seed=1)
    engine.load_checkpoint(goldens / "engines" / name)
    check_values(write_formats.values_of(engine), torch.load(goldens / "engines" / name / "expected-0.pt")["saved"])


STATES = ("plain", "deduped", "merged")
"""How the state of a parallelized module was kept."""


def load_state(module, optimizer, folder, kind, rank):
    """Loads what `write_plan` kept."""
    if kind == "merged":
        states = torch.load(folder / "merged.pt")
        hybrid_engine.load_merged_state_dicts(module, states[0], optimizer, states[1])
    elif kind == "deduped":
        states = torch.load(folder / f"deduped-{rank}.pt")
        hybrid_engine.load_deduped_state_dict(module, states[0], optimizer, states[1])
    else:
        states = torch.load(folder / f"plain-{rank}.pt")
        module.load_state_dict(states[0])
        optimizer.load_state_dict(states[1])


def go_on_with_plan(folder, name, kind, rank):
    """Norms of the next steps, how many plans were made for them, and whether the folder is as it was."""
    plans = folder / name / "plans"
    before = {path: path.read_bytes() for path in plans.rglob("*") if path.is_file()}
    write_formats.num_plans.clear()
    module, optimizer = write_formats.parallelized(plans, name, "match")
    load_state(module, optimizer, folder / name, kind, rank)
    norms = write_formats.parallel_norms(module, optimizer, range(NUM_STEPS, NUM_STEPS + NUM_NEXT_STEPS))
    is_kept = {path: path.read_bytes() for path in plans.rglob("*") if path.is_file()} == before
    return {"norms": norms, "num_plans": len(write_formats.num_plans), "is_kept": is_kept}


def go_on_split(folder):
    """The client state of the engine over a split module, and the losses of its next steps."""
    engine = write_formats.build_planned_engine(folder / "plans", seed=1)
    state = engine.load_checkpoint(folder / "checkpoint")[1]
    return state["name"], write_formats.planned_steps(engine, range(NUM_STEPS, NUM_STEPS + NUM_NEXT_STEPS))


def on_two(rank, world_size, goldens):
    """What each two-process golden gives on this process; the text of the error where it does not load."""
    torch.set_num_threads(1)
    jobs = {
        name: lambda name=name: go_on(write_formats.build_engine(name, seed=1), goldens / "engines" / name)
        for name, (size, _) in ENGINES.items()
        if size == 2
    }
    for name in PLANS:
        for kind in STATES:
            jobs[name, kind] = lambda name=name, kind=kind: go_on_with_plan(goldens / "plans", name, kind, rank)
    jobs["engine"] = lambda: go_on_split(goldens / "plans" / "engine")
    found = {}
    for key, job in jobs.items():
        try:
            found[key] = job()
        except Exception:
            found[key] = traceback.format_exc()
    return found


@pytest.fixture(scope="module")
def found_on_two(goldens):
    leave_process_group()
    return run_distributed(on_two, 2, goldens)


@pytest.mark.parametrize("name", [name for name, (world_size, _) in ENGINES.items() if world_size == 2])
def test_a_checkpoint_of_two_processes_loads_and_goes_on(name, goldens, found_on_two, is_same_arithmetic):
    for rank, found in enumerate(found_on_two):
        assert not isinstance(found[name], str), found[name]
        check_goes_on(found[name], torch.load(goldens / "engines" / name / f"expected-{rank}.pt"), is_same_arithmetic)


@pytest.mark.parametrize("kind", STATES)
@pytest.mark.parametrize("name", PLANS)
def test_a_plan_is_used_again_and_its_states_go_on(name, kind, goldens, found_on_two, is_same_arithmetic):
    for rank, results in enumerate(found_on_two):
        found = results[name, kind]
        assert not isinstance(found, str), found
        assert found["num_plans"] == 0 and found["is_kept"]
        expected = torch.load(goldens / "plans" / name / f"expected-{rank}.pt")
        check_steps({"norms": found["norms"]}, {"norms": expected}, is_same_arithmetic)


def test_a_checkpoint_of_an_engine_over_a_split_module_goes_on(goldens, found_on_two, is_same_arithmetic):
    for rank, results in enumerate(found_on_two):
        assert not isinstance(results["engine"], str), results["engine"]
        name, losses = results["engine"]
        assert name == CLIENT_STATE["name"]
        expected = torch.load(goldens / "plans" / "engine" / f"expected-{rank}.pt")
        check_steps({"losses": losses}, {"losses": expected}, is_same_arithmetic)


@pytest.mark.parametrize("name", PLANS)
def test_the_state_dicts_of_processes_merge_to_what_they_merged_to(name, goldens):
    expected = torch.load(goldens / "plans" / name / "merged.pt")
    for kind in ("plain", "deduped"):
        files = [torch.load(goldens / "plans" / name / f"{kind}-{rank}.pt") for rank in range(2)]
        weights, states = hybrid_engine.merge_state_dicts(*zip(*files, strict=True))
        check_values(weights, expected[0])
        torch.testing.assert_close(states["state"], expected[1]["state"], rtol=0, atol=0)
        assert states["param_groups"] == expected[1]["param_groups"]


def test_a_graph_is_used_again_without_tracing(goldens, tmp_path, monkeypatch):
    about = json.loads((goldens / "about.json").read_text())
    if about["torch"] != torch.__version__:
        pytest.skip(f"graphs hold for the release of torch that wrote them, {about['torch']}")
    shutil.copytree(goldens / "plans" / "graph to use again", tmp_path / "graph")
    monkeypatch.setattr("hybrid_engine.extensions.parallelize.parallelize.trace", None)
    write_formats.write_graph(tmp_path / "graph")


def test_the_planner_reads_links_constraints_and_plans(goldens, tmp_path):
    plans = goldens / "plans"
    expected = json.loads((plans / "plan.json").read_text())
    options = {"partition_constraints_path": str(plans / "constraints.yaml"), "costs": str(plans / "links.json")}
    found = write_formats.plan_alone(tmp_path / "made", **options)
    assert found["notes"]["costs"] == expected["notes"]["costs"]
    loaded = write_formats.plan_alone(tmp_path / "loaded", load_plan_path=str(plans / "plan.json"))
    assert loaded | {"notes": None} == expected | {"notes": None}


@pytest.fixture(scope="module")
def adapted(goldens):
    return torch.load(goldens / "adapted" / "expected.pt")


def check_logits(found, expected, is_same_arithmetic):
    torch.testing.assert_close(found, expected, **({"rtol": 0, "atol": 0} if is_same_arithmetic else {}))


def test_an_adapters_checkpoint_without_its_base_goes_on(goldens, adapted, is_same_arithmetic):
    engine = write_formats.build_adapted(goldens / "runs", seed=1)
    engine.load_checkpoint(goldens / "adapted" / "adapter checkpoint")
    found = write_formats.adapted_losses(engine, range(NUM_STEPS, NUM_STEPS + NUM_NEXT_STEPS))
    check_steps({"losses": found}, {"losses": adapted["next"]}, is_same_arithmetic)


def test_an_adapter_and_its_merged_export_compute_what_they_did(goldens, adapted, is_same_arithmetic):
    model = PeftModel.from_pretrained(write_formats.model_of(goldens / "runs"), goldens / "adapted" / "adapter")
    check_logits(write_formats.logits_of(model), adapted["logits"], is_same_arithmetic)
    merged = AutoModelForCausalLM.from_pretrained(goldens / "adapted" / "merged export")
    check_logits(write_formats.logits_of(merged), adapted["merged"], is_same_arithmetic)


@pytest.mark.parametrize("name", ["export", "export as a state dict"])
def test_an_exports_weights_load_into_an_engine_for_inference(name, goldens, adapted):
    model = write_formats.model_of(goldens / "runs").bfloat16()
    (file,) = (path for path in (goldens / "adapted" / name).iterdir() if path.suffix in (".safetensors", ".bin"))
    weights = load_file(file) if file.suffix == ".safetensors" else torch.load(file)
    model.load_state_dict(weights, strict=False)
    engine = hybrid_engine.init_inference(model, dtype=torch.bfloat16)
    found = engine.module.state_dict()
    assert weights.keys() | {"lm_head.weight"} == adapted["weights"].keys() == found.keys()
    check_values(dict(found), adapted["weights"])


@pytest.fixture
def runs(goldens, tmp_path, monkeypatch):
    """A copy of the folder in which the runs were, which is the working directory."""
    shutil.copytree(goldens / "runs", tmp_path / "runs")
    monkeypatch.chdir(tmp_path / "runs")
    monkeypatch.syspath_prepend(tmp_path / "runs")
    return tmp_path / "runs"


def lines_of(folder):
    """The lines of a run's figures by step, without what is measured."""
    (file,) = folder.rglob("metrics.jsonl")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return [{k: v for k, v in line.items() if not any(part in k for part in MEASURED)} for line in lines]


TURNS = ("approx_kl", "ratio", "logprob_difference_mean", "logprob_difference_max")
"""Figures of the agent that round otherwise with the turns that happen to be answered together."""
OF_TRAINED_ANSWERS = ("clip_fraction", "approx_kl", "ratio", "entropy")
"""Figures that a step without any answer to train on has no longer: its answers all had the same reward."""

OF_ROUNDING = "accuracy"
"""A figure that counts signs of margins: before the first steps of size these are nothing but rounding."""


def check_figures(found, expected, is_same_arithmetic):
    for name, value in expected.items():
        if name in OF_TRAINED_ANSWERS and found.get(name) is None:
            assert found["trained_share"] == 0
            continue
        if name == OF_ROUNDING and not is_same_arithmetic:
            continue
        is_exact = (is_same_arithmetic and name not in TURNS) or not isinstance(value, float)
        assert found[name] == (value if is_exact else pytest.approx(value, rel=OTHER_ROUNDING, abs=1e-5)), name


ROLLED_OUT = ("grpo", "ppo", "ppo-shared-base", "online-dpo")
"""Runs that learn from answers to many prompts at once, whose products are added up in another order since."""


@pytest.mark.parametrize("name", RUNS)
def test_a_stopped_run_goes_on_to_the_end_that_it_had(name, runs, is_same_arithmetic, capsys):
    is_same_arithmetic = is_same_arithmetic and name not in ROLLED_OUT
    stopped, whole = runs / "stopped" / name, runs / "whole" / name
    assert len(lines_of(stopped)) == 3
    assert cli.main([*write_formats.command_of(name, f"stopped/{name}"), "--resume"]) == 0, capsys.readouterr().err
    found, expected = lines_of(stopped), lines_of(whole)
    assert len(found) == len(expected) == 4
    for line, expected_line in zip(found, expected, strict=True):
        check_figures(line, expected_line, is_same_arithmetic)
    weights = [path for path in whole.rglob("*model.safetensors") if "best" not in path.parts]
    assert weights
    for path in weights:
        ends = load_file(stopped / path.relative_to(whole))
        if is_same_arithmetic:
            check_values(ends, load_file(path))
        elif name in ROLLED_OUT:
            torch.testing.assert_close(ends, load_file(path), rtol=OTHER_ROUNDING, atol=1e-4)


@pytest.mark.parametrize("name", FINISHED)
def test_a_stopped_run_goes_on_by_its_config_file(name, runs, is_same_arithmetic, capsys):
    log = next((runs / "stopped" / name).rglob("config.yaml")).parent
    assert cli.main([RUNS[name].split()[0], "--config", str(log / "config.yaml"), "--resume"]) == 0, capsys.readouterr()
    capsys.readouterr()
    whole = next((runs / "whole" / name).rglob("config.yaml")).parent
    assert cli.main(["diff", str(whole), str(log), "--tolerance", str(OTHER_ROUNDING)]) == 1
    differences = capsys.readouterr().out.splitlines()
    if not is_same_arithmetic:
        differences = [line for line in differences if f": {OF_ROUNDING} " not in line]
    assert differences and all(" absent | " in line for line in differences)  # options and figures since then


def test_a_finished_stage_is_not_run_again(runs, capsys):
    before = {path: path.read_bytes() for path in (runs / "whole").rglob("*") if path.is_file()}
    assert cli.main(write_formats.command_of("reward-adapter", "whole/reward-adapter")) == 0, capsys.readouterr().err
    assert {path: path.read_bytes() for path in (runs / "whole").rglob("*") if path.is_file()} == before


def test_a_report_shows_runs_that_were_written_then(runs, capsys):
    assert cli.main(["report", "whole/grpo", "whole/dpo", "--out", "page.html"]) == 0, capsys.readouterr().err
    text = (runs / "page.html").read_text()
    (before, after) = text.index('<script type="application/json" id="data">'), text.rindex("</script>")
    data, _ = json.JSONDecoder().raw_decode(text[text.index("{", before) : after])
    for run, name in zip(data["runs"], ("grpo", "dpo"), strict=True):
        assert run["answers"] and len(next(iter(run["figures"].values()))) == 4, name


def test_a_journal_of_answers_is_gone_on_with(runs, capsys):
    part = runs / "few-answers.jsonl.part"
    lines = [json.loads(line) for line in part.read_text().splitlines()]
    assert len(lines) == 4
    lines[1]["responses"][0] = "as it was"
    part.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert cli.main(GENERATE.split()) == 0, capsys.readouterr().err
    found = [json.loads(line) for line in (runs / "few-answers.jsonl").read_text().splitlines()]
    expected = [json.loads(line) for line in (runs / "few-answers-expected.jsonl").read_text().splitlines()]
    expected[lines[1]["row"]]["responses"][0] = "as it was"
    assert found == expected
