"""A plan's stages on torch.distributed.pipelining."""
