"""What a training pass computes beside the loss."""
