"""The learner on Megatron-core: `backend.py` implements `Backend`, the other files are its parts.

Importing this package makes `megatron.core` importable where there is no CUDA; nothing else may import it before. With CUDA none of
it has run yet.
"""

import warnings

from . import cpu

# Megatron-core's own warnings: deprecated torch calls, and per module that TransformerEngine and Apex are missing.
warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core")
warnings.filterwarnings("ignore", category=FutureWarning, message=r"`torch\.distributed\.\w+_tensor` is deprecated")

cpu.install()
