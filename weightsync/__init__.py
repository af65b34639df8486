"""Weight pushes: how the learner's new weights travel to the inference servers."""
