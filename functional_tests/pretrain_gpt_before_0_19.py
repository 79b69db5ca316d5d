"""``recipes/pretrain_gpt.py`` for megatron-core before 0.19, whose ``pretrain`` takes a function that builds the model.

0.17 parses the arguments itself; since 0.18 the script does, and passes a configuration.
"""

import sys
from inspect import signature
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.training import get_args, pretrain
from megatron.training.arguments import core_transformer_config_from_args

from recipes.pretrain_gpt import datasets, forward_step

DEFAULTS = {"tokenizer_type": "NullTokenizer"}


def build_model(
    pre_process: bool = True, post_process: bool = True, config: Any = None, pg_collection: Any = None, **_: Any
) -> GPTModel:
    """Build the part of the model that this rank has; called by Megatron."""
    args = get_args()
    groups = {} if pg_collection is None else {"pg_collection": pg_collection}
    return GPTModel(
        config=config or core_transformer_config_from_args(args),
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        **groups,
    )


def main() -> None:
    """Train."""
    datasets.is_distributed = True  # type: ignore[attr-defined]
    what = (datasets, build_model, ModelType.encoder_or_decoder, forward_step)
    if "args_defaults" in signature(pretrain).parameters:
        pretrain(*what, args_defaults=DEFAULTS)
        return
    from megatron.training.argument_utils import pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args

    pretrain(pretrain_cfg_container_from_args(parse_and_validate_args(args_defaults=DEFAULTS)), *what)


if __name__ == "__main__":
    main()
