"""The only package that touches private or version-dependent names of torch, Megatron and NVRx.

One module per foreign thing. Each name says the version it was read in and the test that notices when it moves.
"""
