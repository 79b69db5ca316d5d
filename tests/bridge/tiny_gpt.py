"""Recipe functions of a GPT that Megatron-Bridge trains on two CPU ranks."""

from typing import Any

__all__ = ["tiny_gpt", "tiny_gpt_megatron_fsdp"]

OFF_ON_THE_CPU = (
    *("gradient_accumulation_fusion", "masked_softmax_fusion", "bias_activation_fusion", "bias_dropout_fusion"),
    *("persist_layer_norm", "cross_entropy_loss_fusion"),
)


def tiny_gpt() -> Any:
    """Bridge's small GPT, made tiny; with the distributed optimizer."""
    from megatron.bridge.models.gpt_provider import local_layer_spec
    from megatron.bridge.recipes.gpt import vanilla_gpt_pretrain_config

    config = vanilla_gpt_pretrain_config()
    model = config.model
    model.transformer_layer_spec = local_layer_spec
    model.num_layers, model.hidden_size, model.num_attention_heads, model.seq_length = 2, 64, 4, 32
    model.use_cpu_initialization = True
    model.hidden_dropout = model.attention_dropout = 0.0
    for fusion in OFF_ON_THE_CPU:
        setattr(model, fusion, False)
    config.dataset.seq_length = 32
    config.dataset.num_workers, config.dataset.persistent_workers = 0, False
    config.dist.distributed_backend = "gloo"
    config.train.global_batch_size, config.train.micro_batch_size = 4, 2
    config.optimizer.lr = 1e-4
    config.ddp.use_distributed_optimizer = config.optimizer.use_distributed_optimizer = True
    config.validation.eval_iters = 0
    config.logger.log_interval = 1
    config.logger.tensorboard_dir = None
    config.checkpoint.save_interval = 2
    return config


def tiny_gpt_megatron_fsdp() -> Any:
    """The same with Megatron-FSDP."""
    config = tiny_gpt()
    config.dist.use_megatron_fsdp = config.ddp.use_megatron_fsdp = True
    config.ddp.data_parallel_sharding_strategy = "optim_grads_params"
    config.ddp.average_in_collective = False
    config.ddp.overlap_grad_reduce = True
    config.checkpoint.ckpt_format = "fsdp_dtensor"
    return config
