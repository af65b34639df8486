"""The learner, which improves the policy: advantages, losses, packing, the training loop; `fsdp2` and `megatron` hold and step the
model."""
