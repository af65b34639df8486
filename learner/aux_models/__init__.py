"""Aux models: held by the learner's ranks (`local`), or by processes of their own (`remote`, `service`)."""
