"""What a run left, compared and shown: `hybrid-engine diff` and `hybrid-engine report`. Needs no torch."""
