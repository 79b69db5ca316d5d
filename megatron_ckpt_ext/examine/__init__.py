"""What operators ask about checkpoints, offline: plain answers, which ``cli`` prints. No process group, no Megatron."""
