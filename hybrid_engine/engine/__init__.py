"""The engines: ZeroEngine trains, HybridEngine also generates, attach() generates in another project's training
loop.
"""
