"""One row of `metrics.jsonl`: what one learner step did and what it cost. Names are kept; scripts rely on them."""

from __future__ import annotations

import msgspec


class StepMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """Measured between the end of the previous step and the end of this one, unless said otherwise.

    Attributes:
        step: optimizer batches contained in the weights, from 1.
        version: the policy version that this step made.
        time: seconds since the epoch, at the end of the step.
        reward_mean: mean return of the batch's episodes.
        reward_std: its standard deviation over episodes.
        staleness_mean: learner version minus sampling version, mean over trained tokens.
        staleness_max: the same, maximum.
        staleness_tokens: trained tokens by staleness (`{"0": 120, "1": 30}`).
        tokens_trained: tokens that carried loss in this step.
        tokens_withheld: sampled tokens of this batch that were too old, or of episodes without loss (`buffer.ledger.Withheld`).
        mixed_tokens: trained tokens sampled by new weights from keys and values of older ones too (`rollout.partial=keep_kv`).
        tokens_discarded: tokens discarded for any reason since the previous step.
        groups_refilled: groups discarded since the previous step because all their rewards were equal (`buffer.dynamic_sampling`).
        messages_dropped: messages to the buffer that were no request, since its process started.
        peers_refused: attempts to connect to the buffer without the run's keys, since its process started.
        episodes: episodes in the batch.
        episode_tokens_mean: sampled tokens per episode.
        turns_mean: completions per episode.
        environment: what the environment reported (`StepResult.metrics`), mean by name over the episodes that reported it.
        rollout_tokens_per_s: tokens generated per second since the previous step.
        overlap_tokens_per_s: tokens generated per second while the learner was stepping.
        learner_tokens_per_s: tokens (context included) per second of stepping.
        learner_idle: share of the time in which the learner waited for a batch, 0 to 1.
        rollout_idle: share of the episode slots that stood empty for want of a lease, 0 to 1.
        slots: episodes that all workers together would play at once, mean; follows how busy the servers are.
        replicas: inference servers that took the push and serve its version.
        replicas_failed: those that did not, for the moment.
        wait_s: seconds waited for the batch.
        step_s: seconds from the batch to its commit: what the models beside the policy say of it, credit, proximal log-probs,
            forward, backward and optimizer, and their own steps.
        push_s: seconds of the weight push, all told.
        pause_ms: longest pause of a replica in the push.
        transfer_ms: time the bytes took.
        canary: largest canary difference after the push, nats.
        mismatch_max: largest difference in nats between the learner's and the engine's log-prob of a token sampled at the
            learner's own version: tokens of staleness 0 in the batch, and in a few trajectories that were delivered while
            the learner looked at the batch; 0 when there were none. Tokens of a mixed policy do not count. In the batch the
            learner's are the proximal log-probs, of the step's own forward pass or of a scoring pass before it (`step.py`).
        mismatch_tokens: how many tokens that maximum is over, all ranks together.
        loss: the policy loss.
        ess: effective sample size of the importance weights over tokens, as a share, 0 to 1.
        kl: mean over trained tokens of the k3 estimate of KL(behaviour || current), nats (Schulman 2020).
        kl_reference: mean over trained tokens of the k3 estimate of KL(current || reference), nats; 0 where there is no reference.
        value_loss: half the mean squared error of the critic before its step; 0 where there is no critic.
        explained_variance: 1 - the mean squared error / the variance of the returns; 0 where there is no critic.
        reward_model_loss: cross-entropy of outcomes under the process reward model before its step, nats; 0 where there is none.
        reward_model_accuracy: share of trained tokens whose sequence it judged rightly; 0 where there is none.
        entropy: mean entropy of the policy at trained tokens, nats.
        clip_fraction: share of trained tokens where the loss's own clip was at work.
        dropped_fraction: share of trained tokens that the correction left no loss (`learner.algorithm.correction`).
        ess_by_staleness: `ess` among the trained tokens of each staleness (`{"0": 0.99, "1": 0.9}`).
        kl_by_staleness: `kl`, likewise.
        clip_fraction_by_staleness: `clip_fraction`, likewise.
        weight_by_staleness: share of all importance weight that tokens of this staleness hold; sums to 1.
        grad_norm: before clipping.
        lr: learning rate used.
    """

    step: int
    version: int
    time: float
    reward_mean: float
    reward_std: float
    staleness_mean: float
    staleness_max: int
    staleness_tokens: dict[str, int]
    tokens_trained: int
    tokens_withheld: int
    mixed_tokens: int
    tokens_discarded: int
    groups_refilled: int = 0
    messages_dropped: int
    peers_refused: int
    episodes: int
    episode_tokens_mean: float
    turns_mean: float
    environment: dict[str, float]
    rollout_tokens_per_s: float
    overlap_tokens_per_s: float
    learner_tokens_per_s: float
    learner_idle: float
    rollout_idle: float
    slots: float
    replicas: int
    replicas_failed: int
    wait_s: float
    step_s: float
    push_s: float
    pause_ms: float
    transfer_ms: float
    canary: float
    mismatch_max: float
    mismatch_tokens: int
    loss: float
    ess: float
    kl: float
    entropy: float
    clip_fraction: float
    dropped_fraction: float = 0.0
    kl_reference: float = 0.0
    value_loss: float = 0.0
    explained_variance: float = 0.0
    reward_model_loss: float = 0.0
    reward_model_accuracy: float = 0.0
    ess_by_staleness: dict[str, float] = {}
    kl_by_staleness: dict[str, float] = {}
    clip_fraction_by_staleness: dict[str, float] = {}
    weight_by_staleness: dict[str, float] = {}
    grad_norm: float
    lr: float
