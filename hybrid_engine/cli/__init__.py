"""The `hybrid-engine` command, the launcher, and what reads options from sources."""
