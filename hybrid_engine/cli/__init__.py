"""The `hybrid-engine` command and its launcher, with the modules that read options from source files."""
