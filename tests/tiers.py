"""Which tests `make test` leaves to `make test-full`, and in which order and company several processes take them.

The default tier has every test function once at least where that is cheap, and real engines, sockets, databases, collectives, Ray,
and whole runs. The full tier adds what only widens the matrix: the same test on another
engine or layout, longer runs, more kills. A test may also carry `@pytest.mark.full` itself.

As a pytest plugin (`-p slipstream.tests.tiers`) it lists every collected test with its tier, see tests/test_tiers.py.
"""

from __future__ import annotations

import re

import pytest
from hypothesis import settings
from slipstream.tests.conformance.kinds import KINDS, Kind
from xdist.scheduler import LoadScopeScheduling

FULL = (
    # The conformance suite: vLLM and our fake server go through nearly all of it by default, the others through a part.
    r"test_models::.*@(sglang|transformers|fake)",
    r"test_models::.*(untied|tensor parallel).*@vllm",
    r"test_(partial|pushes|deaths)::.*@(sglang|transformers|fake)",
    r"test_cancelling::test_a_killed_callers.*@(sglang|transformers|fake)",
    r"test_cancelling::test_a_cancelled_callers.*@transformers",
    r"test_sampling::.*@sglang",
    r"test_sampling::test_(scores_do_not_queue|more_requests).*@(transformers|fake)",
    r"test_sleep::.*@(sglang|fake)",
    r"test_sleep::test_requests_under_way.*recompute.*@(vllm|transformers)",
    r"test_quantized::.*@(sglang|transformers)",
    r"test_images::.*@vllm",
    r"test_images::test_images_are_seen.*keep_kv",
    # Whole runs. The default tier keeps one from its start to its report, one with kills of every role, one that is killed as a
    # whole and resumed, one of a program whose servers sleep, and roles under Ray (`test_launch_ray`). Their processes are forked
    # from one that has imported their packages; those of the run in test_packaging are all started as users start them.
    r"test_launch_train::test_interrupted_then_resumed",
    r"test_launch_train::test_two_of_each_synchronous",
    r"test_launch_train::test_a_run_on_every_kind_of_server",
    r"test_launch_train::test_a_run_under_nohup",
    r"test_launch_train::test_the_same_run_under_ray",
    r"test_launch_train::test_an_environment_that_always_fails",
    r"test_launch_replicas::test_replicas_come_and_go",
    r"test_launch_replicas::test_the_last_replica",
    r"test_launch_replicas::test_a_replica_whose_restarts",
    r"test_launch_reward::test_a_run_whose_reward_server_is_killed",
    r"test_launch_placed::test_a_critic_that_is_killed",
    r"test_launch_disk::test_a_full_disk",
    r"test_launch_colocated::test_every_role_may_be_killed",
    r"test_launch_program::test_a_program_steps_and_discards",
    r"test_launch_preferences::test_a_planted_preference",
    r"test_launch_external_fleet::test_a_server_is_missed",
    r"test_common_modelscope::test_a_run_trains",
    r"test_launch_train::test_a_role_that_cannot_live",
    r"test_launch_restarts::test_a_(second_interrupt|terminal_that_is_closed)",
    r"test_launch_environment::test_the_tokenizer_of_a_mixture",
    r"test_launch_chaos::test_runs_that_chaos_cannot_reach",
    r"test_launch_chaos::test_(a_small_chaos|the_audit_finds|groups_that_were_archived|a_torn_last_line|a_line_of)",
    r"test_launch_dapo::test_tasks_of_which_none",
    r"test_launch_dapo::.*ledger_closes",
    r"test_launch_withheld::",
    r"test_launch_ray::test_(placements_that_are_lost|only_a_role)",
    r"test_launch_ray::test_a_node_that_is_lost",
    r"test_launch_ray::test_a_(host_that_does_not_share|role_waits_for_a_host)",
    r"test_launch_ray::test_a_run_that_is_terminated",
    r"test_learner_staleness::.*\[(0-withhold|1-drop|4-wait|8-withhold)\]",
    r"test_benchmarks_learner::test_bench_learner_end_to_end",
    r"test_launch_input::test_doctor_sees_a_package",
    # What collects, checks or installs the whole project.
    r"test_types::",
    r"test_tiers::",
    r"test_packaging::test_an_installed_wheel",
    # Sandboxes: root's bubblewrap and an ordinary user's Landlock stay, of what is not hostile only bubblewrap. gVisor is slow and
    # seldom: its contract stays in part.
    r"test_envs_sandbox_attacks::.*(bubblewrap-user|landlock-root|gvisor)",
    r"test_envs_sandbox::.*\[(landlock|gvisor)",
    r"test_envs_sandbox::test_forked_processes",
    r"test_envs_sandbox_limits::.*(landlock|gvisor|swe-rex|e2b|many)",
    r"test_envs_sandbox_contract::.*\[(landlock|swe-rex|e2b|forges|stops)",
    r"test_envs_sandbox_contract::test_(?!commands_and_files).*\[gvisor",
    r"test_envs_sandbox_contract::test_(the_disk_has|a_wrong_key|a_machine_that_does_not)",
    # Programs as agents: the stock SDKs take seconds to import.
    r"test_agents_command::test_a_program_with_the_stock_sdks",
    r"test_agents_command::.*\[gvisor",
    r"test_envs_verifiers::test_more_runaways",
    # Processes of environments: other ways to hang and to end, and servers that are started for one refusal.
    r"test_envs_isolation::test_a_call_that_never_returns.*\[thread\]",
    r"test_envs_isolation::test_a_task_that_never_comes",
    r"test_envs_isolation::test_a_process_that_dies.*\[die",
    r"test_envs_isolation::test_a_stranger",
    r"test_envs_isolation::test_what_cannot_be_served.*arguments[12]",
    r"test_envs_isolation::test_what_is_wrong_with_it.*config[123]",
    # MCP servers that are started to die.
    r"test_envs_adapters::test_a_server_that_dies_or_hangs",
    r"test_envs_verifiers::test_the_import_of_math_verify",
    # Task folders: limits that are waited for, and checks that another kind has in the default tier.
    r"test_envs_harbor::test_(what_makes_the_tests_hang|large_files|tests_that_do_not_work.*\[2\])",
    r"test_envs_harbor::test_it_keeps_the_contract\[(tasks|leaks|event loop)\]",
    # The environment author's checks: the default tier plants faults that cost no fresh processes.
    r"test_envs_check::test_a_planted_fault_is_found\[(HashSeed|Blocks|Computes|ComputesInThread)-",
    r"test_envs_check::test_what_blocks_or_ends.*\[(HoldsTheLock|TaskBlocks|EndsItsProcess)-",
    # Servers that are started for one refusal, and more of what the conformance suite asks of the same servers.
    r"test_rollout_sglang::test_a_server_whose_port_is_taken",
    r"test_rollout_sglang::test_(generation|a_version|a_request_that_came|a_pause|one_abort|an_abort|the_server_ends)",
    r"test_rollout_router_servers::test_a_server_that_is_killed_under_load",
    r"test_rollout_vllm::test_weights_that_a_server_loaded_itself.*two processes",
    # Other parameters of the same.
    r"test_rollout_http::test_(a_stream_that_goes_on|what_had_arrived).*\[sglang\]",
    r"test_rollout_server_model::test_every_way_of_attending.*\[(?!window|sinks)",
    r"test_learner_distillation::test_a_policy_becomes_its_teacher.*\[(?!forward-4)",
    r"test_learner_table::test_an_algorithm_trains.*\[(?!advantage.kind=gae|loss.kind=dpo)",
    r"test_learner_finite::test_one_freak_log_prob.*\[(?!DecoupledPpo|Gspo)",
    r"test_learner_losses::test_neither_order.*\[(?!decoupled_ppo|gspo)",
    r"test_learner_loop::test_a_joiner_gets_its_weights.*\[[12]\]",
    r"test_launch_submit::test_which_jobs_are_requeued.*\[(?!waits-10|2)",
    r"test_envs_check::test_good_environments.*\[(gymnasium|textarena)\]",
    r"test_monitor_trackers::test_wandb_records",
    # Ratios of times.
    r"test_envs_isolation::test_a_step_takes_at_most",
    # Layouts of the learner. The default tier has FSDP2 on one rank and two, and Megatron's checkpoints.
    r"test_learner_megatron::test_(three_steps|a_checkpoint_resumes|bfloat16|an_export)",
    r"test_launch_sft::.*\[(term|interrupt|kill)\]",
    r"test_launch_sft::test_several_ranks",
    r"test_learner_fsdp2_layouts::test_(three_steps|what_is_trained|bfloat16|an_export|compiled_layers)",
    r"test_learner_fsdp2::test_supervised_warm_up",
    r"test_learner_placed::test_(placed_models|a_checkpoint_of_a_placed)",
    r"test_learner_rows::test_each_of_two_ranks.*\[(critic|traces)\]",
    r"test_learner_megatron_offload::test_a_checkpoint_resumes.*\[bfloat16\]",
    r"test_learner_aux_models::test_under_adapters.*\[bfloat16\]",
    r"test_learner_prefixes::test_three_steps.*\[plain\]",
    r"test_learner_megatron::test_a_checkpoint_of_another_model",
    r"test_learner_checkpoint::test_a_kill_while_it_is_written.*\[(?!fsdp2-begun)",
    r"test_learner_papers::test_epochs_take_the_same_steps.*\[2\]",
    r"test_learner_warmup::test_a_warm_up_that_was_interrupted",
    r"test_learner_hostile::test_a_damaged_checkpoint.*\[(state|truncated)\]",
    # One optimizer step of each loss: the losses themselves, and their gradients, are all in the default tier.
    r"test_learner_losses::test_(an_optimizer_step|forgotten_proximal).*\[(?!loss.kind=(ppo|gspo)\])",
    r"test_learner_losses::test_gradients_are.*-(sequence_mean|fixed_length)\]",
    r"test_learner_losses::test_values_and_gradients.*\[(?!decoupled_ppo|gspo).*-(sequence_mean|sequence_sum|fixed_length)\]",
    r"test_buffer_crashes::test_a_kill_at_any_statement.*\[(whole-[12]|shard-.*)\]",
    r"test_partial::test_long_requests_cross_many_versions.*(keep_kv|abort_resume)",
    r"test_partial::test_requests_survive_a_pause.*keep_kv",
    # Faults of the fake server, of which each has a deadline to wait for; chaos and the default tier's recoveries use the others.
    r"test_rollout_fake::test_(starts_that_are_late|a_frozen_server|a_join_that_is|pushes_that_are_refused)",
    # What is learned, over many steps: single steps are exact in the default tier.
    r"test_learner_traces::test_a_task_that_the_policy_never_solves",
    r"test_learner_preferences::test_a_(planted_preference|policy_learns_preferences)",
    r"test_learner_prime::test_a_model_learns",
    # Waits of several seconds that another test of the default tier has, too.
    r"test_learner_hostile::test_tasks_that_no_member_fails",
    r"test_weightsync_recovery::test_requests_run_through_a_rolling_push",
    r"test_benchmarks_gateway::test_a_call_through",
    r"test_benchmarks_prediction::test_each_probe",
    r"test_weightsync_recovery::test_a_server_that_freezes",
    r"test_weightsync_publisher::test_a_frozen_replica",
    r"test_weightsync_buckets::test_a_group_leaves_global",
    r"test_envs_sandbox_e2b::test_a_machine_that_cannot_be_ended",
    r"test_weightsync_publisher::test_a_late_member_is_fenced.*\[(delta|disk)\]",
    r"test_weightsync_publisher::test_every_wait_has_a_deadline\[(receive|pause|swap|resume|version)",
    r"test_weightsync_publisher::test_a_leaver_in_the_middle.*\[join_group\]",
    r"test_benchmarks_learner::test_a_contender_that_ends",
    r"test_launch_waits::test_who_is_killed_for_silence",
)
"""Patterns of `file::test[parameters]` (of the conformance suite: `...@kind`); each matches a test, or the suite fails."""

KEPT = (r"test_(partial|pushes|deaths)::test_\w*(served|swap)\w*\b.*@sglang",)
"""Patterns of tests that the default tier keeps although `FULL` names them."""

_FULL, _KEPT = ([re.compile(pattern).match for pattern in patterns] for patterns in (FULL, KEPT))

WHOLE_RUNS = ("test_launch_train", "test_launch_replicas", "test_launch_dapo", "test_launch_withheld")
"""Files of which every test is long and shares nothing: each may go to another process."""

IMPORTED = ("vllm", "sglang")
"""Kinds of servers of which one process takes both: the second is imported beside the tests of the first."""

SGLANG = ("test_rollout_sglang", "test_launch_train::test_a_run_on_every_kind_of_server[sglang]")
"""What starts SGLang's servers outside of the conformance suite: the process that has imported SGLang there takes it, too."""

FIRST = ("hosted", "imported", "test_envs_self_played", "test_launch_libraries", "test_launch_submit", "test_launch_shards",
         "test_images_runs", "test_packaging", "test_launch_ray", "test_launch_chaos", "test_launch_train",
         "test_learner_fsdp2_layouts", "test_learner_megatron", "test_learner_fsdp2", "test_launch_replicas", "test_learner_placed",
         "test_launch_disk", "test_launch_placed", "test_launch_reward", "transformers", "fake", "test_rollout_vllm",
         "test_weightsync_publisher", "test_rollout_fake", "test_planner_simulation", "test_learner_hostile", "test_envs_isolation",
         "test_launch_waits", "test_envs_check", "test_weightsync_late", "test_buffer_service", "test_launch_sft",
         "test_agents_command", "test_envs_verifiers", "test_learner_staleness", "test_learner_synchronous")  # fmt: skip
"""Groups that take long begin first, so that no process is left with one at the end."""


def name_of(item: pytest.Item) -> str:
    """`file::test[parameters]`, and `@kind` where a kind of server is among the parameters."""
    kind = item.callspec.params.get("kind") if isinstance(item, pytest.Function) and hasattr(item, "callspec") else None
    return f"{item.path.stem}::{item.name}" + (f"@{kind.name}" if isinstance(kind, Kind) else "")


def is_full(item: pytest.Item) -> bool:
    """Whether only `make test-full` runs it."""
    name = name_of(item)
    if item.get_closest_marker("full") is not None:
        return True
    return any(match(name) for match in _FULL) and not any(match(name) for match in _KEPT)


def group_of(nodeid: str) -> str:
    """What one process takes as a whole: all tests of a kind of server, which is started once; all runs over several hosts,
    which share some, and the check of types, which computes beside them; a file; or a single whole run."""
    path, _, test = nodeid.partition("::")
    parameters = test.partition("[")[2]
    if "/conformance/" in path:
        kinds = {kind.name for kind in KINDS} & set(re.split(r"[-\]]", parameters))
        kind = kinds.pop() if len(kinds) == 1 else path
        return "imported" if kind in IMPORTED else kind
    if "/hosted/" in path:
        return "hosted"
    stem = path.rpartition("/")[2].removesuffix(".py")
    if stem == "test_types":
        return "hosted"
    if stem in SGLANG or f"{stem}::{test}" in SGLANG:
        return "imported"
    return f"{stem}::{test}" if stem in WHOLE_RUNS else stem


def examples(full: int) -> int:
    """How many of a property Hypothesis tries where it needs more than others: `full` in the full tier, a fifth of them by
    default."""
    return full if settings.default is not None and settings.default.max_examples >= 100 else full // 5


class GroupScheduling(LoadScopeScheduling):
    """Gives whole groups to processes. xdist's own `--dist loadgroup` does nothing under pytest 9.2, which ignores the node ids
    that xdist 3.8 renames."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)


def order(item: pytest.Item) -> int:
    """When its group begins."""
    group = group_of(item.nodeid).partition("::")[0]
    return FIRST.index(group) if group in FIRST else len(FIRST)


ALL = pytest.StashKey[list[str]]()
"""Lines of all tests of the repository, where a session has collected all, before any is deselected."""


def line_of(item: pytest.Item) -> str:
    """Its tier, its id, and its name."""
    return "\t".join(("full" if is_full(item) else "default", item.nodeid, name_of(item)))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Where this module is loaded as a plugin, list all tests."""
    for item in session.items:
        print(line_of(item))  # noqa: T201
