"""The learner on PyTorch FSDP2: `backend.py` implements `Backend`, and the rest is what it is made of.

model             the model as it is held, what it says of tokens, and its weights under Hugging Face names
parts             which ranks take which rows
attention         packed rows without a mask
context_parallel  ranks that share the tokens of a row
lora              adapters in place of weights
liger             fused kernels on CUDA
checkpoint        what is saved while training goes on, readable on another number of ranks
"""
