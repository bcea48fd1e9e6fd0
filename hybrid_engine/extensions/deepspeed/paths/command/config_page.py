"""`python -m hybrid_engine.command.config_page` for one version; the module's path is `NEW` now."""

import runpy
import warnings

NEW = "hybrid_engine.cli.config_page"

if __name__ == "__main__":
    warnings.warn(f"this module goes with the next version; use {NEW}", FutureWarning, stacklevel=1)
    runpy.run_module(NEW, run_name="__main__", alter_sys=True)
