"""The reward of `train.yaml`: 1 for the right number, wherever it stands in the answer, 0 otherwise."""

import re


def score(completion: str, row: dict) -> float:
    numbers = re.findall(r"\d+", completion)
    return float(numbers[-1:] == [row["answer"]])
