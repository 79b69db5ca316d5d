"""Pretrains with Megatron-Bridge's own loop, and saves with prepared metadata.

    torchrun --nproc-per-node 8 recipes/bridge/pretrain.py --config-file recipes/bridge/overrides.yaml [key=value ...]

The one line that a script of your own needs is ``with_ckpt_ext(config)``, before overrides are applied. Bridge is
imported inside functions: the process that writes checkpoints imports this file again, and needs none of it.
"""

import argparse
from importlib import import_module
from typing import Any


def vanilla_gpt() -> Any:
    """Recipe of a small GPT on mock data, for one GPU and more; saves are asynchronous and prepared."""
    from megatron.bridge.recipes.gpt import vanilla_gpt_pretrain_config

    from megatron_ckpt_ext.integrations.bridge import with_ckpt_ext

    return with_ckpt_ext(vanilla_gpt_pretrain_config(), async_save=True)


def config_of(recipe: str | None) -> Any:
    """Call a recipe function, ``MODULE:FUNCTION``, of Bridge or of your own, and let its saves be prepared."""
    if recipe is None:
        return vanilla_gpt()
    from megatron_ckpt_ext.integrations.bridge import with_ckpt_ext

    module, _, function = recipe.partition(":")
    return with_ckpt_ext(getattr(import_module(module), function)())


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", metavar="MODULE:FUNCTION", help="of a GPT; the default is vanilla_gpt of this file")
    parser.add_argument("--config-file", metavar="YAML", help="overrides, as in overrides.yaml")
    arguments, overrides = parser.parse_known_args()

    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain
    from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides

    config = config_of(arguments.recipe)
    process_config_with_overrides(config, arguments.config_file, overrides)
    pretrain(config, forward_step)


if __name__ == "__main__":
    main()
