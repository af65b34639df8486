// What goes on: one run, or all runs of a folder beside each other.
import {html, useRun, link, go, count, share, fixed, duration, ago, Tile, Spark, Problem, DASH} from '/static/lib.js';
import {Comparison} from '/static/views/curves.js';

const ALIKE = 0.4, FAILED = 0.1;  // shares from which on a line warns

const change = now => now.reward == null || now.first_reward == null ? '' :
  `${now.reward >= now.first_reward ? '+' : '−'}${Math.abs(now.reward - now.first_reward).toFixed(3)} since the first step`;
const ended = outcomes => Object.values(outcomes || {}).reduce((a, b) => a + b, 0);
const failures = outcomes => Object.entries(outcomes || {}).filter(([name, n]) => n && name.startsWith('failed_'));

function Busy({name, idle, text}) {
  if (idle == null) return null;
  return html`<div class="busy"><span>${name}</span><div class="track" role="img" aria-label="${name} ${share(1 - idle)} busy"><div class="fill" style=${{width: `${100 * (1 - idle)}%`}}></div></div><span>${share(1 - idle)} <span class="muted">${text}</span></span></div>`;
}

export function Now({run}) {
  const {data, error} = useRun(run.name, 'now');
  if (error && !data) return html`<${Problem} error=${error} />`;
  if (!data) return html`<p class="muted">reading</p>`;
  const now = data.now, failed = failures(now.outcomes), all = ended(now.outcomes);
  const failedShare = all ? failed.reduce((sum, [, n]) => sum + n, 0) / all : 0;
  if (now.step == null) return html`<h1>${run.name}</h1><div class="card">No step yet. ${data.active ? 'The run is starting, or plays its first episodes.' : 'The run is not active.'}</div>${data.newest && html`<${Newest} run=${run.name} one=${data.newest} />`}`;
  return html`<h1>${run.name}</h1>${data.problem && html`<${Problem} error=${data.problem} />`}
    ${data.alerts.map(alert => html`<div key=${alert.rule} class="card ${!alert.active ? '' : alert.severity === 'critical' ? 'bad' : 'warn'}">${alert.active ? '' : 'over: '}${alert.text}${alert.advice && `: ${alert.advice}`} <span class="muted small">step ${alert.step}, ${ago(alert.time)}</span></div>`)}
    <div class="tiles">
      <${Tile} name="step" value=${`${now.step}${now.steps ? ' / ' + now.steps : ''}`} note=${data.active && now.left_s ? duration(now.left_s) + ' left' : data.active ? '' : 'last step ' + ago(now.time)} />
      <${Tile} name="reward of the batch" value=${fixed(now.reward)} note=${change(now)} />
      <${Tile} name="trained tokens/s" value=${count(now.trained_tokens_per_s)} note=${`generated ${count(now.generated_tokens_per_s)}`} />
      <${Tile} name="staleness" value=${now.staleness == null ? DASH : now.staleness.toFixed(2)} note=${`at most ${now.staleness_max ?? DASH}, bound ${now.bound ?? DASH}`} />
      <${Tile} name="a step and its push" value=${duration(now.cycle_s)} note=${`median of ${now.over}`} />
      <${Tile} name="effective sample size" value=${fixed(now.ess)} note=${now.mismatch_max == null ? 'mismatch: nothing compared' : `mismatch ${now.mismatch_max.toExponential(1)} nats`} />
    </div>
    <div class="card"><h2>reward, last ${now.rewards.length} steps</h2><${Spark} values=${now.rewards} width=${600} height=${48} /></div>
    <div class="card"><${Busy} name="learner" idle=${now.learner_idle} text="busy" /><${Busy} name="rollouts" idle=${now.rollout_idle} text="of the slots taken" />
      <p class="legend-note">over the last ${now.over} steps. The learner is idle while it waits for a batch; a slot is idle while the staleness bound lets no group start.</p></div>
    ${now.alike > ALIKE && html`<div class="card warn">${share(now.alike)} of the groups in the last ${now.over} steps had equal rewards: where an advantage compares the members of a group, they taught nothing. <code>buffer.dynamic_sampling=true</code> refills them.</div>`}
    ${failedShare > FAILED && html`<div class="card bad">${share(failedShare)} of the episodes in the last ${now.over} steps failed: ${failed.map(([name, n]) => `${n} ${name.replace('failed_', '')}`).join(', ')}.</div>`}
    ${data.newest && html`<${Newest} run=${run.name} one=${data.newest} />`}
    <${Settings} settings=${data.settings} folder=${data.folder} />`;
}

const Newest = ({run, one}) => html`<div class="card">newest trajectory: <a href=${link(run, 'trajectory', one.id)}>${one.id}</a>
  <span class="muted"> ${one.env}, ${one.task}: reward ${count(one.reward)}, ${one.outcome}, ${one.turns} turns, ${one.sampled} tokens, ${duration(one.seconds)}</span></div>`;

const Settings = ({settings, folder}) => html`<p class="muted small">${folder}${settings && ` · ${settings.model} · ${settings.replicas} × ${settings.engine} · ${settings.groups_per_batch} groups of ${settings.group_size} · max_staleness ${settings.max_staleness}`}</p>`;

export function Runs({runs}) {
  const rows = runs.map(run => html`<tr key=${run.name} class="link" onClick=${() => go(run.name)}>
    <td><a href=${link(run.name)}>${run.name}</a></td><td class="text">${run.error ? html`<span title=${run.error}>unreadable</span>` : run.active ? 'running' : 'not running'}</td>
    <td>${run.now.step ?? 0}${run.now.steps ? ' / ' + run.now.steps : ''}</td><td>${fixed(run.now.reward)}</td><td class="text"><${Spark} values=${run.now.rewards || []} width=${120} height=${22} /></td>
    <td>${count(run.now.trained_tokens_per_s)}</td><td>${run.now.staleness == null ? DASH : run.now.staleness.toFixed(2)}</td><td>${run.settings?.max_staleness ?? DASH}</td>
    <td>${share(run.now.learner_idle)}</td><td>${share(run.now.rollout_idle)}</td><td>${share(run.now.alike)}</td></tr>`);
  return html`<h1>${runs.length} runs</h1><div class="card scroll"><table>
    <thead><tr><th>run</th><th class="text">state</th><th>step</th><th>reward</th><th class="text">last steps</th><th>trained tok/s</th><th>staleness</th><th>bound</th><th>learner waits</th><th>slots idle</th><th>alike</th></tr></thead>
    <tbody>${rows}</tbody></table></div><${Comparison} runs=${runs} chosen=${runs.map(run => run.name)} />`;
}
