"""Lets these tests import megatron.bridge where ``make bridge`` has installed it; elsewhere they are skipped."""

from importlib.util import find_spec

from bridge.te_stand_in import install_unless_there

if find_spec("megatron.bridge") is not None:
    install_unless_there()
