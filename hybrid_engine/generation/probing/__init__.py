"""Whether containers compute what the module computes, measured and remembered."""
