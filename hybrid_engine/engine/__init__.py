"""The engines: ZeroEngine trains, HybridEngine trains and generates, attach() generates in another project's training
loop.
"""
