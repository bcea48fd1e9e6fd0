"""The algorithms of GRPO's family: their choices, the presets of the frameworks, advantages and losses."""
