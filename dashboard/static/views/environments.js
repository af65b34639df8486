// How environments do, what their calls and tools take, and what failed.
import {html, useRun, link, count, share, fixed, duration, ago, Problem} from '/static/lib.js';
import {Bars} from '/static/bars.js';

export function Environments({run}) {
  const {data, error} = useRun(run.name, 'environments');
  if (error) return html`<${Problem} error=${error} />`;
  if (!data) return html`<p class="muted">reading</p>`;
  const several = data.environments.length > 1, ended = Object.values(data.outcomes).reduce((a, b) => a + b, 0);
  return html`<h1>${run.name}</h1>
    <div class="card scroll"><h2>episodes that left a trajectory</h2><table><thead><tr><th>environment</th><th>episodes</th><th>reward</th><th>turns</th><th>tokens sampled</th><th>time</th><th class="text">outcomes</th></tr></thead><tbody>
      ${data.environments.map(row => html`<tr key=${row.env}><td><a href=${link(run.name, 'trajectories', '', {env: row.env})}>${row.env}</a></td><td>${row.episodes}</td><td>${fixed(row.reward)}</td><td>${fixed(row.turns, 2)}</td><td>${count(row.sampled)}</td><td>${duration(row.seconds)}</td>
        <td class="text">${Object.entries(row.outcomes).map(([name, n], i) => html`${i > 0 && ', '}<a key=${name} href=${link(run.name, 'trajectories', '', {env: row.env, outcome: name})}>${n} ${name}</a>`)}</td></tr>`)}</tbody></table>
      ${!data.environments.length && html`<p class="muted">none yet</p>`}</div>
    ${Object.keys(data.outcomes).length > 0 && html`<${Bars} title="episodes of the training, by outcome" label="outcome" rows=${Object.entries(data.outcomes).map(([name, n]) => ({name, parts: [{value: n, color: name.startsWith('failed_') ? 'var(--red)' : name === 'truncated' ? 'var(--orange)' : 'var(--green)'}], text: `${count(n)}, ${share(n / ended)}`}))} />`}
    ${data.calls.length > 0 && html`<div class="card scroll"><h2>calls of the newest ${data.newest} trajectories</h2><table><thead><tr><th>call</th>${several && html`<th class="text">environment</th>`}<th>calls</th><th>median</th><th>95 %</th><th>of the episodes' time</th><th>failed</th></tr></thead><tbody>
      ${data.calls.map((row, i) => html`<tr key=${i}><td>${row.tool ? `tool ${row.tool}` : row.what}</td>${several && html`<td class="text">${row.env}</td>`}<td>${row.calls}</td><td>${duration(row.p50)}</td><td>${duration(row.p95)}</td><td>${share(row.share)}</td><td>${row.errors || ''}</td></tr>`)}</tbody></table>
      <p class="legend-note">A step of the environment includes the tools that it calls.</p></div>`}
    <div class="card scroll"><h2>failed episodes</h2>${data.failures.length ? html`<table><thead><tr><th>episode</th><th class="text">group</th><th class="text">failed by</th><th class="text">what was said</th><th>tokens</th><th>when</th></tr></thead><tbody>
      ${data.failures.map(row => html`<tr key=${row.id}><td>${row.id}</td><td class="text"><a href=${link(run.name, 'group', row.group)}>${row.group}</a></td><td class="text">${row.reason}</td><td class="text wrap">${row.detail}</td><td>${row.tokens}</td><td>${ago(row.time)}</td></tr>`)}</tbody></table>` : html`<p class="muted">none among the newest 20,000 episodes</p>`}</div>`;
}
