"""Where the policy improves: advantages, losses, packing, the FSDP2 backend, checkpoints, the training loop."""
