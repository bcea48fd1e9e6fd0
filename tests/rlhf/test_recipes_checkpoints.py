"""Checkpoints of a run: engines by name, what the loop carries from step to step, and which of several counts."""

import json
from dataclasses import dataclass, field

import pytest
import torch

import hybrid_engine
from hybrid_engine.rlhf.runs.checkpoints import SavedRun, check_saved_options, load_checkpoints, save_checkpoints
from hybrid_engine.rlhf.runs.engine_config import build_engine_config

NUM_STEPS = 5


@dataclass(frozen=True)
class Group:
    clip: float = 0.2


@dataclass(frozen=True)
class Options:
    LENGTH = "steps"
    steps: int = NUM_STEPS
    resume: bool = False
    betas: tuple[float, ...] = (0.9, 0.95)
    algorithm: Group = field(default_factory=Group)


def build_engines(seed):
    torch.manual_seed(seed)
    sizes = {"batch_size": 2, "micro_batch_size": 2, "zero_stage": 0, "dtype": "fp32"}
    config = build_engine_config(**sizes, learning_rate=0.1)
    return {
        name: hybrid_engine.initialize(model=torch.nn.Linear(3, 1), config=config)[0] for name in ("critic", "actor")
    }


def train(engines, saved, folder, stop_after=NUM_STEPS, config=None):
    """A loop with random inputs, whose loss depends on a coefficient that follows the losses."""
    coefficient = saved.state.get("coefficient", 1.0)
    losses = []
    for step in range(saved.step, stop_after):
        for engine in engines.values():
            loss = coefficient * engine(torch.randn(2, 3)).square().mean()
            engine.backward(loss)
            engine.step()
            coefficient *= 0.9 if loss.item() < 1 else 1.1
            losses.append(loss.item())
        save_checkpoints(engines, folder, step + 1, config or Options(), {"coefficient": coefficient})
    return losses


def weights(engines):
    return [parameter.detach().clone() for engine in engines.values() for parameter in engine.module.parameters()]


@pytest.mark.parametrize("stop", [1, 3])
def test_a_run_that_stops_at_any_step_goes_on_with_the_same_bits(tmp_path, stop):
    whole = build_engines(0)
    losses = train(whole, SavedRun(), tmp_path / "whole")
    begun = train(build_engines(0), SavedRun(), tmp_path / "torn", stop_after=stop)
    resumed = build_engines(1)  # other weights and another random state
    saved = load_checkpoints(resumed, tmp_path / "torn", Options(resume=True))
    assert saved.step == stop
    assert begun + train(resumed, saved, tmp_path / "torn") == losses
    assert all(map(torch.equal, weights(resumed), weights(whole)))
    assert [path.name for path in (tmp_path / "torn").glob("*/step*")] == [f"step{NUM_STEPS}"] * 2


def test_a_checkpoint_counts_only_when_every_engine_is_in_it(tmp_path, monkeypatch):
    engines = build_engines(0)
    train(engines, SavedRun(), tmp_path, stop_after=1)
    after_one = weights(engines)
    monkeypatch.setattr(engines["actor"], "save_checkpoint", None)  # the run ends after the critic was saved
    with pytest.raises(TypeError):
        train(engines, SavedRun(step=1), tmp_path, stop_after=2)
    resumed = build_engines(1)
    assert load_checkpoints(resumed, tmp_path, Options()).step == 1
    assert all(map(torch.equal, weights(resumed), after_one))


def test_other_options_are_refused_before_anything_loads_those_of_a_group_too(tmp_path):
    train(build_engines(0), SavedRun(), tmp_path, stop_after=1)
    check_saved_options(tmp_path, Options(resume=True))
    with pytest.raises(ValueError, match=r"--resume: --clip=0.3 but the interrupted run had 0.2"):
        check_saved_options(tmp_path, Options(algorithm=Group(clip=0.3)))
    with pytest.raises(ValueError, match=r"--resume: --betas=\[0.9, 0.9\] but the interrupted run had"):
        load_checkpoints(build_engines(0), tmp_path, Options(betas=(0.9, 0.9)))
    saved_before = json.loads((tmp_path / "options.json").read_text())
    for name in ("betas", "clip"):  # options that there were not when it was saved
        (tmp_path / "options.json").write_text(json.dumps({k: v for k, v in saved_before.items() if k != name}))
        check_saved_options(tmp_path, Options(resume=True))
        options = {"betas": Options(betas=(0.9, 0.9)), "clip": Options(algorithm=Group(clip=0.3))}
        with pytest.raises(ValueError, match=f"from a version without this option.*leave --{name} out"):
            check_saved_options(tmp_path, options[name])
    with pytest.raises(ValueError, match="nowhere"):
        load_checkpoints(build_engines(0), tmp_path / "nowhere", Options())
