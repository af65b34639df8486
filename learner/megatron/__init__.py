"""The learner on Megatron-core: `backend.py` implements `Backend`, and the rest is what it is made of.

    model       the model as it is held, and what it says of tokens
    fit         whether a model can be held and split so
    layout      which ranks hold what
    family      a Hugging Face config as Megatron's, the model, and its weights under Hugging Face names (`mapping`)
    rows        packed rows as one rank sees them: padded, and cut by context parallelism
    scores      log-probs over a vocabulary that is split over ranks
    checkpoint  what is saved, readable in another layout; training waits while it is written
    cpu, spec   Megatron-core without CUDA and without TransformerEngine

Importing this package makes `megatron.core` importable where there is no CUDA; nothing else may import it before. With CUDA none of
it has run yet.
"""

import warnings

from . import cpu

# Megatron-core's to mend: what it calls in torch, and, module by module, that neither TransformerEngine nor Apex is there.
warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core")
warnings.filterwarnings("ignore", category=FutureWarning, message=r"`torch\.distributed\.\w+_tensor` is deprecated")

cpu.install()
