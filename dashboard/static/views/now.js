// What goes on: one run, or all runs of a folder beside each other.
import {html, useRun, link, go, count, share, fixed, duration, ago, recorded, Tile, Spark, Problem, DASH} from '/static/lib.js';
import {Comparison, Curve} from '/static/views/curves.js';
import {Advice, Alarm} from '/static/views/advice.js';

const change = now => now.reward == null || now.first_reward == null ? '' :
  `${now.reward >= now.first_reward ? '+' : '−'}${Math.abs(now.reward - now.first_reward).toFixed(3)} since the first step`;

function Busy({name, idle, text}) {
  if (idle == null) return null;
  return html`<div class="busy"><span>${name}</span><div class="track" role="img" aria-label="${name} ${share(1 - idle)} busy"><div class="fill" style=${{width: `${100 * (1 - idle)}%`}}></div></div><span>${share(1 - idle)} <span class="muted">${text}</span></span></div>`;
}

export function Now({run}) {
  const {data, error} = useRun(run.name, 'now');
  if (error && !data) return html`<${Problem} error=${error} />`;
  if (!data) return html`<p class="muted">reading</p>`;
  const now = data.now, alerts = data.alerts.map(one => html`<${Alarm} key=${one.rule} alert=${one} when=${ago(one.time)} />`);
  const newest = data.newest && html`<${Newest} run=${run.name} one=${data.newest} />`, settings = html`<${Settings} data=${data} />`;
  if (now.step == null) return html`<h1>${run.name}</h1><div class="card">No step yet. ${data.active ? 'The run is starting, or plays its first episodes.' : 'The run is not active.'}</div>${alerts}<${Evaluations} all=${data.evaluations} />${newest}${settings}`;
  const stopped = !data.active && now.steps && now.step < now.steps;
  return html`<h1>${run.name}</h1>${data.problem && html`<${Problem} error=${data.problem} />`}
    ${stopped && html`<div class="card warn">${recorded?.active ? `The run was at step ${now.step} of ${now.steps} as this file was written, and went on.` : `This run stopped at step ${now.step} of ${now.steps}.`}</div>`}
    ${alerts}
    ${now.failures && html`<div class="card bad">In the whole run ${now.failures}: the tracebacks are in <code>logs/worker-*.log</code>.</div>`}
    <div class="tiles">
      <${Progress} all=${data.evaluations} />
      <${Tile} name="step" value=${`${now.step}${now.steps ? ' / ' + now.steps : ''}`} note=${data.active && now.left_s ? duration(now.left_s) + ' left' : `${duration(now.seconds)}, last step ${ago(now.time)}`} />
      <${Tile} name="reward of the batch" value=${fixed(now.reward)} note=${change(now)} />
      <${Tile} name="trained tokens/s" value=${count(now.trained_tokens_per_s)} note=${`generated ${count(now.generated_tokens_per_s)}`} />
      <${Tile} name="staleness" value=${now.staleness == null ? DASH : now.staleness.toFixed(2)} note=${`at most ${now.staleness_max ?? DASH}, bound ${now.bound ?? DASH}`} />
      <${Tile} name="a step and its push" value=${duration(now.cycle_s)} note=${`median of ${now.over}`} />
      <${Tile} name="effective sample size" value=${fixed(now.ess)} note=${now.mismatch_max == null ? 'mismatch: nothing compared' : `mismatch ${now.mismatch_max.toExponential(1)} nats`} />
    </div>
    <${Advice} run=${run} alerts=${data.alerts} />
    <${Curve} run=${run} title="reward" />
    <div class="card"><${Busy} name="learner" idle=${now.learner_idle} text="busy" /><${Busy} name="rollouts" idle=${now.rollout_idle} text="of the slots taken" />
      <p class="legend-note">over the last ${now.over} steps. The learner is idle while it waits for a batch; a slot is idle while the staleness bound lets no group start.${now.alike_all && ` In the whole run ${now.alike_all}.`}</p></div>
    <${Evaluations} all=${data.evaluations} />
    ${newest}${settings}`;
}

const bySuite = all => [...new Set(all.map(one => one.suite))].map(suite => [suite, all.filter(one => one.suite === suite).sort((a, b) => a.step - b.step)]);
const error = one => one.reward_stderr == null ? '' : ` ± ${one.reward_stderr.toFixed(3)}`;

// Of each suite from its first evaluation to its last.
const Progress = ({all}) => bySuite(all).map(([suite, several]) => {
  const first = several[0], last = several[several.length - 1], from = suite ? `, ${suite}` : '';
  if (several.length === 1) return html`<${Tile} key=${suite} wide name=${`reward, ${last.label}${from}`} value=${fixed(last.reward_mean)} note=${`${error(last).trim()} on ${last.tasks} held-out tasks`} />`;
  const grown = last.reward_mean - first.reward_mean, off = Math.hypot(first.reward_stderr, last.reward_stderr);
  return html`<${Tile} key=${suite} wide name=${`reward, ${first.label} → ${last.label}${from}`} value=${`${fixed(first.reward_mean)} → ${fixed(last.reward_mean)}`} note=${`${grown < 0 ? '−' : '+'}${Math.abs(grown).toFixed(3)} ± ${off.toFixed(3)} on ${last.tasks} held-out tasks`} />`;
});

function Evaluations({all}) {
  if (!all.length) return null;
  const passes = all.some(one => one.samples > 1);
  const row = (name, version, one, took) => html`<tr key=${name + version}><td>${name}</td><td>${version}</td><td>${one.tasks}</td><td>${fixed(one.reward_mean)}${error(one)}</td>
    ${passes && html`<td class="text">${Object.entries(one.pass_at).map(([k, at]) => `pass@${k} ${at.mean.toFixed(3)}`).join(', ')}</td>`}
    <td class="text">${Object.entries(one.outcomes).map(([name, n]) => `${n} ${name}`).join(', ')}</td><td>${took}</td></tr>`;
  return html`<div class="card scroll"><h2>evaluations, on tasks that are not trained on</h2><table><thead><tr><th>of</th><th>version</th><th>tasks</th><th>reward</th>${passes && html`<th class="text">pass@k</th>`}<th class="text">episodes</th><th>took</th></tr></thead><tbody>
    ${all.map(one => [row(one.suite ? `${one.label}, ${one.suite}` : one.label, one.versions.length ? one.versions.join(', ') : one.version, one, duration(one.seconds)),
      ...Object.entries(one.environments).map(([name, score]) => row(`– ${name}`, '', score, ''))])}</tbody></table></div>`;
}

const Newest = ({run, one}) => html`<div class="card">newest trajectory: <a href=${link(run, 'trajectory', one.id)}>${one.id}</a>
  <span class="muted"> ${one.env}, ${one.task}: reward ${count(one.reward)}, ${one.outcome}, ${one.turns} turn${one.turns === 1 ? '' : 's'}, ${one.sampled} tokens, ${duration(one.seconds)}</span></div>`;

const Settings = ({data: {settings, folder, yaml}}) => html`<p class="muted small">${folder}${settings && ` · ${settings.model} · ${settings.replicas} × ${settings.engine} · ${settings.groups_per_batch} ${settings.groups_per_batch === 1 ? 'group' : 'groups'} of ${settings.group_size} · max_staleness ${settings.max_staleness}`}</p>
  <details class="card"><summary>config.yaml</summary><pre class="log">${yaml}</pre></details>`;

export function Runs({listed: {runs, folder, left_out: older}}) {
  const rows = runs.map(run => html`<tr key=${run.name} class="link" onClick=${() => go(run.name)}>
    <td><a href=${link(run.name)}>${run.name}</a></td><td class="text">${run.error ? html`<span title=${run.error}>unreadable</span>` : run.active ? 'running' : 'not running'}</td>
    <td>${run.now.step ?? 0}${run.now.steps ? ' / ' + run.now.steps : ''}</td><td>${fixed(run.now.reward)}</td><td class="text"><${Spark} values=${run.now.rewards || []} width=${120} height=${22} /></td>
    <td>${count(run.now.trained_tokens_per_s)}</td><td>${run.now.staleness == null ? DASH : run.now.staleness.toFixed(2)}</td><td>${run.settings?.max_staleness ?? DASH}</td>
    <td>${share(run.now.learner_idle)}</td><td>${share(run.now.rollout_idle)}</td><td>${share(run.now.alike)}</td></tr>`);
  const others = older > 0 && html`<p class="muted" id="left-out">These are the newest; ${older} older ${older === 1 ? 'run is' : 'runs are'} left out. To see one: <code>slipstream dash ${folder}/NAME</code></p>`;
  return html`<h1>${runs.length} runs</h1>${others}<div class="card scroll"><table>
    <thead><tr><th>run</th><th class="text">state</th><th>step</th><th>reward</th><th class="text">last steps</th><th>trained tok/s</th><th>staleness</th><th>bound</th><th>learner waits</th><th>slots idle</th><th>alike</th></tr></thead>
    <tbody>${rows}</tbody></table></div><${Comparison} runs=${runs} chosen=${runs.map(run => run.name)} />`;
}
