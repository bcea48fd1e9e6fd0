"""The folder of a run, `--out`: checks that a run can write there, moves earlier results aside, and reads its files.

Nothing here deletes files, and nothing needs torch: the command calls this module after Ctrl-C. `TABLE` has the names
of figures in other frameworks.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from hybrid_engine.rlhf.options import recipe_of
from hybrid_engine.rlhf.options.shared import FRAMEWORKS

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

CHECKPOINTS = "checkpoints"
LATEST = "latest"
"""The file among a run's checkpoints that names the complete one; see `checkpoints.py`."""
FAILED_EPISODES = "failed_episodes.jsonl"
BESIDE = ("config.yaml", "answers.jsonl", FAILED_EPISODES, "teacher.jsonl", "tensorboard", "dvclive")
"""Files that a run writes before its first step, which are not a result by themselves."""
RUN_RESULTS = ("metrics.jsonl", CHECKPOINTS, "actor", "best", "plot.png", "samples.json", "result.json", *BESIDE)
"""Files and folders in the run's folder of a recipe that is not a stage of another."""
STAGES = ("sft", "reward")
"""Recipes that other recipes run first: each writes a folder with its name, and related ones."""
FOLDERS = (
    *(CHECKPOINTS, "actor", "best", "tensorboard", "dvclive"),
    *(f"{name}{more}" for name in STAGES for more in ("", "-log", "-best", "-checkpoints")),
)
"""Names in the folder of a run that are folders; the others are files."""
CONFIG = "config.yaml"
_HEADING = "# hybrid-engine "
_HOW_IT_BEGAN = ("resume", "restart")
"""Options of a single start: a run that was resumed counts as one that was never interrupted."""
METRICS = "metrics.jsonl"
TABLE: dict[str, tuple[str | None, str | None, str | None]] = {
    # ours                     TRL                        verl                          OpenRLHF
    "score":                    ("reward",                 "critic/score/mean",          "reward"),
    "reward_with_kl":           ("objective/rlhf_reward",  "critic/rewards/mean",        "return"),
    "kl_per_token":             ("kl",                     "actor/reward_kl_penalty",    "kl"),
    "kl":                       (None,                     "actor/kl_loss",              None),
    "kl_per_sequence":          ("objective/kl",           None,                         None),
    "entropy":                  ("entropy",                "actor/entropy",              "entropy"),
    "length":                   ("completions/mean_length", "response_length/mean",      "response_length"),
    "cut_off_share":            ("completions/clipped_ratio", "response_length/clip_ratio", "truncated"),
    "policy_loss":              ("loss/policy_avg",        "actor/pg_loss",              "policy_loss"),
    "value_loss":               ("loss/value_avg",         "critic/vf_loss",             "critic_loss"),
    "approx_kl":                ("policy/approxkl_avg",    "actor/ppo_kl",               "ppo_kl"),
    "clip_fraction":            ("clip_ratio/region_mean", "actor/pg_clipfrac",          "ppo_clip_ratio"),
    "ratio":                    ("val/ratio",              None,                         None),
    "value_explained_variance": (None,                     "critic/vf_explained_var",    None),
    "groups_without_variance":  ("frac_reward_zero_std",   None,                         None),
    "correction_weight":        ("sampling/importance_sampling_ratio/mean", None,        None),
    "logprob_difference_mean":  ("sampling/sampling_logp_difference/mean", None,         None),
    "logprob_difference_max":   ("sampling/sampling_logp_difference/max", None,          None),
    "grad_norm":                ("grad_norm",              "actor/grad_norm",            None),
    "actor_grad_norm":          (None,                     None,                         "actor_grad_norm"),
    "critic_grad_norm":         (None,                     "critic/grad_norm",           "critic_grad_norm"),
    "loss":                     ("loss",                   "train/loss",                 "loss"),
    "learning_rate":            ("learning_rate",          "actor/lr",                   "lr"),
    "critic_learning_rate":     (None,                     "critic/lr",                  "critic_lr"),
    "chosen_reward":            ("rewards/chosen",         None,                         "chosen_reward"),
    "rejected_reward":          ("rewards/rejected",       None,                         "reject_reward"),
    "reward_margin":            ("rewards/margins",        None,                         None),
    "accuracy":                 ("rewards/accuracies",     None,                         "acc"),
    "e2e_seconds":              ("step_time",              "timing_s/step",              None),
    "generate_seconds":         (None,                     "timing_s/gen",               None),
}  # fmt: skip
TRACKER_PREFIX = {"trl": "train/", "openrlhf": "train/"}
"""Prefixes that these frameworks put before each name for a tracker."""
ANSWERS = "answers.jsonl"
TEACHER = "teacher.jsonl"


def checkpoints_of(recipe: str) -> str:
    """The name of the folder with a recipe's checkpoints: a stage's are next to those of the run that needs it."""
    return f"{recipe}-{CHECKPOINTS}" if recipe in STAGES else CHECKPOINTS


def results_of(recipe: str) -> tuple[str, ...]:
    """Files and folders that a recipe writes in the folder of its run."""
    return (recipe, f"{recipe}-log", f"{recipe}-best", checkpoints_of(recipe)) if recipe in STAGES else RUN_RESULTS


def check_out(out: str) -> Path:
    """The folder that `--out` names, which need not exist.

    Raises:
        ValueError: it cannot be created or written to, or a file or a folder has a name that a run needs for the other.
    """
    folder = Path(out)
    try:
        existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    except (OSError, ValueError) as error:  # a name that is too long, or cannot name a file
        raise ValueError(f"--out={out!r} cannot be a folder: {error}; choose another name") from error
    if not existing.is_dir():
        raise ValueError(f"--out={out!r} must be a folder, and {str(existing)!r} is a file; choose another name")
    try:
        with TemporaryFile(dir=existing):  # permissions are not conclusive, for root or in /proc
            pass
    except OSError as error:
        raise ValueError(f"--out={out!r} cannot be written: {error.strerror}; choose another folder") from error
    for name in (*RUN_RESULTS, *FOLDERS):
        path, is_folder = folder / name, name in FOLDERS
        if path.exists() and path.is_dir() != is_folder:
            kinds = ("folder", "file") if is_folder else ("file", "folder")
            raise ValueError(f"--out={out!r}: {name} must be a {kinds[0]} and is a {kinds[1]}; move it away")
    return folder


def left_behind(folder: Path, names: Sequence[str]) -> list[str]:
    """The entries of `names` that an earlier run left in `folder`, without empty files and without `BESIDE`."""
    found = [folder / name for name in names if name not in BESIDE and (folder / name).exists()]
    return [path.name for path in found if path.is_dir() or path.stat().st_size > 0]


def has_checkpoint(folder: Path, recipe: str = "ppo") -> bool:
    """Whether the run of `recipe` in `folder` has a complete checkpoint."""
    return (folder / checkpoints_of(recipe) / LATEST).is_file()


def check_nothing_is_lost(folder: Path, recipe: str = "ppo") -> None:
    """Raises ValueError if an earlier run left results in `folder`, with the options to continue."""
    found = left_behind(folder, results_of(recipe))
    if not found:
        return
    going_on = "--resume continues it, " if has_checkpoint(folder, recipe) else ""
    raise ValueError(
        f"--out={str(folder)!r} contains an earlier run ({', '.join(found)}): {going_on}--restart moves it aside and "
        "starts over, another --out keeps it"
    )


def check_can_resume(folder: Path, recipe: str = "ppo") -> None:
    """Raises ValueError for `--resume` without a complete checkpoint."""
    if has_checkpoint(folder, recipe):
        return
    found = left_behind(folder, results_of(recipe))
    none = f"--resume: {str(folder / checkpoints_of(recipe))!r} contains no complete checkpoint"
    if not found:
        raise ValueError(f"{none}; leave it out")
    raise ValueError(
        f"{none}; --restart starts over and moves the existing files aside ({', '.join(found)}), and a run with "
        "--save-every 0 saves no checkpoint"
    )


def set_aside(folder: Path, names: Sequence[str]) -> Path | None:
    """Moves `names` from `folder` to `previous-<n>` in it, with the first free n; None if there is nothing to move.

    For one process.
    """
    found = [name for name in names if (folder / name).exists()]
    if not found:
        return None
    number = 1
    while (folder / f"previous-{number}").exists():
        number += 1
    target = folder / f"previous-{number}"
    target.mkdir()
    for name in found:
        (folder / name).rename(target / name)
    return target


def flat_options(config: "DataclassInstance") -> dict[str, Any]:
    """The options of a recipe's `Config` by their names on the command line, in order.

    The fields of a field that is a dataclass are included. `resume` and `restart`, which say how a run begins, are left
    out.
    """
    options: dict[str, Any] = {}
    for field in fields(config):
        value = getattr(config, field.name)
        is_group = is_dataclass(value) and not isinstance(value, type)
        options |= flat_options(value) if is_group else {field.name: value}
    return {name: value for name, value in options.items() if name not in _HOW_IT_BEGAN}


def write_config(folder: Path, config: "DataclassInstance") -> None:
    """Writes `config.yaml` into `folder` atomically; for one process. Its first line names the recipe."""
    options = {name: list(value) if isinstance(value, tuple) else value for name, value in flat_options(config).items()}
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f".{CONFIG}"
    heading = f"{_HEADING}{recipe_of(config).replace('-', '_')} --config {CONFIG}\n"
    unfinished.write_text(heading + yaml.safe_dump(options, sort_keys=False, allow_unicode=True), encoding="utf-8")
    unfinished.replace(folder / CONFIG)


def read_recipe(folder: Path) -> str | None:
    """The recipe that wrote the `config.yaml` of a run's folder; None if that is not recorded."""
    path = folder / CONFIG
    first = path.read_text(encoding="utf-8").partition("\n")[0] if path.exists() else ""
    return first.removeprefix(_HEADING).split()[0] if first.startswith(_HEADING) else None


def read_config(folder: Path) -> dict[str, Any]:
    """The options in the `config.yaml` of a run's folder; empty if there is none.

    Raises:
        ValueError: it cannot be read.
    """
    path = folder / CONFIG
    if not path.exists():
        return {}
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(
            f"{str(path)!r} cannot be read: {' '.join(str(error).split())}; restore or remove it"
        ) from error
    if not isinstance(content, Mapping):
        raise ValueError(f"{str(path)!r} must contain `name: value` lines; restore or remove it")
    return {str(name): value for name, value in content.items()}


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a `metrics.jsonl`, without a truncated last line; empty if there is no file.

    Raises:
        ValueError: a line is not a JSON object with an integer as `step`.
    """
    if not path.exists():
        return []
    framework = read_config(path.parent).get("metric_names")
    framework = framework if framework in FRAMEWORKS else None
    text = path.read_text(encoding="utf-8")
    lines = text[: text.rfind("\n") + 1].splitlines()
    return [from_framework(_read_line(path, number, line), framework) for number, line in enumerate(lines, 1)]


def _read_line(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        content = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{str(path)!r}, line {number}, is not JSON: {error}; restore or remove it") from error
    if not isinstance(content, dict) or not isinstance(content.get("step"), int):
        raise ValueError(f"{str(path)!r}, line {number}, must be an object with a whole number as step; remove it")
    return content


def names_of(framework: str | None) -> dict[str, str]:
    """A mapping from our names to those of `framework`, one of `FRAMEWORKS`; empty for None."""
    if framework is None:
        return {}
    column = FRAMEWORKS.index(framework)
    return {ours: theirs for ours, row in TABLE.items() if (theirs := row[column]) is not None}


def rename(figures: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """`figures` renamed by `names`; a figure whose new name is taken keeps the old one."""
    return {new if (new := names.get(name, name)) not in figures else name: value for name, value in figures.items()}


def to_framework(figures: Mapping[str, Any], framework: str | None) -> dict[str, Any]:
    """Figures with our names under those of `framework`."""
    return rename(figures, names_of(framework))


def from_framework(figures: Mapping[str, Any], framework: str | None) -> dict[str, Any]:
    """Figures with names of `framework` under our names; the inverse of `to_framework`."""
    return rename(figures, {theirs: ours for ours, theirs in names_of(framework).items()})


@dataclass(frozen=True, kw_only=True)
class PromptAnswers:
    """The G answers to one prompt at one evaluation."""

    prompt: str
    responses: Sequence[str]
    """Texts of the answers, G."""
    rewards: Sequence[float | None]
    """G numbers; None for an answer that no reward judged."""
    lengths: Sequence[int] | None = None
    """Tokens of each response, G."""
    tokens: Sequence[Sequence[str]] | None = None
    """The tokens of each answer of the first evaluation."""
    logprobs: Sequence[Sequence[float]] | None = None
    """Log-probability of each of those tokens under the present weights, in nats."""
    extra: Mapping[str, Sequence[Any]] | None = None
    """G values for each name that reward functions passed to `log_extra`."""

    def __post_init__(self) -> None:
        assert len(self.rewards) == len(self.responses), f"{len(self.rewards)=} {len(self.responses)=}"
        assert self.lengths is None or len(self.lengths) == len(self.responses), f"{self.lengths=}"


def write_answers(folder: Path, step: int, answers: Sequence[PromptAnswers]) -> None:
    """Writes the answers after `step` steps to `answers.jsonl`, in place of existing ones of this step.

    The lines of other steps stay: a resumed run keeps what it had written. For one process.
    """
    fresh = [{"step": step} | {k: v for k, v in asdict(entry).items() if v is not None} for entry in answers]
    _write_step(folder / ANSWERS, step, read_answers(folder / ANSWERS), fresh)


def _write_step(path: Path, step: int, existing: Sequence[dict[str, Any]], fresh: Sequence[dict[str, Any]]) -> None:
    kept = [line for line in existing if line["step"] != step]
    lines = sorted([*kept, *fresh], key=lambda line: line["step"])
    unfinished = path.with_name(f".{path.name}")
    unfinished.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    unfinished.replace(path)


class TeacherFigures(NamedTuple):
    """How a model compares with its teacher on the answers of a step."""

    positions: list[dict[str, float]]
    """Means over the tokens from position `first` to `last` of the answers: agreement, entropies, divergence."""
    tokens: list[dict[str, Any]]
    """The tokens with the largest divergences: the text before, the token, and the likeliest token of both."""


def write_teacher_figures(folder: Path, step: int, figures: TeacherFigures) -> None:
    """Writes the figures of a step to `teacher.jsonl`, in place of existing ones of it. For one process."""
    _write_step(folder / TEACHER, step, read_teacher_figures(folder / TEACHER), [{"step": step, **figures._asdict()}])


def read_teacher_figures(path: Path) -> list[dict[str, Any]]:
    """The lines of a `teacher.jsonl`, by step; empty if there is no file.

    Raises:
        ValueError: a line does not have a step, and lists of positions and tokens.
    """
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    kinds = {"step": int, "positions": list, "tokens": list}
    return sorted((_read_entry(path, n, line, kinds) for n, line in enumerate(lines, 1)), key=lambda line: line["step"])


def read_answers(path: Path) -> list[dict[str, Any]]:
    """The lines of an `answers.jsonl`, by step; empty if there is no file.

    Raises:
        ValueError: a line does not have a step, a prompt, responses, and a reward or null for each response.
    """
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    return sorted((_read_answers_line(path, n, line) for n, line in enumerate(lines, 1)), key=lambda line: line["step"])


def _read_answers_line(path: Path, number: int, text: str) -> dict[str, Any]:
    kinds = {"step": int, "prompt": str, "responses": list, "rewards": list}
    line = _read_entry(path, number, text, kinds)
    if len(line["rewards"]) != len(line["responses"]):
        place = f"{str(path)!r}, line {number},"
        raise ValueError(f"{place} needs a reward, or null, for each response; restore or remove it")
    return line


def _read_entry(path: Path, number: int, text: str, kinds: Mapping[str, type]) -> dict[str, Any]:
    place = f"{str(path)!r}, line {number},"
    try:
        line = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{place} is not JSON: {error}; restore or remove it") from error
    for name, kind in kinds.items():
        if not isinstance(line, dict) or not isinstance(line.get(name), kind):
            raise ValueError(f"{place} needs a {name} of type {kind.__name__}; restore or remove it")
    return line
