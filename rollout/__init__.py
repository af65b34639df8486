"""Rollouts, where the policy's tokens come from: engine clients, routing, and the worker that plays episodes."""
