"""Models beside the policy: held by the learner's ranks (`held`), or placed in processes of their own (`placed`, `service`)."""
