"""The ops of a module and how each can be split."""
