"""The reward of `train.yaml`: 1 for the right number at the end of the answer, less for one that is off, 0 from 10 off on."""

import re


def score(completion: str, row: dict) -> float:
    numbers = re.findall(r"\d+", completion)
    return max(0.0, 1.0 - abs(int(numbers[-1]) - int(row["answer"])) / 10) if numbers else 0.0
