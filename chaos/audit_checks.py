"""The checks of the audit after injected faults: the tables and queries of `audit`.

Invariants:
- A check is (name, query that counts what is examined, queries for violations). A violation is one row with one text: the problem.
- `leased`, `reported`, `delivered`, `delivered_tokens`, `branches` (trajectories) are from the workers' audit logs; `taken`
  (all groups that were in a batch), and `commits_made` and `trained_on`, without commits that it rolled back, from the learner's;
  `steps` from metrics.jsonl; `spans` and `masks` from the stored trajectories; `store` is the buffer's database, or has the rows of
  all its shards. Each of `rules.shards` has the groups and tasks whose numbers are, modulo `shards`, the id of its row in
  `store.counters`.
"""

from __future__ import annotations

TABLES = """
CREATE TABLE leased (grp INTEGER, attempt INTEGER, member INTEGER, env INTEGER, task INTEGER);
CREATE TABLE reported (episode TEXT, version INTEGER, tokens INTEGER, answered INTEGER);
CREATE TABLE delivered (episode TEXT, acknowledged INTEGER);
CREATE TABLE delivered_tokens (episode TEXT, version INTEGER, tokens INTEGER);
CREATE TABLE branches (id TEXT, episode TEXT, version INTEGER, tokens INTEGER);
CREATE TABLE commits_made (made INTEGER, oldest INTEGER);
CREATE TABLE taken (grp INTEGER PRIMARY KEY);
CREATE TABLE trained_on (made INTEGER, episode TEXT, version INTEGER, tokens INTEGER, loss INTEGER);
CREATE TABLE steps (made INTEGER, trained INTEGER, stalest INTEGER);
CREATE TABLE spans (id TEXT, episode TEXT, version INTEGER, tokens INTEGER);
CREATE TABLE masks (id TEXT, episode TEXT, sampled INTEGER);
CREATE TABLE rules (group_size INTEGER, max_staleness INTEGER, groups_per_batch INTEGER, shards INTEGER);  -- at the end
CREATE TABLE changes (number INTEGER PRIMARY KEY, version INTEGER, key TEXT, old, new);  -- from settings.jsonl

CREATE TEMP VIEW in_force AS  -- the bound by which each version was made
    SELECT version AS made, max_staleness FROM store.commits;
CREATE TEMP VIEW was_set AS  -- of each version the rules that the user had set when its batch was taken
    SELECT made, key, coalesce(
        (SELECT new FROM changes c WHERE c.key = keys.key AND version < made ORDER BY number DESC LIMIT 1),
        (SELECT old FROM changes c WHERE c.key = keys.key ORDER BY number LIMIT 1),
        (SELECT CASE key WHEN 'buffer.max_staleness' THEN max_staleness ELSE groups_per_batch END FROM rules)) AS value
    FROM (SELECT version AS made FROM store.commits WHERE NOT rolled_back),
        (SELECT 'buffer.max_staleness' AS key UNION ALL SELECT 'buffer.groups_per_batch') keys;
CREATE TEMP VIEW generated AS  -- according to the store
    SELECT e.id AS episode, group_id AS grp, CAST(key AS INTEGER) AS version, value AS tokens
    FROM store.episodes e, json_each(e.generated);
CREATE TEMP VIEW kept AS
    SELECT e.id AS episode, group_id AS grp, account, loss_from, CAST(key AS INTEGER) AS version, value AS tokens
    FROM store.episodes e, json_each(e.kept);
CREATE TEMP VIEW issued AS  -- in the store, or in the audit logs where the group is archived
    SELECT id AS grp, env, task FROM store.groups UNION SELECT grp, env, task FROM leased;
CREATE TEMP VIEW gone AS
    SELECT DISTINCT grp FROM issued WHERE grp NOT IN (SELECT id FROM store.groups) AND EXISTS (SELECT 1 FROM store.archive);
CREATE TEMP VIEW acknowledged AS
    SELECT d.episode, e.id AS stored, e.account, e.settled, e.reason FROM delivered d
    LEFT JOIN store.episodes e ON e.id = d.episode WHERE d.acknowledged AND CAST(d.episode AS INTEGER) NOT IN gone;
"""
"""`CAST('12.0.3' AS INTEGER)` is 12: the group of an episode's id."""

CHECKS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    (
        "every task issued once, none skipped",
        "SELECT count(*) FROM issued",
        (
            "SELECT 'task ' || task || ' of environment ' || env || ' was issued to ' || count(*) || ' groups' FROM issued"
            " GROUP BY env, task HAVING count(*) > 1",
            "SELECT 'group ' || grp || ' has ' || count(*) || ' tasks' FROM issued GROUP BY grp HAVING count(*) > 1",
            "SELECT 'environment ' || env || ' has ' || count(*) || ' tasks up to ' || max(task) FROM issued, rules"
            " GROUP BY env, task % shards HAVING max(task) / shards + 1 <> count(DISTINCT task)",
            "SELECT 'environment ' || c.key || ' was read up to task ' || c.value || ', issued are ' ||"
            " (SELECT count(*) FROM issued WHERE env = c.key AND task % shards = part.id)"
            " FROM rules, store.counters part, json_each(part.value, '$.cursors') c WHERE (c.value - part.id) / shards <>"
            " (SELECT count(*) FROM issued WHERE env = c.key AND task % shards = part.id)",
            "SELECT 'groups are numbered up to ' || json_extract(value, '$.next_group') || ', there are ' ||"
            " (SELECT count(*) FROM issued WHERE grp % shards = part.id) FROM rules, store.counters part"
            " WHERE (json_extract(value, '$.next_group') - part.id) / shards <>"
            " (SELECT count(*) FROM issued WHERE grp % shards = part.id)",
            "SELECT 'a worker was granted group ' || grp || ', which is not in the store' FROM leased"
            " WHERE grp NOT IN (SELECT id FROM store.groups) AND grp NOT IN gone GROUP BY grp",
        ),
    ),
    (
        "no task repeated beyond its attempts",
        "SELECT count(*) FROM leased",
        (
            "SELECT 'episode ' || grp || '.' || attempt || '.' || member || ' was granted to ' || count(*) || ' workers'"
            " FROM leased GROUP BY grp, attempt, member HAVING count(*) > 1",
            "SELECT 'attempt ' || l.attempt || ' at group ' || grp || ' was granted, the store has ' || g.attempt"
            " FROM leased l JOIN store.groups g ON g.id = grp WHERE l.attempt > g.attempt GROUP BY grp",
            "SELECT 'member ' || json_extract('[' || replace(id, '.', ',') || ']', '$[2]') || ' of group ' || group_id ||"
            " ' was kept ' || count(*) || ' times' FROM store.episodes WHERE account IN ('ready', 'trained')"
            " GROUP BY group_id, json_extract('[' || replace(id, '.', ',') || ']', '$[2]') HAVING count(*) > 1",
            "SELECT 'episode ' || episodes.id || ' is of no attempt or member'"
            " FROM store.episodes JOIN store.groups g ON g.id = group_id, rules"
            " WHERE json_extract('[' || replace(episodes.id, '.', ',') || ']', '$[1]') > g.attempt"
            " OR json_extract('[' || replace(episodes.id, '.', ',') || ']', '$[2]') >= group_size",
        ),
    ),
    (
        "no acknowledged delivery lost",
        "SELECT count(*) FROM delivered WHERE acknowledged",
        (
            "SELECT 'episode ' || episode || ' was acknowledged and is not in the store' FROM acknowledged WHERE stored IS NULL",
            "SELECT 'episode ' || episode || ' was acknowledged and counts as running' FROM acknowledged"
            " WHERE NOT settled OR account = 'in_flight'",
            "SELECT 'episode ' || episode || ' is discarded for no reason' FROM acknowledged"
            " WHERE account = 'discarded' AND reason = ''",
            "SELECT 'trajectory ' || b.id || ' was acknowledged and is not in the store' FROM branches b"
            " JOIN acknowledged a ON a.episode = b.episode WHERE account IN ('ready', 'trained')"
            " AND b.id NOT IN (SELECT id FROM masks) GROUP BY b.id",
            "SELECT 'trajectory ' || b.id || ' holds other tokens than were delivered' FROM branches b"
            " JOIN masks m ON m.id = b.id LEFT JOIN spans s ON s.id = b.id AND s.version = b.version"
            " WHERE coalesce(s.tokens, 0) <> b.tokens GROUP BY b.id",
            "SELECT 'trajectory ' || id || ' is in the store and was never delivered' FROM masks"
            " WHERE id NOT IN (SELECT id FROM branches) GROUP BY id",
            "SELECT 'version ' || d.version || ' has ' || sum(d.tokens) || ' acknowledged tokens of archived groups, the archive '"
            " || coalesce((SELECT sum(tokens) FROM store.archive WHERE version = d.version), 0) FROM delivered_tokens d"
            " JOIN delivered USING (episode) WHERE acknowledged AND CAST(episode AS INTEGER) IN gone GROUP BY d.version"
            " HAVING sum(d.tokens) > coalesce((SELECT sum(tokens) FROM store.archive WHERE version = d.version), 0)",
        ),
    ),
    (
        "tokens as the workers counted them",
        "SELECT count(*) FROM (SELECT episode, version FROM reported UNION SELECT episode, version FROM delivered_tokens)",
        (
            "SELECT 'episode ' || d.episode || ' delivered ' || d.tokens || ' tokens of version ' || d.version || ', stored are '"
            " || coalesce(g.tokens, 0) FROM delivered_tokens d JOIN acknowledged USING (episode)"
            " LEFT JOIN generated g ON g.episode = d.episode AND g.version = d.version WHERE coalesce(g.tokens, 0) <> d.tokens",
            "SELECT 'episode ' || r.episode || ' was reported with ' || max(r.tokens) || ' tokens of version ' || r.version ||"
            " ', stored are ' || coalesce(g.tokens, 0) FROM reported r LEFT JOIN generated g ON g.episode = r.episode"
            " AND g.version = r.version WHERE answered AND CAST(r.episode AS INTEGER) NOT IN gone"
            " GROUP BY r.episode, r.version HAVING max(r.tokens) > coalesce(g.tokens, 0)",
            "SELECT 'episode ' || episode || ' has ' || g.tokens || ' tokens of version ' || g.version || ' no worker reported'"
            " FROM generated g WHERE g.tokens > coalesce((SELECT max(tokens) FROM (SELECT tokens FROM reported r"
            " WHERE r.episode = g.episode AND r.version = g.version UNION ALL SELECT tokens FROM delivered_tokens d"
            " WHERE d.episode = g.episode AND d.version = g.version)), 0)",
        ),
    ),
    (
        "ledger closes, for every version",
        "SELECT count(DISTINCT version) FROM generated",
        (
            "SELECT 'episode ' || k.episode || ' keeps ' || k.tokens || ' tokens of version ' || k.version || ', generated were '"
            " || coalesce(g.tokens, 0) FROM kept k LEFT JOIN generated g USING (episode, version)"
            " WHERE k.tokens > coalesce(g.tokens, 0)",
            "SELECT 'episode ' || id || ' is in account ' || account || ', reason ' || quote(reason) FROM store.episodes"
            " WHERE account NOT IN ('in_flight', 'ready', 'trained', 'discarded') OR (account = 'discarded') = (reason = '')",
            "SELECT 'group ' || g.id || ' is ' || state || ', its episode ' || e.id || ' is ' || account FROM store.groups g"
            " JOIN store.episodes e ON e.group_id = g.id WHERE (state = 'trained') <> (account = 'trained')"
            " AND account <> 'discarded' OR (state = 'discarded' AND account <> 'discarded')"
            " OR (state IN ('trained', 'batched') AND account = 'in_flight')",
            "SELECT 'group ' || group_id || ' is set aside as unusable, and no learner took it' FROM store.episodes"
            " WHERE reason = 'unusable' AND group_id NOT IN taken GROUP BY group_id",
            "SELECT 'episode ' || k.episode || ' keeps ' || sum(k.tokens) || ' tokens, its trajectories hold ' ||"
            " (SELECT coalesce(sum(tokens), 0) FROM spans s WHERE s.episode = k.episode) FROM kept k"
            " WHERE account IN ('ready', 'trained') GROUP BY k.episode"
            " HAVING sum(k.tokens) <> (SELECT coalesce(sum(tokens), 0) FROM spans s WHERE s.episode = k.episode)",
            "SELECT 'episode ' || k.episode || ' keeps ' || k.tokens || ' tokens of version ' || k.version ||"
            " ', its trajectories hold another number' FROM kept k WHERE account IN ('ready', 'trained') AND k.tokens <>"
            " (SELECT coalesce(sum(tokens), 0) FROM spans s WHERE s.episode = k.episode AND s.version = k.version)",
            "SELECT 'trajectory ' || id || ' is masked at ' || sampled || ' tokens, its spans hold ' ||"
            " (SELECT coalesce(sum(tokens), 0) FROM spans s WHERE s.id = masks.id) FROM masks WHERE sampled <>"
            " (SELECT coalesce(sum(tokens), 0) FROM spans s WHERE s.id = masks.id)",
            "SELECT 'of version ' || version || ' ' || sum(generated) || ' tokens were generated, the ledger shows ' ||"
            " sum(shown) FROM (SELECT version, tokens AS generated, 0 AS shown FROM generated"
            " UNION ALL SELECT version, tokens, 0 FROM store.archive"
            " UNION ALL SELECT version, 0, tokens FROM store.ledger) GROUP BY version HAVING sum(generated) <> sum(shown)",
            "SELECT 'the ledger shows ' || shown || ' trained tokens, trained groups hold ' || trained FROM"
            " (SELECT (SELECT total(tokens) FROM store.ledger WHERE account = 'trained') AS shown,"
            " (SELECT total(tokens) FROM kept WHERE account = 'trained' AND version >= loss_from) +"
            " (SELECT total(tokens) FROM store.archive WHERE account = 'trained') AS trained) WHERE shown <> trained",
        ),
    ),
    (
        "nothing trained twice, by valid commits",
        "SELECT count(DISTINCT episode) FROM trained_on",
        (
            "SELECT 'group ' || CAST(episode AS INTEGER) || ' is in the weights ' || count(DISTINCT made) || ' times: versions '"
            " || group_concat(DISTINCT made) FROM trained_on GROUP BY CAST(episode AS INTEGER) HAVING count(DISTINCT made) > 1",
            "SELECT 'version ' || made || ' is in the weights, the store has no valid commit of it' FROM commits_made"
            " WHERE made NOT IN (SELECT version FROM store.commits WHERE NOT rolled_back)",
            "SELECT 'version ' || version || ' is committed, the learner''s weights do not hold it' FROM store.commits"
            " WHERE NOT rolled_back AND version NOT IN (SELECT made FROM commits_made)",
            "SELECT 'group ' || CAST(episode AS INTEGER) || ' is in version ' || made || ', the store has ' ||"
            " coalesce(state || ' ' || coalesce(trained_at, ''), 'nothing') FROM trained_on"
            " LEFT JOIN store.groups ON id = CAST(episode AS INTEGER) WHERE CAST(episode AS INTEGER) NOT IN gone"
            " GROUP BY CAST(episode AS INTEGER), made HAVING state IS NOT 'trained' OR trained_at IS NOT made",
            "SELECT 'group ' || id || ' counts as trained in version ' || trained_at || ', the learner never took it'"
            " FROM store.groups WHERE state = 'trained' AND NOT EXISTS (SELECT 1 FROM trained_on"
            " WHERE made = trained_at AND CAST(episode AS INTEGER) = groups.id)",
            "SELECT 'episode ' || e.id || ' counts as trained in version ' || trained_at || ', the learner never took it'"
            " FROM store.episodes e JOIN store.groups g ON g.id = group_id WHERE account = 'trained'"
            " AND NOT EXISTS (SELECT 1 FROM trained_on t WHERE made = trained_at AND t.episode = e.id)",
            "SELECT 'version ' || version || ' was made from ' || groups || ' groups, there are ' ||"
            " (SELECT count(*) FROM store.groups WHERE trained_at = version) FROM store.commits WHERE NOT rolled_back AND groups <>"
            " (SELECT count(*) FROM store.groups WHERE trained_at = version) AND NOT EXISTS (SELECT 1 FROM gone)",
        ),
    ),
    (
        "no token trained past max_staleness",
        "SELECT coalesce(sum(tokens), 0) FROM trained_on WHERE loss",
        (
            "SELECT 'version ' || made || ' was made with tokens of version ' || version || ' in episode ' || episode"
            " FROM trained_on LEFT JOIN in_force USING (made)"
            " WHERE (loss AND made - 1 - version > coalesce(max_staleness, 0)) OR version > made - 1",
            "SELECT 'episode ' || s.episode || ': tokens of version ' || s.version || ' carried loss in version ' || trained_at"
            " FROM spans s JOIN store.episodes e ON e.id = s.episode JOIN store.groups g ON g.id = e.group_id"
            " LEFT JOIN in_force ON made = trained_at"
            " WHERE account = 'trained' AND ((s.version >= loss_from AND trained_at - 1 - s.version > coalesce(max_staleness, 0))"
            " OR s.version > trained_at - 1) GROUP BY s.episode, s.version",
            "SELECT 'step ' || made || ' reports that it trained on tokens ' || stalest || ' versions old' FROM steps"
            " LEFT JOIN in_force USING (made) WHERE stalest > coalesce(max_staleness, 0)",
            "SELECT 'version ' || made || ' was made from ' || trained || ' tokens by the learner, by the store from ' ||"
            " coalesce(held, 0) FROM steps JOIN commits_made USING (made) LEFT JOIN"
            " (SELECT trained_at AS made, sum(tokens) AS held FROM spans s JOIN store.episodes e ON e.id = s.episode"
            " JOIN store.groups g ON g.id = e.group_id WHERE account = 'trained' AND s.version >= loss_from GROUP BY trained_at)"
            " USING (made) WHERE trained <> coalesce(held, 0) AND NOT EXISTS (SELECT 1 FROM gone)",
            # A change that is due with the next version rules this one, too, where the learner recovered and took a batch again.
            "SELECT 'version ' || made || ' was made under ' || key || '=' || used || ', set was ' || value FROM was_set JOIN"
            " (SELECT version AS made, 'buffer.max_staleness' AS key, max_staleness AS used FROM store.commits"
            " UNION ALL SELECT version, 'buffer.groups_per_batch', groups_per_batch FROM store.commits) USING (made, key)"
            " WHERE used <> value AND used NOT IN (SELECT new FROM changes c WHERE c.key = was_set.key AND version = made)",
        ),
    ),
)
