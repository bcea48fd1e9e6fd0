"""The blocks that say what is written down of a run: trackers and the profiler of operations."""

from dataclasses import dataclass

from hybrid_engine.config.checks import check_flag, check_integer, check_path_inside, check_text


@dataclass(frozen=True, kw_only=True)
class TensorBoardConfig:
    """`tensorboard`: events for TensorBoard, through accelerate's tracker."""

    enabled: bool = False
    """Whether they are written."""
    output_path: str = ""
    """The folder; empty is the working directory."""
    job_name: str = "DeepSpeedJobName"
    """The folder inside it."""

    def __post_init__(self) -> None:
        check_flag("tensorboard.enabled", self.enabled)
        check_text("tensorboard.output_path", self.output_path)
        check_path_inside("tensorboard.job_name", self.job_name)


@dataclass(frozen=True, kw_only=True)
class CsvMonitorConfig:
    """`csv_monitor`: one file of rows `step, value` for each quantity."""

    enabled: bool = False
    """Whether they are written."""
    output_path: str = ""
    """The folder; empty is the working directory."""
    job_name: str = "DeepSpeedJobName"
    """The folder inside it."""

    def __post_init__(self) -> None:
        check_flag("csv_monitor.enabled", self.enabled)
        check_text("csv_monitor.output_path", self.output_path)
        check_path_inside("csv_monitor.job_name", self.job_name)


@dataclass(frozen=True, kw_only=True)
class WandbConfig:
    """`wandb`: Weights & Biases, through accelerate's tracker."""

    enabled: bool = False
    """Whether values are sent."""
    project: str = "deepspeed"
    """The project."""
    group: str | None = None
    """The group of runs."""
    team: str | None = None
    """The team (wandb's entity)."""

    def __post_init__(self) -> None:
        check_flag("wandb.enabled", self.enabled)
        for name in ("project", "group", "team"):
            check_text(f"wandb.{name}", getattr(self, name), is_optional=name != "project")


@dataclass(frozen=True, kw_only=True)
class CometConfig:
    """`comet`: Comet, through accelerate's tracker."""

    enabled: bool = False
    """Whether values are sent."""
    project: str | None = None
    """The project; null leaves it to Comet's own configuration."""
    workspace: str | None = None
    """The workspace."""
    api_key: str | None = None
    """The key."""
    experiment_name: str | None = None
    """The name of the experiment."""
    experiment_key: str | None = None
    """The key of an experiment to go on with."""
    online: bool | None = None
    """False stores the experiment on disk."""
    mode: str | None = None
    """"get", "create" or "get_or_create"."""

    def __post_init__(self) -> None:
        check_flag("comet.enabled", self.enabled)
        if self.online is not None:
            check_flag("comet.online", self.online)
        for name in ("project", "workspace", "api_key", "experiment_name", "experiment_key", "mode"):
            check_text(f"comet.{name}", getattr(self, name), is_optional=True)


@dataclass(frozen=True, kw_only=True)
class FlopsProfilerConfig:
    """`flops_profiler`: the floating-point operations of one step, counted by PyTorch's FlopCounterMode."""

    enabled: bool = False
    """Whether they are counted."""
    profile_step: int = 1
    """The optimizer step, counted from 0, whose first micro-batch is profiled; -1 profiles none."""
    module_depth: int = -1
    """Levels of submodules in the table; -1 shows all."""
    top_modules: int = 1
    """Rows of the table without `detailed`, those with the most operations."""
    detailed: bool = True
    """Whether all modules down to `module_depth` are shown."""
    output_file: str | None = None
    """The file to write to; null prints."""

    def __post_init__(self) -> None:
        check_flag("flops_profiler.enabled", self.enabled)
        check_flag("flops_profiler.detailed", self.detailed)
        check_integer("flops_profiler.profile_step", self.profile_step, -1)
        check_integer("flops_profiler.module_depth", self.module_depth, -1)
        check_integer("flops_profiler.top_modules", self.top_modules, 1)
        check_text("flops_profiler.output_file", self.output_file, is_optional=True)
