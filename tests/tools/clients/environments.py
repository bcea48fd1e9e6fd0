"""The adapters of `hybrid-engine agent --environment` with the real packages: gymnasium, mcp, openenv, reasoning-gym.

Unlike the scripts of clients it runs in this project's environment, which finds the package in that of its name.
"""

import os
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from checks import run_checks

from hybrid_engine.rlhf.environments.loading import load_kinds
from hybrid_engine.rlhf.environments.playing import Loop
from hybrid_engine.rlhf.options.reinforcement import AgentConfig

FOLDER = Path(os.environ["CLIENT_FOLDER"])
GAME = """
import gymnasium

class Guess(gymnasium.Env):
    action_space = observation_space = gymnasium.spaces.Text(8)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.number = int(self.np_random.integers(10))
        return "guess a digit", {}

    def step(self, action):
        return "no", float(action == str(self.number)), action == str(self.number), False, {}

gymnasium.register("Guess-v0", Guess)
"""
TOOLS = """
import sys
from mcp.server.fastmcp import FastMCP

server = FastMCP("notes", port=int(sys.argv[1]) if len(sys.argv) > 1 else 0)
notes = []

@server.tool()
def add_note(text: str) -> str:
    "Adds a note."
    if not text:
        raise ValueError("an empty note")
    notes.append(text)
    return f"{len(notes)} notes"

server.run("streamable-http" if len(sys.argv) > 1 else "stdio")
"""
SERVED = """
import sys
import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

class Said(Action):
    message: str

class Heard(Observation):
    text: str = ""

class Echo(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **rest):
        self.count = 0
        return Heard(text=f"hello {seed}")

    def step(self, action, timeout_s=None, **rest):
        self.count += 1
        return Heard(text=action.message.upper(), reward=0.5, done=self.count == 2)

    @property
    def state(self):
        return State()

app = create_fastapi_app(Echo, Said, Heard, max_concurrent_envs=4)
uvicorn.run(app, port=int(sys.argv[1]), log_level="warning")
"""


def write(name: str, text: str) -> str:
    (FOLDER / name).write_text(text)
    return str(FOLDER / name)


@contextmanager
def built(spec: str, **options):
    """An instance of an environment, and its loop for asynchronous methods."""
    loop = Loop()
    (kind,) = load_kinds(AgentConfig(model="any", environment=(spec,), **options), loop.wait)
    environment = kind.build()
    try:
        yield environment
    finally:
        environment.close()
        loop.close()


@contextmanager
def listening(script: str):
    """The port at which a script serves."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, script, str(port)])
    try:
        for _ in range(3000):  # seconds of imports on a busy machine
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        yield port
    finally:
        process.terminate()
        process.wait()


def call(name: str, arguments: str) -> dict:
    return {"tool_calls": [{"id": "1", "function": {"name": name, "arguments": arguments}}]}


def gymnasium_games_are_played() -> None:
    write("some_game.py", GAME)
    sys.path.insert(0, str(FOLDER))
    for spec in ("some_game:Guess", "gymnasium:some_game:Guess", "gymnasium:Guess-v0"):
        with built(spec, action_pattern=r"\d") as game:
            assert game.reset({"seed": 3}) == "guess a digit"
            number = game.instance.unwrapped.number
            assert game.respond({"content": f"it is {(number + 1) % 10}"}) == [{"role": "user", "content": "no"}]
            assert game.respond({"content": f"it is {number}"}) is None
            assert game.get_reward() == 1.0 and game.reward_name == "Guess"


def play_notes(spec: str, *, is_own: bool) -> None:
    with built(spec) as tools:
        (schema,) = tools.tools
        assert schema["function"]["name"] == "add_note"
        assert schema["function"]["parameters"]["properties"]["text"]["type"] == "string"
        for _ in range(2):
            assert tools.reset(tools.accepted({"prompt": "x", "answer": 1})) is None
            (first,) = tools.respond(call("add_note", '{"text": "milk"}'))
            assert first["content"] == "1 notes" or not is_own  # a process of its own for each episode
        (wrong,) = tools.respond(call("add_note", '{"text": ""}'))
        assert "an empty note" in wrong["content"] and "error" in wrong["content"]
        assert tools.respond({"content": "done"}) is None


def mcp_servers_over_stdio() -> None:
    path = os.environ["PYTHONPATH"]  # which mcp does not pass on
    play_notes(f"mcp:env PYTHONPATH={path} {sys.executable} {write('notes.py', TOOLS)}", is_own=True)


def mcp_servers_over_http() -> None:
    with listening(write("notes.py", TOOLS)) as port:
        play_notes(f"mcp:http://127.0.0.1:{port}/mcp", is_own=False)


def openenv_servers_are_played() -> None:
    with listening(write("echo.py", SERVED)) as port, built(f"openenv:http://127.0.0.1:{port}") as game:
        for _ in range(2):
            assert "hello 7" in game.reset({"seed": 7, "prompt": "x"})
            (heard,) = game.respond({"content": "hi"})
            assert "HI" in heard["content"]
            assert game.respond({"content": '{"message": "bye"}'}) is None
            assert game.get_reward() == 1.0


def questions_of_reasoning_gym() -> None:
    with built("reasoning_gym:chain_sum:max_terms=2") as game:
        question = game.reset({"seed": 5})
        assert question == game.reset({"seed": 5})
        assert game.respond({"content": game.instance._entry["answer"]}) is None and game.get_reward() == 1.0


CHECKS = {
    "gymnasium": [gymnasium_games_are_played],
    "mcp": [mcp_servers_over_stdio, mcp_servers_over_http],
    "openenv": [openenv_servers_are_played],
    "reasoning-gym": [questions_of_reasoning_gym],
}
run_checks({f"check_{check.__name__}": check for check in CHECKS[os.environ["CLIENT"]]})
