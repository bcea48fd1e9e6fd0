"""Data files and checkpoint folders that are damaged in every way, and must be refused with the engine unchanged."""

import functools
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from hybrid_engine.rlhf.data.prompts import load_prompt_rows

from .bad_inputs import Call
from .interrupts import Cycle

FILES: dict[str, bytes] = {
    "empty.jsonl": b"",
    "blank.jsonl": b"\n\n",
    "cut.jsonl": b'{"prompt": "a"}\n{"prompt": ',
    "list.jsonl": b"[1]\n",
    "number.jsonl": b"3\n",
    "column.jsonl": b'{"text": "a"}\n',
    "value.jsonl": b'{"prompt": 3}\n',
    "null.jsonl": b'{"prompt": null}\n',
    "no text.jsonl": b'{"prompt": ""}\n',
    "one.jsonl": b'{"prompt": "a"}\n',
    "bytes.jsonl": b'{"prompt": "\xff\xfe"}\n',
    "utf16.jsonl": '{"prompt": "a"}\n'.encode("utf-16"),
    "binary.jsonl": bytes(range(256)),
    "plain.txt": b"a\nb\n",
    "cut.json": b'[{"prompt": "a"}',
    "cut.parquet": b"PAR1",
    "cut.csv": b'prompt\n"a\n',
    "column.csv": b"text\na\n",
    "cut.json.gz": b"\x1f\x8b",
}


def build_file_calls() -> list[Call]:
    """The table."""
    return [*_of_data(), *_of_checkpoints()]


def _of_data() -> Iterator[Call]:
    folder = Path(tempfile.mkdtemp())
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
        yield Call("data files", name, functools.partial(load_prompt_rows, str(folder / name)), (name,))
    (folder / "folder.jsonl").mkdir()
    (folder / "empty").mkdir()
    for name in ("missing.jsonl", "folder.jsonl", "empty", "missing"):
        yield Call("data files", name, functools.partial(load_prompt_rows, str(folder / name)), (name,))


class Saved:
    """An engine with two checkpoints, the later of which is damaged, loaded and mended."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp()) / "run"
        self.cycle = Cycle({})
        for tag in ("first", "second"):
            self.cycle.run()
            self.cycle.engine.save_checkpoint(self.folder, tag)
        self.cycle.run()
        self.files = [path for path in sorted((self.folder / "second").rglob("*")) if path.is_file()]

    def call(self, name: str, damage: Callable[[Path], Any], words: tuple[str, ...] = ("second",)) -> Call:
        """Loads a copy of both checkpoints, after `damage` to the copy."""

        def run() -> None:
            with tempfile.TemporaryDirectory() as folder:
                copied = Path(folder) / "run"
                shutil.copytree(self.folder, copied, symlinks=True)
                damage(copied)
                self.cycle.engine.load_checkpoint(copied)

        return Call("checkpoints", name, run, words, self.state)

    def state(self) -> Any:
        values = {name: value.double().sum().item() for name, value in self.cycle.state().items()}
        return values, self.cycle.counters(), torch.is_grad_enabled()


def _of_checkpoints() -> Iterator[Call]:
    saved = Saved()
    for path in saved.files:
        name = str(path.relative_to(saved.folder))
        for what, damage in DAMAGES.items():
            yield saved.call(f"{path.name}: {what}", lambda copied, name=name, damage=damage: damage(copied / name))
        other = name.replace("second", "first")
        if (saved.folder / other).exists():
            swap = lambda copied, name=name, other=other: shutil.copyfile(copied / other, copied / name)  # noqa: E731
            yield saved.call(f"{path.name}: another checkpoint's", swap)
    yield from _of_manifests(saved)
    yield from _of_latest(saved)


def flip(path: Path, place: float, count: int = 64) -> None:
    content = bytearray(path.read_bytes())
    start = int(place * max(0, len(content) - count))
    content[start : start + count] = bytes(byte ^ 0xFF for byte in content[start : start + count])
    path.write_bytes(content)


def to_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "missing": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "cut in half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "one byte short": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "one byte longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "text": lambda path: path.write_text("x" * path.stat().st_size),
    "64 bytes flipped at the beginning": lambda path: flip(path, 0.0),
    "64 bytes flipped in the middle": lambda path: flip(path, 0.5),
    "64 bytes flipped at the end": lambda path: flip(path, 1.0),
    "one bit flipped": lambda path: flip(path, 0.3, 1),
    "a folder": to_folder,
}


def _of_manifests(saved: Saved) -> Iterator[Call]:
    manifest = json.loads((saved.folder / "second" / "checkpoint.json").read_text())
    for key in manifest:
        for value in (None, 3, "x", [], {}, True, 10**6):
            if manifest[key] == value or (key in ("world_size", "stage", "dtype", "left_out")):
                continue

            def change(copied: Path, key: str = key, value: Any = value) -> None:
                path = copied / "second" / "checkpoint.json"
                path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))

            yield saved.call(f"the manifest's {key} = {value!r}", change)


def _of_latest(saved: Saved) -> Iterator[Call]:
    for text in ("", "missing", "..", "a/b", "../run/second", "x" * 300, "second\nfirst"):
        word = "latest" if not text.strip() else text[:5]
        yield saved.call(
            f"latest = {text[:20]!r}", lambda copied, text=text: (copied / "latest").write_text(text), (word,)
        )
    yield saved.call("no latest", lambda copied: (copied / "latest").unlink(), ("latest",))
    yield saved.call("latest is a folder", lambda copied: to_folder(copied / "latest"), ("latest",))
    yield saved.call("no checkpoint", lambda copied: shutil.rmtree(copied / "second"))
    yield saved.call(
        "an empty checkpoint", lambda copied: [shutil.rmtree(copied / "second"), (copied / "second").mkdir()]
    )
