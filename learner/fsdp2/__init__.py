"""The learner on PyTorch FSDP2: `backend.py` implements `Backend`; the other files are its parts."""
