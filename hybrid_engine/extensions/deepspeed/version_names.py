"""`deepspeed.git_version_info`, and the version at the top of the package: which DeepSpeed's names these are."""

from hybrid_engine.extensions.deepspeed.presence import VERSION

version = VERSION
__version_major__, __version_minor__, __version_patch__ = map(int, VERSION.split("."))
__git_hash__ = __git_branch__ = git_hash = git_branch = "unknown"
