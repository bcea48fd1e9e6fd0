"""Options of `hybrid-engine evaluate`."""

from dataclasses import dataclass

from hybrid_engine.config.checks import check_at_least, check_between, check_count, check_finite
from hybrid_engine.rlhf.options.checks import LARGEST_SEED, check_texts, option
from hybrid_engine.rlhf.options.shared import LENGTHS, DatasetOptions, DtypeOptions, RewardOptions


@dataclass(frozen=True, kw_only=True)
class Config(RewardOptions, DatasetOptions, DtypeOptions):
    """Evaluates a model: the model answers each prompt of a dataset several times, and rewards score the answers.

        hybrid-engine evaluate --model runs/docs/actor --dataset problems.jsonl --reward number -k 8
        hybrid-engine evaluate --model Qwen/Qwen3-0.6B --dataset prompts.jsonl --reward my_rewards:score --out runs/mine

    Prints pass@1, pass@k and the mean score with 95% confidence intervals by prompt, and some answers. Writes to
    --out: config.yaml, result.json and samples.jsonl (every answer with its scores).
    """

    model: str | None = option(None, "Hugging Face name or folder of the model")
    dataset: str | tuple[str, ...] | None = option(
        None,
        'Prompts: a .jsonl, .json, .csv or .parquet file, a folder or a hub name, with a column "prompt" and the '
        "columns that the rewards read",
    )
    reward_time_limit: float = option(300.0, "Time limit of one reward call, in seconds, for up to 64 prompts")
    k: int | None = option(
        None,
        "The k of pass@k: the probability that one of k answers passes; default: 8, at --temperature 0 1",
    )
    num_samples: int | None = option(None, "Answers per prompt, at least k; more make pass@k more precise; default: k")
    threshold: float = option(1.0, "Minimum score of an answer that passes")
    out: str = option("runs/evaluation", "Output folder")
    seed: int = option(20_257, "Random seed of sampling; the default is that of the recipes' own evaluations")
    restart: bool = option(
        False,
        "Start over; the results of an earlier evaluation are moved to previous-1 (or the next number) inside --out",
    )
    max_prompts: int | None = option(None, "Use only the first N prompts")
    held_out: bool = option(
        False,
        "Use only the prompts that training on this dataset holds out, with the same --held-out-share and --row-key; "
        "after training with --held-out-split or --held-out-dataset, give those as --split or --dataset instead",
    )
    max_prompt_tokens: int = option(
        0,
        "Maximum prompt length in tokens; longer prompts lose their beginning; 0: the longest in the data, within the "
        "model's positions",
    )
    max_new_tokens: int = option(
        0,
        "Maximum answer length in tokens; 0: what the longest prompt leaves of the model's positions, at most 4096",
    )
    temperature: float = option(1.0, "Sampling temperature; 0 is greedy, with one answer per prompt")
    max_running: int = option(0, "Maximum answers decoded at once on each process; 0: chosen for the device")
    rows_per_pass: int = option(0, "Maximum answers that a reward model scores at once; 0: 64")

    def __post_init__(self) -> None:
        for name in ("model", "dataset", "reward"):
            if not getattr(self, name):
                raise ValueError(f"--{name} is missing; say which {name} to evaluate with")
        RewardOptions.__post_init__(self)
        DatasetOptions.__post_init__(self)
        check_texts(self)
        for name in LENGTHS:
            check_count(name, getattr(self, name), 0)
        check_count("k", self.k, 1)
        check_at_least("temperature", self.temperature, 0)
        if not self.temperature and max(self.pass_k, self.num_samples or 1) > 1:
            raise ValueError(
                "--temperature=0 gives the same answer to a prompt every time; leave -k and --num-samples out, or "
                "raise it"
            )
        check_count("max_prompts", self.max_prompts, 1)
        check_count("num_samples", self.num_samples, self.pass_k)
        for name in ("rows_per_pass", "max_running"):
            check_count(name, getattr(self, name), 0)
        check_between("seed", self.seed, 0, LARGEST_SEED)
        check_finite("threshold", self.threshold)
        DtypeOptions.__post_init__(self)

    @property
    def tokens_in_pass(self) -> int:
        """0: no pass limits the tokens of a prompt with its answer."""
        return 0

    @property
    def pass_k(self) -> int:
        """The k of pass@k."""
        return self.k or (8 if self.temperature else 1)
