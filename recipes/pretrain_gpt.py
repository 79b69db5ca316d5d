"""Pretrains a GPT model on mock data with Megatron's own training loop.

For machines that have the megatron-core wheel (0.19 or later) but no Megatron-LM checkout: its entry calls
are those of Megatron-LM's script of the same name, so what runs here runs there.
"""

from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.training import get_args, get_tokenizer, pretrain

BATCH_DTYPES = {
    "tokens": torch.int64,
    "labels": torch.int64,
    "loss_mask": torch.float32,
    "position_ids": torch.int64,
}


def datasets(sample_counts: list[int]) -> Any:
    """Train, validation and test sets of mock documents; called by Megatron on every rank."""
    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=None,
        split="90,5,5",
        tokenizer=get_tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    return BlendedMegatronDatasetBuilder(
        MockGPTDataset, sample_counts, lambda: parallel_state.get_tensor_model_parallel_rank() == 0, config
    ).build()


def next_batch(samples: Any) -> dict[str, torch.Tensor]:
    """The next batch on the device; the first tensor-parallel rank reads it and sends it to the others."""
    args = get_args()
    device = torch.device("cuda", torch.cuda.current_device())
    if parallel_state.get_tensor_model_parallel_rank() == 0:
        read = next(samples)
        batch = {name: read[name].to(device) for name in BATCH_DTYPES}
    else:
        shape = (args.micro_batch_size, args.seq_length)
        batch = {name: torch.empty(shape, dtype=dtype, device=device) for name, dtype in BATCH_DTYPES.items()}
    if parallel_state.get_tensor_model_parallel_world_size() > 1:
        source = parallel_state.get_tensor_model_parallel_src_rank()
        for tensor in batch.values():
            torch.distributed.broadcast(tensor, source, group=parallel_state.get_tensor_model_parallel_group())
    return batch


def masked_loss(mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """The summed loss, the number of tokens it is over, and both for Megatron's log."""
    loss = torch.sum(losses.view(-1).float() * mask.view(-1))
    tokens = mask.sum().to(torch.int)
    return loss, tokens, {"lm loss": torch.stack([loss.detach(), tokens.detach()])}


def forward_step(samples: Any, model: Any) -> tuple[torch.Tensor, Any]:
    """One micro-batch: the model's losses and what reduces them."""
    batch = next_batch(samples)
    losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return losses, partial(masked_loss, batch["loss_mask"])


def main() -> None:
    """Parse Megatron's arguments and train."""
    from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args

    args = parse_and_validate_args(args_defaults={"tokenizer_type": "NullTokenizer"})
    if args.context_parallel_size > 1:
        raise ValueError("--context-parallel-size above 1 is not done here: use the script of a Megatron-LM checkout.")
    datasets.is_distributed = True  # type: ignore[attr-defined]
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(config, datasets, ModelType.encoder_or_decoder, forward_step)


if __name__ == "__main__":
    main()
