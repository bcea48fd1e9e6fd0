"""Files that docs and docstrings mention, and that docs link to, exist."""

import re
import subprocess

import pytest

from tests.support.paths import ROOT

pytestmark = pytest.mark.quick

MENTION = re.compile(r"`((?:[\w<>*-]+/)*[\w<>*-]+\.py)`")
# Files of other projects, from which facts and formulas are taken, and those that a user is to write.
OTHERS = {
    "core_algos.py",
    "experience_maker.py",
    "grpo_config.py",
    "grpo_trainer.py",
    "gmpo_config.py",
    "gmpo_trainer.py",
    "dppo_config.py",
    "ppo_utils.py",
    "src/prime_rl/trainer/rl/loss.py",
    "orchestrator/algo/grpo.py",
    "skyrl/train/config/config.py",
    "rloo_trainer.py",
    "dpo_trainer.py",
    "torch_functional.py",
    "train.py",
    "trainer.py",
    "loss.py",
    "nemo_rl/algorithms/utils.py",
    "slime/ray/rollout.py",
    "slime/utils/arguments.py",
    "integrations/deepspeed.py",
    "monitor/config.py",
    "runtime/config.py",
    "runtime/constants.py",
    "runtime/precision_config.py",
    "runtime/zero/config.py",
    "runtime/zero/offload_config.py",
    "runtime/fp16/loss_scaler.py",
    "runtime/lr_schedules.py",
    "inference/common_generate_function.py",
    "inference/common_inference_params.py",
    "ppo2/model.py",
    "ops/lamb/fused_lamb.py",
    "inference/text_generation_strategies/simple_text_generation_strategy.py",
    "trl/trainer/grpo_config.py",
    "trl/trainer/rloo_config.py",
    "experimental/ppo/ppo_trainer.py",
}


def test_every_file_that_is_mentioned_exists():
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    ours = [path for path in listed if (ROOT / path).exists()]
    missing = []
    for path in ours:
        if not path.endswith((".py", ".md")) or path == "CHANGELOG.md":
            continue
        for name in MENTION.findall((ROOT / path).read_text(encoding="utf-8")):
            is_there = any(known == name or known.endswith(f"/{name}") for known in ours)
            if not is_there and name not in OTHERS and not set(name) & set("<>*"):
                missing.append(f"{path} mentions {name}")
    assert not missing, "\n".join(missing)


LINK = re.compile(r"\]\(([^)#:\s]+)[)#]")


def test_every_file_that_a_page_links_to_exists():
    pages = [*(ROOT / "docs").glob("*.md"), *ROOT.glob("*.md")]
    links = [(page, link) for page in pages for link in LINK.findall(page.read_text(encoding="utf-8"))]
    links = [(page, link) for page, link in links if not link.startswith("api/")]  # made, and checked, by `make docs`
    assert len(links) > 100
    missing = [f"{page.name} links to {link}" for page, link in links if not (page.parent / link).exists()]
    assert not missing, "\n".join(missing)
