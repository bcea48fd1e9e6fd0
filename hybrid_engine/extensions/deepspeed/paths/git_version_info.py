"""`deepspeed.git_version_info`: which DeepSpeed's names these are."""

from hybrid_engine.extensions.deepspeed.deepspeed_names import VERSION, __git_branch__, __git_hash__

version = VERSION
__version_major__, __version_minor__, __version_patch__ = map(int, VERSION.split("."))
git_hash, git_branch = __git_hash__, __git_branch__
