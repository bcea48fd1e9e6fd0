"""Clients of other projects against a small model that `hybrid-engine serve` serves: `make clients`.

Each has an environment of its own, `.venv-clients-NAME`, and a script of checks, one line each. What lm-eval measures
is compared with the model's own log-probabilities here.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoTokenizer, LlamaForCausalLM

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path.insert(0, str(ROOT))
from tests.support.served import serving, write_model  # noqa: E402

SCRIPTS = {
    "openai": "openai_sdk.py",
    "anthropic": "anthropic_sdk.py",
    "litellm": "litellm_sdk.py",
    "openai-agents": "agents_sdk.py",
    "verifiers": "verifiers_eval.py",
    "lm-eval": "lm_eval_harness.py",
    **dict.fromkeys(("gymnasium", "mcp", "openenv", "reasoning-gym"), "environments.py"),
}
SECONDS = 300
"""For all checks of one client."""


class Outcome(NamedTuple):
    """How one client fared."""

    client: str
    version: str
    passed: list[str]
    failed: list[str]
    seconds: float


def main(clients: list[str]) -> int:
    """Runs the scripts of `clients` and prints a table; returns how many checks failed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "tiny")
        with serving(folder / "tiny", folder / "serve.log") as served:
            outcomes = [run_client(client, served.url, folder) for client in clients]
    print(f"\n{'client':<14} {'version':<12} {'passed':>6} {'failed':>6} {'seconds':>8}")
    for outcome in outcomes:
        counts = f"{len(outcome.passed):>6} {len(outcome.failed):>6} {outcome.seconds:>8.1f}"
        print(f"{outcome.client:<14} {outcome.version:<12} {counts}")
    num_failed = sum(len(outcome.failed) for outcome in outcomes)
    passed = f"{sum(len(outcome.passed) for outcome in outcomes)} passed"
    print(f"{num_failed} failed, {passed}" if num_failed else passed)
    return num_failed


def run_client(client: str, url: str, folder: Path) -> Outcome:
    """Runs one client's script in its environment, and tells its lines."""
    own = ROOT / f".venv-clients-{client}"
    python = own / "bin" / "python"
    work = folder / client
    work.mkdir()
    environment = os.environ | {"SERVED_URL": url, "CLIENT_FOLDER": str(work), "HF_HOME": str(work), "CLIENT": client}
    runs_here = SCRIPTS[client] == "environments.py"
    if runs_here:
        environment["PYTHONPATH"] = os.pathsep.join(map(str, own.glob("lib/python*/site-packages")))
    begin = time.perf_counter()
    ended = run_script([sys.executable if runs_here else str(python), str(HERE / SCRIPTS[client])], environment)
    seconds = time.perf_counter() - begin
    passed, failed = (re.findall(rf"^{word} (\w+)$", ended.stdout, re.MULTILINE) for word in ("PASSED", "FAILED"))
    if not (passed or failed) or (ended.returncode and not failed):
        failed.append("the script itself")
    if client == "lm-eval" and "check_log_likelihoods" in passed:
        wrong = wrong_scores(folder / "tiny", work / "log_likelihoods.json")
        (failed if wrong else passed).append("log_likelihoods_are_the_models")
        ended.stderr += "\n".join(wrong)
    for word, names in (("PASSED", passed), ("FAILED", failed)):
        for name in names:
            print(f"{word} {client}::{name}", flush=True)
    if failed:
        print(ended.stdout[-4000:] + ended.stderr[-8000:], flush=True)
    return Outcome(client, version_of(client, python), passed, failed, seconds)


def run_script(command: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess:
    """Runs `command`; one that takes more than SECONDS is ended, and has failed with what it said until then."""
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            out, err = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            out += f"FAILED all_within_{SECONDS}_seconds\n"
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def version_of(client: str, python: Path) -> str:
    """The release that is installed."""
    code = f"from importlib.metadata import version; print(version({client!r}))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


@torch.no_grad()
def wrong_scores(folder: Path, scores: Path) -> list[str]:
    """Scores of [context, continuation, log-likelihood, whether it is greedy] that are not the model's."""
    model, tokenizer = LlamaForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    wrong = []
    for context, continuation, score, is_greedy in json.loads(scores.read_text()):
        first, ids = len(tokenizer.encode(context)), tokenizer.encode(context + continuation)
        logprobs = model(torch.tensor([ids])).logits[0, first - 1 : -1].log_softmax(-1)
        drawn = torch.tensor(ids[first:])
        expected = float(logprobs.gather(1, drawn[:, None]).sum())
        greedy = bool((logprobs.argmax(-1) == drawn).all())
        if abs(score - expected) > 1e-3 or is_greedy != greedy:
            wrong.append(f"{context!r} {continuation!r}: {score}, {is_greedy}; the model says {expected}, {greedy}")
    return wrong


if __name__ == "__main__":
    sys.exit(bool(main(sys.argv[1:] or list(SCRIPTS))))
