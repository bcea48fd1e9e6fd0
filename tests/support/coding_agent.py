"""A small coding agent, for tests: it asks the policy for a file, then a second time for a review, and writes both.

    python coding_agent.py BASE_URL API_KEY TASK

It knows nothing of this project and takes nothing but an address and a key, as agents of other projects do.
"""

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path


def ask(base_url: str, api_key: str, messages: list[dict]) -> str:
    """The policy's answer, by Anthropic's protocol."""
    body = {"model": "policy", "max_tokens": 4000, "temperature": 0, "messages": messages}
    headers = {"x-api-key": api_key, "Content-Type": "application/json"}
    request = urllib.request.Request(f"{base_url}/messages", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return "".join(block["text"] for block in json.load(answer)["content"])


def main(base_url: str, api_key: str, task: str) -> None:
    """Plays one episode."""
    print("working in", os.getcwd(), "as", sorted(os.environ))
    if task.startswith("crash"):
        raise SystemExit("there is nothing to do")
    messages = [{"role": "user", "content": task}]
    code = ask(base_url, api_key, messages)
    Path("solution.py").write_text(f"ANSWER = {code!r}\n")
    ask(base_url, api_key, [{"role": "user", "content": "Review."}])  # another branch
    messages += [{"role": "assistant", "content": code}, {"role": "user", "content": "Again?"}]
    ask(base_url, api_key, messages)
    subprocess.Popen(["sleep", "77"], start_new_session=True)  # it leaves a process
    if task.startswith("wait"):
        subprocess.run(["sleep", "77"])


main(*sys.argv[1:])
