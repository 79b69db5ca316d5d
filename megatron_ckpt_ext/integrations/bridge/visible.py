"""Our warnings are seen in a Bridge job."""

import logging

from megatron.bridge.training.utils.log_utils import warning_filter

__all__ = ["keep_warnings_visible"]

PACKAGE = "megatron_ckpt_ext"


def keep_warnings_visible() -> None:
    """Take the filter off our loggers that Bridge by default (``logger.filter_warnings``) puts on all. No collectives.

    It drops every warning, and so hid that a job had fallen back to synchronous saves.
    """
    for name in list(logging.root.manager.loggerDict):
        if name.partition(".")[0] == PACKAGE:
            logging.getLogger(name).removeFilter(warning_filter)
