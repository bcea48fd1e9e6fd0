"""The config of `parallelize` and the rules that its option values are checked against."""
